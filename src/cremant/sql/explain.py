# SPDX-License-Identifier: Apache-2.0
"""EXPLAIN PLAN FOR: Pinot's rows (Operator, Operator_Id, Parent_Id) for a query of one table; and the columns of
EXPLAIN FRESHNESS FOR, whose rows the broker makes (broker/watch.py).

Planned at the broker, nothing is executed. The rows say what the query asks of a segment; which index serves a filter
is decided per segment when it runs, so filters are shown as scans. `{segments}` stands for what only the view knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cremant.sql.ir import Call, Column, Expr, Literal, Order, Star, canonical, walk
from cremant.sql.plan import ResultColumn, Shape

Row = tuple[str, int, int]

COLUMNS = (ResultColumn("Operator", "STRING"), ResultColumn("Operator_Id", "INT"), ResultColumn("Parent_Id", "INT"))
#: One row per partition and stage that holds it back, the worst first, after a row for all of it.
FRESHNESS_COLUMNS = (
    ResultColumn("Partition", "INT"), ResultColumn("Replica", "STRING"), ResultColumn("Stage", "STRING"),
    ResultColumn("LagMs", "LONG"), ResultColumn("State", "STRING"), ResultColumn("Reason", "STRING"),
)  # fmt: skip
LITERALS: tuple[Row, ...] = (("BROKER_EVALUATE", 0, -1),)
_OPERATORS = {
    "equals": ("EQ", "="), "not_equals": ("NOT_EQ", "!="), "greater_than": ("RANGE", ">"),
    "greater_than_or_equal": ("RANGE", ">="), "less_than": ("RANGE", "<"), "less_than_or_equal": ("RANGE", "<="),
}  # fmt: skip
_NAMES = {
    Shape.SELECTION: ("COMBINE_SELECT", "SELECT"),
    Shape.DISTINCT: ("COMBINE_DISTINCT", "DISTINCT"),
    Shape.AGGREGATION: ("COMBINE_AGGREGATE", "AGGREGATE"),
    Shape.GROUP_BY: ("COMBINE_GROUP_BY", "GROUP_BY"),
}


class _Rows:
    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._next = 1

    def add(self, operator: str, parent: int) -> int:
        self.rows.append((operator, self._next, parent))
        self._next += 1
        return self._next - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a query asks: its parts with columns, aliases and ordinals resolved. `exprs` is the SELECT list."""

    shape: Shape
    exprs: Sequence[Expr]
    aggregations: Sequence[Expr]
    keys: Sequence[Expr]
    where: Expr | None
    having: Expr | None
    orders: Sequence[Order]
    limit: int
    offset: int

    @property
    def sorts_rows(self) -> bool:
        return self.shape is Shape.SELECTION and bool(self.orders)


def explain(asked: Asked) -> tuple[Row, ...]:
    """Each operator with its number and that of its parent: reducing first, reading segments last."""
    found = _Rows()
    at = found.add(f"BROKER_REDUCE({','.join(_reducing(asked))})", 0)
    at = found.add(_NAMES[asked.shape][0] + ("_ORDERBY" if asked.sorts_rows else ""), at)
    found.rows.append(("PLAN_START(numSegmentsForThisPlan:{segments})", -1, -1))
    operator, inputs = _computing(asked)
    at = found.add(operator, at)
    if any(isinstance(expr, Call) for expr in inputs):
        at = found.add(f"TRANSFORM({_texts(inputs)})", at)
    at = found.add(f"PROJECT({', '.join(_columns(inputs))})", at)
    at = found.add("DOC_ID_SET", at)
    if asked.where is None:
        found.add("FILTER_MATCH_ENTIRE_SEGMENT", at)
    else:
        _filter(found, asked.where, at)
    return tuple(found.rows)


def _reducing(asked: Asked) -> list[str]:
    """What the broker does with the servers' answers."""
    parts = [f"havingFilter:{_condition(asked.having)}"] if asked.having is not None else []
    if asked.orders:
        parts.append("sort:[" + ", ".join(_order(order) for order in asked.orders) + "]")
    parts.append(f"limit:{asked.limit}")
    if asked.offset:
        parts.append(f"offset:{asked.offset}")
    if asked.shape in (Shape.AGGREGATION, Shape.GROUP_BY):
        known = asked.aggregations
        after = [canonical(expr) for expr in asked.exprs if expr not in known and _computes(expr, known)]
        parts += [f"postAggregations:{', '.join(after)}"] if after else []
    return parts


