# SPDX-License-Identifier: Apache-2.0
"""Taking a table back to a closed epoch: which segments go, and where consumption begins anew. Pure.

    segments of a partition   |---- kept ----|---- holds R ----|---- later ----|---- open ----|
    after the rewind          |---- kept ----|---- open, under a new name, from the same start ... (read again)

Rules
- Of each partition the newest segment that begins at or before epoch R is given up with everything after it, and a new
  one is opened at its start: with a name of its own, because a segment's name stands for one content for ever.
- What follows R is undone by the Reset that the pipeline writes into the epoch log; until it is there, and for
  positions that were closed before it, no cut is decided (`is_taken_back`): they may be of epochs that are to go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from cremant.model.cluster import PartitionRecord, PipelineRecord
from cremant.model.names import SegmentName
from cremant.model.offsets import Position
from cremant.model.segments import SegmentMetadata, SegmentStatus


class PartitionRewind(msgspec.Struct, frozen=True, kw_only=True):
    """`dropped`: newest last; its first one held the epoch."""

    partition: PartitionRecord
    opened: SegmentMetadata
    dropped: tuple[SegmentMetadata, ...]


def plan_rewind(
    table: str, partitions: Mapping[int, PartitionRecord], segments: Iterable[SegmentMetadata], epoch: int, now_ms: int
) -> tuple[PartitionRewind, ...]:
    """One per partition. Raises LookupError with a partition whose segments no longer reach back to `epoch`."""
    held = sorted(segments, key=lambda segment: segment.sequence)
    plans = []
    for number, record in sorted(partitions.items()):
        own = [segment for segment in held if segment.partition == number]
        before = [index for index, segment in enumerate(own) if segment.start.epoch <= epoch]
        if not before:
            raise LookupError(number)
        plans.append(_plan(table, record, tuple(own[before[-1] :]), now_ms))
    return tuple(plans)


def _plan(table: str, record: PartitionRecord, dropped: tuple[SegmentMetadata, ...], now_ms: int) -> PartitionRewind:
    again, sequence = dropped[0], record.sequence + 1
    name = str(SegmentName.new(table, record.partition, sequence, now_ms))
    opened = SegmentMetadata(
        name=name, partition=record.partition, sequence=sequence, status=SegmentStatus.IN_PROGRESS,
        start_offset=again.start_offset, start=again.start, created_ms=now_ms, replicas=record.replicas,
    )  # fmt: skip
    moved = msgspec.structs.replace(record, consuming=name, sequence=sequence)
    return PartitionRewind(partition=moved, opened=opened, dropped=dropped)


def without_later(
    segments: Iterable[SegmentMetadata], epoch: int, opened: Mapping[int, Position]
) -> list[SegmentMetadata]:
    """The records as they are to be of segments that stay and whose stored versions have updates past the epoch, or
    that were to be compacted, perhaps past it. `opened`: where each partition begins anew.

    Such versions are continued from there: what they have of later updates is skipped, and the Reset, which only who
    has seen the epoch closed can carry out, takes it back."""
    changed = []
    for segment in segments:
        versions = segment.versions
        if versions is not None and versions.position.epoch > epoch:
            versions = msgspec.structs.replace(versions, position=opened[segment.partition])
        if versions is not segment.versions or segment.compacting is not None:
            changed.append(msgspec.structs.replace(segment, versions=versions, compacting=None, compactor=None))
    return changed


def compacted_past(segments: Iterable[SegmentMetadata], epoch: int) -> SegmentMetadata | None:
    """The segment that was compacted at the latest epoch, if that is past this one: rows that were in force then are
    gone."""
    newest = max(segments, key=lambda segment: segment.compacted_at, default=None)
    return newest if newest is not None and newest.compacted_at > epoch else None


def is_taken_back(pipeline: PipelineRecord, at: Position) -> bool:
    """A closed position of an epoch that a rewind takes back. Its generation does not tell: the start that carries the
    rewind out rolls the committed epoch forward before that."""
    return any(
        at.epoch > rewind.to_epoch and (rewind.next_epoch is None or at.epoch < rewind.next_epoch)
        for rewind in pipeline.rewinds
    )
