# SPDX-License-Identifier: Apache-2.0
"""Segments of which no copy is left, made again from the epoch log: the same content, or none."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from versions_kit import upsert_log, upsert_record

from cremant.log.memory import MemoryLog
from cremant.model.errors import Corrupt, InvariantViolation, NoResource, NotFound, Unavailable
from cremant.model.names import epoch_topic
from cremant.model.schema import DataType, FieldSpec, FieldType
from cremant.model.segments import SegmentMetadata
from cremant.segment import tail
from cremant.segment.build import SegmentSpec, build_segment
from cremant.segment.tail import SpillQuota
from cremant.server import partition
from cremant.server.fetching import SegmentFetcher
from cremant.server.partition import Partition, PartitionId
from cremant.server.reconsume import Reconsumer
from cremant.server.steps import as_committed
from cremant.store.deepstore import DirectoryStore

INCARNATION = "00000000000000aa"


class World:
    """An epoch log of ten epochs in two generations; the segment is epochs 4 to 7, sealed long ago."""

    def __init__(self, kit: Any, root: Path) -> None:
        self.kit, self.root = kit, root
        self.log = MemoryLog(lambda: int(time.time() * 1000))
        self.epochs = kit.EpochLog(self.log).create()
        own = PartitionId("trips", INCARNATION, 0)
        replica = Partition(own, kit.START, root / "tail", SpillQuota())
        closed = {0: kit.START}
        for epoch in range(1, 11):
            if epoch == 6:
                self.epochs.start()  # a restarted pipeline: the next generation
            self.epochs.write(100)
            while replica.turn(self.log, 1):
                pass
            closed[epoch] = replica.closings.last
        start, end = closed[3], closed[7]
        rows = [part.batch for part in replica.tail.snapshot.between(start.next_offset, end.next_offset)]
        built = build_segment(root / "once", rows, SegmentSpec(kit.SCHEMA, "ts"), fsync=False)
        opened = kit.open_segment_metadata(0, 1, start, ("me",))
        self.done: SegmentMetadata = as_committed(opened, end, built, None)
        replica.close()
        self.record = kit.table_record()
        self.reconsumer = Reconsumer(self.log, fsync=False)

    def rebuild(self, done: SegmentMetadata | None = None) -> Any:
        scratch = self.root / "scratch"
        scratch.mkdir(exist_ok=True)
        return self.reconsumer.rebuild(self.record, done or self.done, scratch)


@pytest.fixture
def world(kit: Any, tmp_path: Path) -> World:
    return World(kit, tmp_path)


def test_a_range_that_the_log_still_has_gives_the_committed_content(world: World) -> None:
    sealed = world.rebuild()
    assert (sealed.rows, sealed.marker.checksum) == (400, world.done.checksum)
    offsets = [offset for batch in sealed.batches for offset in batch.column("$offset").to_pylist()]
    assert offsets == list(range(300, 700))
    assert not (world.root / "scratch" / "tail").exists()
    assert world.reconsumer.segments_total == 1


def test_what_lies_before_the_segment_is_not_needed(world: World) -> None:
    world.log.trim(epoch_topic("trips", INCARNATION), 0, world.done.start.log_offset)
    assert world.rebuild().rows == 400


def test_a_range_that_the_log_lacks_is_not_guessed(world: World) -> None:
    world.log.trim(epoch_topic("trips", INCARNATION), 0, world.done.start.log_offset + 1)
    with pytest.raises(NotFound, match="the epoch log begins at"):
        world.rebuild()


def test_an_end_that_the_log_has_not_reached_is_an_error_and_no_wait(world: World) -> None:
    assert world.done.end is not None
    beyond = msgspec.structs.replace(world.done.end, epoch=99, next_offset=99_999)
    with pytest.raises(NotFound, match="ends before offset 99999"):
        world.rebuild(msgspec.structs.replace(world.done, end=beyond, end_offset=99_999))


def test_other_content_than_was_committed_is_refused(world: World) -> None:
    with pytest.raises(Corrupt, match="committed was"):
        world.rebuild(msgspec.structs.replace(world.done, checksum="0" * 32))


def test_a_log_that_breaks_a_rule_within_the_range_gives_nothing(world: World) -> None:
    world.epochs.epoch = 20
    world.epochs.write(10)
    assert world.done.end is not None
    beyond = msgspec.structs.replace(world.done.end, epoch=21, next_offset=1_010)
    with pytest.raises(InvariantViolation, match="cannot be read again"):
        world.rebuild(msgspec.structs.replace(world.done, end=beyond, end_offset=1_010))


def test_rows_that_find_no_room_are_no_hole_of_the_log(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "HEAP_BYTES_MAX", 1)
    monkeypatch.setattr(partition, "TURN_MESSAGES_MAX", 1)
    with pytest.raises(NoResource, match="cannot be read again"):
        world.rebuild()


def test_a_fetch_that_finds_no_source_reads_the_log(world: World, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    fetcher = SegmentFetcher("me", store, lambda: None, fsync=False, reconsumer=world.reconsumer)
    scratch = tmp_path / "fetched"
    scratch.mkdir()
    assert fetcher.fetch(world.record, world.done, scratch).rows == 400
    world.log.trim(epoch_topic("trips", INCARNATION), 0, world.done.start.log_offset + 1)
    with pytest.raises(Unavailable, match=r"cannot be fetched: .*the epoch log begins at"):
        fetcher.fetch(world.record, world.done, scratch)
    fetcher.stop()


def test_a_schema_that_grew_and_another_order_give_the_committed_content_all_the_same(world: World) -> None:
    tip = FieldSpec(name="tip", data_type=DataType.LONG, field_type=FieldType.METRIC)
    schema = msgspec.structs.replace(world.record.table_schema, fields=(*world.record.table_schema.fields, tip))
    config = msgspec.structs.replace(world.record.config, sorted_column="city")
    world.record = msgspec.structs.replace(world.record, table_schema=schema, config=config)
    assert world.rebuild().marker.checksum == world.done.checksum


def test_of_an_upsert_table_only_closed_epochs_give_rows(tmp_path: Path) -> None:
    """A killed pipeline left a block of an epoch that its successor cut otherwise."""
    log = MemoryLog(lambda: 0)
    epochs = upsert_log(log)
    for _ in range(3):
        epochs.write(20)
    orphans = upsert_log(MemoryLog(lambda: 0), seed=9)
    orphans.ends, orphans.epoch, orphans.generation = list(epochs.ends), epochs.epoch, epochs.generation
    orphans.append = epochs.append  # type: ignore[method-assign]
    orphans.block(0, 30)
    epochs.start()
    for _ in range(3):
        epochs.write(20)
    record = upsert_record()
    done, _ = epochs.sealed(tmp_path, 0, 2, 5, record=record)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert Reconsumer(log, fsync=False).rebuild(record, done, scratch).marker.checksum == done.checksum
