# SPDX-License-Identifier: Apache-2.0
"""What this server should hold according to the cluster view, compared with what it holds, and made so.

Rules:

- Reconciling is idempotent and needs no memory: the view says everything, the directory has the rest.
- Local files are trusted after a look at marker and sizes; a background thread reads them in full once per process and
  has damaged ones fetched again.
- A table that the view does not have (or has under another incarnation) is let go at once: nothing is consumed or
  served any more. Its bytes go when its epoch log is gone, too (second evidence that it was dropped), or after a grace.
- Segments that left the view are served for a grace in which queries and late views may still name them. A segment
  newer than the view's open one is not unwanted, only not known there yet.
"""

from __future__ import annotations

import logging
import threading
import time

from cremant.log.api import Log
from cremant.model.cluster import ClusterView, InstanceReport, PartitionView, SegmentReport, TableView, TailReport
from cremant.model.errors import Corrupt, NotFound
from cremant.model.names import SegmentName, epoch_topic
from cremant.model.segments import ReplicaState, SegmentMetadata
from cremant.segment.build import newest
from cremant.segment.reader import open_segment, verify
from cremant.segment.tail import SpillQuota
from cremant.server.consuming import Consumer
from cremant.server.files import ServerFiles
from cremant.server.partition import Partition, PartitionId, PartitionState
from cremant.server.table import HostedSegment, HostedTable
from cremant.shell.logs import log_event, log_failure

_log = logging.getLogger(__name__)

RECONCILE_EVERY_S = 1.0
#: Queries that were routed by an older view have ended by then.
SEGMENT_GRACE_S = 15.0
#: A table that is missing without having been marked as dropped: perhaps the view is wrong, not the table.
TABLE_GRACE_S = 60.0


