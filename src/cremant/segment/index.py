# SPDX-License-Identifier: Apache-2.0
"""Index file of a sealed segment: what finds rows faster than scanning does. Derived, like the scan form.

    rows.index:  magic | blocks, each at a multiple of 64 | footer (JSON) | its length, its CRC-32 | magic

    zones   smallest and largest value per batch and column           always; numbers, and texts that are not coded
    codes   columns of few values as small numbers (codes.py)         always, where they pay
    order   row numbers in the order of a column's values             columns with an inverted or range index
    bloom   which values are certainly absent (bloom.py)              columns with a bloom filter

Rules:

- An index never changes an answer: without it the same query scans more rows.
- A coded column needs no `order` and no `bloom`: its codes answer both questions.
- The footer names the content checksum of the rows and the indexes that were wanted. A file that does not fit the
  segment, is cut short, or was made for other wishes is built anew from the scan form; `verify_index` reads every byte.
"""

from __future__ import annotations

import os
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.model.errors import Corrupt
from cremant.model.names import IS_NULL_PREFIX
from cremant.model.table import IndexConfig
from cremant.segment.bloom import build_bloom
from cremant.segment.codes import Codes, encode, is_codable, plain
from cremant.segment.stats import column_range

INDEX_FILE = "rows.index"
#: How the names of unfinished index files end.
TEMPORARY = ".tmp"
FORMAT = 1
_MAGIC = b"CRMNTIDX"
_ALIGN = 64
_TAIL_BYTES = 8 + len(_MAGIC)

Zone = tuple[Any, Any]


class _Block(msgspec.Struct, frozen=True):
    at: int
    size: int
    #: numpy's name of the element type; "arrow" for an IPC stream of one column.
    kind: str


class _Column(msgspec.Struct):
    zones: list[Zone | None] | None = None
    values: _Block | None = None
    codes: _Block | None = None
    order: _Block | None = None
    bloom: _Block | None = None


class _Footer(msgspec.Struct, kw_only=True):
    format: int
    #: Content checksum of the rows.
    checksum: str
    wanted: IndexConfig
    #: CRC-32 of everything before the footer.
    crc: int = 0
    columns: dict[str, _Column] = {}


