# SPDX-License-Identifier: Apache-2.0
"""The two phases: what servers compute over their rows, what the broker computes over their answers.

Group-by (also plain aggregation and DISTINCT, which group by nothing and by everything):

    server: SELECT g0, g1, <partials p0, p1...> FROM t WHERE ... GROUP BY g0, g1
    broker: SELECT <results over g and a>
            FROM (SELECT g0, g1, <merged and finished a0, a1...> FROM partials GROUP BY g0, g1)
            WHERE <having> ORDER BY ... LIMIT ...

Rules, all exact:

- A server cuts its groups (ORDER BY + LIMIT) only if the order is by group keys alone, made total by all keys, without
  HAVING: then the first n groups of the whole are among the first n of each server, complete on each.
- One DISTINCTCOUNT: its argument becomes one more group key of the server phase; the broker counts distinct keys.
  Several: servers send lists of distinct values, the broker unites them.
- GROUP BY of a multi-value column makes one group per element: rows are unnested after the filter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cremant.model.errors import QueryError
from cremant.model.query_codes import QueryCode
from cremant.model.schema import DataType
from cremant.sql.aggregates import Aggregate, argument_sql, find_aggregate
from cremant.sql.binder import Binder, Scope
from cremant.sql.bound import Bound, invalid, quoted
from cremant.sql.ir import Call, Column, Expr, Order, Star, walk

#: Up to so many rows ORDER BY + LIMIT runs as DataFusion's TopK, which holds them all in memory several times over
#: (2 M rows of one number: 500 MB). Beyond, rows are sorted as a whole (it can spill) and cut afterwards.
TOP_ROWS_MAX = 50_000


@dataclass(frozen=True, slots=True)
class Phases:
    server_sql: str
    #: None: concatenate and slice.
    reduce_sql: str | None
    results: tuple[Bound, ...]
    #: `reduce_sql` applies limit and offset; otherwise whoever runs it slices.
    paged: bool = True


@dataclass(slots=True)
class _Partials:
    """Columns of the server phase beside the group keys: `p0` and so on, each once, with how it is merged."""

    columns: dict[str, tuple[str, str]] = field(default_factory=dict)

    def add(self, sql: str, merge: str) -> str:
        """The merged value of a partial, as SQL over `partials`."""
        name, _ = self.columns.setdefault(sql, (f"p{len(self.columns)}", merge))
        return merge.format(name)


def order_sql(orders: Sequence[tuple[str, bool, bool]]) -> str:
    if not orders:
        return ""
    return " ORDER BY " + ", ".join(
        f"{sql} {'DESC' if descending else 'ASC'} NULLS {'FIRST' if nulls_first else 'LAST'}"
        for sql, descending, nulls_first in orders
    )


def page_sql(limit: int, offset: int) -> str:
    return f" LIMIT {limit}" + (f" OFFSET {offset}" if offset else "")


def where_sql(condition: str | None) -> str:
    return f" WHERE {condition}" if condition else ""


def selection(
    scope: Scope, exprs: Sequence[Expr], where: str | None, orders: Sequence[Order], limit: int, offset: int
) -> Phases:
    """Rows as they are; servers send at most limit + offset of them, the best ones if there is an order."""
    binder = Binder(scope)
    results = tuple(binder.expr(expr) for expr in exprs)
    columns = [f"{bound.sql} AS c{index}" for index, bound in enumerate(results)]
    named = {expr: f"c{index}" for index, expr in enumerate(exprs)}
    keys = []
    for order in orders:
        if order.expr not in named:
            named[order.expr] = f"s{len(named)}"
            columns.append(f"{_sortable(binder.expr(order.expr))} AS {named[order.expr]}")
        else:
            _sortable(binder.expr(order.expr))
        keys.append((named[order.expr], order.descending, order.nulls_first))
    paged = limit + offset <= TOP_ROWS_MAX
    server_page = page_sql(limit + offset, 0) if paged or not keys else ""
    server_sql = f"SELECT {', '.join(columns)} FROM t{where_sql(where)}{order_sql(keys)}{server_page}"
    if not keys:
        return Phases(server_sql, None, results)
    outputs = ", ".join(f"c{index}" for index in range(len(results)))
    reduce_sql = f"SELECT {outputs} FROM partials{order_sql(keys)}" + (page_sql(limit, offset) if paged else "")
    return Phases(server_sql, reduce_sql, results, paged)


def _sortable(bound: Bound) -> str:
    if bound.multi:
        raise invalid("ORDER BY of a multi-value column is not supported")
    return bound.sql


def aggregation(
    scope: Scope,
    exprs: Sequence[Expr],
    where: str | None,
    keys: Sequence[Expr],
    having: Expr | None,
    orders: Sequence[Order],
    limit: int,
    offset: int,
) -> Phases:
    """Everything that groups. `keys` may be empty (one row, also for no input)."""
    rows = Binder(scope)
    key_bounds = [rows.expr(key) for key in keys]
    source, key_sqls = _source(scope, keys, key_bounds, where)
    leaves: dict[Expr, Bound] = {
        key: Bound(f"g{index}", bound.type) for index, (key, bound) in enumerate(zip(keys, key_bounds, strict=True))
    }
    calls = _aggregate_calls([*exprs, *([having] if having is not None else []), *(order.expr for order in orders)])
    distinct_args = list(dict.fromkeys(_distinct_argument(scope, call) for call in calls))
    distinct_args = [arg for arg in distinct_args if arg is not None]
    partials = _Partials()
    finals: list[str] = []
    for index, call in enumerate(calls):
        sql, kind = _finished(scope, call, partials, single_distinct=len(distinct_args) == 1)
        finals.append(f"{sql} AS a{index}")
        leaves[call] = Bound(f"a{index}", kind)

    group_names = [f"g{index}" for index in range(len(keys))]
    server_keys = [f"{sql} AS g{index}" for index, sql in enumerate(key_sqls)]
    server_groups = [str(index + 1) for index in range(len(keys))]
    if len(distinct_args) == 1:
        server_keys.append(f"{distinct_args[0]} AS d0")
        server_groups.append(str(len(server_keys)))
    columns = server_keys + [f"{sql} AS {name}" for sql, (name, _) in partials.columns.items()]
    post = Binder(scope, leaves)
    results = tuple(post.expr(expr) for expr in exprs)
    sort = [(post.expr(order.expr).sql, order.descending, order.nulls_first) for order in orders]
    paged = limit + offset <= TOP_ROWS_MAX or not keys
    by_keys = all(sql in group_names for sql, _, _ in sort)
    cut = bool(keys) and paged and having is None and not distinct_args and by_keys
    if cut:
        sort += [(name, False, False) for name in group_names if name not in {sql for sql, _, _ in sort}]
    server_sql = (
        f"SELECT {', '.join(columns) or '1 AS one'} FROM {source}"
        + (f" GROUP BY {', '.join(server_groups)}" if server_groups else "")
        + (order_sql(sort) + page_sql(limit + offset, 0) if cut else "")
    )
    merged = f"SELECT {', '.join([*group_names, *finals]) or '1 AS one'} FROM partials" + (
        f" GROUP BY {', '.join(group_names)}" if group_names else "" if finals else " LIMIT 1"
    )
    outputs = ", ".join(f"{bound.sql} AS r{index}" for index, bound in enumerate(results))
    condition = post.predicate(having) if having is not None else None
    page = page_sql(limit, offset) if paged else ""
    reduce_sql = f"SELECT {outputs} FROM ({merged}) AS merged{where_sql(condition)}{order_sql(sort)}{page}"
    return Phases(server_sql, reduce_sql, results, paged)


def _source(scope: Scope, keys: Sequence[Expr], bounds: Sequence[Bound], where: str | None) -> tuple[str, list[str]]:
    """FROM (and WHERE) of the server phase, and the SQL of the keys over it."""
    multi = [index for index, bound in enumerate(bounds) if bound.multi]
    sqls = [bound.sql for bound in bounds]
    if not multi:
        return f"t{where_sql(where)}", sqls
    if len(multi) > 1:
        raise invalid("GROUP BY of more than one multi-value column is not supported")
    for index in multi:
        if not isinstance(keys[index], Column):
            raise invalid("GROUP BY of a function of a multi-value column is not supported")
    inner = f"SELECT *, unnest({sqls[multi[0]]}) AS {quoted('$element')} FROM t{where_sql(where)}"
    sqls[multi[0]] = quoted("$element")
    return f"({inner}) AS unnested", sqls


def _aggregate_calls(exprs: Sequence[Expr]) -> list[Call]:
    """Aggregations in order of appearance, each once; the outermost FILTER belongs to its aggregation."""
    found: dict[Call, None] = {}
    for expr in exprs:
        inside: set[int] = set()
        for part in walk(expr):
            if id(part) in inside or not isinstance(part, Call) or not is_aggregate(part):
                continue
            if part.name == "filter":
                inside.add(id(part.args[0]))
            found[part] = None
    return list(found)


def is_aggregate(expr: Expr) -> bool:
    match expr:
        case Call("filter", (Call(name, _), _)):
            return find_aggregate(name) is not None
        case Call(name, _):
            return find_aggregate(name) is not None
    return False


def has_aggregate(expr: Expr) -> bool:
    return any(is_aggregate(part) for part in walk(expr))


def _split(call: Call) -> tuple[Call, Aggregate, Expr | None]:
    inner, condition = call, None
    if call.name == "filter":
        first, condition = call.args
        assert isinstance(first, Call)
        inner = first
    aggregate = find_aggregate(inner.name)
    assert aggregate is not None
    if len(inner.args) != 1:
        raise invalid(f"{inner.name} takes 1 argument, found {len(inner.args)}")
    if has_aggregate(inner.args[0]):
        raise QueryError(QueryCode.SQL_PARSING, f"SQLParsingError: an aggregation inside of {inner.name}")
    return inner, aggregate, condition


def _argument(scope: Scope, inner: Call, aggregate: Aggregate) -> str:
    """SQL of the argument. COUNT(x) counts rows while null handling is off."""
    arg = inner.args[0]
    if isinstance(arg, Star):
        if aggregate.names[0] != "count":
            raise QueryError(QueryCode.SQL_PARSING, f"SQLParsingError: {inner.name} does not take '*'")
        return "*"
    bound = Binder(scope).expr(arg)
    if aggregate.names[0] == "count" and not scope.null_handling:
        if bound.multi:
            raise invalid("count of a multi-value column is not supported", hint="COUNT(*) counts rows")
        return "*"
    return argument_sql(inner.name, aggregate, bound)


def _distinct_argument(scope: Scope, call: Call) -> str | None:
    inner, aggregate, condition = _split(call)
    if not aggregate.distinct:
        return None
    sql = _argument(scope, inner, aggregate)
    return sql if condition is None else f"CASE WHEN {Binder(scope).predicate(condition)} THEN {sql} END"


def _finished(scope: Scope, call: Call, partials: _Partials, *, single_distinct: bool) -> tuple[str, DataType]:
    """SQL of an aggregation's result over `partials`, and its type."""
    inner, aggregate, condition = _split(call)
    arg = _argument(scope, inner, aggregate)
    suffix = f" FILTER (WHERE {Binder(scope).predicate(condition)})" if condition is not None else ""
    if aggregate.distinct:
        if single_distinct:
            merged = ["count(DISTINCT d0)"]
        else:
            value = _distinct_argument(scope, call)
            partial = f"array_agg(DISTINCT {value}) FILTER (WHERE {value} IS NOT NULL)"
            merged = [partials.add(partial, "cardinality(array_distinct(flatten(array_agg({0}))))")]
    else:
        merged = [
            partials.add(partial.server.format(x=arg) + suffix, f"{partial.merge}({{0}})")
            for partial in aggregate.partials
        ]
    final = aggregate.final.format(*merged)
    keeps_empty = aggregate.empty is not None and (not scope.null_handling or aggregate.names[0] in _NEVER_NULL)
    return (f"COALESCE({final}, {aggregate.empty})" if keeps_empty else final), aggregate.type


_NEVER_NULL = frozenset({"count", "distinctcount"})
