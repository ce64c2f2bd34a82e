# SPDX-License-Identifier: Apache-2.0
"""Means and central moments of parts of the rows, merged without losing digits (Chan, Golub, LeVeque 1979; Pebay 2008).

A partial is one list per group and server: [count, mean, M2] (variance), [count, mean x, mean y, M2 x, M2 y, C xy]
(covariance) or [count, mean, M2, M3, M4] (skewness, kurtosis), where Mk is the sum of (value - mean)^k. Merging adds
moments about the merged mean: a sum of squares would cancel where the spread is small against the mean.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cremant.exec.agg_lists import I64, groups_of, lists_of
from cremant.exec.functions import Factory
from cremant.exec.kernels import constant, scalar

F64 = npt.NDArray[np.float64]


def _sums(values: F64, owners: I64, count: int) -> F64:
    return np.bincount(owners, weights=values, minlength=count).astype(np.float64, copy=False)


def _moments4(lists: pa.Array) -> pa.Array:
    """[count, mean, M2, M3, M4] of lists of numbers, about the mean of each."""
    groups = groups_of(lists)
    values, owners, count = groups.numbers().astype(np.float64), groups.owners, groups.count
    sizes = groups.sizes.astype(np.float64)
    mean = _sums(values, owners, count) / np.maximum(sizes, 1)
    away = values - mean[owners]
    powers = [_sums(away**power, owners, count) for power in (2, 3, 4)]
    return _rows([sizes, mean, *powers])


def _rows(columns: list[F64]) -> pa.Array:
    stacked = np.stack(columns, axis=1)
    return lists_of(pa.array(stacked.ravel()), np.arange(len(stacked) + 1) * stacked.shape[1])


def _tuples(lists: pa.Array, width: int) -> tuple[F64, I64, int]:
    """Partials (rows of `width` numbers) with rows in them, and the group of each."""
    rows = lists.flatten().fill_null(0.0).to_numpy(zero_copy_only=False).reshape(-1, width)
    sizes = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
    owners = np.repeat(np.arange(len(lists)), sizes // width)
    kept = rows[:, 0] > 0
    return rows[kept], owners[kept], len(lists)


def _merge_variance(lists: pa.Array) -> pa.Array:
    rows, owners, count = _tuples(lists, 3)
    n, mean, m2 = rows.T
    total, center, away = _centers(n, mean, owners, count)
    return _rows([total, center, _sums(m2 + n * away * away, owners, count)])


def _merge_covariance(lists: pa.Array) -> pa.Array:
    rows, owners, count = _tuples(lists, 6)
    n, mean_x, mean_y, m2_x, m2_y, c_xy = rows.T
    total, center_x, away_x = _centers(n, mean_x, owners, count)
    _, center_y, away_y = _centers(n, mean_y, owners, count)
    merged = [m2_x + n * away_x * away_x, m2_y + n * away_y * away_y, c_xy + n * away_x * away_y]
    return _rows([total, center_x, center_y, *(_sums(part, owners, count) for part in merged)])


def _merge_moments4(lists: pa.Array) -> pa.Array:
    rows, owners, count = _tuples(lists, 5)
    n, mean, m2, m3, m4 = rows.T
    total, center, d = _centers(n, mean, owners, count)
    merged = [
        m2 + n * d**2,
        m3 + 3 * d * m2 + n * d**3,
        m4 + 4 * d * m3 + 6 * d**2 * m2 + n * d**4,
    ]
    return _rows([total, center, *(_sums(part, owners, count) for part in merged)])


def _centers(n: F64, mean: F64, owners: I64, count: int) -> tuple[F64, F64, F64]:
    """(rows, mean) of each group, and how far each partial's mean is from it."""
    total = _sums(n, owners, count)
    first = np.zeros(count)
    first[owners] = mean  # means are taken relative to one of them: no digits are lost to a common offset
    center = first + _sums(n * (mean - first[owners]), owners, count) / np.maximum(total, 1)
    return total, center, mean - center[owners]


