# SPDX-License-Identifier: Apache-2.0
"""Frames: the bytes of one append in a file of the embedded log (design: epoch-log.md, Embedded log).

A frame is a header of 48 bytes and a payload of columns, so that reading many small messages is Arrow work:

    header   magic, version, flags, header bytes, payload bytes, count, base offset, timestamp,
             bytes of value data, of key data, of headers, crc          (little endian, see `_HEADER`)
    payload  values: [null bitmap] int32 offsets[count + 1], data
             keys:   [null bitmap] int32 offsets[count + 1], data       only if a message has a key
             headers: MessagePack list per message of (name, bytes)     only if a message has headers

Every section is padded to 8 bytes, so sections stay aligned in a file that starts with a frame. The crc (crc32) is
over the payload and then the header up to the crc: the payload's part is computed before the lock is taken.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from cremant.log.api import Headers, Message
from cremant.log.columns import binary_array
from cremant.model.limits import APPEND_BYTES_MAX, APPEND_MESSAGES_MAX

MAGIC = 0x4D524343  # "CCRM" in the file
VERSION = 1
_HEADER = struct.Struct("<IBBHIIqqIIII")
_CRC_AT = 44
HEADER_BYTES = _HEADER.size
assert HEADER_BYTES == 48

_VALUE_NULLS = 1
_KEYS = 2
_KEY_NULLS = 4
_HEADERS = 8

#: Data plus, per message, two offsets, two bits and some headers: no frame we write is larger.
PAYLOAD_BYTES_MAX = 2 * APPEND_BYTES_MAX + 64 * APPEND_MESSAGES_MAX

_PADDING = tuple(bytes(n) for n in range(8))
_encode_headers = msgspec.msgpack.Encoder().encode
_decode_headers = msgspec.msgpack.Decoder(tuple[Headers, ...]).decode


class FrameHeader(NamedTuple):
    """The header of a frame. `flags` say which sections its payload has."""

    flags: int
    payload_bytes: int
    messages: int
    base_offset: int
    timestamp_ms: int
    value_bytes: int
    key_bytes: int
    headers_bytes: int
    crc: int

    @property
    def frame_bytes(self) -> int:
        return HEADER_BYTES + self.payload_bytes

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.messages


class Payload(NamedTuple):
    """An encoded append that does not know its offset yet. `parts` are written as they are, one after another."""

    parts: tuple[Any, ...]
    payload_bytes: int
    crc: int
    flags: int
    messages: int
    value_bytes: int
    key_bytes: int
    headers_bytes: int

    @property
    def frame_bytes(self) -> int:
        return HEADER_BYTES + self.payload_bytes

    def header(self, base_offset: int, timestamp_ms: int) -> bytes:
        start = _HEADER.pack(
            MAGIC, VERSION, self.flags, HEADER_BYTES, self.payload_bytes, self.messages, base_offset, timestamp_ms,
            self.value_bytes, self.key_bytes, self.headers_bytes, 0,
        )[:_CRC_AT]  # fmt: skip
        return start + zlib.crc32(start, self.crc).to_bytes(4, "little")


class Columns(NamedTuple):
    """The messages of one frame, decoded: nullable binary arrays that view the frame's bytes."""

    values: pa.BinaryArray
    keys: pa.BinaryArray | None
    headers: tuple[Headers, ...] | None


def _pad8(size: int) -> int:
    return -size % 8


def encode(messages: Sequence[Message]) -> Payload:
    """The payload of one append. A single message is not copied."""
    parts: list[Any] = []
    flags, value_bytes, key_bytes, headers_bytes = 0, 0, 0, 0
    nulls, value_bytes = _encode_column([message.value for message in messages], parts)
    if nulls:
        flags |= _VALUE_NULLS
    keys = [message.key for message in messages]
    if any(key is not None for key in keys):
        nulls, key_bytes = _encode_column(keys, parts)
        flags |= _KEYS | (_KEY_NULLS if nulls else 0)
    if any(message.headers for message in messages):
        encoded = _encode_headers([message.headers for message in messages])
        headers_bytes = len(encoded)
        parts += [encoded, _PADDING[_pad8(headers_bytes)]]
        flags |= _HEADERS
    crc, size = 0, 0
    for part in parts:
        crc = zlib.crc32(part, crc)
        size += len(part)
    return Payload(tuple(parts), size, crc, flags, len(messages), value_bytes, key_bytes, headers_bytes)


def _encode_column(column: list[bytes | None], parts: list[Any]) -> tuple[bool, int]:
    """Appends the sections of a column to `parts`; answers whether it has nulls, and its bytes of data."""
    if len(column) == 1 and column[0] is not None:
        size = len(column[0])
        parts += [struct.pack("<ii", 0, size), column[0], _PADDING[_pad8(size)]]
        return False, size
    array = binary_array(column)
    validity, offsets, data = array.buffers()
    offset_bytes = 4 * (len(column) + 1)
    size = int.from_bytes(offsets[offset_bytes - 4 : offset_bytes], "little")
    nulls = bool(array.null_count)
    if nulls:
        bitmap_bytes = (len(column) + 7) // 8
        parts += [memoryview(validity)[:bitmap_bytes], _PADDING[_pad8(bitmap_bytes)]]
    parts += [memoryview(offsets)[:offset_bytes], _PADDING[_pad8(offset_bytes)]]
    if size:
        parts += [memoryview(data)[:size], _PADDING[_pad8(size)]]
    return nulls, size


