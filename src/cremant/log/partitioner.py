# SPDX-License-Identifier: Apache-2.0
"""Which partition a message goes to: by key exactly as Java's Kafka clients (murmur2), without a key in turns.

A keyless run of messages sticks to one partition and the next run takes the next one, so that appends stay large.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_M = 0x5BD1E995
_SEED = 0x9747B28C


def murmur2(key: bytes) -> int:
    """Kafka's murmur2 of 32 bits, unsigned. Written after org.apache.kafka.common.utils.Utils.murmur2."""
    length = len(key)
    h = _SEED ^ length
    whole = length & ~3
    for at in range(0, whole, 4):
        k = (int.from_bytes(key[at : at + 4], "little") * _M) & _MASK
        k = ((k ^ (k >> 24)) * _M) & _MASK
        h = ((h * _M) & _MASK) ^ k
    if whole != length:
        h = ((h ^ int.from_bytes(key[whole:], "little")) * _M) & _MASK
    h = ((h ^ (h >> 13)) * _M) & _MASK
    return h ^ (h >> 15)


def partition_of(key: bytes, partitions: int) -> int:
    """`toPositive(murmur2(key)) % partitions`, as DefaultPartitioner does."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


class Turns:
    """Partitions for keyless messages, in turns. `start` spreads independent producers."""

    def __init__(self, start: int = 0) -> None:
        self._next = start

    def take(self, partitions: int) -> int:
        taken = self._next % partitions
        self._next += 1
        return taken
