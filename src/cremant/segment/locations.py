# SPDX-License-Identifier: Apache-2.0
"""Which row of a range of one partition is at (offset, sub-row): what an update names, made a row number.

Rows are numbered in (offset, sub-row) order. Most ranges are dense (each offset one row): then a row number is a
difference and nothing is kept. Others keep their sorted offsets, and sub-rows if any message gave several rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cremant.model.names import OFFSET, SUB_ROW

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Locations:
    """`rows` locations. Dense: `first`, `first + 1`, ...; else `offsets` ascending, with `sub_rows` (None: all 0)."""

    rows: int
    first: int = 0
    offsets: Int64s | None = None
    sub_rows: Int32s | None = None

    @classmethod
    def of(cls, offsets: Int64s, sub_rows: Int32s | None) -> Locations:
        """Sorted ones; the arrays are kept only if they say more than two numbers do."""
        rows = len(offsets)
        if sub_rows is not None and not sub_rows.any():
            sub_rows = None
        if sub_rows is None and (not rows or int(offsets[-1]) - int(offsets[0]) + 1 == rows):
            return cls(rows, int(offsets[0]) if rows else 0)
        return cls(rows, int(offsets[0]), offsets, sub_rows)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.offsets, self.sub_rows) if array is not None)

    def all_offsets(self) -> Int64s:
        if self.offsets is not None:
            return self.offsets
        return np.arange(self.first, self.first + self.rows, dtype=np.int64)

    def all_sub_rows(self) -> Int32s:
        return self.sub_rows if self.sub_rows is not None else np.zeros(self.rows, np.int32)

    def first_at(self, offset: int) -> int:
        """Number of the first row at or past an offset; `rows` if there is none."""
        if self.offsets is None:
            return min(max(offset - self.first, 0), self.rows)
        return int(np.searchsorted(self.offsets, offset))

    def between(self, first: int, last: int) -> Locations:
        """Rows [first, last), numbered from 0; nothing is copied."""
        if self.offsets is None:
            return Locations(last - first, self.first + first)
        sub_rows = self.sub_rows[first:last] if self.sub_rows is not None else None
        return Locations.of(self.offsets[first:last], sub_rows)

    def only(self, kept: npt.NDArray[np.bool_]) -> Locations:
        """Those of some rows, numbered anew."""
        return Locations.of(self.all_offsets()[kept], self.sub_rows[kept] if self.sub_rows is not None else None)

    def find(self, offsets: Int64s, sub_rows: Int32s) -> Int64s:
        """Row number per location, -1 where there is no such row."""
        if self.offsets is None:
            rows = offsets - self.first
            known = (rows >= 0) & (rows < self.rows) & (sub_rows == 0)
        elif self.sub_rows is None:
            rows = np.searchsorted(self.offsets, offsets)
            known = (sub_rows == 0) & self._is_at(rows, offsets)
        else:
            rows = self._among_sub_rows(offsets, sub_rows)
            known = self._is_at(rows, offsets)
            known[known] = self.sub_rows[rows[known]] == sub_rows[known]
        return np.where(known, rows, -1)

    def _is_at(self, rows: Int64s, offsets: Int64s) -> npt.NDArray[np.bool_]:
        assert self.offsets is not None
        inside = rows < self.rows
        inside[inside] = self.offsets[rows[inside]] == offsets[inside]
        return inside

    def _among_sub_rows(self, offsets: Int64s, sub_rows: Int32s) -> Int64s:
        """The first row at or past each location: binary search in the rows of its offset, all at once."""
        assert self.offsets is not None
        assert self.sub_rows is not None
        low = np.searchsorted(self.offsets, offsets)
        high = np.searchsorted(self.offsets, offsets, side="right")
        while (open_ := low < high).any():
            middle = (low + high) // 2
            below = open_.copy()
            below[open_] = self.sub_rows[middle[open_]] < sub_rows[open_]
            low = np.where(below, middle + 1, low)
            high = np.where(open_ & ~below, middle, high)
        return low


def locations_of(batches: Iterable[pa.RecordBatch]) -> tuple[Locations, Int32s | None]:
    """Of a segment's batches, in whatever order its rows are; and per row of the segment its number in (offset,
    sub-row) order, None if that is the order they have."""
    batches = tuple(batches)
    offsets = _joined([batch.column(OFFSET).to_numpy() for batch in batches], np.int64)
    sub_rows: Int32s | None = _joined([batch.column(SUB_ROW).to_numpy() for batch in batches], np.int32)
    if sub_rows is not None and not sub_rows.any():
        sub_rows = None
    if _is_sorted(offsets, sub_rows):
        return Locations.of(offsets, sub_rows), None
    numbers = _counted(offsets, sub_rows)
    if numbers is None:
        order = np.lexsort((sub_rows, offsets)) if sub_rows is not None else np.argsort(offsets, kind="stable")
        numbers = np.empty(len(order), np.int32)
        numbers[order] = np.arange(len(order), dtype=np.int32)
    return Locations.of(_in_order(offsets, numbers), _in_order(sub_rows, numbers)), numbers


#: More offsets than so many per row are not counted.
_SPAN_SHARE = 4


def _counted(offsets: Int64s, sub_rows: Int32s | None) -> Int32s | None:
    """Per row its number in (offset, sub-row) order, without sorting (a tenth of the time): rows below its offset, and
    its sub-row. None where offsets are few and far between, or sub-rows of an offset are not 0, 1, 2, ..."""
    first = int(offsets.min())
    span = int(offsets.max()) - first + 1
    at = offsets - first
    if sub_rows is None and span == len(offsets):
        return at.astype(np.int32)
    if span > _SPAN_SHARE * len(offsets):
        return None
    counts = np.bincount(at, minlength=span).astype(np.int32)
    numbers: Int32s = (np.cumsum(counts, dtype=np.int32) - counts)[at]
    if sub_rows is not None:
        if (sub_rows >= counts[at]).any():
            return None
        numbers += sub_rows
    return numbers


_Ints = TypeVar("_Ints", Int64s, Int32s, Int32s | None)


def _in_order(values: _Ints, numbers: Int32s) -> _Ints:
    if values is None:
        return None
    ordered = np.empty_like(values)
    ordered[numbers] = values
    return ordered


def _is_sorted(offsets: Int64s, sub_rows: Int32s | None) -> bool:
    steps = np.diff(offsets)
    if sub_rows is None:
        return bool((steps > 0).all())
    return bool(((steps > 0) | ((steps == 0) & (np.diff(sub_rows) > 0))).all())


def _joined(parts: list[np.ndarray], kind: type[np.generic]) -> np.ndarray:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, kind)
