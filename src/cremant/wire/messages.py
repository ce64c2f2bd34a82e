# SPDX-License-Identifier: Apache-2.0
"""Messages between roles. Each names protocol version, cause (who started this, for logs) and, where a stale sender
could do harm, its generation or token. Bulk travels beside a message as a byte stream, never inside one."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from cremant.model.cluster import InstanceRecord, InstanceReport, Rewind
from cremant.model.offsets import OffsetRange, Position, Watermark
from cremant.model.segments import ColumnPartitions, ColumnRange, SegmentForm, StoredVersions, StoreState
from cremant.model.upsert import Cut
from cremant.wire.codec import PROTOCOL


class Message(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    protocol: int = PROTOCOL
    cause_id: str = ""


# --- any role -> controller: POST /internal/v1/heartbeat ---


class Heartbeat(Message, frozen=True, kw_only=True):
    """`nonce` is drawn at process start: an older process with the same id is recognised by it.

    `segments_kept`: the report leaves its segments out, they are as in the last heartbeat that was answered. `number`
    grows with each heartbeat of a process: one that was given up and arrives late counts for nothing."""

    instance: InstanceRecord
    nonce: str
    report: InstanceReport
    segments_kept: bool = False
    number: int = 0


class HeartbeatReply(Message, frozen=True, kw_only=True):
    controller_nonce: str
    view_version: int
    #: The controller's clock: ages of its records are measured by it.
    now_ms: int = 0
    #: It does not know the segments that were left out: say all again.
    say_all: bool = False


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
    #: rowLimit, sizeLimit, timeLimit, forceCommit, indexCapacityThresholdBreached, decided
    reason: str


class SegmentConsumedReply(Message, frozen=True, kw_only=True):
    """`end` is the decided cut; `token` fences the committer."""

    status: CompletionStatus
    end: Position | None = None
    token: int = 0


class CommitEnd(Message, frozen=True, kw_only=True):
    """POST /internal/v1/commitEnd: sealed and verified; uploaded, too, if `store_state` is stored (`store_url`). Else:
    pending (a `SegmentStored` follows), failed (`store_error`), or none (the table's policy)."""

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
    store_state: StoreState = StoreState.NONE
    store_url: str | None = None
    store_error: str | None = None
    min_time_ms: int | None = None
    max_time_ms: int | None = None
    max_ingestion_ms: int | None = None
    last_indexed_ms: int | None = None
    mark: Watermark | None = None
    columns: dict[str, ColumnRange] = {}
    partitioning: dict[str, ColumnPartitions] = {}
    form: SegmentForm = SegmentForm()

    def __post_init__(self) -> None:
        if (self.store_state is StoreState.STORED) != (self.store_url is not None):
            raise ValueError(f"storeUrl {self.store_url!r} contradicts storeState {self.store_state}")


class CommitEndReply(Message, frozen=True, kw_only=True):
    status: CompletionStatus


class SegmentStored(Message, frozen=True, kw_only=True):
    """POST /internal/v1/segmentStored: an upload beside the commit landed (`url`) or failed (`error`). Exactly one of
    both is set."""

    instance: str
    table: str
    incarnation: str
    segment: str
    checksum: str
    file_checksum: str
    #: Of the object; 0 = not said.
    size_bytes: int = 0
    url: str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        if (self.url is None) == (self.error is None):
            raise ValueError(f"exactly one of url and error is set, found {self.url!r} and {self.error!r}")


class SegmentStoredReply(Message, frozen=True, kw_only=True):
    """KEEP: recorded. DISCARD: not wanted (another content, another object, no such segment): the sender deletes the
    object it wrote; `store_url` is the one that the metadata names. HOLD: not committed yet, say it again."""

    status: CompletionStatus
    store_url: str | None = None


class VersionsStored(Message, frozen=True, kw_only=True):
    """POST /internal/v1/versionsStored: the deep store has which rows of a sealed segment are in force, as of
    `versions.position` (upsert tables). The object that is named already, with a later position: nothing changed up to
    there."""

    instance: str
    table: str
    incarnation: str
    segment: str
    #: Of the segment's content.
    checksum: str
    versions: StoredVersions


class VersionsStoredReply(Message, frozen=True, kw_only=True):
    """KEEP: recorded. DISCARD: not wanted (another content, no such segment, a later one is named). HOLD: the segment
    is not committed yet. `unnamed`: an object that no record names any more, for the sender to delete."""

    status: CompletionStatus
    unnamed: str | None = None


class SegmentCompacted(Message, frozen=True, kw_only=True):
    """POST /internal/v1/segmentCompacted: what is left of content `before` once the rows are gone that were replaced up
    to `epoch`; `url` and `versions`: where the deep store has it, and which of its rows are in force. `checksum` equal
    to `before`: there was nothing to let go of."""

    instance: str
    table: str
    incarnation: str
    segment: str
    epoch: int
    before: str
    checksum: str
    file_checksum: str
    rows: int
    size_bytes: int
    url: str | None = None
    versions: StoredVersions | None = None


class SegmentCompactedReply(Message, frozen=True, kw_only=True):
    """KEEP: recorded. DISCARD: not wanted (any more). NOT_LEADER: say it again."""

    status: CompletionStatus


# --- pipeline -> controller ---


class LeaseRequest(Message, frozen=True, kw_only=True):
    """POST /internal/v1/pipeline/lease: take or renew. `release` gives it up early (clean stop). `standby`: of a
    process that is there for the others' death; it leaves new tables to them for a while."""

    holder: str
    table: str
    incarnation: str
    release: bool = False
    standby: bool = False


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
    """`rewind`: to be carried out by this start. `rebuild`: number of the rebuild of the key coordinator's state that
    is to be begun; 0 = none. `keyed_from`: as in the record. `expire_before_ms`: a seed leaves out older keys."""

    generation: int
    base: int
    checkpoint: str
    rewind: Rewind | None = None
    rebuild: int = 0
    keyed_from: int | None = None
    expire_before_ms: int | None = None


class BaseRequest(Message, frozen=True, kw_only=True):
    """POST /internal/v1/pipeline/base: sets base and checkpoint directory if `generation` is in force (else 409).

    `first_epoch`: of the first new batch, `previous`: the last closed one. `rewound`, `rebuild`: what this start has
    carried out, begun. `keyed`: the run keeps a key coordinator's state. `expire_before_ms`: as granted."""

    table: str
    incarnation: str
    generation: int
    base: int
    checkpoint: str
    first_epoch: int = 0
    previous: int = 0
    rewound: Rewind | None = None
    rebuild: int = 0
    keyed: bool = False
    expire_before_ms: int | None = None


# --- broker -> server: POST /internal/v1/query ---


class TailRequest(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Rows of a partition from `from_offset` on, up to what is visible.

    `not_before`: rows below this offset must be among them. The server waits for them (holding no thread) while the
    query's budget lasts; without them it names the partition as behind."""

    partition: int
    from_offset: int
    not_before: int = 0


class PruneTerm(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A conjunct `column op value` of the filter that metadata may decide. op: = < <= > >= in. Values are stored forms
    (JSON). Dropping a segment is allowed only if no row in [min, max] can satisfy it."""

    column: str
    op: str
    values: tuple[int | float | str | bool, ...]


class KeyColumn(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A group key of the answer: its name there, and the column that it is ("" if it is computed)."""

    name: str
    column: str = ""


class SumColumn(msgspec.Struct, frozen=True, rename="camel"):
    """Column `name` of a partial answer: the sum of `column`, or, without one, how many rows there are."""

    name: str
    column: str = ""


class Shortcut(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What is known of a query beside its SQL. It may be ignored: the answer is the same.

    `where`: the condition, as it stands in the SQL behind `FROM t WHERE `; `exact`: the prune terms say all of it (also
    true without a condition). `rows`: the answer is these columns of any `limit` matching rows.
    `keyed_sql`: the same partial answer with one number, `$key`, in the place of the keys that are columns; it reads
    `keyed_columns`. `values_only`: the answer is nothing but the different values of the only key.
    `sums`: the answer is one row of these sums over matching rows (of INT as LONG, else as DOUBLE; NULL of none).
    `top`: of rows in order, only the first `limit` are wanted, and the order begins with this column (a number)."""

    where: str = ""
    exact: bool = False
    rows: tuple[str, ...] = ()
    limit: int = 0
    keys: tuple[KeyColumn, ...] = ()
    keyed_sql: str = ""
    keyed_columns: tuple[str, ...] = ()
    values_only: bool = False
    sums: tuple[SumColumn, ...] = ()
    top: str = ""
    top_descending: bool = False


class ServerQuery(Message, frozen=True, kw_only=True):
    """One server's share of a query.

    `sql` is DataFusion SQL over the table `t`, whose columns are `columns` (user columns and `$` columns).
    `cut`: the epoch L of the query and what is visible of it (upsert tables: always; append tables: never).
    """

    #: Unique per request, not per query: a server may be asked twice (retries, hedges). Names it for a cancel.
    request_id: str
    table: str
    incarnation: str
    sql: str
    columns: tuple[str, ...]
    segments: tuple[str, ...]
    tails: tuple[TailRequest, ...]
    prune: tuple[PruneTerm, ...] = ()
    shortcut: Shortcut = Shortcut()
    cut: Cut | None = None
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
    #: Partitions of which this server no longer knows what was visible at the query's cut, and the oldest epoch that
    #: may be asked of it.
    refused_partitions: tuple[int, ...] = ()
    horizon: int = 0
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
    #: Of `elapsed_ms`, what passed before the query ran: waiting for a slot, or for rows (`not_before`).
    wait_ms: float = 0.0


# --- broker -> server: GET /internal/v1/epochs?since=N&nonce=X&timeoutMs=T (long poll) ---


class EpochState(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One partition of an upsert table on one server. `closed`: last epoch closed and applied there (the low-water mark
    of the pair); 0 before the first. `horizon`: oldest epoch that may be asked. `partitions`: how many the table had in
    the mark of `closed`."""

    closed: int
    horizon: int = 0
    partitions: int = 0


class EpochsReply(Message, frozen=True, kw_only=True):
    """`epochs`: incarnation of a table -> partition -> state; all of them, not differences. `version` grows with each
    change while the process `nonce` lives."""

    instance: str
    nonce: str
    version: int
    epochs: dict[str, dict[str, EpochState]] = {}
