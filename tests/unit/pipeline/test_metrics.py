# SPDX-License-Identifier: Apache-2.0
"""What `/metrics` of a pipeline says of tables and of the partitions of their streams."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from cremant.model.cluster import PipelineReport, StreamProgress
from cremant.pipeline.metrics import PipelineMetrics
from cremant.pipeline.run import Totals


@dataclass
class Table:
    name: str
    partitions: tuple[StreamProgress, ...] = ()
    totals: Totals = field(default_factory=Totals)

    def report(self) -> PipelineReport:
        return PipelineReport(
            table=self.name, incarnation="i", state="running", epoch=7, lag_rows=None, partitions=self.partitions,
            at_ms=10_000, rows_total=12,
        )  # fmt: skip


def test_tables_and_their_partitions() -> None:
    busy = StreamProgress(
        partition=0, stream_end=50, read_at_ms=9_900, planned=40, closed=30, max_ingestion_ms=9_500, caught_up_at_ms=200
    )
    ahead = StreamProgress(partition=1, stream_end=5, read_at_ms=9_700, closed=5, caught_up_at_ms=10_040)
    fresh, unknown = Table("fresh", (busy, ahead)), Table("unknown", (StreamProgress(partition=0),))
    for table, cause in ((fresh, "malformedJson"), (unknown, "malformedJson")):
        table.totals.rejected[cause] = 3
        table.totals.phases_ms = {"addBatch": 90}
    tables = [fresh, unknown]
    registry = CollectorRegistry()
    registry.register(PipelineMetrics(lambda: tables))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"cremant_pipeline_{name}", labels)

    assert (value("epoch", table="fresh"), value("rows_total", table="unknown")) == (7, 12)
    assert value("lag_rows", table="fresh") is None, "nobody has looked yet"
    assert (value("stream_silent_ms", table="fresh"), value("stream_silent_ms", table="unknown")) == (300, None)
    said = {
        (name, partition): value(f"partition_{name}", table="fresh", partition=partition)
        for name in ("lag_rows", "delay_ms", "caught_up_age_ms")
        for partition in "01"
    }
    assert said == {
        ("lag_rows", "0"): 20, ("delay_ms", "0"): 500, ("caught_up_age_ms", "0"): 9_800,
        ("lag_rows", "1"): 0, ("delay_ms", "1"): 0, ("caught_up_age_ms", "1"): 0,
    }, "a clock ahead is no negative delay"  # fmt: skip
    assert value("partition_lag_rows", table="unknown", partition="0") is None
    assert value("rejected", table="unknown", cause="malformedJson") == 3, "one of each table"
    assert value("phase_ms", table="fresh", phase="addBatch") == 90
    tables.remove(fresh)
    assert value("epoch", table="fresh") is None
    assert value("partition_lag_rows", table="fresh", partition="0") is None
