# SPDX-License-Identifier: Apache-2.0
"""Reconciling with a view, called by hand: what a server takes up, keeps, lets go and deletes."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cremant.completion.replica import Sealing
from cremant.log.memory import MemoryLog
from cremant.model.cluster import ClusterView, LiveInstance, Role
from cremant.model.errors import NoResource, NotFound
from cremant.model.names import epoch_topic
from cremant.model.offsets import Position
from cremant.model.segments import Copy, ReplicaState, SegmentMetadata, StoreState
from cremant.model.table import IndexConfig
from cremant.segment.build import SegmentSpec, build_segment
from cremant.segment.index import INDEX_FILE
from cremant.segment.reader import derive, open_segment, reindexed, verify_index
from cremant.server import hosting as hosting_module
from cremant.server import verifying
from cremant.server.files import ServerFiles
from cremant.server.hosting import Hosting
from cremant.server.steps import as_committed
from cremant.server.table import HostedSegment, HostedTable, SegmentPart
from cremant.wire.messages import TailRequest

INCARNATION = "00000000000000aa"
END = Position(log_offset=3, epoch=1, generation=1, next_offset=100)
EMPTY = ClusterView(version=9, controller_nonce="n")


class World:
    def __init__(self, kit: Any, root: Path) -> None:
        self.kit = kit
        self.root = root
        self.log = MemoryLog(lambda: int(time.time() * 1000))
        self.epochs = kit.EpochLog(self.log).create()
        self.epochs.write(100)
        self.files = ServerFiles(root)
        self.hosting = Hosting(self.files, self.log)
        self.hosting.instance = "me"
        self.first: SegmentMetadata = kit.open_segment_metadata(0, 0, kit.START, ("me",))
        self.second: SegmentMetadata = kit.open_segment_metadata(0, 1, END, ("me",))

    def seal_first(self) -> SegmentMetadata:
        """The first segment, complete in this server's directory."""
        view = self.kit.view_of(self.kit.table_record(), [self.first], [])
        self.hosting.reconcile(view)
        partition = self.hosting.partitions()[0]
        while partition.turn(self.log, 1):
            pass
        rows = [part.batch for part in partition.tail.snapshot.between(0, 100)]
        scratch = self.files.new_scratch()
        built = build_segment(scratch, rows, SegmentSpec(self.kit.SCHEMA, "ts"), fsync=False)
        self.files.adopt(derive(scratch, self.first.name, built.checksum, fsync=False), self.directory)
        return as_committed(self.first, END, built, None)

    @property
    def directory(self) -> Path:
        return self.files.segment_directory("trips", INCARNATION, self.first.name)

    def restart(self) -> None:
        for partition in self.hosting.partitions():
            partition.close()
        self.hosting = Hosting(self.files, self.log)
        self.hosting.instance = "me"

    def view(self, *sealed: SegmentMetadata, **record: Any) -> ClusterView:
        view: ClusterView = self.kit.view_of(self.kit.table_record(**record), [self.second], list(sealed))
        return view


@pytest.fixture
def world(kit: Any, tmp_path: Path) -> Iterator[World]:
    made = World(kit, tmp_path / "server")
    yield made
    for partition in made.hosting.partitions():
        partition.close()
    made.files.close()


def states(world: World) -> dict[str, ReplicaState]:
    return {report.segment: report.state for report in world.hosting.report().segments}


def test_a_restart_finds_its_sealed_segments_and_starts_its_tail_behind_them(world: World) -> None:
    done = world.seal_first()
    world.restart()
    assert not world.hosting.ready()[0]
    world.hosting.reconcile(world.view(done))
    [partition] = world.hosting.partitions()
    assert partition.tail.snapshot.first_offset == 100
    assert states(world) == {done.name: ReplicaState.ONLINE, world.second.name: ReplicaState.CONSUMING}
    assert not world.hosting.ready()[0]
    while partition.turn(world.log, 1):
        pass
    assert world.hosting.ready() == (True, "")
    assert partition.visible.max_ingestion_ms == done.max_ingestion_ms


