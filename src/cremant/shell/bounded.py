# SPDX-License-Identifier: Apache-2.0
"""Calls to what may be slow or gone (a broker of another system), bounded in time and number.

Rules: a caller waits for at most its deadline, whatever the call does; at most `calls_max` run at once, and who finds
no place is refused instead of waiting behind calls that hang. An abandoned call ends by itself: its thread is a daemon
and gives its place back then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from cremant.model.errors import DeadlineExceeded, NoResource, Unavailable

T = TypeVar("T")


class BoundedCalls:
    """Thread-safe."""

    def __init__(self, calls_max: int, name: str) -> None:
        self._calls_max = calls_max
        self._name = name
        self._places = threading.Semaphore(calls_max)

    def call(self, what: str, run: Callable[[], T], timeout_ms: int) -> T:
        """The result of `run`, or what it raised. Raises DeadlineExceeded, Unavailable (no place free), NoResource (no
        thread to be had)."""
        if not self._places.acquire(blocking=False):
            raise Unavailable(
                f"{what}: {self._calls_max} calls are waiting for an answer already", hint="is it reachable?"
            )
        future: Future[T] = Future()
        try:
            threading.Thread(target=self._run, args=(future, run), name=self._name, daemon=True).start()
        except RuntimeError as error:
            self._places.release()
            raise NoResource(f"{what}: {error}", hint="raise the limit of threads (ulimit -u)") from error
        try:
            return future.result(timeout_ms / 1000)
        except TimeoutError as error:
            if future.done():  # it raised that itself, or ended this very moment
                return future.result()
            raise DeadlineExceeded(f"{what}: no answer within {timeout_ms} ms", hint="is it reachable?") from error

    def _run(self, future: Future[T], run: Callable[[], T]) -> None:
        try:
            result = run()
        except BaseException as error:
            self._places.release()
            future.set_exception(error)
        else:
            self._places.release()
            future.set_result(result)
