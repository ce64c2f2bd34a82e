# SPDX-License-Identifier: Apache-2.0
"""Ending open segments on request, so that what was produced before the request is sealed.

Rules
- A marked segment ends at the first closed position from `force_at_offset` on: the stream's end when it was asked for,
  and at least the newest offset that any live replica showed. That is the same position on every replica, so a lagging
  one does not cut early. Of a paused table, of one whose stream is another one by now, and where the stream does not
  answer, only what is visible counts: nobody knows whether more will come.
- A limit may end the segment before that offset; the mark then goes on to the next (`completion/segment.py`).
- A segment without rows stays open: there is nothing to commit. One in which nothing has become visible up to the mark
  (all of it was filtered or rejected) loses it.
- So the marks are how far a job is, and a controller that restarts goes on from them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

import msgspec

from cremant.cluster.rebalance import able_tails
from cremant.controller.catalog import Catalog, Record
from cremant.controller.clock import Clock
from cremant.controller.instances import Instances
from cremant.controller.jobs import new_job_id, write_job
from cremant.controller.streams import Streams
from cremant.log.api import Log
from cremant.model.cluster import TableRecord, TailReport, segment_key
from cremant.model.errors import CremantError, NotFound, UserError
from cremant.model.jobs import ForceCommitJob
from cremant.model.limits import STREAM_LOOK_MS
from cremant.model.segments import SegmentMetadata, SegmentStatus
from cremant.shell.logs import log_event, log_failure

_log = logging.getLogger(__name__)


class ForceCommits:
    """Thread-safe; the stream is asked outside of the catalog's lock."""

    def __init__(self, catalog: Catalog, instances: Instances, streams: Streams, clock: Clock) -> None:
        self._catalog = catalog
        self._instances = instances
        self._streams = streams
        self._clock = clock

    def start(self, name: str, *, partitions: Collection[int] = (), segments: Collection[str] = ()) -> ForceCommitJob:
        """Marks the open segments of `partitions`, or those named, or all. Raises NotFound, UserError."""
        with self._catalog.lock:
            asked = self._record(name)
            wanted = {segment.partition for segment in self._chosen(name, partitions, segments)}
        produced = self._produced(asked, wanted)
        with self._catalog.lock:
            record = self._record(name)
            if record.incarnation != asked.incarnation:
                raise NotFound(f"Table {name}_REALTIME was dropped and created again meanwhile")
            until, changes, marked = self._mark(record, wanted, produced)
            job = ForceCommitJob(
                job_id=new_job_id(), table=name, incarnation=record.incarnation, segments=tuple(marked), until=until,
                started_ms=self._clock.now_ms(),
            )  # fmt: skip
            write_job(self._catalog, job, changes)
        log_event(_log, "force commit asked for", table=name, job=job.job_id, segments=list(job.segments))
        return job

    def _record(self, name: str) -> TableRecord:
        record = self._catalog.tables.get(name)
        if record is None:
            raise NotFound(f"Table {name}_REALTIME not found!")
        return record

    def _chosen(self, name: str, partitions: Collection[int], segments: Collection[str]) -> list[SegmentMetadata]:
        records = self._catalog.partitions.get(name, {})
        unknown = sorted(set(partitions) - set(records))
        if unknown:
            raise UserError(f"table {name} has no partition {', '.join(map(str, unknown))}")
        opened = {record.consuming: record.partition for record in records.values()}
        strangers = sorted(set(segments) - set(opened))
        if strangers:
            raise UserError(f"not a consuming segment of table {name}: {', '.join(strangers)}")
        return [
            self._catalog.segments[name][segment]
            for segment, partition in sorted(opened.items())
            if (not partitions or partition in partitions) and (not segments or segment in segments)
        ]

    def _produced(self, record: TableRecord, partitions: Iterable[int]) -> dict[int, int]:
        """Ends of the stream's partitions that the pipeline will reach; those that it may not are left out."""
        if record.paused or not record.enabled:
            return {}
        topic = record.config.stream.topic

        def ends(log: Log) -> dict[int, int]:
            if log.topic(topic).incarnation != record.topic_incarnation:
                return {}
            return {partition: log.latest(topic, partition) for partition in sorted(partitions)}

        try:
            return self._streams.of(record.config.stream, ends, timeout_ms=STREAM_LOOK_MS)
        except CremantError as error:
            log_failure(_log, "force commit counts what is visible only", error, table=record.config.name)
            return {}

    def _mark(
        self, record: TableRecord, partitions: Collection[int], produced: dict[int, int]
    ) -> tuple[dict[int, int], dict[str, Record | None], list[str]]:
        """Offset per partition that is to be sealed, the marks, the names of the marked segments."""
        name = record.config.name
        tails = self._instances.tails(name, record.incarnation)
        until: dict[int, int] = {}
        changes: dict[str, Record | None] = {}
        marked: list[str] = []
        for segment in self._chosen(name, partitions, ()):
            visible = [tail.watermark.next_offset for tail in tails.get(str(segment.partition), {}).values()]
            decided = max(segment.end_offset or 0, segment.force_at_offset or 0)  # an earlier job waits for that
            end = max([produced.get(segment.partition, 0), decided, *visible])
            if segment.status is SegmentStatus.IN_PROGRESS and end <= segment.start_offset:
                continue
            until[segment.partition] = end
            marked.append(segment.name)
            if end > (segment.end_offset or 0):  # of one that is being committed it is for the next
                forced = msgspec.structs.replace(segment, force_at_offset=end)
                changes[segment_key(name, segment.name)] = forced
        return until, changes, marked

    def run(self) -> None:
        """Takes marks back where nothing is to commit."""
        with self._catalog.lock:
            for name, record in self._catalog.tables.items():
                partitions = self._catalog.partitions.get(name, {})
                opened = [self._catalog.segments[name][p.consuming] for p in partitions.values()]
                marked = [segment for segment in opened if segment.force_at_offset is not None]
                tails = self._instances.tails(name, record.incarnation) if marked else {}
                changes: dict[str, Record | None] = {
                    segment_key(name, segment.name): msgspec.structs.replace(segment, force_at_offset=None)
                    for segment in marked
                    if _holds_nothing(segment, tails.get(str(segment.partition), {}))
                }
                if changes:
                    self._catalog.commit(changes)

    def unfinished(self, job: ForceCommitJob) -> list[str]:
        """Segments that hold, or will hold, rows of the job and are not sealed yet."""
        with self._catalog.lock:
            return sorted(
                segment.name
                for segment in self._catalog.segments.get(job.table, {}).values()
                if segment.start_offset < job.until.get(segment.partition, 0) and _is_to_be_committed(segment)
            )


def _is_to_be_committed(segment: SegmentMetadata) -> bool:
    match segment.status:
        case SegmentStatus.IN_PROGRESS:
            return segment.force_at_offset is not None
        case SegmentStatus.COMMITTING:
            return True
        case _:
            return False


def _holds_nothing(segment: SegmentMetadata, tails: dict[str, TailReport]) -> bool:
    """Some replica has come past the mark, and no row before it is in the segment."""
    if segment.status is not SegmentStatus.IN_PROGRESS:
        return False
    return any(
        tails[server].rows == 0
        and tails[server].first_offset <= segment.start_offset
        and tails[server].watermark.next_offset >= (segment.force_at_offset or 0)
        for server in able_tails(tails)
    )
