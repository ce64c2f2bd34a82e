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
- One distinct aggregation: its element (the argument, or a coupon of it) becomes one more group key of the server
  phase; the broker counts distinct keys. Several, or beside lists of all values: servers send lists of distinct
  elements, the broker unites them.
- GROUP BY of a multi-value column makes one group per element: rows are unnested after the filter; of several, one
  group per combination of their elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cremant.sql.aggregation import Aggregation, Partials, aggregate_calls, distinct_key
from cremant.sql.binder import Binder, Scope
from cremant.sql.bound import Bound, invalid, quoted, sort_sql
from cremant.sql.ir import Call, Expr, Order
from cremant.sql.visible_casts import may_collide, visible

#: What to sort by: SQL, descending, NULLs first.
Sort = tuple[str, bool, bool]

#: Up to so many rows ORDER BY + LIMIT runs as DataFusion's TopK, which holds them all in memory several times over
#: (2 M rows of one number: 500 MB). Beyond, rows are sorted as a whole (it can spill) and cut afterwards.
TOP_ROWS_MAX = 50_000


@dataclass(frozen=True, slots=True)
class Grouping:
    """How `server_sql` groups: its keys (name, SQL over a row) and its partial columns as they stand in the text."""

    keys: tuple[tuple[str, str], ...]
    partials: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Phases:
    server_sql: str
    #: None: concatenate and slice.
    reduce_sql: str | None
    results: tuple[Bound, ...]
    #: `reduce_sql` applies limit and offset; otherwise whoever runs it slices.
    paged: bool = True
    #: None: the server groups by the elements of lists, or does not aggregate.
    grouping: Grouping | None = None


def order_sql(orders: Sequence[Sort]) -> str:
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
        bound = binder.expr(order.expr)
        key = _sortable(bound)
        if order.expr not in named or key != bound.sql:
            named[order.expr] = f"s{len(columns)}"
            columns.append(f"{key} AS s{len(columns)}")
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
    return sort_sql(bound)


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
    calls = aggregate_calls([*exprs, *([having] if having is not None else []), *(order.expr for order in orders)])
    groups = _groups(scope, calls, keys, where)
    post = Binder(scope, groups.leaves)
    results = tuple(post.expr(expr) for expr in exprs)
    sort = [(sort_sql(post.expr(order.expr)), order.descending, order.nulls_first) for order in orders]
    # A constant orders nothing, and engines take a bare number for a position.
    sort = [key for key in sort if not key[0].isdigit()]
    paged = limit + offset <= TOP_ROWS_MAX or not keys
    cut = ""
    if keys and paged and having is None and groups.element is None and {sql for sql, _, _ in sort} <= {*groups.names}:
        sort += [(name, False, False) for name in groups.names if name not in {sql for sql, _, _ in sort}]
        cut = order_sql(sort) + page_sql(limit + offset, 0)
    outputs = ", ".join(f"{bound.sql} AS r{index}" for index, bound in enumerate(results))
    condition = post.predicate(having) if having is not None else None
    page = page_sql(limit, offset) if paged else ""
    reduce_sql = f"SELECT {outputs} FROM ({groups.merged_sql()}) AS merged{where_sql(condition)}{order_sql(sort)}{page}"
    grouping = Grouping(groups.server_keys, groups.partials) if groups.source == f"t{where_sql(where)}" else None
    return Phases(groups.server_sql() + cut, reduce_sql, results, paged, grouping)


@dataclass(frozen=True, slots=True)
class _Groups:
    """What servers group by and compute, and what the broker merges it to."""

    #: FROM and WHERE of the server phase.
    source: str
    #: SQL of the group keys over a row; `g0`, `g1` and so on by name.
    keys: tuple[str, ...]
    #: SQL of the distinct element that is one more key of the server phase.
    element: str | None
    #: Columns of the server phase beside its keys, `... AS p0`.
    partials: tuple[str, ...]
    #: Columns that the broker makes of them, `... AS a0`.
    finals: tuple[str, ...]
    #: Keys and aggregations of the query, by the columns that hold them.
    leaves: dict[Expr, Bound]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"g{index}" for index in range(len(self.keys)))

    @property
    def server_keys(self) -> tuple[tuple[str, str], ...]:
        element = [("d0", self.element)] if self.element is not None else []
        return (*zip(self.names, self.keys, strict=True), *element)

    def server_sql(self) -> str:
        keys = self.server_keys
        columns = [*(f"{sql} AS {name}" for name, sql in keys), *self.partials]
        groups = ", ".join(str(index + 1) for index in range(len(keys)))
        return f"SELECT {', '.join(columns) or '1 AS one'} FROM {self.source}" + (f" GROUP BY {groups}" if keys else "")

    def merged_sql(self) -> str:
        groups = f" GROUP BY {', '.join(self.names)}" if self.keys else "" if self.finals else " LIMIT 1"
        return f"SELECT {', '.join([*self.names, *self.finals]) or '1 AS one'} FROM partials{groups}"


def _groups(scope: Scope, calls: Sequence[Call], keys: Sequence[Expr], where: str | None) -> _Groups:
    bounds = [Binder(scope).expr(key) for key in keys]
    source, sqls = _source(bounds, where)
    leaves: dict[Expr, Bound] = {
        key: Bound(f"g{index}", bound.type) for index, (key, bound) in enumerate(zip(keys, bounds, strict=True))
    }
    aggregations = [Aggregation(scope, call, grouped=bool(keys)) for call in calls]
    element = distinct_key(aggregations)
    partials = Partials()
    finals = []
    for index, (call, one) in enumerate(zip(calls, aggregations, strict=True)):
        finals.append(f"{one.finished(partials, keyed=element is not None)} AS a{index}")
        leaves[call] = Bound(f"a{index}", one.type, multi=one.found.aggregate.array)
    columns = list(partials.columns.items())
    if may_collide([*sqls, *([element] if element is not None else []), *partials.columns]):
        sqls, element = [visible(sql) for sql in sqls], visible(element) if element is not None else None
        columns = list({visible(sql): named for sql, named in columns}.items())
    named = tuple(f"{sql} AS {name}" for sql, (name, _) in columns)
    return _Groups(source, tuple(sqls), element, named, tuple(finals), leaves)


def _source(bounds: Sequence[Bound], where: str | None) -> tuple[str, list[str]]:
    """FROM (and WHERE) of the server phase, and the SQL of the keys over it."""
    source, condition, sqls = "t", where, []
    for index, bound in enumerate(bounds):
        if not bound.multi:
            sqls.append(bound.sql)
            continue
        element = quoted(f"$element{index}")
        inner = f"SELECT *, unnest({bound.sql}) AS {element} FROM {source}{where_sql(condition)}"
        source, condition = f"({inner}) AS unnested{index}", None
        sqls.append(element)
    return f"{source}{where_sql(condition)}", sqls
