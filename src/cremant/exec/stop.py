# SPDX-License-Identifier: Apache-2.0
"""Stop: what ends a query early, its deadline or somebody's cancel; shared by all who work on it, on any thread.

Work that can be interrupted (DataFusion's streams) is told through `on_cancel`; work that cannot asks `check` between
its steps, each of which is short.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cremant.model.errors import QueryError
from cremant.model.query_codes import QueryCode


class Stop:
    """`deadline_s` is absolute, on `time.monotonic()`. Thread-safe."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._lock = threading.Lock()
        self._cancelled = False
        self._calls: list[Callable[[], object]] = []

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """Once or more often; the first has effect."""
        with self._lock:
            self._cancelled = True
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def on_cancel(self, call: Callable[[], object]) -> None:
        """`call` must be quick and may come from any thread; at once if it is cancelled already."""
        with self._lock:
            if not self._cancelled:
                self._calls.append(call)
                return
        call()

    def check(self) -> None:
        """Raises QueryError 503 or 250 if the work is to end."""
        if self._cancelled:
            raise cancelled()
        if time.monotonic() >= self.deadline_s:
            raise timed_out()


def cancelled() -> QueryError:
    return QueryError(QueryCode.QUERY_CANCELLED, "QueryCancellationError: the query was cancelled")


def timed_out() -> QueryError:
    return QueryError(
        QueryCode.EXECUTION_TIMEOUT, "the query did not finish within its time and was cancelled",
        hint="narrow the filter, or raise timeoutMs",
    )  # fmt: skip
