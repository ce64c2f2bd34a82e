# SPDX-License-Identifier: Apache-2.0
"""The first records of a partition, and growth: partitions that a stream has gained. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cremant.model.cluster import PartitionRecord
from cremant.model.names import SegmentName
from cremant.model.offsets import Position
from cremant.model.segments import SegmentMetadata, SegmentStatus


def first_position(start_offset: int) -> Position:
    """The beginning of an epoch log: no epoch closed, no generation in force."""
    return Position(log_offset=0, epoch=0, generation=0, next_offset=start_offset)


def open_partition(
    table: str, partition: int, start_offset: int, replicas: tuple[str, ...], now_ms: int
) -> tuple[PartitionRecord, SegmentMetadata]:
    """Records of a partition that begins to be consumed: sequence 0, open at `start_offset`."""
    name = str(SegmentName.new(table, partition, 0, now_ms))
    segment = SegmentMetadata(
        name=name, partition=partition, sequence=0, status=SegmentStatus.IN_PROGRESS, start_offset=start_offset,
        start=first_position(start_offset), created_ms=now_ms, replicas=replicas,
    )  # fmt: skip
    record = PartitionRecord(
        partition=partition, consuming=name, sequence=0, replicas=replicas, start_offset=start_offset
    )
    return record, segment


def missing_partitions(known: Iterable[int] | Mapping[int, object], stream_partitions: int) -> list[int]:
    """Partitions of the stream that the table does not consume yet (rule E-7: they enter at an epoch boundary)."""
    return sorted(set(range(stream_partitions)) - set(known))
