# SPDX-License-Identifier: Apache-2.0
"""Carries out the steps of segment completion that `completion/replica.py` decides, each for one segment.

Called from the threads of `server/sealing.py`. A step that fails raises and leaves no files; what was built waits in
scratch until it is installed or nobody's any more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import msgspec

from cremant.completion.replica import Sealing, Step, StepKind, UploadSeen
from cremant.model.completion import StorePolicy
from cremant.model.errors import Behind, NoResource
from cremant.model.limits import INTERNAL_REQUEST_TIMEOUT_MS
from cremant.model.offsets import Position
from cremant.model.segments import SegmentMetadata, SegmentStatus, StoreState
from cremant.segment.build import Built, build_segment, spec_of
from cremant.segment.cuts import Cut
from cremant.segment.layout import BATCH_ROWS
from cremant.segment.reader import derive, open_segment
from cremant.server.fetching import SegmentFetcher
from cremant.server.files import ServerFiles
from cremant.server.marks import known_at
from cremant.server.table import HostedTable
from cremant.server.timings import Phase
from cremant.server.upload import Upload, UploadState
from cremant.server.uploads import Uploads
from cremant.shell.logs import log_event
from cremant.shell.member import Member
from cremant.shell.pace import Pace
from cremant.wire.messages import (
    CommitEnd,
    CommitEndReply,
    CompletionStatus,
    SegmentConsumed,
    SegmentConsumedReply,
)

_log = logging.getLogger(__name__)

#: A commit waits for one transaction of the controller.
COMMIT_TIMEOUT_MS = 2 * INTERNAL_REQUEST_TIMEOUT_MS
#: Of a core, for a build, if there is time.
BUILD_SHARE = 0.25
#: (incarnation of the table, segment)
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Task:
    """A step that is due."""

    table: HostedTable
    metadata: SegmentMetadata
    sealing: Sealing
    step: Step

    @property
    def key(self) -> Key:
        return self.table.record.incarnation, self.metadata.name


class Steps:
    """`tables` is shared with the host that reconciles them. One step per segment at a time, and a fetch beside it:
    what is installed first counts."""

    def __init__(
        self, tables: dict[str, HostedTable], files: ServerFiles, member: Member, fetcher: SegmentFetcher,
        uploads: Uploads, *, fsync: bool,
    ) -> None:  # fmt: skip
        self._tables = tables
        self._files = files
        self._member = member
        self._fetcher = fetcher
        self._uploads = uploads
        self._fsync = fsync
        #: Uploads of the attempts to commit that are under way.
        self._attempts: dict[Key, Upload] = {}
        #: Scratch directories of what was built, until it is installed or nobody's any more.
        self._built: dict[Path, tuple[Key, HostedTable, Sealing]] = {}
        #: Totals for metrics.
        self.sealed_total = 0
        self.fetched_total = 0
        self.diverged_total = 0

    def act(self, task: Task) -> None:
        """Raises CremantError."""
        try:
            self._act(task)
        except OSError as error:
            raise NoResource(
                f"segment {task.metadata.name}: {task.step.kind} failed on this server's disk: {error}",
                hint="free disk space; it is retried",
            ) from error

    def _act(self, task: Task) -> None:
        match task.step.kind:
            case StepKind.ASK:
                assert task.step.cut is not None
                self._ask(task, task.step.cut)
            case StepKind.BUILD:
                assert task.step.end is not None
                self._build(task, task.step.end)
            case StepKind.UPLOAD:
                self._upload(task)
            case StepKind.COMMIT:
                assert task.step.end is not None
                self._commit(task, task.step.end)
            case StepKind.INSTALL:
                self._install(task)
            case StepKind.FETCH:
                self._fetch(task)
            case StepKind.NOTHING:
                pass
            case _:
                assert_never(task.step.kind)

    # --- what is left over ----------------------------------------------------------------------------------------

    def release(self, busy: Container[Key]) -> None:
        """Lets go of uploads and files of segments that were installed or went elsewhere: an upload is nobody's then,
        unless the controller wants it; what was built was built in vain."""
        live: set[Key] = set()
        for table in list(self._tables.values()):
            with table.lock:
                live.update((table.record.incarnation, segment) for segment in table.sealings)
        for key in [key for key in list(self._attempts) if key not in live]:
            if (upload := self._attempts.pop(key, None)) is not None:  # a commit that ends may be first
                self._uploads.unnamed(upload)
        for scratch, (key, table, sealing) in list(self._built.items()):
            if key in busy:
                continue
            waits = sealing.built is not None and sealing.built.path.parent == scratch
            if waits and self._tables.get(table.name) is table and table.sealings.get(sealing.segment) is sealing:
                continue
            del self._built[scratch]
            self._files.remove(scratch)

    # --- the cut --------------------------------------------------------------------------------------------------

    def _ask(self, task: Task, cut: Cut) -> None:
        table, metadata, sealing = task.table, task.metadata, task.sealing
        message = SegmentConsumed(
            instance=self._member.id, table=table.name, incarnation=table.record.incarnation, segment=metadata.name,
            at=cut.at, reason=cut.reason,
        )  # fmt: skip
        reply = self._member.call("/internal/v1/segmentConsumed", message, SegmentConsumedReply)
        if sealing.answer is None or sealing.answer.status is not reply.status:
            log_event(
                _log, "segment consumed", segment=metadata.name, offset=cut.at.next_offset, reason=cut.reason,
                status=reply.status.value,
            )  # fmt: skip
        undecided = sealing.decided_ms is None
        sealing.answered(reply, now_ms())
        if undecided and sealing.decided_ms is not None and sealing.asked_ms is not None:
            table.timings.add(Phase.DECIDE, sealing.decided_ms - sealing.asked_ms)

    # --- building -------------------------------------------------------------------------------------------------

    def _build(self, task: Task, end: Position) -> None:
        """Rows [start, end) of the tail as Parquet and scan form, read back and verified, in a scratch directory."""
        table, metadata, sealing = task.table, task.metadata, task.sealing
        began_ms = now_ms()
        partition = table.partitions.get(metadata.partition)
        lacking = Behind(f"segment {metadata.name}: its rows are not in the tail")
        if partition is None:
            raise lacking
        tail, snapshot = partition.tail, partition.tail.snapshot
        if snapshot.first_offset > metadata.start_offset or snapshot.next_offset < end.next_offset:
            raise lacking
        self._drop_built(sealing)
        sealing.building.begin()
        done = metadata.status is SegmentStatus.DONE
        spec = spec_of(table.record)
        if done:  # config and schema may be others by now
            spec = spec.formed(metadata.form)
        batches = [part.batch for part in snapshot.between(metadata.start_offset, end.next_offset)]
        pace = self._pace(metadata, sealing, sum(batch.num_rows for batch in batches))

        def more() -> None:
            self._built_more(table, sealing)
            if tail.blocked is None:  # else rows wait for this build
                pace.rest()

        scratch = self._scratch()
        try:
            built = build_segment(scratch, batches, spec, fsync=self._fsync, on_progress=more)
            derive(
                scratch, metadata.name, built.checksum, fsync=self._fsync, indexes=table.record.config.indexes,
                on_progress=more,
            )  # fmt: skip
        except OSError as error:
            self._files.remove(scratch)
            raise NoResource(f"cannot write {scratch}: {error}", hint="free disk space; it is retried") from error
        except BaseException:
            self._files.remove(scratch)
            raise
        self._built_more(table, sealing)
        self._built[scratch] = (task.key, table, sealing)
        sealing.was_built(built, end, as_committed=done)
        elapsed_ms = now_ms() - began_ms
        _time_build(table, sealing, began_ms, elapsed_ms)
        log_event(
            _log, "segment built", segment=metadata.name, rows=built.rows, bytes=built.size_bytes,
            checksum=built.checksum, elapsed_ms=elapsed_ms,
        )  # fmt: skip

    def _pace(self, metadata: SegmentMetadata, sealing: Sealing, rows: int) -> Pace:
        """Rows come and queries run meanwhile, on the same cores. A build may take half of its part of the time that
        the segment's rows took to come: so builds keep up, however fast rows come."""
        came_ms = self._member.cluster_now_ms() - metadata.created_ms - (now_ms() - (sealing.reached_ms or now_ms()))
        waiting = sum(len(table.unsealed()) for table in list(self._tables.values()))
        groups = -(-rows // BATCH_ROWS)
        return Pace(BUILD_SHARE, 2 * max(1, groups), came_ms / 1000 / 2 / max(1, waiting))  # written, then read back

    def _scratch(self) -> Path:
        try:
            return self._files.new_scratch()
        except OSError as error:
            raise NoResource(f"cannot make a directory: {error}", hint="free disk space; it is retried") from error

    def _drop_built(self, sealing: Sealing) -> None:
        if sealing.built is not None:
            self._files.remove(sealing.built.path.parent)
            sealing.built = sealing.built_end = None

    def _built_more(self, table: HostedTable, sealing: Sealing) -> None:
        sealing.building.step()
        table.note_progress(sealing)

    # --- the store ------------------------------------------------------------------------------------------------

    def seen_upload(self, table: HostedTable, sealing: Sealing, key: Key, policy: StorePolicy) -> UploadSeen | None:
        """The upload of the attempt in force; while it runs it is progress."""
        upload = self._attempts.get(key)
        if upload is None:
            return None
        if upload.state is UploadState.RUNNING:
            sealing.uploading.step()
            table.note_progress(sealing)
        if upload.error is not None and policy is StorePolicy.STORE_REQUIRED:
            table.note_problem(sealing.segment, f"it waits for the deep store: {upload.error}")
        return UploadSeen(upload.url, upload.error, upload.hurried)

    def _upload(self, task: Task) -> None:
        table, sealing = task.table, task.sealing
        built, key = sealing.built, task.key
        assert built is not None
        required = self._uploads.policy(table) is StorePolicy.STORE_REQUIRED
        begun = self._uploads.begin(
            table, task.metadata.name, task.step.token, built.path, checksum=built.checksum,
            file_checksum=built.file_checksum, required=required,
        )  # fmt: skip
        before = self._attempts.get(key)
        if before is not None and before is not begun:
            self._uploads.unnamed(before)
        self._attempts[key] = begun
        sealing.upload_began(task.step.token, now_ms())

    # --- the commit -----------------------------------------------------------------------------------------------

    def _commit(self, task: Task, end: Position) -> None:
        table, metadata, sealing, step = task.table, task.metadata, task.sealing, task.step
        built, key, began_ms = sealing.built, task.key, now_ms()
        assert built is not None
        upload = self._attempts.get(key)
        if step.store_state is StoreState.STORED and (upload is None or not self._uploads.claim(upload)):
            self._attempts.pop(key, None)  # given up meanwhile: it is uploaded again
            return
        if upload is not None and step.store_state is StoreState.PENDING and not upload.hurried:
            self._uploads.slow(table.record.config.completion.upload_wait_ms)
        partition = table.partitions.get(metadata.partition)
        message = CommitEnd(
            instance=self._member.id, table=table.name, incarnation=table.record.incarnation, segment=metadata.name,
            token=step.token, end=end, rows=built.rows, size_bytes=built.size_bytes, checksum=built.checksum,
            file_checksum=built.file_checksum, store_state=step.store_state, store_url=step.store_url,
            store_error=step.store_error, min_time_ms=built.min_time_ms, max_time_ms=built.max_time_ms,
            max_ingestion_ms=built.max_ingestion_ms, columns=built.columns,
            last_indexed_ms=partition.marks.last_indexed_ms if partition is not None else None,
            mark=partition.marks.at_cut(end) if partition is not None else None,
            partitioning=built.partitioning, form=built.form,
        )  # fmt: skip
        reply = self._member.call("/internal/v1/commitEnd", message, CommitEndReply, COMMIT_TIMEOUT_MS)
        sealing.commit_answered(reply, now_ms())
        log_event(
            _log, "segment commit answered", segment=metadata.name, status=reply.status.value, token=step.token,
            store=step.store_state.value,
        )  # fmt: skip
        self._settle_attempt(key, step.store_state, reply.status)
        if sealing.committed:
            table.timings.add(Phase.COMMIT, now_ms() - began_ms)
            if upload is not None:
                table.timings.add(Phase.UPLOAD, began_ms - sealing.upload_since_ms)

    def _settle_attempt(self, key: Key, said: StoreState, status: CompletionStatus) -> None:
        upload = None if status is CompletionStatus.NOT_LEADER else self._attempts.pop(key, None)
        if upload is None:
            return
        if status is CompletionStatus.COMMIT_SUCCESS and said in (StoreState.STORED, StoreState.FAILED):
            self._uploads.named(upload)
        else:
            self._uploads.unnamed(upload)

    # --- the sealed segment ---------------------------------------------------------------------------------------

    def _install(self, task: Task) -> None:
        metadata, sealing = task.metadata, task.sealing
        built, began_ms = sealing.built, now_ms()
        assert built is not None
        if metadata.status is not SegmentStatus.DONE:  # an older view was looked at; what was committed is known
            assert sealing.built_end is not None
            metadata = as_committed(metadata, sealing.built_end, built, None)
        if self._adopt(task.table, metadata, built.path.parent):
            self.sealed_total += 1
            task.table.timings.add(Phase.INSTALL, now_ms() - began_ms)
            log_event(_log, "segment sealed", segment=metadata.name, rows=metadata.rows)

    def _fetch(self, task: Task) -> None:
        table, metadata, sealing = task.table, task.metadata, task.sealing
        if sealing.diverged and sealing.built is not None:
            self.diverged_total += 1
            log_event(
                _log, "own rows differ from the committed segment", level=logging.ERROR, segment=metadata.name,
                expected=metadata.checksum, found=sealing.built.checksum,
            )  # fmt: skip
            self._drop_built(sealing)
        assert metadata.end is not None  # a segment is fetched once it is DONE
        if not self._lacks(table, metadata):
            return  # while it waited for its turn it was built, or went elsewhere
        scratch = self._scratch()
        try:
            self._fetcher.fetch(table.record, metadata, scratch)
        except BaseException:
            self._files.remove(scratch)
            raise
        if not self._adopt(table, metadata, scratch):
            return
        self.fetched_total += 1
        partition = table.partitions.get(metadata.partition)
        if partition is not None and partition.tail.snapshot.first_offset < metadata.end.next_offset:
            partition.go_on_after(metadata.end, known_at([metadata], metadata.end))

    def _adopt(self, table: HostedTable, metadata: SegmentMetadata, scratch: Path) -> bool:
        """False when the segment is here already, or not wanted here any more."""
        incarnation = table.record.incarnation
        # Before the lock, which queries wait for: the table may want other indexes by now, and they are built here.
        sealed = open_segment(scratch, table.record.config.indexes)
        with table.lock:
            # Under the lock: a table that is dropped meanwhile must not get its directory back.
            if not self._lacks(table, metadata):
                self._files.remove(scratch)
                return False
            target = self._files.segment_directory(table.name, incarnation, metadata.name)
            table.install(metadata, self._files.adopt(sealed, target), verified=True)
            table.sealings.pop(metadata.name, None)
            table.progress.pop(metadata.name, None)
        self._member.poke()
        return True

    def _lacks(self, table: HostedTable, metadata: SegmentMetadata) -> bool:
        """It belongs here, and is not here."""
        if self._tables.get(table.name) is not table:
            return False
        known, opened = table.segments.get(metadata.name), table.open.get(metadata.partition)
        if known is not None:
            return known.sealed is None
        return opened is not None and opened.name == metadata.name


def now_ms() -> int:
    """For waiting times: a wall clock that jumps must neither hurry nor hold up anything."""
    return int(time.monotonic() * 1000)


def as_committed(metadata: SegmentMetadata, end: Position, built: Built, url: str | None) -> SegmentMetadata:
    """What the metadata says once the controller has it; the view brings the same a moment later."""
    return msgspec.structs.replace(
        metadata, status=SegmentStatus.DONE, end=end, end_offset=end.next_offset, rows=built.rows,
        size_bytes=built.size_bytes, checksum=built.checksum, file_checksum=built.file_checksum,
        min_time_ms=built.min_time_ms, max_time_ms=built.max_time_ms, max_ingestion_ms=built.max_ingestion_ms,
        columns=built.columns, partitioning=built.partitioning, form=built.form,
        store_state=StoreState.STORED if url else StoreState.NONE, store_url=url,
    )  # fmt: skip


def _time_build(table: HostedTable, sealing: Sealing, began_ms: int, elapsed_ms: int) -> None:
    table.timings.add(Phase.BUILD, elapsed_ms)
    if sealing.reached_ms is not None:
        table.timings.add(Phase.TURN, began_ms - sealing.reached_ms)
        if sealing.decided_ms is not None:
            table.timings.add(Phase.CATCH_UP, max(0, sealing.reached_ms - sealing.decided_ms))
