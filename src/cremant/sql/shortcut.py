# SPDX-License-Identifier: Apache-2.0
"""Shortcut: what a server may know of its query beside the SQL text, so that indexes and codes can serve it.

Rules: it adds nothing to the meaning of the query; a server that ignores it gives the same answer. Only what is certain
from the bound tree is said: a filter is *exact* if its terms say all of it, a key is a column if it is nothing but one.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cremant.model.names import GROUP_KEY
from cremant.model.schema import DataType
from cremant.sql.binder import Binder, Scope
from cremant.sql.bound import INTEGERS, Bound, quoted
from cremant.sql.ir import Expr, Order
from cremant.sql.prune import conjunct_terms
from cremant.sql.two_phase import Grouping, Phases, where_sql
from cremant.sql.visible_casts import visible
from cremant.wire.messages import KeyColumn, PruneTerm, Shortcut, SumColumn


def shortcut_of(
    scope: Scope, where: Expr | None, condition: str | None, phases: Phases, *, rows: Sequence[Bound],
    orders: Sequence[Order], limit: int,
) -> Shortcut:  # fmt: skip
    """`condition`: the SQL of `where`. `rows`: the columns of a selection; `orders`: its order."""
    exact = where is None or _is_exact(where, scope)
    selected = tuple(bound.column for bound in rows if bound.column is not None and _is_bare(bound, scope))
    if orders or not rows or len(selected) != len(rows):
        selected = ()
    shortcut = Shortcut(where=condition or "", exact=exact, rows=selected, limit=limit if selected else 0)
    if phases.grouping is not None and not phases.grouping.keys:
        return msgspec.structs.replace(shortcut, sums=_sums(scope, phases.grouping))
    if rows and orders and phases.paged:
        return _with_top(scope, orders[0], limit, shortcut)
    return _with_keys(scope, condition, phases, shortcut)


def _with_top(scope: Scope, first: Order, limit: int, shortcut: Shortcut) -> Shortcut:
    """Without null handling columns have no nulls."""
    bound = Binder(scope).expr(first.expr)
    if limit == 0 or scope.null_handling or bound.multi or bound.type not in _SUMMED or not _is_bare(bound, scope):
        return shortcut
    return msgspec.structs.replace(
        shortcut, top=str(bound.column), top_descending=first.descending, limit=limit
    )  # fmt: skip


def _sums(scope: Scope, grouping: Grouping) -> tuple[SumColumn, ...]:
    """The partials, if all of them are sums of columns, or count rows. Without null handling columns have no nulls."""
    if scope.null_handling:
        return ()
    known = {"count(*)": ""}
    for name in [name for name in scope.used if name in scope.names]:
        kind = scope.column(name)
        if kind.multi or kind.type not in _SUMMED:
            continue
        column = quoted(name)
        number = column if kind.type in (DataType.INT, DataType.DOUBLE) else f"CAST({column} AS DOUBLE)"
        for sql, summed in ((f"count({column})", ""), (f"count({number})", ""), (f"sum({number})", name)):
            known[sql] = known[visible(sql)] = summed
    found = []
    for partial in grouping.partials:
        sql, _, name = partial.rpartition(" AS ")
        if sql not in known:
            return ()
        found.append(SumColumn(name, known[sql]))
    return tuple(found)


_SUMMED = frozenset({DataType.INT, DataType.LONG, DataType.TIMESTAMP, DataType.FLOAT, DataType.DOUBLE})


def _is_exact(where: Expr, scope: Scope) -> bool:
    """The terms of the filter say all of it, and compare integers with integers or texts with texts."""
    if scope.null_handling:
        return False
    return all(terms and all(_is_plain(term, scope) for term in terms) for terms in conjunct_terms(where, scope))


def _is_plain(term: PruneTerm, scope: Scope) -> bool:
    if term.column not in scope.names:
        return False
    kind = scope.column(term.column).type
    if kind is DataType.STRING:
        return all(isinstance(value, str) for value in term.values)
    return kind in INTEGERS and all(isinstance(v, int) and not isinstance(v, bool) for v in term.values)


def _is_bare(bound: Bound, scope: Scope) -> bool:
    return bound.column in scope.names and bound.sql == quoted(str(bound.column))


def _with_keys(scope: Scope, condition: str | None, phases: Phases, shortcut: Shortcut) -> Shortcut:
    grouping = phases.grouping
    if grouping is None or scope.null_handling:
        return shortcut
    by_sql = {quoted(name): name for name in scope.used if name in scope.names and _is_codable(scope, name)}
    keys = tuple(KeyColumn(name=name, column=by_sql.get(sql, "")) for name, sql in grouping.keys)
    if not any(key.column for key in keys):
        return shortcut
    others = [f"{sql} AS {name}" for name, sql in grouping.keys if sql not in by_sql]
    selected = [f"{quoted(GROUP_KEY)} AS {quoted(GROUP_KEY)}", *others, *grouping.partials]
    groups = ", ".join(str(number + 1) for number in range(1 + len(others)))
    sql = f"SELECT {', '.join(selected)} FROM t{where_sql(condition)} GROUP BY {groups}"
    columns = tuple(name for name in scope.used if quoted(name) in sql)
    return Shortcut(
        where=shortcut.where, exact=shortcut.exact, keys=keys, keyed_sql=sql, keyed_columns=columns,
        values_only=not grouping.partials and len(keys) == 1,
    )  # fmt: skip


def _is_codable(scope: Scope, name: str) -> bool:
    bound = scope.column(name)
    return not bound.multi and (bound.type is DataType.STRING or bound.type in INTEGERS)


__all__ = ["GROUP_KEY", "shortcut_of"]
