# SPDX-License-Identifier: Apache-2.0
"""Sums of columns over rows that are chosen already: one pass over the values, without the engine, on all cores.

A batch is its values times a mask of ones and zeros: 9 ms of CPU over 10 M rows, however many of them match. The rows'
numbers cost more to find than that is (10 ms), unless they are few; and the engine 14, beside a plan and its input.

Rules:

- INT is added as integers, everything else as DOUBLE, as the engine does it. A batch of INTs is exact as DOUBLE, too,
  up to EXACT_ROWS of them.
- NaN and infinities come through a zero: a total that is not finite is made again from the matching rows alone.
- The order of adding is that of the batches: the same question gives the same answer, to the last bit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np
import pyarrow as pa

from cremant.exec.stop import Stop
from cremant.exec.tables import SMALL_ROWS, is_few
from cremant.segment.rows import RowMask

#: A batch, and which of its rows count (None: all).
Part = tuple[pa.RecordBatch, RowMask | None]
#: As many numbers below 2^31 have a sum below 2^53.
EXACT_ROWS = 2**22


def totals(columns: Sequence[str], parts: Sequence[Part], helpers: Executor, stop: Stop) -> list[float | int]:
    """The sum of each column (INT, LONG, FLOAT or DOUBLE, without nulls) over all parts: int of INT, else float.

    `helpers` take work off the calling thread, if they have time. Raises QueryError when it is to stop."""
    found: list[list[float | int]] = [[] for _ in parts]
    left = deque(enumerate(parts))

    def work() -> None:
        batch_of = _Batch(max((batch.num_rows for batch, _ in parts), default=0))
        with np.errstate(all="ignore"):
            while (taken := _next(left)) is not None:
                number, (batch, mask) = taken
                stop.check()
                batch_of.weigh(mask)
                found[number] = [batch_of.total(batch.column(name).to_numpy()) for name in columns]

    helper = helpers.submit(work) if sum(batch.num_rows for batch, _ in parts) >= SMALL_ROWS else None
    try:
        work()
    finally:
        left.clear()
        if helper is not None and not helper.cancel():
            helper.result()
    return [sum(own) for own in zip(*found, strict=True)] if found else [0 for _ in columns]


def _next(left: deque[tuple[int, Part]]) -> tuple[int, Part] | None:
    try:
        return left.popleft()
    except IndexError:
        return None


class _Batch:
    """Space for one batch after the other: new pages for each would cost as much as adding it up."""

    def __init__(self, rows: int) -> None:
        self._weights = np.empty(rows)
        self._values = np.empty(rows)
        self._mask: RowMask | None = None

    def weigh(self, mask: RowMask | None) -> None:
        self._mask = mask
        if mask is not None and not is_few(mask):
            self._weights[: len(mask.flags)] = mask.flags

    def total(self, numbers: np.ndarray) -> float | int:
        kind = np.int64 if numbers.dtype == np.int32 else np.float64
        rows, mask = len(numbers), self._mask
        if mask is None:
            return _sum(numbers, kind)
        if not is_few(mask) and (kind is np.float64 or rows <= EXACT_ROWS):
            values = numbers
            if numbers.dtype != np.float64:
                values = self._values[:rows]
                values[:] = numbers
            total = float(np.einsum("i,i->", values, self._weights[:rows]))
            if math.isfinite(total):
                return total if kind is np.float64 else int(total)
        return _sum(numbers[mask.rows], kind)


def _sum(numbers: np.ndarray, kind: type[np.generic]) -> float | int:
    total: float | int = numbers.sum(dtype=kind).item()
    return total
