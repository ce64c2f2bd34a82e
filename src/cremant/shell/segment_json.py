# SPDX-License-Identifier: Apache-2.0
"""A segment as Pinot's servers describe it, for the REST of controller and server."""

from __future__ import annotations

import datetime
from typing import Any

from cremant.model.cluster import TableRecord
from cremant.model.segments import SegmentMetadata, SegmentStatus

#: What Pinot shows for "no checksum yet": Long.MIN_VALUE.
_NO_CRC = -(2**63)


def crc_of(segment: SegmentMetadata) -> int:
    """A 64-bit number of the content checksum, where Pinot shows its CRC."""
    if segment.checksum is None:
        return _NO_CRC
    digits = segment.checksum.rpartition(":")[2][:15]
    return int(digits, 16) if digits else _NO_CRC


def full_metadata(record: TableRecord, segment: SegmentMetadata) -> dict[str, Any]:
    """What Pinot's servers say of a segment."""
    done = segment.status is SegmentStatus.DONE
    has_time = done and segment.min_time_ms is not None
    start, end = segment.start_offset if done else None, segment.end_offset if done else None
    return {
        "segmentName": segment.name,
        "schemaName": record.table_schema.name,
        "crc": crc_of(segment),
        "creationTimeMillis": segment.created_ms,
        "creationTimeReadable": _readable(segment.created_ms),
        "timeColumn": record.config.time_column if has_time else None,
        "timeUnit": "MILLISECONDS" if has_time else None,
        "timeGranularitySec": None,
        "startTimeMillis": segment.min_time_ms,
        "startTimeReadable": _readable(segment.min_time_ms),
        "endTimeMillis": segment.max_time_ms,
        "endTimeReadable": _readable(segment.max_time_ms),
        "segmentVersion": None,
        "creatorName": None,
        "totalDocs": segment.rows,
        "custom": {},
        "startOffset": None if start is None else str(start),
        "endOffset": None if end is None else str(end),
        "indexes": {},
        "star-tree-index": None,
    }


def _readable(ms: int | None) -> str | None:
    if ms is None:
        return None
    text = datetime.datetime.fromtimestamp(ms / 1000, tz=datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}:{ms % 1000:03d} UTC"
