# SPDX-License-Identifier: Apache-2.0
"""The records of the epoch log (design: epoch-log.md, Records). One log message each; bytes: `cremant.epoch.format`.

A Spark micro-batch is an epoch. Per epoch and partition the pipeline appends row blocks, then closes the epoch with
marks: partition 0 first, and that append decides.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
import pyarrow as pa

from cremant.model.offsets import OffsetRange
from cremant.model.upsert import DELETE as DELETE
from cremant.model.upsert import INSERT as INSERT
from cremant.model.upsert import UPDATE_SCHEMA as UPDATE_SCHEMA


class GapReason(StrEnum):
    EXPIRED = "expired"
    LATEST = "resumedFromLatest"


class RowBlock(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of stream offsets [range.first, range.next) of one partition; filtered and rejected ones are covered, too.

    `max_ingestion_ms`: ingestion time of the newest message covered, whatever became of it; `rejected_from_ms`: of the
    oldest that an error kept from becoming a row. None: the stream gives no time, or there is no such message.
    `timestamp_type` is empty where the range holds no message at all.

    `batch`: `$offset` int64, `$subRow` int32, `$ingestionTime` int64 (nullable), then the table's columns; sorted by
    (`$offset`, `$subRow`). `content_hash` is over the batch's IPC bytes: a function of stream record and config alone.
    """

    generation: int
    epoch: int
    config_version: int
    range: OffsetRange
    rejected: int
    filtered: int
    max_ingestion_ms: int | None
    timestamp_type: str
    content_hash: str
    batch: pa.RecordBatch
    rejected_from_ms: int | None = None

    @property
    def rows(self) -> int:
        return int(self.batch.num_rows)


class UpdateBlock(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of rows of this partition with epoch `epoch` (upsert tables; the document's segment update events).

    `batch` (UPDATE_SCHEMA): `$offset` int64, `$subRow` int32, `op` int8 (INSERT or DELETE); sorted by (`$offset`,
    `$subRow`), each row once. INSERT: the row is in force from this epoch on. DELETE: it was, and no longer is.
    Blocks of one epoch are written by several tasks, so their rows interleave; as a set each update is there once.
    """

    generation: int
    epoch: int
    content_hash: str
    batch: pa.RecordBatch

    @property
    def updates(self) -> int:
        return int(self.batch.num_rows)


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Stream offsets that never become rows."""

    generation: int
    range: OffsetRange
    reason: GapReason


class PartitionMark(msgspec.Struct, frozen=True, kw_only=True):
    """One partition's line of a mark. `end`: stream offset after the epoch. `rows`, `updates`: distinct ones of the
    epoch. `max_ingestion_ms`: of all its messages. `stream_end` was read at `reached_at_ms` or later iff `reached`
    (then everything up to that time is in)."""

    end: int
    rows: int
    updates: int = 0
    rejected: int = 0
    filtered: int = 0
    max_ingestion_ms: int | None = None
    stream_end: int = 0
    reached_at_ms: int | None = None


class EpochMark(msgspec.Struct, frozen=True, kw_only=True):
    """Closes `epoch`. The same whole vector stands in every partition; in partition 0 it commits.

    `blocks_generation`: whose blocks count (a mark rolled forward by a later generation names the old one).
    """

    generation: int
    epoch: int
    previous: int
    blocks_generation: int
    config_version: int
    partitions: tuple[PartitionMark, ...]

    @property
    def partition_count(self) -> int:
        return len(self.partitions)


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Idle partition: nothing past epoch `last_closed`; at `at_ms` (taken before reading) the stream ended at `ends`.
    Stands in the partitions that are idle: in others there may be messages that are not in a closed epoch."""

    generation: int
    last_closed: int
    ends: tuple[int, ...]
    at_ms: int


class Fence(msgspec.Struct, frozen=True, kw_only=True):
    """From here on only `generation` or higher is believed (E-1)."""

    generation: int


class Reset(msgspec.Struct, frozen=True, kw_only=True):
    """Back to `epoch`: later rows and segments are dropped and consumed again."""

    generation: int
    epoch: int


Record = RowBlock | UpdateBlock | Gap | EpochMark | Heartbeat | Fence | Reset
