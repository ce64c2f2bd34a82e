# SPDX-License-Identifier: Apache-2.0
"""How fresh a table is, and why it is not fresher: what `GET /tables/{table}/freshness` answers, on brokers and on the
controller; and what a broker asks the controller for it, GET /internal/v1/freshness/{table}.

Times are of the observer's clock, in ms of the epoch. null = not known; a number is never invented.
"""

from __future__ import annotations

import msgspec

from cremant.model.cluster import PipelineReport


class Upstream(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What the controller knows of a table's pipeline and stream: the pipeline's last word, `age_ms` ago; ends of the
    stream as the controller has just read them, or why not."""

    incarnation: str
    pipeline: PipelineReport | None = None
    pipeline_id: str | None = None
    age_ms: int | None = None
    ends: dict[int, int] = {}
    stream_error: str | None = None


class Stages(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ms of a lag are spent; they sum up to it. `unknown`: on what nobody has told of."""

    stream: int = 0
    pipeline: int = 0
    log: int = 0
    server: int = 0
    unknown: int = 0

    @property
    def total_ms(self) -> int:
        return self.stream + self.pipeline + self.log + self.server + self.unknown


class ReplicaFreshness(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One replica of a partition. `responds`: this is its word of now, `report_age_ms` old; `serves`: queries would be
    answered by it."""

    instance: str
    live: bool
    responds: bool
    serves: bool
    report_age_ms: int | None
    #: idle, caughtUp, behind, stuck, paused or unknown (cluster/stages.py says what they mean).
    state: str
    tail_state: str | None
    freshness_lag_ms: int | None
    fresh_time_ms: int | None
    freshness_source: str | None
    visible_offset: int | None
    epoch: int | None
    lag_rows: int | None
    last_event_age_ms: int | None
    last_indexed_ms: int | None
    rejected: int
    log_offset: int | None
    log_end: int | None
    error: str | None
    stages_ms: Stages | None
    #: Stage with the greatest share of the lag, and in words what is the matter there.
    held_back_by: str | None
    reason: str | None


class PartitionFreshness(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One partition: as fresh as the freshest replica that answers, `replica`."""

    partition: int
    replica: str | None
    state: str
    freshness_lag_ms: int | None
    fresh_time_ms: int | None
    last_event_age_ms: int | None
    visible_offset: int | None
    stream_end: int | None
    stream_read_age_ms: int | None
    lag_rows: int | None
    stages_ms: Stages | None
    held_back_by: str | None
    reason: str | None
    replicas: tuple[ReplicaFreshness, ...]


class PipelineFreshness(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    instance: str | None
    state: str
    report_age_ms: int | None
    epoch: int | None
    error: str | None
    stream_error: str | None


class Alert(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """For a pager. `state`: ok or firing; `since_ms`: when the promise was broken, if that is known."""

    state: str
    reason: str | None = None
    since_ms: int | None = None


class TableFreshness(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A table: as fresh as its least fresh partition. `sla_state`: ok, violated, unknown, or none where nothing is
    promised."""

    table: str
    observer: str
    time_ms: int
    state: str
    freshness_lag_ms: int | None
    min_fresh_time_ms: int | None
    last_event_age_ms: int | None
    freshness_source: str | None
    lag_rows: int | None
    num_partitions_expected: int
    num_partitions_reporting: int
    freshness_sla_ms: int | None
    max_event_age_ms: int | None
    sla_state: str
    alert: Alert
    #: The partition that holds the table back: the one whose freshness is unknown, or least.
    worst_partition: int | None
    servers_not_responding: tuple[str, ...]
    pipeline: PipelineFreshness
    partitions: tuple[PartitionFreshness, ...]
