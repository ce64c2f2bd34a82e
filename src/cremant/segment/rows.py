# SPDX-License-Identifier: Apache-2.0
"""Taking single rows out of a batch in scan form. pyarrow has no kernels for views; their sixteen bytes are moved here,
and the texts they point to stay where they are, until rows are sent away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa


@dataclass(frozen=True, slots=True)
class RowMask:
    """Some rows of a batch: one flag per row, and how many are set."""

    flags: npt.NDArray[np.bool_]
    count: int

    @property
    def hidden(self) -> int:
        """How many are not set."""
        return len(self.flags) - self.count

    @property
    def rows(self) -> np.ndarray:
        """Their numbers."""
        return np.flatnonzero(self.flags)


def view_words(column: pa.Array) -> np.ndarray:
    """The views of a column without nulls, as two 64-bit words each."""
    words = np.frombuffer(column.buffers()[1], np.int64)
    first = column.offset * 2
    return words[first : first + len(column) * 2].reshape(-1, 2)


def take_column(column: pa.Array, rows: np.ndarray) -> pa.Array:
    """The values of these rows."""
    kind = column.type
    if not _is_view(kind):
        return column.take(pa.array(rows))
    if column.null_count:
        stored = pa.string() if pa.types.is_string_view(kind) else pa.binary()
        return column.cast(stored).take(pa.array(rows)).cast(kind)
    taken = pa.py_buffer(np.ascontiguousarray(view_words(column)[rows]))
    return pa.Array.from_buffers(kind, len(rows), [None, taken, *column.buffers()[2:]])


def take_rows(batch: pa.RecordBatch, columns: Sequence[str], rows: np.ndarray) -> list[pa.Array]:
    return [take_column(batch.column(name), rows) for name in columns]


#: Bytes of texts that come along unasked and are not worth a copy of the others.
_LOOSE_BYTES = 64 * 1024


def compacted(table: pa.Table) -> pa.Table:
    """The same rows, without texts that none of them has. Views taken from a batch bring all its texts along, as far as
    Arrow is concerned: ten rows of a segment would be sent as megabytes."""
    columns = [
        pa.chunked_array([_compacted(chunk) for chunk in column.chunks], column.type)
        if _is_view(column.type)
        else column
        for column in table.columns
    ]
    return pa.Table.from_arrays(columns, schema=table.schema)


def unpacked_bytes(table: pa.Table) -> int:
    """What the values take, each on its own: rows may share a text that every one of them is sent or shown with."""
    return sum(_value_bytes(chunk) for column in table.columns for chunk in column.chunks)


def _value_bytes(column: pa.Array) -> int:
    if _is_view(column.type):
        return len(column) * _VIEW_BYTES + _text_bytes(column)
    size: int = column.nbytes
    return size


_VIEW_BYTES = 16


def _is_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string_view(kind) or pa.types.is_binary_view(kind))


def _text_bytes(column: pa.Array) -> int:
    lengths = view_words(column)[:, 0] & 0x7FFFFFFF
    if column.null_count:
        lengths = lengths[column.is_valid().to_numpy(zero_copy_only=False)]
    return int(lengths.sum())


def _compacted(column: pa.Array) -> pa.Array:
    held_bytes = sum(buffer.size for buffer in column.buffers()[2:])
    if held_bytes <= _LOOSE_BYTES:
        return column
    used_bytes = _text_bytes(column)
    if held_bytes <= 2 * used_bytes or used_bytes > _STORED_BYTES_MAX:
        return column
    stored = pa.string() if pa.types.is_string_view(column.type) else pa.binary()
    return column.cast(stored).cast(column.type)


#: What the offsets of a column in stored form reach.
_STORED_BYTES_MAX = 2**31 - 1
