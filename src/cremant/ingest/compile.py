# SPDX-License-Identifier: Apache-2.0
"""From a parsed expression to something that computes a column. Everything that can be wrong is found here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from cremant.ingest.evaluate import Function, Kind, Value, to_kind, unify
from cremant.ingest.expression import Call, Column, Expression, Literal, parse_expression
from cremant.ingest.functions import ALIASES, GENERAL
from cremant.ingest.functions_array import ARRAY_ALIASES, ARRAY_FUNCTIONS, BYTES_FUNCTIONS, lists_without_nulls
from cremant.ingest.functions_json import JSON_FUNCTIONS
from cremant.ingest.functions_time import TIME_ALIASES, TIME_FUNCTIONS
from cremant.ingest.metadata import check_metadata, is_metadata, natural_type
from cremant.model.errors import InvalidConfig
from cremant.model.schema import DataType, FieldSpec
from cremant.model.table import StreamConfig

FUNCTIONS: dict[str, Function] = {
    item.name: item for item in (*GENERAL, *TIME_FUNCTIONS, *JSON_FUNCTIONS, *ARRAY_FUNCTIONS, *BYTES_FUNCTIONS)
}
_ALIASES = ALIASES | TIME_ALIASES | ARRAY_ALIASES
#: Functions that take a list as they take a value.
_OF_EITHER = frozenset(("isnull", "isnotnull"))
#: A row must be the same whenever it is ingested (rule E-2).
_NOT_DETERMINISTIC = frozenset(
    ("now", "ago", "agomv", "rand", "random", "uuid", "generateuuid", "sleep", "currenttimestamp", "currentdate")
)

_KINDS: dict[DataType, Kind] = {
    DataType.INT: Kind.LONG,
    DataType.LONG: Kind.LONG,
    DataType.TIMESTAMP: Kind.LONG,
    DataType.FLOAT: Kind.DOUBLE,
    DataType.DOUBLE: Kind.DOUBLE,
    DataType.BIG_DECIMAL: Kind.DOUBLE,
    DataType.BOOLEAN: Kind.BOOLEAN,
    DataType.STRING: Kind.STRING,
    DataType.JSON: Kind.STRING,
    DataType.BYTES: Kind.BYTES,
}


class Computed(NamedTuple):
    """A compiled expression. `kind`: what it gives as far as known; `run` computes it from columns by name; `many`:
    it gives a list per row."""

    kind: Kind | None
    run: Callable[[Mapping[str, Value], int], Value]
    many: bool = False


@dataclass
class Compiler:
    """Compiles the expressions of one table. `known`: columns by name; `derived`: columns that transforms make.
    Names that are neither are collected in `undeclared`, with the kinds in which they are used, and those that are used
    as lists in `undeclared_lists`."""

    known: Mapping[str, FieldSpec]
    derived: frozenset[str]
    stream: StreamConfig
    undeclared: dict[str, set[Kind]] = field(default_factory=dict)
    undeclared_lists: set[str] = field(default_factory=set)

    def compile(self, text: str, where: str) -> tuple[Computed, frozenset[str]]:
        """The expression and the columns that it reads. Raises InvalidConfig."""
        expression = parse_expression(text, where)
        return self._any(expression, None, where), frozenset(_columns(expression))

    def _any(self, expression: Expression, wanted: Kind | None, where: str) -> Computed:
        match expression:
            case Literal(value):
                return _literal(value)
            case Column(name):
                return self._column(name, wanted, where)
            case Call():
                return self._call(expression, where)

    def _column(self, name: str, wanted: Kind | None, where: str) -> Computed:
        spec = self.known.get(name)
        kind: Kind | None = None
        if spec is not None:
            kind = _KINDS[spec.data_type]
            if not spec.single_value:
                return Computed(kind, lambda columns, count: _cells(columns[name]), many=True)
        elif name not in self.derived:
            if is_metadata(name):
                return self._metadata(name, where)
            self.undeclared.setdefault(name, set()).add(wanted or Kind.STRING)
            kind = wanted or Kind.STRING
        return Computed(kind, lambda columns, count: columns[name])

    def _metadata(self, name: str, where: str) -> Computed:
        check_metadata(name, self.stream, where)
        kind = _KINDS[natural_type(name, where)]
        self.undeclared.setdefault(name, set()).add(kind)
        return Computed(kind, lambda columns, count: columns[name])

    def _call(self, call: Call, where: str) -> Computed:
        function = _lookup(call, where)
        place = f"{where}: {call.written}"
        if not function.least <= len(call.args) <= function.most:
            wanted = str(function.least) if function.least == function.most else f"{function.least}-{function.most}"
            raise InvalidConfig(f"{place}: expected {wanted} arguments, found {len(call.args)}")
        literals = {at: _literal_value(call.args[at], at, place) for at in function.literals if at < len(call.args)}
        args = self._args(function, call, where)
        _check_lists(function, call, args, place)
        body = function.make(literals, place)
        kinds = [function.param(at) for at in range(len(args))]
        result = function.result
        kind = result if isinstance(result, Kind) else result(literals, place) if result else _unified(function, args)

        def run(columns: Mapping[str, Value], count: int) -> Value:
            values = [
                value if wanted is None else to_kind(value, wanted)
                for value, wanted in zip((arg.run(columns, count) for arg in args), kinds, strict=True)
            ]
            return body(values, count)

        return Computed(kind, run, function.many)

    def _args(self, function: Function, call: Call, where: str) -> list[Computed]:
        """Arguments of any kind are asked for in the kind that their neighbours have: `a = 5` reads a as a number."""
        first = [
            self._list(arg, where)
            if at in function.arrays and self._is_open(arg)
            else None
            if self._is_open(arg) and function.param(at) is None
            else self._any(arg, function.param(at), where)
            for at, arg in enumerate(call.args)
        ]
        known = [arg.kind for arg in first if arg is not None and arg.kind is not None]
        if function.name in ("plus", "minus", "times", "mod") and not known:
            known = [Kind.DOUBLE]
        neighbour = unify(known) if known else None
        return [
            self._any(written, neighbour, where) if arg is None else arg
            for arg, written in zip(first, call.args, strict=True)
        ]

    def _list(self, expression: Expression, where: str) -> Computed:
        """A column that the schema does not have, where a list is asked for: the message's array, as text."""
        assert isinstance(expression, Column)
        name = expression.name
        self.undeclared.setdefault(name, set()).add(Kind.STRING)
        self.undeclared_lists.add(name)
        return Computed(Kind.STRING, lambda columns, count: _cells(columns[name]), many=True)

    def _is_open(self, expression: Expression) -> bool:
        return (
            isinstance(expression, Column) and expression.name not in self.known and expression.name not in self.derived
        )


