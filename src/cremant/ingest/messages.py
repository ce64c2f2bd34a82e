# SPDX-License-Identifier: Apache-2.0
"""What all decoders share: the columns that come out, and what is done with messages before and with cells after.

A decoder is made of (format's properties, columns to read) and is immutable. It never raises for data: each message
ends up in `Decoded.kept` or in `Decoded.bad`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.ingest.causes import BadValue, Cause, Refusal
from cremant.ingest.coerce import cell_converter
from cremant.ingest.coerce_columns import WORK_TYPES, convert_column
from cremant.model.limits import MESSAGE_BYTES_MAX
from cremant.model.schema import DataType, FieldSpec


@dataclass(frozen=True, slots=True)
class Decoded:
    """Nullable columns in their working types, for the messages at `kept` (indexes, ascending); `bad` has the others,
    ascending, too. Multi-value columns are lists that may be empty and hold nulls."""

    columns: list[pa.Array]
    kept: np.ndarray
    bad: list[Refusal]


#: Texts of schemas by the id that a registry knows them under; None = it does not know the id.
Schemas = Mapping[int, str | None]


class Decoder(Protocol):
    def schema_ids(self, values: pa.BinaryArray) -> set[int]:
        """Ids of the registry's schemas that these messages need; most decoders need none."""

    def decode(self, values: pa.BinaryArray, schemas: Schemas) -> Decoded:
        """`values`: nullable binary array of messages; `schemas`: the answer for each of `schema_ids(values)`."""


def work_type(field: FieldSpec) -> pa.DataType:
    base = WORK_TYPES[field.data_type]
    return base if field.single_value else pa.list_(base)


#: Indexes of some messages, and their columns.
Piece = tuple[np.ndarray, list[pa.Array]]


def assemble(types: list[pa.DataType], pieces: list[Piece], bad: list[Refusal]) -> Decoded:
    """Pieces in the order of their messages."""
    bad.sort(key=lambda refusal: refusal.at)
    if not pieces:
        return Decoded([pa.array([], kind) for kind in types], np.empty(0, dtype=np.int64), bad)
    kept = np.concatenate([indexes for indexes, _ in pieces])
    columns = (
        pieces[0][1]
        if len(pieces) == 1
        else [pa.concat_arrays(parts) for parts in zip(*(columns for _, columns in pieces), strict=True)]
    )
    if len(kept) > 1 and (np.diff(kept) < 0).any():
        order = np.argsort(kept, kind="stable")
        kept = kept[order]
        columns = [column.take(pa.array(order)) for column in columns]
    return Decoded(columns, kept, bad)


def hopeless_ones(values: pa.BinaryArray, bad: list[Refusal]) -> np.ndarray:
    """Mask of messages that no decoder takes, which go to `bad`: no value, nothing in it, too large."""
    lengths = pc.fill_null(pc.binary_length(values), 0).to_numpy(zero_copy_only=False)
    hopeless = (lengths == 0) | (lengths > MESSAGE_BYTES_MAX)
    for at in np.flatnonzero(hopeless).tolist():
        if lengths[at]:
            detail = f"{lengths[at]} bytes, at most {MESSAGE_BYTES_MAX} are allowed"
            bad.append(Refusal(at, Cause.TOO_LARGE, detail))
        elif values[at].is_valid:
            bad.append(Refusal(at, Cause.EMPTY_MESSAGE, "the message is empty"))
        else:
            bad.append(Refusal(at, Cause.EMPTY_MESSAGE, "the message has no value (a tombstone)"))
    return np.asarray(hopeless)


