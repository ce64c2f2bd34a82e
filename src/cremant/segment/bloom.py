# SPDX-License-Identifier: Apache-2.0
"""Bloom filter: says of a value that a segment does not have it, or that it may.

Ten bits and six probes per value: one in a hundred absent values is taken for present. Values are hashed by a fixed
function of our own (files outlive processes), column by column.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

BITS_PER_VALUE = 10
PROBES = 6
#: Bytes of a text that are hashed; longer ones that begin alike are told apart by their length only.
_TEXT_BYTES_MAX = 256


def build_bloom(columns: Sequence[pa.Array]) -> np.ndarray:
    """The filter as bytes; its number of bits is a power of two. `columns` in stored form."""
    hashes = np.unique(np.concatenate([hash_values(column) for column in columns]))
    bits = 64
    while bits < BITS_PER_VALUE * len(hashes):
        bits *= 2
    flags = np.zeros(bits, np.uint8)
    for probe in _probes(hashes, bits):
        flags[probe] = 1
    return np.packbits(flags)


def may_contain(bloom: np.ndarray, value: int | str) -> bool:
    """False only if the value is not there."""
    hashed = hash_values(pa.array([value], pa.string() if isinstance(value, str) else pa.int64()))
    return all(bloom[int(at[0]) >> 3] >> (7 - (int(at[0]) & 7)) & 1 for at in _probes(hashed, len(bloom) * 8))


def _probes(hashes: np.ndarray, bits: int) -> list[np.ndarray]:
    first, step = hashes & np.uint64(0xFFFFFFFF), (hashes >> np.uint64(32)) | np.uint64(1)
    return [(first + np.uint64(probe) * step) & np.uint64(bits - 1) for probe in range(PROBES)]


def hash_values(column: pa.Array) -> np.ndarray:
    """64 bits per value of an integer or text column."""
    if pa.types.is_integer(column.type):
        return _mixed(column.cast(pa.int64()).to_numpy().view(np.uint64))
    text = column.cast(pa.large_binary())
    offsets = np.frombuffer(text.buffers()[1], np.int64)[text.offset : text.offset + len(text) + 1]
    data = np.frombuffer(text.buffers()[2] or b"", np.uint8)
    lengths = np.diff(offsets)
    hashes = lengths.astype(np.uint64)
    order = np.argsort(-lengths, kind="stable")
    longest = int(lengths.max(initial=0))
    for at in range(min(longest, _TEXT_BYTES_MAX)):
        order = order[: np.count_nonzero(lengths[order] > at)]
        hashes[order] = hashes[order] * np.uint64(0x100000001B3) ^ data[offsets[order] + at]
    return _mixed(hashes)


def _mixed(values: np.ndarray) -> np.ndarray:
    """splitmix64: close values get far hashes."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
