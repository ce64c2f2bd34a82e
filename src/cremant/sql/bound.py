# SPDX-License-Identifier: Apache-2.0
"""A bound expression: DataFusion SQL text with its Pinot type, and how literals take the type of their partner.

Pinot converts the literal to the column's type, never the column to the literal's: `user_id = '7'` compares numbers,
`name = 7` compares strings, a TIMESTAMP column compares with epoch milliseconds or with a date-time text.
"""

from __future__ import annotations

import datetime
import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from cremant.model.decimals import stored_decimal
from cremant.model.errors import QueryError
from cremant.model.query_codes import QueryCode
from cremant.model.schema import DataType
from cremant.sql.ir import Literal

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
INTEGERS = frozenset({DataType.INT, DataType.LONG, DataType.TIMESTAMP})
FLOATS = frozenset({DataType.FLOAT, DataType.DOUBLE})
NUMBERS = INTEGERS | FLOATS | {DataType.BIG_DECIMAL}
#: What functions on numbers take: BOOLEAN counts as 0 and 1.
NUMERIC = NUMBERS | {DataType.BOOLEAN}
TEXTS = frozenset({DataType.STRING, DataType.JSON})

#: Types as DataFusion spells them.
SQL_TYPES: dict[DataType, str] = {
    DataType.INT: "INT",
    DataType.LONG: "BIGINT",
    DataType.FLOAT: "REAL",
    DataType.DOUBLE: "DOUBLE",
    DataType.BIG_DECIMAL: "VARCHAR",
    DataType.BOOLEAN: "BOOLEAN",
    DataType.TIMESTAMP: "BIGINT",
    DataType.STRING: "VARCHAR",
    DataType.JSON: "VARCHAR",
    DataType.BYTES: "BYTEA",
}


