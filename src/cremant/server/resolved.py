# SPDX-License-Identifier: Apache-2.0
"""Sealed segments as a server holds them, and what it finds for a query: segments, parts of them, rows of tails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

from cremant.model.offsets import OffsetRange, Position, Watermark
from cremant.model.segments import ReplicaState, SegmentMetadata
from cremant.model.upsert import Cut
from cremant.segment.blocks import TailPart
from cremant.segment.layout import Alignment
from cremant.segment.reader import SealedSegment, slice_from
from cremant.segment.versions import Versions
from cremant.shell.backoff import Backoff


@dataclass(slots=True, eq=False)
class HostedSegment:
    """A sealed segment that this server should hold. `sealed` is set once its verified bytes are open.

    `versions`, upsert tables only: None while it is not known which of its rows are in force: then it is not served."""

    metadata: SegmentMetadata
    sealed: SealedSegment | None = None
    versions: Versions | None = None
    #: From where the log is to be read on for its versions, when nobody does so now.
    follow_from: Position | None = None
    #: As of when its versions are on this server's disk.
    snapshot: Position | None = None
    #: What its file on disk has: as of where, how often they had changed; and how often they had been taken back.
    saved: tuple[Position, int] | None = None
    rewinds_saved: int = 0
    #: Monotonic seconds.
    save_at_s: float = 0.0
    error: str | None = None
    #: Why it could not be compacted here when that was last tried.
    not_compacted: str | None = None
    #: Monotonic seconds since when the view no longer assigns it here.
    unwanted_since_s: float | None = None
    #: It went elsewhere, but nobody else is known to have it: it stays.
    last_copy: bool = False
    #: Read in full and found good since this process started.
    verified: bool = False
    #: Tries to build its index anew that failed (a full disk).
    index_backoff: Backoff = field(default_factory=Backoff)
    index_retry_at_s: float = 0.0
    #: Held while its files are replaced, or versions are written beside them.
    disk: threading.Lock = field(default_factory=threading.Lock)
    #: Rows that were not in force when last counted: state of the versions then, count, and when to count again.
    superseded: tuple[int, int, float] = (-1, 0, 0.0)
    _scan: tuple[Alignment, SealedSegment, tuple[pa.RecordBatch, ...]] | None = None

    @property
    def state(self) -> ReplicaState:
        if self.sealed is not None:
            return ReplicaState.ONLINE
        return ReplicaState.ERROR if self.error else ReplicaState.OFFLINE

    @property
    def outdated(self) -> bool:
        """Others have let go of rows that are still here: it is served, and compacted as they did."""
        metadata, sealed = self.metadata, self.sealed
        return sealed is not None and metadata.compacted_at > 0 and sealed.marker.checksum != metadata.checksum

    def scan(self, sealed: SealedSegment, alignment: Alignment) -> tuple[pa.RecordBatch, ...]:
        known = self._scan
        if known is None or known[0] is not alignment or known[1] is not sealed:
            known = (alignment, sealed, tuple(alignment.align(batch) for batch in sealed.batches))
            self._scan = known
        return known[2]


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """Rows of a sealed segment within [from_offset, until)."""

    hosted: HostedSegment
    sealed: SealedSegment
    from_offset: int
    until: int
    #: Upsert tables: of all rows of the segment.
    versions: Versions | None = None

    @property
    def whole(self) -> bool:
        metadata = self.hosted.metadata
        return self.from_offset <= metadata.start_offset and self.until >= (metadata.end_offset or 0)

    def batches(self, alignment: Alignment) -> tuple[pa.RecordBatch, ...]:
        """With versions: all of the segment's, which then say which rows exist (visible.py)."""
        scanned = self.hosted.scan(self.sealed, alignment)
        if self.whole or self.versions is not None:
            return scanned
        return slice_from(scanned, self.from_offset, self.until)


@dataclass(frozen=True, slots=True)
class TailRows:
    """Rows of a tail, under the name of the segment they belong to."""

    partition: int
    segment: str
    parts: tuple[TailPart, ...]
    #: Upsert tables: of these rows and of others of the tail.
    versions: Versions | None = None

    def batches(self, alignment: Alignment) -> tuple[pa.RecordBatch, ...]:
        return tuple(part.scan(alignment) for part in self.parts)


@dataclass(frozen=True, slots=True)
class ResolvedTail:
    """What a tail request gets: sealed rows first, then those of the tail."""

    partition: int
    covered: OffsetRange
    watermark: Watermark
    sealed: tuple[SegmentPart, ...]
    rows: TailRows


@dataclass(slots=True)
class Resolved:
    """One instant of a table, as far as a query asked for it. `cut`: upsert tables; what is visible there is in what
    was found, and of a partition that is behind it, or refuses it, nothing was."""

    alignment: Alignment
    schema_version: int
    segments: list[SegmentPart | TailRows] = field(default_factory=list)
    tails: list[ResolvedTail] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)
    cut: Cut | None = None
    #: Partitions that no longer know the cut, and the oldest epoch that may be asked of all of them.
    refused: list[int] = field(default_factory=list)
    horizon: int = 0


def leave_out_unknown(found: Resolved, cut: Cut, is_void: Callable[[int, int], bool]) -> None:
    """Takes out what is not known at the cut. A partition is left out whole, so that who answers for it instead answers
    for all of it. `is_void(partition, epoch)`: that was taken back: here it is gone, elsewhere perhaps not yet."""
    parts = [(partition_of(part), part.versions) for part in found.segments]
    for tail in found.tails:
        parts += [(tail.partition, part.versions) for part in tail.sealed]
        parts.append((tail.partition, tail.rows.versions))
    void = {number for number, _ in parts if is_void(number, cut.epoch)}
    behind = {number for number, versions in parts if versions is None or versions.epoch < cut.epoch} - void
    forgotten = {number for number, versions in parts if versions is not None and cut.epoch < versions.horizon}
    refused = void | (forgotten - behind)
    out = behind | refused | set(found.behind)
    found.behind = sorted(behind | set(found.behind))
    found.refused = sorted(refused)
    found.horizon = max((versions.horizon for _, versions in parts if versions is not None), default=0)
    found.segments = [part for part in found.segments if partition_of(part) not in out]
    found.tails = [tail for tail in found.tails if tail.partition not in out]


def partition_of(part: SegmentPart | TailRows) -> int:
    return part.hosted.metadata.partition if isinstance(part, SegmentPart) else part.partition
