# SPDX-License-Identifier: Apache-2.0
"""Retention: which sealed segments are due to go, and up to where an epoch log may be trimmed. Pure.

Rules: only DONE segments go, when their newest row is older than the table's retention; a segment without any time goes
by its creation. The epoch log keeps everything that a replica could still have to read: from the start of the open
segment, of the segment that a live replica is still reading, of every segment that is not *safe* (in the deep store, or
two verified copies: I-6), and, so that the mark that a position stands behind can still be read, of the newest sealed
segment.
"""

from __future__ import annotations

from collections.abc import Iterable

from cremant.model.segments import SegmentMetadata, SegmentStatus, StoreState


def expired(segments: Iterable[SegmentMetadata], retention_ms: int | None, now_ms: int) -> list[SegmentMetadata]:
    """Segments to delete now, oldest first. None = keep for ever."""
    if retention_ms is None or retention_ms <= 0:
        return []
    horizon_ms = now_ms - retention_ms
    due = [
        segment
        for segment in segments
        if segment.status is SegmentStatus.DONE
        and (segment.max_time_ms if segment.max_time_ms is not None else segment.created_ms) < horizon_ms
    ]
    return sorted(due, key=lambda segment: (segment.partition, segment.sequence))


def is_safe(segment: SegmentMetadata) -> bool:
    """Survives the loss of any one server."""
    return segment.status is SegmentStatus.DONE and (
        segment.store_state is StoreState.STORED or len(segment.copies) >= 2
    )


def trim_floor(segments: Iterable[SegmentMetadata], visible_offsets: Iterable[int] = ()) -> int:
    """The log offset below which one partition's epoch log is no longer needed; 0 = keep all. `visible_offsets`: how
    far (stream offset) each live replica has read."""
    ordered = sorted(segments, key=lambda segment: segment.sequence)
    if len(ordered) < 2:
        return 0
    needed = [segment.start.log_offset for segment in ordered if not is_safe(segment)]
    for offset in visible_offsets:
        behind = [segment for segment in ordered if segment.start_offset <= offset]
        needed.append(behind[-1].start.log_offset if behind else 0)
    return min([*needed, ordered[-2].start.log_offset])
