# SPDX-License-Identifier: Apache-2.0
"""Snapshots of versions: which rows of a sealed segment are in force, as bytes, as of a position of the epoch log.

    offset  size  field
         0     4  magic "CrVs"
         4     1  format version
         5     3  zero
         8     4  length of meta
        12     4  CRC-32 of the body
        16     8  length of the body
        24     4  CRC-32 of bytes [0, 24) and meta
        28        meta: MessagePack map; zeros up to a multiple of 64
                  body: validFrom int32 per row, validUntil int32 per row, then one bit per row whose delete column is
                  true if any is; little-endian, rows in (offset, sub-row) order; compressed (Zstandard) if meta says so

The same bytes are a file beside the segment, the answer to a peer, and an object of the deep store (compressed there).

Rules:

- A snapshot names the segment and its content: it fits no other rows. It is as of a position just after the mark of
  its epoch B: the updates of B are in, and the log from the position on has all later ones.
- A file is replaced as a whole. That nothing changed up to a later position is said by a small file beside it, which
  counts only for the snapshot that it names.
- The file is mapped copy-on-write: opening costs a checksum, and only pages that updates touch become memory.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from cremant.model.errors import Corrupt, NoResource, NotFound
from cremant.model.offsets import Position
from cremant.segment.locations import Int32s, Locations
from cremant.segment.versions import Versions
from cremant.store.files import sync

VERSIONS_FILE = "versions.bin"
#: How far the snapshot is known to be unchanged.
POSITION_FILE = "versions.json"

_MAGIC = b"CrVs"
_FORMAT = 1
_HEAD = struct.Struct("<4sB3xIIQ")
_CRC = struct.Struct("<I")
_META_AT = _HEAD.size + _CRC.size
_ALIGNMENT = 64
_CODEC = "zstd"

Buffer: TypeAlias = Any  # bytes, memoryview or mmap
#: Where each row of the segment is, and its number there per row of the segment: `locations_of` its batches.
Locate: TypeAlias = Callable[[], tuple[Locations, Int32s | None]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`versions` as of `position`. `written`: as of when the file says so, if it was one."""

    versions: Versions
    position: Position
    written: Position | None = None


class _Meta(msgspec.Struct, frozen=True, kw_only=True):
    segment: str
    checksum: str
    rows: int
    base: int
    epoch: int
    position: Position
    #: First offset, if each offset is one row and rows stand in their order; else None: the rows say where they are.
    dense: int | None
    deleted: bool
    #: Oldest epoch that may be asked of it.
    horizon: int = 0
    #: Bytes of the body before it was compressed; None: it is as it was.
    plain_bytes: int | None = None


