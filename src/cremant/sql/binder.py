# SPDX-License-Identifier: Apache-2.0
"""Binds expressions against a table: names to columns, calls to functions, literals to types (bound.py).

While null handling is off (Pinot's default) a missing cell is its stored default; IS NULL is true where the table
keeps nulls and the cell was missing. With `enableNullHandling=true` missing cells are SQL NULLs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cremant.model.errors import QueryError
from cremant.model.limits import QUERY_SQL_CHARS_MAX
from cremant.model.names import (
    INGESTION_TIME,
    IS_NULL_PREFIX,
    KAFKA_OFFSET,
    OFFSET,
    PARTITION,
    SUB_ROW,
    VALID_FROM,
    VALID_UNTIL,
)
from cremant.model.query_codes import QueryCode
from cremant.model.schema import DataType, Schema
from cremant.model.upsert import UNSET_EPOCH
from cremant.sql import predicates, times
from cremant.sql.aggregates import REFUSED, aggregate_names
from cremant.sql.bound import Bound, as_type, bind_literal, common_type, invalid, literal_type, quoted
from cremant.sql.ir import Call, Column, Expr, Literal, Ordinal, Star, fold_literals
from cremant.sql.normalize import balanced
from cremant.sql.scalars import bind_scalar, placeholder, scalar_names

#: Columns that every table has beside its own; hidden from `*`.
#: `$partitionId` is Pinot's: a multi-value STRING.
PARTITION_ID = "$partitionId"
VIRTUAL_COLUMNS: dict[str, DataType] = {
    PARTITION_ID: DataType.STRING,
    "$segmentName": DataType.STRING,
    "$hostName": DataType.STRING,
    "$docId": DataType.INT,
    PARTITION: DataType.INT,
    OFFSET: DataType.LONG,
    SUB_ROW: DataType.INT,
    INGESTION_TIME: DataType.TIMESTAMP,
}
#: Upsert tables only: the epochs [from, until) in which a row was in force.
VERSION_COLUMNS: dict[str, DataType] = {VALID_FROM: DataType.LONG, VALID_UNTIL: DataType.LONG}
#: Of rows that are in force, and of rows from before their table had keys.
_UNSET = {VALID_UNTIL: str(UNSET_EPOCH), VALID_FROM: f"(-{UNSET_EPOCH} - 1)"}

_PREDICATES = frozenset(
    {*predicates.SIGNS, "and", "or", "not", "in", "not_in", "between", "like", "regexplike", "is_null", "is_not_null",
     "is_true", "is_not_true", "is_false", "is_not_false", "isdistinctfrom", "isnotdistinctfrom"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TableInfo:
    """What binding needs to know of a table. `stores_nulls`: the rows carry `$isNull.` columns. `version` and
    `incarnation` change with every change of schema or config: plans of older ones are forgotten. `upsert`: its rows
    have VERSION_COLUMNS."""

    name: str
    schema: Schema
    stores_nulls: bool = False
    incarnation: str = ""
    version: int = 1
    upsert: bool = False


class Scope:
    """The columns of one query. `used` collects, in order, the stored columns that the query reads."""

    def __init__(self, table: TableInfo | None, *, null_handling: bool) -> None:
        self._table = table
        self.null_handling = null_handling
        #: Option autoRewriteAggregationType.
        self.typed_aggregates = False
        self._cells_may_be_null = null_handling and table is not None and table.stores_nulls
        self.used: dict[str, None] = {}
        fields = table.schema.fields if table is not None else ()
        self._fields = {spec.name: spec for spec in fields}
        self._virtual = VIRTUAL_COLUMNS | (VERSION_COLUMNS if table is not None and table.upsert else {})
        also = {KAFKA_OFFSET.lower(): OFFSET} if table is not None and table.upsert else {}
        self._lower = also | {name.lower(): name for name in (*self._virtual, *self._fields)}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._fields)

    def resolve(self, name: str) -> str:
        """The column's own spelling. Raises QueryError 710."""
        if name in self._fields:
            return name
        found = self._lower.get(name.lower()) if self._table is not None else None
        if found is None:
            message = f"UnknownColumnError: Unknown columnName '{name}' found in the query"
            raise QueryError(QueryCode.UNKNOWN_COLUMN, message, hint=did_you_mean(name, self._fields))
        return found

    def column(self, name: str) -> Bound:
        name = self.resolve(name)
        if name == PARTITION_ID:
            self.used[PARTITION] = None
            return Bound(f"make_array(CAST({quoted(PARTITION)} AS VARCHAR))", DataType.STRING, multi=True)
        self.used[name] = None
        spec = self._fields.get(name)
        if spec is None:
            return Bound(self._virtual_sql(name), self._virtual[name])
        sql = quoted(name)
        if self._cells_may_be_null:
            is_null = IS_NULL_PREFIX + name
            self.used[is_null] = None
            sql = f"CASE WHEN {quoted(is_null)} THEN NULL ELSE {sql} END"
        return Bound(sql, spec.data_type, multi=not spec.single_value, column=name)

    def _virtual_sql(self, name: str) -> str:
        if name == INGESTION_TIME:
            return f"COALESCE({quoted(name)}, 0)"
        if name in VERSION_COLUMNS and self.null_handling:
            return f"NULLIF({quoted(name)}, {_UNSET[name]})"
        return quoted(name)

    def is_null(self, name: str) -> str:
        name = self.resolve(name)
        if name in VERSION_COLUMNS:  # whether or not nulls are handled: no epoch has these numbers
            self.used[name] = None
            return f"({quoted(name)} = {_UNSET[name]})"
        if self._table is None or not self._table.stores_nulls or name not in self._fields:
            return "FALSE"
        self.used[IS_NULL_PREFIX + name] = None
        return quoted(IS_NULL_PREFIX + name)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name.lower(), [candidate.lower() for candidate in known], n=1, cutoff=0.7)
    spelled = next((candidate for candidate in known if close and candidate.lower() == close[0]), None)
    return f"did you mean '{spelled}'?" if spelled else ""


