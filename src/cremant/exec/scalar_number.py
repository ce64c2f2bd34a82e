# SPDX-License-Identifier: Apache-2.0
"""Numbers as Java has them: casts that saturate, decimal rounding, texts like Double.toString."""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.exec.functions import Factory
from cremant.exec.kernels import by_distinct, constant, scalar
from cremant.sql.bound import timestamp_ms
from cremant.sql.javatext import java_digits, java_double

_DOUBLE, _FLOAT, _LONG, _INT, _TEXT = pa.float64(), pa.float32(), pa.int64(), pa.int32(), pa.string()
_DECIMALS = decimal.Context(prec=76, rounding=decimal.ROUND_HALF_UP)


def _filled(array: pa.Array) -> np.ndarray:
    numbers: np.ndarray = pc.fill_null(array, 0).to_numpy(zero_copy_only=False)
    return numbers


def _like(numbers: np.ndarray, array: pa.Array, kind: pa.DataType) -> pa.Array:
    """`numbers` as an array with the NULLs of `array`."""
    mask = None if array.null_count == 0 else ~array.is_valid().to_numpy(zero_copy_only=False)
    return pa.array(numbers, kind, mask=mask)


def _saturated(low: int, high: int, kind: pa.DataType) -> Callable[[pa.Array], pa.Array]:
    """(int) x and (long) x: towards zero, too large is the largest, NaN is 0."""

    def compute(array: pa.Array) -> pa.Array:
        numbers = np.nan_to_num(_filled(array), nan=0.0, posinf=np.inf, neginf=-np.inf)
        above, below = numbers >= float(high), numbers <= float(low)
        whole = np.where(above | below, 0.0, numbers).astype(np.int64)
        whole[above], whole[below] = high, low
        return _like(whole, array, kind)

    return compute


def _java_float(value: float) -> str:
    """java.lang.Float.toString."""
    single = np.float32(value)
    if not np.isfinite(single):
        return java_double(float(single))
    return java_digits(np.format_float_scientific(single, unique=True, trim="-"), float(single))


def _to_text(one: Callable[[float], str]) -> Callable[[pa.Array], pa.Array]:
    """Arrow writes the shortest digits as Java does, in the plain range but for the `.0` of whole numbers. The rest is
    written one by one."""

    def compute(array: pa.Array) -> pa.Array:
        texts = array.cast(_TEXT)
        size = np.abs(_filled(array).astype(np.float64))
        plain = pc.and_(pa.array((size >= 1e-3) & (size < 1e7)), pc.invert(pc.match_substring(texts, "e")))
        whole = pc.invert(pc.match_substring(texts, "."))
        usual = pc.if_else(whole, pc.binary_join_element_wise(texts, ".0", ""), texts)
        if pc.all(pc.fill_null(plain, True)).as_py():
            return usual
        odd = pc.if_else(plain, pa.scalar(None, array.type), array)
        return pc.if_else(plain, usual, by_distinct(one, odd, _TEXT))

    return compute


def _rounded(mode: str) -> Callable[[pa.Array, pa.Array], pa.Array]:
    """BigDecimal.valueOf(x).setScale(digits, mode): of the digits one sees, not of the binary number. Where the binary
    number is far from a tie both agree; near a tie the digits decide."""

    def exact(value: float, digits: int) -> float:
        number = decimal.Decimal(repr(value))
        return float(number.quantize(decimal.Decimal(1).scaleb(-digits), mode, context=_DECIMALS))

    def compute(array: pa.Array, digits: pa.Array) -> pa.Array:
        scale = constant(digits) or 0
        numbers = _filled(array).copy()
        with np.errstate(all="ignore"):
            power = 10.0 ** abs(scale)
            scaled = numbers * power if scale >= 0 else numbers / power
            size = np.abs(scaled)
            tie = size + (0.5 if mode == decimal.ROUND_HALF_UP else 0.0)
            nearest = np.abs(tie - np.rint(tie))
            whole = np.copysign(np.floor(tie), scaled)
            result = whole / power if scale >= 0 else whole * power
            clear = (size < 1e14) & (nearest > 1e-6 + size * 1e-15)
        keep = ~np.isfinite(numbers)
        result[keep] = numbers[keep]
        for index in np.flatnonzero(~clear & ~keep):
            value = float(numbers[index])
            result[index] = exact(value, scale) if abs(value) < 1e30 and abs(scale) < 30 else value
        return _like(result, array, _DOUBLE)

    return compute