def _computing(asked: Asked) -> tuple[str, list[Expr]]:
    """What is computed of a segment's rows, and from which expressions."""
    operator, exprs, aggregations = _NAMES[asked.shape][1], list(asked.exprs), asked.aggregations
    match asked.shape:
        case Shape.DISTINCT:
            return f"{operator}(keyColumns:{_texts(exprs)})", exprs
        case Shape.AGGREGATION:
            return f"{operator}(aggregations:{_texts(aggregations)})", _arguments(aggregations)
        case Shape.GROUP_BY:
            inputs = [*asked.keys, *_arguments(aggregations)]
            return f"{operator}(groupKeys:{_texts(asked.keys)}, aggregations:{_texts(aggregations)})", inputs
        case _:
            inputs = exprs + [order.expr for order in asked.orders if order.expr not in exprs]
            return f"{operator}{'_ORDERBY' if asked.sorts_rows else ''}(selectList:{_texts(inputs)})", inputs


def _computes(expr: Expr, aggregations: Sequence[Expr]) -> bool:
    return isinstance(expr, Call) and any(part in aggregations for part in walk(expr))


def _texts(exprs: Sequence[Expr]) -> str:
    return ", ".join(dict.fromkeys(canonical(expr) for expr in exprs))


def _arguments(aggregations: Sequence[Expr]) -> list[Expr]:
    """What aggregations read: their arguments, without literals and `*`."""
    inner = [expr.args[0] if isinstance(expr, Call) and expr.name == "filter" else expr for expr in aggregations]
    args = [arg for expr in inner if isinstance(expr, Call) for arg in expr.args]
    return [arg for arg in args if not isinstance(arg, Star | Literal)]


def _columns(exprs: Sequence[Expr]) -> list[str]:
    return list(dict.fromkeys(part.name for expr in exprs for part in walk(expr) if isinstance(part, Column)))


def _order(order: Order) -> str:
    return f"{canonical(order.expr)} {'DESC' if order.descending else 'ASC'}"


def _filter(found: _Rows, expr: Expr, parent: int) -> None:
    match expr:
        case Call("and" | "or" as name, args):
            at = found.add(f"FILTER_{name.upper()}", parent)
            for arg in args:
                _filter(found, arg, at)
        case Call("not", (arg,)):
            _filter(found, arg, found.add("FILTER_NOT", parent))
        case _:
            scan = "FILTER_FULL_SCAN" if isinstance(_subject(expr), Column) else "FILTER_EXPRESSION"
            found.add(f"{scan}(operator:{_operator(expr)},predicate:{_condition(expr)})", parent)


def _subject(expr: Expr) -> Expr:
    """What a predicate is about."""
    return expr.args[0] if isinstance(expr, Call) and expr.args else expr


def _operator(expr: Expr) -> str:
    match expr:
        case Call(name) if name in _OPERATORS:
            return _OPERATORS[name][0]
        case Call("between"):
            return "RANGE"
        case Call("regexplike" | "like"):
            return "REGEXP_LIKE"
        case Call(name):
            return name.upper()
        case _:
            return "EQ"


def _condition(expr: Expr) -> str:
    match expr:
        case Call(name, (left, right)) if name in _OPERATORS:
            return f"{canonical(left)} {_OPERATORS[name][1]} {canonical(right)}"
        case Call("in" | "not_in" as name, (left, *values)):
            return f"{canonical(left)} {name.replace('_', ' ').upper()} ({','.join(canonical(v) for v in values)})"
        case Call("between", (value, low, high)):
            return f"{canonical(value)} BETWEEN {canonical(low)} AND {canonical(high)}"
        case Call("is_null" | "is_not_null" as name, (value,)):
            return f"{canonical(value)} {name.replace('_', ' ').upper()}"
        case Column(name):
            return f"{name} = 'true'"
        case _:
            return canonical(expr)
