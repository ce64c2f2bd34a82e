# SPDX-License-Identifier: Apache-2.0
"""Metrics of a broker, under Pinot's stems: one observation per query; of freshness where consuming rows count."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cremant.broker.query import QueryService
from cremant.broker.response import BrokerResponse

_PREFIX = "pinot_broker_"
_LATENCY_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)
_FRESHNESS_MS = (100, 200, 300, 500, 700, 1_000, 1_500, 2_000, 3_000, 5_000, 10_000, 30_000, 60_000, 300_000)


class BrokerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._queries = Counter(f"{_PREFIX}queries", "Answered queries.", ["errorCode"], registry=registry)
        self._partial = Counter(f"{_PREFIX}partialResponses", "Answers flagged partial.", registry=registry)
        self._total_ms = Histogram(
            f"{_PREFIX}queryTotalTimeMs", "Time of a query in the broker.", buckets=_LATENCY_MS, registry=registry
        )
        self._reduce_ms = Histogram(
            f"{_PREFIX}reduceTimeMs", "Time of the broker's part.", buckets=_LATENCY_MS, registry=registry
        )
        self._freshness_ms = Histogram(
            f"{_PREFIX}freshnessLagMs",
            "Now minus what is proven to be in the answer, of queries on consuming partitions.",
            ["table"],
            buckets=_FRESHNESS_MS,
            registry=registry,
        )
        self._unknown = Counter(
            f"{_PREFIX}freshnessUnknown", "Queries on consuming partitions whose freshness is not known.", ["table"],
            registry=registry,
        )  # fmt: skip
        self._violations = Counter(
            f"{_PREFIX}freshnessSlaViolations", "Answers that did not keep what their table promises.", ["table"],
            registry=registry,
        )  # fmt: skip
        self._stale = Counter(
            f"{_PREFIX}staleQueries",
            "Queries whose data was not as fresh as they demanded: waited (then answered), refused, partial (flagged).",
            ["table", "outcome"],
            registry=registry,
        )
        self._waited_ms = Histogram(
            f"{_PREFIX}freshnessWaitMs",
            "Time that queries waited for fresh data.",
            ["table"],
            buckets=_LATENCY_MS,
            registry=registry,
        )
        self.view_version = Gauge(f"{_PREFIX}viewVersion", "Version of the cluster view in force.", registry=registry)

    def query_answered(self, response: BrokerResponse) -> None:
        self._queries.labels(str(int(response.error_code))).inc()
        self._total_ms.observe(response.elapsed_ms)
        if response.result is not None and response.exceptions:
            self._partial.inc()
        if response.result is not None:
            self._reduce_ms.observe(response.reduce_ms)
        if not response.tables:
            return
        table = f"{response.tables[0]}_REALTIME"
        if response.stale is not None:
            self._stale.labels(table, response.stale).inc()
        if response.waited_ms:
            self._waited_ms.labels(table).observe(response.waited_ms)
        if not response.freshness.partitions_expected:
            return
        lag_ms = response.lag_ms
        if lag_ms is None:
            self._unknown.labels(table).inc()
        else:
            self._freshness_ms.labels(table).observe(lag_ms)
        if response.sla_violated:
            self._violations.labels(table).inc()


class NetworkMetrics(Collector):
    """What the query service counts by itself, read when somebody asks."""

    def __init__(self, queries: QueryService) -> None:
        self._queries = queries

    def collect(self) -> Iterator[Metric]:
        loads = self._queries.network.loads
        yield CounterMetricFamily(f"{_PREFIX}serverRequests", "Requests sent to servers.", loads.asks_total)
        yield CounterMetricFamily(
            f"{_PREFIX}hedgedRequests", "Of these, asked of a second replica for speed.", loads.hedges_total
        )
        yield GaugeMetricFamily(f"{_PREFIX}queriesRunning", "Queries under way.", len(self._queries.running))
        yield GaugeMetricFamily(
            f"{_PREFIX}queriesWaiting", "Of these, waiting for their turn.", self._queries.admission.waiting
        )
        yield GaugeMetricFamily(
            f"{_PREFIX}queriesAwaitingRows", "Of these, waiting for fresh data.", self._queries.marks.waiting.total()
        )
