# SPDX-License-Identifier: Apache-2.0
"""The controller's metrics, read off the catalog at each scrape: nothing to keep in step, nothing to forget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from cremant.cluster.retention import is_safe
from cremant.controller.core import Controller
from cremant.model.segments import SegmentStatus


class ControllerCollector(Collector):
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def collect(self) -> Iterable[Metric]:
        catalog, instances = self._controller.catalog, self._controller.instances
        with catalog.lock:
            described = instances.described()
            segments = {
                name: list(found.values()) for name, found in catalog.segments.items() if name in catalog.tables
            }
            paused = sum(record.paused for record in catalog.tables.values())
            tables, drops = len(catalog.tables), len(catalog.drops)
        yield _gauge("cremant_tables", "Tables.", tables)
        yield _gauge("cremant_tables_paused", "Tables whose consumption is paused.", paused)
        yield _gauge("cremant_tables_being_removed", "Dropped tables whose bytes are not gone yet.", drops)
        yield _gauge("cremant_view_version", "Version of the published view.", self._controller.view.version)
        yield _gauge("cremant_leader_term", "Term of this leadership.", catalog.leadership.term)
        live = GaugeMetricFamily("cremant_instances", "Members by role and liveness.", labels=["role", "live"])
        for (role, is_live), count in sorted(Counter((str(i.role), i.live) for i in described).items()):
            live.add_metric([role, str(is_live).lower()], count)
        yield live
        states = GaugeMetricFamily("cremant_segments", "Segments by table and status.", labels=["table", "status"])
        unsafe = GaugeMetricFamily(
            "cremant_segments_unsafe", "Sealed segments that the loss of one server could lose.", labels=["table"]
        )
        for table, found in sorted(segments.items()):
            for status, count in sorted(Counter(str(segment.status) for segment in found).items()):
                states.add_metric([table, status], count)
            sealed = (segment for segment in found if segment.status is SegmentStatus.DONE)
            unsafe.add_metric([table], sum(not is_safe(segment) for segment in sealed))
        yield states
        yield unsafe


def _gauge(name: str, doc: str, value: float) -> Metric:
    return GaugeMetricFamily(name, doc, value=value)


def metrics_registry(controller: Controller) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(ControllerCollector(controller))
    return registry
