# SPDX-License-Identifier: Apache-2.0
"""The scan form of a table's rows, and how older rows are brought into it.

Rules:

- `scan_schema` alone decides the Arrow form in which each column is scanned; everything else asks it.
- Order of columns: `$offset`, `$subRow`, `$ingestionTime`, the user's columns as in the schema, then one boolean
  `$isNull.<column>` per user column when the table's null handling is on.
- A column that was added to the schema later appears in older rows with its default value, and as null.
"""

from __future__ import annotations

import pyarrow as pa

from cremant.model.names import INGESTION_TIME, IS_NULL_PREFIX, OFFSET, SUB_ROW
from cremant.model.schema import Schema

ROW_COLUMNS: tuple[pa.Field, ...] = (
    pa.field(OFFSET, pa.int64(), nullable=False),
    pa.field(SUB_ROW, pa.int32(), nullable=False),
    pa.field(INGESTION_TIME, pa.int64(), nullable=True),
)

#: Rows of one batch of a sealed segment; a default column of this length serves every batch as a slice.
BATCH_ROWS = 128 * 1024


def scan_type(stored: pa.DataType) -> pa.DataType:
    """The scan form of a stored type: views for strings and bytes, everything else as stored.

    Measured on DataFusion 55, 10 M rows, 2 cores (ms: utf8 / dictionary / view): group by 20 values 37 / 56 / 26,
    group by 200 k values 250 / 1773 / 157, equality filter 33 / 7 / 5, point lookup by string 10 / 101 / 3.
    Elements of multi-value columns stay as stored: they are unnested rarely."""
    if pa.types.is_string(stored):
        return pa.string_view()
    if pa.types.is_binary(stored):
        return pa.binary_view()
    return stored


def scan_schema(schema: Schema, *, null_handling: bool = False) -> pa.Schema:
    """Columns of a scan, in scan form."""
    return scan_form(stored_columns(schema, null_handling=null_handling))


def scan_form(stored: pa.Schema) -> pa.Schema:
    """The same columns in scan form."""
    return pa.schema([field.with_type(scan_type(field.type)) for field in stored])


def stored_columns(schema: Schema, *, null_handling: bool = False) -> pa.Schema:
    """Columns of a row block or of a sealed file, in stored form."""
    fields = list(ROW_COLUMNS)
    fields += [pa.field(spec.name, spec.arrow_type, nullable=False) for spec in schema.fields]
    if null_handling:
        fields += [pa.field(IS_NULL_PREFIX + spec.name, pa.bool_(), nullable=False) for spec in schema.fields]
    return pa.schema(fields)


class Alignment:
    """Brings batches that were written under older versions of a schema into its current scan form, without copying
    the columns they have. Immutable once built but for its cache of default columns; safe to share between threads."""

    def __init__(self, schema: Schema, *, null_handling: bool = False, columns: pa.Schema | None = None) -> None:
        #: `columns`, if given, replaces the scan form as the target (a subset of it, for a build).
        self.schema = columns if columns is not None else scan_schema(schema, null_handling=null_handling)
        self._defaults = {spec.name: spec.default if spec.single_value else [spec.default] for spec in schema.fields}
        self._cache: dict[str, pa.Array] = {}

    def align(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.schema.equals(self.schema):
            return batch
        present = {name: index for index, name in enumerate(batch.schema.names)}
        columns = []
        for field in self.schema:
            index = present.get(field.name)
            if index is None:
                columns.append(self._missing(field, batch.num_rows, present))
            else:
                column = batch.column(index)
                columns.append(column if column.type.equals(field.type) else column.cast(field.type))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _missing(self, field: pa.Field, rows: int, present: dict[str, int]) -> pa.Array:
        if field.name.startswith(IS_NULL_PREFIX):
            # Null handling was switched on later: what was stored then counts as a value, unless the column is new.
            value: object = field.name[len(IS_NULL_PREFIX) :] not in present
        else:
            value = self._defaults.get(field.name)
        if rows > BATCH_ROWS:
            return _constant(value, field.type, rows)
        cached = self._cache.get(f"{field.name}={value}")
        if cached is None:
            cached = self._cache[f"{field.name}={value}"] = _constant(value, field.type, BATCH_ROWS)
        return cached.slice(0, rows)


def _constant(value: object, kind: pa.DataType, rows: int) -> pa.Array:
    if pa.types.is_dictionary(kind):
        indices = pa.repeat(pa.scalar(0, kind.index_type), rows)
        return pa.DictionaryArray.from_arrays(indices, pa.array([value], kind.value_type))
    return pa.repeat(pa.scalar(value, kind), rows)
