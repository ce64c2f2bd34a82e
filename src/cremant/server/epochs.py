# SPDX-License-Identifier: Apache-2.0
"""Which epochs of upsert tables are closed and applied on this server, for whoever waits for one: queries whose cut has
not arrived yet, and brokers, who hear of every change within milliseconds (GET /internal/v1/epochs, a long poll).

Rules:

- A partition tells of an epoch after its rows and its updates are visible, never before.
- Nobody holds a thread while waiting; telling costs one comparison while nobody waits.
- Several partitions close the same epoch within milliseconds: a poll is answered SETTLE_S after the first of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from dataclasses import dataclass

from cremant.wire.messages import EpochsReply, EpochState

#: What an epoch takes from the first to the last partition of a server, about.
SETTLE_S = 0.004

_Key = tuple[str, int]


@dataclass(slots=True, eq=False)
class _Waiter:
    """For `epoch` of one partition; for any change, if there is no `key`."""

    key: _Key | None
    epoch: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]


class EpochBoard:
    """One per process. `tell` is called from any thread, `wait` and `poll` from event loops."""

    def __init__(self) -> None:
        self.nonce = secrets.token_hex(8)
        self._states: dict[_Key, EpochState] = {}
        self._version = 1
        self._waiters: list[_Waiter] = []
        self._guard = threading.Lock()

    def tell(self, incarnation: str, partition: int, state: EpochState | None) -> None:
        """None: the partition is not served from here (any more, or not yet)."""
        key = (incarnation, partition)
        with self._guard:
            if self._states.get(key) == state:
                return
            if state is None:
                del self._states[key]
            else:
                self._states[key] = state
            self._version += 1
            due = [waiter for waiter in self._waiters if self._is_due(waiter, key)]
            self._waiters = [waiter for waiter in self._waiters if waiter not in due]
        for waiter in due:
            with contextlib.suppress(RuntimeError):  # that loop is closed already
                waiter.loop.call_soon_threadsafe(_resolve, waiter.future)

    def _is_due(self, waiter: _Waiter, changed: _Key) -> bool:
        if waiter.key is None:
            return True
        return waiter.key == changed and (changed not in self._states or self._has_closed(changed, waiter.epoch))

    def _has_closed(self, key: _Key, epoch: int) -> bool:
        state = self._states.get(key)
        return state is not None and state.closed >= epoch

    def state(self, incarnation: str, partition: int) -> EpochState | None:
        return self._states.get((incarnation, partition))

    def states(self, incarnation: str) -> dict[int, EpochState]:
        with self._guard:
            return {partition: state for (name, partition), state in self._states.items() if name == incarnation}

    async def wait(self, incarnation: str, partition: int, epoch: int, timeout_s: float) -> bool:
        """True once `epoch` is closed there; False at the timeout, or when the partition is not served any more."""
        key = (incarnation, partition)
        if self._has_closed(key, epoch):
            return True
        deadline_s = time.monotonic() + timeout_s
        while not self._has_closed(key, epoch):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not await self._woken(key, epoch, left_s) or self._states.get(key) is None:
                return self._has_closed(key, epoch)
        return True

    async def poll(self, since: int, nonce: str, timeout_s: float) -> EpochsReply:
        """All that is closed, as soon as it differs from what version `since` of process `nonce` said, or when the time
        is over."""
        if nonce == self.nonce and since == self._version and await self._woken(None, since, timeout_s):
            await asyncio.sleep(SETTLE_S)
        with self._guard:
            epochs: dict[str, dict[str, EpochState]] = {}
            for (incarnation, partition), state in sorted(self._states.items()):
                epochs.setdefault(incarnation, {})[str(partition)] = state
            return EpochsReply(instance="", nonce=self.nonce, version=self._version, epochs=epochs)

    async def _woken(self, key: _Key | None, epoch: int, timeout_s: float) -> bool:
        """`epoch`: of the partition; without `key` the version that is known. False at the timeout."""
        loop = asyncio.get_running_loop()
        waiter = _Waiter(key, epoch, loop, loop.create_future())
        with self._guard:
            # Under the guard: what is told from now on wakes the waiter.
            if self._has_closed(key, epoch) if key is not None else self._version != epoch:
                return True
            self._waiters.append(waiter)
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await waiter.future
        except TimeoutError:
            return False
        finally:
            with self._guard, contextlib.suppress(ValueError):
                self._waiters.remove(waiter)
        return True


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
