# SPDX-License-Identifier: Apache-2.0
"""sqlglot's tree -> `ir.Query`. What Pinot's single-stage engine does not have is refused here, by name."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

from sqlglot import exp

from cremant.model.errors import QueryError
from cremant.model.query_codes import QueryCode
from cremant.sql.ir import Call, Column, Expr, Item, Literal, Order, Query, Star, fold_literals

#: Parts of a SELECT that are understood; any other part that is set is refused.
_PARTS = frozenset(
    {"expressions", "from_", "where", "group", "having", "order", "limit", "offset", "distinct", "kind", "hint"}
)
_PART_NAMES = {"joins": "JOIN", "with_": "WITH", "windows": "WINDOW", "laterals": "LATERAL", "qualify": "QUALIFY"}

#: Pinot counts rows in 32 bits.
_COUNT_MAX = 2**31 - 1

_BINARY: dict[type[exp.Expression], str] = {
    exp.Add: "plus",
    exp.Sub: "minus",
    exp.Mul: "times",
    exp.Div: "divide",
    exp.Mod: "mod",
    exp.EQ: "equals",
    exp.NEQ: "not_equals",
    exp.GT: "greater_than",
    exp.GTE: "greater_than_or_equal",
    exp.LT: "less_than",
    exp.LTE: "less_than_or_equal",
    exp.DPipe: "concat",
}
_NEGATIONS = {
    "in": "not_in", "like": "not_like", "between": "not_between", "is_null": "is_not_null", "equals": "not_equals",
    "is_true": "is_not_true", "is_false": "is_not_false",
}  # fmt: skip


def refuse(what: str, hint: str = "this version answers single-table SELECT queries") -> QueryError:
    return QueryError(QueryCode.QUERY_VALIDATION, f"QueryValidationError: {what} is not supported", hint=hint)


def lower(tree: exp.Expression) -> Query:
    """Raises QueryError 700 for what is not supported, 150 for what makes no sense."""
    if isinstance(tree, exp.Subquery) and not tree.args.get("alias"):
        tree = tree.this
    if not isinstance(tree, exp.Select):
        raise refuse(type(tree).__name__.upper())
    for part, value in tree.args.items():
        if value and part not in _PARTS:
            raise refuse(_PART_NAMES.get(part, part.strip("_").upper()))
    if not tree.expressions:
        raise QueryError(QueryCode.SQL_PARSING, "SQLParsingError: SELECT names no columns")
    table, qualifiers = _table(tree.args.get("from_"))
    to_ir = _Lowering(qualifiers)
    distinct = tree.args.get("distinct")
    if distinct is not None and distinct.args.get("on"):
        raise refuse("DISTINCT ON")
    group = tree.args.get("group")
    if group is not None and any(value for part, value in group.args.items() if part != "expressions"):
        raise refuse("GROUP BY with ROLLUP, CUBE, GROUPING SETS or ALL")
    where, having, order = tree.args.get("where"), tree.args.get("having"), tree.args.get("order")
    limit = _count(tree.args.get("limit"), "LIMIT")
    return Query(
        items=tuple(to_ir.item(item) for item in tree.expressions),
        distinct=distinct is not None,
        table=table,
        where=to_ir.expr(where.this) if where else None,
        group_by=tuple(to_ir.expr(item) for item in group.expressions) if group else (),
        having=to_ir.expr(having.this) if having else None,
        order_by=tuple(to_ir.order(item) for item in order.expressions) if order else (),
        limit=limit,
        offset=_count(tree.args.get("offset"), "OFFSET") or 0,
    )


def _table(source: Any) -> tuple[str | None, frozenset[str]]:
    """Name of the table and the qualifiers under which its columns may be named."""
    if source is None:
        return None, frozenset()
    table = source.this
    if not isinstance(table, exp.Table) or not isinstance(table.this, exp.Identifier):
        raise refuse("a subquery in FROM")
    if table.args.get("joins"):
        raise refuse("JOIN")
    database = table.args.get("db")
    if database is not None and database.name.lower() != "default":
        raise refuse(f"database {database.name!r}", hint="there is only the default database")
    alias = table.args.get("alias")
    names = {table.name, *([alias.name] if alias is not None else [])}
    return table.name, frozenset(name.lower() for name in names)


def _count(node: Any, what: str) -> int | None:
    if node is None:
        return None
    value = node.args.get("expression")
    if not isinstance(value, exp.Literal) or value.is_string or not value.name.isdigit():
        found = node.sql() if hasattr(node, "sql") else node
        raise QueryError(QueryCode.SQL_PARSING, f"SQLParsingError: {what} takes a whole number, found {found}")
    if int(value.name) > _COUNT_MAX:
        raise refuse(f"{what} above {_COUNT_MAX}", hint="rows are counted in 32 bits")
    return int(value.name)


class _Lowering:
    def __init__(self, qualifiers: frozenset[str]) -> None:
        self._qualifiers = qualifiers
        self._special: dict[type[exp.Expression], Callable[[Any], Expr]] = {
            exp.Column: self._column,
            exp.Literal: _literal,
            exp.Boolean: lambda node: Literal(bool(node.this), "true" if node.this else "false"),
            exp.Null: lambda _: Literal(None, "null"),
            exp.Star: lambda _: Star(),
            exp.Paren: lambda node: self.expr(node.this),
            exp.Neg: self._negative,
            exp.And: lambda node: Call("and", tuple(self.expr(part) for part in node.flatten())),
            exp.Or: lambda node: Call("or", tuple(self.expr(part) for part in node.flatten())),
            exp.Not: lambda node: negate(self.expr(node.this)),
            exp.In: self._in,
            exp.Between: lambda node: self._call("between", node.this, node.args["low"], node.args["high"]),
            exp.Like: self._like,
            exp.Is: self._is,
            exp.Case: self._case,
            exp.Anonymous: self._function,
            exp.Filter: lambda node: self._call("filter", node.this, node.expression.this),
            exp.Concat: self._adjacent_strings,
            exp.Alias: self._misplaced_alias,
        }

    def item(self, node: exp.Expression) -> Item:
        if isinstance(node, exp.Alias):
            return Item(self.expr(node.this), node.alias)
        return Item(self.expr(node), None)

    def order(self, node: exp.Expression) -> Order:
        assert isinstance(node, exp.Ordered)
        return Order(self.expr(node.this), bool(node.args.get("desc")), bool(node.args.get("nulls_first")))

    def expr(self, node: Any) -> Expr:
        special = self._special.get(type(node))
        if special is not None:
            return special(node)
        name = _BINARY.get(type(node))
        if name is None:
            raise refuse(_describe(node))
        return fold_literals(Call(name, (self.expr(node.this), self.expr(node.expression))))

    def _call(self, name: str, *nodes: Any) -> Call:
        return Call(name, tuple(self.expr(node) for node in nodes))

    def _column(self, node: exp.Column) -> Expr:
        if isinstance(node.this, exp.Star):
            return Star()
        if node.args.get("db") or (node.table and node.table.lower() not in self._qualifiers):
            return Column(".".join(part.name for part in node.parts))
        return Column(node.name)

    def _negative(self, node: exp.Neg) -> Expr:
        value = self.expr(node.this)
        if isinstance(value, Literal) and isinstance(value.value, int | float | Decimal):
            return Literal(-value.value, value.text[1:] if value.text.startswith("-") else f"-{value.text}")
        return Call("minus", (Literal(0, "0"), value))

    def _in(self, node: exp.In) -> Expr:
        if any(node.args.get(part) for part in ("query", "unnest", "field")):
            raise refuse("a subquery in IN", hint="run the inner query first and list its values")
        return Call("in", (self.expr(node.this), *(self.expr(value) for value in node.expressions)))

    def _like(self, node: exp.Like) -> Expr:
        call = self._call("like", node.this, node.expression)
        return negate(call) if node.args.get("negate") else call

    def _is(self, node: exp.Is) -> Expr:
        match node.expression:
            case exp.Null():
                call = self._call("is_null", node.this)
            case exp.Boolean() as boolean:
                call = self._call("is_true" if boolean.this else "is_false", node.this)
            case _:
                raise refuse(_describe(node))
        return negate(call) if node.args.get("negate") else call

    def _case(self, node: exp.Case) -> Expr:
        subject = self.expr(node.this) if node.this else None
        args: list[Expr] = []
        for branch in node.args["ifs"]:
            condition = self.expr(branch.this)
            args.append(condition if subject is None else Call("equals", (subject, condition)))
            args.append(self.expr(branch.args["true"]))
        if node.args.get("default") is not None:
            args.append(self.expr(node.args["default"]))
        return Call("case", tuple(args))

    def _function(self, node: exp.Anonymous) -> Expr:
        name = str(node.this).lower().replace("_", "")
        args = node.expressions
        if len(args) == 1 and isinstance(args[0], exp.Distinct):
            inner = args[0].expressions
            if name != "count" or len(inner) != 1:
                raise refuse(_describe(node), hint="DISTINCT works inside COUNT, with one argument")
            return Call("distinctcount", (self.expr(inner[0]),))
        return Call(name, tuple(self.expr(arg) for arg in args))

    def _adjacent_strings(self, node: exp.Concat) -> Expr:
        raise QueryError(QueryCode.SQL_PARSING, f"SQLParsingError: two strings side by side: {node.sql()[:200]}")

    def _misplaced_alias(self, node: exp.Alias) -> Expr:
        raise QueryError(QueryCode.SQL_PARSING, f"SQLParsingError: alias {node.alias!r} inside of an expression")


def _describe(node: Any) -> str:
    return f"{node.sql()[:200]} ({type(node).__name__})" if isinstance(node, exp.Expression) else repr(node)


def _literal(node: exp.Literal) -> Expr:
    text = node.name
    if node.is_string:
        return Literal(text, text)
    try:
        return Literal(int(text), text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        raise QueryError(QueryCode.SQL_PARSING, f"SQLParsingError: {text!r} is not a number") from None
    return Literal(value, repr(value))


def negate(expr: Expr) -> Expr:
    """NOT, pushed into predicates that have a negated form of their own (`NOT a IN (1)` is `a NOT IN (1)`)."""
    if isinstance(expr, Call):
        negated = _NEGATIONS.get(expr.name)
        if negated is not None:
            return Call(negated, expr.args)
        if expr.name == "not":
            return expr.args[0]
    return Call("not", (expr,))
