# SPDX-License-Identifier: Apache-2.0
"""Rows for `ingest` and `query`: wide enough to be honest, written fast, the same for everyone.

Row n: id = n; ts grows 10 ms per row; country 20 values, city 1,000, device 5, skewed; userId one per five rows, in a
scattered order; quantity 0..99; amount with two decimals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.context import Stream

START_MS = 1_760_000_000_000
BATCH = 10_000

SCHEMA: dict[str, Any] = {
    "schemaName": "bench",
    "dimensionFieldSpecs": [
        {"name": "id", "dataType": "LONG"},
        {"name": "country", "dataType": "STRING"},
        {"name": "city", "dataType": "STRING"},
        {"name": "device", "dataType": "STRING"},
        {"name": "userId", "dataType": "LONG"},
    ],
    "metricFieldSpecs": [
        {"name": "quantity", "dataType": "INT"},
        {"name": "amount", "dataType": "DOUBLE"},
    ],
    "dateTimeFieldSpecs": [
        {"name": "ts", "dataType": "LONG", "format": "1:MILLISECONDS:EPOCH", "granularity": "1:MILLISECONDS"}
    ],
}


def users_of(rows: int) -> int:
    return max(1, rows // 5)


def fill(stream: Stream, topic: str, partitions: int, rows: int) -> None:
    """Batches of consecutive rows, partitions in turns."""
    dice = np.random.default_rng(7)
    for batch, first in enumerate(range(0, rows, BATCH)):
        values = rows_of(first, min(BATCH, rows - first), users=users_of(rows), dice=dice)
        stream.append(topic, batch % partitions, values)
    stream.flush()


def rows_of(
    first: int, size: int, *, users: int = 100_000, dice: np.random.Generator | None = None,
    ids: Sequence[int] | None = None,
) -> list[bytes]:  # fmt: skip
    """Rows `first` and following as JSON; what is random comes from `dice`, or from the number of the first row.
    `ids`: instead of their numbers."""
    dice = dice or np.random.default_rng(first)
    country = (dice.random(size) ** 2 * 20).astype(int).tolist()
    city = (dice.random(size) ** 2 * 1_000).astype(int).tolist()
    user = ((np.arange(first, first + size) * 2_654_435_761) % users).tolist()
    cents = dice.integers(1, 1_000_000, size).tolist()
    return [
        b'{"id":%d,"country":"country-%02d","city":"city-%03d","device":"%s","userId":%d,"quantity":%d,'
        b'"amount":%d.%02d,"ts":%d}'
        % (
            n if ids is None else ids[i], country[i], city[i], _DEVICES[n % 7 % 5], user[i], n * 31 % 100,
            cents[i] // 100, cents[i] % 100, START_MS + 10 * n,
        )
        for i, n in enumerate(range(first, first + size))
    ]  # fmt: skip


_DEVICES = (b"phone", b"desktop", b"tablet", b"television", b"watch")
