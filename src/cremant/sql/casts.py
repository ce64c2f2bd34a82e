# SPDX-License-Identifier: Apache-2.0
"""CAST among all types, and what is left of logic: COALESCE, NULLIF.

Numbers become narrower as in Java: towards zero, too large is the largest. Numbers become texts as Java writes them
(`1.0E7`). A text that is no value of the type ends the query (code 200), as in Pinot.
"""

from __future__ import annotations

from cremant.model.schema import DataType
from cremant.sql.bound import (
    FLOATS,
    INTEGERS,
    NUMBERS,
    TEXTS,
    Bound,
    as_type,
    coerce,
    common_type,
    invalid,
    stored_sql,
)
from cremant.sql.ir import Literal
from cremant.sql.scalar import Args, Scalar

_CAST_NAMES = {
    "INT": DataType.INT, "INTEGER": DataType.INT, "LONG": DataType.LONG, "BIGINT": DataType.LONG,
    "FLOAT": DataType.FLOAT, "REAL": DataType.FLOAT, "DOUBLE": DataType.DOUBLE, "DOUBLE PRECISION": DataType.DOUBLE,
    "BOOLEAN": DataType.BOOLEAN, "BOOL": DataType.BOOLEAN, "TIMESTAMP": DataType.TIMESTAMP,
    "STRING": DataType.STRING, "VARCHAR": DataType.STRING, "CHAR": DataType.STRING, "TEXT": DataType.STRING,
    "JSON": DataType.JSON, "BYTES": DataType.BYTES, "VARBINARY": DataType.BYTES, "BINARY": DataType.BYTES,
    "BIG_DECIMAL": DataType.BIG_DECIMAL, "DECIMAL": DataType.BIG_DECIMAL, "NUMERIC": DataType.BIG_DECIMAL,
}  # fmt: skip
_PARSERS = {
    DataType.INT: "fn_parse_int", DataType.LONG: "fn_parse_long", DataType.FLOAT: "fn_parse_float",
    DataType.DOUBLE: "fn_parse_double", DataType.BIG_DECIMAL: "fn_parse_decimal",
    DataType.TIMESTAMP: "fn_parse_timestamp",
}  # fmt: skip
_TEXT_KERNELS = {
    DataType.FLOAT: "fn_float_text", DataType.DOUBLE: "fn_double_text", DataType.BIG_DECIMAL: "fn_decimal_text",
    DataType.TIMESTAMP: "fn_timestamp_text", DataType.BYTES: "fn_bytes_to_hex",
}  # fmt: skip


def cast_type(name: str) -> DataType:
    """The type of a name in CAST(x AS name). Raises QueryError 700."""
    kind = _CAST_NAMES.get(name.partition("(")[0].strip())
    if kind is None:
        raise invalid(f"CAST: unknown type {name}", hint=", ".join(_CAST_NAMES))
    return kind


def _cast(args: Args) -> Bound:
    value, name = args[0], str(args[1].literal.value) if args[1].literal else ""
    kind = cast_type(name.removesuffix("_ARRAY")) if name.endswith("_ARRAY") else cast_type(name)
    if value.multi:
        return _cast_list(value, kind)
    if value.type is None:
        return Bound("NULL", None)
    if value.type is kind:
        return Bound(value.sql, kind, literal=value.literal)
    if value.literal is not None:
        return _cast_literal(value, kind)
    return Bound(_cast_expression(value, kind), kind)


def cast_to(value: Bound, kind: DataType) -> Bound:
    """CAST of a single value that is no literal."""
    return value if value.type is kind else Bound(_cast_expression(value, kind), kind)