def _cells(value: Value) -> Value:
    return Value(lists_without_nulls(value.array), value.failed)


def _check_lists(function: Function, call: Call, args: list[Computed], place: str) -> None:
    """Lists where the function takes lists, and nowhere else. Raises InvalidConfig."""
    for at, arg in enumerate(args):
        if arg.many and at not in function.arrays and function.name not in _OF_EITHER:
            raise InvalidConfig(
                f"{place}: argument {at + 1} is multi-value, expected one value",
                hint=f"functions of multi-value columns: {', '.join(item.name for item in ARRAY_FUNCTIONS)}",
            )
        if not arg.many and at in function.arrays:
            raise InvalidConfig(f"{place}: argument {at + 1} is one value, expected a multi-value column")


def _unified(function: Function, args: list[Computed]) -> Kind | None:
    if function.name == "case":
        args = [*args[1:-1:2], args[-1]]
    kinds = [arg.kind for arg in args if arg.kind is not None]
    return unify(kinds) if kinds else None


def _lookup(call: Call, where: str) -> Function:
    name = _ALIASES.get(call.name, call.name)
    if name in _NOT_DETERMINISTIC:
        raise InvalidConfig(
            f"{where}: {call.written} is not deterministic: a record must become the same row whenever it is read",
            hint="use a time that the message carries",
        )
    function = FUNCTIONS.get(name)
    if function is None:
        known = ", ".join(sorted(FUNCTIONS))
        raise InvalidConfig(
            f"{where}: function {call.written!r} is not supported by this version", hint=f"known: {known}"
        )
    return function


def _literal(value: str | int | float | bool | None) -> Computed:
    if value is None:
        return Computed(None, lambda columns, count: Value(pa.nulls(count)))
    kinds = {bool: Kind.BOOLEAN, int: Kind.LONG, float: Kind.DOUBLE, str: Kind.STRING}
    kind = kinds[type(value)]
    if kind is Kind.LONG and not -(2**63) <= value < 2**63:  # type: ignore[operator]
        kind, value = Kind.DOUBLE, float(value)
    scalar = pa.scalar(value, kind.arrow)
    return Computed(kind, lambda columns, count: Value(pa.repeat(scalar, count)))


def _literal_value(expression: Expression, at: int, where: str) -> Any:
    if not isinstance(expression, Literal):
        raise InvalidConfig(f"{where}: argument {at + 1} must be a literal")
    return expression.value


def _columns(expression: Expression) -> list[str]:
    match expression:
        case Column(name):
            return [name]
        case Call(_, args, _):
            return [name for arg in args for name in _columns(arg)]
        case _:
            return []
