# SPDX-License-Identifier: Apache-2.0
"""Metrics of a server, under Pinot's stems. Gauges are read from the state at scrape time, so they cannot be stale."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cremant.server.hosting import Hosting
from cremant.server.sealing import Sealer

_PREFIX = "pinot_server_"
_BUCKETS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)


class ServerMetrics(Collector):
    def __init__(self, registry: CollectorRegistry, hosting: Hosting, sealer: Sealer) -> None:
        self._hosting = hosting
        self._sealer = sealer
        registry.register(self)
        self._queries = Counter(f"{_PREFIX}queries", "Answered server queries.", ["errorCode"], registry=registry)
        self._query_ms = Histogram(
            f"{_PREFIX}totalQueryTimeMs", "Time of a server query from arrival to answer.", buckets=_BUCKETS_MS,
            registry=registry,
        )  # fmt: skip

    def query_answered(self, elapsed_ms: float, error_code: int) -> None:
        self._queries.labels(str(error_code)).inc()
        self._query_ms.observe(elapsed_ms)

    def collect(self) -> Iterator[Metric]:
        yield from self._partitions()
        yield from self._segments()
        for name, help_text, value in (
            ("segmentsSealed", "Segments that this server sealed.", self._sealer.sealed_total),
            ("segmentsFetched", "Segments fetched from the deep store.", self._sealer.fetched_total),
            ("segmentsDiverged", "Own rows that differed from the committed segment.", self._sealer.diverged_total),
            ("segmentStepFailures", "Failed steps of sealing, all retried.", self._sealer.failures_total),
        ):
            counter = CounterMetricFamily(_PREFIX + name, help_text)
            counter.add_metric([], value)
            yield counter

    def _partitions(self) -> Iterator[Metric]:
        labels = ["table", "partition"]
        delay = GaugeMetricFamily(
            f"{_PREFIX}realtimeIngestionDelayMs", "Now minus what is proven to be visible.", labels=labels
        )
        rows = GaugeMetricFamily(f"{_PREFIX}realtimeTailRows", "Rows not sealed yet.", labels=labels)
        heap = GaugeMetricFamily(f"{_PREFIX}realtimeTailHeapBytes", "Heap that tails take.", labels=labels)
        disk = GaugeMetricFamily(f"{_PREFIX}realtimeTailDiskBytes", "Disk that spilled tails take.", labels=labels)
        stopped = GaugeMetricFamily(f"{_PREFIX}realtimePartitionStopped", "1: stopped by a broken rule.", labels=labels)
        now_ms = time.time() * 1000
        for partition in self._hosting.partitions():
            key = [f"{partition.id.table}_REALTIME", str(partition.id.partition)]
            fresh_ms = partition.watermark.freshness_ms
            if fresh_ms is not None:
                delay.add_metric(key, max(0.0, now_ms - fresh_ms))
            rows.add_metric(key, partition.tail.snapshot.rows)
            heap.add_metric(key, partition.tail.heap_bytes)
            disk.add_metric(key, partition.tail.disk_bytes)
            stopped.add_metric(key, float(partition.state.value == "stopped"))
        yield from (delay, rows, heap, disk, stopped)

    def _segments(self) -> Iterator[Metric]:
        count = GaugeMetricFamily(f"{_PREFIX}segmentCount", "Segments by state.", labels=["table", "state"])
        size = GaugeMetricFamily(f"{_PREFIX}segmentDiskBytes", "Disk of sealed segments.", labels=["table"])
        for table in list(self._hosting.tables.values()):
            with table.lock:
                states = [hosted.state.value for hosted in table.segments.values()]
                used = sum(hosted.sealed.disk_bytes for hosted in table.segments.values() if hosted.sealed is not None)
                consuming = len(table.partitions)
            name = f"{table.name}_REALTIME"
            for state in sorted(set(states)):
                count.add_metric([name, state], states.count(state))
            count.add_metric([name, "CONSUMING"], consuming)
            size.add_metric([name], used)
        yield from (count, size)
