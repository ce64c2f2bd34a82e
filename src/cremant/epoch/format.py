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
        44        meta: MessagePack map; zeros up to a multiple of 64; no body, then nothing
                  body: Arrow IPC stream of one record batch (blocks only)

All versions ever written are read (golden files: tests/golden/epoch), only the newest is written. `peek` reads head
and meta alone: the start protocol scans many blocks and needs no row of them.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from cremant.epoch.content import check_offsets, content_hash
from cremant.epoch.records import (
    UPDATE_SCHEMA,
    EpochMark,
    Fence,
    Gap,
    GapReason,
    Heartbeat,
    PartitionMark,
    Record,
    Reset,
    RowBlock,
    UpdateBlock,
)
from cremant.log.api import Message
from cremant.model.errors import Corrupt, InvariantViolation, NoResource, WorldError
from cremant.model.limits import RECORD_BYTES_MAX
from cremant.model.names import INGESTION_TIME
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
    UPDATE_BLOCK = 7


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
    rejected_from_ms: int | None = None


class UpdateHead(msgspec.Struct, frozen=True, kw_only=True):
    """An UpdateBlock without its updates: what `peek` answers for one. `updates` is their number."""

    generation: int
    epoch: int
    updates: int
    content_hash: str


#: What `peek` answers: a block without rows or updates, every other kind whole.
Head = BlockHead | UpdateHead | Gap | EpochMark | Heartbeat | Fence | Reset


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
    max_ingestion_ms: int | None = None,
    rejected_from_ms: int | None = None,
) -> RowBlock:
    """A RowBlock of `batch` with its hash computed. `max_ingestion_ms`: of all messages covered; not given, that of the
    rows. Raises InvariantViolation (E-2) where `$offset` is not ascending or leaves the range."""
    check_offsets(batch, range)
    if max_ingestion_ms is None:
        max_ingestion_ms = pc.max(batch.column(INGESTION_TIME)).as_py()
    return RowBlock(
        generation=generation,
        epoch=epoch,
        config_version=config_version,
        range=range,
        rejected=rejected,
        filtered=filtered,
        max_ingestion_ms=max_ingestion_ms,
        timestamp_type=timestamp_type,
        content_hash=content_hash(batch),
        batch=batch,
        rejected_from_ms=rejected_from_ms,
    )


def encode(record: Record, incarnation: str) -> bytes:
    """Bytes of a record in the newest format. Raises NoResource past RECORD_BYTES_MAX."""
    meta = msgspec.msgpack.encode(_meta_of(record))
    body: pa.Buffer | bytes = _ipc(record.batch) if isinstance(record, RowBlock | UpdateBlock) else b""
    body_bytes = len(body)
    if body_bytes > RECORD_BYTES_MAX:
        raise NoResource(
            f"epoch log record of {body_bytes} bytes, at most {RECORD_BYTES_MAX} are allowed",
            hint="fewer rows per block: lower pipeline batch limits",
        )
    head = _HEAD.pack(
        MAGIC, VERSION, kind_of(record), 0, _incarnation_bytes(incarnation), record.generation, len(meta),
        zlib.crc32(body), body_bytes,
    )  # fmt: skip
    crc = zlib.crc32(meta, zlib.crc32(head))
    padding = bytes(-(_META_AT + len(meta)) % _ALIGNMENT) if body_bytes else b""
    return b"".join((head, _HEAD_CRC.pack(crc), meta, padding, body))


