# SPDX-License-Identifier: Apache-2.0
"""Aggregations: what one is made of, how a call finds its own, what Pinot calls its column. The rows themselves are in
aggregate_table.py; two_phase.py puts them into queries.

    count(*)   server: count(*)          merge: sum          final: LONG, 0 for no rows
    sum(x)     server: sum(x)            merge: sum          final: DOUBLE, 0.0
    avg(x)     server: sum(x), count(x)  merge: sum, sum     final: DOUBLE, -Infinity

Rules:

- Templates name `{x}`, the argument as `takes` wants it; `{f}`, the FILTER clause; and what differs between a column of
  single values and one of lists: `{sum}` `{min}` `{max}` `{count}` over all values, `{list}` all values as one list.
- `empty` is Pinot's answer for no rows while null handling is off (on: NULL, unless `never_null`).
- A distinct aggregation has no partials: its `element` is collected as a set; see two_phase.py.
- `*MV` names are the same rows, for lists only; plain names take both.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from cremant.model.schema import DataType
from cremant.sql.bound import INTEGERS, NUMBERS, NUMERIC, TEXTS, Bound, invalid
from cremant.sql.ir import Call, Expr, canonical


class Takes(StrEnum):
    """What the argument may be, and how it is cast."""

    ANY = "any"
    #: Numbers as they are; BOOLEAN as 0 and 1.
    NUMBER = "number"
    #: Numbers as they are; BOOLEAN as 0 and 1; text that spells numbers as DOUBLE.
    LENIENT = "lenient"
    #: Everything as DOUBLE, also text that spells numbers.
    DOUBLE = "double"
    #: BOOLEAN, or a number that is not 0.
    LOGICAL = "logical"
    #: As Pinot hashes it: whole numbers, FLOAT, DOUBLE or text.
    HASHED = "hashed"
    #: The exact number, as text.
    DECIMAL = "decimal"


@dataclass(frozen=True, slots=True)
class Partial:
    """`server` makes it from the argument; `merge` merges it ({p}) over answers. `ungrouped`, if there is one, makes it
    of single values without groups, in memory that does not grow with the rows."""

    server: str
    merge: str
    ungrouped: str = ""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What the further arguments of a call say: fields of the templates, and the result's type if they decide it."""

    fields: dict[str, str] = field(default_factory=dict)
    type: DataType | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A call as parameter parsers see it. `percent`: of a name such as percentile95."""

    name: str
    args: tuple[Expr, ...]
    bind: Callable[[Expr], Bound]
    percent: int | None = None


class Label(StrEnum):
    """How Pinot names the column: by the first argument, by all, or as `percentile(x, 95.0)`."""

    FIRST = "first"
    ALL = "all"
    PERCENT = "percent"


def no_parameters(request: Request) -> Parameters:
    return Parameters()


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """`final` makes the result from merged partials {0}, {1}..., of a distinct one from its {set} (`keyed`: from the
    distinct key {d}). `type` None: that of the argument. `array`: the result is a list of `type`."""

    names: tuple[str, ...]
    final: str
    type: DataType | None
    empty: str | None
    partials: tuple[Partial, ...] = ()
    element: str | None = None
    elements: str = ""
    keyed: str | None = None
    takes: Takes = Takes.NUMBER
    arity: tuple[int, int] = (1, 1)
    parameters: Callable[[Request], Parameters] = no_parameters
    label: Label = Label.FIRST
    array: bool = False
    never_null: bool = False
    lists: bool = True

    @property
    def distinct(self) -> bool:
        return self.element is not None

    @property
    def bulky(self) -> bool:
        """Whether its partials hold all values of a group."""
        return any(
            word in partial.server for partial in self.partials for word in ("{list}", "{hashes}", "{exact_sum}")
        )


@dataclass(frozen=True, slots=True)
class Found:
    """What a name means. `lists_only`: it was spelled ...MV."""

    aggregate: Aggregate
    percent: int | None = None
    lists_only: bool = False


_PERCENTILE = re.compile(r"(percentile(?:est|tdigest)?)(\d+)(mv)?")


@functools.cache
def _rows() -> dict[str, Found]:
    from cremant.sql.aggregate_table import AGGREGATES

    rows: dict[str, Found] = {}
    for aggregate in AGGREGATES:
        for name in aggregate.names:
            rows[name] = Found(aggregate)
            if aggregate.lists:
                rows.setdefault(f"{name}mv", Found(aggregate, lists_only=True))
    return rows


def aggregate_names() -> frozenset[str]:
    return frozenset(_rows())


def find_aggregate(name: str) -> Found | None:
    found = _rows().get(name)
    if found is None and (match := _PERCENTILE.fullmatch(name)):
        plain = _rows()[match[1] + (match[3] or "")]
        return replace(plain, percent=int(match[2]))
    return found


#: Aggregations of Pinot that this version refuses by name rather than as unknown functions.
REFUSED = frozenset(
    {
        "exprmin", "exprmax", "idset", "stunion", "timeseriesaggregate", "distinctcountrawull", "percentilerawest",
        "percentilerawtdigest", "percentilerawkll", "funnelcount", "funnelmaxstep", "funnelmatchstep",
        "funnelcompletecount", "funnelstepdurationstats", "funneleventsfunctioneval", "frequentstringssketch",
        "frequentlongssketch", "distinctcounttuplesketch", "distinctcountrawintegersumtuplesketch", "fasthll",
        "sumvaluesintegersumtuplesketch", "avgvalueintegersumtuplesketch", "sumarraylong", "sumarraydouble",
        "distinctcountrawhllplus", "fourthmoment", "percentilesmarttdigest",
    }
)  # fmt: skip


def result_name(expr: Expr) -> str:
    """The name of a result column without alias. An aggregation at the top has its own; inside of other functions
    everything has its canonical text."""
    match expr:
        case Call("filter", (Call(_, _) as inner, condition)):
            return result_name(inner) + canonical(Call("filter", (inner, condition))).removeprefix(canonical(inner))
        case Call(name, args) if args and (found := find_aggregate(name)) is not None:
            return _label(name, args, found)
    return canonical(expr)


def _label(name: str, args: tuple[Expr, ...], found: Found) -> str:
    first = canonical(args[0])
    match found.aggregate.label:
        case Label.ALL:
            return canonical(Call(name, args))
        case Label.PERCENT if found.percent is None and len(args) > 1:
            more = [_number_text(args[1])]
            if len(args) > 2 and name.startswith("percentiletdigest") and canonical(args[2]) != "'100'":
                more.append(canonical(args[2]).strip("'"))
            return f"{name}({', '.join([first, *more])})"
        case _:
            return f"{name}({first})"


def _number_text(expr: Expr) -> str:
    value = getattr(expr, "value", None)
    return repr(float(value)) if isinstance(value, int | float) else canonical(expr).strip("'")


def argument_fields(name: str, found: Found, arg: Bound, null_test: bool, condition: str | None) -> dict[str, str]:
    """What templates say of the argument. Raises QueryError 700 for a type it cannot be."""
    if found.lists_only and not arg.multi:
        raise invalid(f"{name} takes a multi-value column", hint=f"{name.removesuffix('mv')} takes single values")
    if arg.multi and not found.aggregate.lists:
        raise invalid(f"{name} of a multi-value column is not supported")
    sql, kind = _cast(name, found.aggregate.takes, arg)
    tests = [f"{sql} IS NOT NULL"] if null_test else []
    filled = _filter([*([condition] if condition else []), *tests])
    plain = _filter([condition] if condition else [])
    fields = {"x": sql, "f": plain, "filled": filled, "kind": kind}
    if arg.multi:
        return fields | {
            "sum": f"sum(array_sum({sql})){plain}",
            "min": f"min(array_min({sql})){plain}",
            "max": f"max(array_max({sql})){plain}",
            "count": f"sum(CAST(COALESCE(cardinality({sql}), 0) AS BIGINT)){plain}",
            "list": f"flatten(array_agg({sql}){_filter([*([condition] if condition else []), f'{sql} IS NOT NULL'])})",
        }
    fields |= {
        "sum": f"sum({sql}){plain}",
        "min": f"min({sql}){plain}",
        "max": f"max({sql}){plain}",
        "count": f"count({sql}){plain}",
        "list": f"array_agg({sql}){filled}",
    }
    if found.aggregate.takes is Takes.DECIMAL:
        fields["exact_sum"] = _exact_sum(arg, fields)
    return fields


def _filter(conditions: list[str]) -> str:
    return f" FILTER (WHERE {' AND '.join(conditions)})" if conditions else ""


_LISTS = {
    "long": "List(Int64)", "double": "List(Float64)", "float": "List(Float32)", "text": "List(Utf8)",
    "boolean": "List(Boolean)",
}  # fmt: skip
_HASHED = {DataType.FLOAT: "float", DataType.DOUBLE: "double", DataType.STRING: "text", DataType.JSON: "text"}
_ELEMENTS = {
    DataType.INT: "int", DataType.LONG: "long", DataType.TIMESTAMP: "long", DataType.FLOAT: "float",
    DataType.DOUBLE: "double", DataType.STRING: "text", DataType.JSON: "text", DataType.BOOLEAN: "boolean",
    DataType.BYTES: "bytes", DataType.BIG_DECIMAL: "text",
}  # fmt: skip


def _cast(name: str, takes: Takes, arg: Bound) -> tuple[str, str]:
    """(SQL of the argument, suffix of the kernels that take it)."""
    if arg.type is None:
        raise invalid(f"{name} takes a value, found NULL")
    match takes:
        case Takes.ANY:
            return arg.sql, _ELEMENTS.get(arg.type, "")
        case Takes.LENIENT if arg.type in NUMERIC:
            return _as_number(name, arg), ""
        case Takes.NUMBER:
            if arg.type not in NUMERIC:
                raise invalid(f"Cannot compute {name} for non-numeric type: {arg.type}", hint=_numeric_hint(name, arg))
            return _as_number(name, arg), ""
        case Takes.DOUBLE | Takes.LENIENT:
            return _as_double(name, arg), "double"
        case Takes.LOGICAL:
            return _as_logical(name, arg), "boolean"
        case Takes.HASHED:
            return _as_hashed(name, arg)
        case Takes.DECIMAL:
            return _as_decimal(arg), ""


def _as_number(name: str, arg: Bound) -> str:
    if arg.type is DataType.BIG_DECIMAL:
        return _as_double(name, arg)
    if arg.multi:
        return f"arrow_cast({arg.sql}, 'List(Int32)')" if arg.type is DataType.BOOLEAN else arg.sql
    if arg.type is DataType.BOOLEAN:
        return f"CAST({arg.sql} AS INT)"
    exact = name in ("min", "max", "minmaxrange", "sumint", "sumlong", "minlong", "maxlong")
    if not exact and arg.type is not DataType.INT and arg.type is not DataType.DOUBLE:
        return f"CAST({arg.sql} AS DOUBLE)"
    return arg.sql


def _as_double(name: str, arg: Bound) -> str:
    if arg.type not in NUMERIC and arg.type not in TEXTS:
        raise invalid(f"Cannot compute {name} for non-numeric type: {arg.type}")
    if arg.multi:
        via = "List(Int32)" if arg.type is DataType.BOOLEAN else ""
        sql = f"arrow_cast({arg.sql}, '{via}')" if via else arg.sql
        return sql if arg.type is DataType.DOUBLE else f"arrow_cast({sql}, 'List(Float64)')"
    if arg.type is DataType.BOOLEAN:
        return f"CAST(CAST({arg.sql} AS INT) AS DOUBLE)"
    return arg.sql if arg.type is DataType.DOUBLE else f"CAST({arg.sql} AS DOUBLE)"


def _as_logical(name: str, arg: Bound) -> str:
    if arg.type is DataType.BOOLEAN:
        return arg.sql
    if arg.type in NUMBERS:
        return f"({_as_double(name, arg) if arg.type is DataType.BIG_DECIMAL else arg.sql} <> 0)"
    raise invalid(f"{name} takes a BOOLEAN, found {arg.type}")


def _as_hashed(name: str, arg: Bound) -> tuple[str, str]:
    assert arg.type is not None
    if arg.type in (DataType.BYTES, DataType.BIG_DECIMAL):
        raise invalid(f"{name} of {arg.type} is not supported", hint="DISTINCTCOUNT is exact and takes every type")
    kind = _HASHED.get(arg.type, "long")
    if arg.multi:
        return (f"arrow_cast({arg.sql}, '{_LISTS[kind]}')" if kind == "long" else arg.sql), kind
    if kind != "long" or arg.type in (DataType.LONG, DataType.TIMESTAMP):
        return arg.sql, kind
    inner = f"CAST({arg.sql} AS INT)" if arg.type is DataType.BOOLEAN else arg.sql
    return f"CAST({inner} AS BIGINT)", kind


def _as_decimal(arg: Bound) -> str:
    """Text of the exact number; of floats the shortest one: 0.1 is then 0.1."""
    if arg.type is DataType.BIG_DECIMAL or arg.type in TEXTS:
        return arg.sql
    sql = f"CAST({arg.sql} AS INT)" if arg.type is DataType.BOOLEAN else arg.sql
    return f"CAST({sql} AS VARCHAR)"


def _exact_sum(arg: Bound, fields: dict[str, str]) -> str:
    """The exact sum as text: whole numbers are added by the engine."""
    if arg.type in INTEGERS:
        return f"CAST(sum(arrow_cast({arg.sql}, 'Decimal256(76, 0)')){fields['f']} AS VARCHAR)"
    return f"agg_decimal_sum({fields['list']})"


def _numeric_hint(name: str, arg: Bound) -> str:
    if arg.type not in TEXTS:
        return "use a numeric column"
    return f"use {name.upper()}STRING or SET autoRewriteAggregationType=true" if name in ("min", "max") else ""


_REWRITES = {
    ("min", DataType.STRING): "minstring", ("max", DataType.STRING): "maxstring", ("min", DataType.LONG): "minlong",
    ("max", DataType.LONG): "maxlong", ("sum", DataType.LONG): "sumlong", ("sum", DataType.INT): "sumint",
}  # fmt: skip


def typed(call: Call, type_of: Callable[[Expr], Bound]) -> Call:
    """Option autoRewriteAggregationType: MIN, MAX and SUM by the type of their argument."""
    match call:
        case Call(("min" | "max" | "sum") as name, (arg,)):
            bound = type_of(arg)
            if not bound.multi and bound.type is not None:
                return Call(_REWRITES.get((name, bound.type), name), (arg,))
    return call
