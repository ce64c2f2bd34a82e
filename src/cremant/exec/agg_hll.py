# SPDX-License-Identifier: Apache-2.0
"""HyperLogLog: distinct counts within a few percent, in one small integer per value that is kept.

A value's *coupon* is (register << 6 | rank): the set of coupons of some rows is their sketch, sets are merged by union,
so coupons travel like the distinct values of an exact count. Two families:

    agg_hll_*      stream-lib's HyperLogLog, the one Pinot has: 32-bit hash, small-range correction; the same answers
                   and, as `agg_hll_raw`, the same bytes as Pinot's
    agg_hllplus_*  64-bit hash, for larger counts and smaller errors; estimated without tables of biases
                   (Ertl, "New cardinality estimation algorithms for HyperLogLog sketches", 2017, section 4)

Standard error: 1.04 / sqrt(2^log2m); 6.5 % for log2m 8, 1.6 % for 12, 0.8 % for 14.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cremant.exec.agg_hash import U32, U64, murmur2_32, murmur3_128
from cremant.exec.agg_lists import Groups, groups_of, lists_of
from cremant.exec.functions import Factory
from cremant.exec.kernels import constant, scalar

#: Of a coupon. A rank is at most 64 - log2m + 1.
RANK_BITS = 6
#: Registers of so many groups are laid out at once (bytes).
_REGISTERS_MAX = 1 << 24
#: Registers of one 32-bit word in stream-lib's bytes, and their width.
_PER_WORD, _WIDTH = 6, 5

F64 = npt.NDArray[np.float64]
Hash = Callable[[pa.Array], U64]


def _hll_coupons(hashes: U32, log2m: int) -> npt.NDArray[np.int32]:
    register = hashes >> np.uint32(32 - log2m)
    # The bit behind the rank's bits bounds it (the addition is stream-lib's, and part of the result).
    rest = (hashes << np.uint32(log2m)) | np.uint32((1 << (log2m - 1)) + 1)
    rank = np.uint32(33) - np.frexp(rest.astype(np.float64))[1].astype(np.uint32)
    return ((register << np.uint32(RANK_BITS)) | rank).astype(np.int32)


def _hllplus_coupons(hashes: U64, log2m: int) -> npt.NDArray[np.int32]:
    register = hashes >> np.uint64(64 - log2m)
    rest = (hashes << np.uint64(log2m)) | np.uint64(1 << (log2m - 1))
    # 53 bits are enough to find the first of them: rounding up to the next power would need 53 ones before it.
    length = np.frexp((rest >> np.uint64(11)).astype(np.float64))[1]
    short = np.flatnonzero(length == 0)
    rank = 54 - length
    if len(short):
        rank[short] = 65 - np.frexp(rest[short].astype(np.float64))[1]
    return ((register << np.uint64(RANK_BITS)) | rank.astype(np.uint64)).astype(np.int32)


def _coupons_of(array: pa.Array, log2m: int, *, plus: bool) -> npt.NDArray[np.int32]:
    return _hllplus_coupons(murmur3_128(array)[0], log2m) if plus else _hll_coupons(murmur2_32(array), log2m)


def _coupon_kernel(*, plus: bool) -> Callable[[pa.Array, pa.Array], pa.Array]:
    def compute(values: pa.Array, precision: pa.Array) -> pa.Array:
        if not len(values):
            return pa.array([], pa.int32())
        log2m = int(constant(precision))
        if not values.null_count:
            return pa.array(_coupons_of(values, log2m, plus=plus))
        found = np.zeros(len(values), dtype=np.int32)
        valid = values.is_valid().to_numpy(zero_copy_only=False)
        found[valid] = _coupons_of(values.drop_null(), log2m, plus=plus)
        return pa.array(found, mask=~valid)

    return compute


def _list_kernel(*, plus: bool) -> Callable[[pa.Array, pa.Array], pa.Array]:
    """Distinct coupons of lists of values."""

    def compute(lists: pa.Array, precision: pa.Array) -> pa.Array:
        groups = groups_of(lists)
        if not len(groups.values):
            return lists_of(pa.array([], pa.int32()), groups.starts)
        coupons = _coupons_of(groups.values, int(constant(precision)), plus=plus).astype(np.int64)
        keys = np.unique(groups.owners << np.int64(32) | coupons)
        starts = np.searchsorted(keys, np.arange(groups.count + 1, dtype=np.int64) << np.int64(32))
        return lists_of(pa.array((keys & np.int64(0xFFFFFFFF)).astype(np.int32)), starts)

    return compute


def _registers(groups: Groups, log2m: int) -> npt.NDArray[np.uint8]:
    """One row of registers per group: the largest rank of each."""
    coupons = groups.numbers().astype(np.int64)
    keys = np.sort((groups.owners << np.int64(log2m + RANK_BITS)) | coupons)
    registers = np.zeros(groups.count << log2m, dtype=np.uint8)
    place = keys >> np.int64(RANK_BITS)
    last = np.flatnonzero(np.diff(place, append=-1) != 0)  # sorted: the last of a register is its largest
    registers[place[last]] = keys[last] & np.int64((1 << RANK_BITS) - 1)
    return registers.reshape(groups.count, 1 << log2m)


def _by_registers(lists: pa.Array, log2m: int, one: Callable[[npt.NDArray[np.uint8]], pa.Array]) -> pa.Array:
    """`one` over the registers of some groups at a time."""
    step = max(1, _REGISTERS_MAX >> log2m)
    parts = [one(_registers(groups_of(lists[at : at + step]), log2m)) for at in range(0, max(1, len(lists)), step)]
    whole = pa.concat_arrays(parts)
    return pa.array(whole.to_pylist(), whole.type, mask=~_valid(lists)) if lists.null_count else whole


def _valid(lists: pa.Array) -> npt.NDArray[np.bool_]:
    return np.asarray(lists.is_valid().to_numpy(zero_copy_only=False))


def _count(lists: pa.Array, precision: pa.Array) -> pa.Array:
    if not len(lists):
        return pa.array([], pa.int64())
    return _by_registers(lists, int(constant(precision)), _hll_estimates)


#: 2^-rank.
_POWERS = np.ldexp(1.0, -np.arange(1 << RANK_BITS))


def _hll_estimates(registers: npt.NDArray[np.uint8]) -> pa.Array:
    m = registers.shape[1]
    alpha = {16: 0.673, 32: 0.697, 64: 0.709}.get(m, 0.7213 / (1 + 1.079 / m))
    estimates = alpha * m * m / _POWERS[registers].sum(axis=1)
    zeros = (registers == 0).sum(axis=1)
    small = (estimates <= 2.5 * m) & (zeros > 0)
    estimates[small] = m * np.log(m / zeros[small])
    return pa.array(np.floor(estimates + 0.5).astype(np.int64))


def _count_plus(lists: pa.Array, precision: pa.Array) -> pa.Array:
    if not len(lists):
        return pa.array([], pa.int64())
    log2m = int(constant(precision))
    return _by_registers(lists, log2m, lambda registers: _hllplus_estimates(registers, 64 - log2m))


def _hllplus_estimates(registers: npt.NDArray[np.uint8], q: int) -> pa.Array:
    """Ertl's improved raw estimator: `counts[k]` registers have rank k, k = 0 ... q + 1."""
    groups, m = registers.shape
    owners = np.repeat(np.arange(groups), m)
    counts = np.bincount(owners * (q + 2) + registers.ravel(), minlength=groups * (q + 2)).reshape(groups, q + 2)
    z = m * _tau(1 - counts[:, q + 1] / m)
    for k in range(q, 0, -1):
        z = 0.5 * (z + counts[:, k])
    z = z + m * _sigma(counts[:, 0] / m)
    estimates = m / (2 * np.log(2)) * m / z
    return pa.array(np.floor(estimates + 0.5).astype(np.int64))


