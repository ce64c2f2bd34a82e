# SPDX-License-Identifier: Apache-2.0
"""The durable and the reported state of the cluster, and the view of it that every role works from.

Durable records live in the metadata store under the keys named here. The *view* is what the controller publishes:
durable state plus what live instances last reported. Roles act on the view declaratively: they compare it with what
they run and reconcile, so a lost message costs one round, never correctness.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from cremant.model.offsets import Position, Watermark
from cremant.model.schema import Schema
from cremant.model.segments import ReplicaState, SegmentMetadata
from cremant.model.table import TableConfig


class Role(StrEnum):
    CONTROLLER = "controller"
    BROKER = "broker"
    SERVER = "server"
    PIPELINE = "pipeline"


# --- durable records (metadata store) -----------------------------------------------------------------------------


def schema_key(name: str) -> str:
    return f"/schemas/{name}"


def table_key(raw_name: str) -> str:
    return f"/tables/{raw_name}"


def partition_key(raw_name: str, partition: int) -> str:
    return f"/partitions/{raw_name}/{partition:05d}"


def segment_key(raw_name: str, segment: str) -> str:
    return f"/segments/{raw_name}/{segment}"


def pipeline_key(raw_name: str) -> str:
    return f"/pipelines/{raw_name}"


def instance_key(instance: str) -> str:
    return f"/instances/{instance}"


class TableRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`config_version` grows with every change of config or schema and is pinned per batch (E-2)."""

    config: TableConfig
    table_schema: Schema
    incarnation: str
    config_version: int = 1
    topic_incarnation: str = ""
    created_ms: int = 0
    paused: bool = False
    #: Who or what paused or resumed it last, and when; 0 = never.
    pause_comment: str = ""
    pause_changed_ms: int = 0
    enabled: bool = True


class PartitionRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One stream partition of a table: its consuming segment and the servers that replicate it.

    `start_offset` is the first stream offset the table ever wanted from this partition.
    """

    partition: int
    consuming: str
    sequence: int
    replicas: tuple[str, ...]
    start_offset: int


class Rewind(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Ingestion was taken back to closed epoch `to_epoch`. Epochs above it and below `next_epoch`, the first one that
    may be taken afterwards (None until it is known), are void. `generation`: whose Resets are in the epoch log; 0 until
    they are."""

    to_epoch: int
    next_epoch: int | None = None
    asked_ms: int = 0
    generation: int = 0

    @property
    def done(self) -> bool:
        return self.generation > 0


#: `keyed_from` of an append table that is to get keys: no epoch has given it any.
UNKEYED = 2**62


