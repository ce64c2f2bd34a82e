# SPDX-License-Identifier: Apache-2.0
"""Metrics of what a server consumes, per partition, under Pinot's stems. They are read from the state at scrape time:
none is stale, and those of a partition that is not here any more are gone. Servers ask no stream: its end is as the
newest closed epoch or heartbeat says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cremant.model.cluster import BLOCKED
from cremant.server.partition import Partition, PartitionState
from cremant.server.table import HostedTable

_PREFIX = "pinot_server_"
_CONSUMING = frozenset({PartitionState.CATCHING_UP.value, PartitionState.CONSUMING.value})


def _delay_ms(partition: Partition, now_ms: float) -> float | None:
    fresh_ms = partition.visible.freshness_ms
    return max(0.0, now_ms - fresh_ms) if fresh_ms is not None else None


def _offset_lag(partition: Partition, now_ms: float) -> float | None:
    end = partition.marks.stream_end
    return max(0, end - partition.visible.next_offset) if end is not None else None


def _log_silent_ms(partition: Partition, now_ms: float) -> float | None:
    read_ms = partition.catching_up.read_at_ms
    return max(0.0, now_ms - read_ms) if read_ms is not None else None


#: Name, help, value of a partition at a wall time in ms (None: not known, and not told).
_GAUGES: tuple[tuple[str, str, Callable[[Partition, float], float | None]], ...] = (
    ("realtimeIngestionDelayMs", "Now minus what is proven to be visible.", _delay_ms),
    ("realtimeIngestionDelayReportingStatus", "1: the delay is known.",
     lambda partition, now_ms: float(partition.visible.freshness_ms is not None)),
    ("realtimeIngestionOffsetLag", "Messages of the stream that are not visible yet.", _offset_lag),
    ("realtimeIngestionUpstreamOffset", "End of the stream, as last told by its pipeline.",
     lambda partition, now_ms: partition.marks.stream_end),
    ("realtimeIngestionConsumingOffset", "The next offset of the stream that is not visible yet.",
     lambda partition, now_ms: partition.visible.next_offset),
    ("highestStreamOffsetConsumed", "The last offset of the stream that is visible.",
     lambda partition, now_ms: partition.visible.next_offset - 1),
    ("llcPartitionConsuming", "1: rows are taken as they come.",
     lambda partition, now_ms: float(partition.state_name in _CONSUMING)),
    ("realtimePartitionCatchingUp", "1: it started, and is not asked yet.",
     lambda partition, now_ms: float(partition.behind and partition.state is not PartitionState.STOPPED)),
    ("epochLogSilentMs", "Since when the epoch log has not answered.", _log_silent_ms),
    ("realtimeTailRows", "Rows not sealed yet.", lambda partition, now_ms: partition.tail.snapshot.rows),
    ("realtimeTailHeapBytes", "Heap that tails take.", lambda partition, now_ms: partition.tail.heap_bytes),
    ("realtimeTailDiskBytes", "Disk that spilled tails take.", lambda partition, now_ms: partition.tail.disk_bytes),
    ("realtimePartitionStopped", "1: stopped by a broken rule.",
     lambda partition, now_ms: float(partition.state is PartitionState.STOPPED)),
)  # fmt: skip

_COUNTERS: tuple[tuple[str, str, Callable[[Partition], float]], ...] = (
    ("realtimeRowsConsumed", "Rows taken since the process reads the partition.", lambda one: one.marks.rows),
    ("invalidRealtimeRowsDropped", "Messages that errors kept from becoming rows.", lambda one: one.marks.rejected),
    ("realtimeRowsFiltered", "Messages that the table's filter left out.", lambda one: one.marks.filtered),
)


class PartitionMetrics(Collector):
    """`tables` is shared with the host that reconciles them."""

    def __init__(self, registry: CollectorRegistry, tables: Mapping[str, HostedTable]) -> None:
        self._tables = tables
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        labels, now_ms = ["table", "partition"], time.time() * 1000
        found = [
            ((f"{table.name}_REALTIME", str(number)), partition)
            for table in list(self._tables.values())
            for number, partition in sorted(table.partitions.items())
        ]
        for name, text, value_of in _GAUGES:
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=labels)
            for key, partition in found:
                if (value := value_of(partition, now_ms)) is not None:
                    gauge.add_metric(key, value)
            yield gauge
        for name, text, count_of in _COUNTERS:
            counter = CounterMetricFamily(_PREFIX + name, text, labels=labels)
            for key, partition in found:
                counter.add_metric(key, count_of(partition))
            yield counter
        blocked = GaugeMetricFamily(
            f"{_PREFIX}realtimePartitionBlocked", "1: takes no rows until there is room for them.",
            labels=[*labels, "state"],
        )  # fmt: skip
        for key, partition in found:
            for state in sorted(BLOCKED):
                blocked.add_metric([*key, state], float(partition.state_name == state))
        yield blocked
