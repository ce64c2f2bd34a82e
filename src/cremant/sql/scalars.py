# SPDX-License-Identifier: Apache-2.0
"""Scalar functions: one row per function - names (lower case, no underscores), how many arguments, how it binds.

Adding a function is a row here. What is not here is refused by name (code 700), never approximated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cremant.model.schema import DataType
from cremant.sql import times
from cremant.sql.bound import (
    NUMBERS,
    NUMERIC,
    TEXTS,
    Bound,
    as_double,
    as_type,
    bind_literal,
    common_type,
    invalid,
)  # fmt: skip
from cremant.sql.ir import Literal

Binder = Callable[[Sequence[Bound]], Bound]


@dataclass(frozen=True, slots=True)
class Scalar:
    """`arity`: least and most arguments."""

    names: tuple[str, ...]
    arity: tuple[int, int]
    bind: Binder


def _numeric(bound: Bound, function: str) -> None:
    if bound.multi or (bound.type not in NUMERIC and bound.type is not None):
        found = f"multi-value {bound.type}" if bound.multi else bound.type
        raise invalid(f"{function} takes a number, found {found}", hint="CAST it")


def _text(bound: Bound, function: str) -> str:
    if bound.multi:
        raise invalid(f"{function} on a multi-value column is not supported")
    if bound.literal is not None:
        return as_type(bound, DataType.STRING)
    if bound.type not in TEXTS:
        raise invalid(f"{function} takes a STRING, found {bound.type}", hint="CAST it AS STRING")
    return bound.sql


def _arithmetic(name: str, sign: str) -> Binder:
    """Pinot computes in DOUBLE whatever the arguments are, or in BIG_DECIMAL if one of them is."""

    def bind(args: Sequence[Bound]) -> Bound:
        for arg in args:
            _numeric(arg, name)
        if any(arg.type is DataType.BIG_DECIMAL and arg.literal is None for arg in args):
            if sign not in "+-":
                raise invalid(f"{name} of BIG_DECIMAL is not supported", hint="CAST it AS DOUBLE")
            decimals = [as_type(arg, DataType.BIG_DECIMAL) for arg in args]
            return Bound(f"CAST(({f' {sign} '.join(decimals)}) AS DECIMAL(38, 18))", DataType.BIG_DECIMAL)
        return Bound("(" + f" {sign} ".join(as_double(arg) for arg in args) + ")", DataType.DOUBLE)

    return bind


def _double(template: str, function: str) -> Binder:
    def bind(args: Sequence[Bound]) -> Bound:
        for arg in args:
            _numeric(arg, function)
        return Bound(template.format(*(as_double(arg) for arg in args)), DataType.DOUBLE)

    return bind


def _string(template: str, function: str, kind: DataType = DataType.STRING) -> Binder:
    def bind(args: Sequence[Bound]) -> Bound:
        return Bound(template.format(*(_text(arg, function) for arg in args)), kind)

    return bind


def _whole(bound: Bound, function: str) -> int:
    value = bound.literal.value if bound.literal is not None else None
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid(f"{function} takes whole numbers as its positions")
    return value


def _substr(args: Sequence[Bound]) -> Bound:
    """SUBSTR(s, start[, end]): positions from 0, `end` is exclusive, -1 means to the end."""
    text, start = _text(args[0], "SUBSTR"), _whole(args[1], "SUBSTR")
    end = _whole(args[2], "SUBSTR") if len(args) > 2 else -1
    if start < 0 or (end != -1 and end < start):
        raise invalid(
            f"SUBSTR: range {start} to {end} is not valid", hint="positions count from 0, the end is exclusive"
        )
    if end == -1:
        return Bound(f"substr({text}, {start + 1})", DataType.STRING)
    return Bound(f"substr({text}, {start + 1}, {end - start})", DataType.STRING)


def _concat(args: Sequence[Bound]) -> Bound:
    """CONCAT(a, b[, separator])."""
    left, right = _text(args[0], "CONCAT"), _text(args[1], "CONCAT")
    middle = f" || {_text(args[2], 'CONCAT')}" if len(args) > 2 else ""
    return Bound(f"({left}{middle} || {right})", DataType.STRING)


def _pad(side: str) -> Binder:
    def bind(args: Sequence[Bound]) -> Bound:
        return Bound(
            f"{side}({_text(args[0], side)}, {_whole(args[1], side)}, {_text(args[2], side)})", DataType.STRING
        )

    return bind


def _round_decimal(args: Sequence[Bound]) -> Bound:
    digits = _whole(args[1], "ROUNDDECIMAL") if len(args) > 1 else 0
    _numeric(args[0], "ROUNDDECIMAL")
    return Bound(f"round({as_double(args[0])}, {digits})", DataType.DOUBLE)


def _extreme(name: str) -> Binder:
    def bind(args: Sequence[Bound]) -> Bound:
        kind = common_type(arg.type for arg in args)
        if kind is None or any(arg.multi for arg in args):
            raise invalid(f"{name} takes at least one value that is not NULL, and no multi-value column")
        return Bound(f"{name}({', '.join(as_type(arg, kind) for arg in args)})", kind)

    return bind


def _coalesce(args: Sequence[Bound]) -> Bound:
    kind = common_type(arg.type for arg in args)
    if any(arg.multi for arg in args):
        raise invalid("COALESCE on a multi-value column is not supported")
    if kind is None:
        return Bound("NULL", None)
    return Bound(f"COALESCE({', '.join(as_type(arg, kind) if arg.type else 'NULL' for arg in args)})", kind)


def _nullif(args: Sequence[Bound]) -> Bound:
    kind = common_type(arg.type for arg in args)
    if kind is None or any(arg.multi for arg in args):
        raise invalid("NULLIF takes two single values")
    return Bound(f"NULLIF({as_type(args[0], kind)}, {as_type(args[1], kind)})", kind)


_CAST_NAMES = {
    "INT": DataType.INT, "INTEGER": DataType.INT, "LONG": DataType.LONG, "BIGINT": DataType.LONG,
    "FLOAT": DataType.FLOAT, "REAL": DataType.FLOAT, "DOUBLE": DataType.DOUBLE, "DOUBLE PRECISION": DataType.DOUBLE,
    "BOOLEAN": DataType.BOOLEAN, "BOOL": DataType.BOOLEAN, "TIMESTAMP": DataType.TIMESTAMP,
    "STRING": DataType.STRING, "VARCHAR": DataType.STRING, "CHAR": DataType.STRING, "TEXT": DataType.STRING,
    "JSON": DataType.JSON, "BYTES": DataType.BYTES, "VARBINARY": DataType.BYTES, "BIG_DECIMAL": DataType.BIG_DECIMAL,
    "DECIMAL": DataType.BIG_DECIMAL,
}  # fmt: skip


def _cast(args: Sequence[Bound]) -> Bound:
    value, name = args[0], str(args[1].literal.value) if args[1].literal else ""
    kind = _CAST_NAMES.get(name)
    if kind is None:
        raise invalid(f"CAST: unknown type {name}", hint=", ".join(_CAST_NAMES))
    if value.multi:
        raise invalid("CAST of a multi-value column is not supported")
    if value.type is None:
        return Bound("NULL", None)
    if value.literal is not None and kind is not value.type:
        return Bound(as_type(value, kind), kind)
    if value.type is kind:
        return Bound(value.sql, kind, literal=value.literal)
    return Bound(_cast_expression(value, kind), kind)


def _cast_expression(value: Bound, kind: DataType) -> str:
    assert value.type is not None
    refusal = invalid(f"CAST of {value.type} AS {kind} is not supported")
    if value.type is DataType.BYTES or kind is DataType.BYTES:
        raise refusal
    if kind in TEXTS:
        if value.type in TEXTS:
            return value.sql
        if value.type not in (DataType.INT, DataType.LONG, DataType.BOOLEAN):
            raise refusal
    if kind is DataType.TIMESTAMP and value.type not in (DataType.INT, DataType.LONG):
        raise refusal
    if kind is DataType.BOOLEAN:
        if value.type in TEXTS:
            return f"(lower({value.sql}) IN ('true', '1'))"
        return f"({value.sql} <> 0)"
    if value.type is DataType.BOOLEAN and kind in NUMBERS:
        return as_type(Bound(f"CAST({value.sql} AS INT)", DataType.INT), kind)
    return as_type(value, kind)


def _array_length(args: Sequence[Bound]) -> Bound:
    if not args[0].multi:
        raise invalid("ARRAYLENGTH takes a multi-value column")
    return Bound(f"CAST(cardinality({args[0].sql}) AS INT)", DataType.INT)


_UNITS = ("SECONDS", "MINUTES", "HOURS", "DAYS")

SCALARS: tuple[Scalar, ...] = (
    Scalar(("plus", "add"), (2, 16), _arithmetic("plus", "+")),
    Scalar(("minus", "sub"), (2, 2), _arithmetic("minus", "-")),
    Scalar(("times", "mult"), (2, 16), _arithmetic("times", "*")),
    Scalar(("divide", "div"), (2, 2), _arithmetic("divide", "/")),
    Scalar(("mod",), (2, 2), _arithmetic("mod", "%")),
    Scalar(("abs",), (1, 1), _double("abs({0})", "ABS")),
    Scalar(("ceil", "ceiling"), (1, 1), _double("ceil({0})", "CEIL")),
    Scalar(("floor",), (1, 1), _double("floor({0})", "FLOOR")),
    Scalar(("exp",), (1, 1), _double("exp({0})", "EXP")),
    Scalar(("sqrt",), (1, 1), _double("power({0}, 0.5)", "SQRT")),
    Scalar(("power", "pow"), (2, 2), _double("power({0}, {1})", "POWER")),
    Scalar(("sign",), (1, 1), _double("signum({0})", "SIGN")),
    Scalar(("rounddecimal",), (1, 2), _round_decimal),
    Scalar(("round",), (2, 2), times.floor_to_multiple),
    Scalar(("least",), (1, 16), _extreme("least")),
    Scalar(("greatest",), (1, 16), _extreme("greatest")),
    Scalar(("upper",), (1, 1), _string("upper({0})", "UPPER")),
    Scalar(("lower",), (1, 1), _string("lower({0})", "LOWER")),
    Scalar(("length",), (1, 1), _string("CAST(length({0}) AS INT)", "LENGTH", DataType.INT)),
    Scalar(("trim",), (1, 1), _string("trim({0})", "TRIM")),
    Scalar(("ltrim",), (1, 1), _string("ltrim({0})", "LTRIM")),
    Scalar(("rtrim",), (1, 1), _string("rtrim({0})", "RTRIM")),
    Scalar(("reverse",), (1, 1), _string("reverse({0})", "REVERSE")),
    Scalar(("replace",), (3, 3), _string("replace({0}, {1}, {2})", "REPLACE")),
    Scalar(("strpos",), (2, 2), _string("CAST(strpos({0}, {1}) - 1 AS INT)", "STRPOS", DataType.INT)),
    Scalar(("startswith",), (2, 2), _string("starts_with({0}, {1})", "STARTSWITH", DataType.BOOLEAN)),
    Scalar(("endswith",), (2, 2), _string("ends_with({0}, {1})", "ENDSWITH", DataType.BOOLEAN)),
    Scalar(("contains",), (2, 2), _string("contains({0}, {1})", "CONTAINS", DataType.BOOLEAN)),
    Scalar(("lpad",), (3, 3), _pad("lpad")),
    Scalar(("rpad",), (3, 3), _pad("rpad")),
    Scalar(("substr",), (2, 3), _substr),
    Scalar(("concat",), (2, 3), _concat),
    Scalar(("coalesce",), (1, 64), _coalesce),
    Scalar(("nullif",), (2, 2), _nullif),
    Scalar(("cast",), (2, 2), _cast),
    Scalar(("arraylength", "cardinality"), (1, 1), _array_length),
    Scalar(("datetrunc",), (2, 5), times.truncate),
    Scalar(("timeconvert",), (3, 3), times.convert),
    Scalar(("extract",), (2, 2), times.extract),
    *(
        Scalar((name,), (1, 2), lambda args, name=name: times.part(name, args))  # type: ignore[misc]
        for name in times.PARTS
    ),
    *(
        Scalar((f"toepoch{unit.lower()}",), (1, 1), lambda args, unit=unit: times.to_epoch(unit, args))  # type: ignore[misc]
        for unit in _UNITS
    ),
    *(
        Scalar((f"fromepoch{unit.lower()}",), (1, 1), lambda args, unit=unit: times.from_epoch(unit, args))  # type: ignore[misc]
        for unit in _UNITS
    ),
)

_BY_NAME = {name: scalar for scalar in SCALARS for name in scalar.names}


def scalar_names() -> frozenset[str]:
    return frozenset(_BY_NAME)


def bind_scalar(name: str, args: Sequence[Bound]) -> Bound | None:
    """The bound call, or None if there is no such function. Raises QueryError 700 for wrong arguments."""
    scalar = _BY_NAME.get(name)
    if scalar is None:
        return None
    least, most = scalar.arity
    if not least <= len(args) <= most:
        expected = str(least) if least == most else f"{least} to {most}"
        raise invalid(f"{name} takes {expected} arguments, found {len(args)}")
    return scalar.bind(args)


#: What a CASE without ELSE and a bare NULL give while null handling is off: Pinot's placeholder of the type.
PLACEHOLDERS: dict[DataType, Literal] = {
    DataType.STRING: Literal("", ""),
    DataType.JSON: Literal("", ""),
    DataType.BOOLEAN: Literal(False, "false"),
    DataType.BYTES: Literal("", ""),
}


def placeholder(kind: DataType) -> Bound:
    return bind_literal(PLACEHOLDERS.get(kind, Literal(0, "0")))
