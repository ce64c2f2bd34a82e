# SPDX-License-Identifier: Apache-2.0
"""Compaction of a sealed segment of an upsert table: its canonical file without the rows that no query can see any
more.

Rules:

- Which rows go is said by the versions at one closed epoch (`Versions.kept`), so it is the same wherever it is done.
- What is read is the committed content, or nothing is made of it: what comes out becomes the committed content.
- What stays is copied as it is, in its order and in the columns it has: so equal rows are equal content, whatever the
  table's schema or config have become since they were sealed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cremant.model.errors import Corrupt, NoResource
from cremant.segment.build import PARQUET_FILE, WRITER_OPTIONS, row_groups
from cremant.segment.checksum import ContentHash, file_checksum
from cremant.segment.layout import BATCH_ROWS
from cremant.segment.masks import Flags
from cremant.segment.reader import SealedSegment
from cremant.store.files import sync


@dataclass(frozen=True, slots=True)
class Compacted:
    """`checksum` is over decoded columns, `file_checksum` over the bytes of `path`."""

    path: Path
    rows: int
    size_bytes: int
    checksum: str
    file_checksum: str


def compact_segment(
    directory: Path, sealed: SealedSegment, kept: Flags, *, fsync: bool, on_progress: Callable[[], None] = lambda: None
) -> Compacted:
    """Writes the `kept` rows of the segment (a flag per row, in its order) as `rows.parquet` into `directory`.
    `on_progress` is called after each row group. Raises Corrupt when the segment's file is not what it was, NoResource
    when the disk is full."""
    path, temporary = directory / PARQUET_FILE, directory / (PARQUET_FILE + ".tmp")
    source = sealed.directory / PARQUET_FILE
    content, rows = ContentHash(), 0
    try:
        if (found := file_checksum(source)) != sealed.marker.file_checksum:
            raise Corrupt(f"{source}: file checksum is {found}, expected {sealed.marker.file_checksum}")
        with pq.ParquetFile(source) as file:
            schema = file.schema_arrow.remove_metadata()
            with pq.ParquetWriter(temporary, schema, **WRITER_OPTIONS) as writer:
                for group in row_groups(_kept_rows(file, schema, kept), schema):
                    writer.write_batch(group, row_group_size=BATCH_ROWS)
                    content.update(group)
                    rows += group.num_rows
                    on_progress()
        if fsync:
            sync(temporary)
        os.replace(temporary, path)
        if fsync:
            sync(directory)
    except pa.ArrowException as error:
        raise Corrupt(f"{source}: cannot be decoded: {error}") from error
    except OSError as error:
        raise NoResource(f"cannot write {path}: {error}", hint="free disk space; it is retried") from error
    finally:
        temporary.unlink(missing_ok=True)
    return Compacted(
        path=path, rows=rows, size_bytes=path.stat().st_size, checksum=content.hexdigest(),
        file_checksum=file_checksum(path),
    )  # fmt: skip


def _kept_rows(file: pq.ParquetFile, schema: pa.Schema, kept: Flags) -> Iterator[pa.RecordBatch]:
    first = 0
    for group in range(file.num_row_groups):
        table = file.read_row_group(group, use_threads=False).replace_schema_metadata(None)
        flags = kept[first : first + table.num_rows]
        first += table.num_rows
        count = int(np.count_nonzero(flags))
        if count:
            rows = table if count == table.num_rows else table.filter(pa.array(flags))
            yield from rows.cast(schema).combine_chunks().to_batches()
    if first != len(kept):
        raise Corrupt(f"{file.num_row_groups} row groups have {first} rows, expected {len(kept)}")
