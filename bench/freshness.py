# SPDX-License-Identifier: Apache-2.0
"""How old is the newest row that an answer contains, while rows arrive at a steady rate, and does the answer know?

A producer stamps each row with the time just before it is appended; a client asks for the newest stamp of every
partition and compares with the clock when the answer is in its hands. `lag` is of the worst partition of each sample,
`lag_newest` of the best. Query time is part of the lag: it is part of what a user waits.

Parts, on one cluster (`--only PART`):

    steady   10,000 rows/s, no segment ends: what bench/pinot.py measured of Pinot
    rates    1,000, 10,000 and 50,000 rows/s, a segment of some partition commits about every other second; what the
             answers report of their freshness beside the truth; of 10,000 rows/s where the milliseconds go
    cost     CPU that a query spends on its freshness

The truth of an answer is the latest time of which it could say that every row before is in it: when the oldest row that
it misses arrived, or when it was asked for. `report_error` is the truth minus what it reports; `optimistic` counts
answers that report a later time, which none may.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench.accounting import freshness_cost_us
from bench.cluster import ClusterError, Rest
from bench.context import Context, Driven, Stream, percentile, table_config
from bench.epochs import EpochTrace

PARTITIONS = 4
RATE_PER_S = 10_000
RATES_PER_S = (1_000, 10_000, 50_000)
SAMPLE_EVERY_S = 0.1
#: With commits: so long a partition's segment is open.
_SEGMENT_S = 8
_WITHOUT_END = 5_000_000
_BURSTS_PER_S = 200
#: A partition without a row in so long is at least that far behind.
_LOOK_BACK_MS = 10_000

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
Figures = dict[str, Any]


class Load(NamedTuple):
    rate_per_s: int = RATE_PER_S
    flush_rows: int = _WITHOUT_END
    warm_s: float = 20
    measure_s: float = 60


def run(context: Context) -> tuple[Figures, Figures]:
    chosen = [context.only] if context.only else ["steady", "rates", "cost"]
    if unknown := set(chosen) - {"steady", "rates", "cost"}:
        raise ClusterError(f"freshness has no part {unknown.pop()!r}; there are steady, rates, cost")
    parameters: Figures = {"partitions": PARTITIONS, "parts": chosen}
    metrics: Figures = {}
    if chosen != ["cost"]:
        with context.cluster() as driven:
            if "steady" in chosen:
                parameters, metrics = measure(context, driven, "freshness", SCHEMA, _row)
            if "rates" in chosen:
                metrics |= _rates(context, driven)
    if "cost" in chosen:
        metrics |= freshness_cost_us()
    return parameters, metrics


def measure(
    context: Context, driven: Driven, table: str, schema: dict[str, Any], row: Row, more: dict[str, Any] | None = None
) -> tuple[Figures, Figures]:
    """Of a table of its own. `row` makes one out of partition, number and time stamp; it has columns `part` and `ts`.
    `more`: further keys of the table's config."""
    load = Load(warm_s=10, measure_s=20) if context.quick else Load()
    with _Measured(context, driven, table, schema, row, load, more) as measured:
        samples = measured.sample()
    parameters = {
        "rate_per_s": load.rate_per_s, "partitions": PARTITIONS, "samples": len(samples.worst_ms),
        "measure_s": load.measure_s,
    }  # fmt: skip
    return parameters, {
        "lag_p50": percentile(samples.worst_ms, 0.5),
        "lag_p90": percentile(samples.worst_ms, 0.9),
        "lag_p99": percentile(samples.worst_ms, 0.99),
        "lag_max": max(samples.worst_ms),
        "lag_newest_p50": percentile(samples.newest_ms, 0.5),
        "lag_newest_p99": percentile(samples.newest_ms, 0.99),
        "query_p50": percentile(samples.query_ms, 0.5),
        "rate_per_s": samples.rate_per_s,
        "lane": "spark",
    } | _truth("", samples)  # fmt: skip


