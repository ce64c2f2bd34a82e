# SPDX-License-Identifier: Apache-2.0
"""Effects and events of the start machine (`cremant.epoch.start`). Each effect names the event that answers it."""

from __future__ import annotations

import msgspec

from cremant.epoch.protocol import (
    Append,
    Appended,
    CheckpointState,
    EffectFailed,
    GiveUp,
    ReadBack,
    ReadBackDone,
    RunPlan,
)
from cremant.epoch.scan import PartitionScan
from cremant.model.offsets import Position

# --- effects ---


class TakeGeneration(msgspec.Struct, frozen=True):
    """Compare-and-set the next generation, as holder of the lease -> GenerationTaken | GenerationRefused."""


class ReadPartitions(msgspec.Struct, frozen=True):
    """Read the stream partitions that have a consuming replica online, 0..n-1, and see that the epoch log has as many
    -> PartitionsRead."""


class ReadTo(msgspec.Struct, frozen=True):
    """Scan a partition of the epoch log -> Scanned(partition, scan).

    `scan = PartitionScan(effect)`; for each message from `scan.from_offset` on (the log's earliest, if that is higher)
    `scan.add(log_offset, peek(value, incarnation))` until `scan.done`, which is one's own Fence, or until the end of
    the log if `generation` is 0.
    """

    partition: int
    start: Position
    generation: int


class InspectCheckpoint(msgspec.Struct, frozen=True):
    """Read offset log and commit log of a checkpoint directory -> CheckpointInspected (None: not there, unreadable)."""

    checkpoint: str


class TakeBase(msgspec.Struct, frozen=True):
    """Compare-and-set base and checkpoint, if `generation` is still in force -> BaseTaken | GenerationRefused.

    `first_epoch`: of the first new batch; `previous`: the last closed one."""

    generation: int
    base: int
    checkpoint: str
    first_epoch: int
    previous: int


class AdoptCheckpoint(msgspec.Struct, frozen=True):
    """Copy `source` to `checkpoint`, without commits of a higher id than `commits_above`, plans of a higher id than
    `plans_above`, and state that follows those commits -> CheckpointAdopted.

    Every generation has a directory of its own: what a former one that was not dead after all still writes to its
    checkpoint changes nothing in this one's."""

    source: str
    checkpoint: str
    commits_above: int
    plans_above: int


class Planned(msgspec.Struct, frozen=True):
    """The start is over; run the query (no event follows)."""

    run: RunPlan


Effect = (
    TakeGeneration | Append | ReadBack | ReadPartitions | ReadTo | InspectCheckpoint | AdoptCheckpoint | TakeBase
    | Planned | GiveUp
)  # fmt: skip

# --- events (beside Appended, EffectFailed) ---


class GenerationTaken(msgspec.Struct, frozen=True):
    """`checkpoint`: directory of the generation before ("" if there is none). `reset_to`: as for the machine."""

    generation: int
    checkpoint: str
    reset_to: int | None = None


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


class CheckpointAdopted(msgspec.Struct, frozen=True):
    pass


Event = (
    GenerationTaken | GenerationRefused | Appended | PartitionsRead | Scanned | CheckpointInspected | BaseTaken
    | CheckpointAdopted | ReadBackDone | EffectFailed
)  # fmt: skip
