# SPDX-License-Identifier: Apache-2.0
"""The state record of a partition of the embedded log: where its end is. One small file, also the partition's lock.

An append is committed by writing this record: readers and writers never look past `end`, so what a killed writer left
behind it is not there, and the next append cuts it. The record is written with one write, carries a checksum and is
replaced under the lock only. It says which boot of the machine wrote it: after a power cut it may be newer or older
than the files, so it is not believed and is made anew from them (`embedded_recovery`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cremant.model.errors import Unavailable

_RECORD = struct.Struct("<IHHQqqqqqq")
_CRC = struct.Struct("<I")
RECORD_BYTES = _RECORD.size + _CRC.size
_MAGIC = 0x54534343  # "CCST" in the file
_VERSION = 1
_DELETED = 1

#: How long an append waits for another writer. A working one holds the lock for well under 100 ms.
LOCK_TIMEOUT_S = 10.0
_LOCK_NAP_FIRST_S = 20e-6
_LOCK_NAP_MAX_S = 2e-3


class PartitionState(NamedTuple):
    """`active_base`: the file written to, named by its first offset; `end`: its committed bytes. `next_offset`: of the
    next append. `last_timestamp_ms`: of the newest message. `earliest`: first offset left. `indexed`: position in the
    active file of the newest index entry, -1 if none."""

    active_base: int = 0
    end: int = 0
    next_offset: int = 0
    last_timestamp_ms: int = 0
    earliest: int = 0
    indexed: int = -1
    deleted: bool = False

    def pack(self) -> bytes:
        record = _RECORD.pack(
            _MAGIC, _VERSION, _DELETED if self.deleted else 0, _BOOT, self.active_base, self.end, self.next_offset,
            self.last_timestamp_ms, self.earliest, self.indexed,
        )  # fmt: skip
        return record + _CRC.pack(zlib.crc32(record))


def _boot() -> int:
    """Number of this boot of the machine."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text("ascii")
    except OSError:
        return 0  # no such file outside Linux: then the record is believed also after a power cut
    return int(text.replace("-", "")[:16], 16)


_BOOT = _boot()


def unpack(record: bytes) -> PartitionState | None:
    """None if the record is not one, is damaged, half-written, or of another boot."""
    if len(record) != RECORD_BYTES:
        return None
    magic, version, flags, boot, base, end, offset, timestamp_ms, earliest, indexed = _RECORD.unpack_from(record)
    (crc,) = _CRC.unpack_from(record, _RECORD.size)
    if magic != _MAGIC or version != _VERSION or boot != _BOOT or crc != zlib.crc32(record[: _RECORD.size]):
        return None
    return PartitionState(base, end, offset, timestamp_ms, earliest, indexed, bool(flags & _DELETED))


@contextmanager
def locked(fd: int, what: str) -> Iterator[None]:
    """Holds the flock of `fd`. Raises Unavailable if another process keeps it for LOCK_TIMEOUT_S."""
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    nap_s = _LOCK_NAP_FIRST_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                raise
        if time.monotonic() > deadline_s:
            raise Unavailable(f"{what}: another writer held the lock for {LOCK_TIMEOUT_S:g} s", hint=_holder(fd))
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LOCK_NAP_MAX_S)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


@contextmanager
def shared(fd: int) -> Iterator[bool]:
    """Whether no writer holds the flock of `fd`; if so, none gets it in this block."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
            raise
        yield False
        return
    try:
        yield True
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _holder(fd: int) -> str:
    """Who has the lock, as far as the kernel tells."""
    inode = os.fstat(fd).st_ino
    try:
        lines = Path("/proc/locks").read_text("ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5].endswith(f":{inode}"):
            return f"process {fields[4]} has it; if it is stopped, continue or kill it"
    return "a writer is stopped or the disk hangs"
