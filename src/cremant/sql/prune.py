# SPDX-License-Identifier: Apache-2.0
"""Prune terms: conjuncts `column op literal` of a filter, which metadata (min and max of a segment) may decide.

Only what holds for every row that passes the filter is a term, so dropping a segment by it never loses a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from cremant.model.errors import QueryError
from cremant.model.schema import DataType
from cremant.sql.binder import Scope
from cremant.sql.bound import Stored, coerce
from cremant.sql.ir import Call, Column, Expr, Literal
from cremant.sql.predicates import SIGNS
from cremant.wire.messages import PruneTerm

_FLIPPED = {"=": "=", ">": "<", ">=": "<=", "<": ">", "<=": ">="}
#: Types whose ranges segments keep and whose stored form is a JSON value.
_TYPES = frozenset({DataType.INT, DataType.LONG, DataType.TIMESTAMP, DataType.FLOAT, DataType.DOUBLE, DataType.STRING})
#: A longer IN list is not worth sending.
_IN_VALUES_MAX = 64


def prune_terms(where: Expr | None, scope: Scope) -> tuple[PruneTerm, ...]:
    if where is None:
        return ()
    return tuple(term for conjunct in _conjuncts(where) for term in _terms(conjunct, scope))


def conjunct_terms(where: Expr, scope: Scope) -> Iterator[list[PruneTerm]]:
    """The terms of each conjunct: all that it says, or none where it is of another kind."""
    for conjunct in _conjuncts(where):
        yield list(_terms(conjunct, scope))


def _conjuncts(expr: Expr) -> Iterator[Expr]:
    if isinstance(expr, Call) and expr.name == "and":
        for arg in expr.args:
            yield from _conjuncts(arg)
    else:
        yield expr


def _terms(expr: Expr, scope: Scope) -> Iterator[PruneTerm]:
    match expr:
        case Call("between", (Column() as column, Literal() as low, Literal() as high)):
            both = [*_term(scope, column, ">=", [low]), *_term(scope, column, "<=", [high])]
            if len(both) == 2:  # half of it would not be what it says
                yield from both
        case Call("in", (Column() as column, *values)) if len(values) <= _IN_VALUES_MAX:
            literals = [value for value in values if isinstance(value, Literal)]
            if len(literals) == len(values):
                yield from _term(scope, column, "in", literals)
        case Call(name, (Column() as column, Literal() as value)) if name in SIGNS and name != "not_equals":
            yield from _term(scope, column, SIGNS[name], [value])
        case Call(name, (Literal() as value, Column() as column)) if name in SIGNS and name != "not_equals":
            yield from _term(scope, column, _FLIPPED[SIGNS[name]], [value])


def _term(scope: Scope, column: Column, op: str, literals: list[Literal]) -> Iterator[PruneTerm]:
    bound = scope.column(column.name)
    if bound.multi or bound.column is None or bound.type not in _TYPES:
        return
    try:
        values = [coerce(literal, bound.type) for literal in literals]
    except QueryError:  # the filter itself refuses it, with a better message
        return
    if all(_is_json(value) for value in values):
        yield PruneTerm(column=bound.column, op=op, values=tuple(values))  # type: ignore[arg-type]


def _is_json(value: Stored) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int | str) and not (isinstance(value, int) and abs(value) >= 2**63)
