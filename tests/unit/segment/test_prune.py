# SPDX-License-Identifier: Apache-2.0
"""Pruning against brute force: a range is dropped only if no value in it satisfies the terms."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cremant.segment.prune import may_match
from cremant.wire.messages import PruneTerm

OPS = {"=": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
NO_FLOATS: frozenset[str] = frozenset()


def keeps(op: str, values: list[Any], low: Any, high: Any, single: frozenset[str] = NO_FLOATS) -> bool:
    return may_match([PruneTerm(column="c", op=op, values=tuple(values))], {"c": (low, high)}.get, single)


def satisfied(op: str, values: list[Any], row: Any) -> bool:
    return any(row == value for value in values) if op == "in" else OPS[op](row, values[0])


NUMBERS = st.one_of(st.integers(-20, 20), st.sampled_from([0.5, -1.5, 1e18, 2**53, 2**53 + 1, -(2**63), 1.0]))


@settings(max_examples=500)
@given(
    st.lists(NUMBERS, min_size=1, max_size=5),
    st.sampled_from([*OPS, "in"]),
    st.lists(NUMBERS, min_size=1, max_size=3),
)
def test_a_range_that_holds_a_matching_number_is_kept(rows: list[Any], op: str, values: list[Any]) -> None:
    if any(satisfied(op, values, row) for row in rows):
        assert keeps(op, values, min(rows), max(rows))


@settings(max_examples=200)
@given(st.lists(st.text(max_size=3), min_size=1, max_size=5), st.sampled_from([*OPS, "in"]), st.text(max_size=3))
def test_a_range_that_holds_a_matching_text_is_kept(rows: list[str], op: str, value: str) -> None:
    if any(satisfied(op, [value], row) for row in rows):
        assert keeps(op, [value], min(rows), max(rows))


@settings(max_examples=300)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5),
    st.sampled_from(list(OPS)),
    st.floats(-1e6, 1e6),
)
def test_a_float_column_is_kept_if_it_matches_in_either_precision(rows: list[float], op: str, value: float) -> None:
    rounded = float(np.float32(value))
    if any(OPS[op](row, value) or OPS[op](row, rounded) for row in rows):
        assert keeps(op, [value], min(rows), max(rows), frozenset({"c"}))


@pytest.mark.parametrize(
    ("op", "values", "low", "high"),
    [
        ("=", [5], 6, 9),
        ("=", ["a"], "b", "c"),
        ("in", [1, 2, 10], 3, 9),
        ("<", [3], 3, 9),
        ("<=", [2], 3, 9),
        (">", [9], 3, 9),
        (">=", [9.5], 3, 9),
        ("=", [True], False, False),
    ],
)
def test_a_range_that_cannot_match_is_dropped(op: str, values: list[Any], low: Any, high: Any) -> None:
    assert not keeps(op, values, low, high)


@pytest.mark.parametrize(
    ("op", "values", "low", "high"),
    [
        ("=", ["5"], 6, 9),
        ("=", [1], False, False),
        ("=", [float("nan")], 1, 2),
        ("in", [], 1, 2),
        ("like", ["x"], "a", "b"),
        ("=", [float(2**53)], 2**53 + 1, 2**53 + 1),
    ],
)
def test_what_does_not_compare_exactly_is_kept(op: str, values: list[Any], low: Any, high: Any) -> None:
    assert keeps(op, values, low, high)


def test_a_column_without_a_range_decides_nothing_and_all_terms_must_hold() -> None:
    terms = [PruneTerm(column="x", op="=", values=(1,)), PruneTerm(column="c", op="=", values=(1,))]
    assert may_match(terms, {"c": (0, 2)}.get, NO_FLOATS)
    assert not may_match(terms, {"c": (2, 3)}.get, NO_FLOATS)