class SegmentIndex:
    """An open index file: mapped, shared by all threads. Parts are looked up when a query asks for them."""

    def __init__(self, data: pa.Buffer, footer: _Footer) -> None:
        self._data = data
        self._footer = footer
        self._codes: dict[str, Codes | None] = {}

    @property
    def bytes(self) -> int:
        return int(self._data.size)

    @property
    def wanted(self) -> IndexConfig:
        """The wishes it was made for."""
        return self._footer.wanted

    def zone(self, batch: int, column: str) -> Zone | None:
        """Smallest and largest value in a batch; None when nothing is known."""
        known = self._footer.columns.get(column)
        return known.zones[batch] if known is not None and known.zones is not None else None

    def codes(self, column: str) -> Codes | None:
        if column not in self._codes:
            known = self._footer.columns.get(column)
            found = None
            if known is not None and known.values is not None and known.codes is not None:
                with pa.ipc.open_stream(self._data.slice(known.values.at, known.values.size)) as reader:
                    values = reader.read_next_batch().column(0)
                found = Codes(values, self._array(known.codes))
            # The first of two threads wins: what a query learns of codes (`numbers`) it finds again.
            return self._codes.setdefault(column, found)
        return self._codes[column]

    def order(self, column: str) -> np.ndarray | None:
        known = self._footer.columns.get(column)
        return self._array(known.order) if known is not None and known.order is not None else None

    def bloom(self, column: str) -> np.ndarray | None:
        known = self._footer.columns.get(column)
        return self._array(known.bloom) if known is not None and known.bloom is not None else None

    def _array(self, block: _Block) -> np.ndarray:
        kind = np.dtype(block.kind)
        return np.frombuffer(self._data, kind, block.size // kind.itemsize, block.at)

    def verify(self, path: Path) -> None:
        """Raises Corrupt if a byte is not what was written."""
        crc = zlib.crc32(self._data[: _footer_start(self._data)])
        if crc != self._footer.crc:
            raise Corrupt(f"{path}: checksum is {crc}, expected {self._footer.crc}")


def ensure_index(
    directory: Path, batches: Sequence[pa.RecordBatch], checksum: str, wanted: IndexConfig
) -> SegmentIndex:
    """The directory's index, built if there is none that fits. Raises OSError when it cannot be written."""
    path = directory / INDEX_FILE
    try:
        return open_index(path, checksum, wanted)
    except (Corrupt, FileNotFoundError):
        return rebuild_index(directory, batches, checksum, wanted)


def rebuild_index(
    directory: Path, batches: Sequence[pa.RecordBatch], checksum: str, wanted: IndexConfig
) -> SegmentIndex:
    """Built whatever is there: who has the old one open keeps it. Raises OSError when it cannot be written."""
    path = directory / INDEX_FILE
    build_index(path, batches, checksum, wanted)
    return open_index(path, checksum, wanted)


def sweep(directory: Path) -> None:
    """Removes what builders that were killed have left. One that is at work fails with OSError and is tried again."""
    for left in directory.glob(f"{INDEX_FILE}.*{TEMPORARY}"):
        left.unlink(missing_ok=True)


def open_index(path: Path, checksum: str, wanted: IndexConfig) -> SegmentIndex:
    """Raises FileNotFoundError, or Corrupt naming why the file is not the index of these rows."""
    with pa.memory_map(str(path), "r") as source:
        data = source.read_buffer()
    try:
        start = _footer_start(data)
        footer = msgspec.json.decode(data[start : data.size - _TAIL_BYTES].to_pybytes(), type=_Footer)
    except (ValueError, msgspec.MsgspecError) as error:
        raise Corrupt(f"{path}: not a whole index file: {error}") from error
    if (footer.format, footer.checksum, footer.wanted) != (FORMAT, checksum, wanted):
        raise Corrupt(f"{path}: index of other rows or of other columns")
    return SegmentIndex(data, footer)


def _footer_start(data: pa.Buffer) -> int:
    """Raises ValueError for a file that ends elsewhere."""
    tail = data[max(0, data.size - _TAIL_BYTES) :].to_pybytes()
    if len(tail) < _TAIL_BYTES or tail[8:] != _MAGIC:
        raise ValueError("its end is missing")
    size, crc = int.from_bytes(tail[:4], "big"), int.from_bytes(tail[4:8], "big")
    start: int = data.size - _TAIL_BYTES - size
    if start < len(_MAGIC) or zlib.crc32(data[start : data.size - _TAIL_BYTES]) != crc:
        raise ValueError("its footer is damaged")
    return start


def build_index(path: Path, batches: Sequence[pa.RecordBatch], checksum: str, wanted: IndexConfig) -> None:
    """Writes the index of a segment's batches (scan form). The file appears when it is complete and on the disk: an
    index is opened by its footer, which must not outlive a power cut that its blocks did not. Its name may get lost
    (then it is built again), so the directory is not synced. Several may build at once; the last one's file stays."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}{TEMPORARY}")
    footer = _Footer(format=FORMAT, checksum=checksum, wanted=wanted)
    try:
        with temporary.open("wb") as file:
            out = _Writer(file)
            for number, field in enumerate(batches[0].schema if batches else ()):
                if not field.name.startswith(IS_NULL_PREFIX):
                    columns = [batch.column(number) for batch in batches]
                    footer.columns[field.name] = _index_column(out, field, columns, wanted)
            footer.crc = out.crc
            text = msgspec.json.encode(footer)
            file.write(text + len(text).to_bytes(4, "big") + zlib.crc32(text).to_bytes(4, "big") + _MAGIC)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class _Writer:
    """Appends aligned blocks and keeps their checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._at = 0
        self.crc = 0
        self._write(_MAGIC)

    def block(self, data: Any, kind: str) -> _Block:
        self._write(bytes(-self._at % _ALIGN))
        view = memoryview(data).cast("B")
        found = _Block(self._at, view.nbytes, kind)
        self._write(view)
        return found

    def array(self, values: np.ndarray) -> _Block:
        return self.block(np.ascontiguousarray(values), values.dtype.str)

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.crc = zlib.crc32(data, self.crc)
        self._at += len(data)


def _index_column(out: _Writer, field: pa.Field, columns: list[pa.Array], wanted: IndexConfig) -> _Column:
    index = _Column()
    codes = encode(columns) if is_codable(field.type) and not field.name.startswith("$") else None
    if codes is not None:
        sink = pa.BufferOutputStream()
        values = pa.record_batch([codes.values], ["values"])
        with pa.ipc.new_stream(sink, values.schema) as writer:
            writer.write_batch(values)
        index.values = out.block(sink.getvalue(), "arrow")
        index.codes = out.array(codes.codes)
    is_text = is_codable(field.type) and not pa.types.is_integer(field.type)
    is_number = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
    if is_number or (is_text and codes is None):
        index.zones = [column_range(column) for column in columns]
    if codes is None and field.name in {*wanted.inverted, *wanted.range} and (is_text or is_number):
        order = _order(columns)
        index.order = out.array(order) if order is not None else None
    if codes is None and field.name in wanted.bloom and is_codable(field.type):
        index.bloom = out.array(build_bloom([plain(column) for column in columns]))
    return index


def _order(columns: list[pa.Array]) -> np.ndarray | None:
    """Row numbers in the order of values, equal ones in order of rows; None where NaN has no place."""
    parts = [plain(column) for column in columns]
    if pa.types.is_string(parts[0].type):
        parts = [part.cast(pa.large_string()) for part in parts]  # together they may pass 2 GiB
    whole = pa.concat_arrays(parts)
    if pa.types.is_floating(whole.type) and pc.any(pc.is_nan(whole)).as_py():
        return None
    if pa.types.is_large_string(whole.type):
        by_text: np.ndarray = pc.sort_indices(whole).to_numpy().astype(np.uint32)
        return by_text
    return np.argsort(whole.to_numpy(), kind="stable").astype(np.uint32)
