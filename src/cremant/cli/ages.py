# SPDX-License-Identifier: Apache-2.0
"""Times for people: how long ago, how fresh."""

from __future__ import annotations

from typing import Any


def age(ms: int) -> str:
    seconds = ms // 1000
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def fresh_text(answer: dict[str, Any]) -> str:
    """Of an answer to a query, or of a table: `fresh as of 0.4 s ago (4/4 partitions)`."""
    lag_ms, expected = answer.get("freshnessLagMs"), answer.get("numPartitionsExpected", 0)
    of = f"({answer.get('numPartitionsReporting', 0)}/{expected} partitions)"
    return f"freshness unknown {of}" if lag_ms is None else f"fresh as of {ago(lag_ms)} ago {of}"


def ago(ms: int | None) -> str:
    if ms is None:
        return "-"
    if ms < 10_000:
        return f"{ms / 1000:.1f} s" if ms >= 100 or ms == 0 else f"{ms / 1000:.2f} s"
    return age(ms)
