# SPDX-License-Identifier: Apache-2.0
"""The partition reader, rule by rule. `log` feeds records in log order and keeps what came out."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

from cremant.epoch import reader as reader_module
from cremant.epoch.format import row_block
from cremant.epoch.reader import (
    CaughtUp,
    Effect,
    EpochClosed,
    Fenced,
    GapTaken,
    Ignored,
    PartitionReader,
    RolledBack,
    Stopped,
    TakeRows,
    TakeUpdates,
)
from cremant.epoch.records import (
    DELETE,
    INSERT,
    EpochMark,
    Fence,
    Gap,
    GapReason,
    Heartbeat,
    PartitionMark,
    Record,
    Reset,
    RowBlock,
    UpdateBlock,
)
from cremant.epoch.updates import update_block
from cremant.model.offsets import OffsetRange, Position

START = Position(log_offset=0, epoch=0, generation=0, next_offset=0)


def block(
    first: int, end: int, *, epoch: int = 1, generation: int = 1, config: int = 1, salt: int = 0, step: int = 1
) -> RowBlock:
    """One row per offset (per `step` offsets); the content depends on offset, config and `salt`."""
    offsets = np.arange(first, end, step, dtype=np.int64)
    batch = pa.record_batch(
        {
            "$offset": offsets,
            "$subRow": np.zeros(len(offsets), np.int32),
            "$ingestionTime": offsets + 1000,
            "value": offsets * 10 + config + salt,
        }
    )
    return row_block(
        generation=generation,
        epoch=epoch,
        config_version=config,
        range=OffsetRange(first, end),
        batch=batch,
        timestamp_type="logAppend",
    )


def mark(
    end: int,
    rows: int,
    *,
    epoch: int = 1,
    previous: int = 0,
    generation: int = 1,
    blocks_generation: int | None = None,
    config: int = 1,
    partitions: int = 1,
    **line: int,
) -> EpochMark:
    return EpochMark(
        generation=generation,
        epoch=epoch,
        previous=previous,
        blocks_generation=generation if blocks_generation is None else blocks_generation,
        config_version=config,
        partitions=(PartitionMark(end=end, rows=rows, **line),) * partitions,
    )


def updates(*rows: tuple[int, int, int], epoch: int = 1, generation: int = 1) -> UpdateBlock:
    """(offset, sub-row, op) each."""
    offsets, sub_rows, ops = zip(*rows, strict=True)
    return update_block(generation=generation, epoch=epoch, offsets=offsets, sub_rows=sub_rows, ops=ops)


def taken_updates(effects: list[Effect]) -> list[tuple[int, list[tuple[int, ...]]]]:
    return [
        (e.epoch, list(zip(*(column.to_pylist() for column in e.batch.columns), strict=True)))
        for e in effects
        if isinstance(e, TakeUpdates)
    ]


def gap(first: int, end: int, generation: int = 1) -> Gap:
    return Gap(generation=generation, range=OffsetRange(first, end), reason=GapReason.EXPIRED)


class Reading:
    """A reader and the log it reads."""

    def __init__(self, start: Position = START, *, partition: int = 0, upsert: bool = False) -> None:
        self.reader = PartitionReader(partition, start, upsert=upsert)
        self.at = start.log_offset

    def log(self, *records: Record) -> list[Effect]:
        effects: list[Effect] = []
        for record in records:
            effects.extend(self.reader.step(record, self.at))
            self.at += 1
        return effects

    def values(self, effects: list[Effect]) -> list[int]:
        return [v for e in effects if isinstance(e, TakeRows) for v in e.batch.column("value").to_pylist()]


def stopped(effects: list[Effect], rule: str, words: str) -> Stopped:
    assert isinstance(effects[-1], Stopped), effects
    assert effects[-1].rule == rule
    assert words in effects[-1].message
    assert effects[-1].hint
    return effects[-1]


def test_rows_are_taken_on_arrival_and_the_mark_closes_the_epoch() -> None:
    reading = Reading()
    effects = reading.log(Fence(generation=1), block(0, 4), block(4, 6), mark(6, 6, stream_end=6, reached_at_ms=77))
    assert [type(e) for e in effects] == [Fenced, TakeRows, TakeRows, EpochClosed, CaughtUp]
    closed = effects[3]
    assert isinstance(closed, EpochClosed)
    assert closed.position == Position(log_offset=4, epoch=1, generation=1, next_offset=6)
    assert closed.line.rows == 6
    assert reading.reader.position == closed.position
    assert effects[4] == CaughtUp(77)


def test_what_is_there_already_is_trimmed() -> None:
    reading = Reading()
    effects = reading.log(Fence(generation=1), block(0, 5), block(0, 3), block(3, 8), mark(8, 8))
    taken = [e for e in effects if isinstance(e, TakeRows)]
    assert [(e.range.first, e.range.next) for e in taken] == [(0, 5), (5, 8)]
    assert reading.values(effects) == [o * 10 + 1 for o in range(8)]
    assert isinstance(effects[-1], EpochClosed)
    assert reading.reader.ignored[Ignored.NOTHING_NEW] == 1


def test_filtered_offsets_are_accounted_for_without_rows() -> None:
    reading = Reading()
    effects = reading.log(Fence(generation=1), block(0, 9, step=3), block(9, 11, step=5), mark(11, 4))
    assert [e.batch.num_rows for e in effects if isinstance(e, TakeRows)] == [3, 1]
    assert isinstance(effects[-1], EpochClosed)


def test_e1_records_of_a_fenced_generation_have_no_effect() -> None:
    reading = Reading()
    reading.log(Fence(generation=1), block(0, 2), Fence(generation=2))
    effects = reading.log(
        block(2, 9), mark(9, 9), gap(2, 5), Heartbeat(generation=1, last_closed=0, ends=(0,), at_ms=1),
        Reset(generation=1, epoch=0), Fence(generation=1),
    )  # fmt: skip
    assert effects == []
    assert reading.reader.ignored[Ignored.LOWER_GENERATION] == 6


def test_e1_a_generation_without_fence_stops_the_partition() -> None:
    reading = Reading()
    stopped(reading.log(Fence(generation=1), block(0, 2, generation=2)), "E-1", "generation 2")
    assert isinstance(reading.log(Fence(generation=3))[0], Stopped)


def test_e1_a_mark_rolled_forward_names_the_blocks_of_the_old_generation() -> None:
    """block(1) · Fence(2) · Fence(3) · mark(generation 3, blocks of 1)"""
    reading = Reading()
    effects = reading.log(
        Fence(generation=1), block(0, 3), Fence(generation=2), Fence(generation=3),
        mark(3, 3, generation=3, blocks_generation=1),
    )  # fmt: skip
    assert isinstance(effects[-1], EpochClosed)
    assert effects[-1].position.generation == 3


def test_e1_a_position_restores_the_generation_in_force() -> None:
    reading = Reading(Position(log_offset=9, epoch=4, generation=3, next_offset=20))
    assert reading.log(block(20, 25, epoch=5, generation=2)) == []
    effects = reading.log(block(20, 22, epoch=6, generation=3), mark(22, 2, epoch=6, previous=4, generation=3))
    assert isinstance(effects[-1], EpochClosed)


def test_e2_a_hole_stops_the_partition_unless_a_gap_explains_it() -> None:
    stopped(Reading().log(Fence(generation=1), block(0, 2), block(3, 5)), "E-2", "[2, 3)")
    stopped(Reading().log(Fence(generation=1), gap(2, 5)), "E-2", "[0, 2)")
    effects = Reading().log(Fence(generation=1), block(0, 2), gap(2, 3), block(3, 5), mark(5, 4))
    assert effects[2] == GapTaken(range=OffsetRange(2, 3), reason="expired")
    assert isinstance(effects[-1], EpochClosed)


def test_e2_blocks_of_one_range_that_differ_stop_the_partition() -> None:
    hint = stopped(Reading().log(Fence(generation=1), block(0, 2), block(0, 2, salt=1)), "E-2", "differ").hint
    assert "deterministic" in hint


def test_e2_blocks_of_one_range_and_other_config_may_differ_and_the_first_stays() -> None:
    """A lost checkpoint plans the range again, under a newer config, as another epoch."""
    reading = Reading()
    effects = reading.log(
        Fence(generation=1), block(0, 4), Fence(generation=2), block(0, 6, epoch=2, generation=2, config=2),
        mark(6, 6, epoch=2, generation=2, config=2),
    )  # fmt: skip
    assert reading.values(effects) == [1, 11, 21, 31, 42, 52]
    assert isinstance(effects[-1], EpochClosed)


def test_e2_two_configs_in_one_epoch_stop_the_partition() -> None:
    stopped(Reading().log(Fence(generation=1), block(0, 2), block(2, 4, config=2)), "E-2", "config versions 1 and 2")
    stopped(Reading().log(Fence(generation=1), block(0, 2), mark(2, 2, config=2)), "E-2", "config version 1")


def test_e2_a_mark_must_be_covered_by_its_own_blocks() -> None:
    stopped(Reading().log(Fence(generation=1), block(0, 2, step=2), mark(4, 1)), "E-2", "cover [0, 2)")
    stopped(Reading().log(Fence(generation=1), block(0, 4, step=4), mark(3, 1)), "E-2", "cover [0, 4)")


def test_e3_late_records_of_a_closed_epoch_are_ignored() -> None:
    reading = Reading()
    reading.log(Fence(generation=1), block(0, 2), mark(2, 2))
    assert reading.log(block(0, 2, salt=9), block(2, 4), mark(2, 2)) == []
    assert reading.reader.ignored[Ignored.CLOSED_EPOCH] == 3


def test_e3_an_epoch_cannot_end_before_the_one_in_front_of_it() -> None:
    reading = Reading()
    reading.log(Fence(generation=1), block(0, 5), mark(5, 5))
    stopped(reading.log(block(0, 3, epoch=2), mark(3, 3, epoch=2, previous=1)), "E-3", "offset 3")


def test_e3_rows_of_an_epoch_that_never_closed_stay_where_they_are() -> None:
    """Generation 1 shows [0, 6), closes nothing; generation 2 plans less. The position knows what is taken."""
    reading = Reading()
    effects = reading.log(
        Fence(generation=1), block(0, 6), Fence(generation=2), block(0, 4, epoch=2, generation=2),
        mark(4, 4, epoch=2, generation=2),
    )  # fmt: skip
    closed = effects[-1]
    assert isinstance(closed, EpochClosed)
    assert closed.position.next_offset == 6
    late = block(4, 9, epoch=3, generation=2, config=2)
    final = mark(9, 5, epoch=3, previous=2, generation=2, config=2)
    again = Reading(closed.position)
    assert reading.values(reading.log(late, final)) == again.values(again.log(late, final)) == [62, 72, 82]
    assert reading.reader.position == again.reader.position


def test_e4_a_count_that_differs_stops_the_partition() -> None:
    stopped(Reading().log(Fence(generation=1), block(0, 2), mark(2, 3)), "E-4", "2 distinct rows")
    stopped(Reading().log(Fence(generation=1), mark(0, 1)), "E-4", "0 distinct rows")


def test_e4_rows_are_counted_as_a_set() -> None:
    """Three attempts of one task, cut differently."""
    effects = Reading().log(
        Fence(generation=1), block(0, 5), block(0, 3), block(3, 9), block(0, 2), block(2, 9), block(9, 10), mark(10, 10)
    )
    assert isinstance(effects[-1], EpochClosed)


def test_e4_blocks_of_another_generation_do_not_count() -> None:
    effects = Reading().log(
        Fence(generation=1), block(0, 5, epoch=2), Fence(generation=2), block(0, 3, epoch=2, generation=2),
        mark(3, 3, epoch=2, generation=2),
    )  # fmt: skip
    assert isinstance(effects[-1], EpochClosed)


def test_e4_the_chain_of_epochs_must_not_break() -> None:
    reading = Reading()
    reading.log(Fence(generation=1), block(0, 2), mark(2, 2))
    stopped(reading.log(mark(2, 0, epoch=5, previous=4)), "E-4", "follows epoch 4")


def test_e7_a_new_partition_enters_at_whatever_epoch_the_table_is() -> None:
    start = Position(log_offset=0, epoch=0, generation=0, next_offset=40)
    reading = Reading(start, partition=1)
    effects = reading.log(
        Fence(generation=6), block(40, 43, epoch=9, generation=6),
        mark(43, 3, epoch=9, previous=7, generation=6, partitions=2),
    )  # fmt: skip
    assert isinstance(effects[-1], EpochClosed)
    stopped(reading.log(mark(43, 0, epoch=10, previous=9, generation=6)), "E-7", "1 partitions")


def test_a_heartbeat_says_that_everything_is_here() -> None:
    reading = Reading()
    reading.log(Fence(generation=1), block(0, 2), mark(2, 2, stream_end=9))
    assert reading.log(Heartbeat(generation=1, last_closed=1, ends=(2,), at_ms=50)) == [CaughtUp(50)]
    assert reading.log(Heartbeat(generation=1, last_closed=1, ends=(3,), at_ms=60)) == []
    assert reading.log(Heartbeat(generation=1, last_closed=2, ends=(2,), at_ms=70)) == []


def test_a_reset_goes_back_to_a_closed_epoch_and_goes_on_from_there() -> None:
    reading = Reading()
    reading.log(Fence(generation=1), block(0, 2), mark(2, 2), block(2, 5, epoch=2), mark(5, 3, epoch=2, previous=1))
    effects = reading.log(block(5, 7, epoch=3), Fence(generation=2), Reset(generation=2, epoch=1))
    assert effects[-1] == RolledBack(epoch=1, next_offset=2)
    effects = reading.log(
        block(2, 4, epoch=4, generation=2, config=2), mark(4, 2, epoch=4, previous=1, generation=2, config=2)
    )
    assert reading.values(effects) == [22, 32]
    assert isinstance(effects[-1], EpochClosed)


def test_a_reset_to_before_a_partition_came_to_be_takes_it_back_to_its_beginning() -> None:
    """It enters with epoch 5 and goes back to before epoch 3; the next mark follows epoch 3."""
    start = Position(log_offset=0, epoch=0, generation=0, next_offset=40)
    reading = Reading(start, partition=1, upsert=True)
    reading.log(
        Fence(generation=1), block(40, 43, epoch=5), mark(43, 3, epoch=5, previous=4, partitions=2),
        Fence(generation=2),
    )  # fmt: skip
    assert reading.log(Reset(generation=2, epoch=3)) == [RolledBack(epoch=0, next_offset=40)]
    assert reading.reader.position == Position(log_offset=5, epoch=0, generation=2, next_offset=40)
    effects = reading.log(
        block(40, 42, epoch=6, generation=2), mark(42, 2, epoch=6, previous=3, generation=2, partitions=2)
    )
    assert reading.values(effects) == [401, 411]
    assert isinstance(effects[-1], EpochClosed)


def test_a_reset_below_what_the_reader_knows_stops_it() -> None:
    reading = Reading(Position(log_offset=9, epoch=4, generation=3, next_offset=20))
    stopped(reading.log(Reset(generation=3, epoch=2)), "E-4", "epoch 2")


def test_upsert_rows_are_taken_at_the_mark_that_names_them() -> None:
    """Blocks of generation 1 are dropped: the mark names those of generation 2, of another config."""
    reading = Reading(upsert=True)
    effects = reading.log(
        Fence(generation=1), block(0, 4), Fence(generation=2), gap(0, 1, generation=2),
        block(1, 4, epoch=2, generation=2, config=2), block(1, 3, epoch=2, generation=2, config=2),
        block(3, 6, epoch=2, generation=2, config=2),
    )  # fmt: skip
    assert [type(e) for e in effects] == [Fenced, Fenced]
    effects = reading.log(mark(6, 5, epoch=2, generation=2, config=2))
    assert [type(e) for e in effects] == [GapTaken, TakeRows, TakeRows, EpochClosed]
    assert reading.values(effects) == [12, 22, 32, 42, 52]
    assert reading.reader.position.next_offset == 6


def test_updates_come_at_the_mark_after_the_rows_each_once_and_in_order() -> None:
    """A reduce task is tried again: once the same block, once cut otherwise."""
    reading = Reading(upsert=True)
    effects = reading.log(
        Fence(generation=1), updates((2, 0, INSERT), (0, 1, DELETE)), block(0, 3), updates((1, 0, INSERT)),
        updates((2, 0, INSERT), (0, 1, DELETE)), updates((1, 0, INSERT), (0, 1, DELETE)),
    )  # fmt: skip
    assert [type(e) for e in effects] == [Fenced]
    effects = reading.log(mark(3, 3, updates=3))
    assert [type(e) for e in effects] == [TakeRows, TakeUpdates, EpochClosed]
    assert taken_updates(effects) == [(1, [(0, 1, DELETE), (1, 0, INSERT), (2, 0, INSERT)])]
    effects = reading.log(mark(3, 0, epoch=2, previous=1))
    assert [type(e) for e in effects] == [EpochClosed]


def test_an_epoch_may_touch_old_rows_only() -> None:
    reading = Reading(Position(log_offset=9, epoch=4, generation=3, next_offset=20), upsert=True)
    effects = reading.log(
        updates((7, 0, DELETE), epoch=5, generation=3), mark(20, 0, epoch=5, previous=4, generation=3, updates=1)
    )
    assert [type(e) for e in effects] == [TakeUpdates, EpochClosed]


def test_e1_updates_of_the_generation_that_the_mark_names_count() -> None:
    """updates(1) · Fence(2) · mark(generation 2, blocks of 1); the orphan's updates after the Fence are ignored."""
    reading = Reading(upsert=True)
    effects = reading.log(
        Fence(generation=1), block(0, 2), updates((0, 0, INSERT)), Fence(generation=2), updates((1, 0, INSERT)),
        mark(2, 2, generation=2, blocks_generation=1, updates=1),
    )  # fmt: skip
    assert taken_updates(effects) == [(1, [(0, 0, INSERT)])]
    assert reading.reader.ignored[Ignored.LOWER_GENERATION] == 1
    assert reading.log(updates((1, 0, INSERT), generation=2)) == []
    assert reading.reader.ignored[Ignored.CLOSED_EPOCH] == 1


