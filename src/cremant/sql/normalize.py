# SPDX-License-Identifier: Apache-2.0
"""Rewrites and bounds between lowering and binding. Pure, from expression to expression.

- `merge_equals`: `a = 1 OR a = 2 OR a IN (3)` is `a IN (1, 2, 3)` (as Pinot does), which an engine tests with one hash.
- `check_size`: engines recurse over expressions and end the process when their stack is full, so what is deeper or
  longer than measured to be safe is refused here. IN lists are not counted: they are flat.
"""

from __future__ import annotations

from collections.abc import Iterable

from cremant.model.errors import QueryError
from cremant.model.limits import QUERY_CALLS_MAX, QUERY_CASE_BRANCHES_MAX, QUERY_DEPTH_MAX, QUERY_ITEMS_MAX
from cremant.model.query_codes import QueryCode
from cremant.sql.ir import Call, Column, Expr, Literal, Query


def check_size(query: Query) -> None:
    """Raises QueryError 700 for a query that an engine could not bear."""
    roots = [item.expr for item in query.items]
    roots += [expr for expr in (query.where, query.having) if expr is not None]
    roots += [*query.group_by, *(order.expr for order in query.order_by)]
    if len(query.items) > QUERY_ITEMS_MAX:
        raise _too_much("has", len(query.items), QUERY_ITEMS_MAX, "columns in its SELECT list", "select fewer columns")
    check_expressions(roots)


def check_expressions(roots: Iterable[Expr]) -> None:
    """Raises QueryError 700, too."""
    calls = 0
    todo = [(root, 1) for root in roots]
    while todo:
        expr, depth = todo.pop()
        if not isinstance(expr, Call):
            continue
        calls += 1
        if depth > QUERY_DEPTH_MAX:
            raise _too_much("is nested", depth, QUERY_DEPTH_MAX, "levels deep", "compute in fewer steps")
        if expr.name == "case" and len(expr.args) > 2 * QUERY_CASE_BRANCHES_MAX + 1:
            raise _too_much("has a CASE of", len(expr.args) // 2, QUERY_CASE_BRANCHES_MAX, "branches", "split it")
        todo.extend((arg, depth + 1) for arg in expr.args if isinstance(arg, Call))
    if calls > QUERY_CALLS_MAX:
        raise _too_much("has", calls, QUERY_CALLS_MAX, "conditions and functions", "write lists of values with IN")


def _too_much(what: str, found: int, allowed: int, unit: str, hint: str) -> QueryError:
    text = f"QueryValidationError: the query {what} {found} {unit}, at most {allowed} are allowed"
    return QueryError(QueryCode.QUERY_VALIDATION, text, hint=hint)


def merge_equals(expr: Expr) -> Expr:
    """Everywhere in `expr`, joins equalities of one column under one OR."""
    if not isinstance(expr, Call):
        return expr
    args = tuple(merge_equals(arg) for arg in expr.args)
    if expr.name != "or":
        return Call(expr.name, args)
    merged: list[Expr] = []
    place: dict[Column, int] = {}
    for arg in args:
        match arg:
            case Call("equals", (Column() as column, Literal() as value)) if value.value is not None:
                values: tuple[Expr, ...] = (value,)
            case Call("in", (Column() as column, *listed)) if all(isinstance(value, Literal) for value in listed):
                values = tuple(listed)
            case _:
                merged.append(arg)
                continue
        if column in place:
            before = merged[place[column]]
            assert isinstance(before, Call)
            merged[place[column]] = Call("in", (*before.args, *values))
        else:
            place[column] = len(merged)
            merged.append(Call("in", (column, *values)))
    plain = tuple(_plain(arg) for arg in merged)
    return plain[0] if len(plain) == 1 else Call("or", plain)


def _plain(expr: Expr) -> Expr:
    match expr:
        case Call("in", (column, value)):
            return Call("equals", (column, value))
        case _:
            return expr


def balanced(conditions: list[str], word: str) -> str:
    """`a AND b AND c AND d` as a tree of logarithmic depth: engines recurse over the depth."""
    while len(conditions) > _FLAT_MAX:
        conditions = [
            f"({f' {word} '.join(conditions[start : start + _FLAT_MAX])})"
            for start in range(0, len(conditions), _FLAT_MAX)
        ]
    return "(" + f" {word} ".join(conditions) + ")"


_FLAT_MAX = 8
