# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole and on the disk, or not at all: what deep stores write with."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from cremant.model.errors import NoResource

CHUNK_BYTES = 1024 * 1024
#: What file systems answer that have no hard links (shares of Windows, FUSE), or none across two of them.
NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


def place(temporary: Path, target: Path) -> None:
    """Gives a whole file its name, if nobody has that: raises FileExistsError. Where there are no hard links a race
    could be lost unnoticed; names of objects tell their content, so the loser wrote the same bytes."""
    try:
        os.link(temporary, target)
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        if target.exists():
            raise FileExistsError(errno.EEXIST, "exists already", str(target)) from None
        temporary.rename(target)


def copy_synced(source: Path, target: Path) -> None:
    with source.open("rb") as reader, target.open("xb") as writer:
        shutil.copyfileobj(reader, writer, CHUNK_BYTES)
        writer.flush()
        os.fsync(writer.fileno())


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Callable[[bytes], None]]:
    """A function that writes to a file of ours; on the disk when it ends. Raises NoResource."""

    def failed(error: OSError) -> NoResource:
        return NoResource(f"cannot write {path}: {error}", hint="free disk space; it is retried")

    try:
        file = path.open("xb")
    except OSError as error:
        raise failed(error) from error

    def write(chunk: bytes) -> None:
        try:
            file.write(chunk)
        except OSError as error:
            raise failed(error) from error

    with file:
        yield write
        try:
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            raise failed(error) from error


def discard(temporary: Path) -> None:
    """What cannot be removed now, `sweep` removes later; the error that led here matters more."""
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """What a file, or the names in a directory, are now is on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
