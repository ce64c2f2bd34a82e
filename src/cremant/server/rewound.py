# SPDX-License-Identifier: Apache-2.0
"""A table that was taken back to an epoch below what this server has sealed (`completion.rewind`)."""

from __future__ import annotations

from cremant.model.names import SegmentName
from cremant.model.segments import SegmentMetadata
from cremant.server.table import HostedTable


def was_rewound(hosted: HostedTable, opened: SegmentMetadata) -> bool:
    """The view opens a segment below what is sealed here. A view that is merely late opens one that is sealed here, or
    one before it; after a rewind the open one is newer than all that ever were."""
    with hosted.lock:
        partition = hosted.partitions.get(opened.partition)
        if partition is None or opened.start_offset >= partition.tail.snapshot.first_offset:
            return False
        held = [name for name, segment in hosted.segments.items() if segment.metadata.partition == opened.partition]
        return all(SegmentName.parse(name).sequence < opened.sequence for name in held)


def drop_from(hosted: HostedTable, partition: int, offset: int) -> list[str]:
    """Lets go of the sealed segments that begin at `offset` or later; their names."""
    with hosted.lock:
        names = [
            name for name, segment in hosted.segments.items()
            if segment.metadata.partition == partition and segment.metadata.start_offset >= offset
        ]  # fmt: skip
        for name in names:
            del hosted.segments[name]
        return names
