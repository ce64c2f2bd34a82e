# SPDX-License-Identifier: Apache-2.0
"""Theta and CPC sketches of Apache DataSketches: distinct counts that can be merged, exchanged, and combined.

A theta sketch is the k smallest hashes of the values; it is made here from whole arrays of hashes and written in
DataSketches' compact form (serial version 3), which every DataSketches library reads. CPC sketches are made by the
library itself, from one value for each coupon that occurs: a few thousand per group, however many rows there were.

Both forms are DataSketches' own: hashes with its seed, so sketches of Pinot and these describe the same values alike.
"""

from __future__ import annotations

from typing import Any

import datasketches
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cremant.exec.agg_hash import U64, murmur3_128
from cremant.exec.agg_lists import Groups, groups_of, lists_of, per_group
from cremant.exec.functions import Factory
from cremant.exec.kernels import constant, scalar

#: Theta of a sketch that holds every hash: 2^63 - 1.
_THETA_ALL = (1 << 63) - 1
_SEED_HASH = datasketches.update_theta_sketch(5).get_seed_hash()
_SERIAL_VERSION, _FAMILY_COMPACT = 3, 3
_READ_ONLY, _EMPTY, _COMPACT, _ORDERED = 2, 4, 8, 16


def _hashes(values: pa.Array) -> pa.Array:
    """The 63-bit hash of each value; NULL for NULL."""
    if not len(values):
        return pa.array([], pa.int64())
    valid = values.is_valid().to_numpy(zero_copy_only=False)
    found = np.zeros(len(values), dtype=np.int64)
    found[valid] = (murmur3_128(values.drop_null())[0] >> np.uint64(1)).astype(np.int64)
    return pa.array(found, mask=~valid if values.null_count else None)


def _hash_lists(lists: pa.Array) -> pa.Array:
    groups = groups_of(lists)
    return lists_of(_hashes(groups.values), groups.starts)


def smallest(hashes: npt.NDArray[np.int64], k: int) -> tuple[npt.NDArray[np.int64], int]:
    """The k smallest distinct hashes, and theta: the next one."""
    if len(hashes) > 8 * k:  # most are out of the question; enough of them stay even if each occurs several times
        share = np.partition(hashes, 4 * k)[: 4 * k]
        unique = np.unique(share)
        if len(unique) > k:
            return unique[:k], int(unique[k])
    unique = np.unique(hashes)
    return (unique[:k], int(unique[k])) if len(unique) > k else (unique, _THETA_ALL)


def compact(hashes: npt.NDArray[np.int64], theta: int) -> bytes:
    """DataSketches' compact form: 1 long of preamble if empty, 2 if exact, 3 if estimating."""
    longs = 1 if not len(hashes) and theta == _THETA_ALL else 2 if theta == _THETA_ALL else 3
    flags = _READ_ONLY | _COMPACT | _ORDERED | (_EMPTY if longs == 1 else 0)
    head = bytes([longs, _SERIAL_VERSION, _FAMILY_COMPACT, 0, 0, flags]) + int(_SEED_HASH).to_bytes(2, "little")
    if longs == 1:
        return head
    head += len(hashes).to_bytes(4, "little") + b"\0\0\0\0"
    return head + (theta.to_bytes(8, "little") if longs == 3 else b"") + hashes.astype("<i8").tobytes()


def parse(sketch: bytes) -> tuple[npt.NDArray[np.int64], int]:
    longs = sketch[0] & 0x3F
    theta = int.from_bytes(sketch[16:24], "little") if longs == 3 else _THETA_ALL
    return np.frombuffer(sketch, dtype="<i8", offset=8 * longs), theta


def _theta_pack(lists: pa.Array, size: pa.Array) -> pa.Array:
    groups, k = groups_of(lists), constant(size)
    hashes = groups.numbers()
    return per_group(groups, lambda start, end: compact(*smallest(hashes[start:end], k)), pa.binary())


def _merged(groups: Groups, start: int, end: int, k: int) -> tuple[npt.NDArray[np.int64], int]:
    parts = [parse(sketch) for sketch in groups.values[start:end].to_pylist()]
    theta = min(part[1] for part in parts)
    hashes = np.unique(np.concatenate([part[0] for part in parts]))
    hashes = hashes[: np.searchsorted(hashes, theta)]
    return (hashes[:k], int(hashes[k])) if len(hashes) > k else (hashes, theta)


def _theta_merge(lists: pa.Array, size: pa.Array) -> pa.Array:
    groups, k = groups_of(lists), constant(size)
    return per_group(groups, lambda start, end: compact(*_merged(groups, start, end, k)), pa.binary())