def _cast_list(value: Bound, kind: DataType) -> Bound:
    """CAST of a multi-value column: each element."""
    assert value.type is not None
    if kind is value.type:
        return value
    names = {
        DataType.INT: "Int32", DataType.LONG: "Int64", DataType.FLOAT: "Float32", DataType.DOUBLE: "Float64",
        DataType.STRING: "Utf8",
    }  # fmt: skip
    whole = {DataType.INT, DataType.LONG}
    narrows = value.type in FLOATS | {DataType.LONG} and kind is DataType.INT
    texts = kind is DataType.STRING and value.type not in whole
    if kind not in names or value.type not in names or value.type is DataType.STRING or narrows or texts:
        raise invalid(f"CAST of a multi-value {value.type} AS {kind} is not supported")
    return Bound(f"arrow_cast({value.sql}, 'List({names[kind]})')", kind, multi=True)


def _cast_literal(value: Bound, kind: DataType) -> Bound:
    literal = value.literal
    assert literal is not None
    narrowed = (isinstance(literal.value, float) and kind in INTEGERS) or (
        value.type is DataType.LONG and kind is DataType.INT
    )
    if narrowed or (value.type is DataType.BOOLEAN and kind in NUMBERS):
        return Bound(_cast_expression(Bound(value.sql, value.type), kind), kind)
    return Bound(as_type(value, kind), kind)


def _cast_expression(value: Bound, kind: DataType) -> str:
    source = value.type
    assert source is not None
    if source is DataType.BOOLEAN:
        if kind in TEXTS:
            return f"CAST({value.sql} AS VARCHAR)"
        if kind in NUMBERS:
            return as_type(Bound(f"CAST({value.sql} AS INT)", DataType.INT), kind)
    elif source in TEXTS:
        if kind in TEXTS:
            return value.sql
        if kind is DataType.BOOLEAN:
            return f"(lower({value.sql}) IN ('true', '1'))"
        if kind is DataType.BYTES:
            return f"fn_hex_to_bytes({value.sql})"
        return f"{_PARSERS[kind]}({value.sql})"
    elif kind in TEXTS:
        kernel = _TEXT_KERNELS.get(source)
        return f"{kernel}({value.sql})" if kernel else f"CAST({value.sql} AS VARCHAR)"
    elif source in NUMBERS and kind in NUMBERS:
        return _cast_number(value, kind)
    elif source in NUMBERS and kind is DataType.BOOLEAN:
        return f"({value.sql} <> {stored_sql(coerce(Literal(0, '0'), source), source)})"
    raise invalid(f"CAST of {source} AS {kind} is not supported")


def _cast_number(value: Bound, kind: DataType) -> str:
    """Java's narrowing."""
    source = value.type
    if kind in INTEGERS and source in FLOATS | {DataType.BIG_DECIMAL}:
        if source is DataType.BIG_DECIMAL and kind is not DataType.INT:
            return f"fn_decimal_long({value.sql})"
        kernel = "fn_to_int" if kind is DataType.INT else "fn_to_long"
        return f"{kernel}(CAST({value.sql} AS DOUBLE))"
    if kind is DataType.INT and source in (DataType.LONG, DataType.TIMESTAMP):
        return f"fn_wrap_int({value.sql})"
    return as_type(value, kind)


def _coalesce(args: Args) -> Bound:
    kind = common_type(arg.type for arg in args)
    if any(arg.multi for arg in args):
        raise invalid("COALESCE on a multi-value column is not supported")
    if kind is None:
        return Bound("NULL", None)
    return Bound(f"COALESCE({', '.join(as_type(arg, kind) if arg.type else 'NULL' for arg in args)})", kind)


def _nullif(args: Args) -> Bound:
    kind = common_type(arg.type for arg in args)
    if kind is None or any(arg.multi for arg in args):
        raise invalid("NULLIF takes two single values")
    if any(arg.type is None for arg in args):
        return Bound(as_type(args[0], kind) if args[0].type else "NULL", args[0].type)
    return Bound(f"NULLIF({as_type(args[0], kind)}, {as_type(args[1], kind)})", kind)


CASTS: tuple[Scalar, ...] = (
    Scalar(("cast",), (2, 2), _cast),
    Scalar(("coalesce",), (1, 64), _coalesce),
    Scalar(("nullif",), (2, 2), _nullif),
)
