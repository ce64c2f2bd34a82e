# SPDX-License-Identifier: Apache-2.0
"""Takes a table back to a closed epoch on an operator's word (which segments go: `completion.rewind`).

Rules
- What can be seen to be impossible is refused before anything changes: an epoch that was never closed or that readers
  no longer remember, one before partitions were added, a range that the epoch log has dropped.
- One compare-and-set drops the segments, opens new ones and leaves the wish to the pipeline, whose next start writes
  the Resets. Until then rows of later epochs may still be seen; after it they never are.
- Bytes in the deep store go after the records; what a crash leaves there is swept.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from cremant.completion.rewind import PartitionRewind, compacted_past, plan_rewind, without_later
from cremant.controller.catalog import Catalog, Record
from cremant.controller.clock import Clock
from cremant.controller.objects import Objects
from cremant.controller.streams import Streams
from cremant.epoch.format import peek
from cremant.epoch.scan import PartitionScan
from cremant.log.api import Log
from cremant.model.cluster import (
    PartitionRecord,
    PipelineRecord,
    Rewind,
    TableRecord,
    partition_key,
    pipeline_key,
    segment_key,
)
from cremant.model.errors import Conflict, InvariantViolation, UserError
from cremant.model.limits import MIB, REWINDS_KEPT_MAX, STREAM_CHANGE_MS
from cremant.model.names import epoch_topic
from cremant.model.offsets import Position
from cremant.shell.logs import log_event

_log = logging.getLogger(__name__)


class _Request(msgspec.Struct, frozen=True):
    """Of a scan to the end of the log."""

    start: Position
    generation: int = 0


class Rewound(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a rewind gives up. `epoch`: where the table goes back to, `closed`: the last one closed before."""

    table: str
    epoch: int
    closed: int
    segments: tuple[str, ...]
    #: Of the stream, read again: closed rows past the epoch, over partitions.
    offsets_again: int
    dry_run: bool


class Rewinds:
    """Thread-safe; the epoch log is read outside of the catalog's lock."""

    def __init__(self, catalog: Catalog, streams: Streams, objects: Objects, clock: Clock) -> None:
        self._catalog = catalog
        self._streams = streams
        self._objects = objects
        self._clock = clock

    def rewind(self, name: str, epoch: int, *, dry_run: bool = False) -> Rewound:
        """Raises NotFound, UserError (it cannot be done, and why), Conflict (the table changed meanwhile)."""
        with self._catalog.lock:
            record = self._catalog.table(name)
            partitions = dict(self._catalog.partitions[name])
            _check_pending(name, self._catalog.pipelines[name], epoch)
            plans = self._plan(record, partitions, epoch)
        scan = self._streams.of_epochs(lambda log: _look(log, record, plans), timeout_ms=STREAM_CHANGE_MS)
        ends = _check(record, plans, scan, epoch)
        closed = {plan.partition.partition: plan for plan in plans}
        told = Rewound(
            table=name, epoch=epoch, closed=scan.closed_epoch,
            segments=tuple(segment.name for plan in plans for segment in plan.dropped), dry_run=dry_run,
            offsets_again=sum(
                line.end - ends.get(partition, closed[partition].partition.start_offset)
                for partition, line in enumerate(scan.last_mark.partitions if scan.last_mark is not None else ())
            ),
        )  # fmt: skip
        if not dry_run:
            self._write(record, partitions, plans, epoch)
            log_event(_log, "table is taken back", table=name, epoch=epoch, closed=told.closed, segments=told.segments)
        return told

    def _plan(
        self, record: TableRecord, partitions: Mapping[int, PartitionRecord], epoch: int
    ) -> tuple[PartitionRewind, ...]:
        name = record.config.name
        segments = self._catalog.segments.get(name, {}).values()
        if (gone := compacted_past(segments, epoch)) is not None:
            raise UserError(
                f"table {name} cannot go back to epoch {epoch}: segment {gone.name} was compacted at epoch "
                f"{gone.compacted_at}, rows that were in force before are gone",
                hint=f"choose epoch {gone.compacted_at} or a later one; cremant.upsert.historyMs says how far back",
            )
        try:
            return plan_rewind(name, partitions, segments, epoch, self._clock.now_ms())
        except LookupError as error:
            raise UserError(
                f"table {name} cannot go back to epoch {epoch}: the segments of partition {error.args[0]} that held it "
                "are gone",
                hint="retention or an operator deleted them; choose a later epoch",
            ) from None

    def _write(
        self, record: TableRecord, partitions: Mapping[int, PartitionRecord], plans: tuple[PartitionRewind, ...],
        epoch: int,
    ) -> None:  # fmt: skip
        name = record.config.name
        with self._catalog.lock:
            now = self._catalog.tables.get(name)
            again = self._plan(record, partitions, epoch) if now is not None else ()
            same = [(plan.partition, plan.dropped) for plan in again] == [
                (plan.partition, plan.dropped) for plan in plans
            ]
            if now is None or now.incarnation != record.incarnation or self._catalog.partitions[name] != partitions:
                same = False
            if not same:
                raise Conflict(f"table {name} changed while it was looked at", hint="try again")
            pipeline = self._catalog.pipelines[name]
            _check_pending(name, pipeline, epoch)
            rewinds = (*pipeline.rewinds, Rewind(to_epoch=epoch, asked_ms=self._clock.now_ms()))
            if pipeline.rewind is not None:  # not carried out: the new one goes further back
                rewinds = (*pipeline.rewinds[:-1], rewinds[-1])
            changes: dict[str, Record | None] = {
                pipeline_key(name): msgspec.structs.replace(pipeline, rewinds=rewinds[-REWINDS_KEPT_MAX:])
            }
            for plan in plans:
                changes.update({segment_key(name, segment.name): None for segment in plan.dropped})
                changes[segment_key(name, plan.opened.name)] = plan.opened
                changes[partition_key(name, plan.partition.partition)] = plan.partition
            before = dict(self._catalog.segments[name])
            kept = [segment for key, segment in before.items() if segment_key(name, key) not in changes]
            opened = {plan.partition.partition: plan.opened.start for plan in plans}
            changes.update({segment_key(name, one.name): one for one in without_later(kept, epoch, opened)})
            self._catalog.commit(changes)
            named = {url for segment in self._catalog.segments[name].values() for url in segment.objects}
        for url in (url for segment in before.values() for url in segment.objects if url not in named):
            self._objects.delete(record, url)


