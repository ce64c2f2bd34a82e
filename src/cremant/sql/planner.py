# SPDX-License-Identifier: Apache-2.0
"""Text -> Plan. `plan_query` is pure; `Planner` remembers parsed texts and plans (bounded, least recently used out).

A plan is remembered under text, options that change its meaning, and the table's incarnation and version. Plans that
depend on the time (`now()`, `ago()`) are made anew for each query: the time is folded once, here. Texts that differ in
their literals only are parsed once (shapes.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from cremant.model.errors import QueryError
from cremant.model.limits import DEFAULT_LIMIT, PLANS_CACHED_MAX
from cremant.model.names import raw_table_name
from cremant.model.query_codes import QueryCode
from cremant.model.schema import DataType
from cremant.sql import explain, two_phase
from cremant.sql.aggregates import result_name, typed
from cremant.sql.aggregation import aggregate_calls, has_aggregate
from cremant.sql.binder import Binder, Scope, TableInfo, did_you_mean, fold_times
from cremant.sql.bound import Bound
from cremant.sql.dialect import check_characters, json_options, parse, parsing_error
from cremant.sql.fold import fold_constants
from cremant.sql.ir import (
    Call,
    Column,
    Explain,
    Expr,
    Item,
    Literal,
    Order,
    Ordinal,
    Query,
    Star,
    canonical,
    substitute,
)
from cremant.sql.lower import lower
from cremant.sql.normalize import check_size, merge_equals
from cremant.sql.plan import Plan, ResultColumn, Shape
from cremant.sql.prune import prune_terms
from cremant.sql.recent import Recent
from cremant.sql.shapes import Shapes
from cremant.sql.shortcut import shortcut_of

#: Finds a table by name; raises QueryError 190 or 191.
Lookup = Callable[[str], TableInfo]


class Planner:
    """Thread-safe."""

    def __init__(self, cached_max: int = PLANS_CACHED_MAX) -> None:
        self._parsed: Recent[tuple[Query, dict[str, str]]] = Recent(cached_max)
        self._shapes = Shapes(parse_query, cached_max)
        self._plans: Recent[Plan] = Recent(cached_max)

    def plan(self, text: str, query_options: str, lookup: Lookup, now_ms: int) -> Plan:
        """Raises QueryError with Pinot's code."""
        check_characters(query_options, "queryOptions")
        parsed = self._parsed.get(text)
        if parsed is None:
            if len(text) > _CACHED_TEXT_CHARS_MAX:
                parsed = parse_query(text)
            else:
                parsed = self._shapes.parse(text)
                self._parsed.put(text, parsed)
        query, text_options = parsed
        options = merge_options(json_options(query_options), text_options)
        table = lookup(query.table) if query.table is not None else None
        key = (text, table and (table.name, table.incarnation, table.version), flag(options, "enablenullhandling"))
        plan = self._plans.get(key)
        if plan is None or plan.options != options:
            plan, lasting = plan_query(text, query, options, table, now_ms)
            if lasting and len(text) <= _CACHED_TEXT_CHARS_MAX:
                self._plans.put(key, plan)
        return plan


#: A longer text is planned each time: remembering a megabyte of IN list helps nobody.
_CACHED_TEXT_CHARS_MAX = 16 * 1024


def merge_options(weaker: dict[str, str], stronger: dict[str, str]) -> dict[str, str]:
    """Options with lower-case keys; the same key in `stronger` wins."""
    merged = {key.lower(): value for key, value in weaker.items()}
    merged.update((key.lower(), value) for key, value in stronger.items())
    return merged


def flag(options: dict[str, str], key: str) -> bool:
    return options.get(key, "").lower() in ("true", "1")


def find_table(name: str, known: Iterable[str]) -> str:
    """The raw name of the table that `name` means (type suffix and case do not matter). Raises QueryError 190."""
    if not name.upper().endswith("_OFFLINE"):
        wanted = name[: -len("_REALTIME")] if name.upper().endswith("_REALTIME") else name
        names = list(known)
        for candidate in names:
            if candidate == wanted:
                return candidate
        for candidate in names:
            if candidate.lower() == wanted.lower():
                return candidate
    raise QueryError(
        QueryCode.TABLE_DOES_NOT_EXIST, "TableDoesNotExistError", hint=did_you_mean(raw_table_name(name), known)
    )


def parse_query(text: str) -> tuple[Query, dict[str, str]]:
    try:
        statement = parse(text)
        query = replace(lower(statement.tree), explain=statement.explain)
        check_size(query)
        return query, statement.options
    except RecursionError as error:
        raise parsing_error(text, "the expressions are nested too deeply", hint="use fewer parentheses") from error


def plan_query(
    text: str, query: Query, options: dict[str, str], table: TableInfo | None, now_ms: int
) -> tuple[Plan, bool]:
    """The plan, and whether it holds for later times, too."""
    try:
        folded, volatile = _fold_query(query, now_ms)
        if table is None or _only_literals(folded):
            return _plan_literals(folded, options, table), not volatile
        return _plan_table(folded, options, table), not volatile
    except RecursionError as error:
        raise parsing_error(text, "the expressions are nested too deeply", hint="use fewer parentheses") from error


