# SPDX-License-Identifier: Apache-2.0
"""Predicates: comparisons, IN, BETWEEN, LIKE, over single- and multi-value columns.

A positive predicate on a multi-value column is true if ANY element matches, an exclusive one (`!=`, NOT IN, NOT LIKE)
if ALL elements satisfy it; so an exclusive one is always NOT of the positive one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from cremant.model.schema import DataType
from cremant.sql.bound import (
    FLOATS,
    INTEGERS,
    NUMBERS,
    TEXTS,
    Bound,
    as_type,
    bind_literal,
    coerce,
    integer_range,
    invalid,
    stored_sql,
    text_sql,
)
from cremant.sql.ir import Literal
from cremant.sql.regex import JavaPattern
from cremant.sql.scalar import KERNEL_NAMES, SHORT_SQL_CHARS, element

SIGNS = {
    "equals": "=", "not_equals": "<>", "greater_than": ">", "greater_than_or_equal": ">=", "less_than": "<",
    "less_than_or_equal": "<=",
}  # fmt: skip
_FLIPPED = {"=": "=", "<>": "<>", ">": "<", ">=": "<=", "<": ">", "<=": ">="}


def compare(sign: str, left: Bound, right: Bound) -> str:
    """SQL of `left sign right`."""
    if left.literal is not None and right.literal is None:
        left, right, sign = right, left, _FLIPPED[sign]
    if right.type is None or left.type is None:
        return "NULL"
    if right.multi:
        raise invalid("comparing two columns of which one is multi-value is not supported")
    if right.literal is None:
        return _compare_expressions(sign, left, right)
    if left.multi:
        return _compare_elements(sign, left, right.literal)
    return _compare_with_literal(sign, left, right.literal)


def _compare_expressions(sign: str, left: Bound, right: Bound) -> str:
    if left.multi:
        raise invalid("comparing two columns of which one is multi-value is not supported")
    assert left.type is not None
    assert right.type is not None
    numeric = left.type in NUMBERS and right.type in NUMBERS
    if _of_decimals(left, right):
        sides = (as_type(side, DataType.BIG_DECIMAL) for side in (left, right))
        return f"fn_decimal_compare({', '.join(sides)}) {sign} 0"
    if numeric or left.type is right.type or {left.type, right.type} <= TEXTS:
        return f"{left.sql} {sign} {right.sql}"
    raise invalid(f"cannot compare {left.type} with {right.type}", hint="CAST one side")


def _of_decimals(left: Bound, right: Bound) -> bool:
    """Whether two numbers must be compared as BIG_DECIMAL, which is stored as text."""
    kinds = {left.type, right.type}
    return DataType.BIG_DECIMAL in kinds and kinds <= NUMBERS


def _compare_with_literal(sign: str, left: Bound, literal: Literal) -> str:
    assert left.type is not None
    value = coerce(literal, left.type)
    if left.type in INTEGERS and isinstance(value, int | float) and _unfit(value):
        return _compare_integer(sign, left, value)
    if left.type is DataType.BIG_DECIMAL and sign not in ("=", "<>"):
        return f"fn_decimal_compare({left.sql}, {stored_sql(value, left.type)}) {sign} 0"
    return f"{left.sql} {sign} {stored_sql(value, left.type)}"


def _compare_integer(sign: str, left: Bound, value: int | float) -> str:
    """An integer column against a number that is no 64-bit integer: rounded to the side that means the same."""
    below, above = value < -(2**63), value >= 2**63
    if below or above or sign in ("=", "<>"):
        return _always(left, {"=": False, "<>": True, ">": below, ">=": below, "<": above, "<=": above}[sign])
    if sign[0] == ">":
        return f"{left.sql} >= {stored_sql(math.ceil(value), DataType.LONG)}"
    return f"{left.sql} <= {stored_sql(math.floor(value), DataType.LONG)}"


def _always(left: Bound, holds: bool) -> str:
    """TRUE or FALSE, but NULL where `left` is."""
    return f"NULLIF({left.sql} IS NOT NULL, FALSE)" if holds else f"NOT NULLIF({left.sql} IS NOT NULL, FALSE)"


def _compare_elements(sign: str, left: Bound, literal: Literal) -> str:
    """Any element; `<>`: all of them."""
    kind = left.type
    assert kind is not None
    value = coerce(literal, kind)
    if kind in INTEGERS and isinstance(value, int | float) and _unfit(value, kind):
        low, high = integer_range(kind)
        below, above = value < low, value > high
        if below or above or sign in ("=", "<>"):
            holds = {"=": False, "<>": True, ">": below, ">=": below, "<": above, "<=": above}[sign]
            return "TRUE" if holds else "FALSE"
        upwards = sign[0] == ">"
        sign, value = (">=", math.ceil(value)) if upwards else ("<=", math.floor(value))
    match sign:
        case "=":
            return f"array_has({left.sql}, {element(value, kind)})"
        case "<>":
            return f"NOT array_has({left.sql}, {element(value, kind)})"
        case _ if kind is DataType.BIG_DECIMAL:
            raise invalid("order of elements of type BIG_DECIMAL is not supported")
        case _:
            return f"fn_any_{KERNEL_NAMES[kind]}({left.sql}, '{sign}', {element(value, kind)})"


def is_in(left: Bound, values: Sequence[Bound], *, negated: bool) -> str:
    """SQL of `left [NOT] IN (values)`. Values that the column's type cannot hold match nothing."""
    if any(value.literal is None for value in values):
        values = [value if value.literal is None else bind_literal(value.literal) for value in values]
        return _is_in_expressions(left, values, negated=negated)
    if left.type is None:
        return "NULL"
    kind = left.type
    stored = dict.fromkeys(coerce(value.literal, kind) for value in values if value.literal and value.type is not None)
    fits_in = kind if left.multi else DataType.LONG
    fitting = [value for value in stored if not (kind in INTEGERS and _unfit(value, fits_in))]
    if left.multi:
        elements = ", ".join(element(value, kind) for value in fitting)
        sql = f"array_has_any({left.sql}, make_array({elements}))" if fitting else "FALSE"
        return f"NOT {sql}" if negated else sql
    if not fitting:
        return _always(left, negated)
    if len(fitting) == 1:
        return f"{left.sql} {'<>' if negated else '='} {stored_sql(fitting[0], kind)}"
    listed = ", ".join(stored_sql(value, kind) for value in fitting)
    return f"{left.sql} {'NOT IN' if negated else 'IN'} ({listed})"


