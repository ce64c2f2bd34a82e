# SPDX-License-Identifier: Apache-2.0
"""Waiting for rows to become visible, without a thread and without polling.

A partition reports how far it is after each turn that brought rows; whoever waits for an offset is woken once it is
reached, or when the partition ends. Reporting costs one comparison while nobody waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from dataclasses import dataclass

import msgspec

from cremant.model.offsets import Watermark

#: Epochs whose freshness is remembered: more than a query lags behind.
EPOCHS_SEEN = 256


@dataclass(slots=True)
class _Waiter:
    offset: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]


class Progress:
    """How far one partition is visible. `reached` and `end` are called from any thread, `wait` from event loops."""

    def __init__(self, offset: int) -> None:
        self._offset = offset
        self._ended = False
        self._waiters: list[_Waiter] = []
        self._guard = threading.Lock()

    def reached(self, offset: int) -> None:
        """All rows below `offset` are visible. It may go back (a rewind)."""
        self._offset = offset
        if self._waiters:
            self._wake(offset)

    def end(self) -> None:
        """Nothing more will come."""
        self._ended = True
        self._wake(None)

    def _wake(self, offset: int | None) -> None:
        with self._guard:
            due = [waiter for waiter in self._waiters if offset is None or waiter.offset <= offset]
            self._waiters = [waiter for waiter in self._waiters if waiter not in due]
        for waiter in due:
            with contextlib.suppress(RuntimeError):  # that loop is closed already
                waiter.loop.call_soon_threadsafe(_resolve, waiter.future)

    async def wait(self, offset: int, timeout_s: float) -> bool:
        """True once rows below `offset` are visible; False at the timeout or the end."""
        loop = asyncio.get_running_loop()
        waiter = _Waiter(offset, loop, loop.create_future())
        with self._guard:
            self._waiters.append(waiter)
        try:
            # Looked at after the waiter is in place: what comes in between wakes it.
            if self._offset >= offset or self._ended:
                return self._offset >= offset
            async with asyncio.timeout(timeout_s):
                await waiter.future
        except TimeoutError:
            return False
        finally:
            with self._guard, contextlib.suppress(ValueError):
                self._waiters.remove(waiter)
        return self._offset >= offset


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class SeenEpochs:
    """What was visible as of the last closed epochs of one partition. One thread adds, any reads."""

    def __init__(self) -> None:
        self._seen: deque[Watermark] = deque(maxlen=EPOCHS_SEEN)

    def add(self, watermark: Watermark) -> None:
        """As its epoch was closed, or (the same epoch again) as more became known of it."""
        if self._seen and self._seen[-1].epoch == watermark.epoch:
            self._seen[-1] = watermark
        else:
            self._seen.append(watermark)

    def at(self, epoch: int, now: Watermark) -> Watermark:
        """The newest that is not above `epoch`; of one long ago, nothing is known."""
        for seen in reversed(tuple(self._seen)):
            if seen.epoch <= epoch:
                return seen
        if epoch >= now.epoch:
            return now
        return msgspec.structs.replace(now, epoch=epoch, next_offset=0, max_ingestion_ms=None, caught_up_at_ms=None)
