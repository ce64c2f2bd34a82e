# SPDX-License-Identifier: Apache-2.0
"""Versions of stored segments on their way to the deep store (upsert tables).

Rows are uploaded once; which of them are in force changes for as long as the table lives. So beside a segment's object
there is a small one with its versions as of some position of the epoch log, made anew now and then: what the log has
since that position is what a server that has lost everything reads to be up to date.

Rules:

- Of the servers that serve a segment, the first by name sees to it. Two that both believe so do no harm: the record
  names the later position, and what it does not name is deleted by who wrote it.
- A segment that nobody has updated since is not uploaded again, only said to be unchanged, if its object is there.
- Where another server has a copy, the log is trimmed by those, and uploads are rare; where none has, each minute of log
  waits for one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from cremant.completion.copies import holders_of
from cremant.model.cluster import ClusterView
from cremant.model.completion import StorePolicy
from cremant.model.errors import CremantError, NotFound, Unavailable
from cremant.model.segments import SegmentMetadata, SegmentStatus, StoredVersions, StoreState
from cremant.segment.snapshot import Snapshot, pack
from cremant.segment.versions import Versions
from cremant.server.files import ServerFiles
from cremant.server.rest_versions import followed, snapshot_of
from cremant.server.table import HostedSegment, HostedTable
from cremant.server.uploads import Uploads
from cremant.server.versions_fetch import holders
from cremant.shell.backoff import Backoff
from cremant.shell.logs import cause, log_event, log_failure
from cremant.shell.member import Member
from cremant.store.deepstore import DeepStore, checksum_of, versions_object
from cremant.wire.messages import CompletionStatus, VersionsStored, VersionsStoredReply

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
#: The log cannot be trimmed meanwhile.
ONLY_COPY_EVERY_S = 60.0
OTHERWISE_EVERY_S = 600.0


@dataclass(slots=True)
class _Uploaded:
    """What this process uploaded last of a segment: of which versions, how often they had changed by then; and when it
    is due again."""

    stored: StoredVersions
    versions: Versions
    changes: int
    due_s: float


class VersionsUploads:
    """`tables` is shared with the host. `policy` says whether the table wants a store, as for rows (Uploads)."""

    def __init__(
        self, tables: dict[str, HostedTable], files: ServerFiles, store: DeepStore, member: Member, uploads: Uploads,
        look_view: Callable[[], ClusterView | None],
    ) -> None:  # fmt: skip
        self._tables = tables
        self._files = files
        self._store = store
        self._member = member
        self._uploads = uploads
        self._look_view = look_view
        self._uploaded: dict[tuple[str, str], _Uploaded] = {}
        self._backoff = Backoff()
        self._not_before_s = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._look_forever, name="versions-uploads", daemon=True)
        #: Totals for metrics.
        self.landed_total = 0
        self.failures_total = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """What runs is abandoned: an object appears whole or not at all."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1)

    def _look_forever(self) -> None:
        while not self._stopping.wait(LOOK_EVERY_S):
            if time.monotonic() < self._not_before_s:
                continue
            with cause():
                try:
                    self.look()
                    self._backoff.reset()
                except Exception as error:
                    self.failures_total += 1
                    self._not_before_s = time.monotonic() + self._backoff.next_ms() / 1000
                    if isinstance(error, CremantError):
                        log_failure(_log, "versions are uploaded later", error)
                    else:
                        _log.exception("uploading versions failed on a bug")

    def look(self) -> int:
        """Uploads what is due, one after the other; how many. Raises CremantError when the store or the controller does
        not do its part: what is left waits."""
        view, count = self._look_view(), 0
        due = [(table, hosted) for table in list(self._tables.values()) for hosted in self._due(table, view)]
        known = {(table.record.incarnation, name) for table in self._tables.values() for name in list(table.segments)}
        self._uploaded = {key: kept for key, kept in self._uploaded.items() if key in known}
        for table, hosted in due:
            if self._stopping.is_set():
                break
            self.upload(table, hosted, hosted.metadata)
            count += 1
        return count

    def _due(self, table: HostedTable, view: ClusterView | None) -> list[HostedSegment]:
        if table.record.config.upsert is None or self._uploads.policy(table) is StorePolicy.PEERS_ONLY:
            return []
        with table.lock:
            segments = [hosted for hosted in table.segments.values() if hosted.versions is not None]
        return [hosted for hosted in segments if self._is_due(table, hosted, view)]

    def _is_due(self, table: HostedTable, hosted: HostedSegment, view: ClusterView | None) -> bool:
        metadata = hosted.metadata
        if metadata.status is not SegmentStatus.DONE or metadata.store_state is not StoreState.STORED:
            return False
        if hosted.outdated:
            return False
        others = [holder.instance for holder in holders(view, table.record, metadata.name, self._member.id)]
        if any(other < self._member.id for other in others) or hosted.snapshot is None:
            return False
        uploaded = self._uploaded.get((table.record.incarnation, metadata.name))
        if metadata.versions is None:
            return True
        return uploaded is None or time.monotonic() >= uploaded.due_s

    def upload(self, table: HostedTable, hosted: HostedSegment, metadata: SegmentMetadata) -> None:
        """Raises CremantError."""
        key, reader = (table.record.incarnation, metadata.name), table.updater(metadata.partition)
        if reader is None:
            return
        with reader.lock:
            versions, position = followed(reader, hosted), reader.position
            if versions is None or hosted.outdated:  # others came first: by now it may have been compacted
                return
            changes = versions.changes
        # Changes from here on come with the next upload, if not with this one.
        before = self._uploaded.get(key)
        if before is not None and _holds(before, metadata, versions, changes) and self._is_there(before.stored):
            stored = msgspec.structs.replace(before.stored, position=position)
        else:
            stored = put_versions(
                self._store, self._files, table, snapshot_of(table, hosted), metadata.name, metadata.checksum or ""
            )
            self.landed_total += 1
        self._say(table, metadata, stored)
        lonely = len(holders_of(metadata)) < 2
        due_s = time.monotonic() + (ONLY_COPY_EVERY_S if lonely else OTHERWISE_EVERY_S)
        self._uploaded[key] = _Uploaded(stored, versions, changes, due_s)

    def _is_there(self, stored: StoredVersions) -> bool:
        """Somebody may have deleted it by hand."""
        try:
            return self._store.size(self._store.name_of(stored.url)) == stored.size_bytes
        except NotFound:
            return False

    def _say(self, table: HostedTable, metadata: SegmentMetadata, stored: StoredVersions) -> None:
        message = VersionsStored(
            instance=self._member.id, table=table.name, incarnation=table.record.incarnation, segment=metadata.name,
            checksum=metadata.checksum or "", versions=stored,
        )  # fmt: skip
        reply = self._member.call("/internal/v1/versionsStored", message, VersionsStoredReply)
        if reply.status in (CompletionStatus.HOLD, CompletionStatus.NOT_LEADER):
            raise Unavailable(f"versions of segment {metadata.name}: the controller answered {reply.status}")
        if reply.unnamed is not None:
            self._delete(reply.unnamed)

    def _delete(self, url: str) -> None:
        try:
            self._store.delete(self._store.name_of(url))
        except CremantError as error:  # nobody names it: the controller sweeps it
            log_failure(_log, "an object that nobody wants stays for now", error, url=url)


def put_versions(
    store: DeepStore, files: ServerFiles, table: HostedTable, snapshot: Snapshot, segment: str, checksum: str
) -> StoredVersions:
    """Stores the versions of a segment of this content. Raises CremantError."""
    scratch = files.new_scratch()
    try:
        path = scratch / "versions"
        path.write_bytes(pack(snapshot, segment=segment, checksum=checksum))
        of_file = checksum_of(path)
        name = versions_object(table.name, table.record.incarnation, segment, snapshot.position.log_offset, of_file)
        url, size_bytes = store.put(name, path), path.stat().st_size
    finally:
        files.remove(scratch)
    log_event(_log, "versions uploaded", segment=segment, url=url, epoch=snapshot.position.epoch, bytes=size_bytes)
    return StoredVersions(url=url, position=snapshot.position, size_bytes=size_bytes, file_checksum=of_file)


def _holds(uploaded: _Uploaded, metadata: SegmentMetadata, versions: Versions, changes: int) -> bool:
    """The object that the record names has these versions."""
    named = metadata.versions is not None and metadata.versions.url == uploaded.stored.url
    return named and uploaded.versions is versions and uploaded.changes == changes
