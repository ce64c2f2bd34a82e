# SPDX-License-Identifier: Apache-2.0
"""Packs: candidates of many keys in one cell, so that what a row costs on its way through Spark is paid once per pack.

    pack   = CANDIDATES · count · bounds of keys (count + 1) · bounds of candidates (count + 1) · keys · candidates

Numbers are 4 bytes, little-endian; bounds say where cells begin and the last one ends. Which partition of the key
coordinator's state a key belongs to is decided here, too; it must never change, because a state is made with it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.ingest.candidates import bytes_of

#: First byte of what goes to the coordinator and comes from it: report of a task, candidates or decisions, its state.
REPORT, CANDIDATES, STATE = 0, 1, 2
#: Candidates of one pack: some 5 MB.
PACK_CANDIDATES_MAX = 64 * 1024


def packs(candidates: pa.RecordBatch, partitions: int) -> Iterator[tuple[int, bytes]]:
    """Candidates (CANDIDATE_SCHEMA) as packs, and the partition of the state that each is for."""
    keys, ranks = candidates.column("key"), candidates.column("candidate")
    places = partitions_of(keys, partitions)
    for partition in range(partitions):
        mine = np.flatnonzero(places == partition)
        for first in range(0, len(mine), PACK_CANDIDATES_MAX):
            rows = pa.array(mine[first : first + PACK_CANDIDATES_MAX])
            # In the order of keys: neighbours in the state are near each other in memory, which halves what it costs.
            rows = rows.take(pc.array_sort_indices(keys.take(rows)))
            yield partition, _pack(keys.take(rows), ranks.take(rows))


def partitions_of(keys: pa.BinaryArray, partitions: int) -> np.ndarray:
    """The partition of the state of each key: its bytes times random weights, added up (multilinear hashing), mixed."""
    parts = [_partitions_of(keys.slice(at, _AT_ONCE), partitions) for at in range(0, len(keys), _AT_ONCE)]
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


#: Keys that are looked at together: it takes 40 bytes of memory for each of theirs, less of it is faster.
_AT_ONCE = 16 * 1024


def _partitions_of(keys: pa.BinaryArray, partitions: int) -> np.ndarray:
    data, bounds = bytes_of(keys)
    first = int(bounds[0])
    starts = bounds[:-1] - first
    at = np.arange(bounds[-1] - first) - np.repeat(starts, np.diff(bounds))
    terms = _WEIGHTS[at & 255] * (data[first : bounds[-1]].astype(np.uint64) + np.uint64(1))
    places: np.ndarray = (_mixed(np.add.reduceat(terms, starts)) % np.uint64(partitions)).astype(np.int64)
    return places


def _mixed(words: np.ndarray) -> np.ndarray:
    """Each bit of the result depends on each of the word (splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = words ^ (words >> np.uint64(31))
    return mixed


#: Of the 256 places in a key, and again.
_WEIGHTS = _mixed(np.arange(1, 257, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)


def _pack(keys: pa.BinaryArray, ranks: pa.BinaryArray) -> bytes:
    parts = [bytes([CANDIDATES]), len(keys).to_bytes(4, "little")]
    cells = []
    for column in (keys, ranks):
        data, bounds = bytes_of(column)
        parts.append((bounds - bounds[0]).astype("<i4").tobytes())
        cells.append(data[bounds[0] : bounds[-1]].tobytes())
    return b"".join((*parts, *cells))
