# SPDX-License-Identifier: Apache-2.0
"""Plans of epochs: shares, gaps, limits, and that nothing new means the same plan."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cremant.model.errors import InvariantViolation
from cremant.pipeline.plan import (
    ROWS_PER_TASK,
    EpochPlan,
    PlannedGap,
    PlannedRange,
    Wanted,
    initial_plan,
    next_plan,
    shares_of,
    tasks_of,
)


def wanted(*starts: int, **changes: object) -> Wanted:
    values: dict[str, object] = {"config_version": 3, "starts": starts, "max_rows": 1_000_000, **changes}
    return Wanted(**values)  # type: ignore[arg-type]


def planned(before: EpochPlan, want: Wanted, ends: list[int], **changes: object) -> EpochPlan:
    values: dict[str, object] = {"earliest": [0] * len(ends), "at_ms": 77, "max_rows": 10**9, **changes}
    return next_plan(before, want, ends=ends, **values)  # type: ignore[arg-type]


def test_a_plan_goes_from_the_end_of_the_one_before_to_the_end_of_the_stream() -> None:
    first = planned(initial_plan("abc", [5, 0]), wanted(5, 0), [9, 2])
    assert first.partitions == (PlannedRange(5, 9, 9), PlannedRange(0, 2, 2))
    assert (first.config_version, first.at_ms, first.topic_incarnation) == (3, 77, "abc")
    second = planned(first, wanted(5, 0), [9, 4])
    assert second.starts == (9, 2)
    assert second.ends == (9, 4)


def test_nothing_new_is_the_same_plan_whatever_the_time_is() -> None:
    first = planned(initial_plan("abc", [0]), wanted(0), [9])
    assert planned(first, wanted(0), [9], at_ms=99) is first
    assert planned(first, wanted(0, config_version=4), [9]) is first


def test_a_driver_that_holds_gets_no_plan() -> None:
    before = initial_plan("abc", [0])
    assert planned(before, wanted(0, hold=True), [9]) is before


def test_a_plan_survives_its_way_through_spark() -> None:
    plan = planned(initial_plan("abc", [0, 0]), wanted(0, 0), [9, 8], earliest=[3, 0])
    assert EpochPlan.from_offset(json.loads(json.dumps(plan.to_offset()))) == plan


def test_expired_offsets_are_a_gap_in_front_of_the_range() -> None:
    plan = planned(initial_plan("abc", [0, 0]), wanted(0, 0), [9, 8], earliest=[3, 0])
    assert plan.gaps == (PlannedGap(0, 0, 3),)
    assert plan.partitions[0] == PlannedRange(3, 9, 9)
    assert plan.starts == (0, 0)


def test_what_expires_after_planning_widens_the_gap_when_the_plan_runs() -> None:
    plan = planned(initial_plan("abc", [0, 0]), wanted(0, 0), [9, 8], earliest=[3, 0])
    first, second = shares_of(plan, earliest=[5, 100])
    assert (first.gap.first, first.gap.next, first.range.next) == (0, 5, 9)
    assert (second.gap.first, second.gap.next, second.range.length) == (0, 8, 0)


def test_a_stream_that_ends_before_what_was_read_is_another_stream() -> None:
    first = planned(initial_plan("abc", [0]), wanted(0), [9])
    with pytest.raises(InvariantViolation, match="E-8: partition 0 was read to offset 9, but the stream ends at 4"):
        planned(first, wanted(0), [4])


def test_a_new_partition_enters_at_its_first_offset() -> None:
    first = planned(initial_plan("abc", [0]), wanted(0), [9])
    second = planned(first, wanted(0, 40), [9, 44])
    assert second.partitions == (PlannedRange(9, 9, 9), PlannedRange(40, 44, 44))


@given(backlog=st.lists(st.integers(0, 5_000), min_size=1, max_size=8), limit=st.integers(1, 9_000))
def test_no_plan_holds_more_than_the_limit_and_none_wastes_it(backlog: list[int], limit: int) -> None:
    starts = [0] * len(backlog)
    plan = planned(initial_plan("abc", starts), wanted(*starts, max_rows=limit), backlog)
    assert plan.rows == min(limit, sum(backlog))
    assert all(given.next <= end for given, end in zip(plan.partitions, backlog, strict=True))


@given(backlog=st.lists(st.integers(0, 90_000), min_size=1, max_size=16), tasks_max=st.integers(1, 8))
def test_tasks_hold_every_share_once_and_are_as_many_as_the_rows_are_worth(backlog: list[int], tasks_max: int) -> None:
    starts = [0] * len(backlog)
    plan = planned(initial_plan("abc", starts), wanted(*starts, max_rows=10**9), backlog)
    shares = shares_of(plan, starts)
    tasks = tasks_of(shares, tasks_max)
    assert 1 <= len(tasks) <= tasks_max
    assert sorted(share.partition for task in tasks for share in task) == [p for p, rows in enumerate(backlog) if rows]
    assert len(tasks) <= max(1, -(-sum(backlog) // ROWS_PER_TASK))