def _is_in_expressions(left: Bound, values: Sequence[Bound], *, negated: bool) -> str:
    """With columns among the values: one comparison each."""
    if len(left.sql) > SHORT_SQL_CHARS and len(values) > 4:
        raise invalid("IN with columns among its values takes a simple expression on its left")
    sql = "(" + " OR ".join(compare("=", left, value) for value in values) + ")"
    return f"NOT {sql}" if negated else sql


def _unfit(value: object, kind: DataType = DataType.LONG) -> bool:
    low, high = integer_range(kind)
    return isinstance(value, float) or (isinstance(value, int) and not low <= value <= high)


def between(value: Bound, low: Bound, high: Bound, *, negated: bool) -> str:
    if value.multi:
        sql = _between_elements(value, low, high)
    elif len(value.sql) > SHORT_SQL_CHARS and value.type in (NUMBERS | TEXTS) - {DataType.BIG_DECIMAL}:
        sql = f"{value.sql} BETWEEN {_bound_sql(value, low)} AND {_bound_sql(value, high)}"
    else:
        sql = f"({compare('>=', value, low)} AND {compare('<=', value, high)})"
    return f"NOT {sql}" if negated else sql


def _bound_sql(value: Bound, limit: Bound) -> str:
    assert value.type is not None
    if limit.multi or limit.type is None:
        raise invalid("the bounds of BETWEEN must be single values")
    if limit.literal is None:
        return limit.sql
    number = coerce(limit.literal, value.type)
    if isinstance(number, float) and value.type in INTEGERS:
        return stored_sql(number, DataType.DOUBLE)
    return stored_sql(number, value.type)


