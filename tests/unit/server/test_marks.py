# SPDX-License-Identifier: Apache-2.0
"""What a partition claims to show is shown: over filtered and rejected messages, silence, cuts, restarts, rewinds."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prometheus_client import CollectorRegistry, generate_latest
from server_kit import SCHEMA, START, EpochLog, open_segment_metadata, table_record

from cremant.epoch import format as records
from cremant.epoch.effects import TakeRows
from cremant.epoch.records import EpochMark, Heartbeat, PartitionMark, Reset
from cremant.log.memory import MemoryLog
from cremant.model.offsets import OffsetRange, Position, Watermark
from cremant.model.segments import SegmentMetadata, SegmentStatus
from cremant.model.table import FreshnessSla
from cremant.model.upsert import UpsertConfig
from cremant.segment.layout import stored_columns
from cremant.segment.tail import SpillQuota
from cremant.server import marks as marks_of
from cremant.server.marks import Marks, known_at
from cremant.server.metrics_of_partitions import PartitionMetrics
from cremant.server.partition import Partition, PartitionId
from cremant.server.table import HostedTable
from cremant.wire.messages import TailRequest

OWN = PartitionId("trips", "00000000000000aa", 0)
HOLD = FreshnessSla(errors_hold=True)
ROW, FILTERED, REJECTED, TOMBSTONE = "row", "filtered", "rejected", "tombstone"


class Feed:
    """One stream partition and its epoch log. `times[o]`: append time of message o; `kinds[o]`: what became of it."""

    def __init__(self) -> None:
        self.log = MemoryLog(lambda: int(time.time() * 1000))
        self.epochs = EpochLog(self.log).create()
        self.times: list[int] = []
        self.kinds: list[str] = []
        self.end = 0
        self.last = self.previous = 0

    def message(self, at_ms: int, kind: str = ROW) -> None:
        self.times.append(at_ms)
        self.kinds.append(kind)

    def epoch(self, end: int | None = None, *, reached_at_ms: int | None = None, source: str = "logAppend") -> None:
        """Takes the messages up to `end` and closes the epoch."""
        end = len(self.times) if end is None else end
        taken = range(self.end, end)
        rows = [offset for offset in taken if self.kinds[offset] == ROW]
        if taken:
            self._block(taken, rows, source)
        rejected = sum(self.kinds[offset] in (REJECTED, TOMBSTONE) for offset in taken)
        line = PartitionMark(
            end=end, rows=len(rows), rejected=rejected, filtered=len(taken) - len(rows) - rejected,
            stream_end=len(self.times), reached_at_ms=reached_at_ms,
        )  # fmt: skip
        self.last += 1
        mark = EpochMark(
            generation=self.epochs.generation, epoch=self.last, previous=self.previous,
            blocks_generation=self.epochs.generation, config_version=1, partitions=(line,),
        )  # fmt: skip
        self.epochs.append(0, mark)
        self.end, self.previous = end, self.last

    def _block(self, taken: range, rows: list[int], source: str) -> None:
        known = source != "none"
        times = [self.times[offset] if known else None for offset in rows]
        columns = [
            pa.array(rows, pa.int64()), pa.array([0] * len(rows), pa.int32()), pa.array(times, pa.int64()),
            pa.array(["Ulm"] * len(rows), pa.string()), pa.array(rows, pa.int64()), pa.array(rows, pa.int64()),
        ]  # fmt: skip
        errors = [self.times[offset] for offset in taken if self.kinds[offset] == REJECTED]
        block = records.row_block(
            generation=self.epochs.generation, epoch=self.last + 1, config_version=1,
            range=OffsetRange(taken.start, taken.stop), timestamp_type=source if known else "create",
            batch=pa.RecordBatch.from_arrays(columns, schema=stored_columns(SCHEMA)),
            max_ingestion_ms=max(self.times[offset] for offset in taken) if known else None,
            rejected_from_ms=min(errors, default=None) if known else None,
        )  # fmt: skip
        self.epochs.append(0, block)

    def beat(self, at_ms: int) -> None:
        ends = (len(self.times),)
        beat = Heartbeat(generation=self.epochs.generation, last_closed=self.previous, ends=ends, at_ms=at_ms)
        self.epochs.append(0, beat)

    def rewind(self, epoch: int, end: int) -> None:
        self.epochs.start()
        self.epochs.append(0, Reset(generation=self.epochs.generation, epoch=epoch))
        self.end, self.previous = end, epoch


class Replica:
    """A server's partition, which restarts behind what it has sealed."""

    def __init__(self, feed: Feed, root: Path, promise: FreshnessSla = FreshnessSla()) -> None:
        self.feed, self.root, self.promise = feed, root, promise
        self.sealed: list[SegmentMetadata] = []
        self.start, self.made = START, 0
        self.partition = self._made(None)

    def _made(self, known: Watermark | None) -> Partition:
        self.made += 1
        directory = self.root / f"tail-{self.made}"
        return Partition(OWN, self.start, directory, SpillQuota(), known=known, promise=self.promise)

    def consume(self, now_ms: int | None = None) -> Watermark:
        while self.partition.turn(self.feed.log, now_ms or int(time.time() * 1000)):
            pass
        assert self.partition.error is None, self.partition.error
        return self.partition.visible

    def seal(self, end: Position) -> Watermark:
        """What the commit says of the rows before `end`."""
        mark = self.partition.marks.at_cut(end)
        opened = open_segment_metadata(0, len(self.sealed), self.start, ("me",))
        self.sealed.append(
            msgspec.structs.replace(
                opened, status=SegmentStatus.DONE, end=end, end_offset=end.next_offset, mark=mark,
                last_indexed_ms=self.partition.marks.last_indexed_ms,
            )
        )  # fmt: skip
        self.start = end
        return mark

    def restart(self) -> Watermark:
        """Before it has read anything."""
        self.partition.close()
        self.partition = self._made(known_at(self.sealed, self.start))
        return self.partition.visible


