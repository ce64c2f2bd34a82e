# SPDX-License-Identifier: Apache-2.0
"""What kernels of aggregations share: lists of values per group, as one flat array with the group of each value.

A group is one row of an Arrow list array (`array_agg` made it). NULL lists are groups without rows; kernels answer NULL
for them and for empty lists, and leave NULL elements out. Work is done for all groups at once with numpy, or once per
group where a sketch of Apache DataSketches takes its whole list; never once per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cremant.exec.functions import Factory
from cremant.exec.kernels import scalar

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Groups:
    """`values`: the elements of all groups, one group after the other, without NULLs. Group i is
    values[starts[i]:starts[i + 1]]."""

    values: pa.Array
    starts: I64

    @property
    def count(self) -> int:
        return len(self.starts) - 1

    @property
    def sizes(self) -> I64:
        return np.diff(self.starts)

    @property
    def owners(self) -> I64:
        """The group of each value."""
        return np.repeat(np.arange(self.count), self.sizes)

    @property
    def empty(self) -> npt.NDArray[np.bool_]:
        return np.equal(self.sizes, 0)

    def numbers(self) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = self.values.to_numpy(zero_copy_only=False)
        return found

    def each(self) -> Iterator[tuple[int, int, int]]:
        """(group, start, end) of the groups that have values."""
        for index in np.flatnonzero(~self.empty).tolist():
            yield index, int(self.starts[index]), int(self.starts[index + 1])


def groups_of(lists: pa.Array) -> Groups:
    values = lists.flatten()  # leaves out what NULL lists cover
    sizes = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    if values.null_count:
        valid = values.is_valid().to_numpy(zero_copy_only=False)
        owners = np.repeat(np.arange(len(sizes)), sizes)[valid]
        sizes, values = np.bincount(owners, minlength=len(sizes)).astype(np.int64), values.drop_null()
    return Groups(values, np.concatenate([[0], np.cumsum(sizes)]))


def lists_of(values: pa.Array, starts: npt.NDArray[Any]) -> pa.Array:
    """The opposite of `groups_of`."""
    return pa.ListArray.from_arrays(pa.array(starts.astype(np.int32)), values)


def unless_empty(values: npt.NDArray[Any], groups: Groups, kind: pa.DataType) -> pa.Array:
    """One value per group; NULL for groups without values."""
    return pa.array(values, kind, mask=groups.empty)


def per_group(groups: Groups, one: Callable[[int, int], Any], kind: pa.DataType) -> pa.Array:
    """`one(start, end)` of each group that has values."""
    results: list[Any] = [None] * groups.count
    for index, start, end in groups.each():
        results[index] = one(start, end)
    return pa.array(results, kind)


def unique_codes(groups: Groups) -> tuple[pa.Array, I64, I64, I64]:
    """Distinct values per group: (dictionary, code of each, group of each, how often), ordered by group and code."""
    encoded = groups.values.dictionary_encode()
    dictionary = encoded.dictionary
    codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    width = max(1, len(dictionary))
    keys, counts = np.unique(groups.owners * width + codes, return_counts=True)
    return dictionary, keys % width, keys // width, counts


def starts_of(owners: I64, count: int) -> I64:
    """Where each of `count` groups begins among sorted `owners`."""
    return np.searchsorted(owners, np.arange(count + 1))


def _distinct(lists: pa.Array) -> pa.Array:
    groups = groups_of(lists)
    dictionary, codes, owners, _ = unique_codes(groups)
    return lists_of(dictionary.take(pa.array(codes)), starts_of(owners, groups.count))


#: Suffixes of kernels that exist once per type of element.
ELEMENTS: dict[str, pa.DataType] = {
    "long": pa.int64(), "int": pa.int32(), "double": pa.float64(), "float": pa.float32(), "text": pa.string(),
    "boolean": pa.bool_(), "bytes": pa.binary(),
}  # fmt: skip


FUNCTIONS: dict[str, Factory] = dict(
    scalar(f"agg_distinct_{suffix}", _distinct, [pa.list_(kind)], pa.list_(kind)) for suffix, kind in ELEMENTS.items()
)
