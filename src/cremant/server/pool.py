# SPDX-License-Identifier: Apache-2.0
"""A fixed number of worker threads that never keep a process from ending.

The standard library's executor joins its threads when the interpreter exits, so one long build or an abandoned query
would hold up a stop. What these threads do is safe to abandon: builds leave scratch, queries leave nothing.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonPool:
    """`submit` never blocks; callers bound how much they submit. `nice`: of its threads, above that of the process:
    what nobody waits for leaves the cores to what somebody does (Linux; elsewhere threads have no priority of their
    own). Threads that these start inherit it: Arrow's own, which nothing else in a server uses."""

    def __init__(self, threads: int, name: str, *, nice: int = 0) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(threads)]
        self._nice = nice
        self._closed = False
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        if self._closed:
            future.cancel()
        else:
            self._work.put((future, lambda: call(*args, **kwargs)))
        return future

    def close(self) -> None:
        """Starts nothing more; what runs is abandoned."""
        self._closed = True
        while True:
            try:
                item = self._work.get_nowait()
            except queue.Empty:
                break
            if item is not None:
                item[0].cancel()
        for _ in self._threads:
            self._work.put(None)

    def _run(self) -> None:
        if self._nice and sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + self._nice)
        while (item := self._work.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            # Nothing of a finished query may stay alive while the thread waits.
            del future, call, item
