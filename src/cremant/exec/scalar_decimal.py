# SPDX-License-Identifier: Apache-2.0
"""BIG_DECIMAL: arithmetic and order of numbers that are stored as texts (model/decimals.py), exact as BigDecimal.

Division gives 34 digits (MathContext.DECIMAL128). Each distinct number, or pair of numbers, is computed once.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa

from cremant.exec.functions import Factory
from cremant.exec.kernels import by_distinct, by_pair, scalar
from cremant.model.decimals import EXACT, plain_decimal, stored_decimal

_TEXT, _INT, _LONG = pa.string(), pa.int32(), pa.int64()
_DECIMAL128 = decimal.Context(prec=34, rounding=decimal.ROUND_HALF_EVEN)


def _computed(one: Callable[[Decimal, Decimal], Decimal]) -> Callable[[pa.Array, pa.Array], pa.Array]:
    def pair(left: str, right: str) -> str:
        try:
            return stored_decimal(one(Decimal(left), Decimal(right)))
        except decimal.DecimalException as error:
            raise ValueError(f"BIG_DECIMAL: {left[:50]} and {right[:50]}: {type(error).__name__}") from error

    return lambda left, right: by_pair(pair, left, right, _TEXT)


def _divide(left: Decimal, right: Decimal) -> Decimal:
    if right == 0:
        raise ValueError("division of BIG_DECIMAL by zero")
    return _DECIMAL128.divide(left, right)


def _mod(left: Decimal, right: Decimal) -> Decimal:
    if right == 0:
        raise ValueError("division of BIG_DECIMAL by zero")
    return EXACT.remainder(left, right)


def _compare(left: str, right: str) -> int:
    return int(EXACT.compare(Decimal(left), Decimal(right)))


def sort_key(text: str) -> str:
    """A text whose order is the order of the numbers: sign, exponent, digits; the complement for negative ones."""
    number = Decimal(text)
    if number == 0:
        return "1"
    sign, digits, exponent = number.normalize(EXACT).as_tuple()
    assert isinstance(exponent, int)
    size = f"{len(digits) + exponent + 50_000:05d}{''.join(map(str, digits))}"
    return f"2{size}" if not sign else "0" + size.translate(_COMPLEMENT) + "~"


_COMPLEMENT = str.maketrans("0123456789", "9876543210")


def parsed(text: str) -> str:
    """CAST of a text."""
    try:
        return stored_decimal(Decimal(text.strip()))
    except (decimal.DecimalException, ValueError) as error:
        raise ValueError(f"CAST: {text[:100]!r} is not a value of type BIG_DECIMAL") from error


def _whole(text: str) -> int:
    """(long): towards zero; too large is the largest."""
    return max(-(2**63), min(2**63 - 1, int(Decimal(text))))


def _of_text(one: Callable[[str], Any], kind: pa.DataType) -> Callable[[pa.Array], pa.Array]:
    return lambda array: by_distinct(one, array, kind)


FUNCTIONS: dict[str, Factory] = dict(
    [
        scalar("fn_decimal_plus", _computed(EXACT.add), [_TEXT, _TEXT], _TEXT),
        scalar("fn_decimal_minus", _computed(EXACT.subtract), [_TEXT, _TEXT], _TEXT),
        scalar("fn_decimal_times", _computed(EXACT.multiply), [_TEXT, _TEXT], _TEXT),
        scalar("fn_decimal_divide", _computed(_divide), [_TEXT, _TEXT], _TEXT),
        scalar("fn_decimal_mod", _computed(_mod), [_TEXT, _TEXT], _TEXT),
        scalar("fn_decimal_compare", lambda a, b: by_pair(_compare, a, b, _INT), [_TEXT, _TEXT], _INT),
        scalar("fn_decimal_key", _of_text(sort_key, _TEXT), [_TEXT], _TEXT),
        scalar("fn_decimal_text", _of_text(plain_decimal, _TEXT), [_TEXT], _TEXT),
        scalar("fn_decimal_long", _of_text(_whole, _LONG), [_TEXT], _LONG),
        scalar("fn_parse_decimal", _of_text(parsed, _TEXT), [_TEXT], _TEXT),
    ]
)
