# SPDX-License-Identifier: Apache-2.0
"""Closing an epoch: partition 0 decides (design: epoch-log.md, Writing). One machine per run (generation).

Driver, in foreachBatch, after the one Spark action, holding the run's lock (heartbeats take the same lock):
`effects = machine.step(CloseBatch(...))`, carry them out in order, feed each one's event back, until `CommitBatch`
(return, Spark commits) or `GiveUp` (stop the query; `fenced` says whether to retry).

A Gap is appended by the planner *before* the tasks start (a block behind an unexplained hole stops its readers), and is
decided once per generation and batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from cremant.epoch.format import Head
from cremant.epoch.protocol import Append, Appended, EffectFailed, GiveUp, PlannedBatch, RunPlan
from cremant.epoch.safeguards import ALL, Safeguards
from cremant.model.offsets import OffsetRange


class BlockAck(msgspec.Struct, frozen=True, kw_only=True):
    """A row block of this batch that the log acknowledged, as the successful task attempt reported it."""

    partition: int
    range: OffsetRange
    rows: int
    rejected: int = 0
    filtered: int = 0
    max_ingestion_ms: int | None = None


class GapAck(msgspec.Struct, frozen=True, kw_only=True):
    """A Gap of this batch that the log acknowledged."""

    partition: int
    range: OffsetRange


# --- events (beside Appended, EffectFailed) ---


class CloseBatch(msgspec.Struct, frozen=True, kw_only=True):
    """All blocks of the batch are acknowledged. `stream_ends`: per partition the end of the stream, read at
    `ends_read_at_ms` or later (take the time first); empty = unknown."""

    plan: PlannedBatch
    blocks: tuple[BlockAck, ...]
    gaps: tuple[GapAck, ...] = ()
    stream_ends: tuple[int, ...] = ()
    ends_read_at_ms: int | None = None


class ReadBackDone(msgspec.Struct, frozen=True):
    """`highest_fence`: highest generation of a Fence read, 0 if none (`highest_fence(heads)`)."""

    highest_fence: int


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """No batch is in flight; at `at_ms` (taken before reading) the stream ended at `ends`."""

    ends: tuple[int, ...]
    at_ms: int


Event = CloseBatch | Appended | ReadBackDone | Idle | EffectFailed

# --- effects (beside Append, GiveUp) ---


class ReadBack(msgspec.Struct, frozen=True):
    """Read the heads of `partition` with log offsets in [first, up_to) -> ReadBackDone."""

    partition: int
    first: int
    up_to: int


class CommitBatch(msgspec.Struct, frozen=True):
    """The epoch is closed in every partition (or was before, a replay): let Spark commit the batch (no event)."""

    batch_id: int
    epoch: int
    replayed: bool = False


Effect = Append | ReadBack | CommitBatch | GiveUp


def highest_fence(heads: Iterable[Head]) -> int:
    """Highest generation among the Fences of `heads`, 0 if there is none."""
    raise NotImplementedError


class CloseState(StrEnum):
    OPEN = "open"


class CloseMachine:
    """`epoch`: last closed epoch; `ends`: its vector (start offsets before the first)."""

    def __init__(self, run: RunPlan, *, safeguards: Safeguards = ALL) -> None:
        self.run = run
        self.state = CloseState.OPEN
        self.epoch = run.previous
        self.ends: tuple[int, ...] = run.start

    def step(self, event: Event) -> list[Effect]:
        """`Idle` answers heartbeats for all partitions if everything up to `ends` is closed, else nothing; their
        `Appended` events may be fed back or not. Raises InvariantViolation for an event the state does not expect."""
        raise NotImplementedError