class Binder:
    """`leaves`: expressions that are already computed (group keys, aggregates), by the expression they stand for.
    With `leaves`, columns on their own are errors: what is not grouped has no single value."""

    def __init__(self, scope: Scope, leaves: Mapping[Expr, Bound] | None = None) -> None:
        self._scope = scope
        self._leaves = leaves

    def expr(self, expr: Expr) -> Bound:
        if self._leaves is not None:
            known = self._leaves.get(expr)
            if known is not None:
                return known
        match expr:
            case Column(name):
                if self._leaves is not None:
                    self._scope.resolve(name)
                    message = f"SQLParsingError: '{name}' should appear in GROUP BY clause."
                    raise QueryError(QueryCode.SQL_PARSING, message, hint="group by it, or aggregate it")
                return self._scope.column(name)
            case Literal():
                return bind_literal(expr)
            case Star() | Ordinal():
                raise QueryError(QueryCode.SQL_PARSING, "SQLParsingError: '*' is only allowed in SELECT and COUNT(*)")
            case Call("case", args):
                return self._case(args)
            case Call(name, args) if name in _PREDICATES:
                return _checked(Bound(f"({self._predicate(name, args)})", DataType.BOOLEAN))
            case Call("textmatch", _):
                raise invalid(
                    "TEXT_MATCH is not supported: there is no text index", hint="REGEXP_LIKE or LIKE search texts"
                )
            case Call(name, args):
                if name not in scalar_names():  # before its arguments, which may be wrong as well
                    raise unknown_function(name)
                bound = bind_scalar(
                    name, [self.expr(arg) for arg in args], null_handling=self._scope.null_handling
                )  # fmt: skip
                assert bound is not None
                return _checked(bound)

    def predicate(self, expr: Expr) -> str:
        """SQL of a condition. Raises QueryError 700 if it is none."""
        if isinstance(expr, Call) and expr.name in _PREDICATES and not (self._leaves and expr in self._leaves):
            return self._predicate(expr.name, expr.args)
        bound = self.expr(expr)
        if bound.type is None:
            return "FALSE"
        if bound.type is not DataType.BOOLEAN or bound.multi:
            raise invalid(f"a condition must be BOOLEAN, found {bound.type}: {bound.sql[:100]}")
        return bound.sql

    def _predicate(self, name: str, args: tuple[Expr, ...]) -> str:
        match name:
            case "and" | "or":
                return balanced([self.predicate(arg) for arg in args], name.upper())
            case "not":
                return self._not(args)
            case "is_null" | "is_not_null":
                return self._null_test(args[0], negated=name == "is_not_null")
            case "is_true" | "is_not_true" | "is_false" | "is_not_false":
                return f"({self.predicate(args[0])}) {name.replace('_', ' ').upper()}"
            case "in" | "not_in":
                if len(args) < 2:
                    raise invalid("IN takes at least one value")
                values = [_bare(arg) if isinstance(arg, Literal) else self.expr(arg) for arg in args[1:]]
                return predicates.is_in(self.expr(args[0]), values, negated=name == "not_in")
        return self._test(name, [self.expr(arg) for arg in args], negated=False)

    def _test(self, name: str, bound: list[Bound], *, negated: bool) -> str:
        match name, len(bound):
            case ("between", 3):
                return predicates.between(bound[0], bound[1], bound[2], negated=negated)
            case ("like", 2 | 3):
                escape = _literal_text(bound[2]) if len(bound) == 3 else "\\"
                return predicates.like(bound[0], bound[1], negated=negated, escape=escape)
            case ("regexplike", 2 | 3):
                flags = _literal_text(bound[2]) if len(bound) == 3 else ""
                return predicates.regexp_like(bound[0], bound[1], flags)
            case ("isdistinctfrom" | "isnotdistinctfrom", 2):
                return predicates.is_distinct(bound[0], bound[1], negated=name == "isnotdistinctfrom")
            case (_, 2) if name in predicates.SIGNS:
                return predicates.compare(predicates.SIGNS[name], bound[0], bound[1])
        raise invalid(f"{name} does not take {len(bound)} arguments")

    def _not(self, args: tuple[Expr, ...]) -> str:
        if len(args) != 1:
            raise invalid(f"NOT takes 1 argument, found {len(args)}")
        match args[0]:
            case Call("between" | "like" as name, inner) if self._leaves is None or args[0] not in self._leaves:
                return self._test(name, [self.expr(arg) for arg in inner], negated=True)
        return f"NOT ({self.predicate(args[0])})"

    def _null_test(self, arg: Expr, *, negated: bool) -> str:
        known = self._leaves is not None and arg in self._leaves
        if isinstance(arg, Column) and not known:
            sql = self._scope.is_null(arg.name)
            return f"NOT ({sql})" if negated else sql
        return f"{self.expr(arg).sql} IS {'NOT ' if negated else ''}NULL"

    def _case(self, args: tuple[Expr, ...]) -> Bound:
        """CASE(when, then, when, then, ..., [else])."""
        pairs = [(self.predicate(args[i]), self.expr(args[i + 1])) for i in range(0, len(args) - 1, 2)]
        otherwise = self.expr(args[-1]) if len(args) % 2 else Bound("NULL", None)
        kind = common_type([value.type for _, value in pairs] + [otherwise.type])
        if any(value.multi for _, value in (*pairs, ("", otherwise))):
            raise invalid("CASE with a multi-value column is not supported")
        if kind is None:
            return Bound("NULL", None)
        branches = " ".join(f"WHEN {condition} THEN {self._branch(value, kind)}" for condition, value in pairs)
        return Bound(f"CASE {branches} ELSE {self._branch(otherwise, kind)} END", kind)

    def _branch(self, value: Bound, kind: DataType) -> str:
        if value.type is None:
            return "NULL" if self._scope.null_handling else as_type(placeholder(kind), kind)
        return as_type(value, kind)


