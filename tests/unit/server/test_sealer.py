# SPDX-License-Identifier: Apache-2.0
"""The driver of sealing with a scripted controller and a real store: the paths that kills alone do not reach."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cremant.completion import replica
from cremant.log.memory import MemoryLog
from cremant.model.errors import Unavailable
from cremant.model.offsets import Position
from cremant.model.segments import ReplicaState, SegmentMetadata, SegmentStatus, StoreState
from cremant.segment.build import Built, SegmentSpec, build_segment
from cremant.segment.cuts import Cut
from cremant.segment.tail import SpillQuota
from cremant.server.fetching import SegmentFetcher
from cremant.server.files import ServerFiles
from cremant.server.partition import Partition, PartitionId
from cremant.server.sealing import Sealer
from cremant.server.steps import Task, as_committed
from cremant.server.table import HostedSegment, HostedTable
from cremant.server.uploads import Uploads
from cremant.store.deepstore import DirectoryStore, segment_object
from cremant.wire.messages import (
    CommitEnd,
    CommitEndReply,
    CompletionStatus,
    SegmentConsumed,
    SegmentConsumedReply,
    TailRequest,
)

INCARNATION = "00000000000000aa"


class Controller:
    """Answers from a list, and keeps what it was told."""

    id = "me"

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.heard: list[Any] = []

    def call(self, path: str, message: Any, reply_type: type[Any], timeout_ms: int = 0) -> Any:
        self.heard.append(message)
        answer = self.script.pop(0) if self.script else Unavailable("nobody there")
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, reply_type)
        return answer

    def poke(self) -> None:
        pass

    def cluster_now_ms(self) -> int:
        return int(time.time() * 1000)


class World:
    def __init__(self, kit: Any, root: Path, flush_rows: int = 10**9) -> None:
        self.kit = kit
        self.log = MemoryLog(lambda: int(time.time() * 1000))
        self.epochs = kit.EpochLog(self.log).create()
        self.files = ServerFiles(root / "server")
        self.store = DirectoryStore(root / "store")
        self.controller = Controller()
        self.table = HostedTable(kit.table_record(flush_rows))
        own = PartitionId("trips", INCARNATION, 0)
        self.partition = Partition(own, kit.START, self.files.tail_directory(own), SpillQuota())
        self.table.partitions[0] = self.partition
        self.opened: SegmentMetadata = kit.open_segment_metadata(0, 0, kit.START, ("me",))
        self.table.open[0] = self.opened
        tables = {"trips": self.table}
        fetcher = SegmentFetcher("me", self.store, lambda: None, fsync=False)
        member: Any = self.controller
        self.uploads = Uploads(tables, self.files, self.store, member, has_store=True)
        self.sealer = Sealer(tables, self.files, member, fetcher, self.uploads, fsync=False)

    def consume(self) -> None:
        while self.partition.turn(self.log, int(time.time() * 1000)):
            pass

    def seal_until(self, condition: Callable[[], Any]) -> None:
        def look() -> Any:
            self.sealer.look()
            return condition()

        self.kit.eventually(look)

    def committed_elsewhere(self, root: Path, end: Position, *, sorted_column: str | None = None) -> SegmentMetadata:
        """Another replica sealed the rows of its own log, and stored them."""
        snapshot = self.partition.tail.snapshot
        rows = [part.batch for part in snapshot.between(0, end.next_offset)]
        built: Built = build_segment(
            root / "other", rows, SegmentSpec(self.kit.SCHEMA, "ts", sorted_column), fsync=False
        )
        url = self.store.put(segment_object("trips", INCARNATION, self.opened.name, 1, built.file_checksum), built.path)
        return as_committed(self.opened, end, built, url)

    def offsets(self, segments: tuple[str, ...], first: int) -> list[int] | None:
        found = self.table.resolve(segments, (TailRequest(partition=0, from_offset=first),))
        if found.missing or found.behind:
            return None
        batches = [batch for part in found.segments for batch in part.batches(found.alignment)]
        batches += [batch for tail in found.tails for part in tail.sealed for batch in part.batches(found.alignment)]
        batches += [batch for tail in found.tails for batch in tail.rows.batches(found.alignment)]
        return sorted(offset for batch in batches for offset in batch[0].to_pylist())


@pytest.fixture
def make_world(kit: Any, tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(**options: Any) -> World:
        made.append(World(kit, tmp_path, **options))
        return made[-1]

    yield make
    for world in made:
        world.sealer.stop()
        world.uploads.stop()
        world.partition.close()
        world.files.close()


def test_a_commit_whose_reply_is_lost_is_asked_about_again_and_installed_from_the_view(
    make_world: Any, kit: Any
) -> None:
    world = make_world(flush_rows=100)
    world.epochs.write(100)
    world.epochs.write(30)
    world.consume()
    end = world.partition.closings.wanted_cut(0, world.table.record.config.flush, 0).at
    world.controller.script = [
        SegmentConsumedReply(status=CompletionStatus.COMMIT, end=end, token=1),
        Unavailable("the reply got lost"),
        SegmentConsumedReply(status=CompletionStatus.KEEP, end=end, token=1),
    ]
    world.seal_until(lambda: len(world.controller.heard) >= 3)
    asked, committed, again = world.controller.heard[:3]
    assert isinstance(asked, SegmentConsumed)
    assert asked.reason == "rowLimit"
    assert asked.at == end
    assert isinstance(committed, CommitEnd)
    assert (committed.rows, committed.token) == (100, 1)
    # As far as the rows before the cut go, not those that followed.
    assert committed.mark is not None
    assert (committed.mark.next_offset, committed.mark.max_ingestion_ms) == (100, 1_700_000_000_099)
    assert (committed.mark.source, world.partition.visible.max_ingestion_ms) == ("logAppend", 1_700_000_000_129)
    assert isinstance(again, SegmentConsumed)
    done = as_committed(
        world.opened, end,
        Built(Path("x"), committed.rows, committed.size_bytes, committed.checksum, committed.file_checksum,
              committed.columns, None, None, None),
        committed.store_url,
    )  # fmt: skip
    world.table.segments[done.name] = HostedSegment(done)
    world.table.open[0] = kit.open_segment_metadata(0, 1, end, ("me",))
    assert world.offsets((done.name,), 100) == list(range(130))  # from the tail, already
    world.seal_until(lambda: world.table.segments[done.name].sealed is not None)
    assert world.partition.tail.snapshot.first_offset == 100
    assert world.offsets((done.name,), 100) == world.offsets((), 0) == list(range(130))


def test_what_is_installed_before_the_view_tells_of_the_commit_has_its_metadata(make_world: Any) -> None:
    """The view still says COMMITTING, with the cut and nothing else."""
    world = make_world(flush_rows=100)
    world.epochs.write(100)
    world.consume()
    end = world.partition.closings.last
    world.table.open[0] = msgspec.structs.replace(
        world.opened, status=SegmentStatus.COMMITTING, end=end, end_offset=end.next_offset
    )
    world.controller.script = [
        SegmentConsumedReply(status=CompletionStatus.COMMIT, end=end, token=1),
        CommitEndReply(status=CompletionStatus.COMMIT_SUCCESS),
    ]
    world.seal_until(lambda: world.opened.name in world.table.segments)
    metadata = world.table.segments[world.opened.name].metadata
    assert (metadata.status, metadata.rows) == (SegmentStatus.DONE, 100)
    assert metadata.checksum == world.controller.heard[-1].checksum


def test_an_object_that_was_given_up_is_not_named_by_a_commit_that_waited_for_its_turn(make_world: Any) -> None:
    world = make_world(flush_rows=100)
    world.epochs.write(100)
    world.consume()
    end = world.partition.closings.last
    [(_, sealing)] = world.table.unsealed()
    run = world.sealer.run
    run(Task(world.table, world.opened, sealing, replica.Step(replica.StepKind.BUILD, "build", end=end)))
    run(Task(world.table, world.opened, sealing, replica.Step(
        replica.StepKind.COMMIT, "stored", end=end, token=1, store_state=StoreState.STORED, store_url="file:///gone",
    )))  # fmt: skip
    assert (world.controller.heard, sealing.committed) == ([], False)


def test_a_step_that_fails_again_and_again_waits_longer_although_others_work(make_world: Any) -> None:
    world = make_world(flush_rows=100)
    world.epochs.write(100)
    world.consume()
    [(_, sealing)] = world.table.unsealed()
    key = ("00000000000000aa", world.opened.name)
    beyond = msgspec.structs.replace(world.partition.closings.last, next_offset=1_000)
    build = replica.Step(replica.StepKind.BUILD, "build", end=beyond)
    ask = replica.Step(replica.StepKind.ASK, "ask", cut=Cut(world.partition.closings.last, "rowLimit"))
    world.controller.script = [SegmentConsumedReply(status=CompletionStatus.HOLD)] * 4
    for _ in range(4):
        world.sealer.run(Task(world.table, world.opened, sealing, build))
        world.sealer.run(Task(world.table, world.opened, sealing, ask))
    assert world.sealer._backoffs[key, replica.StepKind.BUILD].attempts == 4
    del world.table.open[0]
    world.sealer.look()
    assert world.sealer._backoffs == {}


def test_nothing_is_begun_for_a_segment_that_was_installed_during_the_look(make_world: Any, tmp_path: Path) -> None:
    world = make_world()
    world.epochs.write(100)
    world.consume()
    done = world.committed_elsewhere(tmp_path, world.partition.closings.last)
    world.partition.tail.drop_below(100)
    world.table.segments[done.name] = HostedSegment(done)
    [(metadata, sealing)] = [pair for pair in world.table.unsealed() if pair[0] is done]
    assert world.sealer._due(world.table, metadata, sealing) is not None
    world.sealer.run(Task(world.table, done, sealing, replica.Step(replica.StepKind.FETCH, "no-rows")))
    assert world.sealer._due(world.table, metadata, sealing) is None


@pytest.mark.parametrize("kind", [replica.StepKind.INSTALL, replica.StepKind.FETCH])
def test_a_disk_that_fails_is_said_to_be_one_and_no_fault_of_the_rows(
    make_world: Any, tmp_path: Path, kind: replica.StepKind
) -> None:
    world = make_world()
    world.epochs.write(100)
    world.consume()
    end = world.partition.closings.last
    done = world.committed_elsewhere(tmp_path, end)
    world.table.segments[done.name] = HostedSegment(done)
    sealing = world.table.sealings.setdefault(done.name, replica.Sealing(done.name))
    world.sealer.run(Task(world.table, done, sealing, replica.Step(replica.StepKind.BUILD, "own-rows", end=end)))
    (tmp_path / "server" / "segments").rmdir()
    (tmp_path / "server" / "segments").touch()  # no directory can be made there
    world.sealer.run(Task(world.table, done, sealing, replica.Step(kind, "same")))
    assert "failed on this server's disk" in world.table.problems[done.name]
    assert sealing.build_failures == 0


def test_a_refused_commit_is_never_installed(make_world: Any) -> None:
    world = make_world(flush_rows=100)
    world.epochs.write(100)
    world.consume()
    end = world.partition.closings.last
    world.controller.script = [
        SegmentConsumedReply(status=CompletionStatus.COMMIT, end=end, token=1),
        CommitEndReply(status=CompletionStatus.FAILED),
        SegmentConsumedReply(status=CompletionStatus.HOLD, end=end, token=2),
    ]
    world.seal_until(lambda: len(world.controller.heard) >= 3)
    assert world.opened.name not in world.table.segments
    assert world.partition.tail.snapshot.first_offset == 0


def test_a_replica_far_behind_fetches_the_segment_and_goes_on_behind_it(
    make_world: Any, kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "CATCH_UP_MS", 0)
    world = make_world()
    world.epochs.write(100)
    world.consume()
    end = world.partition.closings.last
    done = world.committed_elsewhere(tmp_path, end)
    known = msgspec.structs.replace(world.partition.visible, caught_up_at_ms=1_700_000_005_000)
    done = msgspec.structs.replace(done, mark=known)
    # The same replica as it was before it had read anything, with the rest of the log still to come.
    world.epochs.write(50)
    own = world.partition.id
    late = Partition(own, kit.START, tmp_path / "late", SpillQuota())
    world.partition.close()
    world.partition = world.table.partitions[0] = late
    world.table.segments[done.name] = HostedSegment(done)
    world.table.open[0] = kit.open_segment_metadata(0, 1, end, ("me",))
    assert world.offsets((done.name,), 100) is None
    world.seal_until(lambda: world.table.segments[done.name].sealed is not None)
    kit.eventually(lambda: late.tail.snapshot.first_offset == 100)
    assert late.visible == known, "what came with the segment is known before the log was read"
    world.consume()
    assert world.offsets((done.name,), 100) == world.offsets((), 0) == list(range(150))
    assert world.sealer.steps.fetched_total == 1


def test_own_rows_that_differ_are_dropped_loudly_and_the_committed_ones_fetched(
    make_world: Any, kit: Any, tmp_path: Path
) -> None:
    world = make_world()
    world.epochs.write(100)
    world.consume()
    end = world.partition.closings.last
    done = world.committed_elsewhere(tmp_path, end)
    mine = world.partition.tail.snapshot.blocks[0].batch
    wrong = mine.set_column(4, mine.schema.field(4), mine.column(4).take(list(range(99, -1, -1))))
    world.partition.tail.restart(0)
    world.partition.tail.append(wrong, 100)
    world.table.segments[done.name] = HostedSegment(done)
    world.table.open[0] = kit.open_segment_metadata(0, 1, end, ("me",))
    name = world.store.name_of(done.store_url or "")
    saved = (world.store.root / name).read_bytes()
    world.store.delete(name)
    hosted = world.table.segments[done.name]
    world.seal_until(lambda: hosted.error)
    # Nobody has the committed rows to give yet: ours are not answered meanwhile, by no name.
    found = world.table.resolve((done.name,), (TailRequest(partition=0, from_offset=0),))
    assert (found.missing, found.behind) == ([done.name], [0])
    assert not world.table.resolve((), (TailRequest(partition=0, from_offset=100),)).behind
    assert hosted.state is ReplicaState.ERROR
    (world.store.root / name).parent.mkdir(parents=True, exist_ok=True)
    (world.store.root / name).write_bytes(saved)
    world.seal_until(lambda: world.table.segments[done.name].sealed is not None)
    assert world.sealer.steps.diverged_total == 1
    sealed = world.table.segments[done.name].sealed
    assert sealed is not None
    assert sealed.marker.checksum == done.checksum


@pytest.mark.parametrize("built_first", [True, False])
def test_own_rows_are_built_in_the_form_that_was_committed_when_the_config_changed_meanwhile(
    make_world: Any, kit: Any, tmp_path: Path, built_first: bool
) -> None:
    world = make_world(flush_rows=100)
    world.epochs.write(100)
    world.consume()
    end = world.partition.closings.last
    if built_first:  # while the committer, who has heard of the change, was at it, too
        world.controller.script = [SegmentConsumedReply(status=CompletionStatus.HOLD, end=end, token=1)]
        world.seal_until(lambda: world.sealer.steps._built and not world.sealer._busy)
    done = world.committed_elsewhere(tmp_path, end, sorted_column="city")
    world.store.delete(world.store.name_of(done.store_url or ""))
    world.table.segments[done.name] = HostedSegment(done)
    world.table.open[0] = kit.open_segment_metadata(0, 1, end, ("me",))
    world.seal_until(lambda: world.table.segments[done.name].sealed is not None)
    assert world.table.segments[done.name].sealed.marker.checksum == done.checksum
    assert (world.sealer.steps.diverged_total, world.sealer.steps.fetched_total) == (0, 0)


def test_a_segment_that_nobody_has_is_in_error_with_the_cause_and_retried(
    make_world: Any, kit: Any, tmp_path: Path
) -> None:
    world = make_world()
    world.epochs.write(100)
    world.consume()
    end = world.partition.closings.last
    done = world.committed_elsewhere(tmp_path, end)
    name = world.store.name_of(done.store_url or "")
    saved = (world.store.root / name).read_bytes()
    world.store.delete(name)
    world.partition.tail.drop_below(100)
    hosted = world.table.segments[done.name] = HostedSegment(done)
    world.table.open[0] = kit.open_segment_metadata(0, 1, end, ("me",))
    world.seal_until(lambda: hosted.error)
    assert hosted.state is ReplicaState.ERROR
    assert "has no object" in (hosted.error or "")
    (world.store.root / name).parent.mkdir(parents=True, exist_ok=True)
    (world.store.root / name).write_bytes(saved)
    world.seal_until(lambda: hosted.state is ReplicaState.ONLINE)
    assert hosted.error is None


def test_truncated_bytes_in_the_store_are_refused(make_world: Any, kit: Any, tmp_path: Path) -> None:
    world = make_world()
    world.epochs.write(100)
    world.consume()
    done = world.committed_elsewhere(tmp_path, world.partition.closings.last)
    path = world.store.root / world.store.name_of(done.store_url or "")
    path.write_bytes(path.read_bytes()[:-5])
    world.partition.tail.drop_below(100)
    hosted = world.table.segments[done.name] = HostedSegment(msgspec.structs.replace(done))
    world.seal_until(lambda: hosted.error)
    assert "expected sha256:" in (hosted.error or "")
    assert not list((tmp_path / "server" / "scratch").iterdir())


@pytest.mark.parametrize("first", ["fetch", "build"])
def test_of_a_fetch_and_a_build_side_by_side_the_second_leaves_neither_files_nor_an_error(
    make_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    monkeypatch.setattr(replica, "CATCH_UP_MS", 0)
    world = make_world()
    world.epochs.write(100)
    world.consume()
    end = world.partition.closings.last
    done = world.committed_elsewhere(tmp_path, end)
    hosted = world.table.segments[done.name] = HostedSegment(done)
    sealing = world.table.sealings.setdefault(done.name, replica.Sealing(done.name))
    build = replica.Step(replica.StepKind.BUILD, "own-rows", end=end)
    fetch = replica.Step(replica.StepKind.FETCH, "far-behind")

    def run(*steps: replica.Step) -> None:
        for step in steps:
            world.sealer.run(Task(world.table, done, sealing, step))

    if first == "fetch":
        run(build, fetch)  # what was built meanwhile is not installed any more
        run(build)  # and its rows have left the tail
    else:
        run(build, replica.Step(replica.StepKind.INSTALL, "same"))
        world.store.delete(world.store.name_of(done.store_url or ""))
        run(fetch)  # it waited for its turn
    assert world.sealer.failures_total == (first == "fetch")
    assert (hosted.state, hosted.error, world.table.problems) == (ReplicaState.ONLINE, None, {})
    world.sealer.steps.release(())
    assert not list((tmp_path / "server" / "scratch").iterdir())


def test_what_was_fetched_of_a_segment_that_went_elsewhere_meanwhile_is_not_installed(
    make_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory is being deleted at that moment."""
    world = make_world()
    world.epochs.write(100)
    world.consume()
    done = world.committed_elsewhere(tmp_path, world.partition.closings.last)
    world.table.segments[done.name] = HostedSegment(done)
    world.table.open[0] = world.kit.open_segment_metadata(0, 1, done.end, ("me",))
    fetch = world.sealer._fetcher.fetch

    def late(*arguments: Any) -> Any:
        fetched = fetch(*arguments)
        del world.table.segments[done.name]
        return fetched

    monkeypatch.setattr(world.sealer._fetcher, "fetch", late)
    step = replica.Step(replica.StepKind.FETCH, "far-behind")
    world.sealer.run(Task(world.table, done, replica.Sealing(done.name), step))
    assert world.table.segments == {}
    assert world.table.problems == {}
    assert not list((tmp_path / "server").rglob("*.parquet"))


def test_what_was_built_goes_with_the_segment_that_goes_elsewhere(make_world: Any, tmp_path: Path) -> None:
    world = make_world(flush_rows=100)
    world.epochs.write(100)
    world.consume()
    end = world.partition.closings.last
    scratch = tmp_path / "server" / "scratch"
    world.controller.script = [SegmentConsumedReply(status=CompletionStatus.HOLD, end=end, token=1)]
    world.seal_until(lambda: world.sealer.steps._built and not world.sealer._busy)
    world.sealer.steps.release(())
    assert list(scratch.iterdir())  # it is asked for yet
    del world.table.sealings[world.opened.name]
    world.sealer.steps.release(())
    assert not list(scratch.iterdir())
