# SPDX-License-Identifier: Apache-2.0
"""Waiting for rows, or for proven freshness, to become visible: without a thread and without polling.

A partition reports how far it is after each turn; whoever waits is woken once it is there, or when the partition ends.
Reporting costs one comparison while nobody waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Waiter:
    offset: int
    fresh_ms: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]


class Progress:
    """How far one partition is visible. `reached` and `end` are called from any thread, `wait` from event loops."""

    def __init__(self, offset: int) -> None:
        self._offset = offset
        self._fresh_ms = 0
        self._ended = False
        self._waiters: list[_Waiter] = []
        self._guard = threading.Lock()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiters)

    def reached(self, offset: int, fresh_ms: int | None = None) -> None:
        """All rows below `offset` are visible, and all that was in the stream at wall time `fresh_ms` (None: not
        known). Both may go back (a rewind)."""
        self._offset, self._fresh_ms = offset, fresh_ms or 0
        if self._waiters:
            self._wake()

    def end(self) -> None:
        """Nothing more will come."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        with self._guard:
            due: list[_Waiter] = []
            left: list[_Waiter] = []
            for waiter in self._waiters:
                is_due = self._ended or self._is_at(waiter.offset, waiter.fresh_ms)
                (due if is_due else left).append(waiter)
            self._waiters = left
        for waiter in due:
            with contextlib.suppress(RuntimeError):  # that loop is closed already
                waiter.loop.call_soon_threadsafe(_resolve, waiter.future)

    def _is_at(self, offset: int, fresh_ms: int) -> bool:
        return self._offset >= offset and self._fresh_ms >= fresh_ms

    async def wait(self, offset: int, timeout_s: float, *, fresh_ms: int = 0) -> bool:
        """True once rows below `offset` are visible, and all that was in the stream at `fresh_ms` (0: whatever); False
        at the timeout or the end."""
        loop = asyncio.get_running_loop()
        waiter = _Waiter(offset, fresh_ms, loop, loop.create_future())
        with self._guard:
            self._waiters.append(waiter)
        try:
            # Looked at after the waiter is in place: what comes in between wakes it.
            if self._is_at(offset, fresh_ms) or self._ended:
                return self._is_at(offset, fresh_ms)
            async with asyncio.timeout(timeout_s):
                await waiter.future
        except TimeoutError:
            return False
        finally:
            with self._guard, contextlib.suppress(ValueError):
                self._waiters.remove(waiter)
        return self._is_at(offset, fresh_ms)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
