# SPDX-License-Identifier: Apache-2.0
"""One JSON value to one column type: Pinot's conversion rules, the reference that the columnar path must equal.

| to \\ from        | boolean       | number                       | text                                | object |
|------------------|---------------|------------------------------|-------------------------------------|--------|
| INT, LONG        | 1 or 0        | cut to integer, range checked| decimal integer                     | no     |
| FLOAT, DOUBLE    | 1.0 or 0.0    | nearest                      | decimal, NaN, Infinity, -Infinity   | no     |
| BIG_DECIMAL      | 1 or 0        | exact                        | decimal                             | no     |
| BOOLEAN          | itself        | not 0                        | "true" (any case) or "1", else false| no     |
| TIMESTAMP        | no            | epoch ms                     | ms, `yyyy-MM-dd HH:mm:ss[.f]`, ISO  | no     |
| STRING           | true or false | as Java prints it            | itself                              | JSON   |
| JSON             | JSON          | JSON                         | itself, taken to be JSON            | JSON   |
| BYTES            | no            | no                           | hex                                 | no     |

Arrays: nulls inside are dropped, an empty one is a missing cell, one with a single element is that element, more are
refused for single-value columns (JSON columns take an array as JSON text). A single value becomes the only element of
a multi-value cell. Texts without a zone are UTC.

Differences from Pinot, on purpose: numbers too large for INT or LONG are refused where Pinot wraps them; an object for
a STRING column is stored as JSON text where Pinot takes its single value or fails.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec

from cremant.ingest.causes import BadValue, Cause, shorten
from cremant.model.decimals import stored_decimal
from cremant.model.schema import DataType

#: What Java's String.trim removes.
JAVA_SPACE = "".join(map(chr, range(33)))

_RANGES: dict[DataType, tuple[int, int]] = {
    DataType.INT: (-(2**31), 2**31 - 1),
    DataType.LONG: (-(2**63), 2**63 - 1),
    DataType.TIMESTAMP: (-(2**63), 2**63 - 1),
}
_INTEGER = re.compile(r"[+-]?[0-9]{1,400}")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?")
_FLOAT = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?)[dDfF]?|[+-]?(?:NaN|Infinity)")
_HEX = re.compile(r"(?:[0-9a-fA-F]{2})*")
_MOMENT = re.compile(
    r"(\d{4})-(\d{1,2})-(\d{1,2})(?:[T ](\d{1,2}):(\d{2})(?::(\d{2})(?:[.,](\d{1,9}))?)?)?\s*(Z|[+-]\d{2}:?\d{2})?",
    re.ASCII,
)


def wrong_type(value: Any, data_type: DataType) -> BadValue:
    return BadValue(Cause.WRONG_TYPE, f"{shorten(value)} is not a value of type {data_type}")


def out_of_range(value: Any, data_type: DataType) -> BadValue:
    return BadValue(Cause.OUT_OF_RANGE, f"{shorten(value)} does not fit into {data_type}")


def _to_integer(data_type: DataType) -> Callable[[Any], int]:
    low, high = _RANGES[data_type]

    def convert(value: Any) -> int:
        number: int
        if type(value) is int:
            number = value
        elif isinstance(value, bool) and data_type is not DataType.TIMESTAMP:
            number = int(value)
        elif isinstance(value, (float, Decimal)):
            if not math.isfinite(value) or not -(2**64) < value < 2**64:
                raise out_of_range(value, data_type)
            number = int(value)
        elif isinstance(value, str):
            text = value.strip(JAVA_SPACE)
            if _INTEGER.fullmatch(text) is None:
                if data_type is DataType.TIMESTAMP:
                    return parse_moment_ms(text)
                raise wrong_type(value, data_type)
            number = int(text)
        else:
            raise wrong_type(value, data_type)
        if low <= number <= high:
            return number
        raise out_of_range(value, data_type)

    return convert


def parse_moment_ms(text: str) -> int:
    """Epoch ms of `yyyy-MM-dd HH:mm:ss[.f]`, of the ISO forms with T and zone, or of a date."""
    found = _MOMENT.fullmatch(text)
    if found is None:
        raise wrong_type(text, DataType.TIMESTAMP)
    year, month, day, hour, minute, second = (int(part or 0) for part in found.groups()[:6])
    try:
        moment = datetime.datetime(year, month, day, hour, minute, second, tzinfo=datetime.UTC)
    except ValueError:
        raise wrong_type(text, DataType.TIMESTAMP) from None
    elapsed = moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    ms = elapsed.days * 86_400_000 + elapsed.seconds * 1000 + int((found[7] or "0").ljust(3, "0")[:3])
    zone = found[8]
    if zone is None or zone == "Z":
        return ms
    minutes = int(zone[1:3]) * 60 + int(zone[-2:])
    return ms - (minutes if zone[0] == "+" else -minutes) * 60_000


def to_double(value: Any) -> float:
    if isinstance(value, (float, int, Decimal)):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if isinstance(value, str):
        text = value.strip(JAVA_SPACE)
        found = _FLOAT.fullmatch(text)
        if found is not None:
            return float(found[1] or text)
    raise wrong_type(value, DataType.DOUBLE)


def to_decimal(value: Any) -> str:
    if isinstance(value, (bool, int)):
        number = Decimal(int(value))
    elif isinstance(value, Decimal):
        number = value
    elif isinstance(value, float):
        number = Decimal(repr(value))
    elif isinstance(value, str) and _DECIMAL.fullmatch(value.strip(JAVA_SPACE)):
        number = Decimal(value.strip(JAVA_SPACE))
    else:
        raise wrong_type(value, DataType.BIG_DECIMAL)
    try:
        return stored_decimal(number)
    except ValueError:
        raise out_of_range(value, DataType.BIG_DECIMAL) from None


def to_boolean(value: Any) -> bool:
    if isinstance(value, (bool, int, float, Decimal)):
        return value != 0
    if isinstance(value, str):
        text = value.strip(JAVA_SPACE)
        return text.lower() == "true" or text == "1"
    raise wrong_type(value, DataType.BOOLEAN)


def java_double_text(value: float) -> str:
    """As Java's Double.toString prints it: `1.0`, `1.0E10`, `NaN`, `-Infinity`."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if value == 0:
        return "-0.0" if math.copysign(1, value) < 0 else "0.0"
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    text = "".join(map(str, digits))
    point = len(text) + int(exponent)
    if -3 < point <= 7:
        if point <= 0:
            body = f"0.{'0' * -point}{text}"
        else:
            text = text.ljust(point, "0")
            body = f"{text[:point]}.{text[point:] or '0'}"
    else:
        body = f"{text[0]}.{text[1:] or '0'}E{point - 1}"
    return f"-{body}" if sign else body


