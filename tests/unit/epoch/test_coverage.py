# SPDX-License-Identifier: Apache-2.0
"""Sets of offsets against Python's own sets."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cremant.epoch.coverage import Coverage

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda t: (t[0], t[0] + t[1])), max_size=12)


@settings(max_examples=300, deadline=None)
@given(RANGES, st.integers(0, 70), st.integers(0, 20))
def test_a_coverage_is_a_set_of_offsets(ranges: list[tuple[int, int]], first: int, length: int) -> None:
    coverage, model = Coverage(), set[int]()
    for low, high in ranges:
        new = coverage.add(low, high)
        assert {o for a, b in new for o in range(a, b)} == set(range(low, high)) - model
        assert sum(b - a for a, b in new) == len(set(range(low, high)) - model)
        model |= set(range(low, high))
    assert {o for a, b in coverage.ranges() for o in range(a, b)} == model
    assert all(b < c for (_, b), (c, _) in zip(coverage.ranges(), coverage.ranges()[1:], strict=False))
    assert coverage.end == (max(model) + 1 if model else 0)
    assert coverage.covers(first, first + length) == (set(range(first, first + length)) <= model)


@settings(max_examples=100, deadline=None)
@given(RANGES, RANGES)
def test_two_coverages_join_into_their_union(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    one, other, both = Coverage(), Coverage(), Coverage()
    for low, high in left:
        one.add(low, high)
        both.add(low, high)
    for low, high in right:
        other.add(low, high)
        both.add(low, high)
    assert one.joined(other).ranges() == both.ranges()
    assert str(Coverage()) == "nothing"
