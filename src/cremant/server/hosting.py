# SPDX-License-Identifier: Apache-2.0
"""What this server should hold according to the cluster view, compared with what it holds, and made so.

Rules:

- Reconciling is idempotent and needs no memory: the view says everything, the directory has the rest.
- Local files are trusted after a look at marker and sizes; a background thread reads them in full (verifying.py).
- A table that the view does not have (or has under another incarnation) is let go at once: nothing is consumed or
  served any more. Its bytes go when its epoch log is gone, too (second evidence that it was dropped), or after a grace.
- Segments and tails that left the view are served for a grace in which queries and late views may still name them. A
  segment newer than the view's open one is not unwanted, only not known there yet.
- A segment that went elsewhere stays, and is served, while the view names no other copy of it: neither an object nor
  another holder that serves it. One that the view does not have at all was deleted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from functools import partial

from cremant.completion.copies import is_last_copy
from cremant.log.api import Log
from cremant.model.cluster import ClusterView, InstanceReport, PartitionView, TableView
from cremant.model.errors import Corrupt, NotFound, PeerError
from cremant.model.names import SegmentName, epoch_topic
from cremant.model.offsets import Position, Watermark
from cremant.model.segments import SegmentMetadata
from cremant.segment.reader import open_segment
from cremant.segment.tail import SpillQuota
from cremant.server import updating
from cremant.server.catching_up import BOUND_MS
from cremant.server.consuming import Consumer
from cremant.server.epochs import EpochBoard
from cremant.server.files import ServerFiles
from cremant.server.marks import known_at
from cremant.server.partition import Partition, PartitionId, PartitionState
from cremant.server.reports import report_of
from cremant.server.rewound import drop_from, was_rewound
from cremant.server.snapshots import Snapshots
from cremant.server.table import HostedSegment, HostedTable
from cremant.server.verifying import Verifier
from cremant.shell.logs import cause, log_event, log_failure

_log = logging.getLogger(__name__)

RECONCILE_EVERY_S = 1.0
#: Queries that were routed by an older view have ended by then.
SEGMENT_GRACE_S = 15.0
#: A table that is missing without having been marked as dropped: perhaps the view is wrong, not the table.
TABLE_GRACE_S = 60.0


class Hosting:
    """Holds the tables of one server. `instance` is known once the server is a member."""

    def __init__(
        self, files: ServerFiles, log: Log, *, quota: SpillQuota | None = None, board: EpochBoard | None = None,
        fsync: bool = False, catch_up_max_ms: int = BOUND_MS,
    ) -> None:  # fmt: skip
        self.instance = ""
        self.tables: dict[str, HostedTable] = {}
        #: Closed epochs of the upsert tables here.
        self.board = board or EpochBoard()
        self.reconciled = False
        self._files = files
        self._log = log
        self._quota = quota or SpillQuota()
        self._catch_up_max_ms = catch_up_max_ms
        self._consumer = Consumer(log, self.partitions)
        self._view: ClusterView | None = None
        self._abandoned_since_s: dict[tuple[str, str], float] = {}
        self._poked = threading.Event()
        self._stopping = threading.Event()
        self.verifier = Verifier(self.tables, files, self._stopping)
        self._threads = [
            threading.Thread(target=self._reconcile_forever, name="reconcile", daemon=True),
            self.verifier.thread(),
            Snapshots(self.tables, self._stopping, fsync=fsync).thread(),
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
        """All that read the log, followers too."""
        return [
            partition
            for table in list(self.tables.values())
            for partition in (*list(table.partitions.values()), *list(table.followers.values()))
        ]

    def ready(self) -> tuple[bool, str]:
        """Ready once it knows its part and every partition has caught up."""
        if not self.reconciled:
            return False, "server is starting: no cluster view yet"
        late = [p for p in self.partitions() if p.behind and p.state is not PartitionState.STOPPED]
        words = [f"{p.id} ({p.catching_up.progress(p.log_offset)})" for p in late[:5]]
        return (not late), f"catching up: {', '.join(words)}" if late else ""

    def report(self) -> InstanceReport:
        """For heartbeats."""
        return report_of(list(self.tables.values()))

    def reset(self, table: str, segment: str) -> None:
        """See `HostedTable.reset`. Raises NotFound."""
        hosted = self.tables.get(table)
        if hosted is None or not hosted.reset(segment):
            raise NotFound(f"Table {table}_REALTIME segment {segment} does not exist here")
        self._poked.set()

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

    @cause()
    def reconcile(self, view: ClusterView) -> None:
        on_disk = set(self._files.tables_on_disk())
        wanted = {
            name: table for name, table in view.tables.items()
            if self._concerns(table) or (name, table.record.incarnation) in on_disk
        }  # fmt: skip
        for name, table_view in wanted.items():
            hosted = self.tables.get(name)
            if hosted is not None and hosted.record.incarnation != table_view.record.incarnation:
                self._let_go(name)
                hosted = None
            if hosted is None:
                self._abandoned_since_s.pop((name, table_view.record.incarnation), None)
                hosted = HostedTable(table_view.record)
                self._find_strangers(hosted, table_view)
                self.tables[name] = hosted
            self._reconcile_table(hosted, table_view)
            self._remove_unwanted(hosted, table_view)
        for name, hosted in list(self.tables.items()):
            if name not in wanted:
                self._let_go(name)
            elif not (hosted.partitions or hosted.segments or self._has_part_in(wanted[name])):
                self._let_go(name)
                self._files.remove_table(name, hosted.record.incarnation)
        if not self.reconciled:
            now_s = time.monotonic()
            gone = {key: now_s for key in on_disk if key[0] not in wanted or not self._hosts(*key)}
            self._abandoned_since_s.update(gone)  # dropped or re-created while this server was down
        self._remove_abandoned()
        self.reconciled = True

    def _concerns(self, table: TableView) -> bool:
        """Has a part here, or had one a moment ago that is still served."""
        hosted = self.tables.get(table.name)
        lingers = hosted is not None and hosted.record.incarnation == table.record.incarnation
        return lingers or self._has_part_in(table)

    def _hosts(self, table: str, incarnation: str) -> bool:
        hosted = self.tables.get(table)
        return hosted is not None and hosted.record.incarnation == incarnation

    def _has_part_in(self, table: TableView) -> bool:
        consumes = any(self.instance in partition.record.replicas for partition in table.partitions)
        return consumes or any(self.instance in segment.replicas for segment in table.segments)

    def _reconcile_table(self, hosted: HostedTable, view: TableView) -> None:
        hosted.update(view.record)
        for reader in hosted.partitions.values():
            reader.promise(view.record.config.freshness_sla)
        hosted.rewinds = view.pipeline_record.rewinds
        hosted.tell_when_ready()
        self._reconcile_segments(hosted, view)
        with hosted.lock:
            hosted.resets |= updating.to_read_again(hosted)
        self._let_go_reset(hosted)
        mine = {p.record.partition: p for p in view.partitions if self.instance in p.record.replicas}
        for number, partition_view in mine.items():
            if number in hosted.partitions and was_rewound(hosted, partition_view.consuming):
                self._begin_again(hosted, partition_view)
            if number not in hosted.partitions:
                self._start_partition(hosted, partition_view, view)
            hosted.partitions[number].unwanted_since_s = None
        self._reconcile_versions(hosted, view)
        with hosted.lock:
            gone = [hosted.partitions.pop(number) for number in _outlived(hosted, mine)]
            hosted.open = {number: partition_view.consuming for number, partition_view in mine.items()}
            live = {metadata.name for metadata in hosted.open.values()} | set(hosted.segments)
            for name in [name for name in hosted.sealings if name not in live]:
                del hosted.sealings[name]
                hosted.problems.pop(name, None)
        for partition in gone:
            updating.leave(hosted, partition)
            partition.close()
            log_event(_log, "partition let go", partition=str(partition.id))

    def _let_go_reset(self, hosted: HostedTable) -> None:
        for partition in hosted.take_resets():
            updating.leave(hosted, partition)
            partition.close()
            log_event(_log, "partition reset", partition=str(partition.id), error=partition.error)

    def _begin_again(self, hosted: HostedTable, partition_view: PartitionView) -> None:
        """The table was taken back into what is sealed here: the partition is read again from there."""
        number, start = partition_view.record.partition, partition_view.consuming.start
        with hosted.lock:
            partition = hosted.partitions.pop(number)
            dropped = drop_from(hosted, number, start.next_offset)
        updating.leave(hosted, partition)
        partition.close()
        for name in dropped:
            self._files.remove_segment(hosted.name, hosted.record.incarnation, name)
        log_event(_log, "partition begins again, it was rewound", partition=str(partition.id), segments=dropped)

    def _start_partition(self, hosted: HostedTable, partition_view: PartitionView, view: TableView) -> None:
        number, start = partition_view.record.partition, partition_view.consuming.start
        own = PartitionId(hosted.name, hosted.record.incarnation, number)
        known = known_at((segment for segment in view.segments if segment.partition == number), start)
        partition = self._partition(hosted, own, start, known)
        with hosted.lock:  # both before it reads: what it applied without them would be lost to its segments
            updating.attach(hosted, partition)
            hosted.partitions[number] = partition
        log_event(_log, "partition starts", partition=str(own), log_offset=start.log_offset, offset=start.next_offset)

    def _partition(
        self, hosted: HostedTable, own: PartitionId, start: Position, known: Watermark | None = None
    ) -> Partition:
        upsert = hosted.record.config.upsert
        replay_from = None
        if upsert is not None:
            replay_from = updating.replay_from(hosted, own.partition, self._earliest(own))
        partition = Partition(
            own, start, self._files.tail_directory(own), self._quota, known=known, upsert=upsert,
            promise=hosted.record.config.freshness_sla, catch_up_max_ms=self._catch_up_max_ms, replay_from=replay_from,
        )  # fmt: skip
        if upsert is not None:
            partition.on_epoch = partial(self.board.tell, own.incarnation, own.partition)
        return partition

    def _reconcile_versions(self, hosted: HostedTable, view: TableView) -> None:
        """Upsert tables: every sealed segment has a reader that applies its updates."""
        if hosted.record.config.upsert is None:
            return
        for number in updating.wanted_followers(hosted):
            own = PartitionId(hosted.name, hosted.record.incarnation, number)
            updating.follow(hosted, number, self._earliest(own), partial(self._partition, hosted, own))
        updating.begin_unknown(hosted, view.pipeline_record)
        for reader in (*list(hosted.partitions.values()), *list(hosted.followers.values())):
            updating.attach(hosted, reader)

    def _earliest(self, own: PartitionId) -> int:
        """Of the epoch log; 0 when it does not say: the reader will."""
        try:
            return self._log.earliest(own.topic, own.partition)
        except (NotFound, PeerError):
            return 0

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
            known.unwanted_since_s, known.last_copy = None, False

    def _remove_unwanted(self, hosted: HostedTable, view: TableView) -> None:
        known = {segment.name: segment for segment in view.segments}
        sequences = {p.record.partition: p.record.sequence for p in view.partitions}
        now_s = time.monotonic()
        for name, segment in list(hosted.segments.items()):
            metadata = known.get(name)
            if metadata is not None and self.instance in metadata.replicas:
                continue
            newer = SegmentName.parse(name).sequence >= sequences.get(segment.metadata.partition, 0)
            if metadata is None and newer and segment.metadata.partition in hosted.partitions:
                continue
            if segment.unwanted_since_s is None:
                segment.unwanted_since_s = now_s
            segment.last_copy = metadata is not None and self._is_last_copy(segment, metadata, view)
            if now_s - segment.unwanted_since_s > SEGMENT_GRACE_S and not segment.last_copy:
                with hosted.lock:
                    del hosted.segments[name]
                self._files.remove_segment(hosted.name, hosted.record.incarnation, name)
                log_event(_log, "segment deleted", segment=name)

    def _is_last_copy(self, segment: HostedSegment, metadata: SegmentMetadata, view: TableView) -> bool:
        sealed = segment.sealed
        if sealed is None or (sealed.marker.checksum != metadata.checksum and not metadata.compacted_at):
            return False
        last = is_last_copy(metadata, self.instance, view.external.get(metadata.name, {}))
        if last and not segment.last_copy:
            log_event(_log, "segment kept, no other copy is known", segment=metadata.name)
        return last

    def _open_local(self, hosted: HostedTable, metadata: SegmentMetadata) -> HostedSegment:
        """The segment as this server's disk has it. What does not fit is deleted and fetched or built again."""
        found = HostedSegment(metadata)
        directory = self._files.segment_directory(hosted.name, hosted.record.incarnation, metadata.name)
        if not directory.exists():
            return found
        try:
            sealed = open_segment(directory, hosted.record.config.indexes)
            if sealed.marker.checksum != metadata.checksum and not metadata.compacted_at:
                raise Corrupt(f"{directory} has content {sealed.marker.checksum}, expected {metadata.checksum}")
            found.sealed = sealed
            if hosted.record.config.upsert is not None:
                updating.open_versions(found)
        except Corrupt as error:
            log_failure(_log, "a local segment is not usable", error, segment=metadata.name)
            found.error = str(error)
            self._files.remove(directory)
        return found

    def _let_go(self, name: str) -> None:
        hosted = self.tables[name]
        with hosted.lock:
            del self.tables[name]
            partitions = [*hosted.partitions.values(), *hosted.followers.values()]
            hosted.partitions.clear()
            hosted.followers.clear()
            hosted.segments.clear()
            hosted.open.clear()
        for partition in partitions:
            partition.close()
        self._abandoned_since_s[name, hosted.record.incarnation] = time.monotonic()
        log_event(_log, "table let go", table=name, incarnation=hosted.record.incarnation)

    def _find_strangers(self, hosted: HostedTable, view: TableView) -> None:
        """Segments on disk that went elsewhere while this server was down or had no part in the table."""
        known = {segment.name: segment for segment in view.segments}
        table, incarnation = hosted.name, hosted.record.incarnation
        for name in self._files.segments_on_disk(table, incarnation):
            metadata = known.get(name)
            if metadata is None:
                self._files.remove_segment(table, incarnation, name)
            elif self.instance not in metadata.replicas:
                found = self._open_local(hosted, metadata)
                if found.sealed is not None:
                    found.unwanted_since_s = time.monotonic()
                    hosted.segments[name] = found

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
        except PeerError:
            return False  # a log that does not answer proves nothing
        return False


def _outlived(hosted: HostedTable, mine: Collection[int]) -> list[int]:
    """Partitions that went elsewhere so long ago that nobody asks for them here any more."""
    now_s = time.monotonic()
    outlived = []
    for number, partition in hosted.partitions.items():
        if number in mine:
            continue
        if partition.unwanted_since_s is None:
            partition.unwanted_since_s = now_s
        elif now_s - partition.unwanted_since_s > SEGMENT_GRACE_S:
            outlived.append(number)
    return outlived