def test_a_local_segment_with_other_content_than_the_metadata_is_not_used(world: World) -> None:
    done = msgspec.structs.replace(world.seal_first(), checksum="0" * 32)
    world.restart()
    world.hosting.reconcile(world.view(done))
    assert states(world)[done.name] is ReplicaState.ERROR
    assert not world.directory.exists()


def test_damage_found_by_the_background_check_takes_the_segment_out_of_service(world: World) -> None:
    done = world.seal_first()
    world.restart()
    world.hosting.reconcile(world.view(done))
    data = bytearray((world.directory / "rows.parquet").read_bytes())
    data[len(data) // 3] ^= 0xFF
    (world.directory / "rows.parquet").write_bytes(data)
    table = world.hosting.tables["trips"]
    world.hosting.verifier._verify(table, table.segments[done.name])
    assert states(world)[done.name] is ReplicaState.ERROR
    assert "rows.parquet" in (table.segments[done.name].error or "")


def test_a_segment_that_cannot_be_read_for_want_of_file_handles_is_not_thrown_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, hosted = _hosted(world)

    def exhausted(sealed: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(verifying, "verify", exhausted)
        world.hosting.verifier._look_after(table, hosted)
    assert (hosted.sealed is not None, hosted.verified) == (True, False)
    assert (world.directory / "rows.parquet").exists()
    world.hosting.verifier._look_after(table, hosted)
    assert hosted.verified


def test_a_bug_in_the_look_at_one_segment_does_not_end_the_looks_at_all(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, hosted = _hosted(world)
    trouble = [ValueError("a bug")]

    def fails(sealed: Any) -> None:
        if trouble:
            raise trouble.pop()

    monkeypatch.setattr(verifying, "verify", fails)
    monkeypatch.setattr(verifying, "LOOK_EVERY_S", 0.01)
    thread = threading.Thread(target=world.hosting.verifier._verify_forever, daemon=True)
    thread.start()
    world.kit.eventually(lambda: hosted.verified)
    world.hosting._stopping.set()
    thread.join(10)


def _hosted(world: World, **record: Any) -> tuple[HostedTable, HostedSegment]:
    """The first segment, sealed, after a restart."""
    done = world.seal_first()
    world.restart()
    world.hosting.reconcile(world.view(done, **record))
    table = world.hosting.tables["trips"]
    return table, table.segments[done.name]


def test_a_damaged_index_is_built_anew_and_the_segment_stays(world: World) -> None:
    table, hosted = _hosted(world)
    path = world.directory / INDEX_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    marker = (world.directory / "segment.json").stat()
    assert world.hosting.verifier._look_after(table, hosted)
    assert hosted.sealed is not None
    assert hosted.sealed.index is not None
    verify_index(hosted.sealed)
    assert path.read_bytes() == whole
    assert (hosted.verified, hosted.error) == (True, None)
    assert (world.directory / "segment.json").stat() == marker
    assert not world.hosting.verifier._look_after(table, hosted)


def test_other_indexes_of_a_live_table_reach_its_sealed_segments(world: World) -> None:
    table, hosted = _hosted(world)
    world.hosting.verifier._look_after(table, hosted)
    wanted = IndexConfig(inverted=("fare",), bloom=("city",))
    part = table.resolve((hosted.metadata.name,), ()).segments[0]
    assert isinstance(part, SegmentPart)
    before = hosted.sealed
    world.hosting.reconcile(world.view(hosted.metadata, indexes=wanted))
    assert hosted.sealed is before
    assert world.hosting.verifier._look_after(table, hosted)
    assert hosted.sealed is not None
    assert hosted.sealed.index is not None
    assert hosted.sealed.index.wanted == wanted
    assert hosted.sealed.batches == part.sealed.batches
    assert part.sealed.index is not None  # a query that was on its way keeps what it had
    assert part.sealed.index.wanted == IndexConfig()
    assert sum(batch.num_rows for batch in part.batches(table.alignment)) == 100
    assert not world.hosting.verifier._look_after(table, hosted)
    assert open_segment(world.directory, wanted).index is not None


def test_an_index_that_cannot_be_written_now_is_tried_again_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, hosted = _hosted(world)
    world.hosting.verifier._look_after(table, hosted)
    wanted = IndexConfig(range=("fare",))
    world.hosting.reconcile(world.view(hosted.metadata, indexes=wanted))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("cremant.segment.index.build_index", full)
        assert world.hosting.verifier._look_after(table, hosted)
    assert hosted.sealed is not None
    assert hosted.sealed.index is not None
    assert hosted.sealed.index.wanted == IndexConfig()
    assert states(world)[hosted.metadata.name] is ReplicaState.ONLINE
    assert hosted.index_retry_at_s > time.monotonic()
    assert not world.hosting.verifier._look_after(table, hosted)
    hosted.index_retry_at_s = 0.0
    assert world.hosting.verifier._look_after(table, hosted)
    assert hosted.sealed.index.wanted == wanted


def test_a_segment_that_goes_while_its_index_is_built_does_not_come_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, hosted = _hosted(world)
    world.hosting.verifier._look_after(table, hosted)
    sealed = hosted.sealed
    assert sealed is not None

    def gone(*args: Any, **more: Any) -> Any:
        made = reindexed(*args, **more)
        world.hosting.reconcile(EMPTY)
        return made

    monkeypatch.setattr(verifying, "reindexed", gone)
    world.hosting.verifier._reindex(table, hosted, sealed)
    assert hosted.sealed is sealed
    assert table.segments == {}


def test_a_segment_that_left_the_view_is_deleted_after_a_grace(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    done = world.seal_first()
    world.restart()
    world.hosting.reconcile(world.view(done))
    world.hosting.tables["trips"].segments[done.name].verified = True
    assert [said.checksum for said in world.hosting.report().segments if said.segment == done.name] == [done.checksum]
    world.hosting.reconcile(world.view())
    assert done.name in world.hosting.tables["trips"].segments
    leaving = [(said.state, said.checksum) for said in world.hosting.report().segments if said.segment == done.name]
    assert leaving == [(ReplicaState.ONLINE, None)], "a copy that goes in a moment must not be counted"
    monkeypatch.setattr(hosting_module, "SEGMENT_GRACE_S", 0.0)
    world.hosting.reconcile(world.view())
    assert done.name not in world.hosting.tables["trips"].segments
    assert not world.directory.exists()


def _elsewhere(
    world: World,
    done: SegmentMetadata,
    *copies: str,
    live: tuple[str, ...] = (),
    url: str | None = None,
    said: ReplicaState | None = ReplicaState.ONLINE,
) -> ClusterView:
    """The segment's replicas are others now, of which `copies` have it. Those of them that live say `said` of it."""
    assert done.checksum is not None
    copy = Copy(checksum=done.checksum, verified_at_ms=1)
    state = StoreState.STORED if url else StoreState.NONE
    moved = msgspec.structs.replace(
        done, replicas=("a", "b"), copies=dict.fromkeys(copies, copy), store_url=url, store_state=state
    )
    instances = tuple(
        LiveInstance(id=name, role=Role.SERVER, url=f"http://{name}", live=name in live) for name in ("a", "b", "me")
    )
    view = world.view(moved)
    external = {} if said is None else {done.name: {name: said for name in copies if name in live}}
    tables = {name: msgspec.structs.replace(table, external=external) for name, table in view.tables.items()}
    return msgspec.structs.replace(view, instances=instances, tables=tables)


@pytest.mark.parametrize("returns", [True, False])
def test_a_segment_that_went_elsewhere_stays_while_no_other_copy_is_known(
    world: World, monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    """Also one that went while this server was down: it was the only holder, and the others have not got it yet.
    A holder that came back may have lost its disk: it counts when it serves the segment again."""
    monkeypatch.setattr(hosting_module, "SEGMENT_GRACE_S", 0.0)
    done = world.seal_first()
    world.restart()
    if not returns:
        world.hosting.reconcile(world.view(done))
    came_back = [_elsewhere(world, done, "a", live=("a",), said=said) for said in (None, ReplicaState.OFFLINE)]
    for view in (_elsewhere(world, done, "me"), _elsewhere(world, done, "me", "a", live=("b",)), *came_back):
        for _ in range(3):
            world.hosting.reconcile(view)
        assert world.directory.exists()
        world.hosting.tables["trips"].segments[done.name].verified = True
        [said] = [said for said in world.hosting.report().segments if said.segment == done.name]
        # Others get it from here, and repair counts on it.
        assert (said.state, said.checksum) == (ReplicaState.ONLINE, done.checksum)
    for _ in range(2):
        world.hosting.reconcile(_elsewhere(world, done, "a", live=("a",)))
    assert not world.directory.exists()
    assert done.name not in world.hosting.tables["trips"].segments


def test_an_object_in_the_store_is_another_copy_and_a_deleted_segment_needs_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting_module, "SEGMENT_GRACE_S", 0.0)
    done = world.seal_first()
    saved = {path.name: path.read_bytes() for path in world.directory.iterdir()}
    for view in (_elsewhere(world, done, url="file:///x"), world.view()):
        world.directory.mkdir(parents=True, exist_ok=True)
        for name, content in saved.items():
            (world.directory / name).write_bytes(content)
        world.restart()
        for _ in range(3):
            world.hosting.reconcile(view)
        assert not world.directory.exists()


def test_the_last_copies_of_a_table_with_no_other_part_here_stay(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting_module, "SEGMENT_GRACE_S", 0.0)
    done = world.seal_first()
    world.second = world.kit.open_segment_metadata(0, 1, END, ("a", "b"))
    world.restart()
    for _ in range(3):
        world.hosting.reconcile(_elsewhere(world, done, "me", live=("a", "b")))
    assert world.directory.exists()
    assert states(world) == {done.name: ReplicaState.ONLINE}
    for _ in range(2):
        world.hosting.reconcile(_elsewhere(world, done, "a", live=("a",)))
    assert world.hosting.tables == {}
    assert not world.directory.parent.exists()


def test_a_partition_that_moved_elsewhere_is_consumed_and_served_through_a_grace(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries routed by an older view still ask for it; a partition that comes back meanwhile just stays."""
    mine = world.kit.view_of(world.kit.table_record(), [world.first], [])
    other = world.kit.open_segment_metadata(0, 0, world.kit.START, ("another",))
    moved = world.kit.view_of(world.kit.table_record(), [other], [])
    world.hosting.reconcile(mine)
    [partition] = world.hosting.partitions()
    for view in (moved, mine, moved):
        world.hosting.reconcile(view)
        assert world.hosting.partitions() == [partition]
    world.epochs.write(10)
    while partition.turn(world.log, 1):
        pass
    request = (TailRequest(partition=0, from_offset=0),)
    assert [tail.covered.next for tail in world.hosting.tables["trips"].resolve((), request).tails] == [110]
    monkeypatch.setattr(hosting_module, "SEGMENT_GRACE_S", 0.0)
    world.hosting.reconcile(moved)
    assert world.hosting.partitions() == []
    world.hosting.reconcile(moved)
    assert world.hosting.tables == {}
    world.hosting.reconcile(mine)
    assert world.hosting.partitions() != []


def test_a_segment_that_the_view_does_not_know_yet_is_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Committed by this server a moment ago; the view is older than the answer."""
    monkeypatch.setattr(hosting_module, "SEGMENT_GRACE_S", 0.0)
    done = world.seal_first()
    table = world.hosting.tables["trips"]
    table.install(done, open_segment(world.directory), verified=True)
    old_view = world.kit.view_of(world.kit.table_record(), [world.first], [])
    for _ in range(3):
        world.hosting.reconcile(old_view)
    assert table.segments[done.name].sealed is not None
    assert world.directory.exists()


def test_another_incarnation_starts_from_nothing_and_the_old_bytes_go(world: World) -> None:
    done = world.seal_first()
    world.restart()
    world.hosting.reconcile(world.view(done))
    again = "00000000000000bb"
    world.log.delete_topic(epoch_topic("trips", INCARNATION))
    world.kit.EpochLog(world.log, incarnation=again).create()
    world.hosting.reconcile(world.kit.view_of(world.kit.table_record(incarnation=again), [world.first], []))
    assert world.hosting.tables["trips"].record.incarnation == again
    assert not world.directory.exists()
    assert world.hosting.partitions()[0].tail.snapshot.rows == 0


def test_a_table_that_only_the_view_misses_is_let_go_but_its_bytes_stay_and_are_used_again(world: World) -> None:
    done = world.seal_first()
    world.restart()
    world.hosting.reconcile(world.view(done))
    world.hosting.reconcile(EMPTY)
    assert world.hosting.tables == {}
    assert world.directory.exists()
    world.hosting.reconcile(world.view(done))
    assert states(world)[done.name] is ReplicaState.ONLINE


def test_bytes_of_a_table_that_was_dropped_while_the_server_was_down_go(world: World) -> None:
    world.seal_first()
    world.restart()
    world.log.delete_topic(epoch_topic("trips", INCARNATION))
    world.hosting.reconcile(EMPTY)
    assert not world.directory.parent.exists()


def test_a_schema_change_in_the_view_reaches_the_scan(world: World) -> None:
    done = world.seal_first()
    world.restart()
    view = world.view(done)
    world.hosting.reconcile(view)
    table = view.tables["trips"]
    nulls = msgspec.structs.replace(table.record.config, null_handling=True)
    record = msgspec.structs.replace(table.record, config=nulls, config_version=2)
    changed = msgspec.structs.replace(table, record=record)
    world.hosting.reconcile(msgspec.structs.replace(view, version=2, tables={"trips": changed}))
    assert "$isNull.city" in world.hosting.tables["trips"].alignment.schema.names


def test_two_processes_do_not_share_a_data_directory(world: World) -> None:
    with pytest.raises(NoResource, match="another server runs on"):
        ServerFiles(world.root)


def test_a_consuming_replica_that_is_reset_begins_again_from_its_segment(world: World) -> None:
    view = world.kit.view_of(world.kit.table_record(), [world.first], [])
    world.hosting.reconcile(view)
    (stopped,) = world.hosting.partitions()
    while stopped.turn(world.log, 1):
        pass
    stopped._stop("E-4: as if a rule did not hold")
    world.hosting.reconcile(view)
    assert world.hosting.partitions() == [stopped], "it stays stopped until somebody asks"
    world.hosting.reset("trips", world.first.name)
    world.hosting.reconcile(view)
    (fresh,) = world.hosting.partitions()
    assert fresh is not stopped
    while fresh.turn(world.log, 1):
        pass
    assert (fresh.tail.snapshot.rows, fresh.error) == (100, None)
    world.hosting.reconcile(view)
    assert world.hosting.partitions() == [fresh], "once"


def test_a_sealed_replica_that_is_reset_is_read_in_full_again(world: World) -> None:
    done = world.seal_first()
    world.restart()
    world.hosting.reconcile(world.view(done))
    table = world.hosting.tables["trips"]
    hosted = table.segments[done.name]
    hosted.verified = True
    sealing = table.sealings[done.name] = Sealing(done.name, fetch_after_ms=10**12)
    assert not world.hosting.verifier._look_after(table, hosted)
    world.hosting.reset("trips", done.name)
    assert (hosted.verified, sealing.fetch_after_ms) == (False, 0)
    assert world.hosting.verifier._look_after(table, hosted)
    assert hosted.verified


def test_a_copy_counts_once_it_was_read_in_full(world: World) -> None:
    done = world.seal_first()
    world.restart()
    world.hosting.reconcile(world.view(done))
    table = world.hosting.tables["trips"]
    (said,) = [one for one in world.hosting.report().segments if one.segment == done.name]
    assert (said.state, said.checksum) == (ReplicaState.ONLINE, None)
    world.hosting.verifier._look_after(table, table.segments[done.name])
    (said,) = [one for one in world.hosting.report().segments if one.segment == done.name]
    assert (said.state, said.checksum) == (ReplicaState.ONLINE, done.checksum)


def test_only_what_is_here_can_be_reset(world: World) -> None:
    world.hosting.reconcile(world.kit.view_of(world.kit.table_record(), [world.first], []))
    for table, segment in (("another", world.first.name), ("trips", "nothing")):
        with pytest.raises(NotFound, match="does not exist here"):
            world.hosting.reset(table, segment)
