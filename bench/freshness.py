# SPDX-License-Identifier: Apache-2.0
"""How old is the newest row that an answer contains, while rows arrive at a steady rate?

A producer stamps each row with the time just before it is appended; a client asks for the newest stamp of every
partition and compares with the clock when the answer is in its hands. `lag` is of the worst partition of each sample,
`lag_newest` of the best. Query time is part of the lag: it is part of what a user waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from bench.context import Context, Driven, Stream, percentile, table_config

PARTITIONS = 4
RATE_PER_S = 10_000
SAMPLE_EVERY_S = 0.1
_BURSTS_PER_S = 200

SCHEMA: dict[str, Any] = {
    "schemaName": "freshness",
    "dimensionFieldSpecs": [
        {"name": "part", "dataType": "INT"},
        {"name": "device", "dataType": "STRING"},
        {"name": "note", "dataType": "STRING"},
    ],
    "metricFieldSpecs": [{"name": "reading", "dataType": "DOUBLE"}],
    "dateTimeFieldSpecs": [
        {"name": "ts", "dataType": "LONG", "format": "1:MILLISECONDS:EPOCH", "granularity": "1:MILLISECONDS"}
    ],
}


Row = Callable[[int, int, int], bytes]


def run(context: Context) -> tuple[dict[str, Any], dict[str, Any]]:
    with context.cluster() as driven:
        return measure(context, driven, "freshness", SCHEMA, _row)


def measure(
    context: Context, driven: Driven, table: str, schema: dict[str, Any], row: Row, more: dict[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a table of its own. `row` makes one out of partition, number and time stamp; it has columns `part` and `ts`.
    `more`: further keys of the table's config."""
    warm_s, measure_s = (10, 20) if context.quick else (20, 60)
    topic = f"{table}-{time.time_ns() // 1_000_000}"
    driven.stream.create(topic, PARTITIONS)
    config = table_config(table, driven.stream.properties(topic)) | (more or {})
    context.create_table(driven, schema, config)
    stop = threading.Event()
    sent = [0]
    producer = threading.Thread(target=_produce, args=(driven.stream, topic, row, stop, sent), daemon=True)
    producer.start()
    driven.rest.wait_for(f"SELECT COUNT(DISTINCT part) FROM {table}", [[PARTITIONS]], deadline_s=300)
    context.show(f"warming up {warm_s} s at {RATE_PER_S} rows/s")
    time.sleep(warm_s)
    context.show(f"measuring {measure_s} s")
    started, sent_before = time.monotonic(), sent[0]
    worst: list[float] = []
    newest: list[float] = []
    query_ms: list[float] = []
    while time.monotonic() - started < measure_s:
        since = int(time.time() * 1000) - 10_000
        asked = time.monotonic()
        rows = driven.rest.rows(f"SELECT part, MAX(ts) FROM {table} WHERE ts > {since} GROUP BY part LIMIT 100")
        query_ms.append((time.monotonic() - asked) * 1000)
        now_ms = time.time() * 1000
        lags = [now_ms - float(row[1]) for row in rows]
        # A partition without a row in the last ten seconds is at least that far behind.
        worst.append(max(lags) if len(lags) == PARTITIONS else 10_000.0)
        newest.append(min(lags, default=10_000.0))
        time.sleep(max(0.0, SAMPLE_EVERY_S - (time.monotonic() - asked)))
    rate = (sent[0] - sent_before) / (time.monotonic() - started)
    stop.set()
    producer.join(10)
    parameters = {"rate_per_s": RATE_PER_S, "partitions": PARTITIONS, "samples": len(worst), "measure_s": measure_s}
    return parameters, {
        "lag_p50": percentile(worst, 0.5),
        "lag_p90": percentile(worst, 0.9),
        "lag_p99": percentile(worst, 0.99),
        "lag_max": max(worst),
        "lag_newest_p50": percentile(newest, 0.5),
        "lag_newest_p99": percentile(newest, 0.99),
        "query_p50": percentile(query_ms, 0.5),
        "rate_per_s": rate,
        "lane": "spark",
    }


def _produce(stream: Stream, topic: str, row: Row, stop: threading.Event, sent: list[int]) -> None:
    """Bursts of a few rows per partition, a couple of hundred times a second; catches up if it was late."""
    share = RATE_PER_S // _BURSTS_PER_S // PARTITIONS
    started = time.monotonic()
    burst = 0
    while not stop.is_set():
        burst += 1
        for partition in range(PARTITIONS):
            now_ms = time.time_ns() // 1_000_000
            stream.append(topic, partition, [row(partition, sent[0] + n, now_ms) for n in range(share)])
            sent[0] += share
        time.sleep(max(0.0, started + burst / _BURSTS_PER_S - time.monotonic()))


def _row(partition: int, number: int, now_ms: int) -> bytes:
    return (
        b'{"part":%d,"device":"device-%d","note":"a reading of the usual length, %d","reading":%.3f,"ts":%d}'
        % (partition, number % 5_000, number, number % 1_000 / 7, now_ms)
    )  # fmt: skip