@dataclass(frozen=True, slots=True)
class Bound:
    """`type` None: NULL. `literal`: set if it is one. `column`: set if it is exactly that stored column.
    `multi`: a multi-value column; `type` is then the type of its elements."""

    sql: str
    type: DataType | None
    multi: bool = False
    literal: Literal | None = None
    column: str | None = None


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def text_sql(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def invalid(message: str, *, hint: str = "") -> QueryError:
    return QueryError(QueryCode.QUERY_VALIDATION, message, hint=hint)


def literal_type(literal: Literal) -> DataType | None:
    """Pinot's type of a bare literal."""
    match literal.value:
        case None:
            return None
        case bool():
            return DataType.BOOLEAN
        case int(value):
            return DataType.INT if -(2**31) <= value < 2**31 else DataType.LONG
        case str():
            return DataType.STRING
        case Decimal():
            return DataType.BIG_DECIMAL
        case _:
            return DataType.DOUBLE


def bind_literal(literal: Literal) -> Bound:
    kind = literal_type(literal)
    if kind is None:
        return Bound("NULL", None, literal=literal)
    if kind is DataType.LONG and isinstance(literal.value, int) and not INT64_MIN <= literal.value <= INT64_MAX:
        kind = DataType.BIG_DECIMAL
    return Bound(stored_sql(coerce(literal, kind), kind), kind, literal=literal)


Stored = int | float | str | bool | bytes


def coerce(literal: Literal, kind: DataType) -> Stored:
    """The stored value of a literal in a column of `kind`. Raises QueryError 700 if it has none.

    A fractional number in an integer column stays a float: the caller decides what the comparison means."""
    value = literal.value
    if value is None:
        raise invalid("NULL cannot be compared", hint="use IS NULL or IS NOT NULL")
    try:
        match kind:
            case DataType.STRING | DataType.JSON:
                return value if isinstance(value, str) else literal.text
            case DataType.BOOLEAN:
                return _boolean(value)
            case DataType.TIMESTAMP:
                return timestamp_ms(value) if isinstance(value, str) else _number(value)
            case DataType.INT | DataType.LONG:
                return _number(value)
            case DataType.FLOAT:
                number = float(value)
                return struct.unpack("f", struct.pack("f", number))[0] if abs(number) < 3.4e38 else number
            case DataType.DOUBLE:
                return float(value)
            case DataType.BIG_DECIMAL:
                return stored_decimal(literal.exact if literal.exact is not None else Decimal(str(value)))
            case DataType.BYTES:
                return bytes.fromhex(value if isinstance(value, str) else literal.text)
    except (ValueError, InvalidOperation, OverflowError) as error:
        raise invalid(f"Cannot convert value: '{literal.text}' to type: {kind}") from error


def exact(literal: Literal, kind: DataType) -> Stored:
    """As `coerce`, but always a value of the type: towards zero. Raises QueryError 700 for what does not fit."""
    value = coerce(literal, kind)
    if kind not in INTEGERS or not isinstance(value, int | float):
        return value
    low, high = integer_range(kind)
    if not low <= value <= high:
        raise invalid(f"{literal.text} is not a value of type {kind}")
    return int(value)


def integer_range(kind: DataType) -> tuple[int, int]:
    """The least and the greatest value of an integer type."""
    bits = 31 if kind is DataType.INT else 63
    return -(2**bits), 2**bits - 1


def _boolean(value: object) -> bool:
    match value:
        case bool():
            return value
        case int() | float() | Decimal():
            return value != 0
        case str(text) if text.lower() in ("true", "false", "1", "0"):
            return text.lower() in ("true", "1")
    raise ValueError(value)


def _number(value: int | float | str | Decimal) -> int | float:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
    number = float(value)
    if math.isnan(number):
        raise ValueError(value)
    return int(number) if number.is_integer() else number


_DATE_TIME = re.compile(
    r"^(\d{4}-\d{1,2}-\d{1,2})(?:[ T](\d{1,2}:\d{2}(?::\d{2}(?:\.\d{1,9})?)?)(Z|[+-]\d{2}:?\d{2})?)?$"
)


def timestamp_ms(text: str) -> int:
    """Epoch milliseconds of `yyyy-MM-dd[ HH:mm[:ss[.f]]]`, ISO 8601, or a number. UTC unless it says otherwise."""
    stripped = text.strip()
    if re.fullmatch(r"[+-]?\d+", stripped):
        return int(stripped)
    match = _DATE_TIME.match(stripped)
    if match is None:
        raise ValueError(f"{text!r} is not a timestamp")
    date, time, zone = match.groups()
    year, month, day = (int(part) for part in date.split("-"))
    hour, minute, second, micros = 0, 0, 0, 0
    if time:
        parts = time.split(":")
        hour, minute = int(parts[0]), int(parts[1])
        if len(parts) == 3:
            whole, _, fraction = parts[2].partition(".")
            second, micros = int(whole), int((fraction + "000000")[:6])
    moment = datetime.datetime(year, month, day, hour, minute, second, micros, tzinfo=datetime.UTC)
    milliseconds = (moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) // datetime.timedelta(milliseconds=1)
    if zone and zone != "Z":
        sign = -1 if zone[0] == "-" else 1
        milliseconds -= sign * (int(zone[1:3]) * 60 + int(zone[-2:])) * 60_000
    return milliseconds


def stored_sql(value: Stored, kind: DataType) -> str:
    """SQL of a stored value, of exactly the type of a column of `kind` (so that the column is never cast)."""
    match value:
        case bool():
            return "TRUE" if value else "FALSE"
        case bytes():
            return f"X'{value.hex()}'"
        case str():
            return text_sql(value)
        case int() if kind in FLOATS:
            return stored_sql(float(value), kind)
        case int():
            return f"({value})" if value < 0 else str(value)
        case float():
            if not math.isfinite(value):
                name = "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
                return f"CAST('{name}' AS {SQL_TYPES[kind if kind in FLOATS else DataType.DOUBLE]})"
            text = f"CAST({value!r} AS REAL)" if kind is DataType.FLOAT else f"{value!r}"
            return f"({text})" if value < 0 else text


def as_type(bound: Bound, kind: DataType) -> str:
    """SQL of `bound` cast to `kind`; literals take the type directly."""
    if bound.literal is not None and bound.type is not None:
        return stored_sql(exact(bound.literal, kind), kind)
    if bound.type is kind:
        return bound.sql
    if kind is DataType.BIG_DECIMAL:
        return decimal_sql(bound)
    return f"CAST({bound.sql} AS {SQL_TYPES[kind]})"


def decimal_sql(bound: Bound) -> str:
    """A number as BIG_DECIMAL: the digits that one sees, as java.math.BigDecimal.valueOf takes them."""
    match bound.type:
        case DataType.DOUBLE:
            return f"fn_parse_decimal(fn_double_text({bound.sql}))"
        case DataType.FLOAT:
            return f"fn_parse_decimal(fn_float_text({bound.sql}))"
        case DataType.BOOLEAN:
            return f"CAST(CAST({bound.sql} AS INT) AS VARCHAR)"
        case DataType.STRING | DataType.JSON:
            return f"fn_parse_decimal({bound.sql})"
        case _:
            return f"CAST({bound.sql} AS VARCHAR)"


def sort_sql(bound: Bound) -> str:
    """SQL whose order is the order of the values."""
    return f"fn_decimal_key({bound.sql})" if bound.type is DataType.BIG_DECIMAL else bound.sql


def as_double(bound: Bound) -> str:
    if bound.type is DataType.BOOLEAN and bound.literal is None:
        return f"CAST(CAST({bound.sql} AS INT) AS DOUBLE)"
    return as_type(bound, DataType.DOUBLE)


_ORDER = (DataType.BOOLEAN, DataType.INT, DataType.TIMESTAMP, DataType.LONG, DataType.FLOAT, DataType.DOUBLE)


def common_type(kinds: Iterable[DataType | None]) -> DataType | None:
    """The type in which values of all `kinds` fit (branches of CASE, arguments of COALESCE). None: only NULLs."""
    present = {kind for kind in kinds if kind is not None}
    if len(present) <= 1:
        return next(iter(present), None)
    if present & TEXTS:
        if present <= TEXTS:
            return DataType.STRING
        raise invalid(f"values of types {_names(present)} do not go together", hint="CAST them to one type")
    if DataType.BYTES in present:
        raise invalid(f"values of types {_names(present)} do not go together", hint="CAST them to one type")
    if DataType.BIG_DECIMAL in present:
        return DataType.BIG_DECIMAL
    if present == {DataType.LONG, DataType.FLOAT} or present == {DataType.INT, DataType.FLOAT}:
        return DataType.DOUBLE
    return max(present, key=_ORDER.index)


def _names(kinds: Iterable[DataType]) -> str:
    return ", ".join(sorted(str(kind) for kind in kinds))