class _Unchanged(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The snapshot of `since` (a log offset) holds up to `position`, too."""

    since: int
    position: Position


def pack(snapshot: Snapshot, *, segment: str, checksum: str, compressed: bool = True) -> bytes:
    """`checksum`: of the segment's content. Nobody may write to the versions meanwhile."""
    versions = snapshot.versions
    arrays: list[Buffer] = [_bytes_of(versions.valid_from), _bytes_of(versions.valid_until)]
    if versions.deleted is not None:
        arrays.append(np.packbits(versions.deleted, bitorder="little").data)
    body: Buffer = b"".join(arrays)
    plain_bytes = len(body) if compressed else None
    if compressed:
        body = pa.Codec(_CODEC).compress(body, asbytes=True)
    dense = versions.locations.offsets is None and versions.order is None
    meta = msgspec.msgpack.encode(
        _Meta(
            segment=segment, checksum=checksum, rows=versions.rows, base=versions.base, epoch=versions.epoch,
            position=snapshot.position, dense=versions.locations.first if dense else None,
            deleted=versions.deleted is not None, horizon=versions.horizon, plain_bytes=plain_bytes,
        )
    )  # fmt: skip
    head = _HEAD.pack(_MAGIC, _FORMAT, len(meta), zlib.crc32(body), len(body))
    padding = bytes(_body_at(len(meta)) - _META_AT - len(meta))
    return b"".join((head, _CRC.pack(zlib.crc32(meta, zlib.crc32(head))), meta, padding, body))


def unpack(data: Buffer, *, segment: str, checksum: str, rows: int, locate: Locate) -> Snapshot:
    """The versions write into `data` if it can be written to and is not compressed; else into a copy. Raises Corrupt
    when a byte is wrong, or when it is not of `rows` rows of this segment and content."""
    meta, packed = _open(memoryview(data))
    if (meta.segment, meta.checksum, meta.rows) != (segment, checksum, rows):
        raise Corrupt(
            f"versions of segment {meta.segment} ({meta.rows} rows, content {meta.checksum}), expected {segment} "
            f"({rows} rows, content {checksum})"
        )
    body = memoryview(_plain_body(packed, meta))
    ends = np.frombuffer(body[: 8 * rows], "<i4") if rows else np.empty(0, np.int32)
    deleted = None
    if meta.deleted:
        bits = np.frombuffer(body[8 * rows :], np.uint8)
        deleted = np.unpackbits(bits, count=rows, bitorder="little").view(np.bool_)
    if not ends.flags.writeable:
        ends = ends.copy()
    locations, order = (Locations(rows, meta.dense), None) if meta.dense is not None else locate()
    if locations.rows != rows:
        raise Corrupt(f"segment {segment} has {locations.rows} rows, its versions are of {rows}")
    versions = Versions(
        locations, ends[:rows], ends[rows:], base=meta.base, epoch=meta.epoch, deleted=deleted, order=order,
        horizon=meta.horizon,
    )  # fmt: skip
    return Snapshot(versions, meta.position)


def write(directory: Path, snapshot: Snapshot, *, segment: str, checksum: str, fsync: bool) -> None:
    """The newest snapshot of the segment in this directory. Raises NoResource."""
    data = pack(snapshot, segment=segment, checksum=checksum, compressed=False)
    _replace(directory / VERSIONS_FILE, data, fsync=fsync)


def unchanged(directory: Path, since: Position, position: Position, *, fsync: bool) -> None:
    """The snapshot that was written as of `since` holds up to `position`. Raises NoResource."""
    said = _Unchanged(since=since.log_offset, position=position)
    _replace(directory / POSITION_FILE, msgspec.json.encode(said), fsync=fsync)


def read(directory: Path, *, segment: str, checksum: str, rows: int, locate: Locate) -> Snapshot:
    """The snapshot in this directory, mapped. Raises NotFound, Corrupt (naming the file)."""
    path = directory / VERSIONS_FILE
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError as error:
        raise NotFound(f"{path} is not there") from error
    except (OSError, ValueError) as error:  # ValueError: it is empty
        raise Corrupt(f"{path} cannot be read: {error}") from error
    try:
        found = unpack(data, segment=segment, checksum=checksum, rows=rows, locate=locate)
    except Corrupt as error:
        raise Corrupt(f"{path}: {error}") from error
    later = _unchanged_until(directory / POSITION_FILE, found.position)
    found.versions.closed(later.epoch)
    return Snapshot(found.versions, later, found.position)


def _unchanged_until(path: Path, since: Position) -> Position:
    """Damaged or of another snapshot: then the log is read from further back."""
    try:
        said = msgspec.json.decode(path.read_bytes(), type=_Unchanged)
    except (OSError, msgspec.MsgspecError):
        return since
    return said.position if said.since == since.log_offset else since


def _open(view: memoryview) -> tuple[_Meta, memoryview]:
    """Meta and body, whole and undamaged."""
    if len(view) < _META_AT:
        raise Corrupt(f"no versions: {len(view)} bytes")
    magic, version, meta_bytes, body_crc, body_bytes = _HEAD.unpack_from(view)
    if magic != _MAGIC:
        raise Corrupt(f"no versions: begins with {bytes(magic)!r}")
    if version != _FORMAT:
        raise Corrupt(f"versions of format {version}, known: {_FORMAT}")
    at = _body_at(meta_bytes)
    if len(view) != at + body_bytes:
        raise Corrupt(f"expected {at + body_bytes} bytes, found {len(view)}")
    meta = view[_META_AT : _META_AT + meta_bytes]
    if _CRC.unpack_from(view, _HEAD.size)[0] != zlib.crc32(meta, zlib.crc32(view[: _HEAD.size])):
        raise Corrupt("the head of the versions is damaged")
    if body_crc != zlib.crc32(view[at:]):
        raise Corrupt("the versions are damaged")
    try:
        return msgspec.msgpack.decode(meta, type=_Meta), view[at:]
    except msgspec.MsgspecError as error:
        raise Corrupt(f"versions that cannot be read: {error}") from error


def _plain_body(body: memoryview, meta: _Meta) -> Buffer:
    """As long as the rows want it."""
    expected = 8 * meta.rows + ((meta.rows + 7) // 8 if meta.deleted else 0)
    found = len(body) if meta.plain_bytes is None else meta.plain_bytes
    if found != expected:
        raise Corrupt(f"versions of {meta.rows} rows have {expected} bytes, found {found}")
    if meta.plain_bytes is None:
        return body
    try:
        return pa.Codec(_CODEC).decompress(pa.py_buffer(body), decompressed_size=expected, asbytes=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise Corrupt(f"versions that cannot be decompressed: {error}") from error


def _body_at(meta_bytes: int) -> int:
    end = _META_AT + meta_bytes
    return end + -end % _ALIGNMENT


def _bytes_of(values: Int32s) -> Buffer:
    return np.ascontiguousarray(values, "<i4").data


def _replace(path: Path, data: bytes, *, fsync: bool) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
        if fsync:
            sync(temporary)
        os.replace(temporary, path)
        if fsync:
            sync(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise NoResource(f"cannot write {path}: {error}", hint="free disk space; it is retried") from error
