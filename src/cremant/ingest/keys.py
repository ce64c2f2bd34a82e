# SPDX-License-Identifier: Apache-2.0
"""Primary keys as bytes: one canonical text per key, whatever batch or stream it came in (upsert design, "Table").

    key     = column+                     in the order of the schema's `primaryKeyColumns`
    column  = value · length (4, little-endian) · type tag (1), so it is read from its end
    value   = numbers little-endian in the width of their type, -0.0 as 0.0, one NaN; texts and bytes as they are stored
    null    = a row of its own: location of the row (16) · NULL_TAG

A function of the stored row alone, so a key read back from a segment has the same bytes. What differs most comes first:
the first eight bytes are what Spark sorts by. No key ends with byte 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.model import names
from cremant.model.errors import InvalidConfig
from cremant.model.schema import DataType, FieldSpec, Schema

#: Last byte of the key of a row whose key is null, where the table keeps such rows.
NULL_TAG = 0x7F
_TAGS: dict[DataType, int] = {
    DataType.INT: 1,
    DataType.LONG: 2,
    DataType.FLOAT: 3,
    DataType.DOUBLE: 4,
    DataType.BIG_DECIMAL: 5,
    DataType.BOOLEAN: 6,
    DataType.TIMESTAMP: 7,
    DataType.STRING: 8,
    DataType.JSON: 9,
    DataType.BYTES: 10,
}
#: Bytes of a value, as numpy writes it.
_FIXED: dict[DataType, str] = {
    DataType.INT: "<i4",
    DataType.LONG: "<i8",
    DataType.FLOAT: "<f4",
    DataType.DOUBLE: "<f8",
    DataType.BOOLEAN: "<u1",
    DataType.TIMESTAMP: "<i8",
}
_TAIL = 5


class KeyEncoder:
    """The keys of a table's rows. Immutable."""

    def __init__(self, schema: Schema) -> None:
        by_name = {field.name: field for field in schema.fields}
        missing = [name for name in schema.primary_key_columns if name not in by_name]
        if missing or not schema.primary_key_columns:
            what = f"has no column {', '.join(missing)}" if missing else "has no primaryKeyColumns"
            raise InvalidConfig(f"schema {schema.name} {what}", hint="an upsert table needs its primary key columns")
        self.fields: tuple[FieldSpec, ...] = tuple(by_name[name] for name in schema.primary_key_columns)
        for field in self.fields:
            if not field.single_value:
                raise InvalidConfig(f"primary key column {field.name} holds several values; a key must hold one")

    def keys(self, batch: pa.RecordBatch) -> pa.BinaryArray:
        """One key per row of `batch` (stored columns, no nulls). Rows with null keys get that of their defaults."""
        parts = [_column(field.data_type, batch.column(field.name)) for field in self.fields]
        if all(isinstance(part, np.ndarray) for part in parts):
            return binary_of(np.hstack(parts) if len(parts) > 1 else parts[0])
        arrays = [binary_of(part) if isinstance(part, np.ndarray) else part for part in parts]
        return pc.binary_join_element_wise(*arrays, pa.scalar(b"", pa.binary()))

    def null_keys(self, batch: pa.RecordBatch) -> np.ndarray | None:
        """Which rows have a null in their key (bool per row); None if no row has. Only stored rows of tables with null
        handling can tell."""
        return any_null(batch, self.fields)


def any_null(batch: pa.RecordBatch, fields: Sequence[FieldSpec]) -> np.ndarray | None:
    """Rows in which one of the columns is null, by the columns `$isNull.<name>`; None if there is none."""
    found: np.ndarray | None = None
    for field in fields:
        at = batch.schema.get_field_index(f"{names.IS_NULL_PREFIX}{field.name}")
        if at >= 0:
            mask = batch.column(at).to_numpy(zero_copy_only=False)
            if mask.any():
                found = mask if found is None else found | mask
    return found


def _column(data_type: DataType, values: pa.Array) -> np.ndarray | pa.BinaryArray:
    """Value, length and tag of each cell: a matrix of bytes where they are equally wide, else binary cells."""
    wide = _FIXED.get(data_type)
    if wide is not None:
        numbers = values.to_numpy(zero_copy_only=False)
        if data_type in (DataType.FLOAT, DataType.DOUBLE):
            numbers = np.where(np.isnan(numbers), np.nan, numbers + 0.0).astype(numbers.dtype)
        width = int(wide[-1])
        cells = np.empty((len(numbers), width + _TAIL), dtype=np.uint8)
        cells[:, :width] = np.ascontiguousarray(numbers.astype(wide)).view(np.uint8).reshape(-1, width)
        cells[:, width:] = np.frombuffer(width.to_bytes(4, "little") + bytes([_TAGS[data_type]]), np.uint8)
        return cells
    binary = values.cast(pa.binary())
    lengths = pc.binary_length(binary).to_numpy(zero_copy_only=False).astype("<u4")
    tails = np.empty((len(binary), _TAIL), dtype=np.uint8)
    tails[:, :4] = np.ascontiguousarray(lengths).view(np.uint8).reshape(-1, 4)
    tails[:, 4] = _TAGS[data_type]
    return pc.binary_join_element_wise(binary, binary_of(tails), pa.scalar(b"", pa.binary()))


def binary_of(matrix: np.ndarray) -> pa.BinaryArray:
    """Rows of a matrix of bytes as binary cells. Raises InvalidConfig past 2 GiB, which no task comes near."""
    count, width = matrix.shape
    if count * width > 2**31 - 1:
        raise InvalidConfig(f"{count} keys of {width} bytes in one task", hint="lower cremant.pipeline.maxRowsPerEpoch")
    bounds = np.arange(count + 1, dtype=np.int32) * np.int32(width)
    data = np.ascontiguousarray(matrix)
    return pa.BinaryArray.from_buffers(pa.binary(), count, [None, pa.py_buffer(bounds), pa.py_buffer(data)])
