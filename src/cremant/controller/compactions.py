# SPDX-License-Identifier: Apache-2.0
"""Compaction of upsert tables as the controller sees to it: orders (completion/compaction.py says which), and what
comes of them. An order and its epoch are in the segment's record, and so is its result: nothing else has to be
remembered."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from cremant.cluster.lowwater import is_void
from cremant.completion.compaction import Compact, Compactions, Order, Sight, after_compaction
from cremant.controller.catalog import Catalog, Record
from cremant.controller.clock import Clock
from cremant.controller.instances import Instances
from cremant.controller.objects import Objects
from cremant.model.cluster import InstanceReport, SegmentReport, TableRecord, segment_key, table_key
from cremant.model.segments import ReplicaState, SegmentMetadata, SegmentStatus
from cremant.shell.logs import log_event
from cremant.store.metadata import StoreConflict
from cremant.wire.messages import CompletionStatus, SegmentCompacted, SegmentCompactedReply

_log = logging.getLogger(__name__)


class TableCompactions:
    """Thread-safe."""

    def __init__(self, catalog: Catalog, instances: Instances, objects: Objects, clock: Clock) -> None:
        self._catalog = catalog
        self._instances = instances
        self._objects = objects
        self._clock = clock
        self._machine = Compactions()

    def run(self) -> int:
        """Orders what is due, and withdraws what takes too long or is not wanted any more; how many segments."""
        with self._catalog.lock:
            records = [record for _, record in sorted(self._catalog.tables.items()) if self._concerns(record)]
            reports = self._instances.reports_by_table() if records else {}
            sights = [self._sight(record, reports.get(record.config.name, {})) for record in records]
            orders = self._machine.step(sights, self._clock.now_ms())
            changes: dict[str, Record | None] = {
                segment_key(order.table, order.segment): self._ordered(order) for order in orders
            }
            if changes:
                self._catalog.commit(changes, unchanged={table_key(order.table) for order in orders})
        for order in orders:
            _tell(order)
        return len(orders)

    def _concerns(self, record: TableRecord) -> bool:
        """It compacts, or did until now and has orders out."""
        upsert, segments = record.config.upsert, self._catalog.segments.get(record.config.name, {}).values()
        if upsert is None:
            return False
        return upsert.compaction is not None or any(segment.compacting is not None for segment in segments)

    def _ordered(self, order: Order) -> SegmentMetadata:
        segment = self._catalog.segments[order.table][order.segment]
        if isinstance(order, Compact):
            return msgspec.structs.replace(segment, compacting=order.epoch, compactor=order.server)
        return msgspec.structs.replace(segment, compacting=None, compactor=None)

    def _sight(self, record: TableRecord, reports: dict[str, InstanceReport]) -> Sight:
        name, upsert = record.config.name, record.config.upsert
        assert upsert is not None
        segments = [one for one in self._catalog.segments.get(name, {}).values() if one.status is SegmentStatus.DONE]
        said: dict[str, dict[str, SegmentReport]] = {}
        for instance, report in reports.items():
            for one in report.segments:
                said.setdefault(one.segment, {})[instance] = one
        superseded = {one.name: _superseded(one, said.get(one.name, {})) for one in segments}
        return Sight(
            table=name, incarnation=record.incarnation, upsert=upsert, pipeline=self._catalog.pipelines[name],
            low_water_mark=self._low_water_mark(record, reports), segments=segments,
            superseded={segment: count for segment, count in superseded.items() if count is not None},
        )  # fmt: skip

    def _low_water_mark(self, record: TableRecord, reports: dict[str, InstanceReport]) -> int | None:
        """The last epoch that every replica of every partition has applied; None if one does not say, or says one that
        was taken back."""
        name = record.config.name
        tails, closed = self._instances.tails(name, record.incarnation, reports), []
        for number, partition in self._catalog.partitions.get(name, {}).items():
            for server in partition.replicas:
                tail = tails.get(str(number), {}).get(server)
                if tail is None or tail.versions is None or tail.error is not None:
                    return None
                closed.append(tail.versions.closed)
        mark = min(closed, default=None)
        rewinds = self._catalog.pipelines[name].rewinds
        return mark if mark is not None and is_void(mark, rewinds) is None else None

    def ended(self, said: SegmentCompacted) -> SegmentCompactedReply:
        """What the record does not name any more is deleted."""
        with self._catalog.lock:
            record = self._catalog.tables.get(said.table)
            known = self._catalog.segments.get(said.table, {}).get(said.segment)
            changed = None
            if record is not None and known is not None and record.incarnation == said.incarnation:
                changed = after_compaction(known, said, self._clock.now_ms())
            if changed is None or record is None or known is None:
                return SegmentCompactedReply(status=CompletionStatus.DISCARD)
            try:
                self._catalog.commit({segment_key(said.table, said.segment): changed})
            except StoreConflict:
                return SegmentCompactedReply(status=CompletionStatus.NOT_LEADER)
        for url in known.objects:
            if url not in changed.objects:
                self._objects.delete(record, url)
        log_event(
            _log, "segment was compacted", table=said.table, segment=said.segment, epoch=said.epoch, rows=changed.rows,
            removed=known.rows - changed.rows, instance=said.instance,
        )  # fmt: skip
        return SegmentCompactedReply(status=CompletionStatus.KEEP)


def _tell(order: Order) -> None:
    shared: dict[str, Any] = {"table": order.table, "segment": order.segment, "epoch": order.epoch}
    if isinstance(order, Compact):
        log_event(_log, "segment is to be compacted", **shared, instance=order.server)
    else:
        log_event(_log, "compaction is withdrawn", **shared, level=logging.WARNING, why=order.why)


def _superseded(segment: SegmentMetadata, said: dict[str, SegmentReport]) -> int | None:
    """The least of its replicas; None unless all of them serve the committed content and say so."""
    counts = []
    for server in segment.replicas:
        report = said.get(server)
        if report is None or report.state is not ReplicaState.ONLINE or report.checksum != segment.checksum:
            return None
        if report.superseded is None:
            return None
        counts.append(report.superseded)
    return min(counts, default=None)
