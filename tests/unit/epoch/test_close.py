# SPDX-License-Identifier: Apache-2.0
"""Closing an epoch: partition 0 first, read back, then the others; nothing else in between."""

from __future__ import annotations

import pytest

from cremant.epoch.close import (
    BlockAck,
    CloseBatch,
    CloseMachine,
    CloseState,
    CommitBatch,
    GapAck,
    Idle,
    ReadBack,
    ReadBackDone,
    UpdateAck,
    highest_fence,
    transition_table,
)
from cremant.epoch.protocol import Append, Appended, EffectFailed, GiveUp, PlannedBatch, Replay, RunPlan
from cremant.epoch.records import EpochMark, Fence, Heartbeat, PartitionMark
from cremant.model.errors import InvariantViolation
from cremant.model.offsets import OffsetRange


def machine(replay: Replay | None = None, start: tuple[int, ...] = (10, 20)) -> CloseMachine:
    return CloseMachine(
        RunPlan(
            generation=3,
            base=5,
            checkpoint="generation-3",
            fresh=False,
            first_batch=4,
            replay=replay,
            start=start,
            previous=8,
            config_version=1,
            fence_offset=100,
        )
    )


def ack(partition: int, first: int, end: int, **fields: int) -> BlockAck:
    return BlockAck(partition=partition, range=OffsetRange(first, end), rows=end - first, **fields)


def batch(batch_id: int = 4, *, start=(10, 20), end=(15, 22), blocks=None, gaps=(), **fields):  # type: ignore[no-untyped-def]
    if blocks is None:
        blocks = tuple(ack(p, a, b) for p, (a, b) in enumerate(zip(start, end, strict=True)) if a < b)
    plan = PlannedBatch(batch_id=batch_id, start=start, end=end, config_version=1)
    return CloseBatch(plan=plan, blocks=tuple(blocks), gaps=tuple(gaps), **fields)


def test_an_epoch_is_closed_in_partition_0_read_back_and_then_closed_elsewhere() -> None:
    """open -> marking first -> checking -> marking rest -> open"""
    closing = machine()
    [first] = closing.step(batch(stream_ends=(15, 30), ends_read_at_ms=77))
    assert isinstance(first, Append)
    assert first.partition == 0
    mark = first.record
    assert mark == EpochMark(
        generation=3, epoch=9, previous=8, blocks_generation=3, config_version=1,
        partitions=(
            PartitionMark(end=15, rows=5, stream_end=15, reached_at_ms=77),
            PartitionMark(end=22, rows=2, stream_end=30),
        ),
    )  # fmt: skip
    assert closing.step(Appended(0, 107)) == [ReadBack(0, first=101, up_to=107)]
    assert closing.step(ReadBackDone(3)) == [Append(1, mark)]
    assert closing.step(Appended(1, 55)) == [CommitBatch(4, 9)]
    assert (closing.state, closing.epoch, closing.ends) == (CloseState.OPEN, 9, (15, 22))
    closing.step(batch(5, start=(15, 22), end=(15, 23)))
    assert closing.step(Appended(0, 120)) == [ReadBack(0, first=108, up_to=120)]


def test_a_fence_in_front_of_the_mark_stops_before_any_other_mark() -> None:
    closing = machine()
    closing.step(batch())
    closing.step(Appended(0, 107))
    [gave_up] = closing.step(ReadBackDone(4))
    assert isinstance(gave_up, GiveUp)
    assert gave_up.fenced
    assert closing.step(Appended(1, 1)) == []
    assert closing.step(Idle(ends=(10, 20), at_ms=1)) == []
    with pytest.raises(InvariantViolation):
        closing.step(batch())


def test_a_replayed_batch_is_committed_without_a_mark() -> None:
    closing = machine(replay=Replay(batch_id=3, epoch=8))
    assert closing.step(batch(3, start=(1, 1), end=(10, 20), blocks=())) == [CommitBatch(3, 8, replayed=True)]
    assert isinstance(closing.step(batch())[0], Append)


def test_counts_of_blocks_are_added_up_per_partition() -> None:
    blocks = [
        ack(0, 10, 12, rejected=1, max_ingestion_ms=5),
        ack(0, 13, 15, filtered=2, max_ingestion_ms=9),
        ack(0, 12, 13),
    ]
    [effect] = machine().step(batch(end=(15, 20), blocks=blocks))
    assert isinstance(effect, Append)
    assert isinstance(effect.record, EpochMark)
    assert effect.record.partitions == (
        PartitionMark(end=15, rows=5, rejected=1, filtered=2, max_ingestion_ms=9),
        PartitionMark(end=20, rows=0),
    )


