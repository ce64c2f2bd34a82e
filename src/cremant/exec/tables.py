# SPDX-License-Identifier: Apache-2.0
"""The batches of table `t`: chosen columns of the pieces, virtual columns added, sliced, newest first.

Nothing is copied: columns are picked and sliced by reference; virtual columns are built only when asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from cremant.model.names import PARTITION
from cremant.segment.scan import Piece

#: See engine.py for the measurements behind these two.
SLICE_ROWS = 64 * 1024
SMALL_ROWS = 100_000

SEGMENT_NAME = "$segmentName"
DOC_ID = "$docId"
#: Virtual columns that the engine fills from the piece.
PIECE_COLUMNS: dict[str, pa.DataType] = {
    SEGMENT_NAME: pa.string_view(),
    PARTITION: pa.int32(),
    DOC_ID: pa.int32(),
}


def count_rows(batches: Sequence[pa.RecordBatch]) -> int:
    return sum(batch.num_rows for batch in batches)


def piece_batches(
    pieces: Sequence[Piece],
    columns: Sequence[str],
    schema: pa.Schema,
    constants: dict[str, str],
    *,
    validity_column: str | None,
) -> tuple[list[pa.RecordBatch], pa.Schema]:
    """Batches of `columns` (at least one is always there: a batch without columns would lose its rows)."""
    fields = [_field(name, schema, constants) for name in columns] or [_cheapest(schema)]
    if validity_column is not None:
        fields.append(pa.field(validity_column, pa.bool_(), nullable=False))
    table_schema = pa.schema(fields)
    batches = []
    for piece in pieces:
        first_row = 0
        for batch in piece.batches:
            columns_of_batch = [
                _column(field, batch, piece, first_row, constants, validity_column) for field in table_schema
            ]
            batches.append(pa.RecordBatch.from_arrays(columns_of_batch, schema=table_schema))
            first_row += batch.num_rows
    return batches, table_schema


def _field(name: str, schema: pa.Schema, constants: dict[str, str]) -> pa.Field:
    if name in PIECE_COLUMNS:
        return pa.field(name, PIECE_COLUMNS[name], nullable=False)
    if name in constants:
        return pa.field(name, pa.string_view(), nullable=False)
    return schema.field(name)


def _cheapest(schema: pa.Schema) -> pa.Field:
    return next((field for field in schema if pa.types.is_integer(field.type)), schema.field(0))


def _column(
    field: pa.Field, batch: pa.RecordBatch, piece: Piece, first_row: int, constants: dict[str, str], valid: str | None
) -> pa.Array:
    rows = batch.num_rows
    match field.name:
        case name if name == valid:
            return pa.repeat(True, rows) if piece.validity is None else piece.validity.slice(first_row, rows)
        case name if name == SEGMENT_NAME:
            return pa.repeat(pa.scalar(piece.segment, field.type), rows)
        case name if name == PARTITION:
            return pa.array(np.full(rows, piece.partition, dtype=np.int32))
        case name if name == DOC_ID:
            return pa.array(np.arange(first_row, first_row + rows, dtype=np.int32))
        case name if name in constants:
            return pa.repeat(pa.scalar(constants[name], field.type), rows)
        case name:
            return batch.column(name)


def spread(batches: Sequence[pa.RecordBatch], schema: pa.Schema, partitions: int) -> list[list[pa.RecordBatch]]:
    """Slices of the batches, newest first, dealt out to `partitions` lists of about equal rows."""
    dealt: list[list[pa.RecordBatch]] = [[] for _ in range(partitions)]
    for index, piece in enumerate(_slices_newest_first(batches)):
        dealt[index % partitions].append(piece)
    if not dealt[0]:
        dealt[0].append(pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema))
    return [part for part in dealt if part]


def _slices_newest_first(batches: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in reversed(batches):
        rows = batch.num_rows
        if 0 < rows <= SLICE_ROWS:
            yield batch
            continue
        for start in reversed(range(0, rows, SLICE_ROWS)):
            yield batch.slice(start, SLICE_ROWS)
