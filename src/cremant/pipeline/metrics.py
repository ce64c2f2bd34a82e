# SPDX-License-Identifier: Apache-2.0
"""Metrics of a pipeline's tables, and of the partitions of their streams. They are read from the state at scrape time:
none is stale, those of a table that is gone are gone, and the stream is asked nothing for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cremant.model.cluster import PipelineReport, StreamProgress
from cremant.pipeline.run import Totals

_PREFIX = "cremant_pipeline_"


class Reported(Protocol):
    """What is asked of a table (`query.TableQuery`)."""

    def report(self) -> PipelineReport: ...

    @property
    def totals(self) -> Totals: ...


def _silent_ms(report: PipelineReport) -> int | None:
    reads = [one.read_at_ms for one in report.partitions if one.read_at_ms is not None]
    return max(0, report.at_ms - min(reads)) if reads else None


def _lag_rows(one: StreamProgress, at_ms: int) -> int | None:
    return max(0, one.stream_end - one.closed) if one.stream_end is not None and one.closed is not None else None


def _age_ms(moment_ms: int | None, at_ms: int) -> int | None:
    return max(0, at_ms - moment_ms) if moment_ms is not None else None


def _delay_ms(one: StreamProgress, at_ms: int) -> int | None:
    known = [moment_ms for moment_ms in (one.max_ingestion_ms, one.caught_up_at_ms) if moment_ms is not None]
    return _age_ms(max(known, default=None), at_ms)


#: Name, help, value (None: not known, and not told).
_OF_TABLES: tuple[tuple[str, str, Callable[[PipelineReport], float | None]], ...] = (
    ("epoch", "Last closed epoch.", lambda report: report.epoch),
    ("rows_total", "Rows appended since this process began.", lambda report: report.rows_total),
    ("rejected_total", "Messages that did not become rows.", lambda report: report.rejected_total),
    ("filtered_total", "Rows that filter or function dropped.", lambda report: report.filtered_total),
    ("lag_rows", "Messages of the stream that are not in a closed epoch.", lambda report: report.lag_rows),
    ("batch_ms", "Length of the last batch.", lambda report: report.batch_ms),
    ("restarts", "How often the query was started again after a failure.", lambda report: report.restarts),
    ("stream_silent_ms", "Since when the stream was not read, or did not answer.", _silent_ms),
)
#: The same of a partition, by the clock of the report.
_OF_PARTITIONS: tuple[tuple[str, str, Callable[[StreamProgress, int], float | None]], ...] = (
    ("partition_lag_rows", "Messages of the partition that are not in a closed epoch.", _lag_rows),
    ("partition_delay_ms", "Now minus what closed epochs and heartbeats prove to be in.", _delay_ms),
    ("partition_caught_up_age_ms", "Since it was proven that nothing of the partition is missing.",
     lambda one, at_ms: _age_ms(one.caught_up_at_ms, at_ms)),
)  # fmt: skip


class PipelineMetrics(Collector):
    """`queries`: those that there are now."""

    def __init__(self, queries: Callable[[], Sequence[Reported]]) -> None:
        self._queries = queries

    def collect(self) -> Iterator[Metric]:
        found = [(query.report(), query.totals) for query in self._queries()]
        for name, text, value_of in _OF_TABLES:
            family = GaugeMetricFamily(_PREFIX + name, text, labels=["table"])
            for report, _ in found:
                if (value := value_of(report)) is not None:
                    family.add_metric([report.table], value)
            yield family
        for name, text, value_at in _OF_PARTITIONS:
            family = GaugeMetricFamily(_PREFIX + name, text, labels=["table", "partition"])
            for report, _ in found:
                for one in report.partitions:
                    if (value := value_at(one, report.at_ms)) is not None:
                        family.add_metric([report.table, str(one.partition)], value)
            yield family
        causes = GaugeMetricFamily(f"{_PREFIX}rejected", "Rejected by cause.", labels=["table", "cause"])
        phases = GaugeMetricFamily(
            f"{_PREFIX}phase_ms", "Where a batch of lately spent its time, by Spark's names.", labels=["table", "phase"]
        )
        for report, totals in found:
            for cause, count in sorted(totals.rejected.items()):
                causes.add_metric([report.table, cause], count)
            for phase, spent_ms in sorted(totals.phases_ms.items()):
                phases.add_metric([report.table, phase], spent_ms)
        yield from (causes, phases)
