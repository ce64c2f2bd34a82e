# SPDX-License-Identifier: Apache-2.0
"""Which partition a message goes to: by key exactly as Java's Kafka clients (murmur2), without a key in turns.

A keyless run of messages sticks to one partition and the next run takes the next one, so that appends stay large.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from cremant.log.columns import binary_array

_M = 0x5BD1E995
_SEED = 0x9747B28C


def murmur2(keys: Sequence[bytes]) -> np.ndarray:
    """Kafka's 32-bit murmur2 of each key, as uint32."""
    return murmur2_array(binary_array(keys))


def murmur2_array(keys: pa.BinaryArray) -> np.ndarray:
    """The same of a column without nulls: all keys at once, word by word. Written after
    org.apache.kafka.common.utils.Utils.murmur2."""
    _, offset_buffer, data_buffer = keys.buffers()
    offsets = np.frombuffer(offset_buffer, np.int32)[keys.offset : keys.offset + len(keys) + 1].astype(np.int64)
    size = int(offsets[-1])
    data = np.zeros(size + 4, dtype=np.uint32)
    data[:size] = np.frombuffer(data_buffer, dtype=np.uint8)[:size] if size else 0
    starts, lengths = offsets[:-1], np.diff(offsets)
    m = np.uint32(_M)
    h = np.uint32(_SEED) ^ lengths.astype(np.uint32)
    words = lengths // 4
    for word in range(int(words.max(initial=0))):
        rows = np.nonzero(words > word)[0]
        k = _little_endian(data, starts[rows] + 4 * word, 4) * m
        k = (k ^ (k >> np.uint32(24))) * m
        h[rows] = (h[rows] * m) ^ k
    for rest in (1, 2, 3):
        rows = np.nonzero(lengths % 4 == rest)[0]
        h[rows] = (h[rows] ^ _little_endian(data, starts[rows] + 4 * words[rows], rest)) * m
    h = (h ^ (h >> np.uint32(13))) * m
    return h ^ (h >> np.uint32(15))


def _little_endian(data: np.ndarray, at: np.ndarray, size: int) -> np.ndarray:
    """Numbers of `size` bytes that begin at `at`."""
    word: np.ndarray = data[at]
    for byte in range(1, size):
        word = word | (data[at + byte] << np.uint32(8 * byte))
    return word


def partitions_of(keys: Sequence[bytes], partitions: int) -> np.ndarray:
    """`toPositive(murmur2(key)) % partitions` of each key, as Kafka's default partitioner does."""
    positive: np.ndarray = murmur2(keys) & np.uint32(0x7FFFFFFF)
    return positive % np.uint32(partitions)


def partition_of(key: bytes, partitions: int) -> int:
    return int(partitions_of([key], partitions)[0])


class Turns:
    """Partitions for keyless messages, in turns. `start` spreads independent producers. Thread-safe."""

    def __init__(self, start: int = 0) -> None:
        self._count = itertools.count(start)

    def take(self, partitions: int) -> int:
        return next(self._count) % partitions