def _check_pending(name: str, pipeline: PipelineRecord, epoch: int) -> None:
    """A start may be about to write the Resets of an earlier wish: what they take back cannot be gone back to. Raises
    UserError."""
    if pipeline.rewind is not None and epoch > pipeline.rewind.to_epoch:
        raise UserError(
            f"table {name} cannot go back to epoch {epoch}: it is being taken back to epoch {pipeline.rewind.to_epoch}",
            hint="the next start of its pipeline carries that out; choose that epoch or an earlier one",
        )


def _look(log: Log, record: TableRecord, plans: tuple[PartitionRewind, ...]) -> PartitionScan:
    """Partition 0 of the epoch log, from where the table would begin again. Raises UserError where a partition no
    longer has what must be read again."""
    topic = epoch_topic(record.config.name, record.incarnation)
    for plan in plans:
        partition, start = plan.partition.partition, plan.opened.start
        if log.earliest(topic, partition) > start.log_offset:
            raise UserError(
                f"table {record.config.name} cannot go back so far: the epoch log of partition {partition} begins at "
                f"{log.earliest(topic, partition)}, and would be read again from {start.log_offset}",
                hint="it is kept for segments that are not safe yet; choose a later epoch",
            )
    scan = PartitionScan(_Request(plans[0].opened.start))
    end = log.latest(topic, 0)
    reader = log.reader(topic, 0, max(scan.from_offset, log.earliest(topic, 0)))
    try:
        while reader.position < end and (batch := reader.read(max_messages=1_024, max_bytes=32 * MIB)) is not None:
            for index, offset in enumerate(batch.offsets.tolist()):
                scan.add(offset, peek(batch.values[index].as_buffer(), record.incarnation))
    finally:
        reader.close()
    return scan


def _check(record: TableRecord, plans: tuple[PartitionRewind, ...], scan: PartitionScan, epoch: int) -> dict[int, int]:
    """The ends of `epoch` by partition. Raises UserError."""
    name, closed = record.config.name, scan.closed_epoch
    if epoch >= closed:
        raise UserError(
            f"table {name} cannot go back to epoch {epoch}: the last one closed is {closed}",
            hint="GET /tables/<table>/upsert and the pipeline's report name the present epoch",
        )
    if epoch == 0:
        return {}
    try:
        mark = scan.mark_of(epoch)
    except InvariantViolation:
        raise UserError(
            f"table {name} cannot go back to epoch {epoch}: it was never closed, or too long ago",
            hint=f"closed epochs from there on: {_some(scan.epochs)}",
        ) from None
    if mark.partition_count != len(plans):
        raise UserError(
            f"table {name} cannot go back to epoch {epoch}: it had {mark.partition_count} partitions then, and has "
            f"{len(plans)} now"
        )
    return {partition: line.end for partition, line in enumerate(mark.partitions)}


def _some(epochs: tuple[int, ...]) -> str:
    if len(epochs) <= 12:
        return ", ".join(map(str, epochs)) or "none"
    return f"{', '.join(map(str, epochs[:6]))}, …, {', '.join(map(str, epochs[-6:]))}"
