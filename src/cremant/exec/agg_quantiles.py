# SPDX-License-Identifier: Apache-2.0
"""Percentiles, modes and histograms of lists of values.

Exact percentiles are Pinot's: the element at position (int) (n * p / 100) of the sorted values, the last one for 100.
Sketches are those of Apache DataSketches: t-digest (rank error below 1 %) and KLL (k 200: 1.65 %).
PERCENTILEEST is a KLL sketch of k 1000 (rank error 0.35 %): whole numbers in, whole numbers out. Sketches leave NaNs
out: those of nothing but NaNs are empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasketches
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cremant.exec.agg_lists import groups_of, lists_of, per_group, starts_of, unique_codes, unless_empty
from cremant.exec.functions import Factory
from cremant.exec.kernels import constant, scalar

F64 = npt.NDArray[np.float64]


def _percentile(lists: pa.Array, percent: pa.Array) -> pa.Array:
    groups, p = groups_of(lists), constant(percent)
    if not len(groups.values):
        return pa.array([None] * groups.count, pa.float64())
    values = groups.numbers()
    positions = np.minimum((groups.sizes * p / 100).astype(np.int64), np.maximum(groups.sizes - 1, 0))
    if groups.count < _SORT_EACH_MAX:
        found = np.zeros(groups.count)
        for group, start, end in groups.each():
            found[group] = np.partition(values[start:end], positions[group])[positions[group]]
        return unless_empty(found, groups, pa.float64())
    order = np.lexsort((values, groups.owners))
    at = np.minimum(groups.starts[:-1] + positions, len(values) - 1)
    return unless_empty(values[order[at]], groups, pa.float64())


#: Fewer groups are partitioned one by one (linear in their size), more are sorted at once.
_SORT_EACH_MAX = 256


def _sketch_each(make: Callable[[int], Any]) -> Callable[[pa.Array, pa.Array], pa.Array]:
    """Lists of values -> serialized sketches."""

    def compute(lists: pa.Array, size: pa.Array) -> pa.Array:
        groups, k = groups_of(lists), constant(size)
        values = np.array(groups.numbers(), dtype=np.float64)  # the library wants to own what it reads

        def one(start: int, end: int) -> bytes:
            sketch = make(k)
            sketch.update(values[start:end])
            return bytes(sketch.serialize())

        return per_group(groups, one, pa.binary())

    return compute


def _merge_each(make: Callable[[int], Any], read: Callable[[bytes], Any]) -> Callable[[pa.Array, pa.Array], pa.Array]:
    def compute(lists: pa.Array, size: pa.Array) -> pa.Array:
        groups, k = groups_of(lists), constant(size)

        def one(start: int, end: int) -> bytes:
            sketches = groups.values[start:end].to_pylist()
            if len(sketches) == 1:
                return bytes(sketches[0])
            merged = make(k)
            for sketch in sketches:
                merged.merge(read(sketch))
            return bytes(merged.serialize())

        return per_group(groups, one, pa.binary())

    return compute


def _quantile_each(
    read: Callable[[bytes], Any], ask: Callable[[Any, float], float]
) -> Callable[[pa.Array, pa.Array], pa.Array]:
    def compute(sketches: pa.Array, percent: pa.Array) -> pa.Array:
        rank = (constant(percent) or 0.0) / 100

        def one(serialized: bytes | None) -> float | None:
            sketch = None if serialized is None else read(serialized)
            return None if sketch is None or sketch.is_empty() else ask(sketch, rank)

        return pa.array(list(map(one, sketches.to_pylist())), pa.float64())

    return compute


def _tdigest_quantile(sketch: Any, rank: float) -> float:
    return float(sketch.get_quantile(rank))


def _kll_quantile(sketch: Any, rank: float) -> float:
    return float(sketch.get_quantile(rank, True))


def _kll_position(sketch: Any, rank: float) -> float:
    """As exact percentiles are defined: the value whose rank is above, not at, the one asked for."""
    return float(sketch.get_max_value() if rank >= 1 else sketch.get_quantile(rank, False))


def _counts(lists: pa.Array) -> pa.Array:
    """Distinct values of each group with how often they occur."""
    groups = groups_of(lists)
    dictionary, codes, owners, counts = unique_codes(groups)
    pairs = pa.StructArray.from_arrays([dictionary.take(pa.array(codes)), pa.array(counts)], ["v", "n"])
    return lists_of(pairs, starts_of(owners, groups.count))


def _mode(lists: pa.Array, choice: pa.Array) -> pa.Array:
    """The most frequent value; of several MIN, MAX or AVG of them."""
    groups = groups_of(lists)
    if not len(groups.values):
        return pa.array([None] * groups.count, pa.float64())
    values, counts = (groups.values.field(index).to_numpy(zero_copy_only=False) for index in (0, 1))
    order = np.lexsort((values, groups.owners))
    values, counts, owners = values[order], counts[order], groups.owners[order]
    first = np.flatnonzero(np.diff(owners, prepend=-1) | (np.diff(values, prepend=values[0]) != 0))
    values, counts, owners = values[first], np.add.reduceat(counts, first), owners[first]
    best = np.zeros(groups.count, dtype=np.int64)
    np.maximum.at(best, owners, counts)
    top = counts == best[owners]
    values, owners = values[top].astype(np.float64), owners[top]
    return unless_empty(_reduced(values, owners, groups.count, str(constant(choice))), groups, pa.float64())


def _reduced(values: F64, owners: npt.NDArray[np.int64], count: int, choice: str) -> F64:
    """`values` are sorted within each owner."""
    starts = starts_of(owners, count)
    if choice == "AVG":
        sums = np.bincount(owners, weights=values, minlength=count)
        return sums / np.maximum(np.diff(starts), 1)
    at = starts[:-1] if choice == "MIN" else starts[1:] - 1
    return values[np.clip(at, 0, len(values) - 1)]


def _histogram(lists: pa.Array, edges: pa.Array) -> pa.Array:
    """How many values fall between neighbouring edges; the last bin includes its upper edge."""
    groups = groups_of(lists)
    bounds = np.asarray(constant(edges), dtype=np.float64)
    bins = len(bounds) - 1
    numbers = groups.numbers().astype(np.float64)
    at = np.searchsorted(bounds, numbers, side="right") - 1
    at[numbers == bounds[-1]] = bins - 1
    inside = (at >= 0) & (at < bins)
    counts = np.bincount(groups.owners[inside] * bins + at[inside], minlength=groups.count * bins)
    return lists_of(pa.array(counts.astype(np.float64)), np.arange(groups.count + 1) * bins)


def _add_lists(lists: pa.Array, length: pa.Array) -> pa.Array:
    """Sums of lists of one length that lie one after the other in each group."""
    groups, width = groups_of(lists), constant(length)
    place = np.arange(len(groups.values)) - np.repeat(groups.starts[:-1], groups.sizes)
    keys = groups.owners * width + place % width
    sums = np.bincount(keys, weights=groups.numbers(), minlength=groups.count * width)
    return lists_of(pa.array(sums), np.arange(groups.count + 1) * width)


def _whole(values: pa.Array) -> pa.Array:
    """As Java casts DOUBLE to LONG: towards zero, at most what a LONG holds."""
    numbers = values.fill_null(0.0).to_numpy(zero_copy_only=False)
    limited = np.clip(np.nan_to_num(numbers, nan=0.0), -(2.0**63), np.nextafter(2.0**63, 0))
    found = limited.astype(np.int64)
    found[numbers >= 2.0**63] = np.iinfo(np.int64).max
    return pa.array(found, mask=values.is_null().to_numpy(zero_copy_only=False))


_new_tdigest, _new_kll = datasketches.tdigest_double, datasketches.kll_doubles_sketch


def _read_kll(sketch: bytes) -> Any:
    return datasketches.kll_doubles_sketch.deserialize(sketch)


def _read_tdigest(sketch: bytes) -> Any:
    return datasketches.tdigest_double.deserialize(sketch)


_DOUBLES, _SKETCH, _SKETCHES = pa.list_(pa.float64()), pa.binary(), pa.list_(pa.binary())
_DOUBLE, _LONG = pa.float64(), pa.int64()


def _pairs(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.struct([("v", kind), ("n", pa.int64())]))


FUNCTIONS: dict[str, Factory] = dict(
    [
        scalar("agg_percentile", _percentile, [_DOUBLES, _DOUBLE], _DOUBLE),
        scalar("agg_tdigest_pack", _sketch_each(_new_tdigest), [_DOUBLES, _LONG], _SKETCH),
        scalar("agg_tdigest_merge", _merge_each(_new_tdigest, _read_tdigest), [_SKETCHES, _LONG], _SKETCH),
        scalar("agg_tdigest_quantile", _quantile_each(_read_tdigest, _tdigest_quantile), [_SKETCH, _DOUBLE], _DOUBLE),
        scalar("agg_kll_pack", _sketch_each(_new_kll), [_DOUBLES, _LONG], _SKETCH),
        scalar("agg_kll_merge", _merge_each(_new_kll, _read_kll), [_SKETCHES, _LONG], _SKETCH),
        scalar("agg_kll_quantile", _quantile_each(_read_kll, _kll_quantile), [_SKETCH, _DOUBLE], _DOUBLE),
        scalar("agg_kll_position", _quantile_each(_read_kll, _kll_position), [_SKETCH, _DOUBLE], _DOUBLE),
        scalar("agg_whole", _whole, [_DOUBLE], _LONG),
        scalar("agg_counts", _counts, [_DOUBLES], _pairs(_DOUBLE)),
        scalar("agg_mode", _mode, [_pairs(_DOUBLE), pa.string()], _DOUBLE),
        scalar("agg_histogram", _histogram, [_DOUBLES, _DOUBLES], _DOUBLES),
        scalar("agg_add_lists", _add_lists, [_DOUBLES, _LONG], _DOUBLES),
    ]
)  # fmt: skip