def test_e3_updates_of_an_epoch_that_was_never_closed_are_dropped() -> None:
    reading = Reading(upsert=True)
    effects = reading.log(
        Fence(generation=1), block(0, 2), updates((0, 0, INSERT)), Fence(generation=2),
        block(0, 2, epoch=3, generation=2), updates((1, 0, INSERT), epoch=3, generation=2),
        mark(2, 2, epoch=3, generation=2, updates=1),
    )  # fmt: skip
    assert taken_updates(effects) == [(3, [(1, 0, INSERT)])]


def test_e4_updates_that_are_missing_or_contradict_each_other_stop_the_partition() -> None:
    told = Reading(upsert=True).log(Fence(generation=1), block(0, 2), updates((0, 0, INSERT)), mark(2, 2, updates=2))
    stopped(told, "E-4", "1 distinct updates here, its mark says 2")
    told = Reading(upsert=True).log(Fence(generation=1), block(0, 2), mark(2, 2, updates=1))
    stopped(told, "E-4", "0 distinct updates")
    told = Reading(upsert=True).log(
        Fence(generation=1), block(0, 2), updates((0, 3, INSERT)), updates((0, 3, DELETE)), mark(2, 2, updates=2)
    )
    stopped(told, "E-4", "both inserts and deletes 1 rows, of which one is offset 0, sub-row 3")