class Hosting:
    """Holds the tables of one server. `instance` is known once the server is a member."""

    def __init__(self, files: ServerFiles, log: Log, *, quota: SpillQuota | None = None) -> None:
        self.instance = ""
        self.tables: dict[str, HostedTable] = {}
        self.reconciled = False
        self._files = files
        self._log = log
        self._quota = quota or SpillQuota()
        self._consumer = Consumer(log, self.partitions)
        self._view: ClusterView | None = None
        self._abandoned_since_s: dict[tuple[str, str], float] = {}
        self._poked = threading.Event()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._reconcile_forever, name="reconcile", daemon=True),
            threading.Thread(target=self._verify_forever, name="verify", daemon=True),
        ]

    def start(self, instance: str) -> None:
        self.instance = instance
        self._consumer.start()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._poked.set()
        self._consumer.stop()
        for thread in self._threads:
            thread.join(timeout=1)
        for partition in self.partitions():
            partition.close()

    def on_view(self, view: ClusterView) -> None:
        self._view = view
        self._poked.set()

    def partitions(self) -> list[Partition]:
        return [partition for table in list(self.tables.values()) for partition in list(table.partitions.values())]

    def ready(self) -> tuple[bool, str]:
        """Ready once it knows its part and every partition has caught up."""
        if not self.reconciled:
            return False, "server is starting: no cluster view yet"
        late = [str(p.id) for p in self.partitions() if p.behind and p.state is not PartitionState.STOPPED]
        return (not late), f"catching up: {', '.join(late[:5])}" if late else ""

    # --- the report for heartbeats ---

    def report(self) -> InstanceReport:
        segments: list[SegmentReport] = []
        tails: list[TailReport] = []
        for table in list(self.tables.values()):
            with table.lock:
                segments += [self._segment_report(table, hosted) for hosted in table.segments.values()]
                segments += [
                    _open_report(table, metadata) for metadata in table.open.values()
                    if metadata.name not in table.segments
                ]  # fmt: skip
                tails += [_tail_report(partition) for partition in table.partitions.values()]
        return InstanceReport(segments=tuple(segments), tails=tuple(tails))

    def _segment_report(self, table: HostedTable, hosted: HostedSegment) -> SegmentReport:
        metadata, sealed = hosted.metadata, hosted.sealed
        state = hosted.state
        if sealed is None and table.serves_from_tail(metadata):
            state = ReplicaState.ONLINE
        return SegmentReport(
            table=table.name, segment=metadata.name, state=state, rows=metadata.rows, error=hosted.error,
            checksum=sealed.marker.checksum if sealed is not None else None,
            bytes=sealed.disk_bytes if sealed is not None else 0, progress=table.progress.get(metadata.name, 0),
        )  # fmt: skip

    # --- reconciling ---

    def _reconcile_forever(self) -> None:
        while not self._stopping.is_set():
            self._poked.wait(RECONCILE_EVERY_S)
            self._poked.clear()
            view = self._view
            if view is None or self._stopping.is_set():
                continue
            try:
                self.reconcile(view)
            except Exception:
                _log.exception("reconciling with the view failed", extra={"fields": {"version": view.version}})

    def reconcile(self, view: ClusterView) -> None:
        wanted = {name: table for name, table in view.tables.items() if self._has_part_in(table)}
        for name, table_view in wanted.items():
            hosted = self.tables.get(name)
            if hosted is not None and hosted.record.incarnation != table_view.record.incarnation:
                self._let_go(name)
                hosted = None
            if hosted is None:
                self._abandoned_since_s.pop((name, table_view.record.incarnation), None)
                hosted = self.tables[name] = HostedTable(table_view.record)
            self._reconcile_table(hosted, table_view)
        for name in [name for name in self.tables if name not in wanted]:
            self._let_go(name)
        if not self.reconciled:
            self._find_strangers()
        self._remove_abandoned()
        self.reconciled = True

    def _has_part_in(self, table: TableView) -> bool:
        consumes = any(self.instance in partition.record.replicas for partition in table.partitions)
        return consumes or any(self.instance in segment.replicas for segment in table.segments)

    def _reconcile_table(self, hosted: HostedTable, view: TableView) -> None:
        hosted.update(view.record)
        self._reconcile_segments(hosted, view)
        mine = {p.record.partition: p for p in view.partitions if self.instance in p.record.replicas}
        for number, partition_view in mine.items():
            if number not in hosted.partitions:
                self._start_partition(hosted, partition_view, view)
        with hosted.lock:
            gone = [hosted.partitions.pop(number) for number in list(hosted.partitions) if number not in mine]
            hosted.open = {number: partition_view.consuming for number, partition_view in mine.items()}
            live = {metadata.name for metadata in hosted.open.values()} | set(hosted.segments)
            for name in [name for name in hosted.sealings if name not in live]:
                del hosted.sealings[name]
        for partition in gone:
            partition.close()

    def _start_partition(self, hosted: HostedTable, partition_view: PartitionView, view: TableView) -> None:
        number, start = partition_view.record.partition, partition_view.consuming.start
        own = PartitionId(hosted.name, hosted.record.incarnation, number)
        sealed = [segment.max_ingestion_ms for segment in view.segments if segment.partition == number]
        partition = Partition(
            own, start, self._files.tail_directory(own), self._quota, max_ingestion_ms=newest(*sealed)
        )
        with hosted.lock:
            hosted.partitions[number] = partition
        log_event(_log, "partition starts", partition=str(own), log_offset=start.log_offset, offset=start.next_offset)

    def _reconcile_segments(self, hosted: HostedTable, view: TableView) -> None:
        assigned = {segment.name: segment for segment in view.segments if self.instance in segment.replicas}
        for metadata in assigned.values():
            known = hosted.segments.get(metadata.name)
            if known is None:
                known = self._open_local(hosted, metadata)
                with hosted.lock:
                    hosted.segments.setdefault(metadata.name, known)
            elif known.metadata != metadata:
                with hosted.lock:
                    known.metadata = metadata
            known.unwanted_since_s = None
        sequences = {p.record.partition: p.record.sequence for p in view.partitions}
        now_s = time.monotonic()
        for name, known in list(hosted.segments.items()):
            newer = SegmentName.parse(name).sequence >= sequences.get(known.metadata.partition, 0)
            if name in assigned or (newer and known.metadata.partition in hosted.partitions):
                continue
            if known.unwanted_since_s is None:
                known.unwanted_since_s = now_s
            elif now_s - known.unwanted_since_s > SEGMENT_GRACE_S:
                with hosted.lock:
                    del hosted.segments[name]
                self._files.remove_segment(hosted.name, hosted.record.incarnation, name)
                log_event(_log, "segment deleted", segment=name)

    def _open_local(self, hosted: HostedTable, metadata: SegmentMetadata) -> HostedSegment:
        """The segment as this server's disk has it. What does not fit is deleted and fetched or built again."""
        found = HostedSegment(metadata)
        directory = self._files.segment_directory(hosted.name, hosted.record.incarnation, metadata.name)
        if not directory.exists():
            return found
        try:
            sealed = open_segment(directory)
            if sealed.marker.checksum != metadata.checksum:
                raise Corrupt(f"{directory} has content {sealed.marker.checksum}, expected {metadata.checksum}")
            found.sealed = sealed
        except Corrupt as error:
            log_failure(_log, "a local segment is not usable", error, segment=metadata.name)
            found.error = str(error)
            self._files.remove(directory)
        return found

    def _let_go(self, name: str) -> None:
        hosted = self.tables[name]
        with hosted.lock:
            del self.tables[name]
            partitions = list(hosted.partitions.values())
            hosted.partitions.clear()
            hosted.segments.clear()
            hosted.open.clear()
        for partition in partitions:
            partition.close()
        self._abandoned_since_s[name, hosted.record.incarnation] = time.monotonic()
        log_event(_log, "table let go", table=name, incarnation=hosted.record.incarnation)

    def _find_strangers(self) -> None:
        """At start: what was dropped, moved or re-created while this server was down."""
        for table, incarnation in self._files.tables_on_disk():
            hosted = self.tables.get(table)
            if hosted is None or hosted.record.incarnation != incarnation:
                self._abandoned_since_s[table, incarnation] = time.monotonic()
                continue
            for segment in self._files.segments_on_disk(table, incarnation):
                if segment not in hosted.segments:
                    self._files.remove_segment(table, incarnation, segment)

    def _remove_abandoned(self) -> None:
        for (table, incarnation), since_s in list(self._abandoned_since_s.items()):
            if time.monotonic() - since_s > TABLE_GRACE_S or self._log_is_gone(table, incarnation):
                self._files.remove_table(table, incarnation)
                del self._abandoned_since_s[table, incarnation]
                log_event(_log, "bytes of a table removed", table=table, incarnation=incarnation)

    def _log_is_gone(self, table: str, incarnation: str) -> bool:
        try:
            self._log.topic(epoch_topic(table, incarnation))
        except NotFound:
            return True
        return False

    # --- verification ---

    def _verify_forever(self) -> None:
        while not self._stopping.wait(RECONCILE_EVERY_S):
            for table in list(self.tables.values()):
                for hosted in list(table.segments.values()):
                    if hosted.sealed is not None and not hosted.verified and not self._stopping.is_set():
                        began_s = time.monotonic()
                        self._verify(table, hosted)
                        # Rest as long as it worked: queries need the cores more.
                        self._stopping.wait(time.monotonic() - began_s)

    def _verify(self, table: HostedTable, hosted: HostedSegment) -> None:
        sealed = hosted.sealed
        if sealed is None:
            return
        try:
            verify(sealed)
            hosted.verified = True
        except (Corrupt, OSError) as error:
            log_failure(_log, "a local segment is damaged, it is fetched again", error, segment=hosted.metadata.name)
            with table.lock:
                if hosted.sealed is sealed:
                    hosted.sealed, hosted.error = None, str(error)
                    self._files.remove(sealed.directory)


def _open_report(table: HostedTable, metadata: SegmentMetadata) -> SegmentReport:
    partition = table.partitions.get(metadata.partition)
    stopped = partition is not None and partition.state is PartitionState.STOPPED
    rows = partition.tail.snapshot.count(metadata.start_offset, 2**62) if partition is not None else 0
    return SegmentReport(
        table=table.name, segment=metadata.name, state=ReplicaState.ERROR if stopped else ReplicaState.CONSUMING,
        rows=rows, error=partition.error if partition is not None else None,
        progress=table.progress.get(metadata.name, 0),
    )  # fmt: skip


def _tail_report(partition: Partition) -> TailReport:
    watermark, snapshot = partition.watermark, partition.tail.snapshot
    return TailReport(
        table=partition.id.table, incarnation=partition.id.incarnation, partition=partition.id.partition,
        first_offset=snapshot.first_offset, rows=snapshot.rows, watermark=watermark, state=partition.state_name,
        error=partition.error,
    )  # fmt: skip
