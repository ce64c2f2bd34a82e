# SPDX-License-Identifier: Apache-2.0
"""Versions of a sealed segment out of the epoch log: from a snapshot's position on, or from the segment's own rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from versions_kit import UPSERT, UpsertLog, shown, upsert_log, upsert_record

from cremant.epoch.records import Reset
from cremant.log.memory import MemoryLog
from cremant.model.errors import Corrupt, InvariantViolation, NotFound
from cremant.model.names import epoch_topic
from cremant.model.segments import SegmentMetadata
from cremant.model.upsert import Cut
from cremant.segment.locations import locations_of
from cremant.segment.reader import SealedSegment
from cremant.segment.snapshot import Locate, Snapshot, pack, unpack
from cremant.server.partition import PartitionId
from cremant.server.replay import Replay


class World:
    """Two partitions, sixteen epochs in two generations; the segment is epochs 4 to 7 of partition 1."""

    def __init__(self, root: Path) -> None:
        self.log = MemoryLog(lambda: 0)
        self.epochs: UpsertLog = upsert_log(self.log, partitions=2, keys=150)
        self.own = PartitionId("trips", self.epochs.incarnation, 1)
        for epoch in range(1, 17):
            if epoch in (6, 12):
                self.epochs.start()  # a restarted pipeline: the next generation
            self.epochs.write(13)
        self.metadata: SegmentMetadata
        self.sealed: SealedSegment
        self.metadata, self.sealed = self.epochs.sealed(root, 1, 3, 7)

    @property
    def locate(self) -> Locate:
        return lambda: locations_of(self.sealed.batches)

    def from_rows(self, until: int = 16) -> Snapshot:
        return self.result(Replay.from_rows(self.log, self.own, self.metadata, UPSERT.delete_column), until)

    def result(self, replay: Replay, until: int = 16) -> Snapshot:
        while replay.position.epoch < until and replay.turn():
            pass
        replay.close()
        return replay.result(self.locate)

    def at_epoch(self, epoch: int) -> Snapshot:
        """As a peer had it when `epoch` was its newest."""
        trimmed = World.__new__(World)
        trimmed.__dict__.update(self.__dict__)
        trimmed.log = MemoryLog(lambda: 0)
        trimmed.epochs = upsert_log(trimmed.log, partitions=2, keys=150)
        for number in range(1, epoch + 1):
            if number in (6, 12):
                trimmed.epochs.start()
            trimmed.epochs.write(13)
        return trimmed.from_rows(epoch)

    def check(self, found: Snapshot, newest: int = 16) -> None:
        assert found.position == self.epochs.positions[1][newest]
        assert found.versions.epoch == newest
        first, end = self.metadata.start_offset, self.metadata.end_offset or 0
        for epoch in range(3, newest + 1):
            assert shown(found.versions, epoch) == self.epochs.expected(1, first, end, epoch), epoch

    def trim(self, to: int) -> None:
        self.log.trim(epoch_topic("trips", self.own.incarnation), 1, to)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_the_range_of_a_segment_has_its_whole_history(world: World) -> None:
    world.trim(world.metadata.start.log_offset)
    found = world.from_rows()
    world.check(found)
    superseded, tombstones, in_force = found.versions.counts()
    assert superseded > 0
    assert tombstones > 0
    assert in_force > 0


@pytest.mark.parametrize("epoch", [7, 9, 11, 12, 16])
def test_a_snapshot_goes_on_where_it_was_made(world: World, epoch: int) -> None:
    snapshot = world.at_epoch(epoch)
    world.trim(snapshot.position.log_offset)
    found = world.result(Replay.from_snapshot(world.log, world.own, world.metadata, snapshot))
    world.check(found)


def test_a_snapshot_that_travelled_goes_on_as_well(world: World) -> None:
    name, checksum = world.metadata.name, world.metadata.checksum or ""
    data = pack(world.at_epoch(9), segment=name, checksum=checksum)
    came = unpack(data, segment=name, checksum=checksum, rows=world.sealed.rows, locate=world.locate)
    world.check(world.result(Replay.from_snapshot(world.log, world.own, world.metadata, came)))


def test_a_log_that_begins_too_late_is_not_guessed(world: World) -> None:
    snapshot = world.at_epoch(9)
    world.trim(snapshot.position.log_offset + 1)
    with pytest.raises(NotFound, match=r"its versions are to be continued from \d+ on, the epoch log begins at"):
        world.result(Replay.from_snapshot(world.log, world.own, world.metadata, snapshot))
    with pytest.raises(NotFound, match="the epoch log begins at"):
        world.from_rows()


def test_a_log_that_has_not_reached_the_end_of_the_segment_gives_nothing(world: World) -> None:
    with pytest.raises(NotFound, match="ends before offset"):
        world.at_epoch(6)


def test_versions_of_a_past_that_was_taken_back_are_refused(world: World) -> None:
    """The snapshot has updates of epoch 16, and the table went back to 15 after that."""
    snapshot = world.at_epoch(16)
    world.epochs.append(1, Reset(generation=world.epochs.generation, epoch=15))
    world.epochs.epoch = 15
    with pytest.raises(InvariantViolation, match="did not see closed"):
        world.result(Replay.from_snapshot(world.log, world.own, world.metadata, snapshot), until=17)
    found = world.result(Replay.from_snapshot(world.log, world.own, world.metadata, world.at_epoch(15)), until=17)
    first, end = world.metadata.start_offset, world.metadata.end_offset or 0
    assert shown(found.versions, 15) == world.epochs.expected(1, first, end, 15)


def test_other_rows_than_the_segment_has_are_refused(world: World) -> None:
    replay = Replay.from_rows(world.log, world.own, world.metadata, UPSERT.delete_column)
    while replay.turn():
        pass
    fewer = tuple(batch.slice(1) for batch in world.sealed.batches)
    with pytest.raises(Corrupt, match="has other rows in its range"):
        replay.result(lambda: locations_of(fewer))


def test_rows_in_another_order_keep_their_versions(world: World, tmp_path: Path) -> None:
    record = upsert_record(sorted_column="driver")
    world.metadata, world.sealed = world.epochs.sealed(tmp_path / "sorted", 1, 3, 7, record=record)
    found = world.from_rows()
    assert found.versions.order is not None
    world.check(found)
    since, _ = found.versions.epochs_of(Cut(epoch=16))
    offsets = world.sealed.batches[0].column("$offset").to_pylist()
    expected = world.epochs.expected(1, 0, 10_000, 16)
    assert since.tolist() == [expected[offset][0] for offset in offsets]
