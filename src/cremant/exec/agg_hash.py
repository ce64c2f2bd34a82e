# SPDX-License-Identifier: Apache-2.0
"""Hashes of whole Arrow arrays, with numpy: the two functions that sketches of Pinot are built on.

    murmur2_32      MurmurHash 2 as stream-lib has it (HyperLogLog): of the 8 bytes of a number, of the UTF-8 of a text
    murmur3_128     MurmurHash 3, x64, 128 bits, as Apache DataSketches has it (theta, CPC)

Equal values hash equally on every server and in Pinot, so sketches can be merged and exchanged. Texts are hashed once
per distinct value of an array; a word of all texts is one step of numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
DATASKETCHES_SEED = 9001

_M2 = np.uint32(0x5BD1E995)
_C1, _C2 = np.uint64(0x87C37B91114253D5), np.uint64(0x4CF5AD432745937F)
_F1, _F2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)


def words_of(array: pa.Array) -> U64:
    """The 64-bit words of numbers without NULLs, as Java hashes them: floats by their 32 bits, sign-extended."""
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    words: U64
    if values.dtype == np.float32:
        words = values.view(np.int32).astype(np.int64).view(np.uint64)
    elif values.dtype == np.float64:
        words = values.view(np.uint64)
    else:
        words = values.astype(np.int64, copy=False).view(np.uint64)
    return words


def murmur2_32(array: pa.Array) -> U32:
    """Of an array without NULLs."""
    if _is_text(array):
        return _by_distinct(array, _murmur2_texts, np.uint32)
    words = words_of(array)
    k = words.astype(np.uint32)
    k *= _M2
    k ^= k >> np.uint32(24)
    h = k * _M2
    k = (words >> np.uint64(32)).astype(np.uint32)
    k *= _M2
    k ^= k >> np.uint32(24)
    k *= _M2
    h *= _M2
    h ^= k
    return _murmur2_end(h)


def murmur3_128(array: pa.Array, seed: int = DATASKETCHES_SEED) -> tuple[U64, U64]:
    """Of an array without NULLs. Floats are hashed as doubles, -0.0 as 0.0 and every NaN as one."""
    if _is_text(array):
        both = _by_distinct(array, lambda texts: _murmur3_texts(texts, seed), np.uint64)
        return both[:, 0], both[:, 1]
    if pa.types.is_floating(array.type):
        numbers = array.to_numpy(zero_copy_only=False).astype(np.float64) + 0.0
        words = np.where(np.isnan(numbers), np.nan, numbers).view(np.uint64)
    else:
        words = words_of(array)
    start = np.full(len(words), seed, dtype=np.uint64)
    h1 = start ^ _mix1(words)
    return _murmur3_end(h1, start, np.uint64(8))


def _is_text(array: pa.Array) -> bool:
    kind = array.type
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
        or pa.types.is_binary(kind) or pa.types.is_binary_view(kind)
    )  # fmt: skip


def _by_distinct(
    array: pa.Array, hashed: Callable[[_Texts], npt.NDArray[Any]], kind: type[np.unsignedinteger[Any]]
) -> npt.NDArray[Any]:
    encoded = array.dictionary_encode()
    texts = _Texts(encoded.dictionary)
    if not len(texts):
        return hashed(texts)[:0].astype(kind)
    indices: npt.NDArray[np.int32] = encoded.indices.to_numpy(zero_copy_only=False)
    return hashed(texts)[indices]


class _Texts:
    """The bytes of texts, readable word by word."""

    def __init__(self, array: pa.Array) -> None:
        flat = array.cast(pa.large_binary())
        _, offsets, data = flat.buffers()
        starts = np.frombuffer(offsets, dtype=np.int64, count=len(flat) + 1 + flat.offset)[flat.offset :]
        self.lengths: npt.NDArray[np.int64] = np.diff(starts)
        self._starts = starts[:-1]
        self._bytes = np.frombuffer(data, dtype=np.uint8) if data is not None and data.size else np.zeros(1, np.uint8)

    def __len__(self) -> int:
        return len(self.lengths)

    def byte(self, rows: npt.NDArray[np.int64], at: npt.NDArray[np.int64] | int) -> npt.NDArray[np.uint8]:
        found: npt.NDArray[np.uint8] = self._bytes[self._starts[rows] + at]
        return found

    def steps(self, width: int) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """(position, rows that have `width` bytes there), until no row has."""
        whole = self.lengths // width
        for step in range(int(whole.max(initial=0))):
            yield step * width, np.flatnonzero(whole > step)

    def word(self, rows: npt.NDArray[np.int64], at: int, width: int) -> U64:
        """`width` bytes at `at` of each of `rows`, little-endian."""
        windows = np.lib.stride_tricks.sliding_window_view(self._bytes, width)
        found: npt.NDArray[Any] = windows[self._starts[rows] + at].view(f"<u{width}").reshape(-1)
        return found.astype(np.uint64)


def _murmur2_texts(texts: _Texts) -> U32:
    h = ~texts.lengths.astype(np.uint32)  # the seed is -1
    for at, rows in texts.steps(4):
        k = texts.word(rows, at, 4).astype(np.uint32)
        k *= _M2
        k ^= k >> np.uint32(24)
        k *= _M2
        h[rows] = h[rows] * _M2 ^ k
    left = texts.lengths % 4
    # The rest counts from the end, its bytes signed.
    for distance, shift in ((3, 16), (2, 8), (1, 0)):
        rows = np.flatnonzero(left >= distance)
        tail = texts.byte(rows, texts.lengths[rows] - distance).view(np.int8).astype(np.int32)
        h[rows] ^= (tail << shift).view(np.uint32)
    rows = np.flatnonzero(left > 0)
    h[rows] *= _M2
    return _murmur2_end(h)


def _murmur2_end(h: U32) -> U32:
    h ^= h >> np.uint32(13)
    h *= _M2
    h ^= h >> np.uint32(15)
    return h


def _rotated(value: U64, bits: int) -> U64:
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


def _mix1(k: U64) -> U64:
    return _rotated(k * _C1, 31) * _C2


def _mix2(k: U64) -> U64:
    return _rotated(k * _C2, 33) * _C1


def _murmur3_texts(texts: _Texts, seed: int) -> U64:
    count = len(texts)
    h1, h2 = np.full(count, seed, dtype=np.uint64), np.full(count, seed, dtype=np.uint64)
    for at, rows in texts.steps(16):
        a = h1[rows] ^ _mix1(texts.word(rows, at, 8))
        a = (_rotated(a, 27) + h2[rows]) * np.uint64(5) + np.uint64(0x52DCE729)
        b = h2[rows] ^ _mix2(texts.word(rows, at + 8, 8))
        h1[rows], h2[rows] = a, (_rotated(b, 31) + a) * np.uint64(5) + np.uint64(0x38495AB5)
    left, base = texts.lengths % 16, texts.lengths - texts.lengths % 16
    k1, k2 = np.zeros(count, dtype=np.uint64), np.zeros(count, dtype=np.uint64)
    for index in range(15):
        rows = np.flatnonzero(left > index)
        if not len(rows):
            break
        byte = texts.byte(rows, base[rows] + index).astype(np.uint64)
        target = k1 if index < 8 else k2
        target[rows] |= byte << np.uint64(8 * (index % 8))
    h1, h2 = _murmur3_end(h1 ^ _mix1(k1), h2 ^ _mix2(k2), texts.lengths.astype(np.uint64))
    return np.stack([h1, h2], axis=1)


def _murmur3_end(h1: U64, h2: U64, length: U64 | np.uint64) -> tuple[U64, U64]:
    h1, h2 = h1 ^ length, h2 ^ length
    h1 = h1 + h2
    h2 = h2 + h1
    h1, h2 = _final_mix(h1), _final_mix(h2)
    h1 = h1 + h2
    return h1, h2 + h1


def _final_mix(k: U64) -> U64:
    k = (k ^ (k >> np.uint64(33))) * _F1
    k = (k ^ (k >> np.uint64(33))) * _F2
    return k ^ (k >> np.uint64(33))