def _rates(context: Context, driven: Driven) -> Figures:
    warm_s, measure_s = (8, 12) if context.quick else (10, 40)
    found: Figures = {}
    for rate in RATES_PER_S:
        name = f"{rate // 1000}k"
        table = f"freshness_{name}"
        load = Load(rate, rate // PARTITIONS * _SEGMENT_S, warm_s, measure_s)
        with (
            _Measured(context, driven, table, {**SCHEMA, "schemaName": table}, _row, load) as measured,
            ExitStack() as s,
        ):
            trace = None
            if rate == RATE_PER_S and driven.local is not None and context.log != "kafka":
                trace = s.enter_context(EpochTrace(driven.local, table, PARTITIONS))
            before = _sealed(driven.rest, table)
            samples = measured.sample(trace.clear if trace else None)
            found |= {
                f"{name}_lag_p50": percentile(samples.worst_ms, 0.5),
                f"{name}_lag_p90": percentile(samples.worst_ms, 0.9),
                f"{name}_lag_p99": percentile(samples.worst_ms, 0.99),
                f"{name}_lag_max": max(samples.worst_ms),
                f"{name}_query_p50": percentile(samples.query_ms, 0.5),
                f"{name}_query_p99": percentile(samples.query_ms, 0.99),
                f"{name}_segments": _sealed(driven.rest, table) - before,
                f"{name}_rate_per_s": samples.rate_per_s,
            } | _truth(f"{name}_", samples)  # fmt: skip
            if trace is not None:
                found |= trace.figures()
        driven.rest.call("DELETE", f"/tables/{table}")
        context.show(", ".join(f"{key} {found[key]:,.0f}" for key in found if key.startswith(f"{name}_")))
    return found


def _truth(prefix: str, samples: Samples) -> Figures:
    if not samples.error_ms:
        return {}
    return {
        f"{prefix}report_error_p50": percentile(samples.error_ms, 0.5),
        f"{prefix}report_error_p99": percentile(samples.error_ms, 0.99),
        f"{prefix}optimistic": samples.optimistic,
    }


def _sealed(rest: Rest, table: str) -> int:
    segments = rest.call("GET", "/internal/v1/view")["tables"][table]["segments"]
    return sum(segment["status"] == "DONE" for segment in segments)


@dataclass
class Samples:
    worst_ms: list[float] = field(default_factory=list)
    newest_ms: list[float] = field(default_factory=list)
    query_ms: list[float] = field(default_factory=list)
    #: The truth minus what was reported, of answers that reported something, and how many of them were optimistic.
    error_ms: list[float] = field(default_factory=list)
    optimistic: int = 0
    rate_per_s: float = 0.0


class _Measured:
    """A table and its producer, warm; a context manager."""

    def __init__(
        self, context: Context, driven: Driven, table: str, schema: dict[str, Any], row: Row, load: Load,
        more: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._context, self._driven, self._table, self._load = context, driven, table, load
        topic = f"{table}-{time.time_ns() // 1_000_000}"
        driven.stream.create(topic, PARTITIONS)
        config = table_config(table, driven.stream.properties(topic), flush_rows=load.flush_rows) | (more or {})
        context.create_table(driven, schema, config)
        #: Kafka has a message some time after it was handed over.
        self._producer = Producer(driven.stream, topic, row, load.rate_per_s, at_once=context.log != "kafka")

    def __enter__(self) -> _Measured:
        self._producer.start()
        try:
            sql = f"SELECT COUNT(DISTINCT part) FROM {self._table}"
            self._driven.rest.wait_for(sql, [[PARTITIONS]], deadline_s=300)
            self._context.show(f"{self._table}: warming up {self._load.warm_s} s at {self._load.rate_per_s:,} rows/s")
            time.sleep(self._load.warm_s)
        except BaseException:
            self._producer.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._producer.stop()

    def sample(self, begin: Callable[[], None] | None = None) -> Samples:
        """Asks for `measure_s`. `begin` is called first."""
        self._context.show(f"{self._table}: measuring {self._load.measure_s} s")
        if begin is not None:
            begin()
        samples = Samples()
        started, sent_before = time.monotonic(), self._producer.sent
        while time.monotonic() - started < self._load.measure_s:
            asked = time.monotonic()
            self._one(samples)
            time.sleep(max(0.0, SAMPLE_EVERY_S - (time.monotonic() - asked)))
        samples.rate_per_s = (self._producer.sent - sent_before) / (time.monotonic() - started)
        return samples

    def _one(self, samples: Samples) -> None:
        asked_ms = time.time() * 1000
        since = int(asked_ms) - _LOOK_BACK_MS
        sql = f"SELECT part, MAX(ts) FROM {self._table} WHERE ts > {since} GROUP BY part LIMIT 100"
        answer = self._driven.rest.query(sql)
        now_ms = time.time() * 1000
        if answer.get("exceptions"):
            raise ClusterError(f"{sql}: {answer['exceptions']}")
        newest = {int(row[0]): float(row[1]) for row in answer["resultTable"]["rows"]}
        samples.query_ms.append(now_ms - asked_ms)
        lags = [now_ms - stamp for stamp in newest.values()]
        whole = len(lags) == PARTITIONS
        samples.worst_ms.append(max(lags) if whole else float(_LOOK_BACK_MS))
        samples.newest_ms.append(min(lags, default=float(_LOOK_BACK_MS)))
        if whole and (reported_ms := answer.get("minConsumingFreshnessTimeMs")):
            truth_ms, at_most_ms = self._producer.truth(newest, asked_ms, now_ms)
            samples.error_ms.append(max(0.0, truth_ms - reported_ms))
            samples.optimistic += reported_ms > at_most_ms


class Producer:
    """A thread that appends a few rows to each partition, a couple of hundred times a second, and catches up if it was
    late. `at_once`: an append that returned is in the log."""

    def __init__(self, stream: Stream, topic: str, row: Row, rate_per_s: int, *, at_once: bool) -> None:
        self.sent = 0
        self._stream, self._topic, self._row = stream, topic, row
        self._at_once = at_once
        self._share = max(1, rate_per_s // _BURSTS_PER_S // PARTITIONS)
        self._bursts_per_s = rate_per_s / PARTITIONS / self._share
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        #: By partition, of each burst: the stamp of its rows, and when it was in the log (ms).
        self._stamps: list[list[float]] = [[] for _ in range(PARTITIONS)]
        self._taken: list[list[float]] = [[] for _ in range(PARTITIONS)]

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)

    def truth(self, newest: dict[int, float], asked_ms: float, now_ms: float) -> tuple[float, float]:
        """The latest time as of which an answer is complete whose newest row of each partition has this stamp; and the
        latest it may say, given that a row arrived somewhere between its stamp and the end of its append."""
        truth_ms, at_most_ms = asked_ms, now_ms
        for partition, stamp in newest.items():
            stamps, taken = self._stamps[partition], self._taken[partition]
            missing = bisect_right(stamps, stamp)
            if missing < len(stamps):
                truth_ms = min(truth_ms, stamps[missing])
                if self._at_once and missing < len(taken):
                    at_most_ms = min(at_most_ms, taken[missing])
        return truth_ms, at_most_ms

    def _run(self) -> None:
        started = time.monotonic()
        burst = 0
        while not self._stop.is_set():
            burst += 1
            for partition in range(PARTITIONS):
                now_ms = time.time_ns() // 1_000_000
                rows = [self._row(partition, self.sent + n, now_ms) for n in range(self._share)]
                self._stamps[partition].append(now_ms)
                self._stream.append(self._topic, partition, rows)
                self._taken[partition].append(time.time() * 1000)
                self.sent += self._share
            time.sleep(max(0.0, started + burst / self._bursts_per_s - time.monotonic()))


def _row(partition: int, number: int, now_ms: int) -> bytes:
    return (
        b'{"part":%d,"device":"device-%d","note":"a reading of the usual length, %d","reading":%.3f,"ts":%d}'
        % (partition, number % 5_000, number, number % 1_000 / 7, now_ms)
    )  # fmt: skip
