# SPDX-License-Identifier: Apache-2.0
"""Sealing: rows of a range become one Parquet file, the canonical form of a segment.

Rules (segment completion design):

- Same rows, same bytes: writer options, row groups and column order are fixed; nothing depends on block borders, on the
  clock or on the machine. (The file names the writing library's version: equal bytes need equal pyarrow, equal
  *content checksums* do not.)
- The columns are those that the rows have: `$offset`, `$subRow`, `$ingestionTime`, then the rest by name. Rows that
  were written before a column existed get its default. So the content depends on the rows alone, not on when a replica
  learned of a schema change. What else it depends on (the order, those defaults) is the segment's form: committed with
  it, so that whoever builds the rows later, under another schema or config, gets the same content.
- Order is (`$offset`, `$subRow`), or (sorted column, `$offset`, `$subRow`) where the table names a sorted column.
- A file appears under its name only when it is complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cremant.model.cluster import TableRecord
from cremant.model.errors import Behind, NoResource
from cremant.model.names import INGESTION_TIME, OFFSET, SUB_ROW
from cremant.model.schema import Schema
from cremant.model.segments import ColumnPartitions, ColumnRange, SegmentForm
from cremant.model.table import ColumnPartitioning
from cremant.segment.checksum import ContentHash, file_checksum
from cremant.segment.layout import BATCH_ROWS, ROW_COLUMNS, Alignment, stored_columns
from cremant.segment.partitions import PartitionCollector
from cremant.segment.stats import RangeCollector, time_range_ms
from cremant.store.files import sync

PARQUET_FILE = "rows.parquet"


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """What a build needs to know of its table."""

    schema: Schema
    time_column: str
    sorted_column: str | None = None
    #: Leaves the file as it is: only metadata tell of it.
    partitioning: Mapping[str, ColumnPartitioning] = field(default_factory=dict)

    def formed(self, form: SegmentForm) -> SegmentSpec:
        """For content of this form, whatever the table wants now."""
        fields = tuple(
            msgspec.structs.replace(spec, default_null_value=form.filled[spec.name])
            if spec.name in form.filled
            else spec
            for spec in self.schema.fields
        )
        schema = msgspec.structs.replace(self.schema, fields=fields)
        return replace(self, schema=schema, sorted_column=form.sorted_column)


def spec_of(record: TableRecord) -> SegmentSpec:
    """What the table wants now."""
    config = record.config
    return SegmentSpec(record.table_schema, config.time_column, config.sorted_column, config.partitioning)


@dataclass(frozen=True, slots=True)
class Built:
    """A sealed file and what its metadata will say. `checksum` is over decoded columns, `file_checksum` over bytes."""

    path: Path
    rows: int
    size_bytes: int
    checksum: str
    file_checksum: str
    columns: dict[str, ColumnRange]
    min_time_ms: int | None
    max_time_ms: int | None
    max_ingestion_ms: int | None
    partitioning: dict[str, ColumnPartitions] = field(default_factory=dict)
    form: SegmentForm = field(default_factory=SegmentForm)


def build_segment(
    directory: Path,
    batches: Sequence[pa.RecordBatch],
    spec: SegmentSpec,
    *,
    fsync: bool,
    on_progress: Callable[[], None] = lambda: None,
) -> Built:
    """Writes `rows.parquet` into `directory` (created if needed). `batches` are the rows of exactly the range, in
    offset order. `on_progress` is called after each row group. Raises NoResource when the disk is full, Behind when
    `spec.schema` is older than the rows."""
    directory.mkdir(parents=True, exist_ok=True)
    path, temporary = directory / PARQUET_FILE, directory / (PARQUET_FILE + ".tmp")
    batches = [batch for batch in batches if batch.num_rows]
    schema = stored_schema(batches, spec)
    content, ranges = ContentHash(), RangeCollector(spec.schema)
    partitions = PartitionCollector(spec.schema, spec.partitioning)
    rows, max_ingestion_ms = 0, None
    try:
        with pq.ParquetWriter(temporary, schema, **WRITER_OPTIONS) as writer:
            for group in row_groups(_ordered(batches, schema, spec), schema):
                writer.write_batch(group, row_group_size=BATCH_ROWS)
                content.update(group)
                ranges.add(group)
                partitions.add(group)
                on_progress()
                rows += group.num_rows
                max_ingestion_ms = newest(max_ingestion_ms, pc.max(group.column(INGESTION_TIME)).as_py())
        if fsync:
            sync(temporary)
        os.replace(temporary, path)
        if fsync:
            sync(directory)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise NoResource(f"cannot write {path}: {error}", hint="free disk space; the build is retried") from error
    times = time_range_ms(ranges.ranges(), spec.schema, spec.time_column)
    return Built(
        path=path,
        rows=rows,
        size_bytes=path.stat().st_size,
        checksum=content.hexdigest(),
        file_checksum=file_checksum(path),
        columns=ranges.ranges(),
        min_time_ms=times[0] if times else None,
        max_time_ms=times[1] if times else None,
        max_ingestion_ms=max_ingestion_ms,
        partitioning=partitions.partitions(),
        form=SegmentForm(sorted_column=spec.sorted_column, filled=_filled(batches, schema, spec)),
    )


def stored_schema(batches: Iterable[pa.RecordBatch], spec: SegmentSpec) -> pa.Schema:
    """Columns of a segment over these rows."""
    present = {name for batch in batches for name in batch.schema.names}
    known = stored_columns(spec.schema, null_handling=True)
    unknown = present - set(known.names)
    if unknown:
        raise Behind(
            f"rows have columns {sorted(unknown)} that schema {spec.schema.name} does not have yet",
            hint="a newer version of the schema is on its way; the build is retried",
        )
    extra = sorted(present - {field.name for field in ROW_COLUMNS})
    return pa.schema([*ROW_COLUMNS, *(known.field(name) for name in extra)])


def _filled(batches: Sequence[pa.RecordBatch], schema: pa.Schema, spec: SegmentSpec) -> dict[str, Any]:
    """Columns that some of the rows lack, with what the schema says that stands there."""
    lacking = {name for batch in batches for name in set(schema.names) - set(batch.schema.names)}
    return {column.name: column.default_null_value for column in spec.schema.fields if column.name in lacking}


#: Fixed for good: replicas compare what comes out.
WRITER_OPTIONS = {
    "version": "2.6",
    "data_page_version": "1.0",
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": True,
    "write_statistics": True,
    "write_page_index": False,
    "store_schema": True,
}


def _ordered(batches: Sequence[pa.RecordBatch], schema: pa.Schema, spec: SegmentSpec) -> Iterator[pa.RecordBatch]:
    alignment = Alignment(spec.schema, null_handling=True, columns=schema)
    aligned = (alignment.align(batch) for batch in batches)
    if spec.sorted_column is None or spec.sorted_column not in schema.names:
        yield from aligned
        return
    table = pa.Table.from_batches(list(aligned), schema=schema)
    keys = [(name, "ascending") for name in (spec.sorted_column, OFFSET, SUB_ROW)]
    order = pc.sort_indices(table, sort_keys=keys)
    for first in range(0, table.num_rows, BATCH_ROWS):
        yield table.take(order.slice(first, BATCH_ROWS)).combine_chunks().to_batches()[0]


def row_groups(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of exactly `BATCH_ROWS` (the last one fewer), each contiguous in memory."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        first = 0
        while first < batch.num_rows:
            part = batch.slice(first, min(BATCH_ROWS - rows, batch.num_rows - first))
            waiting.append(part)
            rows += part.num_rows
            first += part.num_rows
            if rows == BATCH_ROWS:
                yield _contiguous(waiting, schema)
                waiting, rows = [], 0
    if waiting:
        yield _contiguous(waiting, schema)


def _contiguous(parts: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    if len(parts) == 1:
        return parts[0]
    return pa.Table.from_batches(parts, schema=schema).combine_chunks().to_batches()[0]


def newest(*times_ms: int | None) -> int | None:
    """The latest of the known times."""
    known = [time_ms for time_ms in times_ms if time_ms is not None]
    return max(known) if known else None