def _checked(bound: Bound) -> Bound:
    """Raises QueryError 700 for SQL that has grown out of all proportion."""
    if len(bound.sql) > QUERY_SQL_CHARS_MAX:
        raise invalid("the query is too complex", hint="use fewer functions inside each other")
    return bound


def _bare(literal: Literal) -> Bound:
    """A literal of a list: its SQL depends on the type it will take."""
    return Bound("", literal_type(literal), literal=literal)


def _literal_text(bound: Bound) -> str:
    if bound.literal is None or not isinstance(bound.literal.value, str):
        raise invalid("the last argument must be a string literal")
    return bound.literal.value


def unknown_function(name: str) -> QueryError:
    if name in aggregate_names():
        message = f"SQLParsingError: aggregation {name} is not allowed here"
        return QueryError(QueryCode.SQL_PARSING, message, hint="aggregations stand in SELECT, HAVING and ORDER BY")
    hint = (
        "Pinot has it, this version does not yet"
        if name in REFUSED
        else did_you_mean(name, sorted(aggregate_names() | scalar_names()))
    )
    return invalid(f"Unsupported function: {name}", hint=hint)


def fold_times(expr: Expr, now_ms: int) -> tuple[Expr, bool]:
    """Replaces now() and ago(period) by literals, and folds arithmetic on literals that thereby appears.
    The second value says whether anything depended on the time."""
    match expr:
        case Call("now", ()):
            return Literal(now_ms, str(now_ms)), True
        case Call("ago", (Literal(str() as period),)):
            then_ms = now_ms - times.period_ms(period)
            return Literal(then_ms, str(then_ms)), True
        case Call(name, args):
            folded = [fold_times(arg, now_ms) for arg in args]
            if not any(changed for _, changed in folded):
                return expr, False
            return fold_literals(Call(name, tuple(arg for arg, _ in folded))), True
        case _:
            return expr, False
