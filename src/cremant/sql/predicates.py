# SPDX-License-Identifier: Apache-2.0
"""Predicates: comparisons, IN, BETWEEN, LIKE, over single- and multi-value columns.

A positive predicate on a multi-value column is true if ANY element matches, an exclusive one (`!=`, NOT IN, NOT LIKE)
if ALL elements satisfy it; so an exclusive one is always NOT of the positive one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cremant.model.schema import DataType
from cremant.sql.bound import INTEGERS, NUMBERS, TEXTS, Bound, coerce, invalid, stored_sql, text_sql
from cremant.sql.ir import Literal

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
    if numeric or left.type is right.type or {left.type, right.type} <= TEXTS:
        return f"{left.sql} {sign} {right.sql}"
    raise invalid(f"cannot compare {left.type} with {right.type}", hint="CAST one side")


def _compare_with_literal(sign: str, left: Bound, literal: Literal) -> str:
    assert left.type is not None
    value = coerce(literal, left.type)
    if left.type in INTEGERS and isinstance(value, int | float) and _unfit(value):
        return _compare_integer(sign, left.sql, value)
    return f"{left.sql} {sign} {stored_sql(value, left.type)}"


def _compare_integer(sign: str, sql: str, value: int | float) -> str:
    """An integer column against a number that is no 64-bit integer: rounded to the side that means the same."""
    below, above = value < -(2**63), value >= 2**63
    if below or above:
        holds = {"=": False, "<>": True, ">": below, ">=": below, "<": above, "<=": above}[sign]
        return f"{sql} IS NOT NULL" if holds else f"{sql} <> {sql}"
    match sign:
        case "=":
            return f"{sql} <> {sql}"
        case "<>":
            return f"{sql} = {sql}"
        case ">" | ">=":
            return f"{sql} >= {stored_sql(math.ceil(value), DataType.LONG)}"
        case _:
            return f"{sql} <= {stored_sql(math.floor(value), DataType.LONG)}"


def _compare_elements(sign: str, left: Bound, literal: Literal) -> str:
    assert left.type is not None
    value = coerce(literal, left.type)
    if isinstance(value, float) and left.type in INTEGERS:
        raise invalid(f"cannot compare elements of {left.type} with {literal.text}", hint="use a whole number")
    element = _element(value, left.type)
    match sign:
        case "=":
            return f"array_has({left.sql}, {element})"
        case "<>":
            return f"NOT array_has({left.sql}, {element})"
        case ">" | ">=":
            return f"COALESCE(array_max({left.sql}) {sign} {element}, FALSE)"
        case _:
            return f"COALESCE(array_min({left.sql}) {sign} {element}, FALSE)"


_ARROW_TYPES = {
    DataType.INT: "Int32", DataType.LONG: "Int64", DataType.TIMESTAMP: "Int64", DataType.FLOAT: "Float32",
    DataType.DOUBLE: "Float64", DataType.BOOLEAN: "Boolean", DataType.STRING: "Utf8", DataType.JSON: "Utf8",
    DataType.BYTES: "Binary", DataType.BIG_DECIMAL: "Decimal128(38, 18)",
}  # fmt: skip


def _element(value: object, kind: DataType) -> str:
    """Elements are stored plainly (no views), and array functions want exactly their type."""
    return f"arrow_cast({stored_sql(value, kind)}, '{_ARROW_TYPES[kind]}')"  # type: ignore[arg-type]


def is_in(left: Bound, values: Sequence[Bound], *, negated: bool) -> str:
    """SQL of `left [NOT] IN (values)`. Values that the column's type cannot hold match nothing."""
    if any(value.literal is None for value in values):
        raise invalid("IN takes literals", hint="write the comparisons with OR")
    if left.type is None:
        return "NULL"
    kind = left.type
    stored = [coerce(value.literal, kind) for value in values if value.literal and value.type is not None]
    fitting = [value for value in stored if not (kind in INTEGERS and _unfit(value))]
    if left.multi:
        elements = ", ".join(_element(value, kind) for value in fitting)
        sql = f"array_has_any({left.sql}, make_array({elements}))" if fitting else "FALSE"
        return f"NOT {sql}" if negated else sql
    if not fitting:
        return f"{left.sql} {'=' if negated else '<>'} {left.sql}"
    if len(fitting) == 1:
        return f"{left.sql} {'<>' if negated else '='} {stored_sql(fitting[0], kind)}"
    listed = ", ".join(stored_sql(value, kind) for value in fitting)
    return f"{left.sql} {'NOT IN' if negated else 'IN'} ({listed})"


def _unfit(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and not -(2**63) <= value < 2**63)


def between(value: Bound, low: Bound, high: Bound, *, negated: bool) -> str:
    if value.multi:
        raise invalid("BETWEEN on a multi-value column is not supported")
    sql = f"({compare('>=', value, low)} AND {compare('<=', value, high)})"
    return f"NOT {sql}" if negated else sql


def like(value: Bound, pattern: Bound, *, negated: bool) -> str:
    text = _pattern(value, pattern, "LIKE")
    return f"{value.sql} {'NOT LIKE' if negated else 'LIKE'} {text_sql(text)}"


def regexp_like(value: Bound, pattern: Bound, flags: str) -> str:
    """True if the expression is found anywhere in the value."""
    text = _pattern(value, pattern, "REGEXP_LIKE")
    if flags not in ("", "c", "i"):
        raise invalid(f"REGEXP_LIKE: match parameter {flags!r} is not supported", hint="'c' or 'i'")
    if flags == "i":
        return f"regexp_like({value.sql}, {text_sql(text)}, 'i')"
    return f"regexp_like({value.sql}, {text_sql(text)})"


def _pattern(value: Bound, pattern: Bound, what: str) -> str:
    if value.multi:
        raise invalid(f"{what} on a multi-value column is not supported")
    if value.type not in TEXTS:
        raise invalid(f"{what} takes a STRING, found {value.type}", hint="CAST it AS STRING")
    if pattern.literal is None or not isinstance(pattern.literal.value, str):
        raise invalid(f"the pattern of {what} must be a string literal")
    return pattern.literal.value
