# SPDX-License-Identifier: Apache-2.0
"""Bounds of a broker: how many queries are under way and wait, and how many bytes of servers' answers it holds.

What does not fit is refused by itself, with a Pinot error code; nothing grows without limit and nothing waits longer
than its query may take. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from cremant.model.errors import QueryError
from cremant.model.query_codes import QueryCode


class Admission:
    """`running` queries at once, in order of arrival; `waiting` more wait for their turn."""

    def __init__(self, running: int, waiting: int) -> None:
        self._free = asyncio.Semaphore(running)
        self._running_max = running
        self._waiting_max = waiting
        self.waiting = 0

    @contextlib.asynccontextmanager
    async def turn(self, deadline_s: float) -> AsyncIterator[float]:
        """Yields the seconds it waited. Raises QueryError 429 (too many) or 400 (out of time)."""
        if not self._free.locked():
            await self._free.acquire()
            waited_s = 0.0
        else:
            waited_s = await self._wait(deadline_s)
        try:
            yield waited_s
        finally:
            self._free.release()

    async def _wait(self, deadline_s: float) -> float:
        if self.waiting >= self._waiting_max:
            raise QueryError(
                QueryCode.TOO_MANY_REQUESTS,
                f"TooManyRequestsError: {self._running_max} queries are under way here and {self.waiting} wait",
                hint="try again in a moment, or ask another broker",
            )
        began_s = time.monotonic()
        self.waiting += 1
        try:
            async with asyncio.timeout(max(0.0, deadline_s - began_s)):
                await self._free.acquire()
        except TimeoutError as error:
            raise QueryError(
                QueryCode.BROKER_TIMEOUT,
                f"BrokerTimeoutError: {self._running_max} queries were under way on this broker, and the query's time "
                "was over before its turn came",
                hint="raise timeoutMs, or ask less at once",
            ) from error
        finally:
            self.waiting -= 1
        return time.monotonic() - began_s


class Room:
    """Bytes of answers, of one broker (without `whole`) or of one query within it."""

    def __init__(self, limit_bytes: int, whole: Room | None = None, *, each_bytes: int | None = None) -> None:
        """`each_bytes`: of one answer at most."""
        self._limit_bytes = limit_bytes
        self._each_bytes = limit_bytes if each_bytes is None else each_bytes
        self._whole = whole
        self.held_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Raises QueryError 245 if that is too much."""
        if size_bytes > self._each_bytes:
            raise _too_large(f"an answer of {size_bytes} bytes, at most {self._each_bytes} are read from one server")
        if self.held_bytes + size_bytes > self._limit_bytes:
            of = "a query" if self._whole is not None else "all queries of a broker"
            raise _too_large(
                f"an answer of {size_bytes} bytes, {self.held_bytes} are there, and {of} may hold {self._limit_bytes}"
            )
        if self._whole is not None:
            self._whole.take(size_bytes)
        self.held_bytes += size_bytes

    def give_back(self) -> None:
        """Of a query that has ended."""
        if self._whole is not None:
            self._whole.held_bytes -= self.held_bytes
        self.held_bytes = 0


def _too_large(what: str) -> QueryError:
    hint = "aggregate, select fewer columns, or fetch the rows in pages"
    return QueryError(QueryCode.SERVER_RESOURCE_LIMIT, what, hint=hint)