def decode(data: Buffer, incarnation: str) -> Record:
    """The record in `data`; the columns of a block are views into it (zero-copy).

    Raises Corrupt, UnknownFormat, WrongIncarnation.
    """
    view, head = _open(data, incarnation)
    if not isinstance(head, BlockHead | UpdateHead):
        return head
    batch = _batch_of(data, view, head)
    if isinstance(head, UpdateHead):
        if not batch.schema.equals(UPDATE_SCHEMA):
            raise Corrupt(f"an update block of epoch {head.epoch} with columns {batch.schema.names}")
        return UpdateBlock(generation=head.generation, epoch=head.epoch, content_hash=head.content_hash, batch=batch)
    return RowBlock(
        generation=head.generation,
        epoch=head.epoch,
        config_version=head.config_version,
        range=head.range,
        rejected=head.rejected,
        filtered=head.filtered,
        max_ingestion_ms=head.max_ingestion_ms,
        timestamp_type=head.timestamp_type,
        content_hash=head.content_hash,
        batch=batch,
        rejected_from_ms=head.rejected_from_ms,
    )


def _batch_of(data: Buffer, view: memoryview, head: BlockHead | UpdateHead) -> pa.RecordBatch:
    """The body of a block, verified."""
    _, _, _, _, _, _, meta_bytes, body_crc, body_bytes = _HEAD.unpack_from(view)
    first = _body_at(meta_bytes)
    if len(view) != first + body_bytes:
        raise Corrupt(f"epoch log record of {len(view)} bytes, expected {first + body_bytes}")
    body = view[first:]
    if zlib.crc32(body) != body_crc:
        raise Corrupt(f"rows of a block of epoch {head.epoch} do not match their checksum")
    buffer = data.slice(first) if isinstance(data, pa.Buffer) else pa.py_buffer(body)
    try:
        batch = pa.ipc.open_stream(buffer).read_next_batch()
    except (pa.ArrowException, StopIteration) as error:
        raise Corrupt(f"rows of a block of epoch {head.epoch} are not an Arrow stream: {error}") from error
    expected = head.rows if isinstance(head, BlockHead) else head.updates
    if batch.num_rows != expected:
        raise Corrupt(f"a block of epoch {head.epoch} has {batch.num_rows} rows, its head says {expected}")
    return batch


def peek(data: Buffer, incarnation: str) -> Head:
    """Head and meta only; the body is neither read nor verified. Raises as `decode`."""
    return _open(data, incarnation)[1]


# --- meta of each kind: every field of the record but the generation (it stands in the head) and the rows ---


class _BlockMeta(msgspec.Struct, frozen=True, omit_defaults=True):
    epoch: int
    config_version: int
    range: OffsetRange
    rows: int
    rejected: int
    filtered: int
    max_ingestion_ms: int | None
    timestamp_type: str
    content_hash: str
    #: Since format 1 was first written; blocks without it are as they were.
    rejected_from_ms: int | None = None


class _UpdateMeta(msgspec.Struct, frozen=True):
    epoch: int
    updates: int
    content_hash: str


class _GapMeta(msgspec.Struct, frozen=True):
    range: OffsetRange
    reason: GapReason


class _MarkMeta(msgspec.Struct, frozen=True):
    epoch: int
    previous: int
    blocks_generation: int
    config_version: int
    partitions: tuple[PartitionMark, ...]


class _HeartbeatMeta(msgspec.Struct, frozen=True):
    last_closed: int
    ends: tuple[int, ...]
    at_ms: int


class _FenceMeta(msgspec.Struct, frozen=True):
    pass


class _ResetMeta(msgspec.Struct, frozen=True):
    epoch: int


class _Form(NamedTuple):
    kind: RecordKind
    key: bytes
    meta: type[Any]
    head: type[Any]


_FORMS: dict[type[Any], _Form] = {
    RowBlock: _Form(RecordKind.ROW_BLOCK, b"rowBlock", _BlockMeta, BlockHead),
    UpdateBlock: _Form(RecordKind.UPDATE_BLOCK, b"updateBlock", _UpdateMeta, UpdateHead),
    Gap: _Form(RecordKind.GAP, b"gap", _GapMeta, Gap),
    EpochMark: _Form(RecordKind.EPOCH_MARK, b"epochMark", _MarkMeta, EpochMark),
    Heartbeat: _Form(RecordKind.HEARTBEAT, b"heartbeat", _HeartbeatMeta, Heartbeat),
    Fence: _Form(RecordKind.FENCE, b"fence", _FenceMeta, Fence),
    Reset: _Form(RecordKind.RESET, b"reset", _ResetMeta, Reset),
}
_BY_KIND = {
    int(form.kind): (form, msgspec.msgpack.Decoder(form.meta), form.meta.__struct_fields__) for form in _FORMS.values()
}


