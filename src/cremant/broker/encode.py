# SPDX-License-Identifier: Apache-2.0
"""Arrow columns -> rows of Pinot's JSON. Column by column with numpy and Arrow kernels, never cell by cell where a
kernel exists; the rows are then zipped and encoded in one call.

    INT LONG     integers                      FLOAT DOUBLE   numbers; "NaN", "Infinity", "-Infinity"
    BOOLEAN      true, false                   TIMESTAMP      "2024-01-01 00:00:00.0", UTC, no trailing zeros
    BIG_DECIMAL  "12.5" (plain)                BYTES          lower-case hex
    STRING JSON  strings                       *_ARRAY        arrays of the same
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.model.decimals import plain_decimal
from cremant.sql.plan import ResultColumn

_encoder = msgspec.json.Encoder()


def encode_rows(table: pa.Table, columns: Sequence[ResultColumn]) -> msgspec.Raw:
    """The JSON text of `rows`."""
    if table.num_rows == 0:
        return msgspec.Raw(b"[]")
    values = [column_values(table.column(index), column.type) for index, column in enumerate(columns)]
    return msgspec.Raw(_encoder.encode(list(zip(*values, strict=True))))


def column_values(column: pa.ChunkedArray, pinot_type: str) -> list[Any]:
    """Python values that msgspec writes as Pinot does."""
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if pinot_type.endswith("_ARRAY"):
        return _lists(array, pinot_type.removesuffix("_ARRAY"))
    return _scalars(array, pinot_type)


def _lists(array: pa.ListArray, element_type: str) -> list[Any]:
    offsets = array.offsets.to_numpy()
    # `flatten` leaves out what null lists cover, `values` does not; offsets belong to `values`.
    elements = _scalars(array.values, element_type)
    lists = [elements[first:end] for first, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    return _with_nulls(lists, array)


def _scalars(array: pa.Array, pinot_type: str) -> list[Any]:
    if len(array) == 0:
        return []
    match pinot_type:
        case "UNKNOWN":
            return [None] * len(array)
        case "INT" | "LONG":
            return _numbers(array.cast(pa.int64()))
        case "DOUBLE":
            return _floats(array.cast(pa.float64()), np.float64)
        case "FLOAT":
            return _floats(array.cast(pa.float32()), np.float32)
        case "TIMESTAMP":
            return _timestamps(array.cast(pa.int64()))
        case "BOOLEAN":
            values: list[Any] = array.cast(pa.bool_()).to_pylist()
            return values
        case "BIG_DECIMAL":
            return _plain_decimals(array)
        case "BYTES":
            return [None if value is None else value.hex() for value in array.to_pylist()]
        case _:
            return _strings(array)


def _with_nulls(values: list[Any], array: pa.Array) -> list[Any]:
    if array.null_count == 0:
        return values
    return [value if valid else None for value, valid in zip(values, array.is_valid().to_pylist(), strict=True)]


def _numbers(array: pa.Array) -> list[Any]:
    filled = array.fill_null(0) if array.null_count else array
    return _with_nulls(filled.to_numpy(zero_copy_only=False).tolist(), array)


_NOT_FINITE = {np.inf: "Infinity", -np.inf: "-Infinity"}


def _floats(array: pa.Array, kind: type[np.floating[Any]]) -> list[Any]:
    filled = array.fill_null(0.0) if array.null_count else array
    numbers = filled.to_numpy(zero_copy_only=False).astype(kind, copy=False)
    finite = np.isfinite(numbers)
    # The shortest text that gives the same 32-bit number back, not the 64-bit one that is equal to it.
    if kind is np.float32:
        numbers = filled.cast(pa.string()).cast(pa.float64()).to_numpy(zero_copy_only=False)
    values = numbers.tolist()
    if not finite.all():
        for index in np.flatnonzero(~finite).tolist():
            values[index] = _NOT_FINITE.get(values[index], "NaN")
    return _with_nulls(values, array)


def _timestamps(array: pa.Array) -> list[Any]:
    milliseconds = array.fill_null(0) if array.null_count else array
    text = milliseconds.cast(pa.timestamp("ms")).cast(pa.string())
    shortened = pc.replace_substring_regex(text, r"(\.\d+?)0+$", r"\1")
    return _with_nulls(shortened.to_pylist(), array)


def _plain_decimals(array: pa.Array) -> list[Any]:
    if not pa.types.is_decimal(array.type):
        return [None if value is None else plain_decimal(value) for value in array.to_pylist()]
    return [None if value is None else _plain(f"{value:f}") for value in array.to_pylist()]


def _plain(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def _strings(array: pa.Array) -> list[Any]:
    if not (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
        array = array.cast(pa.string())
    values: list[Any] = array.to_numpy(zero_copy_only=False).tolist()
    return values