@pytest.fixture
def feed() -> Feed:
    return Feed()


class WhatIsClaimedIsShown(RuleBasedStateMachine):
    """The claim: every message appended before `freshness_ms` is visible; if errors hold, none of them was rejected."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.feed = Feed()
        self.now_ms = 1_000
        self.least_ms: int | None = None

    @initialize(hold=st.booleans())
    def begin(self, hold: bool) -> None:
        self.replica = Replica(self.feed, Path(self.directory.name), FreshnessSla(errors_hold=hold))
        self.cuts = [START]

    def _consume(self) -> None:
        mark = self.replica.consume(self.now_ms)
        if self.replica.partition.position.epoch > self.cuts[-1].epoch:
            self.cuts.append(self.replica.partition.position)
        # Without a rewind nothing that was claimed is taken back.
        assert (self.least_ms or 0) <= (mark.freshness_ms or 0) or mark.held_at_ms is not None
        self.least_ms = mark.freshness_ms

    @rule(
        kinds=st.lists(st.sampled_from([ROW, ROW, FILTERED, REJECTED, TOMBSTONE]), max_size=6), pause=st.integers(0, 3)
    )
    def produce(self, kinds: list[str], pause: int) -> None:
        for kind in kinds:
            self.feed.message(self.now_ms, kind)
            self.now_ms += pause

    @rule(share=st.floats(0, 1), is_proof=st.booleans())
    def close_epoch(self, share: float, is_proof: bool) -> None:
        end = self.feed.end + round(share * (len(self.feed.times) - self.feed.end))
        reached = self.now_ms if is_proof and end == len(self.feed.times) else None
        self.feed.epoch(end, reached_at_ms=reached)
        self._consume()

    @rule(pause=st.integers(1, 50))
    def beat(self, pause: int) -> None:
        """Says something only where all that is in the stream is here."""
        self.now_ms += pause
        self.feed.beat(self.now_ms)
        self._consume()
        self.now_ms += 1

    @precondition(lambda self: len(self.cuts) > 1)
    @rule(data=st.data(), restarts=st.booleans())
    def seal(self, data: Any, restarts: bool) -> None:
        """At a closed position, perhaps of long ago; what came after it is read again after a restart."""
        at = data.draw(st.integers(1, len(self.cuts) - 1))
        before = self.replica.partition.visible
        first = self.replica.start.next_offset
        mark = self.replica.seal(self.cuts[at])
        self._check(mark)
        assert (mark.freshness_ms or 0) <= (before.freshness_ms or 0)
        if restarts:
            self._check(self.replica.restart())
            self._consume()
            # What the log says after the cut is said again; what it said before stands in the mark.
            assert self.replica.partition.visible == before
        else:
            self.replica.partition.release(first, self.cuts[at].next_offset)
            assert self.replica.partition.visible == before
        self.cuts = self.cuts[at:]

    @precondition(lambda self: len(self.cuts) > 1)
    @rule(data=st.data())
    def rewind(self, data: Any) -> None:
        at = data.draw(st.integers(0, len(self.cuts) - 1))
        cut = self.cuts[at]
        was = self.replica.partition.visible
        self.feed.rewind(cut.epoch, cut.next_offset)
        self.cuts = self.cuts[: at + 1]
        self.least_ms = None
        self._consume()
        now = self.replica.partition.visible
        assert (now.freshness_ms or 0) <= (was.freshness_ms or 0) or was.held_at_ms is not None
        if cut.next_offset == was.next_offset == self.replica.partition.marks.at_cut(cut).next_offset and at > 0:
            assert now.max_ingestion_ms is not None or was.max_ingestion_ms is None

    @invariant()
    def the_claim_holds(self) -> None:
        if hasattr(self, "replica"):
            self._check(self.replica.partition.visible)

    def _check(self, mark: Watermark) -> None:
        fresh_ms = mark.freshness_ms
        if fresh_ms is None:
            return
        times, kinds = self.feed.times, self.feed.kinds
        assert all(offset < mark.next_offset for offset, at_ms in enumerate(times) if at_ms < fresh_ms)
        if self.replica.promise.errors_hold:
            rejected = [times[o] for o in range(mark.next_offset) if kinds[o] == REJECTED]
            assert fresh_ms <= min(rejected, default=fresh_ms)
        assert (mark.held_at_ms is None) or self.replica.promise.errors_hold

    def teardown(self) -> None:
        if hasattr(self, "replica"):
            self.replica.partition.close()
        self.directory.cleanup()


TestWhatIsClaimedIsShown = WhatIsClaimedIsShown.TestCase
TestWhatIsClaimedIsShown.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_an_idle_partition_of_a_busy_table_is_proven_fresh_by_each_mark(feed: Feed, tmp_path: Path) -> None:
    replica = Replica(feed, tmp_path)
    feed.message(1_000)
    feed.epoch()
    feed.epoch(reached_at_ms=5_000)
    assert replica.consume().freshness_ms == 5_000
    # A mark that did not reach the end of this partition proves nothing.
    feed.message(5_500)
    feed.epoch(end=1)
    assert replica.consume().freshness_ms == 5_000
    replica.partition.close()


def test_a_paused_table_gets_older_until_its_pipeline_says_something_again(feed: Feed, tmp_path: Path) -> None:
    replica = Replica(feed, tmp_path)
    feed.message(1_000)
    feed.epoch()
    feed.beat(2_000)
    assert replica.consume(9_000).freshness_ms == 2_000
    assert replica.consume(90_000).freshness_ms == 2_000
    feed.beat(95_000)
    assert replica.consume(95_000).freshness_ms == 95_000
    replica.partition.close()


def test_replicas_say_how_far_each_of_them_is(feed: Feed, tmp_path: Path) -> None:
    ahead, late = Replica(feed, tmp_path / "a"), Replica(feed, tmp_path / "b")
    feed.message(1_000)
    feed.epoch()
    ahead.consume()
    late.consume()
    feed.message(2_000)
    feed.epoch()
    assert (ahead.consume().next_offset, late.partition.visible.next_offset) == (2, 1)
    assert (ahead.partition.visible.freshness_ms, late.partition.visible.freshness_ms) == (2_000, 1_000)
    for replica in (ahead, late):
        replica.partition.close()


def test_without_times_of_the_stream_that_of_indexing_counts_and_survives_a_restart(feed: Feed, tmp_path: Path) -> None:
    replica = Replica(feed, tmp_path)
    feed.message(0)
    feed.epoch(source="none")
    mark = replica.consume(7_000)
    assert (mark.freshness_ms, mark.source) == (7_000, "index")
    feed.message(0, FILTERED)
    feed.epoch(source="none")
    assert replica.consume(8_000).freshness_ms == 8_000
    replica.seal(replica.partition.closings.last)
    assert (replica.restart().freshness_ms, replica.partition.visible.source) == (8_000, "index")
    # A stream that has times from now on.
    feed.message(9_000)
    feed.epoch()
    assert replica.consume(9_500).source == "logAppend"
    replica.partition.close()


def test_times_out_of_order_never_take_back_the_newest(feed: Feed, tmp_path: Path) -> None:
    replica = Replica(feed, tmp_path)
    feed.message(5_000)
    feed.message(3_000)
    feed.epoch(source="create")
    feed.message(4_000)
    feed.epoch(source="logAppend")
    mark = replica.consume()
    # Whose clock gave the time that counts.
    assert (mark.max_ingestion_ms, mark.source) == (5_000, "create")
    replica.partition.close()


def test_a_producer_whose_clock_is_ahead_makes_nothing_fresh_that_comes_after(feed: Feed, tmp_path: Path) -> None:
    replica = Replica(feed, tmp_path)
    before_ms = int(time.time() * 1000)
    feed.message(before_ms + 86_400_000)
    feed.epoch(source="create")
    logged_ms = int(time.time() * 1000)
    mark = replica.consume(logged_ms + 50_000)
    assert before_ms <= (mark.freshness_ms or 0) <= logged_ms
    # Read again later, or where a clock is behind, it is as old as it was.
    assert replica.restart().freshness_ms is None
    assert replica.consume(logged_ms + 90_000) == mark
    replica.partition.close()


def test_rows_without_a_time_do_not_get_younger_when_they_are_read_again(feed: Feed, tmp_path: Path) -> None:
    replica = Replica(feed, tmp_path)
    feed.message(0)
    feed.epoch(source="none")
    logged_ms = int(time.time() * 1000)
    mark = replica.consume(logged_ms + 50_000)
    assert (mark.freshness_ms or 0) <= logged_ms
    replica.restart()
    assert replica.consume(logged_ms + 90_000) == mark
    replica.partition.close()


def test_rows_of_an_epoch_that_is_being_closed_make_no_earlier_one_fresh() -> None:
    """Queries look while the first epoch after a start is applied."""
    marks = Marks(Position(log_offset=9, epoch=4, generation=1, next_offset=10), Watermark(next_offset=10, epoch=4))
    rows = TakeRows(
        batch=pa.RecordBatch.from_pylist([]), range=OffsetRange(10, 20), epoch=5, config_version=1,
        max_ingestion_ms=5_000, timestamp_type="logAppend",
    )  # fmt: skip
    marks.taken(rows, 10, 6_000, 6_000)
    assert (marks.at_epoch(4).next_offset, marks.at_epoch(4).freshness_ms) == (10, None)
    marks.closed(5, PartitionMark(end=20, rows=10))
    assert (marks.at_epoch(5).next_offset, marks.at_epoch(5).freshness_ms) == (20, 5_000)
    assert marks.at_epoch(3).freshness_ms is None


def test_of_a_cut_before_what_is_known_nothing_is_claimed() -> None:
    start = Position(log_offset=9, epoch=4, generation=1, next_offset=10)
    marks = Marks(start, Watermark(next_offset=10, epoch=4, max_ingestion_ms=5_000))
    assert marks.at_cut(start).freshness_ms == 5_000
    earlier = Position(log_offset=5, epoch=3, generation=1, next_offset=7)
    assert (marks.at_cut(earlier).next_offset, marks.at_cut(earlier).freshness_ms) == (7, None)


def test_what_a_rewind_took_back_is_not_claimed_by_who_reads_its_history_again(feed: Feed, tmp_path: Path) -> None:
    """Of an upsert table the log is read from before the start, for the sake of the versions of sealed segments."""
    for at_ms in (1_000, 2_000, 3_000):
        feed.message(at_ms)
    feed.epoch(end=1)
    feed.epoch(end=3)
    feed.beat(9_000)
    feed.rewind(1, 1)
    feed.epoch(end=2)
    writer = Replica(feed, tmp_path / "w")
    writer.consume()
    start = writer.partition.closings.last
    mark = writer.seal(start)
    assert (start.next_offset, mark.freshness_ms) == (2, 2_000)
    upsert = UpsertConfig(comparison_columns=("ts",))
    reader = Partition(
        OWN, start, tmp_path / "r", SpillQuota(), known=mark, upsert=upsert,
        replay_from=Position(log_offset=0, epoch=0, generation=0, next_offset=0),
    )  # fmt: skip
    while reader.turn(feed.log, 10_000):
        pass
    assert reader.error is None
    assert (reader.visible.next_offset, reader.visible.freshness_ms) == (2, 2_000)
    writer.partition.close()
    reader.close()


def test_a_query_between_the_two_steps_of_a_rewind_is_not_answered(feed: Feed, tmp_path: Path) -> None:
    replica = Replica(feed, tmp_path)
    for at_ms in (1_000, 2_000):
        feed.message(at_ms)
        feed.epoch()
    replica.consume()
    table = HostedTable(table_record())
    table.partitions[0] = replica.partition
    replica.partition.tail.truncate(1)
    request = TailRequest(partition=0, from_offset=0)
    assert table.resolve((), (request,)).behind == [0]
    replica.partition.marks.rolled_back(1, 1)
    (tail,) = table.resolve((), (request,)).tails
    assert (tail.covered.next, tail.watermark.freshness_ms) == (1, 1_000)
    replica.partition.close()


def test_messages_that_become_no_rows_move_the_mark_all_the_same(feed: Feed, tmp_path: Path) -> None:
    replica = Replica(feed, tmp_path)
    for at_ms, kind in ((1_000, FILTERED), (2_000, TOMBSTONE), (3_000, REJECTED), (4_000, FILTERED)):
        feed.message(at_ms, kind)
    feed.epoch()
    mark = replica.consume()
    assert (mark.freshness_ms, mark.next_offset, mark.held_at_ms) == (4_000, 4, None)
    assert (replica.partition.marks.rejected, replica.partition.marks.filtered) == (2, 2)
    replica.partition.close()


def test_errors_hold_the_mark_if_the_table_wants_it_until_it_no_longer_does(feed: Feed, tmp_path: Path) -> None:
    replica = Replica(feed, tmp_path, HOLD)
    for at_ms, kind in ((1_000, ROW), (2_000, REJECTED), (3_000, TOMBSTONE), (4_000, ROW)):
        feed.message(at_ms, kind)
    feed.epoch()
    feed.message(5_000, REJECTED)
    feed.epoch()
    assert replica.consume().freshness_ms == 2_000
    replica.seal(replica.partition.closings.last)
    assert replica.restart().freshness_ms == 2_000
    feed.message(6_000)
    feed.epoch()
    assert replica.consume().freshness_ms == 2_000
    replica.partition.promise(FreshnessSla())
    assert replica.partition.visible.freshness_ms == 6_000
    # Switched on again, what was rejected before is forgiven.
    replica.partition.promise(HOLD)
    assert replica.partition.visible.freshness_ms == 6_000
    replica.partition.close()


def test_a_rewind_takes_a_hold_back_and_keeps_what_is_known_of_the_rows_that_are_left(
    feed: Feed, tmp_path: Path
) -> None:
    replica = Replica(feed, tmp_path, HOLD)
    feed.message(1_000)
    feed.epoch(reached_at_ms=1_500)
    good = replica.consume()
    feed.message(2_000, REJECTED)
    feed.epoch()
    assert replica.consume().held_at_ms == 2_000
    feed.rewind(1, 1)
    assert replica.consume() == good
    assert good.freshness_ms == 1_500
    replica.partition.close()


def test_an_epoch_of_long_ago_is_stood_for_by_an_earlier_one(
    feed: Feed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment whose build took long: what is remembered begins after its cut."""
    monkeypatch.setattr(marks_of, "EPOCHS_SEEN", 3)
    replica = Replica(feed, tmp_path)
    feed.message(1_000)
    feed.epoch()
    replica.consume()
    cut = replica.partition.closings.last
    for at_ms in range(2_000, 9_000, 1_000):
        feed.message(at_ms)
        feed.epoch()
    replica.consume()
    assert replica.partition.marks.at_cut(cut).freshness_ms is None
    replica.partition.close()


