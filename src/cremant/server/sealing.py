# SPDX-License-Identifier: Apache-2.0
"""Driver of segment completion on a server: looks at every segment that should be sealed here and is not, asks
`segment/sealing.py` what to do next, and does it in a bounded pool.

Rules: one step per segment at a time; one build at a time (it costs a core); consumption and queries go on meanwhile.
Every failure is retried with backoff and starts from what the controller says then.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import assert_never

import msgspec

from cremant.model.errors import Behind, Corrupt, CremantError, NotFound
from cremant.model.limits import INTERNAL_REQUEST_TIMEOUT_MS
from cremant.model.offsets import Position
from cremant.model.segments import SegmentMetadata, SegmentStatus
from cremant.segment.build import PARQUET_FILE, Built, SegmentSpec, build_segment
from cremant.segment.cuts import Cut
from cremant.segment.reader import derive
from cremant.segment.sealing import NOTHING, Sealing, Step, StepKind
from cremant.server.files import ServerFiles
from cremant.server.partition import Partition
from cremant.server.pool import DaemonPool
from cremant.server.table import HostedTable
from cremant.shell.backoff import Backoff
from cremant.shell.logs import log_event, log_failure
from cremant.shell.member import Member
from cremant.store.deepstore import DeepStore, segment_object
from cremant.wire.messages import CommitEnd, CommitEndReply, SegmentConsumed, SegmentConsumedReply

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.1
#: One builds, the others talk to the controller and the store.
WORKERS = 4
#: A commit waits for one transaction of the controller.
COMMIT_TIMEOUT_MS = 2 * INTERNAL_REQUEST_TIMEOUT_MS


class Sealer:
    """Seals and fetches segments of the tables in `tables` (shared with the host that reconciles them)."""

    def __init__(
        self, tables: dict[str, HostedTable], files: ServerFiles, store: DeepStore, member: Member, *, fsync: bool
    ) -> None:
        self._tables = tables
        self._files = files
        self._store = store
        self._member = member
        self._fsync = fsync
        self._stopping = threading.Event()
        self._busy: set[tuple[str, str]] = set()
        self._backoffs: dict[tuple[str, str], Backoff] = {}
        self._build_turn = threading.Semaphore(1)
        self._pool = DaemonPool(WORKERS, "seal")
        self._thread = threading.Thread(target=self._look_forever, name="seal", daemon=True)
        #: Totals for metrics.
        self.sealed_total = 0
        self.fetched_total = 0
        self.diverged_total = 0
        self.failures_total = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=1)
        self.stop_pool()

    def stop_pool(self) -> None:
        """Steps that wait are dropped; one that runs is abandoned, its scratch is removed at the next start."""
        self._pool.close()

    def _look_forever(self) -> None:
        while not self._stopping.wait(LOOK_EVERY_S):
            for table in list(self._tables.values()):
                try:
                    self._look(table)
                except Exception:
                    _log.exception("looking for segments to seal failed", extra={"fields": {"table": table.name}})

    def _look(self, table: HostedTable) -> None:
        with table.lock:
            unsealed = [hosted.metadata for hosted in table.segments.values() if hosted.sealed is None]
            opened = [metadata for metadata in table.open.values() if metadata.name not in table.segments]
        for metadata in (*unsealed, *opened):
            key = (table.record.incarnation, metadata.name)
            if key in self._busy:
                continue
            step = self._next_step(table, metadata)
            if step.kind is not StepKind.NOTHING:
                self._busy.add(key)
                self._pool.submit(self._run, table, metadata, step, key)

    def _next_step(self, table: HostedTable, metadata: SegmentMetadata) -> Step:
        sealing = table.sealings.setdefault(metadata.name, Sealing(metadata.name))
        hosted = table.segments.get(metadata.name)
        if hosted is not None and time.monotonic() < hosted.retry_at_s:
            return NOTHING
        now_ms = int(time.time() * 1000)
        partition = table.partitions.get(metadata.partition)
        if partition is None or partition.tail.snapshot.first_offset > metadata.start_offset:
            return sealing.next_step(metadata, None, None, now_ms)
        with partition.lock:
            closed = partition.closings.last
            wanted: Cut | None = None
            if metadata.status is SegmentStatus.IN_PROGRESS:
                flush, age_ms = table.record.config.flush, now_ms - metadata.created_ms
                pressed = partition.tail.blocked is not None
                wanted = partition.closings.wanted_cut(metadata.start_offset, flush, age_ms, pressed=pressed)
        return sealing.next_step(metadata, closed, wanted, now_ms)

    def _run(self, table: HostedTable, metadata: SegmentMetadata, step: Step, key: tuple[str, str]) -> None:
        sealing = table.sealings[metadata.name]
        backoff = self._backoffs.setdefault(key, Backoff())
        try:
            self._act(table, metadata, step, sealing)
            backoff.reset()
        except Exception as error:
            self.failures_total += 1
            retry_ms = backoff.next_ms()
            sealing.failed(retry_ms, int(time.time() * 1000))
            hosted = table.segments.get(metadata.name)
            if hosted is not None:
                hosted.error = str(error)
                hosted.retry_at_s = time.monotonic() + retry_ms / 1000
            if isinstance(error, CremantError):
                fields = {"segment": metadata.name, "step": step.kind.value, "retry_ms": retry_ms}
                log_failure(_log, "a step of sealing failed", error, **fields)
            else:
                _log.exception("a step of sealing failed on a bug", extra={"fields": {"segment": metadata.name}})
        finally:
            self._busy.discard(key)

    def _act(self, table: HostedTable, metadata: SegmentMetadata, step: Step, sealing: Sealing) -> None:
        match step.kind:
            case StepKind.ASK:
                assert step.cut is not None
                self._ask(table, metadata, step.cut, sealing)
            case StepKind.BUILD:
                assert step.end is not None
                with self._build_turn:
                    self._build(table, metadata, step.end, sealing)
            case StepKind.COMMIT:
                assert step.end is not None
                self._commit(table, metadata, step.end, step.token, sealing)
            case StepKind.INSTALL:
                self._install(table, metadata, sealing)
            case StepKind.FETCH:
                self._fetch(table, metadata, sealing)
            case StepKind.NOTHING:
                pass
            case _:
                assert_never(step.kind)

    def _ask(self, table: HostedTable, metadata: SegmentMetadata, cut: Cut, sealing: Sealing) -> None:
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
        sealing.answered(reply, int(time.time() * 1000))

    def _build(self, table: HostedTable, metadata: SegmentMetadata, end: Position, sealing: Sealing) -> None:
        """Rows [start, end) of the tail as Parquet and scan form, read back and verified, in a scratch directory."""
        began_s = time.monotonic()
        partition = table.partitions.get(metadata.partition)
        snapshot = partition.tail.snapshot if partition is not None else None
        if snapshot is None or snapshot.first_offset > metadata.start_offset or snapshot.next_offset < end.next_offset:
            raise Behind(f"segment {metadata.name}: its rows are not in the tail")
        if sealing.built is not None:
            self._files.remove(sealing.built.path.parent)
            sealing.built = None
        config = table.record.config
        spec = SegmentSpec(table.record.table_schema, config.time_column, config.sorted_column)
        batches = [part.batch for part in snapshot.between(metadata.start_offset, end.next_offset)]
        scratch = self._files.new_scratch()
        try:
            built = build_segment(
                scratch, batches, spec, fsync=self._fsync, on_progress=lambda: self._progress(table, metadata.name)
            )
            derive(scratch, metadata.name, built.checksum, fsync=self._fsync)
        except BaseException:
            self._files.remove(scratch)
            raise
        self._progress(table, metadata.name)
        sealing.was_built(built, end)
        log_event(
            _log, "segment built", segment=metadata.name, rows=built.rows, bytes=built.size_bytes,
            checksum=built.checksum, elapsed_ms=round((time.monotonic() - began_s) * 1000),
        )  # fmt: skip

    def _commit(
        self, table: HostedTable, metadata: SegmentMetadata, end: Position, token: int, sealing: Sealing
    ) -> None:
        built = sealing.built
        assert built is not None
        incarnation = table.record.incarnation
        url = self._store.put(segment_object(table.name, incarnation, metadata.name, token), built.path)
        self._progress(table, metadata.name)
        partition = table.partitions.get(metadata.partition)
        message = CommitEnd(
            instance=self._member.id, table=table.name, incarnation=incarnation, segment=metadata.name, token=token,
            end=end, rows=built.rows, size_bytes=built.size_bytes, checksum=built.checksum,
            file_checksum=built.file_checksum, store_url=url, min_time_ms=built.min_time_ms,
            max_time_ms=built.max_time_ms, max_ingestion_ms=built.max_ingestion_ms,
            last_indexed_ms=partition.last_indexed_ms if partition is not None else None, columns=built.columns,
        )  # fmt: skip
        reply = self._member.call("/internal/v1/commitEnd", message, CommitEndReply, COMMIT_TIMEOUT_MS)
        sealing.commit_answered(reply, int(time.time() * 1000))
        log_event(_log, "segment commit answered", segment=metadata.name, status=reply.status.value, token=token)
        if sealing.committed:
            self._install(table, _as_committed(metadata, end, built, url), sealing)

    def _install(self, table: HostedTable, metadata: SegmentMetadata, sealing: Sealing) -> None:
        built = sealing.built
        assert built is not None
        if metadata.end is None:  # an older view was looked at; what was committed is known
            assert sealing.built_end is not None
            metadata = _as_committed(metadata, sealing.built_end, built, None)
        self._adopt(table, metadata, built.path.parent)
        self.sealed_total += 1
        log_event(_log, "segment sealed", segment=metadata.name, rows=metadata.rows)

    def _fetch(self, table: HostedTable, metadata: SegmentMetadata, sealing: Sealing) -> None:
        if sealing.diverged and sealing.built is not None:
            self.diverged_total += 1
            log_event(
                _log, "own rows differ from the committed segment", level=logging.ERROR, segment=metadata.name,
                expected=metadata.checksum, found=sealing.built.checksum,
            )  # fmt: skip
            self._files.remove(sealing.built.path.parent)
            sealing.built = None
        if metadata.store_url is None or metadata.checksum is None or metadata.end is None:
            raise NotFound(f"segment {metadata.name}: neither this server nor the deep store has it")
        scratch = self._files.new_scratch()
        try:
            name = self._store.name_of(metadata.store_url)
            self._store.get(name, scratch / PARQUET_FILE, checksum=metadata.file_checksum)
            sealed = derive(scratch, metadata.name, metadata.checksum, fsync=self._fsync)
            if sealed.rows != metadata.rows:
                raise Corrupt(f"segment {metadata.name}: {sealed.rows} rows, its metadata says {metadata.rows}")
        except BaseException:
            self._files.remove(scratch)
            raise
        self._adopt(table, metadata, scratch)
        self.fetched_total += 1
        log_event(_log, "segment fetched", segment=metadata.name, rows=metadata.rows, url=metadata.store_url)
        partition = table.partitions.get(metadata.partition)
        if partition is not None and partition.tail.snapshot.first_offset < metadata.end.next_offset:
            self._go_on_after(partition, metadata, metadata.end)

    def _go_on_after(self, partition: Partition, metadata: SegmentMetadata, end: Position) -> None:
        """The tail is within the fetched segment: it goes on behind it."""
        with partition.lock:
            if partition.tail.snapshot.next_offset <= end.next_offset:
                partition.reposition(end, metadata.max_ingestion_ms)
            else:
                partition.tail.drop_below(end.next_offset)

    def _adopt(self, table: HostedTable, metadata: SegmentMetadata, scratch: Path) -> None:
        incarnation = table.record.incarnation
        with table.lock:
            # Under the lock: a table that is dropped meanwhile must not get its directory back.
            if self._tables.get(table.name) is not table:
                self._files.remove(scratch)
                return
            sealed = self._files.adopt(scratch, self._files.segment_directory(table.name, incarnation, metadata.name))
            table.install(metadata, sealed, verified=True)
            table.sealings.pop(metadata.name, None)
            table.progress.pop(metadata.name, None)
        self._member.poke()

    def _progress(self, table: HostedTable, segment: str) -> None:
        table.progress[segment] = table.progress.get(segment, 0) + 1


def _as_committed(metadata: SegmentMetadata, end: Position, built: Built, url: str | None) -> SegmentMetadata:
    """What the metadata says once the controller has it; the view brings the same a moment later."""
    return msgspec.structs.replace(
        metadata, status=SegmentStatus.DONE, end=end, end_offset=end.next_offset, rows=built.rows,
        size_bytes=built.size_bytes, checksum=built.checksum, file_checksum=built.file_checksum,
        min_time_ms=built.min_time_ms, max_time_ms=built.max_time_ms, max_ingestion_ms=built.max_ingestion_ms,
        columns=built.columns, store_url=url,
    )  # fmt: skip
