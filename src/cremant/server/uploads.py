# SPDX-License-Identifier: Apache-2.0
"""Sealed segments on their way to the deep store, beside everything else a server does.

Rules
- Uploads have threads of their own, so that no build, commit or query ever waits for a store that hangs; each call of
  the store has a deadline (store rules).
- An object that landed is named by a commit, or reported until the controller keeps it or does not want it; then it is
  deleted. Names say attempt and content, so a late one is in nobody's way.
- The server that committed a segment sees to its object as long as it holds the segment and the metadata has none: from
  the view alone, so also after a restart. A breaker keeps it from trying what fails again and again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from pathlib import Path

from cremant.completion.breaker import Breaker, BreakerState
from cremant.model.completion import StorePolicy, policy_of
from cremant.model.errors import AlreadyExists, Conflict, Corrupt, CremantError, NotFound, StoreFailed, Unavailable
from cremant.model.limits import UPLOAD_UNNAMED_MS, UPLOADS_RUNNING_MAX
from cremant.model.segments import SegmentMetadata, SegmentStatus, StoreState
from cremant.segment.build import PARQUET_FILE
from cremant.server.files import ServerFiles
from cremant.server.pool import DaemonPool
from cremant.server.table import HostedSegment, HostedTable
from cremant.server.upload import Upload, UploadCause, UploadState, cause_of, keep_beside
from cremant.shell.backoff import Backoff
from cremant.shell.logs import cause, current_cause, log_event, log_failure
from cremant.shell.member import Member
from cremant.store.deepstore import DeepStore, another_name, checksum_of, segment_object
from cremant.wire.messages import CompletionStatus, SegmentStored, SegmentStoredReply

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
#: After the controller kept an upload its view may name it a moment later; before that it looks as if it lacked one.
_VIEW_LAG_S = 30.0
#: An upload that a commit waits for is named by it; who waits no longer says so.
_COMMIT_COMES_FIRST_S = 30.0


class Uploads:
    """`tables` is shared with the host. `has_store`: a store is configured, not only the embedded directory."""

    def __init__(
        self, tables: dict[str, HostedTable], files: ServerFiles, store: DeepStore, member: Member, *, has_store: bool
    ) -> None:
        self._tables = tables
        self._files = files
        self._store = store
        self._member = member
        self._has_store = has_store
        self._lock = threading.Lock()
        self._uploads: dict[str, Upload] = {}
        #: Segments of which a try failed, or ended a moment ago.
        self._backoffs: dict[tuple[str, str], tuple[Backoff, float]] = {}
        self._poked = threading.Event()
        self._stopping = threading.Event()
        self._pool = DaemonPool(UPLOADS_RUNNING_MAX, "upload")
        self._thread = threading.Thread(target=self._look_forever, name="uploads", daemon=True)
        self.breaker = Breaker()
        #: Totals for metrics.
        self.landed_total = 0
        self.failed: Counter[UploadCause] = Counter()
        self.discarded_total = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """What runs is abandoned: an object appears whole or not at all."""
        self._stopping.set()
        self._poked.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1)
        self._pool.close()

    def policy(self, table: HostedTable) -> StorePolicy:
        return policy_of(table.record.config, has_store=self._has_store)

    @property
    def backlog(self) -> int:
        """Segments that this server committed and that wait for their object."""
        return sum(len(self._lacking(table)) for table in list(self._tables.values()))

    # --- for commits ----------------------------------------------------------------------------------------------

    def begin(
        self, table: HostedTable, segment: str, token: int, source: Path, *, checksum: str, file_checksum: str,
        required: bool,
    ) -> Upload:  # fmt: skip
        """The upload of `source` for this attempt to commit; the one that is under way, if there is one. Never blocks.
        `required`: also while the breaker is open."""
        name = segment_object(table.name, table.record.incarnation, segment, token, file_checksum)
        with self._lock:
            known = self._uploads.get(name)
            if known is not None and known.state is not UploadState.FAILED:
                return known
            made = Upload(table.name, table.record.incarnation, segment, name, checksum, file_checksum)
            made.hurried = self.breaker.state is not BreakerState.CLOSED
            if not self.breaker.admit(_now_ms()) and not required:
                made.state, made.skipped = UploadState.FAILED, True
                made.error = f"the deep store has failed again and again, it is tried later: {self.breaker.cause}"
                made.ended.set()
                return made
            self._uploads[name] = made
        self._submit(made, source)
        return made

    def slow(self, waited_ms: int) -> None:
        """A commit has waited long enough and goes on without its upload."""
        with self._lock:
            self.breaker.failed(_now_ms(), f"an upload took longer than {waited_ms} ms")

    def claim(self, upload: Upload) -> bool:
        """A commit is about to name it. False when it was given up: it must not be named."""
        with self._lock:
            upload.claimed = self._uploads.get(upload.name) is upload
            return upload.claimed

    def named(self, upload: Upload) -> None:
        """The metadata names it, or its failure."""
        with self._lock:
            self._drop(upload)

    def unnamed(self, upload: Upload) -> None:
        """The commit named no object, or was not this attempt's: the outcome is reported now, or once it is known."""
        with self._lock:
            upload.claimed, upload.report_at_s = False, 0.0
        self._poked.set()

    # --- for repairs ----------------------------------------------------------------------------------------------

    def upload_now(self, table: HostedTable, metadata: SegmentMetadata, timeout_s: float) -> str:
        """Uploads our verified copy of a segment and has it recorded; returns its URL. Blocks for `timeout_s` at most;
        an upload that takes longer goes on. Raises NotFound, Conflict, Corrupt, StoreFailed, Unavailable."""
        hosted = table.segments.get(metadata.name)
        upload = self._begin_own(table, metadata, hosted)
        if not upload.ended.wait(timeout_s):
            self.unnamed(upload)  # it is reported when it lands
            raise StoreFailed(f"the upload of {metadata.name} takes longer than {timeout_s:.0f} s", hint="it goes on")
        if upload.error is not None:
            self._report(upload)
            kind = StoreFailed if upload.cause is not None and upload.cause.of_store else Unavailable
            raise kind(f"segment {metadata.name} could not be uploaded: {upload.error}")
        reply = self._report(upload)
        if reply.store_url is None:
            raise Conflict(f"segment {metadata.name}: the controller does not want this upload ({reply.status})")
        return reply.store_url

    def _begin_own(self, table: HostedTable, metadata: SegmentMetadata, hosted: HostedSegment | None) -> Upload:
        sealed = hosted.sealed if hosted is not None else None
        if hosted is None or sealed is None:
            raise NotFound(f"segment {metadata.name} is not on this server")
        marker = sealed.marker
        if marker.checksum != metadata.checksum:
            raise Conflict(f"segment {metadata.name} has content {marker.checksum} here, not {metadata.checksum}")
        path = sealed.directory / PARQUET_FILE
        if (found := checksum_of(path)) != marker.file_checksum:
            hosted.verified = False  # it is looked through once more, dropped and fetched
            with self._lock:
                self.failed[UploadCause.CHECKSUM] += 1
            raise Corrupt(f"{path} has checksum {found}, expected {marker.file_checksum}")
        return self.begin(
            table, metadata.name, metadata.commit_token, path, checksum=marker.checksum,
            file_checksum=marker.file_checksum, required=True,
        )  # fmt: skip

    # --- in the background ----------------------------------------------------------------------------------------

    def _submit(self, upload: Upload, source: Path) -> None:
        scratch: Path | None = None
        try:
            scratch = self._files.new_scratch()
            keep_beside(source, scratch / PARQUET_FILE)
        except OSError as error:  # our own disk is full, or the segment is gone: that says nothing of the store
            if scratch is not None:
                self._files.remove(scratch)
            self._failed(upload, f"{source}: {error}", cause_of(error))
            return
        # Who began it is its cause, on whatever thread it runs.
        self._pool.submit(cause(current_cause())(self._run), upload, scratch)

    def _run(self, upload: Upload, scratch: Path) -> None:
        upload.state, upload.began_s = UploadState.RUNNING, time.monotonic()
        try:
            upload.url = self._put(upload, scratch / PARQUET_FILE)
        except CremantError as error:
            log_failure(_log, "an upload failed", error, segment=upload.segment, object=upload.name)
            self._failed(upload, str(error), cause_of(error))
        except Exception as error:
            _log.exception("an upload failed on a bug", extra={"fields": {"segment": upload.segment}})
            self._failed(upload, f"{type(error).__name__}: {error}", cause_of(error))
        else:
            self._landed(upload)
        finally:
            self._files.remove(scratch)
            self._poked.set()

    def _put(self, upload: Upload, source: Path) -> str:
        upload.size_bytes = source.stat().st_size
        try:
            return self._store.put(upload.name, source)
        except AlreadyExists as error:
            # The name tells the content, so what has it is damaged. A record may name it, so it is not ours to remove.
            log_failure(_log, "a stored object is damaged: another one is made", error, segment=upload.segment)
            return self._store.put(another_name(upload.name), source)

    def _landed(self, upload: Upload) -> None:
        with self._lock:
            self.landed_total += 1
            self.breaker.succeeded()
            upload.state = UploadState.LANDED
        self._ended(upload)
        elapsed_ms = round((time.monotonic() - upload.began_s) * 1000)
        log_event(_log, "segment uploaded", segment=upload.segment, url=upload.url, elapsed_ms=elapsed_ms)

    def _failed(self, upload: Upload, error: str, why: UploadCause) -> None:
        key = (upload.incarnation, upload.segment)
        with self._lock:
            self.failed[why] += 1
            if why.of_store:
                self.breaker.failed(_now_ms(), error)
            backoff, _ = self._backoffs.get(key, (Backoff(), 0.0))
            self._backoffs[key] = (backoff, time.monotonic() + backoff.next_ms() / 1000)
            upload.state, upload.error, upload.cause = UploadState.FAILED, error, why
        self._ended(upload)

    def _ended(self, upload: Upload) -> None:
        with self._lock:  # who waits no longer may say so just now
            upload.report_at_s = min(upload.report_at_s, time.monotonic() + _COMMIT_COMES_FIRST_S)
        upload.ended.set()

    def _look_forever(self) -> None:
        while not self._stopping.is_set():
            self._poked.wait(LOOK_EVERY_S)
            self._poked.clear()
            with cause():
                try:
                    self.look()
                except Exception:
                    _log.exception("looking after uploads failed")

    def look(self) -> None:
        """Reports what ended, then begins what is due and has a thread."""
        now_s = time.monotonic()
        with self._lock:
            ended = [u for u in self._uploads.values() if u.ended.is_set() and u.report_at_s <= now_s]
        for upload in ended:
            if self._stopping.is_set():
                return
            self._settle(upload)
        self._begin_due(time.monotonic())

    def _begin_due(self, now_s: float) -> None:
        tables = list(self._tables.values())
        lacking = [(table, hosted) for table in tables for hosted in self._lacking(table)]
        keys = {(table.record.incarnation, hosted.metadata.name) for table, hosted in lacking}
        with self._lock:
            self._backoffs = {key: kept for key, kept in self._backoffs.items() if key in keys or kept[1] > now_s}
            busy = {(u.incarnation, u.segment) for u in self._uploads.values()}
            free = UPLOADS_RUNNING_MAX - sum(not u.ended.is_set() for u in self._uploads.values())
        for table, hosted in lacking:
            key = (table.record.incarnation, hosted.metadata.name)
            _, not_before_s = self._backoffs.get(key, (None, 0.0))
            if key in busy or not_before_s > now_s:
                continue
            if free <= 0 or not self._admits():
                return
            free -= 1
            try:
                self.unnamed(self._begin_own(table, hosted.metadata, hosted))
            except (CremantError, OSError) as error:  # our copy is damaged or gone: it is fetched again, then uploaded
                log_failure(_log, "a segment cannot be uploaded", error, segment=hosted.metadata.name)
                with self._lock:
                    self._backoffs[key] = (Backoff(), now_s + _VIEW_LAG_S)

    def _admits(self) -> bool:
        with self._lock:
            return self.breaker.admit(_now_ms())

    def _lacking(self, table: HostedTable) -> list[HostedSegment]:
        """Segments that we committed and hold, and that have no object though they should."""
        if self.policy(table) is StorePolicy.PEERS_ONLY:
            return []
        with table.lock:
            return [hosted for hosted in table.segments.values() if self._lacks_object(hosted)]

    def _lacks_object(self, hosted: HostedSegment) -> bool:
        metadata = hosted.metadata
        return (
            metadata.store_state in (StoreState.PENDING, StoreState.FAILED)
            and metadata.committer == self._member.id
            and metadata.status is SegmentStatus.DONE
            and hosted.sealed is not None
        )

    def _settle(self, upload: Upload) -> None:
        try:
            reply = self._report(upload)
        except CremantError as error:
            log_failure(_log, "an upload is reported later", error, segment=upload.segment)
            self._report_later(upload)
            return
        if reply.status in (CompletionStatus.HOLD, CompletionStatus.NOT_LEADER):
            too_old = (time.monotonic() - upload.began_s) * 1000 > UPLOAD_UNNAMED_MS
            if reply.status is CompletionStatus.HOLD and too_old:
                self._discard(upload, None)
            else:
                self._report_later(upload)

    def _report_later(self, upload: Upload) -> None:
        upload.report_at_s = time.monotonic() + upload.backoff.next_ms() / 1000

    def _report(self, upload: Upload) -> SegmentStoredReply:
        """Tells the controller, and forgets the upload once it is kept or deleted."""
        message = SegmentStored(
            instance=self._member.id, table=upload.table, incarnation=upload.incarnation, segment=upload.segment,
            checksum=upload.checksum, file_checksum=upload.file_checksum, size_bytes=upload.size_bytes, url=upload.url,
            error=upload.error,
        )  # fmt: skip
        reply = self._member.call("/internal/v1/segmentStored", message, SegmentStoredReply)
        match reply.status:
            case CompletionStatus.HOLD | CompletionStatus.NOT_LEADER:
                pass
            case CompletionStatus.KEEP:
                with self._lock:
                    self._forget(upload)
            case _:
                self._discard(upload, reply.store_url)
        return reply

    def _discard(self, upload: Upload, named: str | None) -> None:
        with self._lock:
            if upload.claimed:  # a commit that names it is on its way
                self._report_later(upload)
                return
            self._forget(upload)  # in the same step: from here on no commit can claim it
        if upload.url is None or upload.url == named:
            return
        self.discarded_total += 1
        log_event(_log, "an upload is not wanted", segment=upload.segment, url=upload.url, named=named)
        self._pool.submit(self._delete, upload.url)

    def _delete(self, url: str) -> None:
        try:
            self._store.delete(self._store.name_of(url))
        except CremantError as error:  # nobody names it: the controller sweeps it
            log_failure(_log, "an object that nobody wants stays for now", error, url=url)

    def _forget(self, upload: Upload) -> None:
        """Under the lock."""
        self._drop(upload)
        if upload.url is not None:
            self._backoffs[upload.incarnation, upload.segment] = (Backoff(), time.monotonic() + _VIEW_LAG_S)

    def _drop(self, upload: Upload) -> None:
        """Under the lock. A later try of the same object has taken the place of one that failed: it stays."""
        if self._uploads.get(upload.name) is upload:
            del self._uploads[upload.name]


def _now_ms() -> int:
    return int(time.monotonic() * 1000)
