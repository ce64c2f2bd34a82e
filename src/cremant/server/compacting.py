# SPDX-License-Identifier: Apache-2.0
"""Lets go of replaced rows of sealed segments (upsert tables), as the controller orders it in a segment's record.

1. `compacting = X`: the server that the record names (if it is gone, of those that serve the segment the first by name)
   makes what is left of it at X, stores it and its versions if the segment is in the deep store, and has it recorded:
   `compacted_at = X`, another checksum.
2. From then on whoever has the former content is *outdated*: it makes the same of it by itself (or fetches it, where it
   does not know which rows are in force, or made something else) and serves it in its place.

Rules:

- What is outdated is served, and kept, until its successor is on the disk, whole and verified, with its versions: a
  crash at any moment leaves one of the two. Queries under way keep the file that they hold.
- Files and versions change in one step, between two epochs: no update is lost, and no query sees one without the other.
- Nothing is remembered: a restart looks at the view and at its disk, and goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from cremant.model.cluster import ClusterView
from cremant.model.errors import AlreadyExists, Corrupt, CremantError, NoResource, Unavailable
from cremant.model.segments import SegmentMetadata, StoredVersions, StoreState
from cremant.segment import snapshot
from cremant.segment.compact import Compacted, compact_segment
from cremant.segment.layout import BATCH_ROWS
from cremant.segment.masks import Flags
from cremant.segment.reader import SealedSegment, derive
from cremant.segment.versions import Versions
from cremant.server.fetching import SegmentFetcher
from cremant.server.files import ServerFiles
from cremant.server.partition import Partition
from cremant.server.table import HostedSegment, HostedTable
from cremant.server.versions_fetch import holders
from cremant.server.versions_upload import put_versions
from cremant.shell.backoff import Backoff
from cremant.shell.logs import cause, log_event, log_failure
from cremant.shell.member import Member
from cremant.shell.pace import Pace
from cremant.store.deepstore import DeepStore, another_name, segment_object
from cremant.wire.messages import CompletionStatus, SegmentCompacted, SegmentCompactedReply

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
#: Of a core, while there is time.
_SHARE, _WITHIN_S = 0.25, 60.0
_VIEW_LAG_S = 30.0
#: (incarnation of the table, segment)
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Work:
    """A segment as it is served now: files, versions, and who applies its updates."""

    table: HostedTable
    hosted: HostedSegment
    metadata: SegmentMetadata
    sealed: SealedSegment
    versions: Versions
    reader: Partition
    #: Rows that were replaced up to here are to go.
    epoch: int

    @property
    def key(self) -> Key:
        return self.table.record.incarnation, self.metadata.name

    def is_served(self) -> bool:
        """Still as it was, and the reader is neither behind its versions nor of others. Its lock is held, and that of
        the table."""
        known, attached = self.table.segments.get(self.metadata.name), self.reader.versions
        same = known is self.hosted and known.sealed is self.sealed and known.versions is self.versions
        if not same or attached is None or not attached.is_current(self.metadata.name):
            return False
        return attached.attached().get(self.metadata.name) is self.versions


@dataclass(frozen=True, slots=True)
class _Made:
    """What is left of `source` at `epoch`, in a scratch directory."""

    source: SealedSegment
    epoch: int
    kept: Flags
    compacted: Compacted
    sealed: SealedSegment


class Compactor:
    """`tables` is shared with the host. One segment at a time: it takes a core."""

    def __init__(
        self, tables: dict[str, HostedTable], files: ServerFiles, store: DeepStore, member: Member,
        fetcher: SegmentFetcher, look_view: Callable[[], ClusterView | None], *, fsync: bool,
    ) -> None:  # fmt: skip
        self._tables = tables
        self._files = files
        self._store = store
        self._member = member
        self._fetcher = fetcher
        self._look_view = look_view
        self._fsync = fsync
        #: Made, and not in its place yet.
        self._made: dict[Key, _Made] = {}
        #: What was recorded: its epoch, and for how long the view may not show it yet.
        self._told: dict[Key, tuple[int, float]] = {}
        self._backoffs: dict[Key, tuple[Backoff, float]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._look_forever, name="compaction", daemon=True)
        #: Totals for metrics.
        self.segments_total = 0
        self.rows_total = 0
        self.failures_total = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """What runs is abandoned; its scratch is removed at the next start."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1)

    def _look_forever(self) -> None:
        while not self._stopping.wait(LOOK_EVERY_S):
            try:
                self.look()
            except Exception:
                _log.exception("looking for segments to compact failed")

    def look(self) -> None:
        """Does what is due, one segment after the other."""
        due = [(table, hosted) for table in list(self._tables.values()) for hosted in self._due(table)]
        keys = {(table.record.incarnation, hosted.metadata.name) for table, hosted in due}
        self._backoffs = {key: kept for key, kept in self._backoffs.items() if key in keys}
        self._told = {key: told for key, told in self._told.items() if key in keys}
        for key in self._made.keys() - keys:
            self._drop(key)
        for table, hosted in due:
            key = (table.record.incarnation, hosted.metadata.name)
            if self._stopping.is_set():
                return
            if time.monotonic() >= self._backoffs.get(key, (None, 0.0))[1]:
                self._run(table, hosted, key)

    def _due(self, table: HostedTable) -> list[HostedSegment]:
        if table.record.config.upsert is None:
            return []
        with table.lock:
            segments = list(table.segments.values())
        due = [hosted for hosted in segments if hosted.outdated or self._begins(table, hosted)]
        for hosted in segments:
            if hosted.not_compacted is not None and hosted not in due:
                hosted.not_compacted = None
        return due

    def _begins(self, table: HostedTable, hosted: HostedSegment) -> bool:
        metadata = hosted.metadata
        if metadata.compacting is None or hosted.sealed is None or hosted.versions is None:
            return False
        if metadata.compactor == self._member.id:
            return True
        others = [one.instance for one in holders(self._look_view(), table.record, metadata.name, self._member.id)]
        return metadata.compactor not in others and all(other > self._member.id for other in others)

    @cause()
    def _run(self, table: HostedTable, hosted: HostedSegment, key: Key) -> None:
        try:
            self.compact(table, hosted)
            hosted.not_compacted = None
            self._backoffs.pop(key, None)
        except Exception as error:
            self.failures_total += 1
            hosted.not_compacted = f"not compacted: {error}"
            self._drop(key)
            backoff, _ = self._backoffs.get(key, (Backoff(), 0.0))
            retry_ms = backoff.next_ms()
            self._backoffs[key] = backoff, time.monotonic() + retry_ms / 1000
            if isinstance(error, CremantError):
                log_failure(_log, "a segment is compacted later", error, segment=key[1], retry_ms=retry_ms)
            else:
                _log.exception("compaction failed on a bug", extra={"fields": {"segment": key[1]}})

    def compact(self, table: HostedTable, hosted: HostedSegment) -> None:
        """The next step of one segment, if its updates are in. Raises CremantError."""
        work = _work(table, hosted)
        if work is None:
            if hosted.outdated and hosted.versions is None:
                self._fetch(table, hosted)
            return
        epoch, until_s = self._told.get(work.key, (0, 0.0))
        told = not hosted.outdated and epoch == work.epoch and time.monotonic() < until_s
        if told or work.versions.epoch < work.epoch:
            return
        made = self._made_of(work)
        if not hosted.outdated:
            self._propose(work, made)
        elif made.compacted.checksum == work.metadata.checksum:
            self._install(work, made)
        else:
            log_event(
                _log, "own rows differ from the compacted segment", level=logging.ERROR, segment=work.metadata.name,
                expected=work.metadata.checksum, found=made.compacted.checksum,
            )  # fmt: skip
            self._fetch(table, hosted)

    def _made_of(self, work: _Work) -> _Made:
        known = self._made.get(work.key)
        if known is not None and known.source is work.sealed and known.epoch == work.epoch:
            return known
        self._drop(work.key)
        began_s, versions, sealed = time.monotonic(), work.versions, work.sealed
        kept = versions.kept(work.epoch)
        pace = Pace(_SHARE, 2 * max(1, -(-versions.rows // BATCH_ROWS)), _WITHIN_S)
        scratch = self._files.new_scratch()
        try:
            in_order = kept if versions.order is None else kept[versions.order]
            compacted = compact_segment(scratch, sealed, in_order, fsync=self._fsync, on_progress=pace.rest)
            made = derive(
                scratch, sealed.name, compacted.checksum, fsync=self._fsync, indexes=work.table.record.config.indexes,
                on_progress=pace.rest,
            )  # fmt: skip
        except BaseException as error:
            if isinstance(error, Corrupt):
                work.hosted.verified = False  # it is looked through once more, dropped and fetched
            self._files.remove(scratch)
            raise
        self._made[work.key] = found = _Made(sealed, work.epoch, kept, compacted, made)
        elapsed_ms = round((time.monotonic() - began_s) * 1000)
        log_event(
            _log, "compacted segment built", segment=sealed.name, epoch=work.epoch, rows=compacted.rows,
            removed=sealed.rows - compacted.rows, checksum=compacted.checksum, elapsed_ms=elapsed_ms,
        )  # fmt: skip
        return found

    def _drop(self, key: Key) -> None:
        made = self._made.pop(key, None)
        if made is not None:
            self._files.remove(made.sealed.directory)

    # --- having it recorded ---

    def _propose(self, work: _Work, made: _Made) -> None:
        metadata, compacted, table = work.metadata, made.compacted, work.table
        url: str | None = None
        stored: StoredVersions | None = None
        if compacted.checksum != metadata.checksum and metadata.store_state is StoreState.STORED:
            name = segment_object(
                table.name, table.record.incarnation, metadata.name, metadata.commit_token, compacted.file_checksum
            )
            url = self._put(name, compacted)
            taken = self._taken(work, made)
            if taken is None:
                return
            stored = put_versions(self._store, self._files, table, taken, metadata.name, compacted.checksum)
        message = SegmentCompacted(
            instance=self._member.id, table=table.name, incarnation=table.record.incarnation, segment=metadata.name,
            epoch=work.epoch, before=metadata.checksum or "", checksum=compacted.checksum,
            file_checksum=compacted.file_checksum, rows=compacted.rows, size_bytes=compacted.size_bytes, url=url,
            versions=stored,
        )  # fmt: skip
        reply = self._member.call("/internal/v1/segmentCompacted", message, SegmentCompactedReply)
        if reply.status is not CompletionStatus.KEEP:  # what nobody names is swept
            raise Unavailable(f"segment {metadata.name}: the controller answered {reply.status}")
        self._told[work.key] = work.epoch, time.monotonic() + _VIEW_LAG_S

    def _put(self, name: str, compacted: Compacted) -> str:
        try:
            return self._store.put(name, compacted.path)
        except AlreadyExists:  # the name tells the content, so what has it is damaged
            return self._store.put(another_name(name), compacted.path)

    def _taken(self, work: _Work, made: _Made) -> snapshot.Snapshot | None:
        """The versions of what is left, as of now; None when it is served otherwise by now."""
        with work.reader.lock:  # between two epochs: nobody writes
            with work.table.lock:  # queries wait for it
                if not work.is_served():
                    return None
            return snapshot.Snapshot(work.versions.compacted(made.kept, work.epoch), work.reader.position)

    # --- in its place ---

    def _install(self, work: _Work, made: _Made) -> None:
        table, hosted, name = work.table, work.hosted, work.metadata.name
        with hosted.disk:
            taken = self._taken(work, made)
            if taken is None:
                return
            snapshot.write(
                made.sealed.directory, taken, segment=name, checksum=made.compacted.checksum, fsync=self._fsync
            )
            with work.reader.lock, table.lock:
                attached = work.reader.versions
                if not work.is_served() or attached is None or self._tables.get(table.name) is not table:
                    return
                versions = work.versions.compacted(made.kept, work.epoch, taken.versions)
                self._replace(table, hosted, made.sealed)
                attached.exchange(name, work.versions, versions)
                hosted.versions, hosted.snapshot, hosted.rewinds_saved = versions, taken.position, versions.rewinds
        self._made.pop(work.key, None)
        removed = work.sealed.rows - made.compacted.rows
        self.segments_total += 1
        self.rows_total += removed
        log_event(_log, "segment compacted", segment=name, epoch=work.epoch, rows=made.compacted.rows, removed=removed)

    def _fetch(self, table: HostedTable, hosted: HostedSegment) -> None:
        """Its successor from where it is; versions follow (validity.py)."""
        with table.lock:
            metadata, before = hosted.metadata, hosted.sealed
        scratch = self._files.new_scratch()
        try:
            sealed = self._fetcher.fetch(table.record, metadata, scratch)
            reader = table.updater(metadata.partition)
            with hosted.disk, table.lock:
                current = table.segments.get(metadata.name) is hosted and self._tables.get(table.name) is table
                if not current or hosted.sealed is not before or hosted.metadata.checksum != metadata.checksum:
                    return
                if reader is not None and reader.versions is not None:
                    reader.versions.detach(metadata.name)
                hosted.versions = hosted.follow_from = hosted.snapshot = None
                self._replace(table, hosted, sealed)
        finally:
            self._files.remove(scratch)
        log_event(_log, "compacted segment fetched", segment=metadata.name, rows=sealed.rows)

    def _replace(self, table: HostedTable, hosted: HostedSegment, sealed: SealedSegment) -> None:
        """Its files; the table's lock is held. Raises NoResource: then nothing has changed."""
        target = self._files.segment_directory(table.name, table.record.incarnation, sealed.name)
        try:
            hosted.sealed = self._files.adopt(sealed, target)
        except OSError as error:
            raise NoResource(f"cannot replace {target}: {error}", hint="it is retried") from error
        hosted.verified, hosted.error, hosted.saved, hosted.save_at_s = True, None, None, 0.0
        hosted.superseded = (-1, 0, 0.0)


def _work(table: HostedTable, hosted: HostedSegment) -> _Work | None:
    """None while its versions are not here, or nobody applies its updates."""
    with table.lock:
        metadata, sealed, versions = hosted.metadata, hosted.sealed, hosted.versions
        epoch = metadata.compacted_at if hosted.outdated else metadata.compacting
        reader = table.updater(metadata.partition)
    if sealed is None or versions is None or reader is None or epoch is None:
        return None
    return _Work(table, hosted, metadata, sealed, versions, reader, epoch)
