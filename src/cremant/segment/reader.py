# SPDX-License-Identifier: Apache-2.0
"""A sealed segment on disk: the Parquet file, its memory-mapped scan form, and a marker that vouches for both.

    <directory>/rows.parquet    canonical; what deep store and peers exchange
    <directory>/rows.arrow      derived: Arrow IPC in scan form, mapped by queries
    <directory>/rows.index      derived: what finds rows without scanning (index.py); never missed, built anew
    <directory>/segment.json    marker, written last: sizes, checksums, format

Rules:

- `derive` reads the Parquet back and compares the content with the checksum that was promised; only then the marker is
  written. A directory without a marker is not a segment.
- `open_segment` trusts a marker whose sizes and format fit (milliseconds); `verify` recomputes everything.
- Mapped files are never changed in place. They may be deleted while queries run: a mapping outlives its file, and the
  disk space comes back when the last reference to its batches is gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cremant.model.errors import Corrupt, NoResource
from cremant.model.names import OFFSET
from cremant.model.table import IndexConfig
from cremant.segment.build import PARQUET_FILE
from cremant.segment.checksum import ContentHash, content_checksum, file_checksum
from cremant.segment.index import INDEX_FILE, SegmentIndex, ensure_index, rebuild_index, sweep
from cremant.segment.layout import BATCH_ROWS, scan_form
from cremant.store.files import sync

ARROW_FILE = "rows.arrow"
MARKER_FILE = "segment.json"

#: Version of the directory's layout and of the scan form; another one is derived anew from the Parquet file.
FORMAT = 1
NO_INDEXES = IndexConfig()


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """Written when the directory is complete and was verified once."""

    format: int
    name: str
    rows: int
    checksum: str
    file_checksum: str
    parquet_bytes: int
    arrow_bytes: int


@dataclass(frozen=True, slots=True)
class SealedSegment:
    """An open segment. `batches` are mapped; whoever holds them may scan them, also after `delete`."""

    directory: Path
    marker: Marker
    batches: tuple[pa.RecordBatch, ...]
    #: None only when it could not be written (disk full): then queries scan more.
    index: SegmentIndex | None = None

    @property
    def name(self) -> str:
        return self.marker.name

    @property
    def rows(self) -> int:
        return self.marker.rows

    @property
    def disk_bytes(self) -> int:
        return self.marker.parquet_bytes + self.marker.arrow_bytes + (self.index.bytes if self.index else 0)


def derive(
    directory: Path, name: str, checksum: str, *, fsync: bool, indexes: IndexConfig = NO_INDEXES,
    on_progress: Callable[[], None] = lambda: None,
) -> SealedSegment:  # fmt: skip
    """Makes the scan form beside `rows.parquet`, verifies the content against `checksum`, writes the marker, opens.
    `on_progress` is called after each row group.

    Raises Corrupt (naming the file) when the Parquet file cannot be read or has other content, NoResource when the
    disk is full."""
    parquet, arrow = directory / PARQUET_FILE, directory / ARROW_FILE
    temporary = directory / (ARROW_FILE + ".tmp")
    content, rows = ContentHash(), 0
    try:
        with _open_parquet(parquet) as source:
            schema = scan_form(source.schema_arrow.remove_metadata())
            options = pa.ipc.IpcWriteOptions(unify_dictionaries=True)
            with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, schema, options=options) as writer:
                for batch in _decoded(source, parquet, schema):
                    content.update(batch)
                    writer.write_batch(batch)
                    rows += batch.num_rows
                    on_progress()
        if content.hexdigest() != checksum:
            raise Corrupt(f"{parquet}: content checksum is {content.hexdigest()}, expected {checksum}")
        if fsync:
            sync(temporary)
        os.replace(temporary, arrow)
        marker = Marker(
            format=FORMAT,
            name=name,
            rows=rows,
            checksum=checksum,
            file_checksum=file_checksum(parquet),
            parquet_bytes=parquet.stat().st_size,
            arrow_bytes=arrow.stat().st_size,
        )
        _write_marker(directory, marker, fsync=fsync)
    except OSError as error:
        raise NoResource(f"cannot write into {directory}: {error}", hint="free disk space; it is retried") from error
    finally:
        temporary.unlink(missing_ok=True)
    return _opened(directory, marker, indexes)


def open_segment(directory: Path, indexes: IndexConfig = NO_INDEXES) -> SealedSegment:
    """Opens a directory whose marker fits its files, without reading the rows (but for an index that is missing or
    was made for other wishes). Raises Corrupt naming what does not fit."""
    marker = read_marker(directory)
    for file, expected in ((PARQUET_FILE, marker.parquet_bytes), (ARROW_FILE, marker.arrow_bytes)):
        path = directory / file
        found = path.stat().st_size if path.exists() else None
        if found != expected:
            raise Corrupt(f"{path}: expected {expected} bytes, found {found if found is not None else 'no file'}")
    if marker.format != FORMAT:
        return derive(directory, marker.name, marker.checksum, fsync=False, indexes=indexes)
    return _opened(directory, marker, indexes)


def _opened(directory: Path, marker: Marker, indexes: IndexConfig) -> SealedSegment:
    batches = _map(directory / ARROW_FILE)
    try:
        sweep(directory)
        index = ensure_index(directory, batches, marker.checksum, indexes)
    except OSError:
        # A full disk: the rows are complete, only slower to search until it is tried again.
        index = None
    return SealedSegment(directory, marker, batches, index)


def read_marker(directory: Path) -> Marker:
    """Raises Corrupt when there is none, or it is not one."""
    path = directory / MARKER_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Marker)
    except FileNotFoundError as error:
        raise Corrupt(f"{path}: no marker, the segment was never completed") from error
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{path}: not a marker: {error}") from error


def verify(segment: SealedSegment) -> None:
    """Reads every byte of the rows. Raises Corrupt naming the file that is not what the marker says."""
    parquet = segment.directory / PARQUET_FILE
    found = file_checksum(parquet)
    if found != segment.marker.file_checksum:
        raise Corrupt(f"{parquet}: file checksum is {found}, expected {segment.marker.file_checksum}")
    arrow = segment.directory / ARROW_FILE
    try:
        for batch in segment.batches:
            batch.validate(full=True)  # views and offsets that lead out of the file would end the process
    except pa.ArrowException as error:
        raise Corrupt(f"{arrow}: damaged: {error}") from error
    found = content_checksum(segment.batches)
    if found != segment.marker.checksum:
        raise Corrupt(f"{arrow}: content checksum is {found}, expected {segment.marker.checksum}")


def verify_index(segment: SealedSegment) -> None:
    """Reads every byte of the index. Raises Corrupt: the rows are none the worse, it is to be built anew."""
    if segment.index is not None:
        segment.index.verify(segment.directory / INDEX_FILE)


def reindexed(segment: SealedSegment, indexes: IndexConfig) -> SealedSegment:
    """The same rows with an index built anew. Raises OSError when it cannot be written."""
    index = rebuild_index(segment.directory, segment.batches, segment.marker.checksum, indexes)
    return replace(segment, index=index)


def slice_from(batches: tuple[pa.RecordBatch, ...], from_offset: int, until: int) -> tuple[pa.RecordBatch, ...]:
    """Rows with from_offset <= `$offset` < until, in the order they have; whole batches are not copied."""
    kept = []
    for batch in batches:
        offsets = batch.column(OFFSET)
        inside = pc.and_(pc.greater_equal(offsets, from_offset), pc.less(offsets, until))
        count = pc.sum(inside).as_py() or 0
        if count == batch.num_rows:
            kept.append(batch)
        elif count:
            kept.append(_filter(batch, inside))
    return tuple(kept)


def _filter(batch: pa.RecordBatch, mask: pa.BooleanArray) -> pa.RecordBatch:
    """pyarrow has no filter for views: through the plain form and back."""
    plain = [pa.string() if pa.types.is_string_view(kind) else kind for kind in batch.schema.types]
    plain = [pa.binary() if pa.types.is_binary_view(kind) else kind for kind in plain]
    columns = [column.cast(kind).filter(mask) for column, kind in zip(batch.columns, plain, strict=True)]
    back = [column.cast(kind) for column, kind in zip(columns, batch.schema.types, strict=True)]
    return pa.RecordBatch.from_arrays(back, schema=batch.schema)


def _open_parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, memory_map=False)
    except (pa.ArrowInvalid, FileNotFoundError) as error:
        raise Corrupt(f"{path}: not a readable Parquet file: {error}") from error


def _decoded(source: pq.ParquetFile, path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The file's rows in scan form, one batch per row group."""
    for group in range(source.num_row_groups):
        try:
            table = source.read_row_group(group, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise Corrupt(f"{path}: row group {group} cannot be decoded: {error}") from error
        if table.num_rows:
            columns = [
                column.combine_chunks().cast(kind) for column, kind in zip(table.columns, schema.types, strict=True)
            ]
            yield pa.RecordBatch.from_arrays([_single(column) for column in columns], schema=schema)


def _single(column: pa.Array) -> pa.Array:
    return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column


def _map(path: Path) -> tuple[pa.RecordBatch, ...]:
    try:
        source = pa.ipc.open_file(pa.memory_map(str(path), "r"))
        return tuple(source.get_batch(index) for index in range(source.num_record_batches))
    except (pa.ArrowInvalid, OSError) as error:
        raise Corrupt(f"{path}: not a readable Arrow file: {error}") from error


def _write_marker(directory: Path, marker: Marker, *, fsync: bool) -> None:
    temporary = directory / (MARKER_FILE + ".tmp")
    temporary.write_bytes(msgspec.json.encode(marker))
    if fsync:
        sync(temporary)
    os.replace(temporary, directory / MARKER_FILE)
    if fsync:
        sync(directory)


__all__ = [
    "ARROW_FILE", "BATCH_ROWS", "FORMAT", "MARKER_FILE", "NO_INDEXES", "Marker", "SealedSegment", "derive",
    "open_segment", "read_marker", "reindexed", "slice_from", "verify", "verify_index",
]  # fmt: skip