def _fold_query(query: Query, now_ms: int) -> tuple[Query, bool]:
    changed = False

    def fold(expr: Expr) -> Expr:
        nonlocal changed
        result, depends = fold_times(expr, now_ms)
        changed = changed or depends
        return result

    names = [item.alias or (None if isinstance(item.expr, Star) else canonical(item.expr)) for item in query.items]
    folded = replace(
        query,
        items=tuple(
            Item(fold(item.expr), name if fold_times(item.expr, 0)[1] else item.alias)
            for item, name in zip(query.items, names, strict=True)
        ),
        where=fold_constants(fold(query.where)) if query.where is not None else None,
        group_by=tuple(fold(key) for key in query.group_by),
        having=fold(query.having) if query.having is not None else None,
        order_by=tuple(Order(fold(order.expr), order.descending, order.nulls_first) for order in query.order_by),
    )
    return folded, changed


def _only_literals(query: Query) -> bool:
    """`SELECT 1 FROM t` is answered as `SELECT 1`, as in Pinot."""
    if query.group_by or query.having is not None or query.order_by:
        return False
    return all(isinstance(item.expr, Literal) for item in query.items)


def _plan_literals(query: Query, options: dict[str, str], table: TableInfo | None) -> Plan:
    """SELECT of literals: one row."""
    if table is None and (query.where is not None or query.group_by or query.having is not None):
        raise QueryError(QueryCode.SQL_PARSING, "SQLParsingError: WHERE, GROUP BY and HAVING need a FROM")
    bounds = tuple(Binder(Scope(None, null_handling=False)).expr(item.expr) for item in query.items)
    names = [item.alias or _literal_name(item.expr) for item in query.items]
    result = _result(names, bounds)
    columns = ", ".join(f"{bound.sql} AS c{index}" for index, bound in enumerate(bounds))
    values = [bound.literal if _is_json(bound) else None for bound in bounds]
    if query.explain is Explain.FRESHNESS:
        raise QueryError(
            QueryCode.QUERY_VALIDATION, "QueryValidationError: EXPLAIN FRESHNESS: the query reads no table",
            hint="literals are always fresh: explain a query that selects columns or aggregates",
        )  # fmt: skip
    if query.explain:
        result = explain.COLUMNS
    return Plan(
        shape=Shape.LITERAL, table=None, server_sql="", columns=(), result=result, options=options,
        reduce_sql=f"SELECT {columns} FROM partials", limit=1, offset=0,
        literals=tuple(literal.value for literal in values if literal is not None) if all(values) else (),
        explain=explain.LITERALS if query.explain else None,
    )  # fmt: skip


def _is_json(bound: Bound) -> bool:
    """Whether the literal's value is what clients see: infinite numbers and BIG_DECIMAL are shown as texts."""
    value = bound.literal.value if bound.literal is not None else None
    return bound.type is not DataType.BIG_DECIMAL and not (isinstance(value, float) and not math.isfinite(value))


def _literal_name(expr: Expr) -> str:
    return expr.text if isinstance(expr, Literal) else canonical(expr)


def _plan_table(query: Query, options: dict[str, str], table: TableInfo) -> Plan:
    scope = Scope(table, null_handling=flag(options, "enablenullhandling"))
    scope.typed_aggregates = flag(options, "autorewriteaggregationtype")
    items = _expand_star(query.items, scope)
    exprs = [_spelled(item.expr, scope) for item in items]
    names = [
        item.alias or result_name(expr) for item, expr in zip(items, exprs, strict=True)
    ]  # fmt: skip
    aliases = {item.alias: expr for item, expr in zip(items, exprs, strict=True) if item.alias is not None}
    keys = tuple(dict.fromkeys(_resolve(key, exprs, aliases, scope) for key in query.group_by))
    orders = _unique_orders(
        [Order(_resolve(o.expr, exprs, aliases, scope), o.descending, o.nulls_first) for o in query.order_by]
    )
    having = _aliased(query.having, aliases, scope) if query.having is not None else None
    where = merge_equals(_spelled(query.where, scope)) if query.where is not None else None
    limit = DEFAULT_LIMIT if query.limit is None else query.limit
    where_sql = Binder(scope).predicate(where) if where is not None else None
    shape = _shape(query, exprs, having, orders)
    match shape:
        case Shape.SELECTION:
            phases = two_phase.selection(scope, exprs, where_sql, orders, limit, query.offset)
        case Shape.DISTINCT:
            phases = two_phase.aggregation(
                scope, exprs, where_sql, tuple(dict.fromkeys(exprs)), None, orders, limit, query.offset
            )
        case _:
            phases = two_phase.aggregation(scope, exprs, where_sql, keys, having, orders, limit, query.offset)
    prune = prune_terms(where, scope)
    columns = tuple(scope.used)
    rows = None
    if query.explain is Explain.PLAN:
        aggregations = aggregate_calls([*exprs, *([having] if having is not None else [])])
        asked = explain.Asked(
            shape=shape, exprs=exprs, aggregations=aggregations, keys=keys, where=where, having=having, orders=orders,
            limit=limit, offset=query.offset,
        )  # fmt: skip
        rows = explain.explain(asked)
    shortcut = shortcut_of(
        scope, where, where_sql, phases, limit=limit + query.offset, orders=orders,
        rows=phases.results if shape is Shape.SELECTION else (),
    )  # fmt: skip
    return Plan(
        shape=shape, table=table.name, server_sql=phases.server_sql, reduce_sql=phases.reduce_sql,
        paged=phases.paged, columns=columns, limit=limit,
        result=_EXPLAINED[query.explain] if query.explain else _result(names, phases.results),
        offset=query.offset, prune=prune, shortcut=shortcut, options=options, explain=rows,
        explains_freshness=query.explain is Explain.FRESHNESS,
    )  # fmt: skip


