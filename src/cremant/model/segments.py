# SPDX-License-Identifier: Apache-2.0
"""Metadata of a segment: a range [start, end) of one partition's rows, consuming or sealed."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from cremant.model.offsets import Position, Watermark
from cremant.model.table import PartitionFunction


class SegmentStatus(StrEnum):
    """Pinot's words. COMMITTING: the cut is decided and durable, the rows are not yet sealed."""

    IN_PROGRESS = "IN_PROGRESS"
    COMMITTING = "COMMITTING"
    DONE = "DONE"


class ReplicaState(StrEnum):
    CONSUMING = "CONSUMING"
    ONLINE = "ONLINE"
    OFFLINE = "OFFLINE"
    ERROR = "ERROR"


class StoreState(StrEnum):
    """NONE: the table's policy wants no object; PENDING: wanted and under way; STORED: there; FAILED: `store_error`."""

    NONE = "none"
    PENDING = "pending"
    STORED = "stored"
    FAILED = "failed"


class Copy(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A verified copy on a server's disk."""

    checksum: str
    verified_at_ms: int


class StoredVersions(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Upsert tables: which rows of a sealed segment are in force from when until when, as an object of the deep store.
    It says so as of `position`, just after the mark of its epoch: updates that follow there are to be replayed into it.
    A later position without another object means that nothing changed up to there; after a rewind the object may have
    updates beyond its position, some of which are taken back by what follows that."""

    url: str
    position: Position
    size_bytes: int
    #: Over the object's bytes, `sha256:<hex>`.
    file_checksum: str


class ColumnRange(msgspec.Struct, frozen=True, kw_only=True):
    """Smallest and largest value of a numeric or string column, as JSON values; for pruning."""

    min: Any
    max: Any


class ColumnPartitions(msgspec.Struct, frozen=True, kw_only=True):
    """Partitions that the values of a column really have in a segment, of `partitions` by `function`; for pruning."""

    function: PartitionFunction
    partitions: int
    ids: tuple[int, ...]


class Loss(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """No copy of these rows is left anywhere: queries that need them say so until an operator accepts it."""

    at_ms: int
    rows: int
    start_offset: int
    end_offset: int
    cause: str


class SegmentForm(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What the content of a segment depends on beside its rows: the order, and what stands in cells of columns that
    are younger than their rows (column -> `defaultNullValue` as the schema had it). Config and schema may change; with
    this the same rows give the same content for ever."""

    sorted_column: str | None = None
    filled: dict[str, Any] = {}


class SegmentMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What the cluster knows of one segment.

    `start` is where its rows begin in the epoch log. `end_offset` is set once, when the cut is decided (I-1);
    everything below it only when the segment is DONE. `checksum` is over decoded columns, `file_checksum` over
    the Parquet bytes. `end` is where the next segment begins. Compaction changes rows, size and checksums; what pruning
    and retention go by stays as it was sealed.
    """

    name: str
    partition: int
    sequence: int
    status: SegmentStatus
    start_offset: int
    start: Position
    created_ms: int
    replicas: tuple[str, ...]
    #: Fencing number of the commit attempt in force; every decision about the cut raises it.
    commit_token: int = 0
    committer: str | None = None
    #: When the committer's lease ends (wall ms of the controller's clock).
    lease_until_ms: int = 0
    end_offset: int | None = None
    end: Position | None = None
    rows: int = 0
    size_bytes: int = 0
    checksum: str | None = None
    file_checksum: str | None = None
    min_time_ms: int | None = None
    max_time_ms: int | None = None
    max_ingestion_ms: int | None = None
    last_indexed_ms: int | None = None
    #: How far its partition was visible at its end; None: sealed by a former version, which did not say.
    mark: Watermark | None = None
    columns: dict[str, ColumnRange] = {}
    partitioning: dict[str, ColumnPartitions] = {}
    form: SegmentForm = SegmentForm()
    copies: dict[str, Copy] = {}
    store_state: StoreState = StoreState.NONE
    store_url: str | None = None
    #: Why the last upload failed, and when `store_state` last changed (wall ms of the controller's clock).
    store_error: str | None = None
    store_changed_ms: int = 0
    #: Of upsert tables, beside the object that `store_url` names.
    versions: StoredVersions | None = None
    #: Of upsert tables: rows that were replaced up to epoch `compacted_at` are gone, so many so far; nobody who has let
    #: go of them can be asked of an earlier epoch (0: all are there). `compacting`: the epoch at which it is to be
    #: compacted, None: it is not; by server `compactor`.
    compacted_at: int = 0
    rows_removed: int = 0
    compacting: int | None = None
    compactor: str | None = None
    lost: Loss | None = None
    #: An operator wants an open segment to end at the first closed position from this offset on; None = nobody does.
    force_at_offset: int | None = None

    @property
    def objects(self) -> tuple[str, ...]:
        """URLs of everything that the deep store has of it."""
        urls = (self.store_url, self.versions.url if self.versions is not None else None)
        return tuple(url for url in urls if url)