def _variance(lists: pa.Array, sample: pa.Array) -> pa.Array:
    """M2 / n, or M2 / (n - 1) of a sample; NULL where that is undefined."""
    rows = _table(lists, 3)
    return _divided(rows[:, 2], rows[:, 0], sample=constant(sample))


def _covariance(lists: pa.Array, sample: pa.Array) -> pa.Array:
    rows = _table(lists, 6)
    return _divided(rows[:, 5], rows[:, 0], sample=constant(sample))


def _correlation(lists: pa.Array) -> pa.Array:
    rows = _table(lists, 6)
    spread = np.sqrt(rows[:, 3]) * np.sqrt(rows[:, 4])
    with np.errstate(invalid="ignore", divide="ignore"):
        return pa.array(rows[:, 5] / spread, mask=rows[:, 0] == 0)


def _skewness(lists: pa.Array) -> pa.Array:
    """Of a sample, adjusted, as Apache Commons Math: NaN below 3 values, 0 without spread."""
    rows = _table(lists, 5)
    n, m2, m3 = rows[:, 0], rows[:, 2], rows[:, 3]
    with np.errstate(invalid="ignore", divide="ignore"):
        variance = m2 / (n - 1)
        result = n * m3 / ((n - 1) * (n - 2) * variance**1.5)
    result = np.where(variance < 10e-20, 0.0, result)
    return pa.array(np.where(n < 3, np.nan, result), mask=n == 0)


def _kurtosis(lists: pa.Array) -> pa.Array:
    """Excess kurtosis of a sample, as Apache Commons Math: NaN below 4 values, 0 without spread."""
    rows = _table(lists, 5)
    n, m2, m4 = rows[:, 0], rows[:, 2], rows[:, 4]
    with np.errstate(invalid="ignore", divide="ignore"):
        variance = m2 / (n - 1)
        result = n * (n + 1) * m4 / ((n - 1) * (n - 2) * (n - 3) * variance**2)
        result -= 3 * (n - 1) ** 2 / ((n - 2) * (n - 3))
    result = np.where(variance < 10e-20, 0.0, result)
    return pa.array(np.where(n <= 3, np.nan, result), mask=n == 0)


def _table(lists: pa.Array, width: int) -> F64:
    """One row per group; rows of zeros for NULL lists."""
    rows = np.zeros((len(lists), width))
    valid = lists.is_valid().to_numpy(zero_copy_only=False)
    rows[valid] = lists.flatten().to_numpy(zero_copy_only=False).reshape(-1, width)
    return rows


def _divided(value: F64, n: F64, *, sample: bool) -> pa.Array:
    divisor = n - 1 if sample else n
    undefined = divisor <= 0
    return pa.array(value / np.where(undefined, 1, divisor), mask=undefined)


_DOUBLES, _DOUBLE = pa.list_(pa.float64()), pa.float64()

FUNCTIONS: dict[str, Factory] = dict(
    [
        scalar("agg_moments4", _moments4, [_DOUBLES], _DOUBLES),
        scalar("agg_merge_variance", _merge_variance, [_DOUBLES], _DOUBLES),
        scalar("agg_merge_covariance", _merge_covariance, [_DOUBLES], _DOUBLES),
        scalar("agg_merge_moments4", _merge_moments4, [_DOUBLES], _DOUBLES),
        scalar("agg_variance", _variance, [_DOUBLES, pa.bool_()], _DOUBLE),
        scalar("agg_covariance", _covariance, [_DOUBLES, pa.bool_()], _DOUBLE),
        scalar("agg_correlation", _correlation, [_DOUBLES], _DOUBLE),
        scalar("agg_skewness", _skewness, [_DOUBLES], _DOUBLE),
        scalar("agg_kurtosis", _kurtosis, [_DOUBLES], _DOUBLE),
    ]
)
