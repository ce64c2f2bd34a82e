# SPDX-License-Identifier: Apache-2.0
"""One table on one server: its sealed segments, its partitions, and which of both answer a query.

Rule: `resolve` sees one instant. Installing a segment and dropping its rows from the tail happen under the same lock,
so whatever a query asks for, it gets each row of the range exactly once: from the segment or from the tail.

A request names sealed segments and, per partition, a tail *from an offset*. The broker need not know how far this
server has sealed: a segment whose rows are still in the tail is served from there, and a tail that was sealed
meanwhile is served from its segments. What cannot be served exactly is said to be missing or behind; so are own rows
that are known to differ from the committed ones.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import msgspec

from cremant.completion.replica import Sealing
from cremant.model.cluster import Rewind, TableRecord
from cremant.model.offsets import OffsetRange
from cremant.model.schema import DataType
from cremant.model.segments import SegmentMetadata
from cremant.model.upsert import Cut
from cremant.segment.blocks import TailSnapshot
from cremant.segment.layout import Alignment
from cremant.segment.locations import locations_of
from cremant.segment.reader import SealedSegment
from cremant.server.partition import Partition
from cremant.server.resolved import HostedSegment as HostedSegment
from cremant.server.resolved import Resolved as Resolved
from cremant.server.resolved import ResolvedTail as ResolvedTail
from cremant.server.resolved import SegmentPart as SegmentPart
from cremant.server.resolved import TailRows as TailRows
from cremant.server.resolved import leave_out_unknown
from cremant.server.timings import PhaseTimes
from cremant.shell.logs import log_event
from cremant.wire.messages import TailRequest

_log = logging.getLogger(__name__)


class HostedTable:
    """`lock` guards all fields; hold it for short, never while reading files."""

    def __init__(self, record: TableRecord) -> None:
        self.lock = threading.RLock()
        self.partitions: dict[int, Partition] = {}
        self.segments: dict[str, HostedSegment] = {}
        #: Upsert tables: readers of partitions of which only sealed segments are here; epochs that were taken back.
        self.followers: dict[int, Partition] = {}
        self.rewinds: tuple[Rewind, ...] = ()
        #: Open segment of each partition, as the view has it; and how far its completion is.
        self.open: dict[int, SegmentMetadata] = {}
        self.sealings: dict[str, Sealing] = {}
        #: Grows while a segment is built or uploaded (keeps the committer's lease alive).
        self.progress: dict[str, int] = {}
        #: Why the last step of sealing a segment went wrong, until one goes right.
        self.problems: dict[str, str] = {}
        #: How long completing segments takes here.
        self.timings = PhaseTimes()
        #: Partitions that begin anew from their open segment with the next look at the view.
        self.resets: set[int] = set()
        self._began_s = time.monotonic()
        self._told_ready = False
        self._schema_version = 0
        self.update(record)

    def update(self, record: TableRecord) -> None:
        with self.lock:
            before = getattr(self, "record", None)
            self.record = record
            same = before is not None and before.table_schema == record.table_schema
            if not same or null_handling(before) != null_handling(record):
                self.alignment = Alignment(record.table_schema, null_handling=null_handling(record))
                self._schema_version += 1

    def tell_when_ready(self) -> None:
        """Once all that is consumed here has caught up, the log says so."""
        readers = list(self.partitions.values())
        if not self._told_ready and readers and not any(reader.behind for reader in readers):
            self._told_ready = True
            log_event(
                _log, "table is ready", table=self.name, partitions=len(readers),
                elapsed_ms=round((time.monotonic() - self._began_s) * 1000),
                ended_by=sorted({str(reader.catching_up.ended_by) for reader in readers}),
            )  # fmt: skip

    @property
    def name(self) -> str:
        return self.record.config.name

    def updater(self, partition: int) -> Partition | None:
        """Who applies the updates of a partition here."""
        return self.partitions.get(partition) or self.followers.get(partition)

    def _is_void(self, partition: int, epoch: int) -> bool:
        """The epoch was taken back, as far as is known here."""
        reader = self.updater(partition)
        if reader is not None and reader.versions is not None and reader.versions.is_void(epoch):
            return True
        return any(one.next_epoch is not None and one.to_epoch < epoch < one.next_epoch for one in self.rewinds)

    @property
    def single_precision(self) -> frozenset[str]:
        """FLOAT columns: an engine compares them in less precision than their ranges are kept in."""
        return frozenset(f.name for f in self.record.table_schema.fields if f.data_type is DataType.FLOAT)

    def install(self, metadata: SegmentMetadata, sealed: SealedSegment, *, verified: bool) -> None:
        """The segment is served from its files from now on, and its rows leave the tail; of an upsert table their
        versions stay. Versions of rows that were not in the tail are for others to bring (`versions` None)."""
        assert metadata.end is not None
        first, end = metadata.start_offset, metadata.end.next_offset
        # Before the lock: it looks at every row.
        order = locations_of(sealed.batches)[1] if self.record.config.upsert is not None else None
        with self.lock:
            hosted = self.segments.get(metadata.name) or HostedSegment(metadata)
            hosted.metadata, hosted.sealed, hosted.error, hosted.verified = metadata, sealed, None, verified
            # Its directory is a new one, without versions.
            hosted.snapshot, hosted.saved, hosted.save_at_s = None, None, 0.0
            self.segments[metadata.name] = hosted
            partition, reader = self.partitions.get(metadata.partition), self.updater(metadata.partition)
            if hosted.versions is not None and hosted.versions.rows != sealed.rows:
                # Its files were damaged, and what came instead has been compacted meanwhile.
                hosted.versions = hosted.follow_from = None
                if reader is not None and reader.versions is not None:
                    reader.versions.detach(metadata.name)
            if partition is not None:
                if hosted.versions is None and partition.versions is not None:
                    hosted.versions = partition.versions.hand_over(metadata.name, first, end, sealed.rows, order)
                partition.release(first, end)

    def unsealed(self) -> list[tuple[SegmentMetadata, Sealing]]:
        """Segments that are to be sealed here, and how far each is."""
        with self.lock:
            wanted = [
                hosted.metadata for hosted in self.segments.values()
                if hosted.sealed is None and hosted.unwanted_since_s is None
            ]  # fmt: skip
            wanted += [metadata for metadata in self.open.values() if metadata.name not in self.segments]
            return [(metadata, self.sealings.setdefault(metadata.name, Sealing(metadata.name))) for metadata in wanted]

    def note_progress(self, sealing: Sealing) -> None:
        with self.lock:
            self.progress[sealing.segment] = sealing.progress

    def is_broken(self, segment: str) -> bool:
        """Its rows cannot be built here."""
        sealing = self.sealings.get(segment)
        return sealing is not None and sealing.broken

    def solved(self, segment: str) -> None:
        """A step of sealing went right."""
        with self.lock:
            self.problems.pop(segment, None)

    def note_problem(self, segment: str, error: str) -> None:
        """A step of sealing went wrong; of no interest once another one has brought the segment."""
        with self.lock:
            hosted = self.segments.get(segment)
            if hosted is not None and hosted.sealed is not None:
                self.problems.pop(segment, None)
                return
            self.problems[segment] = error
            if hosted is not None:
                hosted.error = error

    def reset(self, segment: str) -> bool:
        """Begins with a replica anew: an open one from its segment's start, a sealed one by reading its files in full
        (what is missing or damaged is fetched, without waiting for the backoff). False if it is not here."""
        with self.lock:
            known = self.segments.get(segment)
            opened = [number for number, metadata in self.open.items() if metadata.name == segment]
            if segment in self.sealings:
                self.sealings[segment].hurry()
            if known is not None:
                known.verified = False
            else:
                self.resets.update(opened)
            return known is not None or bool(opened)

    def take_resets(self) -> list[Partition]:
        """Partitions to close now: they are no longer of this table."""
        with self.lock:
            gone = [self.partitions.pop(number) for number in sorted(self.resets & self.partitions.keys())]
            self.resets.clear()
            return gone

    def exchange(self, hosted: HostedSegment, before: SealedSegment, after: SealedSegment | None) -> bool:
        """Queries that come are served from `after`, unless another was installed or the segment let go meanwhile."""
        with self.lock:
            if self.segments.get(hosted.metadata.name) is not hosted or hosted.sealed is not before:
                return False
            hosted.sealed = after
            return True

    def resolve(self, segments: tuple[str, ...], tails: tuple[TailRequest, ...], cut: Cut | None = None) -> Resolved:
        with self.lock:
            found = Resolved(self.alignment, self._schema_version, cut=cut)
            for name in segments:
                part = self._segment(name)
                if part is None:
                    found.missing.append(name)
                else:
                    found.segments.append(part)
            for request in tails:
                tail = self._tail(request, cut)
                if tail is None:
                    found.behind.append(request.partition)
                else:
                    found.tails.append(tail)
        if cut is not None:
            leave_out_unknown(found, cut, self._is_void)
        return found

    def serves_from_tail(self, metadata: SegmentMetadata) -> bool:
        """The rows of a sealed segment are all still in the tail, and not known to be others than the committed."""
        partition = self.partitions.get(metadata.partition)
        if partition is None or metadata.end is None or partition.behind or self._differs(metadata.name):
            return False
        snapshot = partition.tail.snapshot
        return snapshot.first_offset <= metadata.start_offset and metadata.end.next_offset <= snapshot.next_offset

    def _differs(self, segment: str) -> bool:
        sealing = self.sealings.get(segment)
        return sealing is not None and sealing.diverged

    def _segment(self, name: str) -> SegmentPart | TailRows | None:
        hosted = self.segments.get(name)
        if hosted is None:
            return None
        metadata = hosted.metadata
        assert metadata.end_offset is not None
        if hosted.sealed is not None:
            if hosted.versions is None and self.record.config.upsert is not None:
                return None
            return SegmentPart(hosted, hosted.sealed, metadata.start_offset, metadata.end_offset, hosted.versions)
        if not self.serves_from_tail(metadata):
            return None
        partition = self.partitions[metadata.partition]
        parts = partition.tail.snapshot.between(metadata.start_offset, metadata.end_offset)
        return TailRows(metadata.partition, name, parts, partition.versions.tail if partition.versions else None)

    def _tail(self, request: TailRequest, cut: Cut | None) -> ResolvedTail | None:
        partition = self.partitions.get(request.partition)
        if partition is None or partition.behind:
            return None
        # In this order: the rows are then at least as new as the watermark says.
        watermark = partition.visible if cut is None else partition.marks.at_epoch(cut.epoch)
        snapshot = partition.tail.snapshot
        versions = partition.versions.tail if partition.versions is not None else None
        first, end = request.from_offset, snapshot.next_offset
        if max(first, request.not_before) > end or self._differs_from(request.partition, first):
            return None
        sealed = self._sealed_before(request.partition, first, snapshot)
        if sealed is None:
            return None
        if cut is None and watermark.next_offset > end:
            return None  # a rewind has just taken rows back that the watermark speaks of
        # What is claimed; later rows are there, and do not exist for the query.
        visible = end if cut is None else min(end, watermark.next_offset)
        opened = self.open.get(request.partition)
        return ResolvedTail(
            partition=request.partition,
            covered=OffsetRange(first, max(first, visible)),
            watermark=msgspec.structs.replace(watermark, next_offset=visible),
            sealed=sealed,
            rows=TailRows(request.partition, opened.name if opened else "", snapshot.between(first, end), versions),
        )

    def _differs_from(self, partition: int, first: int) -> bool:
        """Of the tail's rows from `first` on, some are known to be others than the committed ones."""
        differing = (self.segments.get(name) for name, sealing in self.sealings.items() if sealing.diverged)
        return any(
            hosted is not None and hosted.metadata.partition == partition and (hosted.metadata.end_offset or 0) > first
            for hosted in differing
        )

    def _sealed_before(self, partition: int, first: int, snapshot: TailSnapshot) -> tuple[SegmentPart, ...] | None:
        """Sealed rows of exactly [first, start of the tail); None when they are not all here."""
        parts: list[SegmentPart] = []
        at, end = first, snapshot.first_offset
        held = [hosted for hosted in self.segments.values() if hosted.metadata.partition == partition]
        for hosted in sorted(held, key=lambda hosted: hosted.metadata.start_offset):
            metadata = hosted.metadata
            if at >= end or metadata.end_offset is None or metadata.end_offset <= at:
                continue
            if hosted.sealed is None or metadata.start_offset > at:
                return None
            if hosted.versions is None and self.record.config.upsert is not None:
                return None
            until = min(end, metadata.end_offset)
            parts.append(SegmentPart(hosted, hosted.sealed, at, until, hosted.versions))
            at = until
        return tuple(parts) if at >= end else None


def null_handling(record: Any) -> bool:
    """Whether `$isNull.` columns are part of the table's rows."""
    return record is not None and bool(
        record.config.null_handling or record.table_schema.enable_column_based_null_handling
    )