_EXPLAINED = {Explain.PLAN: explain.COLUMNS, Explain.FRESHNESS: explain.FRESHNESS_COLUMNS}


def _shape(query: Query, exprs: list[Expr], having: Expr | None, orders: list[Order]) -> Shape:
    aggregates = any(has_aggregate(expr) for expr in exprs)
    if query.distinct:
        if aggregates or query.group_by or having is not None:
            raise QueryError(
                QueryCode.SQL_PARSING, "SQLParsingError: DISTINCT does not go with GROUP BY, HAVING or aggregations",
                hint="GROUP BY already makes each group once",
            )  # fmt: skip
        if any(order.expr not in exprs for order in orders):
            raise QueryError(
                QueryCode.SQL_PARSING, "SQLParsingError: ORDER-BY columns should be included in the DISTINCT columns"
            )
        return Shape.DISTINCT
    if query.group_by:
        return Shape.GROUP_BY
    if aggregates or having is not None or any(has_aggregate(order.expr) for order in orders):
        return Shape.AGGREGATION
    return Shape.SELECTION


def _expand_star(items: tuple[Item, ...], scope: Scope) -> list[Item]:
    """`*`: all columns of the schema, alphabetically."""
    expanded: list[Item] = []
    for item in items:
        if isinstance(item.expr, Star):
            expanded += [Item(Column(name), None) for name in sorted(scope.names)]
        else:
            expanded.append(item)
    return expanded


def _spelled(expr: Expr, scope: Scope) -> Expr:
    """Columns in their own spelling, COUNT(x) as COUNT(*) while null handling is off, typed aggregations if wanted."""
    match expr:
        case Column(name):
            return Column(scope.resolve(name))
        case Call("count", (arg,)) if not scope.null_handling and not isinstance(arg, Star):
            Binder(scope).expr(arg)
            return Call("count", (Star(),))
        case Call(name, args):
            call = Call(name, tuple(_spelled(arg, scope) for arg in args))
            return typed(call, Binder(scope).expr) if scope.typed_aggregates else call
        case _:
            return expr


def _resolve(expr: Expr, exprs: list[Expr], aliases: dict[str, Expr], scope: Scope) -> Expr:
    """An item of GROUP BY or ORDER BY: an ordinal, an alias, or an expression."""
    if isinstance(expr, Ordinal):
        if not 1 <= expr.position <= len(exprs):
            message = f"SQLParsingError: position {expr.position} is not in the SELECT list of {len(exprs)}"
            raise QueryError(QueryCode.SQL_PARSING, message)
        return exprs[expr.position - 1]
    return _aliased(expr, aliases, scope)


def _aliased(expr: Expr, aliases: dict[str, Expr], scope: Scope) -> Expr:
    replaced = substitute(expr, aliases)
    return replaced if isinstance(expr, Column) and expr.name in aliases else _spelled(replaced, scope)


def _unique_orders(orders: list[Order]) -> list[Order]:
    """The first mention of an expression decides its direction."""
    unique: dict[Expr, Order] = {}
    for order in orders:
        if not isinstance(order.expr, Literal):
            unique.setdefault(order.expr, order)
    return list(unique.values())


def _result(names: list[str], bounds: tuple[Bound, ...]) -> tuple[ResultColumn, ...]:
    return tuple(ResultColumn(name, pinot_type(bound)) for name, bound in zip(names, bounds, strict=True))


def pinot_type(bound: Bound) -> str:
    """The type that the answer names."""
    if bound.type is None:
        return "UNKNOWN"
    kind = bound.type
    if bound.multi:
        return f"{DataType.STRING if kind is DataType.JSON else kind}_ARRAY"
    return str(kind)


__all__ = ["Lookup", "Planner", "find_table", "flag", "merge_options", "parse_query", "plan_query"]