def bytes_of(values: pa.BinaryArray) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and data of a binary or text array, without a copy."""
    _, offsets_buffer, data_buffer = values.buffers()
    if offsets_buffer is None or not len(values):
        return np.zeros(len(values) + 1, dtype=np.int32), np.empty(0, dtype=np.uint8)
    offsets = np.frombuffer(offsets_buffer, dtype=np.int32)[values.offset : values.offset + len(values) + 1]
    data = np.frombuffer(data_buffer, dtype=np.uint8) if data_buffer is not None else np.empty(0, dtype=np.uint8)
    return offsets, data


def runs_of(values: pa.BinaryArray, indexes: np.ndarray, rows_max: int, bytes_max: int) -> list[np.ndarray]:
    """`indexes` in pieces of bounded size, at least one message each."""
    offsets, _ = bytes_of(values)
    runs = []
    start = 0
    sizes = np.concatenate(([0], np.cumsum(offsets[indexes + 1].astype(np.int64) - offsets[indexes])))
    while start < len(indexes):
        by_bytes = int(np.searchsorted(sizes, sizes[start] + bytes_max, side="right")) - 1
        end = min(start + rows_max, max(by_bytes, start + 1), len(indexes))
        runs.append(indexes[start:end])
        start = end
    return runs


def taken(values: pa.Array, indexes: np.ndarray) -> pa.Array:
    """The messages at `indexes` (ascending, at least one); a slice where they follow each other."""
    if indexes[-1] - indexes[0] + 1 == len(indexes):
        return values.slice(int(indexes[0]), len(indexes))
    return values.take(pa.array(indexes))


def fit(field: FieldSpec, column: pa.Array, *, keep_going: bool) -> tuple[pa.Array, dict[int, BadValue]]:
    """A column as it was read, in the working type of its field. Rows that cannot be converted are null and named, or
    with `keep_going` (Pinot's continueOnError) only null. Lists for single-value columns are not for here."""
    is_list = pa.types.is_list(column.type)
    is_text_of_decimal = field.data_type is DataType.BIG_DECIMAL and pa.types.is_string(column.type)
    if pa.types.is_null(column.type) or (column.type == work_type(field) and not is_text_of_decimal):
        return column.cast(work_type(field)), {}
    items = column.values if is_list else column
    converted = convert_column(items, field.data_type)
    problems: dict[int, BadValue] = {}
    if converted.failed is not None and not keep_going:
        rows = np.flatnonzero(converted.failed)
        if is_list:
            rows = np.unique(np.searchsorted(column.offsets.to_numpy(), rows, side="right") - 1)
        problems = {int(row): _why(field, column[int(row)].as_py()) for row in rows}
    if field.single_value:
        return converted.array, problems
    if not is_list:
        return as_lists(converted.array), problems
    mask = column.is_null() if column.null_count else None
    return pa.ListArray.from_arrays(column.offsets, converted.array, type=work_type(field), mask=mask), problems


def as_lists(array: pa.Array) -> pa.ListArray:
    """Single values as the only element of a cell; nulls as empty cells."""
    offsets = np.concatenate(([0], np.cumsum(array.is_valid().to_numpy(zero_copy_only=False))))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), array.drop_null())


def _why(field: FieldSpec, value: Any) -> BadValue:
    """What the reference says of a value that the columnar conversion refused."""
    try:
        cell_converter(field.data_type, single_value=field.single_value)(value)
    except BadValue as problem:
        return problem
    return BadValue(Cause.WRONG_TYPE, f"{value!r} is not a value of type {field.data_type}")


def settle(
    fields: tuple[FieldSpec, ...],
    indexes: np.ndarray,
    columns: list[tuple[pa.Array, dict[int, BadValue]]],
    bad: list[Refusal],
) -> Piece:
    """Fitted columns of the messages at `indexes` without the rows that have a problem in one of them."""
    refused: dict[int, Refusal] = {}
    for field, (_, problems) in zip(fields, columns, strict=True):
        for row, problem in problems.items():
            if row not in refused:
                refused[row] = Refusal(int(indexes[row]), problem.cause, f"column {field.name}: {problem.detail}")
    arrays = [array for array, _ in columns]
    if not refused:
        return indexes, arrays
    bad.extend(refused.values())
    keep = np.ones(len(indexes), dtype=bool)
    keep[list(refused)] = False
    mask = pa.array(keep)
    return indexes[keep], [array.filter(mask) for array in arrays]
