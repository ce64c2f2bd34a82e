# SPDX-License-Identifier: Apache-2.0
"""The total order of a key's rows as bytes: unsigned lexicographic order of ranks is the order of the rows.

    rank     = comparison* · location
    comparison = 0 (null, lowest) or 1, then the value such that bytes order as values do; absent for a null
    location = partition (4) · offset (8) · sub-row (4), big-endian

Integers: sign bit flipped. Floats: IEEE order, -0.0 as 0.0, NaN greatest. Texts and bytes: byte 0 as 0 255, ended by
0 0.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.ingest.keys import any_null, binary_of
from cremant.model.errors import InvalidConfig
from cremant.model.schema import DataType, FieldSpec

LOCATION_BYTES = 16

#: One part of a rank for every row: unsigned numbers (of so many bytes), or binary cells.
Part: TypeAlias = "np.ndarray | pa.BinaryArray"

_INTEGERS = {DataType.INT, DataType.LONG, DataType.TIMESTAMP, DataType.BOOLEAN}
_FLOATS = {DataType.FLOAT, DataType.DOUBLE}


def comparison_parts(field: FieldSpec, batch: pa.RecordBatch) -> list[Part]:
    """Flag and value of a comparison column, most significant first."""
    if not field.single_value:
        raise InvalidConfig(f"comparison column {field.name} holds several values; it must hold one")
    if field.data_type in (DataType.BIG_DECIMAL, DataType.JSON):
        raise InvalidConfig(f"comparison column {field.name} is a {field.data_type}, whose texts have another order")
    values = batch.column(field.name)
    null = any_null(batch, (field,))
    flags = np.ones(len(values), dtype=np.uint8)
    if field.data_type in _INTEGERS or field.data_type in _FLOATS:
        numbers = _ordered(field.data_type, values.to_numpy(zero_copy_only=False))
        if null is not None:
            flags[null] = 0
            numbers = np.where(null, numbers.dtype.type(0), numbers)
        return [flags, numbers]
    cells = _escaped(values.cast(pa.binary()))
    if null is not None:
        flags[null] = 0
        cells = pc.if_else(pa.array(null), pa.scalar(b"", pa.binary()), cells)
    return [flags, cells]


def location_parts(partition: np.ndarray, offset: np.ndarray, sub_row: np.ndarray) -> list[Part]:
    return [partition.astype(np.uint32), offset.astype(np.uint64), sub_row.astype(np.uint32)]


def rank_bytes(parts: list[Part]) -> pa.BinaryArray:
    """The ranks that the parts make together."""
    if all(isinstance(part, np.ndarray) for part in parts):
        return binary_of(bytes_matrix(parts))
    cells: list[pa.Array] = []
    numbers: list[Part] = []
    for part in parts:
        if isinstance(part, np.ndarray):
            numbers.append(part)
        else:
            if numbers:
                cells.append(binary_of(bytes_matrix(numbers)))
                numbers = []
            cells.append(part)
    if numbers:
        cells.append(binary_of(bytes_matrix(numbers)))
    return pc.binary_join_element_wise(*cells, pa.scalar(b"", pa.binary()))


def bytes_matrix(parts: list[Part]) -> np.ndarray:
    """Unsigned numbers as big-endian bytes side by side, a row of the matrix per row."""
    width = sum(part.dtype.itemsize for part in parts)
    matrix = np.empty((len(parts[0]), width), dtype=np.uint8)
    at = 0
    for part in parts:
        size = part.dtype.itemsize
        matrix[:, at : at + size] = part.astype(part.dtype.newbyteorder(">")).view(np.uint8).reshape(-1, size)
        at += size
    return matrix


def sortable(part: Part) -> np.ndarray:
    """Unsigned numbers in the order of the part: itself, or the places of its cells among the distinct ones."""
    if isinstance(part, np.ndarray):
        return part
    ranks: np.ndarray = pc.rank(part, sort_keys="ascending", tiebreaker="dense").to_numpy(zero_copy_only=False)
    return ranks


def _ordered(data_type: DataType, numbers: np.ndarray) -> np.ndarray:
    """Unsigned numbers in the order of `numbers`."""
    if data_type is DataType.BOOLEAN:
        return numbers.astype(np.uint8)
    if data_type in _FLOATS:
        numbers = np.where(np.isnan(numbers), np.nan, numbers + 0.0).astype(numbers.dtype)
    width = numbers.dtype.itemsize
    bits: Any = np.ascontiguousarray(numbers).view(f"u{width}")
    sign = bits.dtype.type(1 << (8 * width - 1))
    ordered: np.ndarray = bits ^ sign if data_type in _INTEGERS else np.where(bits & sign, ~bits, bits | sign)
    return ordered


def _escaped(values: pa.BinaryArray) -> pa.BinaryArray:
    """Ended by a mark that sorts before everything that could follow."""
    _, _, data = values.buffers()
    if data is not None and 0 in memoryview(data).cast("B"):
        values = pc.replace_substring(values, b"\0", b"\0\xff")
    return pc.binary_join_element_wise(values, pa.scalar(b"\0\0", pa.binary()), pa.scalar(b"", pa.binary()))
