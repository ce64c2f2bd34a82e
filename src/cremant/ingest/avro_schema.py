# SPDX-License-Identifier: Apache-2.0
"""An Avro schema, compiled for reading: what its fields are, and how their values become columns.

Logical types are taken off before decoding (raw numbers and bytes are quicker) and applied to whole columns after it:

| Avro                     | becomes                                                                                   |
|--------------------------|-------------------------------------------------------------------------------------------|
| (local-)timestamp-*      | epoch ms (numbers, TIMESTAMP); `yyyy-MM-dd HH:mm:ss.f` as text, in UTC                    |
| date                     | days (numbers), epoch ms of its midnight (TIMESTAMP), `yyyy-MM-dd` as text                |
| time-millis, time-micros | the number; `HH:mm:ss[.f]` as text                                                        |
| decimal                  | the exact number; as text without exponent                                                |
| uuid, enum               | text                                                                                      |
| bytes, fixed             | bytes; hex as text; base64 inside of JSON                                                 |
| record, map, array       | JSON; arrays also multi-value                                                             |
| union                    | the value of its branch; of branches that look alike when read (`int` and `long`, `bytes` |
|                          | and `fixed`, records of the same fields) the number, base64, the record as it was read    |
"""

from __future__ import annotations

import base64
import datetime
import decimal
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

import fastavro
import msgspec

from cremant.ingest.causes import BadValue, Cause
from cremant.ingest.coerce import java_double_text
from cremant.model.errors import InvalidConfig
from cremant.model.limits import BIG_DECIMAL_DIGITS_MAX, MESSAGE_DEPTH_MAX
from cremant.model.schema import DataType

_PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
_MS_PER_DAY = 86_400_000
#: Logical type -> how many of its units are a millisecond.
_PER_MS = {"millis": 1, "micros": 1_000, "nanos": 1_000_000}
_TEXTUAL = (DataType.STRING, DataType.JSON)

_PARSE_ERRORS = (fastavro.schema.SchemaParseException, fastavro.schema.UnknownType)

Value = Callable[[Any], Any]


class FieldKind(NamedTuple):
    """What a field of a record holds beside null. `kind`: Avro's type, or "mixed" for a union of several; `logical`:
    its logical type; `item`: what an array holds."""

    kind: str
    logical: str = ""
    scale: int = 0
    item: FieldKind | None = None


class Compiled(NamedTuple):
    """`parsed`: for fastavro, without logical types; `fields`: by name; `plain`: value of the field -> what JSON has
    (None: it already is that); `recursive`: a record may hold records of its own type."""

    parsed: Any
    fields: dict[str, FieldKind]
    plain: dict[str, Value | None]
    recursive: bool


def compile_schema(text: str, where: str) -> Compiled:
    """A record schema. Raises InvalidConfig."""
    try:
        document = msgspec.json.decode(text)
    except msgspec.MsgspecError as error:
        raise InvalidConfig(f"{where}: not JSON: {error}") from None
    except RecursionError:
        raise _too_deep(where) from None
    if _is_deep(document):
        raise _too_deep(where)
    if not isinstance(document, dict) or document.get("type") != "record" or "fields" not in document:
        raise InvalidConfig(f"{where}: expected a schema of type record, found {str(text)[:80]!r}")
    try:
        named: Any = fastavro.parse_schema(document)
        stripped = fastavro.parse_schema(_without_logical_types(document))
        reader = _Reader(named)
        fields = {field["name"]: reader.kind(field["type"]) for field in named["fields"]}
        plain = {field["name"]: reader.plain(field["type"]) for field in named["fields"]}
        recursive = reader.recursive(named, frozenset())
        reader.check_arrays(named)
    except (*_PARSE_ERRORS, ValueError, KeyError, TypeError) as error:
        raise InvalidConfig(f"{where}: not an Avro schema: {type(error).__name__}: {error}") from None
    return Compiled(stripped, fields, plain, recursive)


def _is_deep(document: Any) -> bool:
    level = [document]
    for _ in range(MESSAGE_DEPTH_MAX):
        nested = [value for value in level if isinstance(value, (dict, list))]
        if not nested:
            return False
        level = [inner for value in nested for inner in (value.values() if isinstance(value, dict) else value)]
    return True


def _too_deep(where: str) -> InvalidConfig:
    return InvalidConfig(f"{where}: nested deeper than {MESSAGE_DEPTH_MAX}")


def _without_logical_types(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_logical_types(branch) for branch in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key not in ("logicalType", "default", "doc", "aliases")}
    for key in ("type", "items", "values"):
        if key in kept:
            kept[key] = _without_logical_types(kept[key])
    if "fields" in kept:
        kept["fields"] = [_without_logical_types(field) for field in kept["fields"]]
    return kept


