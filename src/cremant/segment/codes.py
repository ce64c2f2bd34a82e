# SPDX-License-Identifier: Apache-2.0
"""Coded columns: a column of few different values as small numbers, beside its scan form.

A segment's dictionary is sorted, so codes compare as their values do: every comparison with a constant becomes an
interval of codes, and finding the rows of an interval is one pass over one or two bytes per row.

Measured (10 M rows, one core): the rows where a string of 20 values is equal to one: 20 ms over views, 0.3 ms over
codes. Groups of two string columns: 139 ms of CPU over views, 62 over codes combined to one number.

Floating point numbers are never coded (NaN, two zeros), nor are lists.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

#: What two bytes hold. Above it scanning codes gains little over scanning values.
CODES_MAX = 64 * 1024

Interval = tuple[int, int]
Mask = npt.NDArray[np.bool_]


def plain(column: pa.Array) -> pa.Array:
    """The stored form of a column in scan form: pyarrow has few kernels for views."""
    if pa.types.is_string_view(column.type):
        return column.cast(pa.string())
    if pa.types.is_binary_view(column.type):
        return column.cast(pa.binary())
    return column


def is_codable(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_string_view(kind) or pa.types.is_string(kind))


@dataclass(frozen=True, slots=True)
class Codes:
    """`values` are sorted, in stored form; `codes[row]` is the place of the row's value among them."""

    values: pa.Array
    codes: np.ndarray
    #: Code -> number in a dictionary of the whole table, by that dictionary (exec/keys.py).
    numbers: dict[object, np.ndarray] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
    samples: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def occurring(self, wanted: np.ndarray, there: Mask) -> np.ndarray:
        """Those of the wanted codes that rows which are there have (one flag per row). A few rows of each tell of most;
        the others are looked for in shares that double: few values have all been seen soon."""
        samples, counts = self._sampled()
        missing = wanted
        for rows in samples:
            missing = missing[~there[rows[missing]]]
            if not len(missing):
                return wanted
        unknown = missing[counts[missing] > len(samples)]
        seen = np.zeros(len(self.values), np.bool_)
        first, step = 0, _FIRST_LOOK_ROWS
        while first < len(there) and not seen[unknown].all():
            seen[self.codes[first : first + step][there[first : first + step]]] = True
            first, step = first + step, step * 2
        return np.setdiff1d(wanted, missing[~seen[missing]], assume_unique=True)

    def _sampled(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows by code, up to _SAMPLES_MAX of each, the last ones (of an upsert table more of these are in force), and
        how many rows each has. Made once: 10 ms per million rows."""
        if not self.samples:
            counts = np.bincount(self.codes, minlength=len(self.values))
            order = np.argsort(self.codes, kind="stable")
            depth = min(_SAMPLES_MAX, max(1, _SAMPLES_BYTES_MAX // (4 * max(1, len(counts)))))
            ends = np.cumsum(counts)
            places = np.maximum(ends - 1 - np.arange(depth)[:, np.newaxis], ends - counts)
            self.samples[:] = [(order[places].astype(np.int32), counts)]
        return self.samples[0]

    def interval(self, op: str, value: Any) -> Interval:
        """The codes [low, high) whose values satisfy `value_of_code op value`; op: = in < <= > >=."""
        return sorted_interval(self.sorted_values(), op, value)

    def sorted_values(self) -> Sequence[Any]:
        if len(self.values) > _KEPT_MAX:
            return Lazy(self.values)
        if not self.kept:
            values = self.values.to_pylist()
            # All at once: two threads may be here, and values that stand there twice would be searched as they stand.
            self.kept[:] = map(sys.intern, values) if values and isinstance(values[0], str) else values
        return self.kept


_FIRST_LOOK_ROWS = 8 * 1024
#: One row in ten is gone: of sixteen of a value hardly ever all.
_SAMPLES_MAX = 16
_SAMPLES_BYTES_MAX = 256 * 1024
#: As many values are kept as Python objects: texts are shared between segments, so that is 8 bytes each.
_KEPT_MAX = 4096


class Lazy(Sequence[Any]):
    """An Arrow array as what `bisect` searches: a value is made when it is looked at."""

    def __init__(self, values: pa.Array) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, at: Any) -> Any:
        return self._values[at].as_py()


def sorted_interval(values: Sequence[Any], op: str, value: Any) -> Interval:
    """Places [low, high) of the values for which `v op value`; op: = in < <= > >=."""
    match op:
        case "<":
            return 0, bisect.bisect_left(values, value)
        case "<=":
            return 0, bisect.bisect_right(values, value)
        case ">":
            return bisect.bisect_right(values, value), len(values)
        case ">=":
            return bisect.bisect_left(values, value), len(values)
        case _:
            low = bisect.bisect_left(values, value)
            return low, _run_end(values, value, low)


def _run_end(values: Sequence[Any], value: Any, low: int) -> int:
    """Behind the last `value`, of which the first, if there is one, is at `low`. Looked for from there: most runs are
    short, and each look at a value of an index costs microseconds."""
    high, step = low, 1
    while high < len(values) and values[high] == value:
        low, high, step = high + 1, high + step, step * 2
    return bisect.bisect_right(values, value, lo=low, hi=min(high, len(values)))


def intersect(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """What two lists of disjoint intervals have in common."""
    return [(max(a, c), min(b, d)) for a, b in left for c, d in right if max(a, c) < min(b, d)]


def encode(columns: Sequence[pa.Array]) -> Codes | None:
    """Codes of one column's batches; None if it has too many different values to gain by it."""
    rows = sum(len(column) for column in columns)
    limit = min(CODES_MAX, rows // 4 + 256)
    encoded = []
    for column in columns:
        part = plain(column).dictionary_encode()
        if len(part.dictionary) > limit or part.null_count:
            return None
        encoded.append(part)
    if not encoded:
        return None
    values = pc.unique(pa.concat_arrays([part.dictionary for part in encoded]))
    if len(values) > limit:
        return None
    values = values.take(pc.sort_indices(values))
    kind = np.uint8 if len(values) <= 256 else np.uint16
    codes = np.empty(rows, kind)
    first = 0
    for part in encoded:
        places = pc.index_in(part.dictionary, value_set=values).to_numpy().astype(kind)
        np.take(places, part.indices.to_numpy(), out=codes[first : first + len(part)])
        first += len(part)
    return Codes(values, codes)


def matches(codes: np.ndarray, intervals: Sequence[Interval], count: int) -> Mask:
    """Which codes lie in one of the intervals; `count`: how many codes there are."""
    if len(intervals) > _INTERVALS_MAX:
        wanted: Mask = np.zeros(count, np.bool_)
        for low, high in intervals:
            wanted[low:high] = True
        return np.take(wanted, codes)
    found = _inside(codes, *intervals[0], count)
    for interval in intervals[1:]:
        found |= _inside(codes, *interval, count)
    return found


#: More than these are looked up in a table, which costs as much as some twenty comparisons.
_INTERVALS_MAX = 16


def _inside(codes: np.ndarray, low: int, high: int, count: int) -> Mask:
    kind = codes.dtype.type
    found: Mask
    if high - low == 1:
        found = codes == kind(low)
    elif high >= count:
        found = codes >= kind(low)
    elif low == 0:
        found = codes < kind(high)
    else:
        # Unsigned numbers wrap around: one comparison for both ends.
        found = (codes - kind(low)) < kind(high - low)
    return found
