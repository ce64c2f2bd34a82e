# SPDX-License-Identifier: Apache-2.0
"""Consuming and resolving without threads: every range a query asks for holds each of its rows exactly once."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cremant.epoch.records import EpochMark, Gap, GapReason, Heartbeat, PartitionMark, Reset
from cremant.exec.stop import Stop
from cremant.log.api import Message
from cremant.log.memory import MemoryLog
from cremant.model.names import epoch_topic
from cremant.model.offsets import OffsetRange, Position
from cremant.model.segments import SegmentMetadata
from cremant.segment import build
from cremant.segment.build import SegmentSpec, build_segment
from cremant.segment.reader import derive
from cremant.segment.tail import SpillQuota
from cremant.server.partition import Partition, PartitionId, PartitionState
from cremant.server.scan import plan_scan
from cremant.server.steps import as_committed
from cremant.server.table import HostedSegment, HostedTable
from cremant.wire.messages import PruneTerm, ServerQuery, TailRequest

INCARNATION = "00000000000000aa"


def wall_ms() -> int:
    return int(time.time() * 1000)


def consume(partition: Partition, log: MemoryLog) -> None:
    while partition.turn(log, wall_ms()):
        pass


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog(wall_ms)


def partition_at(start: Position, directory: Path) -> Partition:
    return Partition(PartitionId("trips", INCARNATION, 0), start, directory, SpillQuota())


def seal(table: HostedTable, metadata: SegmentMetadata, end: Position, directory: Path) -> SegmentMetadata:
    """What the sealer does, at once."""
    snapshot = table.partitions[0].tail.snapshot
    rows = [part.batch for part in snapshot.between(metadata.start_offset, end.next_offset)]
    spec = SegmentSpec(table.record.table_schema, "ts")
    built = build_segment(directory, rows, spec, fsync=False)
    sealed = derive(directory, metadata.name, built.checksum, fsync=False)
    done = as_committed(metadata, end, built, None)
    table.install(done, sealed, verified=True)
    return done


def offsets_of(table: HostedTable, segments: tuple[str, ...], first: int | None, **query: Any) -> list[int] | None:
    tails = (TailRequest(partition=0, from_offset=first),) if first is not None else ()
    found = table.resolve(segments, tails)
    if found.missing or found.behind:
        return None
    asked = ServerQuery(
        request_id="q", table="trips", incarnation=INCARNATION, sql="", columns=(), segments=segments, tails=tails,
        budget_ms=1, **query,
    )  # fmt: skip
    scan = plan_scan(table, found, asked, Stop(time.monotonic() + 60))
    assert all(batch.schema.equals(found.alignment.schema) for piece in scan.pieces for batch in piece.batches)
    assert all(piece.rows == sum(batch.num_rows for batch in piece.batches) for piece in scan.pieces)
    return sorted(offset for piece in scan.pieces for batch in piece.batches for offset in batch[0].to_pylist())


class AnyMomentIsExact(RuleBasedStateMachine):
    """Writes, seals and asks in any order. A broker may know any earlier state of what is sealed."""

    def __init__(self) -> None:
        #: Segments of several batches, though they have few rows: single batches are pruned, too.
        self.small_batches = patch.object(build, "BATCH_ROWS", 7)
        self.small_batches.start()
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.root = Path(self.directory.name)
        self.made = 0

    @initialize()
    def begin(self) -> None:
        kit = _kit()
        self.log = MemoryLog(wall_ms)
        self.epochs = kit.EpochLog(self.log).create()
        self.table = HostedTable(kit.table_record())
        self.partition = partition_at(kit.START, self.root / "tail")
        self.table.partitions[0] = self.partition
        consume(self.partition, self.log)
        self.opened = kit.open_segment_metadata(0, 0, kit.START, ("me",))
        self.table.open[0] = self.opened
        #: What a broker may have seen: (names of sealed segments, start of the tail).
        self.views: list[tuple[tuple[str, ...], int]] = [((), 0)]
        self.cuts = [0]

    @rule(rows=st.integers(0, 50), close=st.booleans())
    def write(self, rows: int, close: bool) -> None:
        if rows:
            self.epochs.block(0, rows)
        if close:
            self.epochs.mark()
        consume(self.partition, self.log)
        while self.partition.tail.maintain():
            pass

    @precondition(lambda self: self.partition.closings.last.next_offset > self.opened.start_offset)
    @rule(locally=st.booleans())
    def seal(self, locally: bool) -> None:
        """DONE in the metadata; sealed here at once, or its rows stay in the tail for the time being."""
        kit = _kit()
        end = self.partition.closings.last
        self.made += 1
        if locally and all(hosted.sealed is not None for hosted in self.table.segments.values()):
            done = seal(self.table, self.opened, end, self.root / str(self.made))
        else:
            from cremant.segment.build import Built

            nothing = Built(Path("x"), 0, 0, "c", "f", {}, None, None, None)
            done = as_committed(self.opened, end, nothing, None)
            self.table.segments[done.name] = HostedSegment(done)
        names, _ = self.views[-1]
        self.views.append(((*names, done.name), end.next_offset))
        self.opened = kit.open_segment_metadata(0, self.opened.sequence + 1, end, ("me",))
        self.table.open[0] = self.opened

    @rule()
    def seal_what_is_left(self) -> None:
        for hosted in sorted(self.table.segments.values(), key=lambda h: h.metadata.sequence):
            if hosted.sealed is None:
                self.made += 1
                assert hosted.metadata.end is not None
                seal(self.table, hosted.metadata, hosted.metadata.end, self.root / str(self.made))

    @rule(pick=st.integers(0, 100))
    def ask_with_any_view(self, pick: int) -> None:
        names, first = self.views[pick % len(self.views)]
        assert offsets_of(self.table, names, first) == list(range(self.epochs.ends[0]))

    @rule(pick=st.integers(0, 100))
    def ask_for_a_tail_alone(self, pick: int) -> None:
        _, first = self.views[pick % len(self.views)]
        assert offsets_of(self.table, (), first) == list(range(first, self.epochs.ends[0]))

    @rule(pick=st.integers(0, 100), value=st.integers(0, 500), op=st.sampled_from(["=", "<", ">=", "in"]))
    def ask_with_pruning(self, pick: int, value: int, op: str) -> None:
        names, first = self.views[pick % len(self.views)]
        found = offsets_of(self.table, names, first, prune=(PruneTerm(column="fare", op=op, values=(value,)),))
        assert found is not None
        matching = {"=": lambda o: o == value, "in": lambda o: o == value, "<": lambda o: o < value}
        test = matching.get(op, lambda o: o >= value)
        assert {o for o in range(self.epochs.ends[0]) if test(o)} <= set(found)

    @invariant()
    def the_tail_says_what_it_has(self) -> None:
        if hasattr(self, "partition"):
            assert self.partition.visible.next_offset == self.epochs.ends[0]
            assert not self.partition.behind

    def teardown(self) -> None:
        self.small_batches.stop()
        if hasattr(self, "partition"):
            self.partition.close()
        self.directory.cleanup()


_KITS: list[Any] = []


def _kit() -> Any:
    return _KITS[0]


class TestAnyMomentIsExact(AnyMomentIsExact.TestCase):
    settings = settings(max_examples=40, stateful_step_count=25, deadline=None)

    @pytest.fixture(autouse=True)
    def _with_kit(self, kit: Any) -> None:
        _KITS[:] = [kit]


def test_a_partition_is_behind_until_it_has_read_what_was_there_at_its_start(
    log: MemoryLog, kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cremant.server.partition.TURN_MESSAGES_MAX", 2)
    epochs = kit.EpochLog(log).create()
    for _ in range(5):
        epochs.write(10)
    partition = partition_at(kit.START, tmp_path)
    assert partition.behind
    turns = 0
    while partition.behind:
        more = partition.turn(log, wall_ms())
        turns += 1
        assert more == partition.behind
    assert turns == 7
    assert partition.tail.snapshot.rows == 50
    partition.close()


def test_without_an_epoch_log_a_partition_waits_for_it_and_says_why(log: MemoryLog, kit: Any, tmp_path: Path) -> None:
    """An empty answer would be a wrong one if the log directory is merely not the right one."""
    partition = partition_at(kit.START, tmp_path)
    assert not partition.turn(log, wall_ms())
    assert partition.behind
    assert "does not exist" in (partition.error or "")
    epochs = kit.EpochLog(log).create()
    epochs.write(10)
    kit.eventually(lambda: partition.turn(log, wall_ms()))
    consume(partition, log)
    assert partition.tail.snapshot.rows == 10
    assert not partition.behind
    partition.close()


def test_a_restart_from_a_stored_position_continues_with_the_same_rows(
    log: MemoryLog, kit: Any, tmp_path: Path
) -> None:
    epochs = kit.EpochLog(log).create()
    for _ in range(3):
        epochs.write(10)
    first = partition_at(kit.START, tmp_path / "a")
    consume(first, log)
    position = first.closings.last
    assert position.next_offset == 30
    epochs.start()
    for _ in range(3):
        epochs.write(10)
    consume(first, log)
    second = partition_at(position, tmp_path / "b")
    consume(second, log)
    assert second.tail.snapshot.first_offset == 30
    assert second.visible.next_offset == first.visible.next_offset == 60
    assert second.closings.last == first.closings.last
    for partition in (first, second):
        partition.close()


def test_who_waits_for_rows_is_woken_when_a_fetched_segment_brings_them(
    log: MemoryLog, kit: Any, tmp_path: Path
) -> None:
    """No turn runs: the log may be silent for long."""
    epochs = kit.EpochLog(log).create()
    partition = partition_at(kit.START, tmp_path)
    epochs.write(10)
    consume(partition, log)

    async def run() -> bool:
        waiting = asyncio.create_task(partition.progress.wait(500, 30))
        await asyncio.sleep(0)
        partition.reposition(Position(log_offset=4, epoch=2, generation=1, next_offset=500), None)
        return await asyncio.wait_for(waiting, 20)

    assert asyncio.run(run())
    partition.close()


def test_rows_before_a_damaged_record_wake_who_waits_for_them(log: MemoryLog, kit: Any, tmp_path: Path) -> None:
    epochs = kit.EpochLog(log).create()
    partition = partition_at(kit.START, tmp_path)
    epochs.write(10)
    consume(partition, log)
    epochs.write(10)
    log.append(epoch_topic("trips", INCARNATION), 0, [Message(value=b"damaged")])
    partition.turn(log, wall_ms())
    assert partition.state is PartitionState.RETRYING
    assert asyncio.run(partition.progress.wait(20, 0))
    partition.close()


def test_the_watermark_says_newest_ingestion_and_when_the_end_of_the_stream_was_reached(
    log: MemoryLog, kit: Any, tmp_path: Path
) -> None:
    epochs = kit.EpochLog(log).create()
    partition = partition_at(kit.START, tmp_path)
    epochs.write(10, reached_at_ms=5_000)
    consume(partition, log)
    mark = partition.visible
    assert (mark.max_ingestion_ms, mark.caught_up_at_ms, mark.source) == (1_700_000_000_009, 5_000, "logAppend")
    epochs.append(0, Heartbeat(generation=1, last_closed=1, ends=(10,), at_ms=9_000))
    consume(partition, log)
    assert partition.visible.caught_up_at_ms == 9_000
    partition.close()


def test_a_gap_moves_the_watermark_without_rows(log: MemoryLog, kit: Any, tmp_path: Path) -> None:
    epochs = kit.EpochLog(log).create()
    partition = partition_at(kit.START, tmp_path)
    epochs.append(0, Gap(generation=1, range=OffsetRange(0, 100), reason=GapReason.EXPIRED))
    epochs.ends = [100]
    epochs.block(0, 5)
    consume(partition, log)
    assert partition.visible.next_offset == 105
    assert partition.tail.snapshot.rows == 5
    partition.close()


def test_a_broken_rule_stops_the_partition_and_queries_on_it_are_behind(
    log: MemoryLog, kit: Any, tmp_path: Path
) -> None:
    epochs = kit.EpochLog(log).create()
    table = HostedTable(kit.table_record())
    partition = table.partitions[0] = partition_at(kit.START, tmp_path)
    epochs.write(10)
    consume(partition, log)
    assert offsets_of(table, (), 0) == list(range(10))
    wrong = EpochMark(
        generation=1,
        epoch=9,
        previous=7,
        blocks_generation=1,
        config_version=1,
        partitions=(PartitionMark(end=10, rows=0),),
    )
    epochs.append(0, wrong)
    consume(partition, log)
    assert partition.state is PartitionState.STOPPED
    assert partition.error is not None
    assert "E-4" in partition.error
    assert offsets_of(table, (), 0) is None
    partition.close()


def test_a_reset_takes_rows_back(log: MemoryLog, kit: Any, tmp_path: Path) -> None:
    epochs = kit.EpochLog(log).create()
    partition = partition_at(kit.START, tmp_path)
    for _ in range(3):
        epochs.write(10)
    consume(partition, log)
    epochs.append(0, Reset(generation=1, epoch=1))
    consume(partition, log)
    assert partition.state is PartitionState.CONSUMING, partition.error
    assert partition.tail.snapshot.next_offset == partition.visible.next_offset == 10
    assert partition.closings.last.next_offset == 10
    partition.close()


def test_a_tail_from_an_offset_that_is_not_here_yet_is_behind_and_an_unknown_segment_missing(
    log: MemoryLog, kit: Any, tmp_path: Path
) -> None:
    epochs = kit.EpochLog(log).create()
    table = HostedTable(kit.table_record())
    partition = table.partitions[0] = partition_at(kit.START, tmp_path)
    epochs.write(10)
    consume(partition, log)
    found = table.resolve(
        ("nosuch",), (TailRequest(partition=0, from_offset=11), TailRequest(partition=7, from_offset=0))
    )
    assert found.missing == ["nosuch"]
    assert found.behind == [0, 7]
    partition.close()


def test_a_log_that_cannot_be_read_is_retried_and_nothing_is_skipped(
    log: MemoryLog, kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cremant.model.errors import Corrupt
    from cremant.server import partition as module

    epochs = kit.EpochLog(log).create()
    for _ in range(3):
        epochs.write(10)
    real, broken = module.records.decode, [3]

    def decode(data: Any, incarnation: str) -> Any:
        broken[0] -= 1
        if broken[0] == 0:
            raise Corrupt("a bad sector")
        return real(data, incarnation)

    monkeypatch.setattr(module.records, "decode", decode)
    partition = partition_at(kit.START, tmp_path)
    consume(partition, log)
    assert partition.state is PartitionState.RETRYING
    assert partition.behind
    kit.eventually(lambda: partition.turn(log, wall_ms()) or not partition.behind)
    consume(partition, log)
    assert partition.error is None
    assert not partition.behind
    assert [o for part in partition.tail.snapshot.between(0, 99) for o in part.batch[0].to_pylist()] == list(range(30))
    partition.close()


def test_brokers_that_are_away_leave_what_is_visible_served_and_are_asked_again(
    log: MemoryLog, kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cremant.model.errors import Unavailable

    epochs = kit.EpochLog(log).create()
    epochs.write(10)
    partition = partition_at(kit.START, tmp_path)
    consume(partition, log)
    epochs.write(10)

    def away(*_: Any, **__: Any) -> Any:
        raise Unavailable("Kafka at k1:9092: no broker answers")

    assert partition._source is not None
    monkeypatch.setattr(partition._source, "read", away)
    assert partition.turn(log, wall_ms()) is False
    assert partition.state is PartitionState.RETRYING
    assert "no broker answers" in (partition.error or "")
    assert not partition.behind, "it had caught up: what it has is served"
    kit.eventually(lambda: partition.turn(log, wall_ms()) or partition.state is PartitionState.CONSUMING)
    consume(partition, log)
    assert partition.tail.snapshot.next_offset == 20
    partition.close()


def test_columns_added_later_appear_with_their_default_in_old_tails_and_segments(
    log: MemoryLog, kit: Any, tmp_path: Path
) -> None:
    import msgspec

    from cremant.model.schema import DataType, FieldSpec, FieldType

    epochs = kit.EpochLog(log).create()
    table = HostedTable(kit.table_record())
    partition = table.partitions[0] = partition_at(kit.START, tmp_path / "tail")
    epochs.write(10)
    consume(partition, log)
    opened = kit.open_segment_metadata(0, 0, kit.START, ("me",))
    done = seal(table, opened, partition.closings.last, tmp_path / "s")
    epochs.write(5)
    consume(partition, log)
    note = FieldSpec(
        name="note", data_type=DataType.STRING, field_type=FieldType.DIMENSION, default_null_value="none yet"
    )
    wider = msgspec.structs.replace(kit.SCHEMA, fields=(*kit.SCHEMA.fields, note))
    table.update(msgspec.structs.replace(table.record, table_schema=wider, config_version=2))
    query = ServerQuery(
        request_id="q", table="trips", incarnation=INCARNATION, sql="", columns=("note",), segments=(done.name,),
        tails=(TailRequest(partition=0, from_offset=10),), budget_ms=1,
    )  # fmt: skip
    scan = plan_scan(table, table.resolve(query.segments, query.tails), query, Stop(time.monotonic() + 60))
    rows = pa.Table.from_batches([batch for piece in scan.pieces for batch in piece.batches])
    assert rows["note"].to_pylist() == ["none yet"] * 15
    partition.close()