def kind_of(record: Record | Head) -> RecordKind:
    match record:
        case BlockHead():
            return RecordKind.ROW_BLOCK
        case UpdateHead():
            return RecordKind.UPDATE_BLOCK
        case _:
            return _FORMS[type(record)].kind


def key_of(record: Record) -> bytes:
    """Key of the log message: the kind in words, for people who look at a log with other tools."""
    return _FORMS[type(record)].key


def to_message(record: Record, incarnation: str) -> Message:
    """The log message of a record: `log.append(epoch_topic(...), partition, [to_message(record, incarnation)])`."""
    return Message(value=encode(record, incarnation), key=key_of(record))


def _meta_of(record: Record) -> Any:
    form = _FORMS[type(record)]
    return form.meta(*(getattr(record, field) for field in form.meta.__struct_fields__))


def _open(data: Buffer, incarnation: str) -> tuple[memoryview, Head]:
    view = memoryview(data).cast("B") if not isinstance(data, memoryview) else data
    if len(view) < _META_AT or bytes(view[:4]) != MAGIC:
        raise UnknownFormat(f"{len(view)} bytes that are not an epoch log record")
    _, version, kind, _, found, generation, meta_bytes, _, _ = _HEAD.unpack_from(view)
    if version != VERSION:
        raise UnknownFormat(
            f"epoch log record of format version {version}, this release reads up to {VERSION}",
            hint="written by a newer release: update this one",
        )
    meta = view[_META_AT : _META_AT + meta_bytes]
    if zlib.crc32(meta, zlib.crc32(view[: _HEAD.size])) != _HEAD_CRC.unpack_from(view, _HEAD.size)[0]:
        raise Corrupt("head of an epoch log record does not match its checksum")
    if found != _incarnation_bytes(incarnation):
        raise WrongIncarnation(incarnation, bytes(found).hex())
    form_decoder_fields = _BY_KIND.get(kind)
    if form_decoder_fields is None:
        raise UnknownFormat(f"epoch log record of unknown kind {kind}", hint="written by a newer release")
    form, decoder, fields = form_decoder_fields
    try:
        values = decoder.decode(meta)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"meta of an epoch log record ({form.key.decode()}): {error}") from error
    head: Head = form.head(generation=generation, **{field: getattr(values, field) for field in fields})
    return view, head


def _body_at(meta_bytes: int) -> int:
    end = _META_AT + meta_bytes
    return end + -end % _ALIGNMENT


def _incarnation_bytes(incarnation: str) -> bytes:
    raw = bytes.fromhex(incarnation)
    if len(raw) != 8:
        raise InvariantViolation("E-8", f"incarnation {incarnation!r} is not 16 hex digits")
    return raw


def _ipc(batch: pa.RecordBatch) -> pa.Buffer:
    """Measured first, then written once into a buffer of that size: large blocks cost one allocation, not a dozen."""
    measure = pa.MockOutputStream()
    with pa.ipc.new_stream(measure, batch.schema) as writer:
        writer.write_batch(batch)
    buffer = pa.allocate_buffer(measure.size())
    with pa.ipc.new_stream(pa.FixedSizeBufferWriter(buffer), batch.schema) as writer:
        writer.write_batch(batch)
    return buffer


__all__ = [
    "VERSION", "BlockHead", "Buffer", "Head", "RecordKind", "UnknownFormat", "UpdateHead", "WrongIncarnation",
    "check_offsets", "content_hash", "decode", "encode", "key_of", "kind_of", "peek", "row_block", "to_message",
]  # fmt: skip
