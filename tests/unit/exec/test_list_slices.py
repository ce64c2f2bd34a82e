# SPDX-License-Identifier: Apache-2.0
"""Kernels of lists see slices as they see copies: what lies outside of a slice, or under a NULL list, is no element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from cremant.exec import agg_lists, agg_moments, scalar_array

Kernel = Callable[[pa.Array], pa.Array]
_TEXTS, _LONGS, _DOUBLES = pa.list_(pa.string()), pa.list_(pa.int64()), pa.list_(pa.float64())


def repeated(value: Any, kind: pa.DataType, kernel: Callable[..., pa.Array]) -> Kernel:
    """With a literal, which arrives once per row."""
    return lambda lists: kernel(lists, pa.array([value] * len(lists), kind))


def of_partials(width: int) -> list[list[float] | None]:
    """Some of two partials, one of which may be of no rows, and NULL."""
    filled = [[float(2 + row + place) for place in range(width)] for row in range(8)]
    return [filled[0], [*filled[1], *filled[2]], None, [], [0.0] * width, [*filled[3], *([0.0] * width)], *filled[4:]]


NUMBERS = [[1, 2, 2], None, [], [7], [None, 3, 1], [2], None, [5, 5, 1]]
TEXTS = [["a", "b"], None, [], ["null"], [None, "b"], ["c", "a", "b"], None, ["b"]]
KERNELS: dict[str, tuple[list[Any], pa.DataType, Kernel]] = {
    "merge_variance": (of_partials(3), _DOUBLES, agg_moments._merge_variance),
    "merge_covariance": (of_partials(6), _DOUBLES, agg_moments._merge_covariance),
    "merge_moments4": (of_partials(5), _DOUBLES, agg_moments._merge_moments4),
    "moments4": (NUMBERS, _DOUBLES, agg_moments._moments4),
    "skewness": ([[4.0, 1.0, 2.0, 3.0, 4.0], None, [3.0, 1.0, 2.0, 2.0, 2.0]] * 3, _DOUBLES, agg_moments._skewness),
    "distinct": (NUMBERS, _LONGS, agg_lists._distinct),
    "value_in": (NUMBERS, _LONGS, repeated([2, 5], _LONGS, scalar_array._value_in)),
    "index_of": (NUMBERS, _LONGS, repeated(2, pa.int64(), scalar_array._index_of)),
    "any_like": (TEXTS, _TEXTS, repeated("b%", pa.string(), scalar_array._any_like)),
    "text_of": (
        TEXTS, _TEXTS,
        lambda lists: scalar_array._text_of(lists, pa.array([","] * len(lists)), pa.array(["?"] * len(lists))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("skip", "count"), [(0, 8), (1, 5), (2, 2), (3, 4), (5, 1)])
def test_a_slice_is_as_good_as_a_copy(name: str, skip: int, count: int) -> None:
    rows, kind, kernel = KERNELS[name]
    copied = kernel(pa.array(rows[skip : skip + count], kind))
    assert kernel(pa.array(rows, kind).slice(skip, count)).to_pylist() == copied.to_pylist()
    assert len(copied) == count
    behind = pa.concat_arrays([pa.array(rows, kind)] * 2).slice(len(rows) + skip, count)
    assert kernel(behind).to_pylist() == copied.to_pylist()