def _theta_count(sketches: pa.Array) -> pa.Array:
    return pa.array([None if one is None else _estimate(*parse(one)) for one in sketches.to_pylist()], pa.int64())


def _estimate(hashes: npt.NDArray[np.int64], theta: int) -> int:
    return len(hashes) if theta == _THETA_ALL else int(np.floor(len(hashes) * 2.0**63 / theta + 0.5))


def _cpc_pack(lists: pa.Array, size: pa.Array) -> pa.Array:
    groups, lg_k = groups_of(lists), constant(size)
    if not len(groups.values):
        return pa.array([None] * groups.count, pa.binary())
    row, rank = murmur3_128(groups.values)
    coupons = (row & np.uint64((1 << lg_k) - 1)) << np.uint64(6) | np.minimum(_leading_zeros(rank), np.uint64(63))
    keys = (groups.owners.astype(np.uint64) << np.uint64(lg_k + 6)) | coupons
    _, chosen = np.unique(keys, return_index=True)
    chosen.sort()
    owners = groups.owners[chosen]
    starts = np.searchsorted(owners, np.arange(groups.count + 1))
    values = groups.values.take(pa.array(chosen)).to_pylist()

    def one(group: int) -> bytes | None:
        first, end = int(starts[group]), int(starts[group + 1])
        return _cpc_of(values[first:end], lg_k) if end > first else None

    return pa.array([one(group) for group in range(groups.count)], pa.binary())


def _cpc_of(values: list[Any], lg_k: int) -> bytes:
    sketch = datasketches.cpc_sketch(lg_k)
    for value in values:
        sketch.update(value)
    return bytes(sketch.serialize())


def _leading_zeros(words: U64) -> U64:
    high = (words >> np.uint64(32)).astype(np.uint64)
    top = np.where(high > 0, high, words & np.uint64(0xFFFFFFFF)).astype(np.float64)
    length = np.frexp(top)[1] + np.where(high > 0, 32, 0)
    return (64 - length).astype(np.uint64)


def _cpc_merge(lists: pa.Array, size: pa.Array) -> pa.Array:
    groups, lg_k = groups_of(lists), constant(size)

    def one(start: int, end: int) -> bytes:
        sketches = groups.values[start:end].to_pylist()
        if len(sketches) == 1:
            return bytes(sketches[0])
        union = datasketches.cpc_union(lg_k)
        for sketch in sketches:
            union.update(datasketches.cpc_sketch.deserialize(sketch))
        return bytes(union.get_result().serialize())

    return per_group(groups, one, pa.binary())


def _cpc_count(sketches: pa.Array) -> pa.Array:
    counts = [
        None if one is None else int(np.floor(datasketches.cpc_sketch.deserialize(one).get_estimate() + 0.5))
        for one in sketches.to_pylist()
    ]
    return pa.array(counts, pa.int64())


def _hex(sketches: pa.Array) -> pa.Array:
    return pa.array([None if one is None else one.hex() for one in sketches.to_pylist()], pa.string())


_KINDS: dict[str, pa.DataType] = {
    "long": pa.int64(), "double": pa.float64(), "float": pa.float32(), "text": pa.string_view(),
}  # fmt: skip


def _list(name: str) -> pa.DataType:
    """Elements of lists are no views."""
    return pa.list_(pa.string() if name == "text" else _KINDS[name])


_LONG, _SKETCH, _SKETCHES = pa.int64(), pa.binary(), pa.list_(pa.binary())

FUNCTIONS: dict[str, Factory] = dict(
    [
        scalar("agg_theta_pack", _theta_pack, [pa.list_(_LONG), _LONG], _SKETCH),
        scalar("agg_theta_merge", _theta_merge, [_SKETCHES, _LONG], _SKETCH),
        scalar("agg_theta_count", _theta_count, [_SKETCH], _LONG),
        scalar("agg_sketch_hex", _hex, [_SKETCH], pa.string()),
        scalar("agg_cpc_merge", _cpc_merge, [_SKETCHES, _LONG], _SKETCH),
        scalar("agg_cpc_count", _cpc_count, [_SKETCH], _LONG),
        *(scalar(f"agg_hash_{name}", _hashes, [kind], _LONG) for name, kind in _KINDS.items()),
        *(scalar(f"agg_hashes_{name}", _hash_lists, [_list(name)], pa.list_(_LONG)) for name in _KINDS),
        *(scalar(f"agg_cpc_pack_{name}", _cpc_pack, [_list(name), _LONG], _SKETCH) for name in _KINDS),
    ]
)  # fmt: skip
