# SPDX-License-Identifier: Apache-2.0
"""Files of a partition of the embedded log: names, opening, walking over frames, finding an offset or a time.

`<first offset, 20 digits>.log` holds frames back to back, `.idx` beside it is its sparse index (`embedded_index`).
Offsets have no holes, so the file after one that ends at offset o is named o.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from cremant.log import embedded_index as index
from cremant.log.embedded_frame import HEADER_BYTES, FrameHeader, parse_header
from cremant.model.errors import Corrupt, CremantError, NoResource, WorldError
from cremant.model.limits import LOG_INDEX_EVERY_BYTES

LOG_SUFFIX = ".log"


class File:
    """An open file descriptor that closes itself when nobody uses it any more, also on another thread."""

    __slots__ = ("fd",)

    def __init__(self, path: Path, flags: int) -> None:
        self.fd = -1
        self.fd = os.open(path, flags | os.O_CLOEXEC, 0o644)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:
            close(self.fd)  # bound above: at the end of the process the module may be gone before its objects

    def size(self) -> int:
        return os.fstat(self.fd).st_size


def log_path(directory: Path, base: int) -> Path:
    return directory / f"{base:020d}{LOG_SUFFIX}"


def bases(directory: Path) -> list[int]:
    """First offsets of the files there are, ascending. Raises FileNotFoundError if the partition is gone."""
    return sorted(
        int(name[: -len(LOG_SUFFIX)])
        for name in os.listdir(directory)
        if name.endswith(LOG_SUFFIX) and name[: -len(LOG_SUFFIX)].isdigit()
    )


def world_error(error: OSError, what: str) -> CremantError:
    """The operating system's refusal as ours."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return NoResource(f"{what}: {error.strerror}", hint="free disk space, nothing half-written is visible")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return NoResource(f"{what}: {error.strerror}", hint="raise the limit of open files (ulimit -n)")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return NoResource(f"{what}: {error.strerror}", hint="the process must be able to write there")
    return WorldError(f"{what}: {error.strerror or error}")


def corrupt(path: Path, at: int, problem: str, *, hint: str = "") -> Corrupt:
    return Corrupt(f"{path} at byte {at}: {problem}", hint=hint or "the file was changed or the disk is failing")


def walk(file: File, path: Path, at: int, end: int, offset: int | None) -> Iterator[tuple[int, FrameHeader]]:
    """Frames from byte `at` up to `end`: (position, header). Looks at headers only. `offset`: expected of the first
    frame. Raises Corrupt."""
    chunk, start = b"", at
    while at < end:
        if at - start + HEADER_BYTES > len(chunk):
            chunk, start = os.pread(file.fd, min(LOG_INDEX_EVERY_BYTES, end - at), at), at
        header = parse_header(chunk, at - start)
        if isinstance(header, str):
            raise corrupt(path, at, header)
        if offset is not None and header.base_offset != offset:
            raise corrupt(path, at, f"expected offset {offset}, found {header.base_offset}")
        if at + header.frame_bytes > end:
            raise corrupt(path, at, f"expected a frame of {header.frame_bytes} bytes, found {end - at} bytes")
        yield at, header
        at += header.frame_bytes
        offset = header.next_offset


def first_header(directory: Path, base: int) -> FrameHeader:
    """Header of the first frame of a file that has one. Raises FileNotFoundError, Corrupt."""
    path = log_path(directory, base)
    file = File(path, os.O_RDONLY)
    header = parse_header(os.pread(file.fd, HEADER_BYTES, 0), 0)
    if isinstance(header, str):
        raise corrupt(path, 0, header)
    return header


def find_offset(file: File, path: Path, base: int, end: int, offset: int) -> int:
    """Position of the frame that has `offset`; the index bounds the walk. Raises Corrupt if no frame has it."""
    for entry in (*index.before_offset(path, offset, end), index.Entry(base, 0, 0)):
        if entry.position and not _is_frame(file, entry):
            continue
        for at, header in walk(file, path, entry.position, end, entry.offset):
            if header.next_offset > offset:
                return at
        break
    raise corrupt(path, end, f"expected the frame of offset {offset}, found the end of the file")


def find_time(file: File, path: Path, base: int, end: int, timestamp_ms: int) -> int | None:
    """First offset of the file not older than `timestamp_ms`; None if all are older."""
    for entry in (*index.before_time(path, timestamp_ms, end), index.Entry(base, 0, 0)):
        if entry.position and not _is_frame(file, entry):
            continue
        for _, header in walk(file, path, entry.position, end, entry.offset):
            if header.timestamp_ms >= timestamp_ms:
                return header.base_offset
        break
    return None


def last_header(file: File, path: Path, base: int, end: int) -> tuple[int, FrameHeader] | None:
    """The last frame of a file: (position, header)."""
    for entry in (*index.before_offset(path, 1 << 62, end), index.Entry(base, 0, 0)):
        if entry.position and not _is_frame(file, entry):
            continue
        frames = deque(walk(file, path, entry.position, end, entry.offset), maxlen=1)
        return frames[0] if frames else None
    return None


def _is_frame(file: File, entry: index.Entry) -> bool:
    """The index is advice: what it points at must look like the frame it names."""
    header = parse_header(os.pread(file.fd, HEADER_BYTES, entry.position), 0)
    return not isinstance(header, str) and header.base_offset == entry.offset
