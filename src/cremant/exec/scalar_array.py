# SPDX-License-Identifier: Apache-2.0
"""Functions of multi-value columns that DataFusion has not: which elements stay, whether any of them fits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.exec.functions import Factory
from cremant.exec.kernels import check_bytes, constant, scalar
from cremant.exec.lists import any_of, kept

#: Element types, by the name in the functions' names.
ELEMENTS: dict[str, pa.DataType] = {
    "int": pa.int32(), "long": pa.int64(), "float": pa.float32(), "double": pa.float64(), "text": pa.string(),
    "boolean": pa.bool_(), "decimal": pa.string(), "bytes": pa.binary(),
}  # fmt: skip


def _value_in(lists: pa.Array, wanted: pa.Array) -> pa.Array:
    """VALUEIN: the elements that are among `wanted`."""
    return kept(lists, pc.is_in(lists.values, value_set=wanted[0].values))


def _within(lists: pa.Array, low: pa.Array, high: pa.Array) -> pa.Array:
    """BETWEEN: whether any element is."""
    values = lists.values
    return any_of(lists, pc.and_(pc.greater_equal(values, low[0]), pc.less_equal(values, high[0])))


_SIGNS: dict[str, Callable[[pa.Array, pa.Scalar], pa.Array]] = {
    "=": pc.equal, "<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal,
}  # fmt: skip


def _any_compares(lists: pa.Array, sign: pa.Array, value: pa.Array) -> pa.Array:
    """Whether any element stands in the relation to the value."""
    return any_of(lists, _SIGNS[constant(sign)](lists.values, value[0]))


def _any_matches(lists: pa.Array, pattern: pa.Array) -> pa.Array:
    """REGEXP_LIKE: whether a match of an RE2 expression is found in any element."""
    return any_of(lists, pc.match_substring_regex(lists.values, constant(pattern)))


def _any_like(lists: pa.Array, pattern: pa.Array) -> pa.Array:
    return any_of(lists, pc.match_like(lists.values, constant(pattern)))


def _series(start: pa.Array, end: pa.Array, step: pa.Array) -> pa.Array:
    """GENERATE...ARRAY of literals: from start to end, both included."""
    first, last, by = constant(start), constant(end), constant(step)
    if not by:
        raise ValueError("the step of an array must not be 0")
    count = max(0, int((last - first) // by) + 1)
    check_bytes(8.0 * count * len(start))
    values = [first + by * index for index in range(count)]
    return pa.array([values] * len(start), pa.list_(start.type))


def _index_of(lists: pa.Array, value: pa.Array) -> pa.Array:
    """Positions of the value, from 0."""
    encoded = np.arange(len(lists.values), dtype=np.int64)
    starts = np.repeat(lists.offsets[:-1].to_numpy(), np.diff(lists.offsets.to_numpy()))
    first = int(lists.offsets[0].as_py())
    inside = np.zeros(len(lists.values), dtype=np.int32)
    inside[first : first + len(starts)] = (encoded[first : first + len(starts)] - starts).astype(np.int32)
    positions = pa.ListArray.from_arrays(lists.offsets, pa.array(inside))
    return kept(positions, pc.equal(lists.values, value[0]))


def _text_of(lists: pa.Array, separator: pa.Array, instead: pa.Array) -> pa.Array:
    """ARRAYTOSTRING; `instead` of elements that are Pinot's text for a missing one."""
    sign, replacement = constant(separator) or "", constant(instead)
    values = lists
    if replacement is not None and len(lists):
        shown = pc.if_else(pc.equal(lists.values, "null"), replacement, lists.values)
        values = pa.ListArray.from_arrays(lists.offsets, shown)
    return pc.if_else(lists.is_valid(), pc.binary_join(values, sign), pa.scalar(None, pa.string()))


FUNCTIONS: dict[str, Factory] = dict(
    [
        *(
            scalar(f"fn_value_in_{name}", _value_in, [pa.list_(kind), pa.list_(kind)], pa.list_(kind))
            for name, kind in ELEMENTS.items()
        ),
        *(
            scalar(f"fn_any_between_{name}", _within, [pa.list_(kind), kind, kind], pa.bool_())
            for name, kind in ELEMENTS.items()
        ),
        *(
            scalar(f"fn_any_{name}", _any_compares, [pa.list_(kind), pa.string(), kind], pa.bool_())
            for name, kind in ELEMENTS.items()
        ),
        *(
            scalar(f"fn_indexes_of_{name}", _index_of, [pa.list_(kind), kind], pa.list_(pa.int32()))
            for name, kind in ELEMENTS.items()
        ),
        *(
            scalar(f"fn_series_{name}", _series, [kind, kind, kind], pa.list_(kind))
            for name, kind in ELEMENTS.items()
            if name in ("int", "long", "float", "double")
        ),
        scalar("fn_any_matches", _any_matches, [pa.list_(pa.string()), pa.string()], pa.bool_()),
        scalar("fn_any_like", _any_like, [pa.list_(pa.string()), pa.string()], pa.bool_()),
        scalar(
            "fn_join", _text_of, [pa.list_(pa.string()), pa.string(), pa.string()], pa.string()
        ),
    ]
)  # fmt: skip
