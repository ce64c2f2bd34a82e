# SPDX-License-Identifier: Apache-2.0
"""What a scalar function is to the binder, and how the families read their arguments.

Rules for the SQL that a function becomes:

- An argument's SQL stands in it once (or is short): functions inside each other must not multiply their text.
- Kernels (`fn_...`) want exactly their types: texts and literals go in through `text_arg`, `typed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cremant.model.schema import DataType
from cremant.sql.bound import (
    INTEGERS,
    NUMERIC,
    TEXTS,
    Bound,
    as_type,
    bind_literal,
    exact,
    invalid,
    stored_sql,
)
from cremant.sql.ir import Literal

Args = Sequence[Bound]
Bind = Callable[[Args], Bound]

#: SQL up to this length may stand twice in what a function becomes.
SHORT_SQL_CHARS = 200


@dataclass(frozen=True, slots=True)
class Scalar:
    """`arity`: least and most arguments. `may_be_null`: NULL can come out of what is not NULL; while null handling is
    off Pinot shows a placeholder then. `typed`: also called with the element type at the end of its names
    (`arraySortInt`)."""

    names: tuple[str, ...]
    arity: tuple[int, int]
    bind: Bind
    may_be_null: bool = False
    typed: bool = False


def numeric(bound: Bound, function: str) -> None:
    if bound.multi or (bound.type not in NUMERIC and bound.type is not None):
        found = f"multi-value {bound.type}" if bound.multi else bound.type
        raise invalid(f"{function} takes a number, found {found}", hint="CAST it")


def text_arg(bound: Bound, function: str) -> str:
    """SQL of a text."""
    if bound.multi:
        raise invalid(f"{function} on a multi-value column is not supported")
    if bound.literal is not None and bound.type is not None:
        return as_type(bound, DataType.STRING)
    if bound.type is None:
        return "CAST(NULL AS VARCHAR)"
    if bound.type not in TEXTS:
        raise invalid(f"{function} takes a STRING, found {bound.type}", hint="CAST it AS STRING")
    return bound.sql


def integer_arg(bound: Bound, function: str) -> str:
    """SQL of a whole number of 64 bits."""
    if bound.multi or (bound.type not in INTEGERS and bound.literal is None):
        raise invalid(f"{function} takes a whole number, found {bound.type}", hint="CAST it AS LONG")
    return typed(bound, DataType.LONG)


def whole(bound: Bound, function: str) -> int:
    """The value of a literal that is a whole number."""
    value = bound.literal.value if bound.literal is not None else None
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid(f"{function} takes whole numbers as its positions")
    if not -(2**31) <= value < 2**31:
        raise invalid(f"{function}: {value} is not a number of 32 bits")
    return value


def word(bound: Bound, what: str) -> str:
    """The value of a literal that is a text."""
    if bound.literal is None or not isinstance(bound.literal.value, str):
        raise invalid(f"{what} must be a string literal")
    return bound.literal.value


def literal_text(bound: Bound, what: str) -> str:
    """SQL of a text that kernels take as one for all rows."""
    if bound.literal is None:
        raise invalid(f"{what} must be a literal")
    return text_arg(bound, what)


def is_null_literal(bound: Bound) -> bool:
    return bound.literal is not None and bound.literal.value is None


#: Arrow's names of the types of elements and of kernels' arguments.
ARROW_NAMES = {
    DataType.INT: "Int32", DataType.LONG: "Int64", DataType.TIMESTAMP: "Int64", DataType.FLOAT: "Float32",
    DataType.DOUBLE: "Float64", DataType.BOOLEAN: "Boolean", DataType.STRING: "Utf8", DataType.JSON: "Utf8",
    DataType.BYTES: "Binary", DataType.BIG_DECIMAL: "Utf8",
}  # fmt: skip

#: The name of a type in the names of kernels.
KERNEL_NAMES = {
    DataType.INT: "int", DataType.LONG: "long", DataType.TIMESTAMP: "long", DataType.FLOAT: "float",
    DataType.DOUBLE: "double", DataType.BOOLEAN: "boolean", DataType.STRING: "text", DataType.JSON: "text",
    DataType.BYTES: "bytes", DataType.BIG_DECIMAL: "decimal",
}  # fmt: skip


def element(value: object, kind: DataType) -> str:
    """A value of exactly the Arrow type of an element of a multi-value column."""
    return f"arrow_cast({stored_sql(value, kind)}, '{ARROW_NAMES[kind]}')"  # type: ignore[arg-type]


def typed(bound: Bound, kind: DataType) -> str:
    """SQL of exactly the Arrow type that kernels take for `kind`."""
    if bound.type is None:
        return f"arrow_cast(NULL, '{ARROW_NAMES[kind]}')"
    if bound.literal is not None:
        return element(exact(bound.literal, kind), kind)
    return as_type(bound, kind)


#: What a CASE without ELSE and a bare NULL give while null handling is off: Pinot's placeholder of the type.
PLACEHOLDERS: dict[DataType, Literal] = {
    DataType.STRING: Literal("", ""),
    DataType.JSON: Literal("", ""),
    DataType.BOOLEAN: Literal(False, "false"),
    DataType.BYTES: Literal("", ""),
}


def placeholder(kind: DataType) -> Bound:
    return bind_literal(PLACEHOLDERS.get(kind, Literal(0, "0")))