def _between_elements(value: Bound, low: Bound, high: Bound) -> str:
    """Any element inside."""
    assert value.type is not None
    if low.literal is None or high.literal is None:
        raise invalid("BETWEEN on a multi-value column takes literals")
    kind = value.type
    if kind is DataType.BIG_DECIMAL:
        raise invalid("order of elements of type BIG_DECIMAL is not supported")
    bounds: list[Any] = [coerce(low.literal, kind), coerce(high.literal, kind)]
    if kind in INTEGERS:
        least, greatest = integer_range(kind)
        if bounds[0] > greatest or bounds[1] < least:
            return "FALSE"
        bounds = [math.ceil(max(bounds[0], least)), math.floor(min(bounds[1], greatest))]
    return f"fn_any_between_{KERNEL_NAMES[kind]}({value.sql}, {element(bounds[0], kind)}, {element(bounds[1], kind)})"


def like(value: Bound, pattern: Bound, *, negated: bool, escape: str = "\\") -> str:
    text = _pattern(value, pattern, "LIKE")
    if escape != "\\":
        text = _escaped(text, escape)
    if value.multi:
        sql = f"fn_any_like({value.sql}, {text_sql(text)})"
        return f"NOT {sql}" if negated else sql
    return f"{value.sql} {'NOT LIKE' if negated else 'LIKE'} {text_sql(text)}"


def _escaped(pattern: str, escape: str) -> str:
    """A pattern with another escape character, with a backslash instead."""
    if len(escape) != 1:
        raise invalid(f"LIKE: ESCAPE takes one character, found {escape!r}")
    parts: list[str] = []
    at = 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == escape:
            at += 1
            if at >= len(pattern):
                raise invalid(f"LIKE: the pattern {pattern!r} ends with its escape character")
            parts.append("\\" + pattern[at] if pattern[at] in "%_\\" else pattern[at])
        else:
            parts.append("\\\\" if letter == "\\" else letter)
        at += 1
    return "".join(parts)


def regexp_like(value: Bound, pattern: Bound, flags: str) -> str:
    """True if the expression is found anywhere in the value."""
    regex = JavaPattern(_pattern(value, pattern, "REGEXP_LIKE"))
    if flags not in ("", "c", "i"):
        raise invalid(f"REGEXP_LIKE: match parameter {flags!r} is not supported", hint="'c' or 'i'")
    fold = "(?i)" if flags == "i" else ""
    if value.multi:
        return f"fn_any_matches({value.sql}, {text_sql(fold + regex.re2())})"
    return f"regexp_like({value.sql}, {text_sql(fold + regex.rust())})"


def _pattern(value: Bound, pattern: Bound, what: str) -> str:
    if value.type not in TEXTS:
        raise invalid(f"{what} takes a STRING, found {value.type}", hint="CAST it AS STRING")
    if pattern.literal is None or not isinstance(pattern.literal.value, str):
        raise invalid(f"the pattern of {what} must be a string literal")
    return pattern.literal.value


def is_distinct(left: Bound, right: Bound, *, negated: bool) -> str:
    """IS [NOT] DISTINCT FROM: NULLs are equal to each other; never NULL itself."""
    sign = "IS NOT DISTINCT FROM" if negated else "IS DISTINCT FROM"
    if left.literal is not None and right.literal is None:
        left, right = right, left
    if left.multi or right.multi:
        raise invalid("IS DISTINCT FROM on a multi-value column is not supported")
    if right.literal is not None and right.type is not None and left.type is not None:
        value = coerce(right.literal, left.type)
        if left.type in INTEGERS and _unfit(value):
            return "FALSE" if negated else "TRUE"
        return f"{left.sql} {sign} {stored_sql(value, left.type)}"
    if _of_decimals(left, right) and not {left.type, right.type} & FLOATS:
        left, right = (Bound(as_type(side, DataType.BIG_DECIMAL), DataType.BIG_DECIMAL) for side in (left, right))
    numeric = left.type in NUMBERS and right.type in NUMBERS
    same = left.type is right.type or (left.type in TEXTS and right.type in TEXTS)
    if numeric or same or left.type is None or right.type is None:
        return f"{left.sql} {sign} {right.sql}"
    raise invalid(f"cannot compare {left.type} with {right.type}", hint="CAST one side")
