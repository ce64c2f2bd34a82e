# SPDX-License-Identifier: Apache-2.0
"""Metrics of versions on their way between servers, store and log, and of compaction (upsert tables)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from cremant.server.compacting import Compactor
from cremant.server.rest_versions import VersionsService
from cremant.server.validity import VersionsKeeper
from cremant.server.versions_upload import VersionsUploads

_PREFIX = "pinot_server_"


class VersionsMetrics(Collector):
    def __init__(
        self, registry: CollectorRegistry, keeper: VersionsKeeper, uploads: VersionsUploads, service: VersionsService,
        compactor: Compactor,
    ) -> None:  # fmt: skip
        self._keeper = keeper
        self._uploads = uploads
        self._service = service
        self._compactor = compactor
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        for name, help_text, counts in (
            ("upsertVersionsBrought", "Segments whose versions were fetched or replayed.", self._keeper.brought),
            ("upsertVersionsFailures", "Sources that did not give a segment's versions.", self._keeper.failures),
        ):
            by_source = CounterMetricFamily(_PREFIX + name, help_text, labels=["source"])
            for source, count in sorted(counts.items()):
                by_source.add_metric([source.value], count)
            yield by_source
        sent = self._service.sent
        for name, help_text, value in (
            ("upsertVersionsUploaded", "Versions of segments that landed in the store.", self._uploads.landed_total),
            ("upsertVersionsUploadFailures", "Rounds of them that failed, retried.", self._uploads.failures_total),
            ("upsertVersionsSent", "Snapshots and updates sent to other servers.", sent.transfers),
            ("upsertVersionsSentBytes", "Bytes of them.", sent.bytes),
            ("upsertSegmentsCompacted", "Segments whose replaced rows went.", self._compactor.segments_total),
            ("upsertRowsRemoved", "Rows of them that went.", self._compactor.rows_total),
            ("upsertCompactionFailures", "Steps of it that failed, retried.", self._compactor.failures_total),
        ):
            counter = CounterMetricFamily(_PREFIX + name, help_text)
            counter.add_metric([], value)
            yield counter
