# SPDX-License-Identifier: Apache-2.0
"""Figures of Apache Pinot 1.5.1 with Kafka 4.1.1 on a machine of two cores, taken by these benchmarks' recipes, to
stand beside ours. Ranges go from a quiet machine to a busy one; queries without and with indexes. Compare figures of
the same machine and hour where it matters."""

from __future__ import annotations

#: benchmark -> metric -> what Pinot does, as text.
FIGURES: dict[str, dict[str, str]] = {
    "freshness": {
        "lag_p50": "18 ms",
        "lag_p99": "528–1,622 ms",
        "lag_newest_p99": "211–1,055 ms",
    },
    "ingest": {"rows_per_s": "99,000–216,000"},
    "query": {
        "filter_sum": "29 / 6 ms",
        "range_sum": "13 / 6 ms",
        "group_low": "57–108 / 54 ms",
        "group_two": "92–179 / 87 ms",
        "group_high": "9,700 ms exact (1,800 ms and wrong by default)",
        "time_bucket": "162–265 ms",
        "point": "11.6 / 5.3 ms",
        "top_n": "227–257 ms",
        "distinct_low": "41 ms",
        "distinct_high": "491–796 ms",
        "qps4_point": "101 / 450",
        "qps4_group_low": "23",
    },
}
