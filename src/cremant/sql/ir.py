# SPDX-License-Identifier: Apache-2.0
"""A query as Pinot sees it: every operator is a function call, every literal keeps its text.

Two equal expressions are equal values (so an ORDER BY item finds the SELECT item it repeats), and `canonical` is the
text that Pinot gives a result column without alias: `times(amount,'2')`, `count(*)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import TypeAlias


class Explain(StrEnum):
    """What EXPLAIN asks for: `PLAN`, or what holds the answer's freshness back."""

    PLAN = "PLAN"
    FRESHNESS = "FRESHNESS"


@dataclass(frozen=True, slots=True)
class Column:
    name: str


@dataclass(frozen=True, slots=True)
class Literal:
    """`text` is what the user wrote (without quotes); it names the result column."""

    value: int | float | Decimal | str | bool | None
    text: str
    #: Of a number that is a DOUBLE, as in Pinot, but was written with more digits than one holds.
    exact: Decimal | None = None


@dataclass(frozen=True, slots=True)
class Star:
    pass


@dataclass(frozen=True, slots=True)
class Call:
    """`name` is lower case without underscores for functions, Pinot's operator name for operators (`greater_than`)."""

    name: str
    args: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Ordinal:
    """Stands for the n-th item (from 1) of the SELECT list, in GROUP BY and ORDER BY."""

    position: int


Expr: TypeAlias = Column | Literal | Star | Call | Ordinal


@dataclass(frozen=True, slots=True)
class Item:
    """One item of the SELECT list."""

    expr: Expr
    alias: str | None


@dataclass(frozen=True, slots=True)
class Order:
    expr: Expr
    descending: bool
    nulls_first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """`limit` None: not given. `table` None: literals only. Aliases and ordinals are still unresolved.
    `explain`: not the answer is wanted, but this of it."""

    items: tuple[Item, ...]
    distinct: bool
    table: str | None
    where: Expr | None
    group_by: tuple[Expr, ...]
    having: Expr | None
    order_by: tuple[Order, ...]
    limit: int | None
    offset: int
    explain: Explain | None = None


_SYMBOLS = {
    "equals": "=", "not_equals": "!=", "greater_than": ">", "greater_than_or_equal": ">=", "less_than": "<",
    "less_than_or_equal": "<=",
}  # fmt: skip


def canonical(expr: Expr) -> str:
    """Pinot's text of an expression."""
    match expr:
        case Column(name):
            return name
        case Literal(_, text):
            return f"'{text}'"
        case Star():
            return "*"
        case Ordinal(position):
            return str(position)
        case Call("filter", (aggregate, condition)):
            return f"{canonical(aggregate)} FILTER(WHERE {_condition(condition)})"
        case Call(name, args):
            return f"{name}({','.join(canonical(arg) for arg in args)})"


def _condition(expr: Expr) -> str:
    """Pinot writes filters of aggregations as infix text."""
    match expr:
        case Call(name, (left, right)) if name in _SYMBOLS:
            return f"{canonical(left)} {_SYMBOLS[name]} {canonical(right)}"
        case Call("and" | "or" as name, args):
            return "(" + f" {name.upper()} ".join(_condition(arg) for arg in args) + ")"
        case _:
            return canonical(expr)


def walk(expr: Expr) -> Iterator[Expr]:
    """The expression and everything below it, without recursion."""
    todo: list[Expr] = [expr]
    while todo:
        current = todo.pop()
        yield current
        if isinstance(current, Call):
            todo.extend(reversed(current.args))


def substitute(expr: Expr, names: dict[str, Expr]) -> Expr:
    """Replaces columns by the expressions they are aliases of (once: a replacement is not looked at again)."""
    match expr:
        case Column(name) if name in names:
            return names[name]
        case Call(name, args):
            return Call(name, tuple(substitute(arg, names) for arg in args))
        case _:
            return expr


def fold_literals(call: Call) -> Expr:
    """Arithmetic on number literals is done at once: `now() - 3600000` becomes a literal that can prune."""
    if call.name == "cast":
        return _folded_cast(call)
    match call.args:
        case (Literal(int() | float() as left), Literal(int() | float() as right)) if not (
            isinstance(left, bool) or isinstance(right, bool)
        ):
            try:
                value = _arithmetic(call.name, left, right)
            except (OverflowError, ValueError):  # beyond DOUBLE, or the remainder of an infinite number
                return call
            if value is not None:
                return Literal(value, str(value))
    return call


def _folded_cast(call: Call) -> Expr:
    """A whole number as a wider one is the literal itself."""
    match call.args:
        case (Literal(int() as value) as number, Literal(value="BIGINT" | "LONG")) if not isinstance(value, bool):
            return number
    return call


def _arithmetic(name: str, left: int | float, right: int | float) -> int | float | None:
    value: int | float | None = None
    match name:
        case "plus":
            value = left + right
        case "minus":
            value = left - right
        case "times":
            value = left * right
        case "divide" if right != 0:
            value = left / right
        case "mod" if right != 0:
            value = math.fmod(left, right)
    if isinstance(value, int) and abs(value) >= 2**63:
        return float(value)
    return value