def _scalar_kind(schema: dict[str, Any]) -> FieldKind:
    """Logical types that are not understood are none, as Avro says. Raises ValueError for a scale beyond all digits."""
    logical, scale = schema.get("logicalType"), schema.get("scale")
    if logical == "decimal" and isinstance(scale, int) and scale > BIG_DECIMAL_DIGITS_MAX:
        raise ValueError(f"a scale of {scale}, at most {BIG_DECIMAL_DIGITS_MAX} is allowed")
    return FieldKind(
        schema["type"], logical if isinstance(logical, str) else "", scale if isinstance(scale, int) else 0
    )


class _Reader:
    """Looks at the types of a schema whose names are full (as fastavro leaves them)."""

    def __init__(self, schema: Any) -> None:
        self._named: dict[str, Any] = {}
        self._records: dict[str, Value | None] = {}
        self._declare(schema)

    def _declare(self, schema: Any) -> None:
        """Remembers the named types inside of `schema`."""
        if isinstance(schema, list):
            for branch in schema:
                self._declare(branch)
        elif isinstance(schema, dict):
            if schema.get("type") in ("record", "error", "enum", "fixed"):
                self._named[schema["name"]] = schema
            for key in ("type", "items", "values"):
                self._declare(schema.get(key))
            for field in schema.get("fields", ()):
                self._declare(field)

    def _resolved(self, schema: Any) -> Any:
        if isinstance(schema, str) and schema not in _PRIMITIVES:
            return self._named[schema]
        if isinstance(schema, dict) and not isinstance(schema["type"], str):
            return self._resolved(schema["type"])
        return schema

    def kind(self, schema: Any) -> FieldKind:
        schema = self._resolved(schema)
        if isinstance(schema, str):
            return FieldKind(schema)
        if isinstance(schema, list):
            branches = [branch for branch in schema if self._resolved(branch) != "null"]
            return self.kind(branches[0]) if len(branches) == 1 else FieldKind("mixed" if branches else "null")
        kind = schema["type"]
        if kind == "array":
            return FieldKind("array", item=self.kind(schema["items"]))
        if kind not in _PRIMITIVES and kind not in ("record", "error", "map", "enum", "fixed"):
            return self.kind(kind)
        return _scalar_kind(schema)

    def recursive(self, schema: Any, around: frozenset[str]) -> bool:
        schema = self._resolved(schema)
        if isinstance(schema, list):
            return any(self.recursive(branch, around) for branch in schema)
        if isinstance(schema, str):
            return False
        if "fields" in schema:
            if schema["name"] in around:
                return True
            return any(self.recursive(field["type"], around | {schema["name"]}) for field in schema["fields"])
        return any(self.recursive(schema[key], around) for key in ("items", "values") if key in schema)

    def check_arrays(self, schema: Any) -> None:
        """Raises ValueError for an array whose items take no bytes: a few bytes could say that there are billions."""
        if isinstance(schema, list):
            for branch in schema:
                self.check_arrays(branch)
        elif isinstance(schema, dict):
            if schema.get("type") == "array" and not self._takes_bytes(schema["items"], frozenset()):
                raise ValueError("the items of an array take no bytes")
            for key in ("type", "items", "values"):
                self.check_arrays(schema.get(key))
            for field in schema.get("fields", ()):
                self.check_arrays(field)

    def _takes_bytes(self, schema: Any, around: frozenset[str]) -> bool:
        schema = self._resolved(schema)
        if isinstance(schema, list):
            return True
        kind = schema if isinstance(schema, str) else schema["type"]
        if kind == "fixed":
            return bool(schema["size"])
        if kind in ("record", "error") and schema["name"] not in around:
            inside = around | {schema["name"]}
            return any(self._takes_bytes(field["type"], inside) for field in schema["fields"])
        return bool(kind != "null")

    def plain(self, schema: Any) -> Value | None:
        """Value -> what JSON has in its place; None if that is the value itself."""
        schema = self._resolved(schema)
        if isinstance(schema, list):
            return self._plain_union(schema)
        kind = schema if isinstance(schema, str) else schema["type"]
        match kind:
            case "array":
                inner = self.plain(schema["items"])
                return None if inner is None else lambda values: [_through(inner, value) for value in values]
            case "map":
                inner = self.plain(schema["values"])
                return None if inner is None else lambda values: {k: _through(inner, v) for k, v in values.items()}
            case "record" | "error":
                return self._plain_record(schema)
            case "bytes" | "fixed" | "int" | "long":
                return plain_scalar(FieldKind(kind) if isinstance(schema, str) else _scalar_kind(schema))
            case _:
                return None

    def _plain_record(self, schema: Any) -> Value | None:
        name = schema["name"]
        if name in self._records:  # maybe a record inside of itself: when it is called, its converter is known
            return lambda value: _through(self._records[name], value)
        self._records[name] = None
        inner = {field["name"]: convert for field in schema["fields"] if (convert := self.plain(field["type"]))}
        if inner:
            self._records[name] = lambda record: {
                key: _through(inner[key], value) if key in inner else value for key, value in record.items()
            }
        return self._records[name]

    def _plain_union(self, branches: list[Any]) -> Value | None:
        """By what the value looks like, which is all that says which branch it is of."""
        by_look: dict[object, set[Value | None]] = {}
        for branch in branches:
            resolved = self._resolved(branch)
            by_look.setdefault(_look_of_branch(resolved), set()).add(self.plain(resolved))
        known = {look: _agreed(look, found) for look, found in by_look.items()}
        if not any(known.values()):
            return None
        return lambda value: _through(known.get(_look(value), known.get("map")), value)


