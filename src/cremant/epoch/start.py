# SPDX-License-Identifier: Apache-2.0
"""The start of a table's query: eight steps from a new generation to a run plan (design: epoch-log.md, Starting).

Driver: `effects = machine.begin()`, carry them out in order, feed each one's event to `step`, go on with the effects
it returns, until `Planned` or `GiveUp`.

    machine = StartMachine(config_version=record.config_version, scan_from={...})
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from cremant.epoch.format import Head
from cremant.epoch.protocol import Append, Appended, CheckpointState, EffectFailed, GiveUp, RunPlan
from cremant.epoch.safeguards import ALL, Safeguards
from cremant.model.offsets import Position

# --- effects ---


class TakeGeneration(msgspec.Struct, frozen=True):
    """Compare-and-set the next generation, as holder of the lease -> GenerationTaken | GenerationRefused."""


class ReadPartitions(msgspec.Struct, frozen=True):
    """Read the stream partitions that have a consuming replica online, 0..n-1 -> PartitionsRead."""


class ReadTo(msgspec.Struct, frozen=True):
    """Scan a partition of the epoch log: `scan = PartitionScan(effect)`; for each message from `scan.from_offset` (the
    log's earliest, if that is higher) `scan.add(log_offset, peek(value, incarnation))` until `scan.done` (one's own
    Fence; with `up_to` None: until the end of the log) -> Scanned(partition, scan)."""

    partition: int
    start: Position
    up_to: int | None
    generation: int


class InspectCheckpoint(msgspec.Struct, frozen=True):
    """Read offset log and commit log of a checkpoint directory -> CheckpointInspected (None: not there, unreadable)."""

    checkpoint: str


class TakeBase(msgspec.Struct, frozen=True):
    """Compare-and-set base and checkpoint, if `generation` is still in force -> BaseTaken | GenerationRefused."""

    generation: int
    base: int
    checkpoint: str


class RepairCheckpoint(msgspec.Struct, frozen=True):
    """Remove commits with a higher id than `commits_above` and plans with a higher id than `plans_above`
    -> CheckpointRepaired."""

    checkpoint: str
    commits_above: int
    plans_above: int


class Planned(msgspec.Struct, frozen=True):
    """The start is over; run the query (no event follows)."""

    run: RunPlan


Effect = (
    TakeGeneration
    | Append
    | ReadPartitions
    | ReadTo
    | InspectCheckpoint
    | TakeBase
    | RepairCheckpoint
    | Planned
    | GiveUp
)

# --- events (beside Appended, EffectFailed) ---


class GenerationTaken(msgspec.Struct, frozen=True):
    """`checkpoint`: directory of the generation before ("" if there is none)."""

    generation: int
    checkpoint: str


class GenerationRefused(msgspec.Struct, frozen=True):
    """No lease, or a higher generation is in force."""

    reason: str


class PartitionsRead(msgspec.Struct, frozen=True):
    """`start_offsets`: per partition the first stream offset the table wants (PartitionRecord.start_offset)."""

    start_offsets: tuple[int, ...]


class Scanned(msgspec.Struct, frozen=True):
    partition: int
    scan: PartitionScan


class CheckpointInspected(msgspec.Struct, frozen=True):
    state: CheckpointState | None


class BaseTaken(msgspec.Struct, frozen=True):
    pass


class CheckpointRepaired(msgspec.Struct, frozen=True):
    pass


Event = (
    GenerationTaken | GenerationRefused | Appended | PartitionsRead | Scanned | CheckpointInspected | BaseTaken
    | CheckpointRepaired | EffectFailed
)  # fmt: skip


class PartitionScan:
    """A fold over the heads of one partition, up to one's own Fence; bounded memory."""

    def __init__(self, request: ReadTo) -> None:
        self.from_offset = max(0, request.start.log_offset - 1)

    @property
    def done(self) -> bool:
        """One's own Fence has been read."""
        raise NotImplementedError

    def add(self, log_offset: int, head: Head) -> None:
        raise NotImplementedError


class StartState(StrEnum):
    NEW = "new"


class StartMachine:
    """`config_version`: of the table now. `scan_from`: per partition a position at or before the last closed epoch of
    that partition (the start of its consuming segment); absent = from the beginning of the log."""

    def __init__(
        self, *, config_version: int, scan_from: Mapping[int, Position] | None = None, safeguards: Safeguards = ALL
    ) -> None:
        self.state = StartState.NEW

    def begin(self) -> list[Effect]:
        raise NotImplementedError

    def step(self, event: Event) -> list[Effect]:
        """Raises InvariantViolation for an event that the state does not expect; nothing has changed then."""
        raise NotImplementedError
