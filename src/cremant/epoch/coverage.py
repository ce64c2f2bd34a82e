# SPDX-License-Identifier: Apache-2.0
"""Sets of stream offsets, and the rows of an epoch counted as a set (rule E-4). All columnar: no step per row."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import pyarrow as pa

from cremant.epoch.records import RowBlock
from cremant.model.names import OFFSET


class Coverage:
    """A set of offsets as disjoint, ascending ranges that do not touch. Adding to the end costs nothing."""

    __slots__ = ("_ends", "_firsts")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []

    @property
    def end(self) -> int:
        """Past the last offset, 0 if empty."""
        return self._ends[-1] if self._ends else 0

    def add(self, first: int, end: int) -> list[tuple[int, int]]:
        """Adds [first, end); answers the parts of it that were not in the set."""
        if first >= end:
            return []
        if not self._ends or first > self._ends[-1]:
            self._firsts.append(first)
            self._ends.append(end)
            return [(first, end)]
        if first == self._ends[-1]:
            self._ends[-1] = end
            return [(first, end)]
        return self._merge(first, end)

    def _merge(self, first: int, end: int) -> list[tuple[int, int]]:
        low = bisect_left(self._ends, first)
        high = low
        new: list[tuple[int, int]] = []
        at = first
        while high < len(self._firsts) and self._firsts[high] <= end:
            if at < self._firsts[high]:
                new.append((at, self._firsts[high]))
            at = max(at, self._ends[high])
            high += 1
        if at < end:
            new.append((at, end))
        if high > low:
            first, end = min(first, self._firsts[low]), max(end, self._ends[high - 1])
        self._firsts[low:high] = [first]
        self._ends[low:high] = [end]
        return new

    def covers(self, first: int, end: int) -> bool:
        """Every offset of [first, end) is in the set."""
        if first >= end:
            return True
        at = bisect_left(self._ends, end)
        return at < len(self._ends) and self._firsts[at] <= first

    def joined(self, other: Coverage) -> Coverage:
        union = Coverage()
        for first, end in sorted([*self.ranges(), *other.ranges()]):
            union.add(first, end)
        return union

    def ranges(self) -> list[tuple[int, int]]:
        return list(zip(self._firsts, self._ends, strict=True))

    def __str__(self) -> str:
        return " ".join(f"[{first}, {end})" for first, end in self.ranges()) or "nothing"


class BlockSet:
    """The blocks of one (epoch, generation): which offsets they account for, how many distinct rows they have.

    A task that is tried again writes its rows again, perhaps cut into other blocks: the same offset is the same row.
    """

    __slots__ = ("_kept", "config_version", "coverage", "rows")

    def __init__(self, config_version: int) -> None:
        self.config_version = config_version
        self.coverage = Coverage()
        self.rows = 0
        self._kept: list[RowBlock] = []

    def add(self, block: RowBlock, *, distinct: bool, keep: bool) -> None:
        new = self.coverage.add(block.range.first, block.range.next)
        if not new:
            self.rows += 0 if distinct else block.rows
            return
        if keep:
            self._kept.append(block)
        if not distinct or new == [(block.range.first, block.range.next)]:
            self.rows += block.rows
        else:
            self.rows += rows_within(block.batch, new)

    def in_order(self) -> list[RowBlock]:
        return sorted(self._kept, key=lambda block: (block.range.first, block.range.next))


def rows_from(batch: pa.RecordBatch, offset: int) -> pa.RecordBatch:
    """The rows at or past a stream offset; a view, no copy."""
    return batch.slice(int(np.searchsorted(batch.column(OFFSET).to_numpy(), offset)))


def rows_within(batch: pa.RecordBatch, ranges: list[tuple[int, int]]) -> int:
    """How many rows have their offset in one of the ranges."""
    bounds = np.searchsorted(batch.column(OFFSET).to_numpy(), np.array(ranges, dtype=np.int64).ravel())
    return int((bounds[1::2] - bounds[0::2]).sum())