def _sigma(x: F64) -> F64:
    """x + sum over k of x^(2^k) * 2^(k-1); infinite for 1."""
    total, power, y = x.copy(), x.copy(), 1.0
    for _ in range(64):
        power = power * power
        before = total
        total = total + power * y
        y += y
        if np.array_equal(total, before):
            break
    return np.where(x == 1.0, np.inf, total)


def _tau(x: F64) -> F64:
    total, root, y = 1 - x, x.copy(), 1.0
    for _ in range(64):
        root = np.sqrt(root)
        y *= 0.5
        before = total
        total = total - np.square(1 - root) * y
        if np.array_equal(total, before):
            break
    return np.where((x == 0.0) | (x == 1.0), 0.0, total / 3)


def _raw(lists: pa.Array, precision: pa.Array) -> pa.Array:
    """Hexadecimal bytes as stream-lib writes them: log2m, length, 6 registers of 5 bits per word, big-endian."""
    if not len(lists):
        return pa.array([], pa.string())
    log2m = int(constant(precision))
    words = max(1, -(-(1 << log2m) // _PER_WORD))
    header = np.array([log2m, words * 4], dtype=">i4").tobytes().hex()

    def one(registers: npt.NDArray[np.uint8]) -> pa.Array:
        padded = np.zeros((len(registers), words * _PER_WORD), dtype=np.uint32)
        padded[:, : 1 << log2m] = registers
        shifts = np.arange(_PER_WORD, dtype=np.uint32) * np.uint32(_WIDTH)
        packed = (padded.reshape(len(registers), words, _PER_WORD) << shifts).sum(axis=2).astype(">u4")
        return pa.array([header + row.tobytes().hex() for row in packed], pa.string())

    return _by_registers(lists, log2m, one)


_KINDS: dict[str, pa.DataType] = {
    "long": pa.int64(), "double": pa.float64(), "float": pa.float32(), "text": pa.string_view(),
}  # fmt: skip
_FAMILIES = (("hll", False), ("hllplus", True))
_COUPONS, _LONG = pa.list_(pa.int32()), pa.int64()


def _list(name: str) -> pa.DataType:
    """Elements of lists are no views."""
    return pa.list_(pa.string() if name == "text" else _KINDS[name])


FUNCTIONS: dict[str, Factory] = dict(
    [
        scalar("agg_hll_count", _count, [_COUPONS, _LONG], _LONG),
        scalar("agg_hll_raw", _raw, [_COUPONS, _LONG], pa.string()),
        scalar("agg_hllplus_count", _count_plus, [_COUPONS, _LONG], _LONG),
        *(scalar(f"agg_{family}_{name}", _coupon_kernel(plus=plus), [kind, _LONG], pa.int32())
          for family, plus in _FAMILIES for name, kind in _KINDS.items()),
        *(scalar(f"agg_{family}s_{name}", _list_kernel(plus=plus), [_list(name), _LONG], _COUPONS)
          for family, plus in _FAMILIES for name in _KINDS),
    ]
)  # fmt: skip
