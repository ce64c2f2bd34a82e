# SPDX-License-Identifier: Apache-2.0
"""SIGSTOP of a process and all below it, outside of an append of the embedded log.

A writer that is stopped inside of an append keeps the partition's lock, and every other writer waits for it: a test of
orphans would then show nothing but that. Whoever wants to see what others do meanwhile stops processes here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from bench.cluster import descendants

#: An append takes milliseconds: whoever is found inside of one for so long holds its lock for another reason.
DEADLINE_S = 60.0
_ATTEMPT_S = 5.0
_PAUSE_S = 0.02


class Stopped:
    """A process and all below it, stopped until `go_on`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.pids: list[int] = []

    def go_on(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def stop(self) -> bool:
        """Also what is forked meanwhile. Whether all of them stood still in time: who waits in the kernel for a child
        that was stopped before its exec never does."""
        until = time.monotonic() + _ATTEMPT_S
        self.pids = []
        while moving := sorted({self._pid, *descendants(self._pid)} - set(self.pids)):
            for pid in moving:
                self.pids.append(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            while not all(map(_stands_still, moving)):
                if time.monotonic() > until:
                    return False
                time.sleep(0.001)
        return True


@contextlib.contextmanager
def stopped(pid: int, log_dir: Path | str) -> Iterator[Stopped]:
    """Stops `pid` and everything below it, at a moment at which none of them holds a lock of the log in `log_dir`. They
    go on at the end of the block, whatever happens in it. Raises AssertionError if there is no such moment."""
    whole = Stopped(pid)
    until = time.monotonic() + DEADLINE_S
    try:
        while not whole.stop() or _holders(Path(log_dir)) & set(whole.pids):
            whole.go_on()
            assert time.monotonic() < until, f"{pid} and its children never stood still without locks of {log_dir}"
            time.sleep(_PAUSE_S)
        yield whole
    finally:
        whole.go_on()


def _stands_still(pid: int) -> bool:
    """All of its threads are stopped, or it is gone."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return all(_state(thread) in "TtZX" for thread in threads)
    except (FileNotFoundError, ProcessLookupError):
        return True


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text("ascii", "replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _holders(log_dir: Path) -> set[int]:
    """Who holds a lock of a file in `log_dir`, as the kernel tells: `1: FLOCK ADVISORY WRITE <pid> fe:00:<inode> 0`."""
    inodes = {str(inode) for inode in _inodes(log_dir)}
    locks = (line.split() for line in Path("/proc/locks").read_text("ascii").splitlines())
    return {int(lock[4]) for lock in locks if lock[1] == "FLOCK" and lock[5].rpartition(":")[2] in inodes}


def _inodes(directory: Path) -> Iterator[int]:
    """Of the files of a whole tree. What goes meanwhile is not there."""
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _inodes(Path(entry.path))
            else:
                yield entry.inode()
