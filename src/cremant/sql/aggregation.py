# SPDX-License-Identifier: Apache-2.0
"""Aggregations of a query: which there are, and each as SQL: partials on servers, and their merged result.

What an aggregation means is in its table (aggregate_table.py); here the templates are filled for one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cremant.model.errors import QueryError
from cremant.model.names import OFFSET
from cremant.model.query_codes import QueryCode
from cremant.model.schema import DataType
from cremant.sql.aggregates import Found, Partial, Request, argument_fields, find_aggregate
from cremant.sql.binder import Binder, Scope
from cremant.sql.bound import invalid, quoted
from cremant.sql.ir import Call, Column, Expr, Star, walk


def aggregate_calls(exprs: Sequence[Expr]) -> list[Call]:
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


@dataclass(slots=True)
class Partials:
    """Columns of the server phase beside the group keys: `p0` and so on, each once, with how it is merged."""

    columns: dict[str, tuple[str, str]] = field(default_factory=dict)

    def add(self, sql: str, merge: str) -> str:
        """The name of a partial."""
        name, _ = self.columns.setdefault(sql, (f"p{len(self.columns)}", merge))
        return name


class Aggregation:
    """One aggregation of a query: its call, taken apart and bound."""

    def __init__(self, scope: Scope, call: Call, *, grouped: bool) -> None:
        self._scope = scope
        self._grouped = grouped
        inner, condition = call, None
        if call.name == "filter":
            first, condition = call.args
            assert isinstance(first, Call)
            inner = first
        found = find_aggregate(inner.name)
        assert found is not None
        self.found: Found = found
        self._condition = Binder(scope).predicate(condition) if condition is not None else None
        self._fields: dict[str, str]
        self.type: DataType | None
        self._multi = False
        self._bind(inner)

    def _bind(self, inner: Call) -> None:
        aggregate, scope = self.found.aggregate, self._scope
        _check_arity(inner, aggregate.arity)
        if any(has_aggregate(arg) for arg in inner.args):
            raise QueryError(QueryCode.SQL_PARSING, f"SQLParsingError: an aggregation inside of {inner.name}")
        counts = "count" in aggregate.names and not self.found.lists_only
        if isinstance(inner.args[0], Star) or (counts and not scope.null_handling):
            if not counts:
                raise QueryError(QueryCode.SQL_PARSING, f"SQLParsingError: {inner.name} does not take '*'")
            if not isinstance(inner.args[0], Star):
                Binder(scope).expr(inner.args[0])
            self.type = aggregate.type
            self._fields = {"count": f"count(*){_suffix([self._condition])}"}
            return
        bound = Binder(scope).expr(inner.args[0])
        request = Request(inner.name, inner.args, Binder(scope).expr, self.found.percent)
        given = aggregate.parameters(request)
        self._multi = bound.multi and not counts
        may_be_null = scope.null_handling or bound.column is None
        fields = argument_fields(
            inner.name, self.found, replace(bound, multi=self._multi), may_be_null, self._condition
        )
        fields |= given.fields
        if "hashes" in _names_of(aggregate.partials):
            fields["hashes"] = self._hashes(fields)
        if "{offset}" in _names_of(aggregate.partials):
            scope.used[OFFSET] = None
        if "y" in fields:
            may_be_null |= not isinstance(inner.args[1], Column)
            nulls = [f"{fields[name]} IS NOT NULL" for name in ("x", "y")] if may_be_null else []
            fields |= {"both": _suffix([self._condition, *nulls]), "offset": quoted(OFFSET)}
        self._fields = fields
        self.type = given.type or aggregate.type or bound.type

    def _hashes(self, fields: dict[str, str]) -> str:
        if self._multi:
            return f"agg_hashes_{fields['kind']}({fields['list']})"
        return f"array_agg(agg_hash_{fields['kind']}({fields['x']})){fields['filled']}"

    @property
    def element(self) -> str | None:
        """What a distinct aggregation collects of each row; None: it is none, or collects several of a row."""
        template = self.found.aggregate.element
        if template is None or self._multi:
            return None
        sql = template.format_map(self._fields)
        return sql if self._condition is None else f"CASE WHEN {self._condition} THEN {sql} END"

    @property
    def collects_lists(self) -> bool:
        aggregate = self.found.aggregate
        return aggregate.bulky or (aggregate.distinct and self._multi)

    def finished(self, partials: Partials, *, keyed: bool) -> str:
        """SQL of the result over `partials`. `keyed`: the distinct element is a key of the server phase."""
        aggregate = self.found.aggregate
        final = self._distinct_final(partials, keyed=keyed) if aggregate.distinct else self._merged_final(partials)
        keeps_empty = aggregate.empty is not None and (not self._scope.null_handling or aggregate.never_null)
        if not keeps_empty or aggregate.empty is None:
            return final
        return f"COALESCE({final}, {aggregate.empty.format_map(self._fields)})"

    def _merged_final(self, partials: Partials) -> str:
        aggregate = self.found.aggregate
        names = [partials.add(self._server(part).format_map(self._fields), part.merge) for part in aggregate.partials]
        siblings = {f"p{index}": name for index, name in enumerate(names)}
        merged = [
            part.merge.format_map({**self._fields, **siblings, "p": name})
            for part, name in zip(aggregate.partials, names, strict=True)
        ]
        gathered = self._fields.get("gathered", "").format(*merged)
        return aggregate.final.format(*merged, **{**self._fields, "gathered": gathered})

    def _server(self, partial: Partial) -> str:
        return partial.ungrouped if partial.ungrouped and not self._grouped and not self._multi else partial.server

    def _distinct_final(self, partials: Partials, *, keyed: bool) -> str:
        aggregate, fields = self.found.aggregate, self._fields
        if keyed and aggregate.keyed is not None:
            return aggregate.keyed.format_map({**fields, "d": "d0"})
        if keyed:
            # Kernels do not mind what several servers have seen: uniting without DISTINCT is many times faster.
            united = "array_agg(d0) FILTER (WHERE d0 IS NOT NULL)"
        else:
            name = self._set(partials)
            united = f"flatten(array_agg({name}) FILTER (WHERE {name} IS NOT NULL))"
        return aggregate.final.format_map({**fields, "set": united, "unique": _unique(fields["kind"], united)})

    def _set(self, partials: Partials) -> str:
        """The partial with the distinct elements. DataFusion's DISTINCT is quick and holds only them, but for groups,
        where it is a hash table each: there our kernels take lists of all values."""
        fields, template = self._fields, self.found.aggregate.element
        assert template is not None
        if not self._multi and not self._grouped:
            return partials.add(f"array_agg(DISTINCT {template.format_map(fields)}){fields['filled']}", "")
        unique = {"unique_list": _unique(fields["kind"], fields["list"])}
        return partials.add(self.found.aggregate.elements.format_map({**fields, **unique}), "")


def _unique(kind: str, lists: str) -> str:
    return f"agg_distinct_{kind}({lists})" if kind else f"array_distinct({lists})"


def distinct_key(aggregations: Sequence[Aggregation]) -> str | None:
    """The one element that may be a group key of the server phase."""
    if any(one.collects_lists for one in aggregations):
        return None
    elements = dict.fromkeys(one.element for one in aggregations if one.found.aggregate.distinct)
    return next(iter(elements)) if len(elements) == 1 else None


def _check_arity(inner: Call, arity: tuple[int, int]) -> None:
    least, most = arity
    if not least <= len(inner.args) <= most:
        expected = f"{least} argument{'s' if least > 1 else ''}" if least == most else f"{least} to {most} arguments"
        raise invalid(f"{inner.name} takes {expected}, found {len(inner.args)}")


def _suffix(conditions: Sequence[str | None]) -> str:
    present = [condition for condition in conditions if condition]
    return f" FILTER (WHERE {' AND '.join(present)})" if present else ""


def _names_of(partials: Sequence[Partial]) -> str:
    return " ".join(partial.server for partial in partials)
