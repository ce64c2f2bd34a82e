# SPDX-License-Identifier: Apache-2.0
"""The circuit breaker: row by row of its table."""

from __future__ import annotations

import pytest

from cremant.completion.breaker import TRANSITIONS, Breaker, BreakerState, transition_table
from cremant.model.limits import BREAKER_FAILURES, BREAKER_OPEN_FIRST_MS, BREAKER_OPEN_MAX_MS, BREAKER_PROBE_MS

CLOSED, OPEN, HALF_OPEN = BreakerState


def opened(now_ms: int = 0) -> Breaker:
    breaker = Breaker()
    for _ in range(BREAKER_FAILURES):
        breaker.failed(now_ms, "no route")
    return breaker


def test_failures_in_a_row_open_it_and_a_success_in_between_forgets_them() -> None:
    breaker = Breaker()
    for _ in range(BREAKER_FAILURES - 1):
        breaker.failed(0, "no route")
    breaker.succeeded()
    for _ in range(BREAKER_FAILURES - 1):
        breaker.failed(0, "no route")
    assert breaker.state is CLOSED
    assert breaker.admit(0)
    breaker.failed(0, "no route")
    assert (breaker.state, breaker.cause) == (OPEN, "no route")


def test_open_it_refuses_until_its_time_has_passed_then_admits_one_attempt_alone() -> None:
    breaker = opened(100)
    breaker.failed(101, "another")
    assert breaker.cause == "no route"
    assert not breaker.admit(99 + BREAKER_OPEN_FIRST_MS)
    assert breaker.admit(100 + BREAKER_OPEN_FIRST_MS)
    assert breaker.state is HALF_OPEN
    assert not breaker.admit(101 + BREAKER_OPEN_FIRST_MS)
    breaker.succeeded()
    assert (breaker.state, breaker.cause) == (CLOSED, "")
    assert breaker.admit(102 + BREAKER_OPEN_FIRST_MS)


def test_each_failed_attempt_opens_it_for_twice_as_long_up_to_a_bound() -> None:
    breaker, now_ms, waits = opened(0), 0, []
    for _ in range(8):
        began_ms = now_ms
        while not breaker.admit(now_ms):
            now_ms += 100
        waits.append(now_ms - began_ms)
        breaker.failed(now_ms, "down")
    doubled = [min(BREAKER_OPEN_MAX_MS, BREAKER_OPEN_FIRST_MS * 2**n) for n in range(8)]
    assert waits == [-(-wait // 100) * 100 for wait in doubled]


def test_an_attempt_that_says_nothing_for_long_is_followed_by_another() -> None:
    breaker = opened(0)
    assert breaker.admit(BREAKER_OPEN_FIRST_MS)
    assert not breaker.admit(BREAKER_OPEN_FIRST_MS + BREAKER_PROBE_MS - 1)
    assert breaker.admit(BREAKER_OPEN_FIRST_MS + BREAKER_PROBE_MS)


@pytest.mark.parametrize("half_open", [False, True])
def test_a_late_success_of_an_attempt_from_before_closes_it(half_open: bool) -> None:
    breaker = opened(0)
    if half_open:
        assert breaker.admit(BREAKER_OPEN_FIRST_MS)
    breaker.succeeded()
    assert breaker.state is CLOSED


def test_the_table_prints_as_markdown() -> None:
    assert len(transition_table().splitlines()) == len(TRANSITIONS) + 2
