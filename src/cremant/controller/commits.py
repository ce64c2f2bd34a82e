# SPDX-License-Identifier: Apache-2.0
"""Segment completion, carried out: events in, the machine's effects done in order, the reply out.

Rule: `Persist` before `Reply`; everything of one event happens under the catalog's lock, so the records a machine was
made from are those it is committed against.
"""

from __future__ import annotations

import logging
from typing import assert_never

import msgspec

from cremant.cluster.states import new_copies
from cremant.completion.copies import with_versions
from cremant.completion.rewind import is_taken_back
from cremant.completion.safeguards import ALL, Safeguards
from cremant.completion.segment import (
    CommitEnded,
    CommitterProgressed,
    CompletionMachine,
    Consumed,
    Event,
    Persist,
    Remember,
    RenewLease,
    Reply,
    Reports,
    Stored,
    consumed_event,
    lease_ms,
)
from cremant.controller.catalog import Catalog, Record
from cremant.controller.clock import Clock
from cremant.controller.instances import Instances
from cremant.model.cluster import InstanceReport, TableRecord, partition_key, segment_key
from cremant.model.segments import SegmentMetadata, SegmentStatus
from cremant.shell.logs import log_event
from cremant.store.metadata import StoreConflict
from cremant.wire.messages import (
    CommitEnd,
    CommitEndReply,
    CompletionStatus,
    SegmentConsumed,
    SegmentConsumedReply,
    SegmentStored,
    SegmentStoredReply,
    VersionsStored,
    VersionsStoredReply,
)

_log = logging.getLogger(__name__)


