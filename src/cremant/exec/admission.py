# SPDX-License-Identifier: Apache-2.0
"""Admission: who may run now. A gate with two lanes, bounded queues, and waiters that give up when their query is to
end: at its deadline, or when it is cancelled.

Long queries never take all slots: QUERIES_SHORT_MAX more are there for short ones (few rows to scan), so a lookup does
not wait for eight scans. Within a lane it is first come, first served.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator

from cremant.exec.stop import Stop, cancelled
from cremant.model.errors import QueryError
from cremant.model.limits import QUERIES_RUNNING_MAX, QUERIES_SHORT_MAX, QUERIES_WAITING_MAX
from cremant.model.query_codes import QueryCode

#: A query over fewer rows is short: scanning them takes some ten milliseconds.
SHORT_ROWS = 1_000_000


class _Lane:
    """Slots that are free (none while somebody waits), and who waits for one."""

    def __init__(self, slots: int) -> None:
        self.free = slots
        self.waiting: deque[_Waiter] = deque()


class _Waiter:
    """`woken` is set once it has a slot (`admitted`), or need not wait any longer."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self.admitted = False


class Admission:
    """For threads: `enter` blocks."""

    def __init__(self) -> None:
        self._long, self._short = _Lane(QUERIES_RUNNING_MAX), _Lane(QUERIES_SHORT_MAX)
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def enter(self, stop: Stop, *, short: bool) -> Iterator[None]:
        """Raises QueryError 211 (too many wait), 240 (out of time) or 503 (cancelled)."""
        lane, waiter = self._queue(short=short)
        if waiter is not None:
            self._wait(lane, waiter, stop)
        try:
            yield
        finally:
            self._release(lane)

    def _queue(self, *, short: bool) -> tuple[_Lane, _Waiter | None]:
        """The lane, and a place in its queue unless there was a slot."""
        with self._lock:
            for lane in (self._short, self._long) if short else (self._long,):
                if lane.free:
                    lane.free -= 1
                    return lane, None
            if len(self._short.waiting) + len(self._long.waiting) >= QUERIES_WAITING_MAX:
                raise too_many()
            lane, waiter = self._short if short else self._long, _Waiter()
            lane.waiting.append(waiter)
            return lane, waiter

    def _wait(self, lane: _Lane, waiter: _Waiter, stop: Stop) -> None:
        stop.on_cancel(waiter.woken.set)
        waiter.woken.wait(max(0.0, stop.deadline_s - time.monotonic()))
        with self._lock:
            if not waiter.admitted:
                lane.waiting.remove(waiter)
        if stop.cancelled:
            if waiter.admitted:
                self._release(lane)
            raise cancelled()
        if not waiter.admitted:
            raise no_turn()

    def _release(self, lane: _Lane) -> None:
        with self._lock:
            if lane.waiting:
                waiter = lane.waiting.popleft()
                waiter.admitted = True
                waiter.woken.set()
            else:
                lane.free += 1


def too_many() -> QueryError:
    return QueryError(
        QueryCode.SERVER_OUT_OF_CAPACITY, f"{QUERIES_WAITING_MAX} queries are waiting already",
        hint="send fewer queries at once",
    )  # fmt: skip


def no_turn() -> QueryError:
    return QueryError(
        QueryCode.QUERY_SCHEDULING_TIMEOUT, "the query's time was over before its turn came",
        hint="send fewer queries at once, or raise timeoutMs",
    )  # fmt: skip