def test_updates_of_an_epoch_that_a_reset_takes_back_are_dropped() -> None:
    reading = Reading(upsert=True)
    reading.log(Fence(generation=1), block(0, 2), updates((0, 0, INSERT)), mark(2, 2, updates=1))
    reading.log(updates((1, 0, INSERT), epoch=2), Fence(generation=2), Reset(generation=2, epoch=1))
    effects = reading.log(
        updates((0, 0, DELETE), epoch=3, generation=2), mark(2, 0, epoch=3, previous=1, generation=2, updates=1)
    )
    assert taken_updates(effects) == [(3, [(0, 0, DELETE)])]


def test_a_table_that_appends_counts_updates_and_does_not_hand_them_out() -> None:
    effects = Reading().log(Fence(generation=1), block(0, 1), updates((0, 0, INSERT)), mark(1, 1, updates=1))
    assert [type(e) for e in effects] == [Fenced, TakeRows, EpochClosed]


def test_memory_is_bounded_by_what_is_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "EPOCHS_REMEMBERED", 10)
    monkeypatch.setattr(reader_module, "UNCLOSED_BLOCKS_MAX", 5)
    reading = Reading()
    reading.log(Fence(generation=1))
    for epoch in range(1, 40):
        first = (epoch - 1) * 8
        blocks = [block(first + i, first + i + 1, epoch=epoch) for i in range(8)]
        reading.log(*blocks)
        assert len(reading.reader._hashes) <= 5
        reading.log(mark(first + 8, 8, epoch=epoch, previous=epoch - 1))
    assert len(reading.reader._closed) == 10
    assert not reading.reader._blocks
    for generation in range(2, 50):
        reading.log(Fence(generation=generation), block(312, 313, epoch=40 + generation, generation=generation))
        reading.log(updates((1, 0, DELETE), epoch=40 + generation, generation=generation))
    assert len(reading.reader._blocks) == len(reading.reader._updates) == 1
    assert reading.reader.stopped is None


