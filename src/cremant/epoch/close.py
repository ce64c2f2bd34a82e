# SPDX-License-Identifier: Apache-2.0
"""Closing an epoch: partition 0 decides (design: epoch-log.md, Writing). One machine per run (generation).

Driver, in foreachBatch, after the one Spark action, holding the run's lock (heartbeats take the same lock):
`effects = machine.step(CloseBatch(...))`, carry them out in order, feed each one's event back, until `CommitBatch`
(return, Spark commits) or `GiveUp` (stop the query; `fenced` says whether to retry).

    open -> marking first -> checking -> marking rest -> open (CommitBatch);   from any: stopped

The append to partition 0 commits the epoch if no Fence of a higher generation precedes it; that is what reading back
finds out, and why nothing else is written before. A crash anywhere in between is put right by the next start.

A Gap is appended by the planner *before* the tasks start (a block behind an unexplained hole stops its readers), and is
decided once per generation and batch.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

from cremant.epoch.protocol import (
    Append,
    Appended,
    EffectFailed,
    GiveUp,
    PlannedBatch,
    ReadBack,
    ReadBackDone,
    RunPlan,
    as_markdown,
    highest_fence,
)
from cremant.epoch.records import EpochMark, Heartbeat, PartitionMark
from cremant.epoch.safeguards import ALL, Safeguards
from cremant.model.errors import InvariantViolation
from cremant.model.offsets import OffsetRange


class BlockAck(msgspec.Struct, frozen=True, kw_only=True):
    """A row block of this batch that the log acknowledged, as the successful task attempt reported it."""

    partition: int
    range: OffsetRange
    rows: int
    rejected: int = 0
    filtered: int = 0
    max_ingestion_ms: int | None = None


class UpdateAck(msgspec.Struct, frozen=True, kw_only=True):
    """An update block of this batch that the log acknowledged (upsert tables). No update is in two blocks."""

    partition: int
    updates: int


class GapAck(msgspec.Struct, frozen=True, kw_only=True):
    """A Gap of this batch that the log acknowledged."""

    partition: int
    range: OffsetRange


# --- events (beside Appended, ReadBackDone, EffectFailed) ---


class CloseBatch(msgspec.Struct, frozen=True, kw_only=True):
    """All blocks of the batch are acknowledged. `stream_ends`: per partition the end of the stream, read at
    `ends_read_at_ms` or later (take the time first); empty = unknown."""

    plan: PlannedBatch
    blocks: tuple[BlockAck, ...]
    gaps: tuple[GapAck, ...] = ()
    updates: tuple[UpdateAck, ...] = ()
    stream_ends: tuple[int, ...] = ()
    ends_read_at_ms: int | None = None


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """At `at_ms` (taken before reading) the stream ended at `ends`: perhaps nothing is new, in all partitions or some.
    What is on its way into a partition counts as there."""

    ends: tuple[int, ...]
    at_ms: int


Event = CloseBatch | Appended | ReadBackDone | Idle | EffectFailed

# --- effects (beside Append, ReadBack, GiveUp) ---


class CommitBatch(msgspec.Struct, frozen=True):
    """The epoch is closed in every partition (or was before, a replay): let Spark commit the batch (no event)."""

    batch_id: int
    epoch: int
    replayed: bool = False


Effect = Append | ReadBack | CommitBatch | GiveUp


class CloseState(StrEnum):
    OPEN = "open"
    MARKING_FIRST = "marking first"
    CHECKING = "checking"
    MARKING_REST = "marking rest"
    STOPPED = "stopped"


class CloseMachine:
    """`epoch`: last closed epoch; `ends`: its vector (before the first: where each partition starts)."""

    def __init__(self, run: RunPlan, *, safeguards: Safeguards = ALL) -> None:
        self.run = run
        self.state = CloseState.OPEN
        self.epoch = run.previous
        self.ends: tuple[int, ...] = run.start
        self._safeguards = safeguards
        #: Partition 0 holds no higher Fence before this log offset.
        self._checked_to = run.fence_offset + 1
        self._plan: PlannedBatch | None = None
        self._mark: EpochMark | None = None
        self._waiting: set[int] = set()
        self._next_batch = run.first_batch

    def step(self, event: Event) -> list[Effect]:
        """`Idle` answers heartbeats for the partitions in which everything up to `ends` is closed, if no batch is being
        closed just now; their `Appended` events need not be fed back. Raises InvariantViolation for an event that the
        state does not expect; nothing has changed then. A machine that gave up answers nothing to the effects that were
        still under way."""
        if isinstance(event, Idle):
            return self._heartbeats(event)
        if self.state is CloseState.STOPPED and not isinstance(event, CloseBatch):
            return []
        if isinstance(event, EffectFailed):
            return self._give_up(event.reason)
        handler = TRANSITIONS.get((self.state, type(event)))
        if handler is None:
            raise InvariantViolation("close", f"{type(event).__name__} in state {self.state}")
        return handler(self, event)

    @property
    def lines(self) -> tuple[PartitionMark, ...]:
        """Per partition what the newest mark of this run says; empty before the first."""
        return self._mark.partitions if self._mark is not None else ()

    # --- open ---

    def _close_batch(self, event: CloseBatch) -> list[Effect]:
        batch_id, replay = event.plan.batch_id, self.run.replay
        if replay is not None and batch_id == replay.batch_id:
            return [CommitBatch(batch_id, replay.epoch, replayed=True)]
        if wrong := self._wrong_plan(event.plan):
            return self._give_up(f"the checkpoint changed under this run: {wrong}")
        if wrong := _wrong_coverage(event):
            return self._give_up(wrong, rule="E-2")
        if wrong := _wrong_updates(event):
            return self._give_up(wrong, rule="E-4")
        self._plan = event.plan
        self._mark = EpochMark(
            generation=self.run.generation,
            epoch=self.run.epoch_of(batch_id),
            previous=self.epoch,
            blocks_generation=self.run.generation,
            config_version=event.plan.config_version,
            partitions=tuple(_line(event, partition) for partition in range(len(event.plan.end))),
        )
        self.state = CloseState.MARKING_FIRST
        return [Append(0, self._mark)]

    def _wrong_plan(self, plan: PlannedBatch) -> str:
        """What is wrong with it, "" if nothing is. Somebody else (an operator, a generation that does not know yet that
        it is fenced) may have written to the checkpoint since it was compared; the next start compares again."""
        if plan.batch_id != self._next_batch:
            return f"batch {plan.batch_id} follows batch {self._next_batch - 1}"
        if len(plan.start) != len(plan.end) or len(plan.start) > len(self.ends):
            return f"batch {plan.batch_id} has {len(plan.end)} partitions, this run has {len(self.ends)}"
        if self._safeguards.plan_checked and plan.start != self.ends[: len(plan.start)]:
            return f"batch {plan.batch_id} starts at {plan.start}, epoch {self.epoch} ended at {self.ends}"
        return ""

    def _heartbeats(self, event: Idle) -> list[Effect]:
        if self.state is not CloseState.OPEN:
            return []
        beat = Heartbeat(generation=self.run.generation, last_closed=self.epoch, ends=event.ends, at_ms=event.at_ms)
        ends = enumerate(zip(event.ends, self.ends, strict=False))
        return [Append(partition, beat) for partition, (end, closed) in ends if end == closed]

    def _heartbeat_appended(self, event: Appended) -> list[Effect]:
        return []

    # --- marking ---

    def _first_marked(self, event: Appended) -> list[Effect]:
        if not self._safeguards.read_back:
            return self._mark_rest()
        self.state = CloseState.CHECKING
        checked_to, self._checked_to = self._checked_to, event.log_offset + 1
        return [ReadBack(0, first=checked_to, up_to=event.log_offset)]

    def _checked(self, event: ReadBackDone) -> list[Effect]:
        if event.highest_fence > self.run.generation:
            return self._give_up(
                f"generation {event.highest_fence} has taken over from generation {self.run.generation}", fenced=True
            )
        return self._mark_rest()

    def _mark_rest(self) -> list[Effect]:
        assert self._mark is not None
        self.state = CloseState.MARKING_REST
        self._waiting = set(range(1, self._mark.partition_count))
        if not self._waiting:
            return self._commit()
        return [Append(partition, self._mark) for partition in range(1, self._mark.partition_count)]

    def _rest_marked(self, event: Appended) -> list[Effect]:
        self._waiting.remove(event.partition)
        return [] if self._waiting else self._commit()

    def _commit(self) -> list[Effect]:
        assert self._plan is not None
        assert self._mark is not None
        self.state = CloseState.OPEN
        self.epoch = self._mark.epoch
        self.ends = self._plan.end + self.ends[len(self._plan.end) :]
        self._next_batch = self._plan.batch_id + 1
        return [CommitBatch(self._plan.batch_id, self.epoch)]

    def _give_up(self, reason: str, *, fenced: bool = False, rule: str = "") -> list[Effect]:
        self.state = CloseState.STOPPED
        return [GiveUp(reason=reason, fenced=fenced, rule=rule)]


def _wrong_coverage(event: CloseBatch) -> str:
    """Where acknowledged blocks and gaps do not cover the plan exactly, each offset once; "" if they do."""
    acks: list[BlockAck | GapAck] = [*event.blocks, *event.gaps]
    pieces = sorted((ack.partition, ack.range.first, ack.range.next) for ack in acks)
    batch = f"batch {event.plan.batch_id}"
    at = list(event.plan.start)
    for partition, first, end in pieces:
        if partition >= len(at) or first != at[partition]:
            expected = at[partition] if partition < len(at) else "nothing"
            return f"{batch}, partition {partition}: acknowledged [{first}, {end}), expected {expected}"
        at[partition] = end
    if tuple(at) != event.plan.end:
        return f"{batch}: acknowledged up to {tuple(at)}, planned up to {event.plan.end}"
    return ""


def _wrong_updates(event: CloseBatch) -> str:
    """Which updates touch rows where there is no partition, "" if none do: no reader would count them."""
    unknown = sorted({ack.partition for ack in event.updates} - set(range(len(event.plan.end))))
    if not unknown:
        return ""
    return (
        f"batch {event.plan.batch_id}: updates of rows of partitions {unknown}, it has {len(event.plan.end)} partitions"
    )


def _line(event: CloseBatch, partition: int) -> PartitionMark:
    blocks = [ack for ack in event.blocks if ack.partition == partition]
    end = event.plan.end[partition]
    stream_end = event.stream_ends[partition] if partition < len(event.stream_ends) else 0
    reached = event.ends_read_at_ms is not None and partition < len(event.stream_ends) and end >= stream_end
    return PartitionMark(
        end=end,
        rows=sum(ack.rows for ack in blocks),
        updates=sum(ack.updates for ack in event.updates if ack.partition == partition),
        rejected=sum(ack.rejected for ack in blocks),
        filtered=sum(ack.filtered for ack in blocks),
        max_ingestion_ms=max(
            (ack.max_ingestion_ms for ack in blocks if ack.max_ingestion_ms is not None), default=None
        ),
        stream_end=stream_end,
        reached_at_ms=event.ends_read_at_ms if reached else None,
    )


#: (state, event) -> what happens. Besides: Idle in every state (heartbeats only when open), EffectFailed stops.
TRANSITIONS: dict[tuple[CloseState, type[Any]], Callable[[CloseMachine, Any], list[Effect]]] = {
    (CloseState.OPEN, CloseBatch): CloseMachine._close_batch,
    (CloseState.OPEN, Appended): CloseMachine._heartbeat_appended,
    (CloseState.MARKING_FIRST, Appended): CloseMachine._first_marked,
    (CloseState.CHECKING, ReadBackDone): CloseMachine._checked,
    (CloseState.MARKING_REST, Appended): CloseMachine._rest_marked,
}


def transition_table() -> str:
    """The table as Markdown, for the documentation."""
    return as_markdown(TRANSITIONS)


__all__ = [
    "BlockAck", "CloseBatch", "CloseMachine", "CloseState", "CommitBatch", "Effect", "Event", "GapAck", "Idle",
    "ReadBack", "ReadBackDone", "UpdateAck", "highest_fence", "transition_table",
]  # fmt: skip
