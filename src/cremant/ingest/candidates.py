# SPDX-License-Identifier: Apache-2.0
"""Candidates: per key the one row of a task that could be in force, as the key coordinator takes them in.

Columns: `key` (keys.py), `rank` (ranks.py), `value` = location (16) · epoch (8, big-endian). Of the rows of a key in
one task only the greatest can win, so the others stop here; they are superseded in the epoch they came in.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.ingest.keys import NULL_TAG, KeyEncoder, binary_of
from cremant.ingest.ranks import (
    LOCATION_BYTES,
    Part,
    bytes_matrix,
    comparison_parts,
    location_parts,
    rank_bytes,
    sortable,
)
from cremant.model import names
from cremant.model.errors import InvalidConfig, InvariantViolation
from cremant.model.schema import Schema
from cremant.model.upsert import UpsertConfig

CANDIDATE_SCHEMA = pa.schema(
    [pa.field("key", pa.binary()), pa.field("rank", pa.binary()), pa.field("value", pa.binary())]
)
VALUE_BYTES = LOCATION_BYTES + 8
#: Rows that are kept before they are reduced: some 60 MB.
PENDING_ROWS_MAX = 512 * 1024


class _Chunk(NamedTuple):
    keys: pa.BinaryArray
    parts: list[Part]
    epochs: np.ndarray


class Candidates:
    """Takes in the row blocks of one task, hands out one candidate per key. Not thread-safe."""

    def __init__(self, schema: Schema, upsert: UpsertConfig) -> None:
        by_name = {field.name: field for field in schema.fields}
        missing = [name for name in upsert.comparison_columns if name not in by_name]
        if missing:
            raise InvalidConfig(f"schema {schema.name} has no comparison column {', '.join(missing)}")
        self._keys = KeyEncoder(schema)
        self._comparison = tuple(by_name[name] for name in upsert.comparison_columns)
        self._chunks: list[_Chunk] = []
        self._rows = self._reduced = 0

    def add(self, batch: pa.RecordBatch, partition: int | np.ndarray, epoch: int | np.ndarray) -> None:
        """Rows of a block: `$offset`, `$subRow` and the stored columns. `partition` and `epoch` (the epoch in which a
        row came into force, of a rebuild) for all rows, or one per row."""
        count = batch.num_rows
        if not count:
            return
        place = location_parts(
            np.broadcast_to(np.asarray(partition), count),
            batch.column(names.OFFSET).to_numpy(),
            batch.column(names.SUB_ROW).to_numpy(),
        )
        keys = self._keys.keys(batch)
        null = self._keys.null_keys(batch)
        if null is not None:
            own = np.concatenate((np.full((count, 1), NULL_TAG, np.uint8), bytes_matrix(place)), axis=1)
            keys = pc.if_else(pa.array(null), binary_of(own), keys)
        parts = [part for field in self._comparison for part in comparison_parts(field, batch)]
        epochs = np.broadcast_to(np.asarray(epoch, dtype=np.uint64), count)
        self._chunks.append(_Chunk(keys, [*parts, *place], epochs))
        self._rows += count
        if self._rows - self._reduced > PENDING_ROWS_MAX:
            self._reduce()

    def finish(self) -> pa.RecordBatch:
        """CANDIDATE_SCHEMA, each key once. Afterwards this is empty."""
        self._reduce()
        if not self._chunks:
            return pa.RecordBatch.from_pylist([], schema=CANDIDATE_SCHEMA)
        chunk = self._chunks.pop()
        self._rows = self._reduced = 0
        value = binary_of(bytes_matrix([*chunk.parts[-3:], chunk.epochs]))
        return pa.RecordBatch.from_arrays([chunk.keys, rank_bytes(chunk.parts), value], schema=CANDIDATE_SCHEMA)

    def _reduce(self) -> None:
        if not self._chunks:
            return
        chunk = _joined(self._chunks)
        winners = best_rows(chunk.keys, chunk.parts)
        if winners is not None:
            chunk = _Chunk(
                chunk.keys.take(pa.array(winners)),
                [
                    part[winners] if isinstance(part, np.ndarray) else part.take(pa.array(winners))
                    for part in chunk.parts
                ],
                chunk.epochs[winners],
            )
        self._chunks = [chunk]
        self._rows = self._reduced = len(chunk.keys)


def best_rows(keys: pa.BinaryArray, parts: list[Part]) -> np.ndarray | None:
    """Per key the row that is greatest by `parts`; None if no key is there twice."""
    encoded = keys.dictionary_encode()
    count = len(encoded.dictionary)
    if count == len(keys):
        return None
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    alive = np.arange(len(keys))
    for part in parts:
        words = sortable(part)[alive]
        if (words == words[0]).all():
            continue
        best = np.zeros(count, dtype=words.dtype)
        at = codes[alive]
        np.maximum.at(best, at, words)
        alive = alive[words == best[at]]
        if len(alive) == count:
            break
    # A row that is there twice is the same row twice.
    return alive if len(alive) == count else alive[np.unique(codes[alive], return_index=True)[1]]


def _joined(chunks: list[_Chunk]) -> _Chunk:
    if len(chunks) == 1:
        return chunks[0]
    columns = zip(*(chunk.parts for chunk in chunks), strict=True)
    parts = [np.concatenate(c) if isinstance(c[0], np.ndarray) else pa.concat_arrays(c) for c in columns]
    return _Chunk(
        pa.concat_arrays([chunk.keys for chunk in chunks]), parts, np.concatenate([chunk.epochs for chunk in chunks])
    )


class Places(NamedTuple):
    """Where rows are, taken out of the bytes of values."""

    partition: np.ndarray
    offset: np.ndarray
    sub_row: np.ndarray


def matrix_of(values: pa.BinaryArray, width: int) -> np.ndarray:
    """Binary cells of `width` bytes each as rows of a matrix. Raises InvariantViolation for another width."""
    count = len(values)
    if not count:
        return np.empty((0, width), dtype=np.uint8)
    _, bounds, data = values.buffers()
    ends = np.frombuffer(bounds, np.int32, count + 1, values.offset * 4)
    if values.null_count or not (np.diff(ends) == width).all():
        raise InvariantViolation("candidates", f"a value of the key coordinator has not {width} bytes")
    return np.frombuffer(data, np.uint8, count * width, int(ends[0])).reshape(count, width)


def epochs_of(values: np.ndarray) -> np.ndarray:
    """The epochs in a matrix of values, uint64."""
    return np.ascontiguousarray(values[:, LOCATION_BYTES:]).view(">u8").ravel().astype(np.uint64)


def places_of(values: np.ndarray) -> Places:
    """The rows that a matrix of values names."""
    return Places(
        np.ascontiguousarray(values[:, :4]).view(">u4").ravel().astype(np.int64),
        np.ascontiguousarray(values[:, 4:12]).view(">u8").ravel().astype(np.int64),
        np.ascontiguousarray(values[:, 12:16]).view(">u4").ravel().astype(np.int32),
    )