def _parse(name: str, convert: Callable[[str], Any], kind: pa.DataType) -> Callable[[pa.Array], pa.Array]:
    """CAST of a text: what is no such number ends the query, as in Pinot."""

    def one(text: str) -> Any:
        try:
            return convert(text)
        except (ValueError, ArithmeticError) as error:
            raise ValueError(f"CAST: {text[:100]!r} is not a value of type {name}") from error

    return lambda array: by_distinct(one, array, kind)


def _java_int(low: int, high: int) -> Callable[[str], int]:
    """Pinot reads texts as numbers first: `1.9` is 1 (towards zero)."""

    def convert(text: str) -> int:
        stripped = text.strip()
        try:
            number = int(stripped)
        except ValueError:
            value = float(stripped)
            if not math.isfinite(value):
                raise
            number = int(value)
        if not low <= number <= high:
            raise ValueError(text)
        return number

    return convert


def _wrap_int(array: pa.Array) -> pa.Array:
    """(int) of a long: its lower 32 bits."""
    return _like(_filled(array).astype(np.int64).astype(np.int32), array, _INT)


def _timestamp_text(array: pa.Array) -> pa.Array:
    """java.sql.Timestamp.toString in UTC: `2024-01-01 00:00:00.0`."""
    inside = np.clip(_filled(array), -62_135_596_800_000, 253_402_300_799_999)
    texts = pa.array(inside, pa.timestamp("ms")).cast(_TEXT)
    shown = pc.replace_substring_regex(texts, r"(\.\d+?)0+$", r"\1")
    return pc.if_else(array.is_valid(), shown, pa.scalar(None, _TEXT))


FUNCTIONS: dict[str, Factory] = dict(
    [
        scalar("fn_to_long", _saturated(-(2**63), 2**63 - 1, _LONG), [_DOUBLE], _LONG),
        scalar("fn_to_int", _saturated(-(2**31), 2**31 - 1, _INT), [_DOUBLE], _INT),
        scalar("fn_double_text", _to_text(java_double), [_DOUBLE], _TEXT),
        scalar("fn_float_text", _to_text(_java_float), [_FLOAT], _TEXT),
        scalar("fn_round", _rounded(decimal.ROUND_HALF_UP), [_DOUBLE, _LONG], _DOUBLE),
        scalar("fn_truncate", _rounded(decimal.ROUND_DOWN), [_DOUBLE, _LONG], _DOUBLE),
        scalar("fn_wrap_int", _wrap_int, [_LONG], _INT),
        scalar("fn_parse_timestamp", _parse("TIMESTAMP", timestamp_ms, _LONG), [_TEXT], _LONG),
        scalar("fn_timestamp_text", _timestamp_text, [_LONG], _TEXT),
        scalar("fn_parse_int", _parse("INT", _java_int(-(2**31), 2**31 - 1), _INT), [_TEXT], _INT),
        scalar("fn_parse_long", _parse("LONG", _java_int(-(2**63), 2**63 - 1), _LONG), [_TEXT], _LONG),
        scalar("fn_parse_float", _parse("FLOAT", float, _FLOAT), [_TEXT], _FLOAT),
        scalar("fn_parse_double", _parse("DOUBLE", float, _DOUBLE), [_TEXT], _DOUBLE),
    ]
)
