# SPDX-License-Identifier: Apache-2.0
"""Content checksum: a hash over decoded columns, independent of file encoding, of chunk borders and of the Arrow form.

Replicas that hold the same rows in the same order have the same content checksum, whatever wrote their files; file
checksums, in contrast, guard the transport of one particular file (segment completion design, "Deciding").

Per column and per kind of buffer (validity, lengths, values) one running hash is kept, so that chunk borders leave no
trace; the digests are joined in the order of column names. Values under a null count as zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_READ_BYTES = 1024 * 1024
_DIGEST_BYTES = 16


class ContentHash:
    """Running hash over record batches of one schema."""

    def __init__(self) -> None:
        self._columns: dict[str, _ColumnHash] = {}
        self._rows = 0

    def update(self, batch: pa.RecordBatch) -> None:
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            running = self._columns.get(name)
            if running is None:
                running = self._columns[name] = _ColumnHash()
            running.update(column)
        self._rows += batch.num_rows

    def hexdigest(self) -> str:
        whole = hashlib.blake2b(f"rows {self._rows}".encode(), digest_size=_DIGEST_BYTES)
        if self._rows:
            for name in sorted(self._columns):
                whole.update(f"\ncolumn {name}\n".encode())
                whole.update(self._columns[name].digest())
        return whole.hexdigest()


def content_checksum(batches: Iterable[pa.RecordBatch]) -> str:
    running = ContentHash()
    for batch in batches:
        running.update(batch)
    return running.hexdigest()


def file_checksum(path: Path) -> str:
    """Hash of a file's bytes, in the deep store's spelling."""
    running = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            running.update(chunk)
    return f"sha256:{running.hexdigest()}"


class _ColumnHash:
    def __init__(self) -> None:
        self._validity = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._lengths = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._values = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._elements: _ColumnHash | None = None

    def update(self, column: pa.Array) -> None:
        column = _plain(column)
        kind = column.type
        self._validity.update(_bytes(pc.is_valid(column).cast(pa.uint8())) if column.null_count else b"")
        self._validity.update(b"" if column.null_count else b"\x01" * len(column))
        if pa.types.is_list(kind):
            if column.null_count:
                column = pc.fill_null(column, pa.scalar([], kind))
            self._lengths.update(_bytes(pc.list_value_length(column)))
            if self._elements is None:
                self._elements = _ColumnHash()
            self._elements.update(column.flatten())
        elif pa.types.is_binary(kind):
            if column.null_count:
                column = pc.fill_null(column, b"")
            self._variable(column)
        else:
            if column.null_count:
                column = pc.fill_null(column, pa.scalar(0, kind))
            self._values.update(_bytes(column))

    def _variable(self, column: pa.Array) -> None:
        offsets = np.frombuffer(column.buffers()[1], dtype=np.int32)[column.offset : column.offset + len(column) + 1]
        if len(offsets) < 2:
            return
        self._lengths.update(np.diff(offsets).tobytes())
        data = column.buffers()[2]
        if data is not None:
            self._values.update(memoryview(data)[int(offsets[0]) : int(offsets[-1])])

    def digest(self) -> bytes:
        joined = self._validity.digest() + self._lengths.digest() + self._values.digest()
        return joined + (self._elements.digest() if self._elements is not None else b"")


def _plain(column: pa.Array) -> pa.Array:
    """The column in a form that has one layout: text and dictionaries as binary, booleans as bytes."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _plain(column.cast(kind.value_type))
    if pa.types.is_string(kind) or pa.types.is_string_view(kind) or pa.types.is_large_string(kind):
        return column.cast(pa.binary())
    if pa.types.is_binary_view(kind) or pa.types.is_large_binary(kind):
        return column.cast(pa.binary())
    if pa.types.is_boolean(kind):
        return column.cast(pa.uint8())
    return column


def _bytes(column: pa.Array) -> Any:
    """The bytes of a fixed-width column without nulls; a view where Arrow allows it."""
    width = column.type.bit_width // 8
    buffer = column.buffers()[1]
    if buffer is None or len(column) == 0:
        return b""
    return memoryview(buffer)[column.offset * width : (column.offset + len(column)) * width]
