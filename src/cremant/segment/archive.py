# SPDX-License-Identifier: Apache-2.0
"""A segment on its way between servers: a `.tar.gz` of one directory, made on the fly.

    <segment>/
    <segment>/rows.parquet

The tar is packed into gzip's *stored* blocks (Parquet is compressed already), with all times zero. So the same Parquet
file gives the same archive on every server, and each byte of it follows from its position: nothing is kept on disk for
a transfer, and a range costs what it sends. Formats: POSIX pax (IEEE 1003.1), RFC 1951 (3.2.4), RFC 1952.
"""

from __future__ import annotations

import gzip
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from cremant.model.errors import Corrupt, NoResource
from cremant.segment.build import PARQUET_FILE

#: RFC 1952: deflate, no name, no time, no operating system.
_GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_GZIP_TRAILER_BYTES = 8
#: Most that a stored block can hold, and its head: last?, length, length inverted.
_BLOCK_BYTES = 0xFFFF
_BLOCK_HEAD_BYTES = 5
_READ_BYTES = 1024 * 1024
#: Headers and padding of an archive, together: a few kilobytes, whoever made it.
_FRAME_BYTES_MAX = 1024 * 1024


class Archive:
    """The archive of one Parquet file. Immutable; `crc32` is of the whole tar (`tar_crc32`)."""

    def __init__(self, segment: str, parquet_bytes: int, crc32: int = 0) -> None:
        self._head = _tar_header(segment, tarfile.DIRTYPE, 0) + _tar_header(
            f"{segment}/{PARQUET_FILE}", tarfile.REGTYPE, parquet_bytes
        )
        self._parquet_bytes = parquet_bytes
        self._crc32 = crc32
        content = len(self._head) + parquet_bytes + 2 * tarfile.BLOCKSIZE
        self._tar_bytes = -(-content // tarfile.RECORDSIZE) * tarfile.RECORDSIZE
        self._blocks = -(-self._tar_bytes // _BLOCK_BYTES)
        self._trailer_at = len(_GZIP_HEADER) + self._blocks * _BLOCK_HEAD_BYTES + self._tar_bytes
        self.size_bytes = self._trailer_at + _GZIP_TRAILER_BYTES

    def read(self, parquet: IO[bytes], first: int, until: int) -> bytes:
        """Bytes [first, until) of the archive. Raises Corrupt when the Parquet file is shorter than was said."""
        parts: list[bytes | memoryview] = [_GZIP_HEADER[first:until]]
        whole = _BLOCK_HEAD_BYTES + _BLOCK_BYTES
        number = max(0, first - len(_GZIP_HEADER)) // whole
        ends = min(self._blocks, -(-(until - len(_GZIP_HEADER)) // whole))
        # Read at once and copied once: a thread that sends must not keep queries from the interpreter.
        tar = memoryview(self._tar(parquet, number * _BLOCK_BYTES, min(ends * _BLOCK_BYTES, self._tar_bytes)))
        while number < ends:
            content, tar = tar[:_BLOCK_BYTES], tar[_BLOCK_BYTES:]
            begins = len(_GZIP_HEADER) + number * whole
            for piece in (self._block_head(number, len(content)), content):
                parts.append(piece[max(0, first - begins) : max(0, until - begins)])
                begins += len(piece)
            number += 1
        if until > self._trailer_at:
            trailer = self._crc32.to_bytes(4, "little") + (self._tar_bytes % 2**32).to_bytes(4, "little")
            parts.append(trailer[max(0, first - self._trailer_at) : until - self._trailer_at])
        return b"".join(parts)

    def tar_crc32(self, parquet: IO[bytes]) -> int:
        """Reads the whole file."""
        running = 0
        for first in range(0, self._tar_bytes, _READ_BYTES):
            running = zlib.crc32(self._tar(parquet, first, min(first + _READ_BYTES, self._tar_bytes)), running)
        return running

    def _block_head(self, number: int, length: int) -> bytes:
        last = b"\x01" if number == self._blocks - 1 else b"\x00"
        return last + length.to_bytes(2, "little") + (length ^ 0xFFFF).to_bytes(2, "little")

    def _tar(self, parquet: IO[bytes], first: int, until: int) -> bytes:
        """Bytes [first, until) of the tar: headers, file, zeros."""
        head, file_ends = self._head[first:until], len(self._head) + self._parquet_bytes
        body = b""
        wanted = min(until, file_ends) - max(first, len(self._head))
        if wanted > 0:
            at = max(first, len(self._head)) - len(self._head)
            # No shared file position: several transfers may read the same open file.
            body = os.pread(parquet.fileno(), wanted, at)
            if len(body) != wanted:
                raise Corrupt(f"{parquet.name}: expected {self._parquet_bytes} bytes, it ends at {at + len(body)}")
        zeros = until - first - len(head) - len(body)
        return head + body + b"\x00" * zeros if head or zeros else body


def _tar_header(name: str, kind: bytes, size_bytes: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size_bytes
    info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    return info.tobuf(tarfile.PAX_FORMAT)


def unpack(archive: Path, segment: str, target: Path, *, bytes_max: int) -> None:
    """Writes the Parquet file of `segment` to `target`. Any gzip'd tar will do whose only file is that one. Raises
    Corrupt when the archive is anything else, is cut off, or would give more than `bytes_max`; NoResource when the disk
    is full. Nothing is written anywhere else, whatever names the archive has."""
    wanted, found = f"{segment}/{PARQUET_FILE}", False
    try:
        with gzip.open(archive, "rb") as plain:
            bounded = _Bounded(plain)
            with tarfile.open(fileobj=bounded, mode="r|") as tar:  # type: ignore[call-overload]
                for member in tar:
                    if member.isdir() and member.name == segment:
                        continue
                    if member.name != wanted or not member.isreg() or member.issparse() or found:
                        raise Corrupt(f"archive of {segment}: unexpected entry {member.name!r}")
                    if member.size > bytes_max:
                        raise Corrupt(
                            f"archive of {segment}: {member.size} bytes are more than the {bytes_max} allowed"
                        )
                    bounded.allow(member.size)
                    found = True
                    source = tar.extractfile(member)
                    assert source is not None  # a regular file
                    _write(source, target)
            while bounded.read(_READ_BYTES):  # to the checksum at its end
                pass
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Corrupt(f"archive of {segment} is damaged or cut off: {error}") from error
    if not found:
        raise Corrupt(f"archive of {segment} has no {wanted}")


def _write(source: IO[bytes], target: Path) -> None:
    try:
        with target.open("wb") as file:
            for chunk in _chunks(source):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except gzip.BadGzipFile:
        raise
    except OSError as error:
        raise NoResource(f"cannot write {target}: {error}", hint="free disk space; it is retried") from error


def _chunks(source: IO[bytes]) -> Iterator[bytes]:
    while chunk := source.read(_READ_BYTES):
        yield chunk


class _Bounded:
    """What is read of an archive: a few kilobytes can unpack to gigabytes, of headers (which a reader of tars keeps in
    memory) or of the file. `allow`: so much more may come, the file's size."""

    def __init__(self, source: gzip.GzipFile) -> None:
        self._source = source
        self._left = _FRAME_BYTES_MAX

    def allow(self, more: int) -> None:
        self._left += more

    def read(self, size: int = -1) -> bytes:
        chunk = self._source.read(size)
        self._left -= len(chunk)
        if self._left < 0:
            raise Corrupt("the archive unpacks to more than a segment can have")
        return chunk
