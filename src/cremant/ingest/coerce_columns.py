# SPDX-License-Identifier: Apache-2.0
"""The conversion rules of `cremant.ingest.coerce`, for whole columns. Equal to them for every value (property test).

Common conversions run in Arrow; the rest goes value by value through the reference.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.ingest.causes import BadValue
from cremant.ingest.coerce import CONVERTERS, JAVA_SPACE
from cremant.model.schema import ARROW_TYPES, DataType

#: Working form of each type while a batch is ingested: FLOAT stays double until its cells are final.
WORK_TYPES: dict[DataType, pa.DataType] = {**ARROW_TYPES, DataType.FLOAT: pa.float64()}
#: How BIG_DECIMAL is read: wide enough that Arrow's unchecked rescaling cannot overflow unnoticed.
WIDE_DECIMAL = pa.decimal256(76, 18)

#: Rows that are converted one by one for one odd value among them, and how many such chunks in a row are tried.
_CHUNK_ROWS = 1024
_ODD_CHUNKS_MAX = 3

_INTEGERS = (DataType.INT, DataType.LONG, DataType.TIMESTAMP)
_EXACT_DOUBLE = float(2**53)
_PLAIN_INTEGER = "^[+-]?[0-9]{1,18}$"
_PLAIN_FLOAT = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,9})?$"
#: Texts that are stored as they are.
_STORED_DECIMAL = r"^(0|-?(0\.[0-9]{0,30}|[1-9][0-9]{0,30}\.[0-9]{0,30})[1-9]|-?[1-9][0-9]{0,30})$"
_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_PLAIN_MOMENT = rf"^{_YEAR}-[0-9]{{2}}-[0-9]{{2}}[ T][0-9]{{2}}:[0-9]{{2}}:[0-9]{{2}}(\.[0-9]{{3}})?Z?$"


class Converted(NamedTuple):
    """`array` is null where the input is, and where `failed` (a bool mask, None = nowhere) says that it cannot be."""

    array: pa.Array
    failed: np.ndarray | None = None
    detail: str = ""


def exactly_convertible(array: pa.Array, data_type: DataType) -> bool:
    """False where a value was read as a double and an integer of the same text would be another one."""
    if not pa.types.is_floating(array.type) or data_type not in _INTEGERS:
        return True
    return bool(pc.all(pc.less(pc.abs(array), _EXACT_DOUBLE), min_count=0).as_py())


def convert_column(array: pa.Array, data_type: DataType) -> Converted:
    """A single-value column in any of Arrow's int, double, string, bool or decimal forms to a column type's.

    Doubles to integers: what is beyond 2^53 is converted from the double, which may not be what was written."""
    target = WORK_TYPES[data_type]
    kind = array.type
    if kind == target and data_type is not DataType.BIG_DECIMAL and not pa.types.is_floating(kind):
        return Converted(array)
    if data_type is DataType.BYTES and pa.types.is_string(kind):
        decoded = decode_hex(array)
        return Converted(decoded) if decoded is not None else _one_by_one(array, data_type)
    quick = _quick(array, data_type)
    return Converted(quick) if quick is not None else _in_chunks(array, data_type)


def _in_chunks(array: pa.Array, data_type: DataType) -> Converted:
    """A column with something odd in it: an odd value costs its chunk alone, unless they are all over."""
    if len(array) <= _CHUNK_ROWS:
        return _one_by_one(array, data_type)
    parts: list[Converted] = []
    odd = 0
    for start in range(0, len(array), _CHUNK_ROWS):
        rest = array.slice(start)
        quick = _quick(rest.slice(0, _CHUNK_ROWS), data_type)
        odd = 0 if quick is not None else odd + 1
        if odd > _ODD_CHUNKS_MAX:
            parts.append(_one_by_one(rest, data_type))
            break
        parts.append(Converted(quick) if quick is not None else _one_by_one(rest.slice(0, _CHUNK_ROWS), data_type))
    if all(part.failed is None for part in parts):
        return Converted(pa.concat_arrays([part.array for part in parts]))
    failed = [np.zeros(len(part.array), dtype=bool) if part.failed is None else part.failed for part in parts]
    detail = next(part.detail for part in parts if part.detail)
    return Converted(pa.concat_arrays([part.array for part in parts]), np.concatenate(failed), detail)


def _quick(array: pa.Array, data_type: DataType) -> pa.Array | None:
    """The column, if Arrow can convert all of it by the rules; None if not."""
    kind = array.type
    target = WORK_TYPES[data_type]
    try:
        if kind == target and data_type is not DataType.BIG_DECIMAL:
            return array
        if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
            return _from_integer_or_boolean(array, data_type)
        if pa.types.is_floating(kind):
            return _from_double(array, data_type)
        if pa.types.is_binary(kind) and data_type is DataType.STRING:
            return encode_hex(array)
        if pa.types.is_string(kind):
            return _from_text(array, data_type)
        if pa.types.is_decimal(kind) and data_type is DataType.BIG_DECIMAL:
            return _decimal_texts(array)
    except pa.ArrowInvalid:
        return None
    return None


def _from_integer_or_boolean(array: pa.Array, data_type: DataType) -> pa.Array | None:
    is_boolean = pa.types.is_boolean(array.type)
    match data_type:
        case DataType.TIMESTAMP if is_boolean:
            return None
        case DataType.INT | DataType.LONG | DataType.TIMESTAMP | DataType.STRING | DataType.JSON:
            return array.cast(WORK_TYPES[data_type])
        case DataType.FLOAT | DataType.DOUBLE:
            return array.cast(pa.float64(), safe=False)
        case DataType.BOOLEAN:
            return pc.not_equal(array.cast(pa.int64()), 0)
        case DataType.BIG_DECIMAL:
            return array.cast(pa.int64()).cast(pa.string())
        case _:
            return None


def _from_double(array: pa.Array, data_type: DataType) -> pa.Array | None:
    if data_type in (DataType.FLOAT, DataType.DOUBLE):
        return array.cast(pa.float64())
    if data_type is DataType.BOOLEAN:
        return pc.not_equal(array, 0.0)
    if data_type in _INTEGERS:
        # NaN compares false, infinities are too large: both go to the reference, as do integers beyond 2^53.
        fits = pc.less(pc.abs(array), _EXACT_DOUBLE)
        if pc.all(fits, min_count=0).as_py():
            return pc.trunc(array).cast(WORK_TYPES[data_type])
    return None


def _from_text(array: pa.Array, data_type: DataType) -> pa.Array | None:
    match data_type:
        case DataType.STRING | DataType.JSON:
            return array
        case DataType.INT | DataType.LONG if _all_match(array, _PLAIN_INTEGER):
            return pc.utf8_ltrim(array, characters="+").cast(WORK_TYPES[data_type])
        case DataType.TIMESTAMP if _all_match(array, _PLAIN_INTEGER):
            return pc.utf8_ltrim(array, characters="+").cast(pa.int64())
        case DataType.TIMESTAMP if _all_match(array, _PLAIN_MOMENT):
            return pc.utf8_rtrim(array, characters="Z").cast(pa.timestamp("ms")).cast(pa.int64())
        case DataType.FLOAT | DataType.DOUBLE if _all_match(array, _PLAIN_FLOAT):
            return array.cast(pa.float64())
        case DataType.BIG_DECIMAL if _all_match(array, _STORED_DECIMAL):
            return array
        case DataType.BOOLEAN:
            text = pc.ascii_lower(pc.utf8_trim(array, characters=JAVA_SPACE))
            return pc.or_(pc.equal(text, "true"), pc.equal(text, "1"))
        case _:
            return None


def _all_match(array: pa.Array, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(array, pattern), min_count=0).as_py())


def _decimal_texts(array: pa.Array) -> pa.Array | None:
    """Stored texts of decimals with digits after the point."""
    text = array.cast(pa.string())
    if pc.any(pc.match_substring(text, "E"), min_count=0).as_py():
        return None
    return pc.utf8_rtrim(pc.utf8_rtrim(text, characters="0"), characters=".")


def _one_by_one(array: pa.Array, data_type: DataType) -> Converted:
    convert = CONVERTERS[data_type]
    failed = np.zeros(len(array), dtype=bool)
    detail = ""
    cells = []
    for at, value in enumerate(array.to_pylist()):
        try:
            cells.append(None if value is None else convert(value))
        except BadValue as bad:
            cells.append(None)
            failed[at] = True
            detail = detail or bad.detail
    return Converted(pa.array(cells, WORK_TYPES[data_type]), failed if failed.any() else None, detail)


_HEX_DIGITS = np.full(256, 255, dtype=np.uint8)
_HEX_DIGITS[list(b"0123456789")] = range(10)
_HEX_DIGITS[list(b"abcdef")] = range(10, 16)
_HEX_DIGITS[list(b"ABCDEF")] = range(10, 16)


def decode_hex(array: pa.StringArray) -> pa.BinaryArray | None:
    """Bytes from hex text, all at once; None if any value is not hex of even length."""
    text = pc.fill_null(array, "")
    _, offsets_buffer, data_buffer = text.buffers()
    offsets = np.frombuffer(offsets_buffer, dtype=np.int32)[text.offset : text.offset + len(text) + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    offsets = offsets - first
    if (offsets % 2).any():
        return None
    data = np.frombuffer(data_buffer, dtype=np.uint8)[first:last] if last > first else np.empty(0, dtype=np.uint8)
    digits = _HEX_DIGITS[data]
    if (digits > 15).any():
        return None
    decoded = pa.BinaryArray.from_buffers(
        pa.binary(),
        len(text),
        [None, pa.py_buffer((offsets // 2).astype(np.int32)), pa.py_buffer((digits[0::2] << 4) | digits[1::2])],
    )
    return pc.if_else(array.is_valid(), decoded, None) if array.null_count else decoded


_HEX_LETTERS = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)


def encode_hex(array: pa.BinaryArray) -> pa.StringArray:
    """Hex text of bytes, all at once."""
    filled = pc.fill_null(array, b"") if array.null_count else array
    _, offsets_buffer, data_buffer = filled.buffers()
    offsets = np.frombuffer(offsets_buffer, dtype=np.int32)[filled.offset : filled.offset + len(filled) + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    data = np.frombuffer(data_buffer, dtype=np.uint8)[first:last] if last > first else np.empty(0, dtype=np.uint8)
    letters = np.empty(2 * len(data), dtype=np.uint8)
    letters[0::2], letters[1::2] = _HEX_LETTERS[data >> 4], _HEX_LETTERS[data & 15]
    doubled = pa.py_buffer(((offsets - first) * 2).astype(np.int32))
    text = pa.StringArray.from_buffers(len(filled), doubled, pa.py_buffer(letters))
    return pc.if_else(array.is_valid(), text, None) if array.null_count else text
