# SPDX-License-Identifier: Apache-2.0
"""From decoded nullable columns to stored ones: special values, lengths, missing cells. Pinot's rules, in its order.

- -0.0 becomes 0.0 and NaN a missing cell (Pinot's special values).
- A multi-value cell loses its nulls; an empty one is missing.
- Text ends before the first NUL character, and is cut at maxLength (512 unless the schema says otherwise). The default
  strategy is TRIM_LENGTH for STRING and NO_ACTION for JSON and BYTES. Characters are Unicode code points.
- A missing cell is the column's default value (multi-value: one element of it).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.model.schema import DataType, FieldSpec

DEFAULT_MAX_LENGTH = 512
_FAILING = ("FAIL_INGESTION", "ERROR")


class Cells(NamedTuple):
    """`array` has no nulls. `missing` marks cells that hold the default (None: no cell does); `failed` marks rows
    whose value is too long where the schema says to fail (None: no row)."""

    array: pa.Array
    missing: pa.BooleanArray | None = None
    failed: np.ndarray | None = None


def finish_cells(field: FieldSpec, column: pa.Array) -> Cells:
    """`column`: nullable, in the working type of the field."""
    return _finish_single(field, column) if field.single_value else _finish_multi(field, column)


def _finish_single(field: FieldSpec, column: pa.Array) -> Cells:
    values, failed = _sanitize(field, column)
    if values.null_count == 0:
        return Cells(values, None, failed)
    return Cells(pc.fill_null(values, pa.scalar(field.default, values.type)), values.is_null(), failed)


def _finish_multi(field: FieldSpec, column: pa.ListArray) -> Cells:
    count = len(column)
    items = column.flatten()
    parents = pc.list_parent_indices(column).to_numpy(zero_copy_only=False)
    items, failed_items = _sanitize(field, items)
    failed = None
    if failed_items is not None:
        failed = np.zeros(count, dtype=bool)
        failed[parents[failed_items]] = True
    if items.null_count:
        valid = items.is_valid()
        parents = parents[valid.to_numpy(zero_copy_only=False)]
        items = items.filter(valid)
    counts = np.bincount(parents, minlength=count) if count else np.empty(0, dtype=np.int64)
    empty = counts == 0
    missing = None
    if empty.any():
        missing = pa.array(empty)
        added = np.flatnonzero(empty)
        defaults = pa.array([field.default], items.type).take(pa.array(np.zeros(len(added), dtype=np.int64)))
        order = np.argsort(np.concatenate((parents, added)), kind="stable")
        items = pa.concat_arrays([items, defaults]).take(pa.array(order))
        counts = np.maximum(counts, 1)
    offsets = pa.array(np.concatenate(([0], np.cumsum(counts))), pa.int32())
    return Cells(pa.ListArray.from_arrays(offsets, items, type=field.arrow_type), missing, failed)


def _sanitize(field: FieldSpec, values: pa.Array) -> tuple[pa.Array, np.ndarray | None]:
    match field.data_type:
        case DataType.FLOAT | DataType.DOUBLE:
            return _sanitize_doubles(values, field.data_type), None
        case DataType.STRING | DataType.JSON | DataType.BYTES:
            return _sanitize_lengths(field, values)
        case _:
            return values, None


def _sanitize_doubles(values: pa.Array, data_type: DataType) -> pa.Array:
    values = pc.add(values, 0.0)
    if pc.any(pc.is_nan(values)).as_py():
        values = pc.if_else(pc.is_nan(values), None, values)
    return values.cast(pa.float32(), safe=False) if data_type is DataType.FLOAT else values


def _sanitize_lengths(field: FieldSpec, values: pa.Array) -> tuple[pa.Array, np.ndarray | None]:
    strategy = field.extra.get("maxLengthExceedStrategy")
    if strategy is None:
        strategy = "TRIM_LENGTH" if field.data_type is DataType.STRING else "NO_ACTION"
    limit = field.max_length or DEFAULT_MAX_LENGTH
    is_text = field.data_type is not DataType.BYTES
    if is_text and _has_nul(values):
        values = _before_nul(values)
    if strategy == "NO_ACTION" or (pc.max(pc.binary_length(values)).as_py() or 0) <= limit:
        return values, None
    lengths = pc.utf8_length(values) if is_text else pc.binary_length(values)
    too_long = pc.fill_null(pc.greater(lengths, limit), False)
    if strategy in _FAILING:
        mask = too_long.to_numpy(zero_copy_only=False)
        return values, mask if mask.any() else None
    if strategy == "SUBSTITUTE_DEFAULT_VALUE":
        return pc.if_else(too_long, pa.scalar(field.default, values.type), values), None
    cut = pc.utf8_slice_codeunits(values, 0, limit) if is_text else pc.binary_slice(values, 0, limit)
    return cut, None


def _has_nul(values: pa.StringArray) -> bool:
    _, offsets_buffer, data_buffer = values.buffers()
    if data_buffer is None or not len(values):
        return False
    offsets = np.frombuffer(offsets_buffer, dtype=np.int32)
    data = np.frombuffer(data_buffer, dtype=np.uint8)[offsets[values.offset] : offsets[values.offset + len(values)]]
    return not bool(np.all(data))


def _before_nul(values: pa.StringArray) -> pa.StringArray:
    return pa.array([None if value is None else value.partition("\0")[0] for value in values.to_pylist()], pa.string())
