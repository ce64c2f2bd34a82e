# SPDX-License-Identifier: Apache-2.0
"""Sees to it that this server knows which rows of its sealed segments are in force (upsert tables).

A segment that was sealed here has its versions from the tail; one that was fetched, or whose snapshot on disk is gone,
damaged or too old for what the log still has, has none, and is not served. (Its own disk was asked when it was opened,
updating.py; what is given up later is never older than what the disk has.) For each of those, in this order:

1. a server that serves the segment sends its versions, as of an epoch that it has closed;
2. the deep store has them as of some position;
3. the epoch log has the whole range of the segment, and all updates since.

What came is brought forward by the epoch log (server/replay.py) until it has all that the partition here has, and only
then attached, in one step with the partition's own progress. Failures are retried with backoff; what each source said
is the segment's error, for everyone to see.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path

from cremant.cluster.lowwater import is_void
from cremant.completion.fetch import Holder
from cremant.log.api import Log
from cremant.model.cluster import ClusterView, PipelineRecord
from cremant.model.errors import CremantError, Unavailable
from cremant.model.segments import SegmentMetadata
from cremant.segment.locations import locations_of
from cremant.segment.reader import SealedSegment
from cremant.segment.snapshot import Locate, Snapshot
from cremant.server.files import ServerFiles
from cremant.server.partition import PartitionId
from cremant.server.pool import DaemonPool
from cremant.server.replay import Replay
from cremant.server.table import HostedSegment, HostedTable
from cremant.server.versions_fetch import VersionsClient, holders, newest_metadata
from cremant.shell.backoff import Backoff
from cremant.shell.logs import cause, log_event, log_failure

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
_RUNNING_MAX = 2
#: Bringing versions forward ends when the log has nothing more and the partition here is further all the same.
_FORWARD_S = 60.0
_PAUSE_S = 0.02
#: (incarnation of the table, segment)
Key = tuple[str, str]


class VersionsSource(StrEnum):
    PEER = "peer"
    STORE = "store"
    LOG = "log"


class VersionsKeeper:
    """`tables` is shared with the host. `look_view`: the view of this moment."""

    def __init__(
        self, tables: dict[str, HostedTable], files: ServerFiles, log: Log, client: VersionsClient, instance: str,
        look_view: Callable[[], ClusterView | None],
    ) -> None:  # fmt: skip
        self._tables = tables
        self._files = files
        self._log = log
        self._client = client
        self._instance = instance
        self._look_view = look_view
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._busy: set[Key] = set()
        self._backoffs: dict[Key, tuple[Backoff, float]] = {}
        self._pool = DaemonPool(_RUNNING_MAX, "versions")
        self._thread = threading.Thread(target=self._look_forever, name="versions", daemon=True)
        #: Totals for metrics.
        self.brought: Counter[VersionsSource] = Counter()
        self.failures: Counter[VersionsSource] = Counter()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1)
        self._pool.close()
        self._client.close()

    def _look_forever(self) -> None:
        while not self._stopping.wait(LOOK_EVERY_S):
            try:
                self.look()
            except Exception:
                _log.exception("looking for segments without versions failed")

    def look(self) -> None:
        """Begins what is due."""
        tables = [table for table in list(self._tables.values()) if not self._has_no_keys_yet(table)]
        lacking = [(table, hosted) for table in tables for hosted in lacking_versions(table)]
        keys = {_key(table, hosted) for table, hosted in lacking}
        with self._lock:
            self._backoffs = {key: kept for key, kept in self._backoffs.items() if key in keys}
        for table, hosted in lacking:
            key, now_s = _key(table, hosted), time.monotonic()
            with self._lock:
                waits = self._backoffs.get(key, (None, 0.0))[1] > now_s
                if key in self._busy or waits or len(self._busy) >= _RUNNING_MAX:
                    continue
                self._busy.add(key)
            self._pool.submit(self._run, table, hosted)

    def _record(self, table: HostedTable) -> PipelineRecord:
        view = self._look_view()
        known = view.tables.get(table.name) if view is not None else None
        same = known is not None and known.record.incarnation == table.record.incarnation
        return known.pipeline_record if known is not None and same else PipelineRecord()

    def _has_no_keys_yet(self, table: HostedTable) -> bool:
        """An append table that is to get them: nothing was ever said of its rows; its readers know (updating.py)."""
        record = self._record(table)
        return record.generation > 0 and record.keyed_from is None

    @cause()
    def _run(self, table: HostedTable, hosted: HostedSegment) -> None:
        key = _key(table, hosted)
        try:
            self.bring(table, hosted)
        except Exception as error:
            with self._lock:
                backoff, _ = self._backoffs.get(key, (Backoff(), 0.0))
                retry_ms = backoff.next_ms()
                self._backoffs[key] = backoff, time.monotonic() + retry_ms / 1000
            with table.lock:
                hosted.error = str(error)
            if isinstance(error, CremantError):
                log_failure(_log, "versions of a segment are not here yet", error, segment=key[1], retry_ms=retry_ms)
            else:
                _log.exception("bringing versions failed on a bug", extra={"fields": {"segment": key[1]}})
        finally:
            with self._lock:
                self._busy.discard(key)

    def bring(self, table: HostedTable, hosted: HostedSegment) -> None:
        """Until the segment has its versions. Raises Unavailable with what each source said."""
        sealed = hosted.sealed
        if sealed is None or hosted.versions is not None:
            return
        metadata = newest_metadata(self._look_view(), table.record, hosted.metadata)
        if metadata.compacted_at and metadata.checksum != sealed.marker.checksum:
            return  # versions are of other rows than the file; what takes its place comes first (compacting.py)
        name, whys = metadata.name, []
        began_s = time.monotonic()
        for source, label, begin in self._sources(table, metadata, hosted, sealed):
            if self._stopping.is_set():
                raise Unavailable(f"segment {name}: this server is stopping")
            try:
                with begin() as replay:
                    adopted = self._forward(table, hosted, sealed, replay)
            except (CremantError, OSError) as error:
                self.failures[source] += 1
                whys.append(f"{label}: {error}")
                continue
            if adopted:
                self.brought[source] += 1
                elapsed_ms = round((time.monotonic() - began_s) * 1000)
                log_event(_log, "versions brought", segment=name, source=label, elapsed_ms=elapsed_ms)
            return
        raise Unavailable(
            f"which rows of segment {name} are in force is not known here: {'; '.join(whys)}",
            hint="it is retried; start another replica of it, or rewind the table below the segment",
        )

    def _sources(
        self, table: HostedTable, metadata: SegmentMetadata, hosted: HostedSegment, sealed: SealedSegment
    ) -> Iterator[tuple[VersionsSource, str, Callable[[], contextlib.AbstractContextManager[Replay]]]]:
        record, view = table.record, self._look_view()
        own = PartitionId(table.name, record.incarnation, metadata.partition)
        upsert = record.config.upsert
        locate = _locate(sealed)

        def replayed(found: Snapshot) -> Replay:
            return Replay.from_snapshot(self._log, own, metadata, found)

        def from_peer(holder: Holder) -> contextlib.AbstractContextManager[Replay]:
            not_before = _applied(table, hosted)
            found = self._client.from_peer(holder, table.name, metadata, locate, not_before=not_before)
            return contextlib.closing(replayed(found))

        def from_store() -> contextlib.AbstractContextManager[Replay]:
            with self._scratch() as scratch:
                return contextlib.closing(replayed(self._client.from_store(metadata, scratch, locate)))

        def from_log() -> contextlib.AbstractContextManager[Replay]:
            deleted = upsert.delete_column if upsert is not None else None
            return contextlib.closing(Replay.from_rows(self._log, own, metadata, deleted))

        for holder in holders(view, record, metadata.name, self._instance):
            yield VersionsSource.PEER, holder.instance, lambda holder=holder: from_peer(holder)  # type: ignore[misc]
        if metadata.versions is not None:
            yield VersionsSource.STORE, metadata.versions.url, from_store
        yield VersionsSource.LOG, "epoch log", from_log

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Path]:
        scratch = self._files.new_scratch()
        try:
            yield scratch
        finally:
            self._files.remove(scratch)

    def _forward(self, table: HostedTable, hosted: HostedSegment, sealed: SealedSegment, replay: Replay) -> bool:
        """Reads on until it has what the partition here has, then attaches. False when the segment is another one by
        now, or has its versions. Raises what the log raises, Unavailable when it does not get there."""
        assert hosted.metadata.end is not None
        locate, ends_s = _locate(sealed), time.monotonic() + _FORWARD_S
        keyed_from = self._record(table).keyed_from
        while True:
            if _is_settled(table, hosted, sealed):
                return False
            wanted = max(_applied(table, hosted), hosted.metadata.end.epoch, hosted.metadata.compacted_at)
            if replay.epoch >= wanted and is_void(replay.epoch, table.rewinds) is None:
                found = replay.result(locate)
                if keyed_from is not None and hosted.metadata.end.epoch < keyed_from:
                    # Rows from before there were keys: what they were in force as then, versions do not say.
                    found.versions.horizon = max(found.versions.horizon, keyed_from)
                if adopt(table, hosted, sealed, found):
                    return True
            if replay.turn():
                continue
            if time.monotonic() > ends_s or self._stopping.wait(_PAUSE_S):
                raise Unavailable(f"its versions are as of epoch {replay.epoch}, the partition here is at {wanted}")


def lacking_versions(table: HostedTable) -> list[HostedSegment]:
    """Sealed segments of an upsert table that cannot be served for want of their versions."""
    if table.record.config.upsert is None:
        return []
    with table.lock:
        return [
            hosted for hosted in table.segments.values()
            if hosted.sealed is not None and hosted.versions is None and not hosted.outdated
        ]  # fmt: skip


def adopt(table: HostedTable, hosted: HostedSegment, sealed: SealedSegment, found: Snapshot) -> bool:
    """The segment is served with these versions from now on. False when they lack what the partition has applied
    meanwhile: it changes in one step with its segments."""
    metadata = hosted.metadata
    assert metadata.end is not None
    with table.lock:
        if _is_settled(table, hosted, sealed):
            return True
        partition = table.updater(metadata.partition)
        if partition is not None and partition.versions is not None:
            first, end, since = metadata.start_offset, metadata.end.next_offset, found.position.log_offset
            if not partition.versions.attach(metadata.name, first, end, found.versions, since=since):
                return False
        hosted.versions, hosted.follow_from, hosted.error = found.versions, found.position, None
        return True


def _is_settled(table: HostedTable, hosted: HostedSegment, sealed: SealedSegment) -> bool:
    """There is nothing to bring any more: it went elsewhere, was replaced, or has its versions."""
    current = table.segments.get(hosted.metadata.name) is hosted and hosted.sealed is sealed
    return not current or hosted.versions is not None


def _applied(table: HostedTable, hosted: HostedSegment) -> int:
    """Epoch whose updates the partition here has applied; 0 without one."""
    partition = table.updater(hosted.metadata.partition)
    return partition.versions.applied if partition is not None and partition.versions is not None else 0


def _locate(sealed: SealedSegment) -> Locate:
    return lambda: locations_of(sealed.batches)


def _key(table: HostedTable, hosted: HostedSegment) -> Key:
    return table.record.incarnation, hosted.metadata.name
