# SPDX-License-Identifier: Apache-2.0
"""Messages between roles. Each names protocol version, cause (who started this, for logs) and, where a stale sender
could do harm, its generation or token. Bulk travels beside a message as a byte stream, never inside one."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from cremant.model.cluster import InstanceRecord, InstanceReport
from cremant.model.offsets import OffsetRange, Position, Watermark
from cremant.model.segments import ColumnRange
from cremant.wire.codec import PROTOCOL


class Message(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    protocol: int = PROTOCOL
    cause_id: str = ""


# --- any role -> controller: POST /internal/v1/heartbeat ---


class Heartbeat(Message, frozen=True, kw_only=True):
    """`nonce` is drawn at process start: an older process with the same id is recognised by it."""

    instance: InstanceRecord
    nonce: str
    report: InstanceReport


class HeartbeatReply(Message, frozen=True, kw_only=True):
    controller_nonce: str
    view_version: int


# --- GET /internal/v1/view?since=N&nonce=X&timeoutMs=T answers a ClusterView (304 when nothing changed) ---


# --- server -> controller: segment completion ---


class CompletionStatus(StrEnum):
    """Pinot's words (SegmentCompletionProtocol); HOLD = ask again, CATCH_UP = read on to `end` first."""

    HOLD = "HOLD"
    CATCH_UP = "CATCH_UP"
    COMMIT = "COMMIT"
    KEEP = "KEEP"
    DISCARD = "DISCARD"
    COMMIT_SUCCESS = "COMMIT_SUCCESS"
    FAILED = "FAILED"
    NOT_LEADER = "NOT_LEADER"


class SegmentConsumed(Message, frozen=True, kw_only=True):
    """POST /internal/v1/segmentConsumed: a flush criterion is met; `at` is a closed position past it."""

    instance: str
    table: str
    incarnation: str
    segment: str
    at: Position
    #: rowLimit, sizeLimit, timeLimit, forceCommit
    reason: str


class SegmentConsumedReply(Message, frozen=True, kw_only=True):
    """`end` is the decided cut; `token` fences the committer."""

    status: CompletionStatus
    end: Position | None = None
    token: int = 0


class CommitEnd(Message, frozen=True, kw_only=True):
    """POST /internal/v1/commitEnd: sealed, verified and (if a store is there) uploaded."""

    instance: str
    table: str
    incarnation: str
    segment: str
    token: int
    end: Position
    rows: int
    size_bytes: int
    checksum: str
    file_checksum: str
    store_url: str | None
    min_time_ms: int | None = None
    max_time_ms: int | None = None
    max_ingestion_ms: int | None = None
    last_indexed_ms: int | None = None
    columns: dict[str, ColumnRange] = {}


class CommitEndReply(Message, frozen=True, kw_only=True):
    status: CompletionStatus


# --- pipeline -> controller ---


class LeaseRequest(Message, frozen=True, kw_only=True):
    """POST /internal/v1/pipeline/lease: take or renew. `release` gives it up early (clean stop)."""

    holder: str
    table: str
    incarnation: str
    release: bool = False


class LeaseReply(Message, frozen=True, kw_only=True):
    held: bool
    holder: str | None
    lease_until_ms: int


class GenerationRequest(Message, frozen=True, kw_only=True):
    """POST /internal/v1/pipeline/generation: the next fencing number; only the lease holder gets one (else 409)."""

    holder: str
    table: str
    incarnation: str


class GenerationReply(Message, frozen=True, kw_only=True):
    generation: int
    base: int
    checkpoint: str


class BaseRequest(Message, frozen=True, kw_only=True):
    """POST /internal/v1/pipeline/base: sets base and checkpoint directory if `generation` is in force (else 409)."""

    table: str
    incarnation: str
    generation: int
    base: int
    checkpoint: str


# --- broker -> server: POST /internal/v1/query ---


class TailRequest(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Rows of a partition from `from_offset` on, up to what is visible."""

    partition: int
    from_offset: int


class PruneTerm(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A conjunct `column op value` of the filter that metadata may decide. op: = < <= > >= in. Values are stored forms
    (JSON). Dropping a segment is allowed only if no row in [min, max] can satisfy it."""

    column: str
    op: str
    values: tuple[int | float | str | bool, ...]


class ServerQuery(Message, frozen=True, kw_only=True):
    """One server's share of a query.

    `sql` is DataFusion SQL over the table `t`, whose columns are `columns` (user columns and `$` columns).
    `low_water_mark`: the epoch L of the query (upsert tables), None for append tables.
    """

    request_id: str
    table: str
    incarnation: str
    sql: str
    columns: tuple[str, ...]
    segments: tuple[str, ...]
    tails: tuple[TailRequest, ...]
    prune: tuple[PruneTerm, ...] = ()
    low_water_mark: int | None = None
    #: Milliseconds this server may spend, counted from arrival (clocks differ, durations do not).
    budget_ms: int


class PartitionAnswer(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a tail answered: exactly the rows of `covered`, visible up to `watermark`."""

    partition: int
    covered: OffsetRange
    watermark: Watermark
    #: The tail's rows were scanned (not pruned), and at least one matched.
    processed: bool = True
    matched: bool = True


class ServerAnswer(Message, frozen=True, kw_only=True):
    """Header of a reply; the Arrow IPC stream of `sql`'s result follows in the body.

    `missing_segments` and `behind_partitions` could not be served: the broker asks another replica, or says so.
    Body layout: 4 bytes big-endian header length, header JSON, Arrow IPC stream (empty when `error` is set).
    """

    instance: str
    partitions: tuple[PartitionAnswer, ...] = ()
    missing_segments: tuple[str, ...] = ()
    behind_partitions: tuple[int, ...] = ()
    docs_total: int = 0
    docs_scanned: int = 0
    entries_scanned_in_filter: int = 0
    entries_scanned_post_filter: int = 0
    segments_queried: int = 0
    segments_processed: int = 0
    segments_matched: int = 0
    segments_pruned: int = 0
    error_code: int = 0
    error: str = ""
    elapsed_ms: float = 0.0
