# SPDX-License-Identifier: Apache-2.0
"""A sealed segment of which no copy is left, made again from its range of the epoch log.

Rules: a private reader takes the rows from the segment's start position to its end, exactly as the replica did that
sealed it, and builds them in the committed form; what comes out counts only if its content is the committed one
(I-3). The table's own tail is not touched.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from pathlib import Path

from cremant.log.api import Log
from cremant.model.cluster import TableRecord
from cremant.model.errors import Corrupt, DeadlineExceeded, InvariantViolation, NoResource, NotFound, Unavailable
from cremant.model.limits import FETCH_DEADLINE_MS
from cremant.model.segments import SegmentMetadata
from cremant.segment.build import Built, build_segment, spec_of
from cremant.segment.compact import Compacted, compact_segment
from cremant.segment.cuts import reached
from cremant.segment.locations import locations_of
from cremant.segment.reader import SealedSegment, derive
from cremant.segment.tail import SpillQuota
from cremant.segment.versions import Flags
from cremant.server.partition import Partition, PartitionId, PartitionState
from cremant.shell.logs import log_event

_log = logging.getLogger(__name__)


class Reconsumer:
    """Thread-safe; one segment at a time, for each takes a core."""

    def __init__(self, log: Log, *, fsync: bool) -> None:
        self._log = log
        self._fsync = fsync
        self._turn = threading.Lock()
        self._stopping = threading.Event()
        #: Segments that came back so.
        self.segments_total = 0

    def stop(self) -> None:
        self._stopping.set()

    def rebuild(self, record: TableRecord, metadata: SegmentMetadata, scratch: Path) -> SealedSegment:
        """The segment, verified and derived, in `scratch`. Raises NotFound when the log has not all of it (any more),
        Unavailable, DeadlineExceeded, Corrupt, InvariantViolation, NoResource."""
        own = PartitionId(record.config.name, record.incarnation, metadata.partition)
        assert metadata.end is not None
        assert metadata.checksum is not None
        earliest = self._log.earliest(own.topic, metadata.partition)
        if earliest > metadata.start.log_offset:
            raise NotFound(
                f"segment {metadata.name}: the epoch log begins at {earliest}, its rows begin at "
                f"{metadata.start.log_offset}"
            )
        began_s = time.monotonic()
        with self._turn:
            # Of an upsert table, rows count once their epoch is closed.
            partition = Partition(
                own, metadata.start, scratch / "tail", SpillQuota(), upsert=record.config.upsert
            )  # fmt: skip
            try:
                self._read(partition, metadata, began_s + FETCH_DEADLINE_MS / 1000)
                sealed = self._build(partition, record, metadata, scratch)
            finally:
                partition.close()
        self.segments_total += 1
        log_event(
            _log, "segment read again from the epoch log", segment=metadata.name, rows=sealed.rows,
            elapsed_ms=round((time.monotonic() - began_s) * 1000),
        )  # fmt: skip
        return sealed

    def _read(self, partition: Partition, metadata: SegmentMetadata, ends_s: float) -> None:
        """To its end; of one that was compacted, until it is known what was let go of."""
        assert metadata.end is not None
        end = metadata.end

        def has_all() -> bool:
            applied = partition.versions.applied if partition.versions is not None else 0
            return reached(partition.closings.last, end) and applied >= metadata.compacted_at

        while not has_all():
            if self._stopping.is_set():
                raise Unavailable("this server is stopping")
            if time.monotonic() > ends_s:
                raise DeadlineExceeded(f"partition {partition.id} was not read again in time")
            more = partition.turn(self._log, int(time.time() * 1000))
            while partition.tail.maintain():
                pass
            if partition.state is PartitionState.STOPPED:
                raise InvariantViolation("I-3", f"the range cannot be read again: {partition.error}")
            if partition.state is PartitionState.RETRYING:
                raise Unavailable(f"partition {partition.id}: {partition.error}")
            if not more and partition.tail.blocked is not None:
                raise NoResource(
                    f"partition {partition.id} cannot be read again: {partition.tail.blocked}",
                    hint="free disk space; it is retried",
                )
            if not more and not has_all():
                raise NotFound(f"the epoch log of {partition.id} ends before offset {end.next_offset}")

    def _build(
        self, partition: Partition, record: TableRecord, metadata: SegmentMetadata, scratch: Path
    ) -> SealedSegment:
        assert metadata.end is not None
        spec = spec_of(record).formed(metadata.form)
        parts = partition.tail.snapshot.between(metadata.start_offset, metadata.end.next_offset)
        whole = scratch / "whole" if metadata.compacted_at else scratch
        built: Built | Compacted = build_segment(whole, [part.batch for part in parts], spec, fsync=self._fsync)
        if metadata.compacted_at:
            sealed = derive(whole, metadata.name, built.checksum, fsync=False)
            built = compact_segment(scratch, sealed, _kept(partition, metadata, sealed), fsync=self._fsync)
            shutil.rmtree(whole)
        if built.checksum != metadata.checksum:
            raise Corrupt(
                f"segment {metadata.name}: the epoch log gives content {built.checksum}, committed was "
                f"{metadata.checksum}"
            )
        return derive(scratch, metadata.name, built.checksum, fsync=self._fsync, indexes=record.config.indexes)


def _kept(partition: Partition, metadata: SegmentMetadata, sealed: SealedSegment) -> Flags:
    """Per row of the whole segment, in its order: whether it is still there."""
    assert metadata.end is not None
    assert partition.versions is not None
    versions = partition.versions.tail_versions(metadata.start_offset, metadata.end.next_offset)
    assert versions is not None
    kept, order = versions.kept(metadata.compacted_at), locations_of(sealed.batches)[1]
    return kept if order is None else kept[order]
