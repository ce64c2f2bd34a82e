# SPDX-License-Identifier: Apache-2.0
"""What a server says with its heartbeats: the state of each replica here, and how far each tail is.

An open replica is CONSUMING, or in ERROR: its partition was stopped by a rule, or its rows cannot be built (they are
served all the same). A sealed one is ONLINE from its files or from its tail, OFFLINE while it has neither (of an upsert
table: or its versions are not here), or in ERROR with the cause while it cannot be built or fetched. All of it is
retried with backoff.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable

import msgspec

from cremant.model.cluster import InstanceReport, SegmentReport, TailReport, VersionsReport
from cremant.model.segments import ReplicaState, SegmentMetadata
from cremant.server.partition import Partition, PartitionState
from cremant.server.table import HostedSegment, HostedTable


def report_of(tables: Iterable[HostedTable]) -> InstanceReport:
    segments: list[SegmentReport] = []
    tails: list[TailReport] = []
    for table in tables:
        # Before the lock, which queries wait for: it may look at every row.
        versions = {number: _versions_report(partition) for number, partition in list(table.partitions.items())}
        superseded = _superseded(table)
        with table.lock:
            segments += [
                _sealed_report(table, hosted, superseded.get(hosted.metadata.name))
                for hosted in table.segments.values()
            ]
            segments += [
                _open_report(table, metadata) for metadata in table.open.values() if metadata.name not in table.segments
            ]
            tails += [
                _tail_report(table, partition, versions.get(partition.id.partition))
                for partition in table.partitions.values()
            ]
    return InstanceReport(segments=tuple(segments), tails=tuple(tails))


def _sealed_report(table: HostedTable, hosted: HostedSegment, superseded: int | None) -> SegmentReport:
    metadata, sealed = hosted.metadata, hosted.sealed
    state = hosted.state
    if sealed is None and table.is_broken(metadata.name):
        state = ReplicaState.ERROR
    elif sealed is None and table.serves_from_tail(metadata):
        state = ReplicaState.ONLINE
    elif sealed is not None and table.record.config.upsert is not None and hosted.versions is None:
        state = ReplicaState.ERROR if hosted.error else ReplicaState.OFFLINE
    # What was not read in full yet, or is about to be deleted, is served, and is no copy to count on (I-6).
    holds = hosted.verified and (hosted.unwanted_since_s is None or hosted.last_copy)
    return SegmentReport(
        table=table.name, segment=metadata.name, state=state, rows=metadata.rows,
        error=hosted.error or hosted.not_compacted,
        checksum=sealed.marker.checksum if sealed is not None and holds else None,
        bytes=sealed.disk_bytes if sealed is not None else 0, progress=table.progress.get(metadata.name, 0),
        snapshot_log_offset=hosted.snapshot.log_offset if sealed is not None and hosted.snapshot is not None else None,
        superseded=superseded,
    )  # fmt: skip


#: Counts are told in such parts of a segment, and made anew so rarely: what is told changes seldom.
_COUNTED_PARTS = 50
_COUNT_EVERY_S = 5.0
#: Of one report, for counting.
_COUNT_SHARE_S = 0.02


def _superseded(table: HostedTable) -> dict[str, int]:
    """Rows not in force per segment, rounded down; of a table that compacts."""
    upsert = table.record.config.upsert
    if upsert is None or upsert.compaction is None:
        return {}
    with table.lock:
        segments = list(table.segments.values())
    counts, ends_s = {}, time.monotonic() + _COUNT_SHARE_S
    for hosted in sorted(segments, key=lambda hosted: hosted.superseded[2]):  # whose turn is longest overdue
        versions = hosted.versions
        if versions is None or hosted.outdated:
            continue
        changes, count, due_s = hosted.superseded
        if changes != versions.changes and due_s <= time.monotonic() < ends_s:
            step = max(1, versions.rows // _COUNTED_PARTS)
            changes, count = versions.changes, versions.counts()[0]
            if count < versions.rows:
                count = count // step * step
            hosted.superseded = changes, count, time.monotonic() + _COUNT_EVERY_S
        counts[hosted.metadata.name] = count
    return counts


def _open_report(table: HostedTable, metadata: SegmentMetadata) -> SegmentReport:
    partition = table.partitions.get(metadata.partition)
    broken = (partition is not None and partition.state is PartitionState.STOPPED) or table.is_broken(metadata.name)
    rows = partition.tail.snapshot.count(metadata.start_offset, 2**62) if partition is not None else 0
    return SegmentReport(
        table=table.name, segment=metadata.name, state=ReplicaState.ERROR if broken else ReplicaState.CONSUMING,
        rows=rows, error=(partition.error if partition is not None else None) or table.problems.get(metadata.name),
        progress=table.progress.get(metadata.name, 0),
    )  # fmt: skip


def _tail_report(table: HostedTable, partition: Partition, versions: VersionsReport | None) -> TailReport:
    if versions is not None:
        saved = [
            hosted.snapshot.epoch for hosted in table.segments.values()
            if hosted.metadata.partition == partition.id.partition and hosted.snapshot is not None
        ]  # fmt: skip
        versions = msgspec.structs.replace(versions, snapshot_epoch=min(saved, default=None))
    return msgspec.structs.replace(tail_report(partition), versions=versions)


def tail_report(partition: Partition) -> TailReport:
    """Without `versions`, which take their time to count."""
    # In this order: the rows are then at least as new as the watermark says.
    watermark = partition.visible
    snapshot, log = partition.tail.snapshot, partition.catching_up
    return TailReport(
        table=partition.id.table, incarnation=partition.id.incarnation, partition=partition.id.partition,
        first_offset=snapshot.first_offset, rows=snapshot.rows, watermark=watermark, state=partition.state_name,
        error=partition.error, log_offset=partition.log_offset, log_first=log.first, log_end=log.end,
        log_read_at_ms=log.read_at_ms, last_indexed_ms=partition.marks.last_indexed_ms,
        rejected=partition.marks.rejected, at_ms=int(time.time() * 1000),
    )  # fmt: skip


#: Counting rows looks at all of them: it is done again when it has rested so many times as long as it took.
_REST_SHARE = 50
#: (report, monotonic seconds from which on it is counted again)
_counted: weakref.WeakKeyDictionary[Partition, tuple[VersionsReport, float]] = weakref.WeakKeyDictionary()


def _versions_report(partition: Partition) -> VersionsReport | None:
    """Of tail and sealed segments; counts may be some seconds old."""
    versions = partition.versions
    if versions is None:
        return None
    known, due_s = _counted.get(partition, (None, 0.0))
    began_s = time.monotonic()
    if known is None or began_s >= due_s:
        parts = (*versions.attached().values(), versions.tail)
        counts = [part.counts() for part in parts]
        known = VersionsReport(
            closed=versions.epoch, horizon=0, rows=sum(part.rows for part in parts),
            in_force=sum(in_force for _, _, in_force in counts), tombstones=sum(count for _, count, _ in counts),
            size_bytes=sum(part.nbytes for part in parts),
        )  # fmt: skip
        ended_s = time.monotonic()
        _counted[partition] = known, ended_s + _REST_SHARE * (ended_s - began_s)
    return msgspec.structs.replace(known, closed=versions.epoch, horizon=versions.horizon)
