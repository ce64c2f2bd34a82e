# SPDX-License-Identifier: Apache-2.0
"""How long do queries take, over data that has been sealed?

Ten shapes, each asked several times with changing constants, in rounds (so that a noisy moment hits all of them);
medians at the client. Then four clients at once.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from bench.cluster import ClusterError, Rest
from bench.context import Context, table_config
from bench.dataset import SCHEMA, START_MS, fill, users_of

PARTITIONS = 4
SEGMENTS_PER_PARTITION = 5

Shape = Callable[[random.Random, int], str]

SHAPES: dict[str, Shape] = {
    "filter_sum": lambda dice, rows: (
        f"SELECT SUM(amount) FROM bench WHERE country = 'country-{dice.randrange(20):02d}'"
    ),
    "range_sum": lambda dice, rows: "SELECT SUM(amount) FROM bench WHERE quantity BETWEEN {0} AND {0} + 9".format(
        dice.randrange(90)
    ),
    "group_low": lambda dice, rows: (
        "SELECT country, COUNT(*), SUM(amount) FROM bench GROUP BY country ORDER BY country LIMIT 100"
    ),
    "group_two": lambda dice, rows: (
        "SELECT country, city, COUNT(*), SUM(amount) FROM bench GROUP BY country, city "
        "ORDER BY SUM(amount) DESC LIMIT 10"
    ),
    "group_high": lambda dice, rows: (
        "SELECT userId, SUM(amount) FROM bench GROUP BY userId ORDER BY SUM(amount) DESC LIMIT 10"
    ),
    "time_bucket": lambda dice, rows: (
        "SELECT DATETRUNC('hour', ts) AS h, COUNT(*), SUM(amount) FROM bench "
        "GROUP BY DATETRUNC('hour', ts) ORDER BY h LIMIT 10000"
    ),
    "point": lambda dice, rows: f"SELECT id, country, amount, ts FROM bench WHERE id = {dice.randrange(rows)}",
    "top_n": lambda dice, rows: "SELECT id, amount FROM bench ORDER BY amount DESC, id LIMIT 10",
    "distinct_low": lambda dice, rows: "SELECT DISTINCTCOUNT(city) FROM bench",
    "distinct_high": lambda dice, rows: "SELECT DISTINCTCOUNT(userId) FROM bench",
}


def run(context: Context) -> tuple[dict[str, Any], dict[str, Any]]:
    rows, rounds, load_s = (1_000_000, 7, 4) if context.quick else (10_000_000, 15, 15)
    topic = f"bench-{time.time_ns() // 1_000_000}"
    with context.cluster() as driven:
        driven.stream.create(topic, PARTITIONS)
        flush_rows = rows // PARTITIONS // SEGMENTS_PER_PARTITION
        context.create_table(
            driven, SCHEMA, table_config("bench", driven.stream.properties(topic), flush_rows=flush_rows)
        )
        context.show(f"filling the topic with {rows:,} rows")
        fill(driven.stream, topic, PARTITIONS, rows)
        took = driven.rest.wait_for("SELECT COUNT(*) FROM bench", [[rows]], deadline_s=900)
        context.show(f"all rows visible {took:.1f} s after the last was written; sealing")
        sealed = _wait_until_sealed(driven.rest, rows)
        metrics: dict[str, Any] = {}
        context.show(f"{sealed:,} of {rows:,} rows in sealed segments; {rounds} rounds")
        times = _measure(driven.rest, rows, rounds)
        for name in SHAPES:
            metrics[name] = median(times[name])
            context.show(f"{name}: median {metrics[name]:.1f} ms, worst {max(times[name]):.1f} ms")
        for name in ("point", "group_low"):
            metrics[f"qps4_{name}"] = _load(driven.rest, SHAPES[name], rows, load_s)
            context.show(f"four clients, {name}: {metrics[f'qps4_{name}']:.1f} queries/s")
    return {
        "rows": rows,
        "sealed_rows": sealed,
        "partitions": PARTITIONS,
        "rounds": rounds,
        "users": users_of(rows),
        "start_ms": START_MS,
    }, metrics


def _measure(rest: Rest, rows: int, rounds: int) -> dict[str, list[float]]:
    dice = random.Random(11)
    times: dict[str, list[float]] = {name: [] for name in SHAPES}
    for number in range(rounds + 1):
        for name, shape in SHAPES.items():
            sql = shape(dice, rows)
            started = time.perf_counter()
            rest.rows(sql)
            if number:  # the first round warms up
                times[name].append((time.perf_counter() - started) * 1000)
    return times


def _load(rest: Rest, shape: Shape, rows: int, load_s: float) -> float:
    until = time.monotonic() + load_s
    counts = [0] * 4

    def client(number: int) -> None:
        own = Rest(rest.controller, rest.broker)
        dice = random.Random(number)
        while time.monotonic() < until:
            own.rows(shape(dice, rows))
            counts[number] += 1
        own.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.monotonic() - started)


def _wait_until_sealed(rest: Rest, rows: int, deadline_s: float = 120.0) -> int:
    """Waits until the number of documents in sealed segments has not changed for ten seconds."""
    started = time.monotonic()
    last, changed = -1, started
    while time.monotonic() - changed < 10 and time.monotonic() - started < deadline_s:
        try:
            sealed = _sealed_rows(rest)
        except (ClusterError, KeyError, TypeError, json.JSONDecodeError):
            return -1  # another system than ours: unknown
        if sealed != last:
            last, changed = sealed, time.monotonic()
        if sealed >= rows:
            break
        time.sleep(0.5)
    return last


def _sealed_rows(rest: Rest) -> int:
    tables = rest.call("GET", "/internal/v1/view")["tables"]
    return sum(segment["rows"] for segment in tables["bench"]["segments"])
