# SPDX-License-Identifier: Apache-2.0
"""What reading a partition of an epoch log answers (`cremant.epoch.reader`), in the order of the log."""

from __future__ import annotations

from enum import StrEnum

import msgspec
import pyarrow as pa

from cremant.epoch.records import PartitionMark
from cremant.model.offsets import OffsetRange, Position


class TakeRows(msgspec.Struct, frozen=True, kw_only=True):
    """Append `batch` (may be empty) to the tail: it accounts for exactly the stream offsets of `range`, which begins
    where the previous one ended. `rejected_from_ms`: smallest ingestion time of its messages that became no row because
    of an error; None: there were none, or it is not known."""

    batch: pa.RecordBatch
    range: OffsetRange
    epoch: int
    config_version: int
    max_ingestion_ms: int | None
    timestamp_type: str
    rejected_from_ms: int | None = None


class TakeUpdates(msgspec.Struct, frozen=True, kw_only=True):
    """Upsert tables: what epoch `epoch` does to rows of this partition, all of it, once. Comes after the rows of the
    epoch and before its EpochClosed; not at all if the epoch does nothing here. `batch` as in UpdateBlock, sorted, each
    update once. Rows of the epoch without an INSERT are superseded."""

    epoch: int
    batch: pa.RecordBatch


class GapTaken(msgspec.Struct, frozen=True, kw_only=True):
    """The stream offsets of `range` will never be rows. It begins where the previous range ended."""

    range: OffsetRange
    reason: str


class EpochClosed(msgspec.Struct, frozen=True, kw_only=True):
    """A position to store and a place to cut. `line` is the mark's line for this partition, `partitions` how many it
    has."""

    epoch: int
    position: Position
    line: PartitionMark
    partitions: int = 0


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
    """A Reset: drop rows at or past `next_offset` and every segment and position above `epoch` (0: of a partition that
    came to be later, everything)."""

    epoch: int
    next_offset: int


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """Rule `rule` does not hold: the partition stops here rather than show wrong data; every later step answers the
    same. What was taken before stays visible."""

    rule: str
    message: str
    hint: str


Effect = TakeRows | TakeUpdates | GapTaken | EpochClosed | CaughtUp | Fenced | RolledBack | Stopped