class Expiry(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """From `epoch` on no row in force that was taken before it is of before `before_ms` (in the time column)."""

    epoch: int
    before_ms: int


class PipelineRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Lease and fencing of a table's pipeline. `epoch = base + batch id` of the Spark query (E-5: only grows)."""

    holder: str | None = None
    lease_until_ms: int = 0
    generation: int = 0
    base: int = 0
    #: Where the checkpoint of the generation in force lives (relative to the pipeline's directory).
    checkpoint: str = ""
    #: Upsert tables: the epoch of the seed or first batch that gave the table its keys; closed or not.
    keyed_from: int | None = None
    #: How often the key coordinator's state was to be made anew, how often a start has begun to, and when the last did.
    rebuilds_asked: int = 0
    rebuilds_begun: int = 0
    rebuilt_ms: int = 0
    #: Keys past the table's retention: the last seed whose epoch hides rows of before that time; closed or not.
    expiry: Expiry | None = None
    #: Oldest first, at most REWINDS_KEPT_MAX; only the last may not be done yet.
    rewinds: tuple[Rewind, ...] = ()

    @property
    def rewind(self) -> Rewind | None:
        """To be carried out by the next start of the query; None = go on."""
        return self.rewinds[-1] if self.rewinds and not self.rewinds[-1].done else None


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A process that has ever registered. Address changes with each start, the id does not."""

    id: str
    role: Role
    host: str
    port: int
    #: Where a server offers its segments by HTTPS; 0 = nowhere.
    tls_port: int = 0
    tags: tuple[str, ...] = ()


# --- reports (in heartbeats; volatile) ----------------------------------------------------------------------------


class SegmentReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One segment on one server."""

    table: str
    segment: str
    state: ReplicaState
    checksum: str | None = None
    rows: int = 0
    bytes: int = 0
    error: str | None = None
    #: Grows while this replica builds or uploads the segment: the committer's lease lasts while it does.
    progress: int = 0
    #: Upsert tables: epoch log offset from which its newest validity snapshot on this server's disk is to be continued;
    #: None while there is none.
    snapshot_log_offset: int | None = None
    #: Of a table that compacts: rows that are not in force now, rounded down.
    superseded: int | None = None


#: State of a tail that has still to read what is in the log already.
CATCHING_UP = "catchingUp"
#: States of a tail that takes no rows until there is room: the quota on disk is used up, its files cannot be written,
#: its rows come faster than they are written.
TAIL_QUOTA = "tailQuota"
SPILL_FAILED = "tailSpillFailed"
SPILL_BEHIND = "tailSpillBehind"
BLOCKED = frozenset({TAIL_QUOTA, SPILL_FAILED, SPILL_BEHIND})


class VersionsReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a server keeps of one partition of an upsert table, sealed segments and tail together.

    `closed`: last epoch whose rows and updates are applied (the low-water mark of this server and partition).
    `horizon`: oldest epoch that it can still answer. `rows` = in force + superseded; `tombstones` are in force."""

    closed: int
    horizon: int
    rows: int
    in_force: int
    tombstones: int
    size_bytes: int
    #: Oldest epoch that the newest snapshots of its sealed segments are of; None without a sealed segment.
    snapshot_epoch: int | None = None


class TailReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One consuming partition on one server. `first_offset`: oldest row the tail itself still holds.

    `state`: waiting (no epoch log yet), catchingUp, consuming, one of BLOCKED, retrying, stopped. `error` is set when
    it is stopped or retrying. `log_offset`: of the epoch log, the next record to read; `log_first`: where it began to
    when the process started; `log_end`: where the log ended when it last said so, at `log_read_at_ms` (this server's
    clock); None: not since the start. `last_indexed_ms`: when a row last became visible. `rejected`: messages that
    became no row because of an error, in epochs closed since the process started. `at_ms`: the clock of this server
    when it said so."""

    table: str
    incarnation: str
    partition: int
    first_offset: int
    rows: int
    watermark: Watermark
    error: str | None = None
    state: str = "consuming"
    log_offset: int = 0
    log_first: int = 0
    log_end: int | None = None
    log_read_at_ms: int | None = None
    last_indexed_ms: int | None = None
    rejected: int = 0
    at_ms: int = 0
    #: Upsert tables only.
    versions: VersionsReport | None = None

    @property
    def log_records(self) -> tuple[int, int]:
        """Of the log, since the start of its server: how many records it has read, of how many."""
        done = self.log_offset - self.log_first
        return done, max(done, (self.log_end or 0) - self.log_first)


class StreamProgress(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How far a pipeline is with one partition of its stream. Offsets of the stream, times of the pipeline's clock.

    `stream_end`: as read at `read_at_ms`, the last time that the stream answered. `planned`: end of the epoch that is
    being made; `closed`: everything below is in a closed epoch, whose newest message has `max_ingestion_ms`.
    `caught_up_at_ms`: the last time at which `closed` was proven to be the end of the stream."""

    partition: int
    stream_end: int | None = None
    read_at_ms: int | None = None
    planned: int | None = None
    closed: int | None = None
    max_ingestion_ms: int | None = None
    caught_up_at_ms: int | None = None


class PipelineReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One table's Spark query. `state`: waiting, starting, running, paused, backoff, failed."""

    table: str
    incarnation: str
    state: str
    generation: int = 0
    epoch: int = -1
    batch_ms: int = 0
    rows_total: int = 0
    rejected_total: int = 0
    filtered_total: int = 0
    lag_rows: int | None = None
    restarts: int = 0
    error: str | None = None
    #: Upsert tables only: keys in the coordinator's state, tombstones too, and the state's bytes on disk.
    keys: int | None = None
    state_bytes: int | None = None
    #: A seed of the coordinator's state is under way: nothing is ingested meanwhile.
    rebuilding: bool = False
    partitions: tuple[StreamProgress, ...] = ()
    #: Why the stream could not be read when last tried; None: it answered, or was not asked.
    stream_error: str | None = None
    #: The clock of the pipeline when it said so.
    at_ms: int = 0


class InstanceReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Everything an instance says of itself in a heartbeat."""

    segments: tuple[SegmentReport, ...] = ()
    tails: tuple[TailReport, ...] = ()
    pipelines: tuple[PipelineReport, ...] = ()


# --- the view -----------------------------------------------------------------------------------------------------


class LiveInstance(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    id: str
    role: Role
    url: str
    #: The same process by HTTPS; empty = it does not offer it.
    tls_url: str = ""
    live: bool = True
    #: Drawn at process start; a changed nonce is a restarted process.
    nonce: str = ""


class PartitionView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`consuming` is the metadata of the partition's open segment; its `start` position is where a tail begins."""

    record: PartitionRecord
    consuming: SegmentMetadata


class TableView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One table: record, partitions, sealed segments (DONE) and, per segment, the state each server reports.

    `external`: segment name -> instance id -> state. `tails`: partition (as text) -> instance id -> report.
    """

    record: TableRecord
    partitions: tuple[PartitionView, ...]
    segments: tuple[SegmentMetadata, ...]
    external: dict[str, dict[str, ReplicaState]] = {}
    tails: dict[str, dict[str, TailReport]] = {}
    pipeline: PipelineReport | None = None
    pipeline_record: PipelineRecord = PipelineRecord()

    @property
    def name(self) -> str:
        return self.record.config.name


class ClusterView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`version` grows with every change; `(controller_nonce, version)` identifies a view for long polls."""

    version: int
    controller_nonce: str
    instances: tuple[LiveInstance, ...] = ()
    tables: dict[str, TableView] = {}

    def instance(self, instance: str) -> LiveInstance | None:
        for candidate in self.instances:
            if candidate.id == instance:
                return candidate
        return None


#: Re-exported so that readers of records need one import.
__all__ = [
    "ClusterView", "InstanceRecord", "InstanceReport", "LiveInstance", "PartitionRecord", "PartitionView",
    "PipelineRecord", "PipelineReport", "Position", "Rewind", "Role", "SegmentReport", "TableRecord", "TableView",
    "TailReport", "instance_key", "partition_key", "pipeline_key", "schema_key", "segment_key", "table_key",
]  # fmt: skip


def as_json(value: Any) -> Any:
    """A struct as plain JSON values, for REST answers."""
    return msgspec.to_builtins(value)
