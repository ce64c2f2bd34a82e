# SPDX-License-Identifier: Apache-2.0
"""How fast does a full topic become queryable?

The topic is filled before the table exists. `rows_per_s` counts from the creation of the table to the first answer that
has every row, start of the Spark query included; `steady_rows_per_s` from the first rows seen on.
"""

from __future__ import annotations

import time
from typing import Any

import httpx

from bench.cluster import ClusterError
from bench.context import Context, cpu_seconds, table_config
from bench.dataset import SCHEMA, fill

PARTITIONS = 4
DEADLINE_S = 600.0


def run(context: Context) -> tuple[dict[str, Any], dict[str, Any]]:
    rows = 1_000_000 if context.quick else 5_000_000
    topic = f"bench-{time.time_ns() // 1_000_000}"
    with context.cluster() as driven:
        driven.stream.create(topic, PARTITIONS)
        context.show(f"filling the topic with {rows:,} rows")
        fill(driven.stream, topic, PARTITIONS, rows)
        context.show("creating the table")
        cpu_before = cpu_seconds(driven.local) if driven.local else 0.0
        started = time.monotonic()
        context.create_table(
            driven, SCHEMA, table_config("bench", driven.stream.properties(topic), flush_rows=1_000_000)
        )
        first: tuple[float, int] | None = None
        seen = 0
        while seen < rows:
            if time.monotonic() - started > DEADLINE_S:
                raise ClusterError(f"{seen:,} of {rows:,} rows after {DEADLINE_S} s")
            time.sleep(0.1)
            try:
                seen = driven.rest.rows("SELECT COUNT(*) FROM bench")[0][0]
            except (httpx.HTTPError, ClusterError):
                continue
            if seen and first is None:
                first = (time.monotonic(), seen)
        ended = time.monotonic()
        cpu = cpu_seconds(driven.local) - cpu_before if driven.local else None
        context.show(f"{seen:,} rows after {ended - started:.1f} s")
    assert first is not None
    metrics: dict[str, Any] = {
        "rows_per_s": rows / (ended - started),
        "first_rows_s": first[0] - started,
        "steady_rows_per_s": (rows - first[1]) / max(ended - first[0], 0.001),
    }
    if cpu is not None:
        metrics["cpu_s_per_million_rows"] = cpu / rows * 1_000_000
    return {"rows": rows, "partitions": PARTITIONS}, metrics
