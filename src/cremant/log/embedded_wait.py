# SPDX-License-Identifier: Apache-2.0
"""Waiting for appends of other processes: inotify on the partitions' state files, or polling where there is none.

Every append rewrites its partition's state file, so a waiter sleeps in the kernel and wakes within a millisecond.
Without inotify (its instances are limited per user) a waiter looks at the states again and again, at most every 5 ms.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

_IN_MODIFY = 0x002
_IN_MOVE_SELF = 0x800
_IN_DELETE_SELF = 0x400
_IN_NONBLOCK = 0o4000
_IN_CLOEXEC = 0o2000000
_EVENTS_BYTES = 64 * 1024

#: However the kernel notifies, a waiter looks for itself this often.
_LOOK_EVERY_S = 0.25
_NAP_FIRST_S = 0.000_5
_NAP_MAX_S = 0.005


class Waiters:
    """The waiters of one log object; each waiting thread takes one, so there are as many as threads wait at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[_Inotify] = []

    def wait(self, paths: Iterable[Path], ready: Callable[[], bool], timeout_s: float) -> bool:
        """True as soon as `ready()`; False after `timeout_s`. `paths` are the files that change before it does."""
        deadline_s = time.monotonic() + timeout_s
        if ready():
            return True
        if timeout_s <= 0:
            return False
        watch = self._take()
        if watch is None:
            return _poll(ready, deadline_s)
        try:
            if not watch.watch({os.fspath(path) for path in paths}):
                return _poll(ready, deadline_s)
            while True:
                watch.drain()
                if ready():
                    return True
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                watch.sleep(min(left_s, _LOOK_EVERY_S))
        finally:
            with self._lock:
                self._free.append(watch)

    def _take(self) -> _Inotify | None:
        with self._lock:
            if self._free:
                return self._free.pop()
        fd = _libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC) if _libc is not None else -1
        return _Inotify(fd) if fd >= 0 else None


class _Inotify:
    """One inotify instance; it stays between waits, so that waiting for the same files again costs nothing."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._watched: dict[str, int] = {}
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._fd)

    def watch(self, paths: set[str]) -> bool:
        """False if the kernel cannot watch all of them."""
        assert _libc is not None
        for path in self._watched.keys() - paths:
            _libc.inotify_rm_watch(self._fd, self._watched.pop(path))
        for path in paths:
            mask = _IN_MODIFY | _IN_MOVE_SELF | _IN_DELETE_SELF
            number = _libc.inotify_add_watch(self._fd, os.fsencode(path), mask)
            if number < 0:
                return False
            self._watched[path] = number
        return True

    def drain(self) -> None:
        try:
            os.read(self._fd, _EVENTS_BYTES)
        except BlockingIOError:
            pass  # nothing happened since

    def sleep(self, timeout_s: float) -> None:
        self._poll.poll(timeout_s * 1000)


def _poll(ready: Callable[[], bool], deadline_s: float) -> bool:
    nap_s = _NAP_FIRST_S
    while not ready():
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(nap_s, left_s))
        nap_s = min(2 * nap_s, _NAP_MAX_S)
    return True


def _load_libc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None, use_errno=True)
    return libc if hasattr(libc, "inotify_init1") else None


_libc = _load_libc()