# --- times ---


@pytest.mark.parametrize("upsert", [False, True])
def test_what_a_block_says_of_times_comes_with_its_rows(upsert: bool) -> None:
    """Also of a block that has none."""
    empty = replace(block(4, 4), range=OffsetRange(4, 6), max_ingestion_ms=5_000, rejected_from_ms=4_000)
    effects = Reading(upsert=upsert).log(Fence(generation=1), block(0, 4), empty, mark(6, 4))
    taken = [effect for effect in effects if isinstance(effect, TakeRows)]
    assert [(one.range, one.max_ingestion_ms, one.rejected_from_ms) for one in taken] == [
        (OffsetRange(0, 4), 1_003, None), (OffsetRange(4, 6), 5_000, 4_000),
    ]  # fmt: skip


def test_of_a_block_that_is_new_at_its_end_only_times_are_those_of_all_of_it() -> None:
    """Earlier errors are errors still, and no later message than the newest is in its end."""
    again = replace(block(2, 8, step=6), range=OffsetRange(2, 8), max_ingestion_ms=1_007, rejected_from_ms=900)
    *_, taken = Reading().log(Fence(generation=1), block(0, 4), again)
    assert isinstance(taken, TakeRows)
    assert (taken.range, taken.max_ingestion_ms, taken.rejected_from_ms) == (OffsetRange(4, 8), 1_007, 900)


def test_a_heartbeat_counts_where_nothing_is_missing_whatever_other_partitions_lack() -> None:
    closed = (Fence(generation=1), block(0, 4), mark(4, 4, partitions=2))
    beat = Heartbeat(generation=1, last_closed=1, ends=(9, 4), at_ms=77)
    idle, busy = Reading(partition=1), Reading()
    assert idle.log(*closed)[-1] != CaughtUp(77)
    assert idle.log(beat) == [CaughtUp(77)]
    busy.log(*closed)
    assert busy.log(beat) == []
