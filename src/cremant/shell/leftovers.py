# SPDX-License-Identifier: Apache-2.0
"""Temporary directories that outlive kill -9 must not outlive it for ever.

Each directory that a process makes below the system's temporary directory is held by a lock that the kernel lets go of
when the process ends, however it ends. The next pipeline that starts, or `cremant doctor`, removes those that nobody
holds any more. Names start with `cremant-<uid>-`: other users' directories are none of our business.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_LOCK = "held.lock"
_NEW_LOCK = "new.lock"
#: A directory younger than this may be between its making and its lock.
_YOUNG_S = 30.0
_held: dict[Path, IO[bytes]] = {}


def temporary_path(name: str) -> Path:
    """Where a directory of that name belongs; short, because socket paths are limited to about 100 characters."""
    return Path(tempfile.gettempdir()) / f"cremant-{os.getuid()}-{name}"


def make_held(directory: Path) -> None:
    """Makes the directory, for this user only, and holds it until `remove_held` or the end of the process. What a dead
    process left under this name goes first. Raises OSError, also when a living process holds it."""
    if directory not in _held and (directory / _LOCK).exists() and not _is_stale(directory):
        raise FileExistsError(errno.EEXIST, "another process that lives holds it", str(directory))
    remove_held(directory)
    directory.mkdir(mode=0o700)
    # Under its name once it is held: a sweep never finds a lock that it could take.
    lock = (directory / _NEW_LOCK).open("ab")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (directory / _NEW_LOCK).rename(directory / _LOCK)
    _held[directory] = lock


def remove_held(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    lock = _held.pop(directory, None)
    if lock is not None:
        lock.close()


def stale_directories() -> Iterator[Path]:
    """Ours, and held by no living process."""
    for directory in sorted(Path(tempfile.gettempdir()).glob(f"cremant-{os.getuid()}-*")):
        if directory not in _held and directory.is_dir() and not directory.is_symlink() and _is_stale(directory):
            yield directory


def remove_stale_directories() -> list[Path]:
    """Returns what was removed."""
    removed = []
    for directory in stale_directories():
        shutil.rmtree(directory, ignore_errors=True)
        removed.append(directory)
    return removed


def _is_stale(directory: Path) -> bool:
    try:
        if time.time() - directory.stat().st_mtime < _YOUNG_S and not (directory / _LOCK).exists():
            return False
        with (directory / _LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or gone meanwhile
        return False
    return True
