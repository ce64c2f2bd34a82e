# SPDX-License-Identifier: Apache-2.0
"""Retention: which sealed segments are due to go. Pure.

Rules: only DONE segments go, when their newest row is older than the table's retention; a segment without any time goes
by its creation. Where keys live as long (upsert tables), the rows of a segment are hidden first, so that no answer
changes when it goes. What of the epoch log must stay is decided by where copies are (`completion/copies.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from cremant.model.cluster import Expiry
from cremant.model.segments import SegmentMetadata, SegmentStatus


def expired(segments: Iterable[SegmentMetadata], retention_ms: int | None, now_ms: int) -> list[SegmentMetadata]:
    """Segments to delete now, oldest first. None = keep for ever."""
    if retention_ms is None or retention_ms <= 0:
        return []
    horizon_ms = now_ms - retention_ms
    due = [segment for segment in segments if segment.status is SegmentStatus.DONE and _newest_ms(segment) < horizon_ms]
    return sorted(due, key=lambda segment: (segment.partition, segment.sequence))


def hidden(segments: Iterable[SegmentMetadata], expiry: Expiry | None) -> list[SegmentMetadata]:
    """Those of which no row is visible from the epoch of `expiry` on."""
    return [
        segment
        for segment in segments
        if expiry is not None
        and segment.end is not None
        and segment.end.epoch < expiry.epoch
        and _newest_ms(segment) < expiry.before_ms
    ]


def _newest_ms(segment: SegmentMetadata) -> int:
    return segment.max_time_ms if segment.max_time_ms is not None else segment.created_ms
