# SPDX-License-Identifier: Apache-2.0
"""Aggregations: one row each - what a server computes, how answers are merged, what the broker makes of it.

    count(*)   server: count(*)          merge: sum          final: LONG, 0 for no rows
    sum(x)     server: sum(x)            merge: sum          final: DOUBLE, 0.0
    avg(x)     server: sum(x), count(x)  merge: sum, sum     final: DOUBLE, -Infinity

`empty` is Pinot's answer for no rows while null handling is off (on: NULL). INT sums are exact (64 bits cannot
overflow below 2^31 rows); LONG sums are DOUBLE, as in Pinot. Distinct counts are exact: see two_phase.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from cremant.model.schema import DataType
from cremant.sql.bound import NUMERIC, TEXTS, Bound, invalid

INFINITY = "CAST('inf' AS DOUBLE)"
MINUS_INFINITY = "CAST('-inf' AS DOUBLE)"


@dataclass(frozen=True, slots=True)
class Partial:
    """`server` makes it from the argument {x}; `merge` is the function that merges it over answers."""

    server: str
    merge: str


@dataclass(frozen=True, slots=True)
class Aggregate:
    """`final` makes the result from the merged partials {0}, {1}...; `distinct`: see two_phase.py."""

    names: tuple[str, ...]
    partials: tuple[Partial, ...]
    final: str
    empty: str | None
    type: DataType
    numeric: bool = True
    distinct: bool = False


COUNT = Aggregate(("count",), (Partial("count({x})", "sum"),), "CAST({0} AS BIGINT)", "0", DataType.LONG, numeric=False)

AGGREGATES: tuple[Aggregate, ...] = (
    COUNT,
    Aggregate(("sum",), (Partial("sum({x})", "sum"),), "CAST({0} AS DOUBLE)", "0.0", DataType.DOUBLE),
    Aggregate(("min",), (Partial("min({x})", "min"),), "CAST({0} AS DOUBLE)", INFINITY, DataType.DOUBLE),
    Aggregate(("max",), (Partial("max({x})", "max"),), "CAST({0} AS DOUBLE)", MINUS_INFINITY, DataType.DOUBLE),
    Aggregate(
        ("avg",),
        (Partial("sum({x})", "sum"), Partial("count({x})", "sum")),
        "CAST({0} AS DOUBLE) / CAST(NULLIF({1}, 0) AS DOUBLE)",
        MINUS_INFINITY,
        DataType.DOUBLE,
    ),
    Aggregate(
        ("minmaxrange",),
        (Partial("min({x})", "min"), Partial("max({x})", "max")),
        "CAST({1} AS DOUBLE) - CAST({0} AS DOUBLE)",
        MINUS_INFINITY,
        DataType.DOUBLE,
    ),
    Aggregate(
        ("distinctcount", "distinctcountbitmap"),
        (),
        "CAST({0} AS INT)",
        "0",
        DataType.INT,
        numeric=False,
        distinct=True,
    ),
)

_BY_NAME = {name: aggregate for aggregate in AGGREGATES for name in aggregate.names}

#: Aggregations of Pinot that this version refuses by name rather than as unknown functions.
REFUSED = frozenset(
    {
        "percentile", "percentileest", "percentiletdigest", "percentilekll", "distinctcounthll",
        "distinctcounthllplus", "mode", "sumprecision", "distinctcountrawhll", "distinctcountthetasketch",
        "segmentpartitioneddistinctcount", "distinctsum", "distinctavg", "firstwithtime", "lastwithtime", "booland",
        "boolor", "varpop", "varsamp", "stddevpop", "stddevsamp", "covarpop", "covarsamp", "histogram", "arrayagg",
        "listagg", "countmv", "summv", "minmv", "maxmv", "avgmv", "distinctcountmv", "distinctcounthllmv",
        "percentilemv", "minmaxrangemv", "skewness", "kurtosis", "exprmin", "exprmax", "idset", "funnelcount",
        "corr", "distinctcountcpcsketch", "distinctcountull"
    }
)  # fmt: skip


def aggregate_names() -> frozenset[str]:
    return frozenset(_BY_NAME)


def find_aggregate(name: str) -> Aggregate | None:
    return _BY_NAME.get(name)


def argument_sql(name: str, aggregate: Aggregate, arg: Bound) -> str:
    """SQL of the argument as the partials take it. Raises QueryError 700 for a type it cannot be."""
    if arg.multi:
        raise invalid(f"{name} of a multi-value column is not supported")
    if aggregate.distinct:
        return arg.sql
    if arg.type is DataType.BOOLEAN and aggregate.numeric:
        return f"CAST({arg.sql} AS INT)"
    if aggregate.numeric and arg.type not in NUMERIC:
        raise invalid(f"Cannot compute {name} for non-numeric type: {arg.type}", hint=_numeric_hint(arg))
    if name in ("sum", "avg") and arg.type in (DataType.LONG, DataType.TIMESTAMP, DataType.FLOAT):
        return f"CAST({arg.sql} AS DOUBLE)"
    return arg.sql


def _numeric_hint(arg: Bound) -> str:
    return "" if arg.type in TEXTS else "use a numeric column"
