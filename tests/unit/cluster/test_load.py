# SPDX-License-Identifier: Apache-2.0
"""What a broker remembers of its servers: loads, suspects, how long to wait, and how much it may ask twice."""

from __future__ import annotations

from cremant.cluster.load import (
    HEDGE_BURST,
    HEDGE_FLOOR_MS,
    HEDGE_SAMPLES_MIN,
    HEDGE_UNKNOWN_MS,
    SUSPECT_MS,
    Load,
    Loads,
    lighter,
)
from cremant.model.limits import QUERIES_RUNNING_MAX


def answered(loads: Loads, server: str, at_ms: float, took_ms: float) -> None:
    loads.sent(server)
    loads.answered(server, at_ms - took_ms, at_ms)


def test_requests_in_flight_are_counted_however_they_end() -> None:
    loads = Loads()
    for _ in range(4):
        loads.sent("s1")
    assert loads.of(["s1", "s2"], 0.0)["s1"].in_flight == 4
    loads.answered("s1", 0.0, 5.0)
    loads.failed("s1", 5.0)
    loads.abandoned("s1", 0.0, 5.0)
    assert loads.of(["s1"], 5.0)["s1"].in_flight == 1


def test_a_slow_server_is_remembered_for_seconds_and_then_tried_again() -> None:
    loads = Loads()
    for step in range(1, 20):
        answered(loads, "slow", step * 100.0, 200.0)
        answered(loads, "fast", step * 100.0, 5.0)
    assert lighter("slow", "fast", loads.of(["slow", "fast"], 2_000.0)) == "fast"
    assert lighter("slow", "fast", loads.of(["slow", "fast"], 60_000.0)) == "slow"


def test_who_is_not_known_is_idle() -> None:
    assert lighter("s1", "s2", {}) == "s1"
    assert lighter("s1", "s2", {"s1": Load(in_flight=3)}) == "s2"


def test_a_failed_server_is_a_suspect_until_it_answers_or_time_passes() -> None:
    loads = Loads()
    loads.sent("s1")
    loads.failed("s1", 100.0)
    assert loads.suspects(100.0) == {"s1"}
    assert loads.suspects(100.0 + SUSPECT_MS) == set()
    loads.sent("s1")
    loads.failed("s1", 200.0)
    answered(loads, "s1", 300.0, 5.0)
    assert loads.suspects(301.0) == set()


def test_the_loser_of_a_race_is_a_suspect_only_if_it_answered_nobody_meanwhile() -> None:
    loads = Loads()
    answered(loads, "s1", 150.0, 5.0)
    assert not loads.lost("s1", sent_ms=100.0, now_ms=200.0)
    assert loads.lost("s1", sent_ms=160.0, now_ms=200.0)
    assert loads.suspects(201.0) == {"s1"}


def test_the_wait_before_a_hedge_follows_the_slow_answers_of_the_same_kind_of_query() -> None:
    loads = Loads()
    assert loads.hedge_after_ms("shape") == HEDGE_UNKNOWN_MS
    for _ in range(HEDGE_SAMPLES_MIN):
        loads.took("shape", 2.0)
    assert loads.hedge_after_ms("shape") == HEDGE_FLOOR_MS
    for _ in range(4):
        loads.took("shape", 400.0)
    assert loads.hedge_after_ms("shape") == 600.0
    for _ in range(64):
        loads.took("shape", 100.0)
    assert loads.hedge_after_ms("shape") == 150.0


def test_hedges_are_a_twentieth_of_all_requests_after_a_small_burst() -> None:
    loads = Loads()
    assert sum(loads.may_hedge(2) for _ in range(100)) == int(HEDGE_BURST)
    hedges = 0
    for step in range(2_000):
        answered(loads, "s1", float(step), 1.0)
        hedges += loads.may_hedge(2)
    assert 98 <= hedges <= 100


def test_nothing_is_hedged_while_all_query_slots_are_taken() -> None:
    loads = Loads()
    for _ in range(2 * QUERIES_RUNNING_MAX):
        loads.sent("s1")
    assert not loads.may_hedge(2)
    loads.answered("s1", 0.0, 5.0)
    assert loads.may_hedge(2)


def test_a_kind_of_query_that_is_asked_all_the_time_is_not_forgotten_for_those_asked_once() -> None:
    loads = Loads()
    for _ in range(20):
        loads.took("usual", 100.0)
    for number in range(1_500):
        loads.took(number, 1.0)
        loads.took("usual", 100.0)
        assert loads.hedge_after_ms("usual") == 150.0