class Commits:
    def __init__(self, catalog: Catalog, instances: Instances, clock: Clock, *, safeguards: Safeguards = ALL) -> None:
        self._safeguards = safeguards
        self._catalog = catalog
        self._instances = instances
        self._clock = clock
        #: (table, segment) -> what replicas have reported of it while it is open.
        self._reports: dict[tuple[str, str], Reports] = {}
        #: (table, segment) -> lease as renewed since its record was written.
        self._renewed_until_ms: dict[tuple[str, str], int] = {}
        #: (table, segment, instance) -> progress last reported.
        self._progress: dict[tuple[str, str, str], int] = {}
        for table, segments in catalog.segments.items():
            for segment in segments.values():
                if segment.status is SegmentStatus.COMMITTING:
                    until_ms = clock.now_ms() + lease_ms(segment.commit_token)
                    self._renewed_until_ms[table, segment.name] = until_ms

    def consumed(self, message: SegmentConsumed) -> SegmentConsumedReply:
        reply = self._answer(message.table, message.incarnation, message.segment, consumed_event(message))
        log_event(
            _log, "segment consumed", segment=message.segment, instance=message.instance, offset=message.at.next_offset,
            reason=message.reason, status=str(reply.status), rule=reply.rule, token=reply.token,
        )  # fmt: skip
        return SegmentConsumedReply(status=reply.status, end=reply.end, token=reply.token)

    def ended(self, message: CommitEnd) -> CommitEndReply:
        reply = self._answer(message.table, message.incarnation, message.segment, CommitEnded(message))
        log_event(
            _log, "segment commit ended", segment=message.segment, instance=message.instance, token=message.token,
            rows=message.rows, status=str(reply.status), rule=reply.rule,
        )  # fmt: skip
        return CommitEndReply(status=reply.status)

    def stored(self, message: SegmentStored) -> SegmentStoredReply:
        reply = self._answer(message.table, message.incarnation, message.segment, Stored(message))
        log_event(
            _log, "segment stored" if message.url else "segment not stored", segment=message.segment,
            instance=message.instance, url=message.url, error=message.error, status=str(reply.status), rule=reply.rule,
        )  # fmt: skip
        return SegmentStoredReply(status=reply.status, store_url=reply.store_url)

    def versions_stored(self, message: VersionsStored) -> VersionsStoredReply:
        """See `VersionsStored`. What is not named in the end is the sender's to delete."""
        with self._catalog.lock:
            record = self._catalog.tables.get(message.table)
            known = self._catalog.segments.get(message.table, {}).get(message.segment)
            named = message.versions.url
            if record is None or known is None or message.incarnation != record.incarnation:
                return VersionsStoredReply(status=CompletionStatus.DISCARD, unnamed=named)
            taken_back = is_taken_back(self._catalog.pipelines[message.table], message.versions.position)
            if known.status is not SegmentStatus.DONE or taken_back:
                return VersionsStoredReply(status=CompletionStatus.HOLD)
            before = known.versions.url if known.versions is not None else None
            changed = with_versions(known, message.checksum, message.versions)
            if changed is None:
                unnamed = named if named != before else None
                return VersionsStoredReply(status=CompletionStatus.DISCARD, unnamed=unnamed)
            try:
                self._catalog.commit({segment_key(message.table, message.segment): changed})
            except StoreConflict:
                return VersionsStoredReply(status=CompletionStatus.NOT_LEADER)
        return VersionsStoredReply(status=CompletionStatus.KEEP, unnamed=before if before != named else None)

    def heard(self, instance: str, report: InstanceReport) -> None:
        """What a heartbeat says of segments: progress of builds, verified copies."""
        with self._catalog.lock:
            changes: dict[str, Record | None] = {}
            for said in report.segments:
                metadata = self._catalog.segments.get(said.table, {}).get(said.segment)
                if metadata is None:
                    continue
                self._note_progress(instance, said.table, metadata, said.progress)
                copies = new_copies(metadata, instance, said, self._clock.now_ms())
                if copies is not None:
                    changes[segment_key(said.table, said.segment)] = msgspec.structs.replace(metadata, copies=copies)
            if changes:
                self._catalog.commit(changes)

    def _note_progress(self, instance: str, table: str, metadata: SegmentMetadata, progress: int) -> None:
        if metadata.status is not SegmentStatus.COMMITTING or metadata.committer != instance:
            return
        key = (table, metadata.name, instance)
        if progress != self._progress.get(key, 0):  # less: the process restarted, and began again
            self._progress[key] = progress
            self._step(table, None, metadata.name, CommitterProgressed(instance))

    def _answer(self, table: str, incarnation: str, segment: str, event: Event) -> Reply:
        try:
            with self._catalog.lock:
                return self._step(table, incarnation, segment, event)
        except StoreConflict:
            return Reply(CompletionStatus.NOT_LEADER, rule="deposed")

    def _step(self, table: str, incarnation: str | None, segment: str, event: Event) -> Reply:
        record = self._catalog.tables.get(table)
        metadata = self._catalog.segments.get(table, {}).get(segment)
        if record is None or metadata is None or incarnation not in (None, record.incarnation):
            return Reply(CompletionStatus.DISCARD, rule="unknown")
        if isinstance(event, Consumed) and is_taken_back(self._catalog.pipelines[table], event.at):
            return Reply(CompletionStatus.HOLD, rule="taken-back")
        partition = self._catalog.partitions[table][metadata.partition]
        machine = CompletionMachine.recover(
            table, metadata, partition, renewed_until_ms=self._renewed_until_ms.get((table, segment)),
            reports=self._reports.get((table, segment)),
            visible=self._visible(record, metadata) if metadata.status is not SegmentStatus.DONE else None,
            safeguards=self._safeguards,
        )  # fmt: skip
        reply = Reply(CompletionStatus.HOLD)
        for effect in machine.step(event, self._clock.now_ms()):
            match effect:
                case Persist():
                    self._persist(table, effect)
                case RenewLease(until_ms=until_ms):
                    self._renewed_until_ms[table, segment] = until_ms
                case Remember(reports=reports):
                    self._remember((table, segment), reports)
                case Reply():
                    reply = effect
                case _:
                    assert_never(effect)
        return reply

    def _visible(self, record: TableRecord, segment: SegmentMetadata) -> dict[str, int]:
        """How far live replicas show rows of the segment's partition, those that stopped left out."""
        tails = self._instances.tails(record.config.name, record.incarnation).get(str(segment.partition), {})
        return {server: tail.watermark.next_offset for server, tail in tails.items() if tail.error is None}

    def _remember(self, key: tuple[str, str], reports: Reports) -> None:
        if key not in self._reports:  # those of dropped tables and deleted segments go when others come
            known = self._catalog.segments
            self._reports = {k: said for k, said in self._reports.items() if k[1] in known.get(k[0], {})}
        self._reports[key] = reports

    def _persist(self, table: str, effect: Persist) -> None:
        changes: dict[str, Record | None] = {segment_key(table, effect.segment.name): effect.segment}
        if effect.next_segment is not None and effect.partition is not None:
            changes[segment_key(table, effect.next_segment.name)] = effect.next_segment
            changes[partition_key(table, effect.partition.partition)] = effect.partition
        self._catalog.commit(changes, unchanged=[partition_key(table, effect.segment.partition)])
        self._reports.pop((table, effect.segment.name), None)
        if effect.segment.status is SegmentStatus.DONE:
            self._renewed_until_ms.pop((table, effect.segment.name), None)
            for key in [key for key in self._progress if key[:2] == (table, effect.segment.name)]:
                del self._progress[key]