def test_segments_of_a_former_version_say_what_they_know(tmp_path: Path) -> None:
    first = msgspec.structs.replace(
        open_segment_metadata(0, 0, START, ("me",)), end_offset=10, max_ingestion_ms=5_000, last_indexed_ms=6_000
    )
    stored = msgspec.json.encode(first)
    assert b'"mark":null' in stored
    former = msgspec.json.decode(stored.replace(b'"mark":null,', b""), type=SegmentMetadata)
    start = Position(log_offset=9, epoch=3, generation=1, next_offset=10)
    known = known_at([former], start)
    assert known is not None
    assert (known.freshness_ms, known.source) == (5_000, "create")
    untimed = msgspec.structs.replace(former, max_ingestion_ms=None)
    known = known_at([untimed], start)
    assert known is not None
    assert (known.freshness_ms, known.source) == (6_000, "index")
    # Segments past the start are not of what is here.
    assert known_at([msgspec.structs.replace(former, end_offset=11)], start) is None
    assert known_at([], start) is None


def test_metrics_say_how_far_a_partition_is_and_are_gone_with_it(feed: Feed, tmp_path: Path) -> None:
    replica = Replica(feed, tmp_path)
    ahead_ms = int(time.time() * 1000) + 3_600_000
    for kind in (ROW, ROW, FILTERED, REJECTED):
        feed.message(ahead_ms, kind)
    feed.epoch(end=3)
    replica.consume()
    table = HostedTable(table_record())
    table.partitions[0] = replica.partition
    registry = CollectorRegistry()
    PartitionMetrics(registry, {"trips": table})

    def told() -> dict[str, float]:
        lines = [line.rsplit(" ", 1) for line in generate_latest(registry).decode().splitlines() if line[0] != "#"]
        return {name.split("{")[0].removeprefix("pinot_server_"): float(value) for name, value in lines}

    found = told()
    # The clock of the stream is ahead: that is neither a lag below zero, nor fresh for the next hour.
    assert 0 <= found["realtimeIngestionDelayMs"] < 600_000
    assert found["realtimeIngestionDelayReportingStatus"] == 1
    assert found["realtimeIngestionUpstreamOffset"] == 4
    assert (found["realtimeIngestionConsumingOffset"], found["highestStreamOffsetConsumed"]) == (3, 2)
    assert (found["realtimeIngestionOffsetLag"], found["llcPartitionConsuming"]) == (1, 1)
    assert (found["realtimeRowsConsumed_total"], found["realtimeRowsFiltered_total"]) == (2, 1)
    feed.epoch()
    replica.consume()
    assert (told()["realtimeIngestionOffsetLag"], told()["invalidRealtimeRowsDropped_total"]) == (0, 1)
    del table.partitions[0]
    assert told() == {}
    replica.partition.close()
