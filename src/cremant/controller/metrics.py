# SPDX-License-Identifier: Apache-2.0
"""The controller's metrics, read off the catalog at each scrape: nothing to keep in step, nothing to forget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from cremant.completion.copies import Totals, totals
from cremant.controller.core import Controller
from cremant.controller.objects import Looked
from cremant.controller.repair import RepairReport
from cremant.controller.upsert_state import upsert_state
from cremant.model.cluster import TableView
from cremant.wire.freshness import TableFreshness


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
            policies = {name: self._controller.policy(record) for name, record in catalog.tables.items()}
            keyed = [name for name, record in sorted(catalog.tables.items()) if record.config.upsert is not None]
            tables, drops = len(catalog.tables), len(catalog.being_removed())
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
        for table, found in sorted(segments.items()):
            for status, count in sorted(Counter(str(segment.status) for segment in found).items()):
                states.add_metric([table, status], count)
        yield states
        yield from _upsert({name: view for name in keyed if (view := self._controller.view.table(name)) is not None})
        yield from _freshness(self._controller.freshness.all())
        yield from _repair(self._controller.repair.report)
        yield from _objects(self._controller.objects.looked)
        yield from _copies({table: totals(found, policies[table]) for table, found in sorted(segments.items())})


def _upsert(tables: dict[str, TableView]) -> Iterable[Metric]:
    """What nobody knows is left out."""
    states = {name: upsert_state(table) for name, table in tables.items()}
    families: list[tuple[str, str, Callable[[dict[str, Any]], Any]]] = [
        ("cremant_upsert_epoch", "Last closed epoch that a server has applied.", lambda state: state["epoch"]),
        (
            "cremant_upsert_low_water_mark",
            "Least epoch that every server of the table has applied.",
            lambda state: state["lowWaterMark"],
        ),
        ("cremant_upsert_keys", "Keys with a visible row.", lambda state: state["keys"]),
        ("cremant_upsert_superseded_rows", "Rows that newer ones of their keys replaced.",
         lambda state: state["superseded"]),
        ("cremant_upsert_tombstones", "Deleted keys that are remembered.", lambda state: state["tombstones"]),
        ("cremant_upsert_version_bytes", "What one copy of the table spends on versions.",
         lambda state: state["sizeBytes"]),
        ("cremant_upsert_rows_removed", "Replaced rows that compaction has removed from the segments there are.",
         lambda state: state["compaction"]["rowsRemoved"]),
        ("cremant_upsert_segments_compacted", "Sealed segments that compaction has removed rows from.",
         lambda state: state["compaction"]["segments"]),
        ("cremant_coordinator_keys", "Keys in the coordinator's state.", lambda state: state["coordinator"]["keys"]),
        ("cremant_coordinator_state_bytes", "Size of the coordinator's state on disk.",
         lambda state: state["coordinator"]["stateBytes"]),
    ]  # fmt: skip
    for name, doc, value in families:
        family = GaugeMetricFamily(name, doc, labels=["table"])
        for table, state in states.items():
            if (number := value(state)) is not None:
                family.add_metric([table], number)
        yield family


def _freshness(tables: dict[str, TableFreshness]) -> Iterable[Metric]:
    """Under Pinot's stems. What nobody knows is left out, but a promise that may be broken counts as broken."""
    lags = GaugeMetricFamily(
        "pinot_controller_freshnessLagMs", "Now minus what is proven to be visible.", labels=["table", "partition"]
    )
    violated = GaugeMetricFamily(
        "pinot_controller_freshnessSlaViolated", "1: the table is not as fresh as it promises, or nobody knows.",
        labels=["table"],
    )  # fmt: skip
    rows = GaugeMetricFamily(
        "pinot_controller_maxRecordsLag", "Most rows of a partition's stream that are not visible.", labels=["table"]
    )
    for name, found in tables.items():
        if found.sla_state != "none":
            violated.add_metric([name], float(found.sla_state != "ok"))
        for partition in found.partitions:
            if partition.freshness_lag_ms is not None:
                lags.add_metric([name, str(partition.partition)], partition.freshness_lag_ms)
        known = [partition.lag_rows for partition in found.partitions if partition.lag_rows is not None]
        if known:
            rows.add_metric([name], max(known))
    yield from (lags, violated, rows)


def _repair(report: RepairReport) -> Iterable[Metric]:
    yield _gauge(
        "cremant_repair_missing", "Sealed segments that miss a copy, or their object in the store.", report.missing
    )
    yield _gauge("cremant_repair_uploads", "Uploads that repair has under way.", report.uploading)
    totals: list[tuple[str, str, int]] = [
        ("cremant_repair_runs", "Runs of the repair of copies.", report.runs_total),
        ("cremant_repair_records_read", "Records that runs of repair looked at.", report.looked_at_total),
        ("cremant_repair_records_written", "Records that runs of repair changed.", report.written_total),
        (
            "cremant_repair_reports_read",
            "Reports of replicas that runs of repair went through.",
            report.reports_read_total,
        ),
        ("cremant_repair_uploaded", "Uploads that repair asked for and that landed.", report.uploads_total),
        ("cremant_repair_upload_failures", "Uploads that repair asked for in vain.", report.upload_failures_total),
    ]
    for name, doc, value in totals:
        yield CounterMetricFamily(name, doc, value=value)


def _objects(looked: Looked) -> Iterable[Metric]:
    for name, doc, value in (
        ("cremant_store_objects_looked_at", "Stored objects that were looked for.", looked.objects),
        ("cremant_store_objects_gone", "Of them, objects that were not there, or damaged.", looked.gone),
        ("cremant_store_objects_swept", "Stored objects that were removed since no record names them.", looked.swept),
    ):
        yield CounterMetricFamily(name, doc, value=value)


def _copies(by_table: dict[str, Totals]) -> Iterable[Metric]:
    """Where the bytes of sealed segments are."""
    families: list[tuple[str, str, Callable[[Totals], int]]] = [
        (
            "cremant_segments_unsafe",
            "Sealed segments that the loss of one server could lose.",
            lambda found: found.single_copy + found.no_copy + found.lost,
        ),
        ("cremant_segments_single_copy", "Sealed segments with one copy and none in the store.",
         lambda found: found.single_copy),
        ("cremant_segments_lost", "Sealed segments of which no copy is left.", lambda found: found.lost),
        ("cremant_upload_backlog", "Sealed segments that should be in the store and are not.",
         lambda found: found.upload_backlog),
    ]  # fmt: skip
    for name, doc, count in families:
        family = GaugeMetricFamily(name, doc, labels=["table"])
        for table, found in by_table.items():
            family.add_metric([table], count(found))
        yield family


def _gauge(name: str, doc: str, value: float) -> Metric:
    return GaugeMetricFamily(name, doc, value=value)


def metrics_registry(controller: Controller) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(ControllerCollector(controller))
    return registry