def test_updates_are_added_up_by_the_partition_of_the_row_they_touch() -> None:
    """Also where the epoch brings no rows."""
    acks = (UpdateAck(partition=1, updates=3), UpdateAck(partition=0, updates=1), UpdateAck(partition=1, updates=4))
    [effect] = machine().step(batch(end=(10, 20), blocks=(), updates=acks))
    assert isinstance(effect, Append)
    assert isinstance(effect.record, EpochMark)
    assert [(line.rows, line.updates) for line in effect.record.partitions] == [(0, 1), (0, 7)]


def test_updates_of_a_partition_that_the_batch_does_not_have_end_the_run() -> None:
    [gave_up] = machine().step(batch(updates=(UpdateAck(partition=2, updates=1),)))
    assert isinstance(gave_up, GiveUp)
    assert (gave_up.rule, gave_up.fenced) == ("E-4", False)
    assert "partitions [2]" in gave_up.reason


def test_a_gap_counts_as_covered() -> None:
    gaps = [GapAck(partition=0, range=OffsetRange(10, 13))]
    [effect] = machine().step(batch(end=(15, 20), blocks=[ack(0, 13, 15)], gaps=gaps))
    assert isinstance(effect, Append)
    assert isinstance(effect.record, EpochMark)
    assert effect.record.partitions[0] == PartitionMark(end=15, rows=2)


@pytest.mark.parametrize(
    "blocks",
    [
        [ack(0, 10, 15)],
        [ack(0, 10, 15), ack(1, 20, 21)],
        [ack(0, 10, 15), ack(1, 20, 22), ack(1, 20, 22)],
        [ack(0, 11, 15), ack(1, 20, 22)],
        [ack(0, 10, 16), ack(1, 20, 22)],
        [ack(0, 10, 15), ack(1, 20, 22), ack(2, 0, 1)],
    ],
    ids=["a partition is missing", "too short", "twice", "a hole", "too long", "an unknown partition"],
)
def test_acknowledged_ranges_must_cover_the_plan_exactly(blocks: list[BlockAck]) -> None:
    closing = machine()
    [gave_up] = closing.step(batch(blocks=blocks))
    assert isinstance(gave_up, GiveUp)
    assert gave_up.rule == "E-2"
    assert not gave_up.fenced


def test_a_checkpoint_that_changed_under_the_run_is_not_believed() -> None:
    for wrong in (batch(5), batch(start=(9, 20)), batch(start=(10, 20, 0), end=(15, 22, 1))):
        [gave_up] = machine().step(wrong)
        assert isinstance(gave_up, GiveUp)
        assert (gave_up.fenced, gave_up.rule) == (False, "")
        assert "checkpoint changed" in gave_up.reason


def test_a_batch_planned_before_a_partition_was_added_closes_the_old_ones() -> None:
    closing = machine(start=(10, 20, 7))
    closing.step(batch())
    closing.step(Appended(0, 107))
    assert [e.partition for e in closing.step(ReadBackDone(0)) if isinstance(e, Append)] == [1]
    closing.step(Appended(1, 5))
    assert closing.ends == (15, 22, 7)


def test_one_partition_needs_no_other_marks() -> None:
    closing = machine(start=(10,))
    closing.step(batch(start=(10,), end=(12,)))
    closing.step(Appended(0, 101))
    assert closing.step(ReadBackDone(3)) == [CommitBatch(4, 9)]


def test_an_idle_table_says_so_in_every_partition() -> None:
    closing = machine()
    beat = Heartbeat(generation=3, last_closed=8, ends=(10, 20), at_ms=50)
    assert closing.step(Idle(ends=(10, 20), at_ms=50)) == [Append(0, beat), Append(1, beat)]
    assert closing.step(Appended(0, 101)) == []
    assert closing.step(Idle(ends=(11, 21), at_ms=60)) == []
    closing.step(batch())
    assert closing.step(Idle(ends=(10, 20), at_ms=70)) == []


def test_an_idle_partition_says_so_while_another_is_busy() -> None:
    """Of the busy one that would not be true."""
    closing = machine()
    beat = Heartbeat(generation=3, last_closed=8, ends=(10, 25), at_ms=50)
    assert closing.step(Idle(ends=(10, 25), at_ms=50)) == [Append(0, beat)]
    assert closing.step(Appended(0, 101)) == []


def test_a_failed_append_ends_the_run() -> None:
    closing = machine()
    closing.step(batch())
    assert closing.step(EffectFailed("disk full")) == [GiveUp(reason="disk full")]


def test_an_event_that_does_not_belong_is_refused_and_changes_nothing() -> None:
    closing = machine()
    with pytest.raises(InvariantViolation, match="ReadBackDone in state open"):
        closing.step(ReadBackDone(0))
    assert closing.state is CloseState.OPEN


def test_the_highest_fence_among_heads_is_found() -> None:
    assert highest_fence([]) == 0
    assert highest_fence([Fence(generation=2), Heartbeat(generation=9, last_closed=1, ends=(), at_ms=1)]) == 2
    assert "| checking | ReadBackDone |" in transition_table()
