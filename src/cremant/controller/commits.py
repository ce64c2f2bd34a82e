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
from cremant.completion.segment import (
    CommitEnded,
    CommitterProgressed,
    CompletionMachine,
    Event,
    Persist,
    RenewLease,
    Reply,
    consumed_event,
)
from cremant.controller.catalog import Catalog, Record
from cremant.controller.clock import Clock
from cremant.model.cluster import InstanceReport, partition_key, segment_key
from cremant.model.limits import COMMIT_LEASE_MS
from cremant.model.segments import SegmentMetadata, SegmentStatus
from cremant.shell.logs import log_event
from cremant.wire.messages import CommitEnd, CommitEndReply, CompletionStatus, SegmentConsumed, SegmentConsumedReply

_log = logging.getLogger(__name__)


class Commits:
    def __init__(self, catalog: Catalog, clock: Clock) -> None:
        self._catalog = catalog
        self._clock = clock
        #: (table, segment) -> lease as renewed since its record was written.
        self._renewed_until_ms: dict[tuple[str, str], int] = {}
        #: (table, segment, instance) -> progress last reported.
        self._progress: dict[tuple[str, str, str], int] = {}
        until_ms = clock.now_ms() + COMMIT_LEASE_MS
        for table, segments in catalog.segments.items():
            for segment in segments.values():
                if segment.status is SegmentStatus.COMMITTING:
                    self._renewed_until_ms[table, segment.name] = until_ms

    def consumed(self, message: SegmentConsumed) -> SegmentConsumedReply:
        with self._catalog.lock:
            reply = self._step(message.table, message.incarnation, message.segment, consumed_event(message))
        log_event(
            _log, "segment consumed", segment=message.segment, instance=message.instance, at=message.at.next_offset,
            reason=message.reason, status=str(reply.status), rule=reply.rule, token=reply.token,
        )  # fmt: skip
        return SegmentConsumedReply(status=reply.status, end=reply.end, token=reply.token)

    def ended(self, message: CommitEnd) -> CommitEndReply:
        with self._catalog.lock:
            reply = self._step(message.table, message.incarnation, message.segment, CommitEnded(message))
        log_event(
            _log, "segment commit ended", segment=message.segment, instance=message.instance, token=message.token,
            rows=message.rows, status=str(reply.status), rule=reply.rule,
        )  # fmt: skip
        return CommitEndReply(status=reply.status)

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
        if progress > self._progress.get(key, 0):
            self._progress[key] = progress
            self._step(table, None, metadata.name, CommitterProgressed(instance))

    def _step(self, table: str, incarnation: str | None, segment: str, event: Event) -> Reply:
        record = self._catalog.tables.get(table)
        metadata = self._catalog.segments.get(table, {}).get(segment)
        if record is None or metadata is None or incarnation not in (None, record.incarnation):
            return Reply(CompletionStatus.DISCARD, rule="unknown")
        partition = self._catalog.partitions[table][metadata.partition]
        machine = CompletionMachine.recover(
            table, metadata, partition, renewed_until_ms=self._renewed_until_ms.get((table, segment), 0)
        )
        reply = Reply(CompletionStatus.HOLD)
        for effect in machine.step(event, self._clock.now_ms()):
            match effect:
                case Persist():
                    self._persist(table, effect)
                case RenewLease(until_ms=until_ms):
                    self._renewed_until_ms[table, segment] = until_ms
                case Reply():
                    reply = effect
                case _:
                    assert_never(effect)
        return reply

    def _persist(self, table: str, effect: Persist) -> None:
        changes: dict[str, Record | None] = {segment_key(table, effect.segment.name): effect.segment}
        if effect.next_segment is not None and effect.partition is not None:
            changes[segment_key(table, effect.next_segment.name)] = effect.next_segment
            changes[partition_key(table, effect.partition.partition)] = effect.partition
        self._catalog.commit(changes, unchanged=[partition_key(table, effect.segment.partition)])
        if effect.segment.status is SegmentStatus.DONE:
            self._renewed_until_ms.pop((table, effect.segment.name), None)
            for key in [key for key in self._progress if key[:2] == (table, effect.segment.name)]:
                del self._progress[key]
