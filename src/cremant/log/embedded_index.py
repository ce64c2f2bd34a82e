# SPDX-License-Identifier: Apache-2.0
"""The sparse index beside a file of the embedded log: one entry per 64 KiB, offset and timestamp to position.

It is advice and can be missing, short, damaged or made anew at any time: every entry has a checksum, and who uses one
checks that the frame it names is there. Entries ascend in all three columns.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

_ENTRY = struct.Struct("<qqqII")
ENTRY_BYTES = _ENTRY.size
_COLUMNS = np.dtype([("offset", "<i8"), ("timestamp_ms", "<i8"), ("position", "<i8"), ("crc", "<u4"), ("pad", "<u4")])
assert _COLUMNS.itemsize == ENTRY_BYTES == 32

#: Damaged entries that a search steps over before it gives up and walks the file from its start.
_TRIES = 8


class Entry(NamedTuple):
    """The frame at byte `position` begins with `offset` and was appended at `timestamp_ms`."""

    offset: int
    timestamp_ms: int
    position: int

    def pack(self) -> bytes:
        return _ENTRY.pack(*self, self.crc(), 0)

    def crc(self) -> int:
        return zlib.crc32(struct.pack("<qqq", *self))


def index_path(log_path: Path) -> Path:
    return log_path.with_suffix(".idx")


def add(log_path: Path, entry: Entry) -> None:
    """Appends an entry; a torn one at the end is overwritten. Under the partition's lock."""
    fd = os.open(index_path(log_path), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(fd).st_size
        os.pwrite(fd, entry.pack(), size - size % ENTRY_BYTES)
    finally:
        os.close(fd)


def rewrite(log_path: Path, entries: Iterable[Entry]) -> None:
    """Replaces the whole index at once."""
    path = index_path(log_path)
    temporary = path.with_suffix(f".idx.{os.getpid()}")
    temporary.write_bytes(b"".join(entry.pack() for entry in entries))
    temporary.replace(path)


def before_offset(log_path: Path, offset: int, end: int) -> Iterator[Entry]:
    """Entries at or before `offset`, nearest first, a few at most."""
    columns = _load(log_path)
    yield from _valid(columns, int(np.searchsorted(columns["offset"], offset, side="right")), end)


def before_time(log_path: Path, timestamp_ms: int, end: int) -> Iterator[Entry]:
    """Entries older than `timestamp_ms`, nearest first, a few at most."""
    columns = _load(log_path)
    yield from _valid(columns, int(np.searchsorted(columns["timestamp_ms"], timestamp_ms, side="left")), end)


def _load(log_path: Path) -> np.ndarray:
    try:
        data = index_path(log_path).read_bytes()
    except FileNotFoundError:
        data = b""
    return np.frombuffer(data[: len(data) - len(data) % ENTRY_BYTES], dtype=_COLUMNS)


def _valid(columns: np.ndarray, count: int, end: int) -> Iterator[Entry]:
    for row in columns[max(0, count - _TRIES) : count][::-1]:
        entry = Entry(int(row["offset"]), int(row["timestamp_ms"]), int(row["position"]))
        if entry.crc() == int(row["crc"]) and 0 <= entry.position < end:
            yield entry
