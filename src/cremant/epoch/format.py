# SPDX-License-Identifier: Apache-2.0
"""Bytes of the epoch log's records. One record is one log message.

    offset  size  field
         0     4  magic "CrEp"
         4     1  format version
         5     1  kind
         6     2  zero
         8     8  incarnation of the table (16 hex digits, E-8)
        16     8  generation
        24     4  length of meta
        28     4  CRC-32 of the body
        32     8  length of the body
        40     4  CRC-32 of bytes [0, 40) and meta
        44        meta: MessagePack map; then zeros up to a multiple of 64
                  body: Arrow IPC stream of one record batch (row blocks only)

All versions ever written are read (golden files: tests/golden/epoch), only the newest is written. `peek` reads head
and meta alone: the start protocol scans many blocks and needs no row of them.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from enum import IntEnum
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa

from cremant.epoch.records import EpochMark, Fence, Gap, Heartbeat, Record, Reset, RowBlock
from cremant.log.api import Message
from cremant.model.errors import Corrupt, InvariantViolation, WorldError
from cremant.model.limits import RECORD_BYTES_MAX
from cremant.model.offsets import OffsetRange

MAGIC = b"CrEp"
VERSION = 1
_HEAD = struct.Struct("<4sBBH8sQIIQ")
_HEAD_CRC = struct.Struct("<I")
_META_AT = _HEAD.size + _HEAD_CRC.size
_ALIGNMENT = 64

Buffer: TypeAlias = Any  # bytes, memoryview or pyarrow.Buffer


class WrongIncarnation(InvariantViolation):
    """The record belongs to a table that was dropped and created again (E-8)."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(
            "E-8",
            f"epoch log record of table incarnation {found}, expected {expected}",
            hint="the table was re-created; its old log must not be read",
        )


class UnknownFormat(WorldError):
    """Written by a newer release, or not an epoch log record at all."""


class RecordKind(IntEnum):
    ROW_BLOCK = 1
    GAP = 2
    EPOCH_MARK = 3
    HEARTBEAT = 4
    FENCE = 5
    RESET = 6


class BlockHead(msgspec.Struct, frozen=True, kw_only=True):
    """A RowBlock without its rows: what `peek` answers for one. `rows` is its number of rows."""

    generation: int
    epoch: int
    config_version: int
    range: OffsetRange
    rows: int
    rejected: int
    filtered: int
    max_ingestion_ms: int | None
    timestamp_type: str
    content_hash: str


#: What `peek` answers: a block without rows, every other kind whole.
Head = BlockHead | Gap | EpochMark | Heartbeat | Fence | Reset


def kind_of(record: Record | Head) -> RecordKind:
    return _KIND_OF[type(record)]


def key_of(record: Record) -> bytes:
    """Key of the log message: the kind in words, for people who look at a log with other tools."""
    return _KEY_OF[type(record)]


def to_message(record: Record, incarnation: str) -> Message:
    """The log message of a record: `log.append(epoch_topic(...), partition, [to_message(record, incarnation)])`."""
    return Message(value=encode(record, incarnation), key=key_of(record))


def content_hash(batch: pa.RecordBatch) -> str:
    """32 hex digits over schema, row count and column buffers; equal rows in equal types give equal hashes whatever
    slice of which buffer they are."""
    raise NotImplementedError


def row_block(
    *,
    generation: int,
    epoch: int,
    config_version: int,
    range: OffsetRange,
    batch: pa.RecordBatch,
    rejected: int = 0,
    filtered: int = 0,
    timestamp_type: str,
) -> RowBlock:
    """A RowBlock of `batch` with its hash and max ingestion time computed. Raises InvariantViolation (E-2) where
    `$offset` is not ascending or leaves the range."""
    raise NotImplementedError


def encode(record: Record, incarnation: str) -> bytes:
    """Bytes of a record in the newest format. Raises NoResource past RECORD_BYTES_MAX."""
    raise NotImplementedError


def decode(data: Buffer, incarnation: str) -> Record:
    """The record in `data`; the columns of a row block are views into it (zero-copy).

    Raises Corrupt, UnknownFormat, WrongIncarnation.
    """
    raise NotImplementedError


def peek(data: Buffer, incarnation: str) -> Head:
    """Head and meta only; the body is neither read nor verified. Raises as `decode`."""
    raise NotImplementedError


_KIND_OF: dict[type[Any], RecordKind] = {}
_KEY_OF: dict[type[Any], bytes] = {}
_ = (hashlib, zlib, Corrupt, RECORD_BYTES_MAX, MAGIC, VERSION)
