# SPDX-License-Identifier: Apache-2.0
"""Small tables and views for tests of routing, gathering and the broker."""

from __future__ import annotations

from cremant.model.cluster import (
    ClusterView,
    LiveInstance,
    PartitionRecord,
    PartitionView,
    Role,
    TableRecord,
    TableView,
    TailReport,
)
from cremant.model.offsets import Position, Watermark
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.model.segments import ColumnPartitions, ColumnRange, ReplicaState, SegmentMetadata, SegmentStatus
from cremant.model.table import FlushConfig, StreamConfig, TableConfig

SERVERS = ("s1", "s2", "s3")


def position(offset: int) -> Position:
    return Position(log_offset=offset, epoch=1, generation=1, next_offset=offset)


def sealed(partition: int, sequence: int, start: int, end: int, *, replicas: tuple[str, ...] = ("s1", "s2"),
           ranges: dict[str, ColumnRange] | None = None,
           partitioning: dict[str, ColumnPartitions] | None = None) -> SegmentMetadata:  # fmt: skip
    return SegmentMetadata(
        name=f"t__{partition}__{sequence}__x", partition=partition, sequence=sequence, status=SegmentStatus.DONE,
        start_offset=start, start=position(start), created_ms=0, replicas=replicas, end_offset=end, end=position(end),
        rows=end - start, columns=ranges or {}, partitioning=partitioning or {},
    )  # fmt: skip


def opened(partition: int, sequence: int, start: int, *, replicas: tuple[str, ...] = ("s1", "s2")) -> PartitionView:
    name = f"t__{partition}__{sequence}__x"
    record = PartitionRecord(
        partition=partition, consuming=name, sequence=sequence, replicas=replicas, start_offset=0
    )  # fmt: skip
    consuming = SegmentMetadata(
        name=name, partition=partition, sequence=sequence, status=SegmentStatus.IN_PROGRESS, start_offset=start,
        start=position(start), created_ms=0, replicas=replicas,
    )  # fmt: skip
    return PartitionView(record=record, consuming=consuming)


def report(
    partition: int, next_offset: int, *, error: str | None = None, state: str = "consuming",
    caught_up_at_ms: int | None = None,
) -> TailReport:  # fmt: skip
    return TailReport(
        table="t", incarnation="1", partition=partition, first_offset=0, rows=0, error=error, state=state,
        watermark=Watermark(next_offset=next_offset, epoch=1, caught_up_at_ms=caught_up_at_ms),
    )  # fmt: skip


def table(
    partitions: tuple[PartitionView, ...],
    segments: tuple[SegmentMetadata, ...] = (),
    external: dict[str, dict[str, ReplicaState]] | None = None,
    tails: dict[str, dict[str, TailReport]] | None = None,
) -> TableView:
    schema = Schema(
        name="t", fields=(FieldSpec(name="n", data_type=DataType.INT, field_type=FieldType.METRIC),)
    )  # fmt: skip
    config = TableConfig(
        name="t", time_column="n", replication=2, stream=StreamConfig(stream_type="embedded", topic="t"),
        flush=FlushConfig(),
    )  # fmt: skip
    record = TableRecord(config=config, table_schema=schema, incarnation="1")
    return TableView(
        record=record, partitions=partitions, segments=segments, external=external or {}, tails=tails or {}
    )


def view(of: TableView, *, live: tuple[str, ...] = SERVERS, version: int = 1) -> ClusterView:
    instances = tuple(
        LiveInstance(id=name, role=Role.SERVER, url=f"http://{name}", live=name in live) for name in SERVERS
    )
    return ClusterView(version=version, controller_nonce="c", instances=instances, tables={"t": of})
