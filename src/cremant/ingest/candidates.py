# SPDX-License-Identifier: Apache-2.0
"""Candidates: per key the one row of a task that could be in force, as the key coordinator takes them in.

Columns: `candidate` = rank (ranks.py) · epoch (8, big-endian), ordered as ranks are, whose last VALUE_BYTES say which
row it is (location) and since when it is in force (epoch); `key` (keys.py). Of the rows of a key in one task only the
greatest can win, so the others stop here; they are superseded in the epoch they came in.
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
from cremant.model.errors import InvalidConfig
from cremant.model.schema import Schema
from cremant.model.upsert import UpsertConfig

CANDIDATE_SCHEMA = pa.schema([pa.field("candidate", pa.binary()), pa.field("key", pa.binary())])
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
            own = np.concatenate((bytes_matrix(place), np.full((count, 1), NULL_TAG, np.uint8)), axis=1)
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
        return pa.RecordBatch.from_arrays(
            [rank_bytes([*chunk.parts, chunk.epochs]), chunk.keys], schema=CANDIDATE_SCHEMA
        )

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


def values_at(data: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The VALUE_BYTES at each of `starts` as rows of a matrix."""
    if not len(starts):
        return np.empty((0, VALUE_BYTES), dtype=np.uint8)
    values: np.ndarray = np.lib.stride_tricks.sliding_window_view(data, VALUE_BYTES)[starts]
    return values


def values_of(candidates: pa.BinaryArray) -> np.ndarray:
    """Which row each candidate is, and since when: a matrix of values."""
    data, bounds = bytes_of(candidates)
    return values_at(data, bounds[1:] - VALUE_BYTES)


def bytes_of(cells: pa.BinaryArray) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of binary cells, and where each begins and the last ends."""
    _, bounds, data = cells.buffers()
    if data is None or not len(cells):
        return np.empty(0, dtype=np.uint8), np.zeros(len(cells) + 1, dtype=np.int64)
    ends = np.frombuffer(bounds, np.int32, len(cells) + 1, cells.offset * 4)
    return np.frombuffer(data, np.uint8), ends.astype(np.int64)


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
