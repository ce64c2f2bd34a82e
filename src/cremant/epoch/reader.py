# SPDX-License-Identifier: Apache-2.0
"""Reading one partition of an epoch log: order, fencing, counting (rules E-1 to E-8; design: epoch-log.md, Reading).

    reader = PartitionReader(partition, start)
    for each message from start.log_offset on:  for effect in reader.step(decode(value, incarnation), log_offset): ...

The state is a function of the log alone, so all replicas take the same rows and close at the same positions.
`next_offset` of a position is the first stream offset not yet *taken*. It can lie past the end of the closed epoch:
rows of an epoch that was never closed stay (append tables; first in log order wins).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
import pyarrow as pa

from cremant.epoch.records import PartitionMark, Record
from cremant.epoch.safeguards import ALL, Safeguards
from cremant.model.offsets import OffsetRange, Position


class TakeRows(msgspec.Struct, frozen=True, kw_only=True):
    """Append `batch` (may be empty) to the tail: it accounts for exactly the stream offsets of `range`, which begins
    where the previous one ended."""

    batch: pa.RecordBatch
    range: OffsetRange
    epoch: int
    config_version: int
    max_ingestion_ms: int | None
    timestamp_type: str


class GapTaken(msgspec.Struct, frozen=True, kw_only=True):
    """The stream offsets of `range` will never be rows. It begins where the previous range ended."""

    range: OffsetRange
    reason: str


class EpochClosed(msgspec.Struct, frozen=True, kw_only=True):
    """A position to store and a place to cut. `line` is the mark's line for this partition."""

    epoch: int
    position: Position
    line: PartitionMark


class CaughtUp(msgspec.Struct, frozen=True):
    """Everything that was in the stream at wall time `at_ms` is visible."""

    at_ms: int


class Fenced(msgspec.Struct, frozen=True):
    """From here on `generation` is in force."""

    generation: int


class Ignored(StrEnum):
    """Why a record had no effect; counted in `PartitionReader.ignored`, normal after retries and restarts."""

    LOWER_GENERATION = "lowerGeneration"
    CLOSED_EPOCH = "closedEpoch"
    NOTHING_NEW = "nothingNew"


class RolledBack(msgspec.Struct, frozen=True, kw_only=True):
    """A Reset: drop rows at or past `next_offset` and every segment and position above `epoch`."""

    epoch: int
    next_offset: int


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """Rule `rule` does not hold: the partition stops here rather than show wrong data; every later step answers the
    same. What was taken before stays visible."""

    rule: str
    message: str
    hint: str


Effect = TakeRows | GapTaken | EpochClosed | CaughtUp | Fenced | RolledBack | Stopped


class PartitionReader:
    """`start`: a stored position, or (0, 0, 0, start_offset) for the beginning of a new partition."""

    def __init__(self, partition: int, start: Position, *, upsert: bool = False, safeguards: Safeguards = ALL) -> None:
        self.partition = partition
        #: Last closed epoch; generation in force; first stream offset not taken.
        self.epoch = start.epoch
        self.generation = start.generation
        self.next_offset = start.next_offset
        #: Where it stopped for good, if it did.
        self.stopped: Stopped | None = None
        #: Records without effect, by cause.
        self.ignored: dict[Ignored, int] = dict.fromkeys(Ignored, 0)

    @property
    def position(self) -> Position:
        """The last closed position (the start, before the first mark)."""
        raise NotImplementedError

    def step(self, record: Record, log_offset: int) -> list[Effect]:
        raise NotImplementedError
