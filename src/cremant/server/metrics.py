# SPDX-License-Identifier: Apache-2.0
"""Metrics of a server, under Pinot's stems. Gauges are read from the state at scrape time, so they cannot be stale."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cremant.completion.breaker import BreakerState
from cremant.server.fetching import SegmentFetcher
from cremant.server.hosting import Hosting
from cremant.server.metrics_of_partitions import PartitionMetrics
from cremant.server.peers import PeerService
from cremant.server.sealing import Sealer
from cremant.server.timings import Phase
from cremant.server.uploads import Uploads

_PREFIX = "pinot_server_"
_BUCKETS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)


class ServerMetrics(Collector):
    def __init__(
        self, registry: CollectorRegistry, hosting: Hosting, sealer: Sealer, fetcher: SegmentFetcher,
        peers: PeerService, uploads: Uploads,
    ) -> None:  # fmt: skip
        self._hosting = hosting
        self._sealer = sealer
        self._fetcher = fetcher
        self._peers = peers
        self._uploads = uploads
        registry.register(self)
        PartitionMetrics(registry, hosting.tables)
        self._queries = Counter(f"{_PREFIX}queries", "Answered server queries.", ["errorCode"], registry=registry)
        self._query_ms = Histogram(
            f"{_PREFIX}totalQueryTimeMs", "Time of a server query from arrival to answer.", buckets=_BUCKETS_MS,
            registry=registry,
        )  # fmt: skip

    def query_answered(self, elapsed_ms: float, error_code: int) -> None:
        self._queries.labels(str(error_code)).inc()
        self._query_ms.observe(elapsed_ms)

    def collect(self) -> Iterator[Metric]:
        yield from self._segments()
        yield from self._fetches()
        yield from self._store()
        yield self._phases()
        steps = self._sealer.steps
        for name, help_text, value in (
            ("segmentsSealed", "Segments that this server sealed.", steps.sealed_total),
            ("segmentsFetched", "Segments fetched from the deep store or another server.", steps.fetched_total),
            ("segmentsDiverged", "Own rows that differed from the committed segment.", steps.diverged_total),
            ("segmentStepFailures", "Failed steps of sealing, all retried.", self._sealer.failures_total),
            ("segmentsUploaded", "Objects that landed in the deep store.", self._uploads.landed_total),
            ("segmentUploadsDiscarded", "Late uploads that nobody wanted.", self._uploads.discarded_total),
            ("peerTransfers", "Segments sent to other servers, whole or the rest.", self._peers.sent.transfers),
            ("peerTransferBytes", "Bytes of segments sent to other servers.", self._peers.sent.bytes),
            ("peerTransfersBroken", "Transfers that a receiver left or stalled.", self._peers.sent.broken),
        ):
            counter = CounterMetricFamily(_PREFIX + name, help_text)
            counter.add_metric([], value)
            yield counter

    def _store(self) -> Iterator[Metric]:
        down = self._uploads.breaker.state is not BreakerState.CLOSED
        for name, help_text, value in (
            ("segmentUploadBacklog", "Segments that this server committed without the store.", self._uploads.backlog),
            ("deepStoreDown", "1: uploads have failed again and again, no commit waits for them.", float(down)),
        ):
            gauge = GaugeMetricFamily(_PREFIX + name, help_text)
            gauge.add_metric([], value)
            yield gauge
        failed = CounterMetricFamily(
            f"{_PREFIX}segmentUploadFailures", "Uploads that failed, by cause, all retried.", labels=["cause"]
        )
        for cause, count in sorted(self._uploads.failed.items()):
            failed.add_metric([cause.value], count)
        yield failed

    def _phases(self) -> Metric:
        """Of tables that are here: what is dropped leaves no series behind."""
        times = HistogramMetricFamily(
            f"{_PREFIX}segmentCommitPhaseTimeMs", "Phases of completing a segment on this server.",
            labels=["table", "phase"],
        )  # fmt: skip
        for table in list(self._hosting.tables.values()):
            for phase in Phase:
                buckets, sum_ms = table.timings.histogram(phase)
                times.add_metric([f"{table.name}_REALTIME", phase.value], buckets, sum_ms)
        return times

    def _fetches(self) -> Iterator[Metric]:
        totals, label = self._fetcher.totals, ["source"]
        fetched = CounterMetricFamily(f"{_PREFIX}segmentDownloads", "Segments fetched, by source.", labels=label)
        received = CounterMetricFamily(f"{_PREFIX}segmentDownloadBytes", "Bytes fetched, by source.", labels=label)
        failed = CounterMetricFamily(
            f"{_PREFIX}segmentDownloadFailures", "Sources that did not give a segment, by cause.",
            labels=["source", "cause"],
        )  # fmt: skip
        for source, count in sorted(totals.segments.items()):
            fetched.add_metric([source.value], count)
        for source, count in sorted(totals.bytes.items()):
            received.add_metric([source.value], count)
        for (source, cause), count in sorted(totals.failures.items()):
            failed.add_metric([source.value, cause.value], count)
        refused = CounterMetricFamily(
            f"{_PREFIX}peerTransfersRefused", "Requests for segments that were refused, by cause.", labels=["cause"]
        )
        for cause, count in sorted(self._peers.sent.refused.items()):
            refused.add_metric([cause.value], count)
        yield from (fetched, received, failed, refused)

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