def _checked_text(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadValue(Cause.WRONG_TYPE, f"{shorten(text)} has half of a surrogate pair") from None
    return text


def to_string(value: Any) -> str:
    if isinstance(value, str):
        return _checked_text(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, (float, Decimal)):
        return java_double_text(to_double(value))
    return json_text(value)


def to_json(value: Any) -> str:
    return _checked_text(value) if isinstance(value, str) else json_text(value)


def json_text(value: Any) -> str:
    """Compact JSON of a decoded value, keys in their order."""
    value = plain(value)
    try:
        return msgspec.json.encode(value).decode()
    except (UnicodeEncodeError, OverflowError, msgspec.MsgspecError, ValueError):
        return _checked_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def plain(value: Any) -> Any:
    """Exact decimals (from tables that have BIG_DECIMAL columns) back to the numbers they were written as."""
    if isinstance(value, Decimal):
        return to_double(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def to_bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str) and _HEX.fullmatch(value):
        return bytes.fromhex(value)
    raise wrong_type(value, DataType.BYTES)


CONVERTERS: dict[DataType, Callable[[Any], Any]] = {
    DataType.INT: _to_integer(DataType.INT),
    DataType.LONG: _to_integer(DataType.LONG),
    DataType.TIMESTAMP: _to_integer(DataType.TIMESTAMP),
    DataType.FLOAT: to_double,
    DataType.DOUBLE: to_double,
    DataType.BIG_DECIMAL: to_decimal,
    DataType.BOOLEAN: to_boolean,
    DataType.STRING: to_string,
    DataType.JSON: to_json,
    DataType.BYTES: to_bytes,
}


def standardize(value: Any, *, single: bool, data_type: DataType) -> Any:
    """Pinot's rule for arrays: None, one value, or (multi-value columns only) a list of at least two."""
    if not isinstance(value, list):
        return value
    if len(value) == 1:
        return standardize(value[0], single=single, data_type=data_type)
    found = [standardize(item, single=True, data_type=data_type) for item in value]
    kept = [item for item in found if item is not None]
    if len(kept) > 1 and single:
        raise BadValue(Cause.WRONG_TYPE, f"an array of {len(kept)} values is not a value of type {data_type}")
    return kept if len(kept) > 1 else kept[0] if kept else None


def cell_converter(data_type: DataType, *, single_value: bool) -> Callable[[Any], Any]:
    """Converts a JSON value that is not null to a cell: None for a missing one; lists for multi-value columns. Raises
    BadValue."""
    convert = CONVERTERS[data_type]

    def single(value: Any) -> Any:
        if type(value) is list and data_type is not DataType.JSON:
            value = standardize(value, single=True, data_type=data_type)
            if value is None:
                return None
        return convert(value)

    def multi(value: Any) -> Any:
        value = standardize(value, single=False, data_type=data_type)
        if value is None:
            return None
        return [convert(item) for item in value] if isinstance(value, list) else [convert(value)]

    return single if single_value else multi
