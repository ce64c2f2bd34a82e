# SPDX-License-Identifier: Apache-2.0
"""Reconciling with a view, called by hand: what a server takes up, keeps, lets go and deletes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cremant.log.memory import MemoryLog
from cremant.model.cluster import ClusterView
from cremant.model.errors import NoResource
from cremant.model.names import epoch_topic
from cremant.model.offsets import Position
from cremant.model.segments import ReplicaState, SegmentMetadata
from cremant.segment.build import SegmentSpec, build_segment
from cremant.segment.reader import derive, open_segment
from cremant.server import hosting as hosting_module
from cremant.server.files import ServerFiles
from cremant.server.hosting import Hosting
from cremant.server.sealing import _as_committed

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
        derive(scratch, self.first.name, built.checksum, fsync=False)
        self.files.adopt(scratch, self.directory)
        return _as_committed(self.first, END, built, None)

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
    assert partition.watermark.max_ingestion_ms == done.max_ingestion_ms


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
    world.hosting._verify(table, table.segments[done.name])
    assert states(world)[done.name] is ReplicaState.ERROR
    assert "rows.parquet" in (table.segments[done.name].error or "")


def test_a_segment_that_left_the_view_is_deleted_after_a_grace(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    done = world.seal_first()
    world.restart()
    world.hosting.reconcile(world.view(done))
    world.hosting.reconcile(world.view())
    assert done.name in world.hosting.tables["trips"].segments
    monkeypatch.setattr(hosting_module, "SEGMENT_GRACE_S", 0.0)
    world.hosting.reconcile(world.view())
    assert done.name not in world.hosting.tables["trips"].segments
    assert not world.directory.exists()


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
