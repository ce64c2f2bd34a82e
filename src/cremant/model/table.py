# SPDX-License-Identifier: Apache-2.0
"""What Cremant reads out of a table config: a typed view over Pinot's JSON (which is kept whole beside it)."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from cremant.model.completion import CompletionConfig
from cremant.model.upsert import NullKeyPolicy, UpsertConfig


class StartFrom(StrEnum):
    """Where a new table begins to read (`auto.offset.reset`)."""

    EARLIEST = "smallest"
    LATEST = "largest"


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One stream of a table. `properties` are all keys as written; the rest is what they mean.

    `stream_type` embedded or kafka; `decoder` json, csv, avro or avroRegistry, with the keys behind
    `stream.<type>.decoder.prop.` as `decoder_properties`. Of a Kafka stream, `brokers` is `host:port,…` and
    `client_properties` what its clients are told beside (`security.protocol`, `sasl.…`, `ssl.…`, `isolation.level`).
    Values may refer to secrets (`cremant.model.secrets`): nothing here is resolved.
    """

    stream_type: str
    topic: str
    decoder: str = "json"
    decoder_properties: dict[str, str] = {}
    start_from: StartFrom = StartFrom.LATEST
    brokers: str = ""
    client_properties: dict[str, str] = {}
    properties: dict[str, str] = {}


class FlushConfig(msgspec.Struct, frozen=True, kw_only=True):
    """When a consuming segment ends: whichever is met first."""

    rows: int = 5_000_000
    bytes: int = 200 * 1024 * 1024
    time_ms: int = 6 * 3600 * 1000


class TransformConfig(msgspec.Struct, frozen=True, kw_only=True):
    column: str
    function: str


class PartitionFunction(StrEnum):
    """How values of a column are spread over partitions, as Pinot names it."""

    MURMUR = "Murmur"
    MODULO = "Modulo"
    HASH_CODE = "HashCode"


class ColumnPartitioning(msgspec.Struct, frozen=True, kw_only=True):
    """What a table says of its stream: `partitions` of a column's values. It is checked by each segment's rows."""

    function: PartitionFunction
    partitions: int


class IndexConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Columns that the table wants to find rows by. Indexes never change an answer."""

    inverted: tuple[str, ...] = ()
    range: tuple[str, ...] = ()
    bloom: tuple[str, ...] = ()


class ExpiredOffsets(StrEnum):
    """What happens when the stream dropped rows before we read them."""

    GAP = "gap"
    STOP = "stop"


class PipelineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Cremant's own block `cremant.pipeline` of a table config; unknown keys are refused."""

    #: `package.module:function`, DataFrame -> DataFrame; only modules on the operator's allow-list.
    function: str | None = None
    #: Shortest length of an epoch: trades freshness for CPU.
    min_epoch_ms: int = 0
    #: Rows of one epoch at most (over all partitions), so catching up stays bounded in memory.
    max_rows_per_epoch: int = 400_000
    expired_offsets: ExpiredOffsets = ExpiredOffsets.GAP
    #: Stop the table at the first bad record instead of dead-lettering it.
    stop_on_bad_record: bool = False


class UpsertTuning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """The block `cremant.upsert`: what Pinot's `upsertConfig` has no key for."""

    null_key: NullKeyPolicy = NullKeyPolicy.REJECT
    #: How long an epoch that was closed can still be asked for.
    history_ms: int = 60_000


class FreshnessSla(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """What a table promises (freshness design): the block `freshnessSla`, or customConfigs' `freshness.sla.ms`.

    `max_lag_ms`: now minus what is proven to be visible. `max_event_age_ms`: now minus the newest message; choose it
    above the producers' own period. None = nothing is promised. `errors_hold`: messages that are rejected because of an
    error count as missing."""

    max_lag_ms: int | None = None
    max_event_age_ms: int | None = None
    errors_hold: bool = False


class CremantConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """The block `cremant` of a table config. Unknown keys are refused: a typo must not pass silently."""

    pipeline: PipelineConfig = PipelineConfig()
    #: Upsert tables only.
    upsert: UpsertTuning = UpsertTuning()


class TableConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`raw_json` is the user's document (normalised name and type); `unrecognized` maps JSON pointers that Pinot
    does not know to their values, as Pinot reports them."""

    name: str
    time_column: str
    replication: int
    stream: StreamConfig
    flush: FlushConfig
    completion: CompletionConfig = CompletionConfig()
    retention_ms: int | None = None
    null_handling: bool = False
    filter_function: str | None = None
    transforms: tuple[TransformConfig, ...] = ()
    sorted_column: str | None = None
    indexes: IndexConfig = IndexConfig()
    #: Column -> partitions of its values, by which sealed segments are pruned.
    partitioning: dict[str, ColumnPartitioning] = {}
    query_timeout_ms: int | None = None
    #: Only upsert tables have one.
    upsert: UpsertConfig | None = None
    cremant: CremantConfig = CremantConfig()
    freshness_sla: FreshnessSla = FreshnessSla()
    raw_json: dict[str, Any] = {}
    unrecognized: dict[str, Any] = {}

    @property
    def name_with_type(self) -> str:
        return f"{self.name}_REALTIME"