def parse_header(data: bytes | memoryview, at: int) -> FrameHeader | str:
    """The header at byte `at` of `data`, or what is wrong with it: "expected X, found Y". Does not check the crc."""
    if len(data) - at < HEADER_BYTES:
        return f"expected a frame header of {HEADER_BYTES} bytes, found {len(data) - at} bytes"
    magic, version, flags, header_bytes, *rest = _HEADER.unpack_from(data, at)
    if magic != MAGIC:
        return f"expected the start of a frame ({MAGIC:#010x}), found {magic:#010x}"
    if version != VERSION or header_bytes != HEADER_BYTES:
        return f"expected frame version {VERSION}, found version {version} with a header of {header_bytes} bytes"
    header = FrameHeader(flags, *rest)
    if header.payload_bytes > PAYLOAD_BYTES_MAX or header.payload_bytes != _payload_bytes(header):
        return f"expected a payload of {_payload_bytes(header)} bytes, found {header.payload_bytes}"
    if not 1 <= header.messages <= APPEND_MESSAGES_MAX or header.base_offset < 0:
        return f"expected a count and an offset, found {header.messages} and {header.base_offset}"
    return header


def _payload_bytes(header: FrameHeader) -> int:
    """What the payload's size must be according to the other fields."""
    bitmap, offsets = (header.messages + 7) // 8, 4 * (header.messages + 1)
    sections = [bitmap if header.flags & _VALUE_NULLS else 0, offsets, header.value_bytes]
    if header.flags & _KEYS:
        sections += [bitmap if header.flags & _KEY_NULLS else 0, offsets, header.key_bytes]
    if header.flags & _HEADERS:
        sections.append(header.headers_bytes)
    return sum(size + _pad8(size) for size in sections)


def check_crc(header: FrameHeader, data: bytes | memoryview, at: int) -> str | None:
    """None if the frame at `at` is what was written; else "expected X, found Y"."""
    view = memoryview(data)[at : at + header.frame_bytes]
    if len(view) < header.frame_bytes:
        return f"expected a frame of {header.frame_bytes} bytes, found {len(view)} bytes"
    crc = zlib.crc32(view[:_CRC_AT], zlib.crc32(view[HEADER_BYTES:]))
    return None if crc == header.crc else f"expected checksum {header.crc:#010x}, found {crc:#010x}"


def decode(header: FrameHeader, data: bytes, at: int) -> Columns:
    """The columns of a frame whose crc was checked. Zero-copy: the arrays view `data`."""
    buffer = pa.py_buffer(data)
    at += HEADER_BYTES
    values, at = _decode_column(buffer, at, header.messages, header.value_bytes, bool(header.flags & _VALUE_NULLS))
    keys: pa.BinaryArray | None = None
    headers: tuple[Headers, ...] | None = None
    if header.flags & _KEYS:
        keys, at = _decode_column(buffer, at, header.messages, header.key_bytes, bool(header.flags & _KEY_NULLS))
    if header.flags & _HEADERS:
        headers = _decode_headers(memoryview(data)[at : at + header.headers_bytes])
    return Columns(values, keys, headers)


def _decode_column(buffer: pa.Buffer, at: int, count: int, size: int, nulls: bool) -> tuple[pa.BinaryArray, int]:
    validity = None
    if nulls:
        bitmap_bytes = (count + 7) // 8
        validity = buffer.slice(at, bitmap_bytes)
        at += bitmap_bytes + _pad8(bitmap_bytes)
    offset_bytes = 4 * (count + 1)
    offsets = buffer.slice(at, offset_bytes)
    at += offset_bytes + _pad8(offset_bytes)
    data = buffer.slice(at, size)
    return pa.BinaryArray.from_buffers(pa.binary(), count, [validity, offsets, data]), at + size + _pad8(size)


class Singles(NamedTuple):
    """A run of frames of one plain message each: `values` and `timestamps_ms` by frame, `at` behind the run."""

    values: list[bytes]
    timestamps_ms: list[int]
    at: int


def decode_singles(data: bytes, at: int, offset: int, *, max_messages: int, max_bytes: int) -> Singles:
    """The run of valid frames from byte `at` and `offset` on that have one message, its value not null, no key, no
    headers. The short cut for streams of small appends; it stops before any other frame, also before a damaged one.
    Takes a first message of any size."""
    values: list[bytes] = []
    timestamps_ms: list[int] = []
    unpack, crc32, end = _HEADER.unpack_from, zlib.crc32, len(data)
    while len(values) < max_messages and at + HEADER_BYTES <= end:
        magic, version, flags, _, payload_bytes, messages, base, timestamp_ms, size, _, _, crc = unpack(data, at)
        start = at + HEADER_BYTES
        stop = start + payload_bytes
        if messages != 1 or flags or magic != MAGIC or version != VERSION or base != offset or stop > end:
            break
        if (size > max_bytes and values) or crc32(data[at : at + _CRC_AT], crc32(data[start:stop])) != crc:
            break
        values.append(data[start + 8 : start + 8 + size])
        timestamps_ms.append(timestamp_ms)
        max_bytes -= size
        offset += 1
        at = stop
    return Singles(values, timestamps_ms, at)


def data_ends(array: pa.BinaryArray) -> np.ndarray:
    """Bytes of data up to the end of each message, counted from the first message's start."""
    offsets = np.frombuffer(array.buffers()[1], dtype=np.int32)[array.offset : array.offset + len(array) + 1]
    return offsets[1:].astype(np.int64) - int(offsets[0])
