# SPDX-License-Identifier: Apache-2.0
"""The gate: slots come back, turns go by order of arrival, and nobody waits longer than its query lives."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from cremant.exec.admission import Admission
from cremant.exec.stop import Stop
from cremant.model.errors import QueryError
from cremant.model.limits import QUERIES_RUNNING_MAX, QUERIES_SHORT_MAX
from cremant.model.query_codes import QueryCode


def in_s(seconds: float) -> Stop:
    return Stop(time.monotonic() + seconds)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@contextlib.contextmanager
def full(admission: Admission) -> Iterator[None]:
    with contextlib.ExitStack() as others:
        for _ in range(QUERIES_RUNNING_MAX):
            others.enter_context(admission.enter(in_s(60), short=False))
        for _ in range(QUERIES_SHORT_MAX):
            others.enter_context(admission.enter(in_s(60), short=True))
        yield


def waiting(admission: Admission) -> int:
    return len(admission._long.waiting) + len(admission._short.waiting)


def is_as_new(admission: Admission) -> bool:
    free = (admission._long.free, admission._short.free)
    return waiting(admission) == 0 and free == (QUERIES_RUNNING_MAX, QUERIES_SHORT_MAX)


def pass_through(admission: Admission, stop: Stop, *, short: bool = False) -> None:
    with admission.enter(stop, short=short):
        pass


@pytest.mark.parametrize("short", [False, True])
def test_a_cancelled_query_waits_no_longer_for_its_turn(short: bool) -> None:
    admission, stop = Admission(), in_s(3_600)
    with ThreadPoolExecutor(1) as pool, full(admission):
        waiter = pool.submit(pass_through, admission, stop, short=short)
        until(lambda: waiting(admission) == 1)
        stop.cancel()
        with pytest.raises(QueryError) as raised:
            waiter.result(timeout=30)
        assert raised.value.code == QueryCode.QUERY_CANCELLED
        assert waiting(admission) == 0
    assert is_as_new(admission)


def test_a_query_that_was_cancelled_before_takes_no_turn_that_it_would_wait_for() -> None:
    admission, stop = Admission(), in_s(3_600)
    stop.cancel()
    with full(admission), pytest.raises(QueryError) as raised:
        pass_through(admission, stop)
    assert raised.value.code == QueryCode.QUERY_CANCELLED
    assert is_as_new(admission)


def test_who_gave_up_is_not_given_a_slot() -> None:
    admission = Admission()
    with full(admission), pytest.raises(QueryError) as raised:
        pass_through(admission, in_s(0.01))
    assert raised.value.code == QueryCode.QUERY_SCHEDULING_TIMEOUT
    assert is_as_new(admission)


def test_first_come_first_served() -> None:
    admission, served = Admission(), list[int]()

    def one(number: int) -> None:
        with admission.enter(in_s(60), short=False):
            served.append(number)

    with ThreadPoolExecutor(20) as pool, contextlib.ExitStack() as others:
        last = admission.enter(in_s(60), short=False)
        for _ in range(QUERIES_RUNNING_MAX - 1):
            others.enter_context(admission.enter(in_s(60), short=False))
        with last:
            waiters = list[Future[None]]()
            for number in range(20):
                waiters.append(pool.submit(one, number))
                until(lambda: waiting(admission) == len(waiters))
        # One slot goes from hand to hand.
        for waiter in waiters:
            waiter.result(timeout=30)
    assert served == list(range(20))
    assert is_as_new(admission)


def test_slots_survive_cancels_that_meet_a_turn() -> None:
    """Whoever is cancelled in the moment it is admitted hands its slot on."""
    admission = Admission()
    for _ in range(200):
        stops = [in_s(60) for _ in range(4)]
        with full(admission):
            threads = [threading.Thread(target=_ignoring, args=(admission, stop)) for stop in stops]
            for thread in threads:
                thread.start()
            until(lambda: waiting(admission) == 4)
            canceller = threading.Thread(target=lambda own=stops: [stop.cancel() for stop in own])
            canceller.start()
        for thread in [*threads, canceller]:
            thread.join(30)
        assert is_as_new(admission)


def _ignoring(admission: Admission, stop: Stop) -> None:
    with contextlib.suppress(QueryError):
        pass_through(admission, stop)
