# SPDX-License-Identifier: Apache-2.0
"""Exact sums of BIG_DECIMAL, which is stored as text (model/decimals.py), of any size.

What Arrow's decimals hold is added by Arrow, whole arrays at once; only an array with a number beyond them goes value
by value through Python's decimals.
"""

from __future__ import annotations

import decimal
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cremant.exec.agg_lists import Groups, groups_of, per_group
from cremant.exec.functions import Factory
from cremant.exec.kernels import constant, scalar
from cremant.model.decimals import decimal_sum
from cremant.model.limits import BIG_DECIMAL_DIGITS_MAX

_WIDE = pa.decimal256(76, 18)
#: So many values below it add up without leaving 76 digits.
_SUMMANDS_BELOW = Decimal(10) ** 45
_EXACT = decimal.Context(prec=4 * BIG_DECIMAL_DIGITS_MAX, rounding=decimal.ROUND_HALF_EVEN)


def _sums(lists: pa.Array) -> pa.Array:
    """The exact sum of each list of texts, as text."""
    groups = groups_of(lists)
    quick = _quick_sums(groups)
    if quick is not None:
        return quick
    return per_group(groups, lambda start, end: str(decimal_sum(groups.values[start:end].to_pylist())), pa.string())


def _quick_sums(groups: Groups) -> pa.Array | None:
    """None if a value, or a sum, might not fit into Arrow's widest decimals."""
    try:
        values = groups.values.cast(_WIDE)
    except pa.ArrowInvalid:
        return None
    low, high = pc.min_max(values).as_py().values()
    if low is None or max(-low, high) >= _SUMMANDS_BELOW:
        return None
    table = pa.table({"group": groups.owners, "value": values}).group_by("group").aggregate([("value", "sum")])
    sums: list[Any] = [None] * groups.count
    for group, total in zip(table.column("group").to_pylist(), table.column("value_sum").to_pylist(), strict=True):
        sums[group] = str(total)
    return pa.array(sums, pa.string())


def _plain(sums: pa.Array, digits: pa.Array, scale: pa.Array) -> pa.Array:
    """Without exponent, rounded half to even to so many digits (0: all) and so many behind the point (NULL: as is)."""
    precision, places = constant(digits), constant(scale)
    rounding = decimal.Context(prec=precision or _EXACT.prec, rounding=decimal.ROUND_HALF_EVEN)

    def one(text: str) -> str:
        value = rounding.plus(Decimal(text)) if precision else Decimal(text)
        if places is not None:
            return f"{value.quantize(Decimal(1).scaleb(-places), context=_EXACT):f}"
        plain = f"{value:f}"
        return plain.rstrip("0").rstrip(".") if "." in plain else plain

    return pa.array([None if text is None else one(text) for text in sums.to_pylist()], pa.string())


_TEXT, _TEXTS, _LONG = pa.string(), pa.list_(pa.string()), pa.int64()

FUNCTIONS: dict[str, Factory] = dict(
    [
        scalar("agg_decimal_sum", _sums, [_TEXTS], _TEXT),
        scalar("agg_plain_decimal", _plain, [_TEXT, _LONG, _LONG], _TEXT),
    ]
)