def _look_of_branch(resolved: Any) -> object:
    kind = resolved if isinstance(resolved, str) else resolved["type"]
    if kind in ("record", "error"):
        return frozenset(field["name"] for field in resolved["fields"])
    return _PYTHON.get(kind, kind)


_PYTHON: dict[str, type] = {"array": list, "bytes": bytes, "fixed": bytes, "int": int, "long": int, "string": str}


def _look(value: Any) -> object:
    return frozenset(value) if isinstance(value, dict) else type(value)


def _agreed(look: object, found: set[Value | None]) -> Value | None:
    """What branches that look alike are turned into."""
    if len(found) == 1:
        return next(iter(found))
    return _base64_text if look is bytes else None


def _base64_text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _through(convert: Value | None, value: Any) -> Any:
    return value if convert is None or value is None else convert(value)


def plain_scalar(kind: FieldKind) -> Value | None:
    """A number or bytes inside of JSON, or as text."""
    text = text_of(kind)
    if kind.logical == "decimal" and kind.kind in ("bytes", "fixed"):
        scale = kind.scale
        return lambda value: float(decimal_of(value, scale))
    if kind.kind in ("bytes", "fixed"):
        return _base64_text
    return text


def decimal_of(value: bytes, scale: int) -> Decimal:
    """Exact. Raises BadValue for more bytes than a number may have: the time it takes grows with their square."""
    if len(value) > _DECIMAL_BYTES_MAX:
        raise BadValue(Cause.OUT_OF_RANGE, f"a decimal of {len(value)} bytes, at most {_DECIMAL_BYTES_MAX} are allowed")
    return Decimal(int.from_bytes(value, "big", signed=True)).scaleb(-scale, _WIDE)


#: A byte is 2.4 digits: enough for every BIG_DECIMAL.
_DECIMAL_BYTES_MAX = BIG_DECIMAL_DIGITS_MAX // 2
_WIDE = decimal.Context(prec=10_000)


def text_of(kind: FieldKind) -> Value | None:
    """How a value of the kind is written as text; None where the general rules say it."""
    match kind.logical, kind.kind:
        case "date", "int":
            return lambda days: str(datetime.date(1970, 1, 1) + datetime.timedelta(days=days))
        case "time-millis", "int":
            return lambda value: _time_text(value * 1_000)
        case "time-micros", "long":
            return _time_text
        case "decimal", "bytes" | "fixed":
            scale = kind.scale
            return lambda value: f"{decimal_of(value, scale):f}"
        case _ if per_ms(kind):
            per = per_ms(kind)
            return lambda value: _moment_text(value * (1_000_000 // per))
        case _, "bytes" | "fixed":
            return lambda value: value.hex()
        case _, "float":
            return _float_text
    return None


def per_ms(kind: FieldKind) -> int:
    """Units per millisecond of a timestamp; 0 if the kind is none."""
    name, _, unit = kind.logical.removeprefix("local-").partition("-")
    return _PER_MS.get(unit, 0) if name == "timestamp" and kind.kind == "long" else 0


def _moment_text(ns: int) -> str:
    """As java.sql.Timestamp prints it, in UTC."""
    seconds, ns = divmod(ns, 1_000_000_000)
    moment = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(seconds=seconds)
    return f"{moment:%Y-%m-%d %H:%M:%S}.{f'{ns:09d}'.rstrip('0') or '0'}"


def _time_text(micros: int) -> str:
    seconds, micros = divmod(micros, 1_000_000)
    clock = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f"{clock}.{f'{micros:06d}'.rstrip('0')}" if micros else clock


def _float_text(value: float) -> str:
    """As Java prints a float: the shortest digits that name it among floats."""
    import numpy as np

    return java_double_text(float(str(np.float32(value))))


def reading_of(kind: FieldKind, data_type: DataType) -> Value | None:
    """What a value of the kind is turned into before the general rules make a cell of it; None: nothing to do."""
    if data_type in _TEXTUAL:
        return text_of(kind)
    if kind.logical == "decimal" and kind.kind in ("bytes", "fixed") and data_type is not DataType.BYTES:
        scale = kind.scale
        return lambda value: decimal_of(value, scale)
    if kind.logical == "date" and kind.kind == "int" and data_type is DataType.TIMESTAMP:
        return lambda days: days * _MS_PER_DAY
    return None
