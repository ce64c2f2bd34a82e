# SPDX-License-Identifier: Apache-2.0
"""sqlglot's tree -> `ir.Query`. What Pinot's single-stage engine does not have is refused here, by name."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

from sqlglot import exp

from cremant.model.errors import QueryError
from cremant.model.query_codes import QueryCode
from cremant.sql.dialect import LiteralList
from cremant.sql.ir import Call, Column, Expr, Item, Literal, Order, Ordinal, Query, Star, fold_literals
from cremant.sql.javatext import java_double

#: Parts of a SELECT that are understood; any other part that is set is refused.
_PARTS = frozenset(
    {"expressions", "from_", "where", "group", "having", "order", "limit", "offset", "distinct", "kind", "hint"}
)
_PART_NAMES = {"joins": "JOIN", "with_": "WITH", "windows": "WINDOW", "laterals": "LATERAL", "qualify": "QUALIFY"}

#: Pinot counts rows in 32 bits.
_COUNT_MAX = 2**31 - 1
#: Longer numbers are not even read.
_COUNT_DIGITS_MAX = 18

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
_NEGATIONS = {"in": "not_in", "is_null": "is_not_null", "is_true": "is_not_true", "is_false": "is_not_false"}
#: Functions whose first argument is a unit of time, which may stand there as a bare word.
_UNIT_FIRST = frozenset({"dateadd", "timestampadd", "datediff", "timestampdiff", "datetrunc"})
_UNITS = frozenset({"millisecond", "second", "minute", "hour", "day", "week", "month", "quarter", "year"})
#: Aggregations of distinct values.
_OF_DISTINCT = {"count": "distinctcount", "sum": "distinctsum", "avg": "distinctavg"}


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
        group_by=tuple(to_ir.key(item) for item in group.expressions) if group else (),
        having=to_ir.expr(having.this) if having else None,
        order_by=tuple(to_ir.order(item) for item in order.expressions) if order else (),
        limit=limit,
        offset=_count(tree.args.get("offset"), "OFFSET") or 0,
    )


def lower_condition(tree: exp.Expression) -> Expr:
    """Of a condition by itself, as `parse_condition` gives it. Raises QueryError as `lower`."""
    return _Lowering(frozenset()).expr(tree)


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
    if len(value.name) > _COUNT_DIGITS_MAX or int(value.name) > _COUNT_MAX:
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
            exp.Not: self._not,
            exp.NullSafeNEQ: lambda node: self._call("isdistinctfrom", node.this, node.expression),
            exp.NullSafeEQ: lambda node: self._call("isnotdistinctfrom", node.this, node.expression),
            exp.Escape: self._escape,
            exp.Bracket: self._bracket,
            exp.Array: lambda node: self._call("array", *node.expressions),
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
        return Order(self.key(node.this), bool(node.args.get("desc")), bool(node.args.get("nulls_first")))

    def key(self, node: Any) -> Expr:
        """Of GROUP BY or ORDER BY: a written number means an item of the SELECT list, a computed one itself."""
        expr, inner = self.expr(node), node.unnest()
        if isinstance(inner.this if isinstance(inner, exp.Neg) else inner, exp.Literal) and isinstance(expr, Literal):
            return Ordinal(expr.value) if isinstance(expr.value, int) else expr
        return expr

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
            text = value.text[1:] if value.text.startswith("-") else f"-{value.text}"
            return Literal(-value.value, text, -value.exact if value.exact is not None else None)
        return Call("minus", (Literal(0, "0"), value))

    def _in(self, node: exp.In) -> Expr:
        if any(node.args.get(part) for part in ("query", "unnest", "field")):
            raise refuse("a subquery in IN", hint="run the inner query first and list its values")
        if len(node.expressions) == 1 and isinstance(node.expressions[0], LiteralList):
            values = node.expressions[0].args["values"]
            return Call("in", (self.expr(node.this), *(_literal_of(text, is_string) for text, is_string in values)))
        return Call("in", (self.expr(node.this), *(self.expr(value) for value in node.expressions)))

    def _like(self, node: exp.Like) -> Expr:
        call = self._call("like", node.this, node.expression)
        return Call("not", (call,)) if node.args.get("negate") else call

    def _escape(self, node: exp.Escape) -> Expr:
        like = self.expr(node.this)
        escape = self.expr(node.expression)
        match like:
            case Call("like", args):
                return Call("like", (*args, escape))
            case Call("not", (Call("like", args),)):
                return Call("not", (Call("like", (*args, escape)),))
        raise refuse(_describe(node), hint="ESCAPE follows LIKE")

    def _not(self, node: exp.Not) -> Expr:
        """NOT IN and IS NOT NULL have names of their own, other conditions are negated by NOT."""
        inner = self.expr(node.this)
        if isinstance(inner, Call) and inner.name in _NEGATIONS and not isinstance(node.this, exp.Paren):
            return Call(_NEGATIONS[inner.name], inner.args)
        return inner.args[0] if isinstance(inner, Call) and inner.name == "not" else Call("not", (inner,))

    def _bracket(self, node: exp.Bracket) -> Expr:
        if len(node.expressions) != 1:
            raise refuse(_describe(node))
        return self._call("item", node.this, node.expressions[0])

    def _is(self, node: exp.Is) -> Expr:
        match node.expression:
            case exp.Null():
                call = self._call("is_null", node.this)
            case exp.Boolean() as boolean:
                call = self._call("is_true" if boolean.this else "is_false", node.this)
            case _:
                raise refuse(_describe(node))
        return Call(_NEGATIONS[call.name], call.args) if node.args.get("negate") else call

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
            if name not in _OF_DISTINCT or len(inner) != 1:
                raise refuse(_describe(node), hint="DISTINCT works inside COUNT, SUM and AVG, with one argument")
            return Call(_OF_DISTINCT[name], (self.expr(inner[0]),))
        if name in _UNIT_FIRST and args and isinstance(args[0], exp.Column) and args[0].name.lower() in _UNITS:
            args = [exp.Literal.string(args[0].name.upper()), *args[1:]]
        return fold_literals(Call(name, tuple(self.expr(arg) for arg in args)))

    def _adjacent_strings(self, node: exp.Concat) -> Expr:
        raise QueryError(QueryCode.SQL_PARSING, f"SQLParsingError: two strings side by side: {node.sql()[:200]}")

    def _misplaced_alias(self, node: exp.Alias) -> Expr:
        raise QueryError(QueryCode.SQL_PARSING, f"SQLParsingError: alias {node.alias!r} inside of an expression")


def _describe(node: Any) -> str:
    return f"{node.sql()[:200]} ({type(node).__name__})" if isinstance(node, exp.Expression) else repr(node)


def _literal(node: exp.Literal) -> Expr:
    return _literal_of(node.name, node.is_string)


def _literal_of(text: str, is_string: bool) -> Literal:
    if is_string:
        return Literal(text, text)
    try:
        return Literal(int(text), text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        raise QueryError(QueryCode.SQL_PARSING, f"SQLParsingError: {text!r} is not a number") from None
    return Literal(value, java_double(value), _exact(text, value))


def _exact(text: str, value: float) -> Decimal | None:
    """What was written, if a DOUBLE does not hold it."""
    try:
        exact = Decimal(text)
    except InvalidOperation:  # an exponent of twenty digits
        return None
    return exact if exact != Decimal(repr(value)) else None
