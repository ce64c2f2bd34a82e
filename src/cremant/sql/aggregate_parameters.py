# SPDX-License-Identifier: Apache-2.0
"""The further arguments of aggregations: literals that say which percentile, how fine a sketch, which of several modes.

Each function reads a call and gives the fields that templates of aggregate_table.py name. Raises QueryError 700.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from cremant.model.schema import DataType
from cremant.sql.aggregates import Parameters, Request
from cremant.sql.bound import INTEGERS, NUMBERS, TEXTS, Bound, as_double, as_type, invalid, text_sql
from cremant.sql.ir import Call, Expr, Literal

#: What is named as a type, and Pinot's value of no rows.
_NOTHING: dict[DataType, str] = {
    DataType.INT: "-2147483648", DataType.LONG: "(-9223372036854775807 - 1)", DataType.FLOAT: "CAST('nan' AS REAL)",
    DataType.DOUBLE: "CAST('nan' AS DOUBLE)", DataType.STRING: "''", DataType.BOOLEAN: "FALSE",
}  # fmt: skip
_MODES = ("MIN", "MAX", "AVG")
_BINS_MAX = 10_000


def of_nothing(request: Request) -> Parameters:
    return Parameters()


def _literal(request: Request, index: int, what: str) -> Literal:
    arg = request.args[index]
    if not isinstance(arg, Literal) or arg.value is None:
        raise invalid(f"{request.name}: {what} must be a literal")
    return arg


def _number(request: Request, index: int, what: str, low: float, high: float) -> float:
    value = _literal(request, index, what).value
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = None
    if value is None or isinstance(value, bool) or not low <= float(value) <= high:
        text = _literal(request, index, what).text
        raise invalid(f"{request.name}: {what} must be between {low:g} and {high:g}, found {text}")
    return float(value)


def _word(request: Request, index: int, what: str) -> str:
    value = _literal(request, index, what).value
    if not isinstance(value, str):
        raise invalid(f"{request.name}: {what} must be a string literal")
    return value


def _flag(request: Request, index: int, what: str) -> bool:
    literal = _literal(request, index, what)
    if literal.text.lower() not in ("true", "false"):
        raise invalid(f"{request.name}: {what} must be true or false, found {literal.text}")
    return literal.text.lower() == "true"


def of_text(request: Request) -> Parameters:
    """MINSTRING and MAXSTRING."""
    bound = request.bind(request.args[0])
    if bound.type not in TEXTS:
        raise invalid(f"{request.name} takes a STRING, found {bound.type}", hint="use MIN or MAX for numbers")
    return Parameters()


def of_percent(size: int, scale: int = 1) -> Callable[[Request], Parameters]:
    """(x, percent[, size of the sketch]), or the percent in the name. `scale`: of that size for the library."""

    def parse(request: Request) -> Parameters:
        if request.percent is None and len(request.args) < 2:
            raise invalid(f"{request.name} takes 2 arguments, found 1", hint=f"{request.name}(column, 95)")
        if request.percent is not None:
            percent = float(request.percent)
            if len(request.args) > 1 or percent > 100:
                raise invalid(f"{request.name} takes one argument, and a percentile up to 100 in its name")
        else:
            percent = _number(request, 1, "the percentile", 0, 100)
        k = int(_number(request, 2, "the size of the sketch", 10, 65_535)) if len(request.args) > 2 else size
        return Parameters({"percent": repr(percent), "k": str(min(k * scale, 65_535))})

    return parse


def of_log2m(default: int) -> Callable[[Request], Parameters]:
    def parse(request: Request) -> Parameters:
        log2m = int(_number(request, 1, "log2m", 4, 20)) if len(request.args) > 1 else default
        return Parameters({"log2m": str(log2m)})

    return parse


def of_theta(request: Request) -> Parameters:
    """(x[, 'nominalEntries=4096'])."""
    entries = 4096
    if len(request.args) > 1:
        for part in _word(request, 1, "the parameters of the sketch").split(";"):
            key, _, value = part.partition("=")
            if key.strip().lower() != "nominalentries" or not value.strip().isdigit():
                raise invalid(
                    f"{request.name}: parameter {part.strip()!r} is not supported", hint="'nominalEntries=4096'"
                )
            entries = int(value)
        if not 16 <= entries <= 2**20 or entries & (entries - 1):
            raise invalid(f"{request.name}: nominalEntries must be a power of 2 from 16 to 1048576, found {entries}")
    return Parameters({"k": str(entries)})


def of_cpc(request: Request) -> Parameters:
    lg_k = int(_number(request, 1, "lgK", 4, 21)) if len(request.args) > 1 else 12
    return Parameters({"k": str(lg_k)})


def of_pair(request: Request) -> Parameters:
    second = request.bind(request.args[1])
    if second.multi or second.type not in NUMBERS | TEXTS | {DataType.BOOLEAN}:
        raise invalid(f"Cannot compute {request.name} for non-numeric type: {second.type}")
    return Parameters({"y": as_double(second) if second.type is not DataType.DOUBLE else second.sql})


def of_time(request: Request) -> Parameters:
    """(x, time, 'TYPE')."""
    time = request.bind(request.args[1])
    if time.multi or time.type not in INTEGERS:
        raise invalid(f"{request.name}: the time must be a whole number or TIMESTAMP, found {time.type}")
    word = _word(request, 2, "the type")
    kind = next((kind for kind in _NOTHING if kind == word.upper()), None)
    if kind is None:
        raise invalid(f"{request.name}: unknown type {word!r}", hint=", ".join(_NOTHING))
    fields = {"y": time.sql, "x": _typed(request, kind), "nothing": _NOTHING[kind]}
    return Parameters(fields, type=kind)


def _typed(request: Request, kind: DataType) -> str:
    """The first argument as `kind`."""
    bound = request.bind(request.args[0])
    if bound.multi:
        raise invalid(f"{request.name} of a multi-value column is not supported")
    if bound.type is kind or (kind is DataType.STRING and bound.type in TEXTS):
        return bound.sql
    if kind is DataType.BOOLEAN and bound.type in NUMBERS:
        return f"({bound.sql} <> 0)"
    if bound.type is DataType.BOOLEAN and kind in NUMBERS:
        return as_type(Bound(f"CAST({bound.sql} AS INT)", DataType.INT), kind)
    return as_type(bound, kind)


def of_mode(request: Request) -> Parameters:
    choice = _word(request, 1, "what to take of several modes").upper() if len(request.args) > 1 else "MIN"
    if choice not in _MODES:
        raise invalid(f"{request.name}: {choice!r} is not one of {', '.join(_MODES)}")
    return Parameters({"choice": text_sql(choice)})


def of_histogram(request: Request) -> Parameters:
    """(x, ARRAY[edges]) or (x, lower, upper, bins)."""
    match request.args[1:]:
        case (Call("arrayvalueconstructor" | "array", values),):
            edges = [_edge(request, value) for value in values]
        case (_, _, _):
            low, high = (_number(request, index, "the range", -1e308, 1e308) for index in (1, 2))
            bins = int(_number(request, 3, "the number of bins", 1, _BINS_MAX))
            edges = [low + (high - low) * index / bins for index in range(bins)] + [high]
        case _:
            raise invalid(f"{request.name} takes a column and edges", hint="(x, ARRAY[0,1,10]) or (x, 0, 1000, 10)")
    if not 2 <= len(edges) <= _BINS_MAX + 1 or any(low >= high for low, high in itertools.pairwise(edges)):
        raise invalid(f"{request.name}: edges must be at least two, each larger than the one before")
    bins = len(edges) - 1
    listed = ", ".join(f"CAST('{edge!r}' AS DOUBLE)" for edge in edges)
    zeros = ", ".join(["CAST(0 AS DOUBLE)"] * bins)
    return Parameters({"edges": f"make_array({listed})", "bins": str(bins), "zeros": f"make_array({zeros})"})


def _edge(request: Request, expr: Expr) -> float:
    if isinstance(expr, Literal):
        if isinstance(expr.value, int | float):
            return float(expr.value)
        if expr.text.lower() in ("infinity", "-infinity"):
            return float(expr.text)
    raise invalid(f"{request.name}: edges must be numbers")


_ARRAY_TYPES = {
    DataType.INT: "Int32", DataType.LONG: "Int64", DataType.FLOAT: "Float32", DataType.DOUBLE: "Float64",
    DataType.STRING: "Utf8", DataType.BOOLEAN: "Boolean", DataType.TIMESTAMP: "Int64",
}  # fmt: skip


def of_array(request: Request) -> Parameters:
    """(x, 'TYPE'[, distinct])."""
    word = _word(request, 1, "the type")
    kind = next((kind for kind in _ARRAY_TYPES if kind == word.upper()), None)
    if kind is None:
        raise invalid(f"{request.name}: unknown type {word!r}", hint=", ".join(_ARRAY_TYPES))
    distinct = len(request.args) > 2 and _flag(request, 2, "distinct")
    arrow = f"'List({_ARRAY_TYPES[kind]})'"
    gathered = f"arrow_cast({'array_distinct({0})' if distinct else '{0}'}, {arrow})"
    return Parameters({"gathered": gathered, "nothing": f"arrow_cast(make_array(), {arrow})"}, type=kind)


def of_text_list(request: Request) -> Parameters:
    """(x, separator[, distinct])."""
    bound = request.bind(request.args[0])
    if bound.type not in TEXTS:
        raise invalid(f"{request.name} takes a STRING, found {bound.type}", hint="CAST it AS STRING")
    distinct = len(request.args) > 2 and _flag(request, 2, "distinct")
    separator = text_sql(_word(request, 1, "the separator"))
    return Parameters({"gathered": "array_distinct({0})" if distinct else "{0}", "separator": separator})


def of_precision(request: Request) -> Parameters:
    """(x[, precision[, scale]])."""
    bound = request.bind(request.args[0])
    if bound.multi or bound.type not in NUMBERS | TEXTS | {DataType.BOOLEAN}:
        raise invalid(f"Cannot compute {request.name} for non-numeric type: {bound.type}")
    digits = int(_number(request, 1, "the precision", 0, 10_000)) if len(request.args) > 1 else 0
    scale = int(_number(request, 2, "the scale", -10_000, 10_000)) if len(request.args) > 2 else None
    return Parameters({"digits": str(digits), "scale": "CAST(NULL AS BIGINT)" if scale is None else f"({scale})"})
