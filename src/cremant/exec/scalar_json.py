# SPDX-License-Identifier: Apache-2.0
"""JSON functions. Each distinct text of a batch is parsed once, by msgspec; paths are model/jsonpath.py's.

What a path does not find (also null, also in a text that is no JSON) is the default if there is one; else it ends the
query (`strict`, Pinot's rule while null handling is off) or is NULL.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from cremant.exec.functions import Factory
from cremant.exec.json_match import JsonFilter
from cremant.exec.kernels import by_distinct, constant, scalar
from cremant.model.decimals import stored_decimal
from cremant.model.jsonpath import MISSING, JsonPath, canonical, parse_path

_TEXT, _BOOL = pa.string(), pa.bool_()
_decoder = msgspec.json.Decoder()
_path = functools.lru_cache(maxsize=1024)(parse_path)


def decode(text: str) -> Any:
    """The value of a JSON text; MISSING if it is none."""
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return MISSING


def json_text(value: Any) -> str:
    """Texts as they are, everything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return msgspec.json.encode(value).decode()


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        number = value if isinstance(value, int) else int(value) if isinstance(value, float) else int(str(value))
        if not low <= number <= high:
            raise ValueError(value)
        return int(number)

    return convert


def _boolean(value: Any) -> bool:
    return value is True or (not isinstance(value, bool) and str(value).lower() in ("true", "1", "1.0"))


def _decimal(value: Any) -> str:
    return stored_decimal(Decimal(str(value)))


_LONG_CONVERT = _integer(-(2**63), 2**63 - 1)

KINDS: dict[str, tuple[Callable[[Any], Any], pa.DataType]] = {
    "int": (_integer(-(2**31), 2**31 - 1), pa.int32()),
    "long": (_LONG_CONVERT, pa.int64()),
    "float": (float, pa.float32()),
    "double": (float, pa.float64()),
    "boolean": (_boolean, _BOOL),
    "decimal": (_decimal, _TEXT),
    "text": (json_text, _TEXT),
}


def _extract(name: str) -> Callable[[pa.Array, pa.Array, pa.Array, pa.Array], pa.Array]:
    convert, kind = KINDS[name]

    def compute(texts: pa.Array, path: pa.Array, default: pa.Array, strict: pa.Array) -> pa.Array:
        where, must = constant(path), constant(strict)
        encoded = texts.dictionary_encode()
        found = _reader(where)(encoded.dictionary.to_pylist())
        if None in found and must:
            raise ValueError(f"Cannot resolve JSON path {where} on some records. Consider setting a default value.")
        values = _array(found, convert, name, kind).take(encoded.indices)
        if default.null_count == len(default) or not values.null_count:
            return values
        return pc.if_else(texts.is_valid(), pc.coalesce(values, default), values)

    return compute


def _array(found: list[Any], convert: Callable[[Any], Any], name: str, kind: pa.DataType) -> pa.Array:
    """Values that all have the Python type of `kind` need no conversion one by one."""
    if set(map(type, found)) - {type(None)} <= _PLAIN.get(name, set()):
        try:
            return pa.array(found, kind)
        except (pa.ArrowInvalid, OverflowError):
            pass  # a number that does not fit: the conversion says which
    return pa.array([None if value is None else _converted(value, convert, name) for value in found], kind)


#: What msgspec does not take in the names of fields.
_UNNAMEABLE = re.compile(r'["\\\x00-\x1f]')
_PLAIN: dict[str, set[type]] = {"int": {int}, "long": {int}, "double": {float}, "text": {str}, "boolean": {bool}}

Reader = Callable[[list[str]], list[Any]]


@functools.lru_cache(maxsize=1024)
def _reader(path: str) -> Reader:
    """Finds the path's value in each text; None where there is none."""
    wanted = _path(path)

    def one(text: str) -> Any:
        found = wanted.find(decode(text)) if text else MISSING
        return None if found is MISSING else found

    keys = [step for step in wanted.steps if isinstance(step, str)]
    if not keys or len(keys) != len(wanted.steps) or any(map(_UNNAMEABLE.search, keys)):
        return lambda texts: [one(text) for text in texts]
    decoder, getter = _skipping(keys)

    def fast(texts: list[str]) -> list[Any]:
        try:
            return list(map(getter, map(decoder.decode, texts)))
        except (msgspec.MsgspecError, AttributeError, TypeError, RecursionError):
            return [one(text) for text in texts]

    return fast


def _skipping(keys: list[str]) -> tuple[msgspec.json.Decoder[Any], Callable[[Any], Any]]:
    """A decoder that makes Python objects of nothing but the objects on the way, and what takes the value out."""
    kind: Any = Any
    empty: Any = None
    for depth, key in reversed(list(enumerate(keys))):
        made = msgspec.defstruct(f"Step{depth}", [("at", kind, empty)], rename={"at": key}, frozen=True)
        kind, empty = made, made()
    return msgspec.json.Decoder(kind), operator.attrgetter(".".join(["at"] * len(keys)))


def _converted(value: Any, convert: Callable[[Any], Any], name: str) -> Any:
    try:
        return convert(value)
    except (ValueError, TypeError, ArithmeticError) as error:
        text = json_text(value)
        raise ValueError(f"JSON value {text[:100]} is not a value of type {name.upper()}") from error


def _extract_list(name: str) -> Callable[[pa.Array, pa.Array], pa.Array]:
    """Elements of a list, or one value as a list of one; nothing found is the empty list."""
    convert, element = KINDS[name]
    kind = pa.list_(element)

    def compute(texts: pa.Array, path: pa.Array) -> pa.Array:
        wanted = _path(constant(path))

        def one(text: str) -> list[Any]:
            found = wanted.find(decode(text)) if text else MISSING
            if found is MISSING or found is None:
                return []
            values = found if isinstance(found, list) else [found]
            return [_converted(value, convert, name) for value in values if value is not None]

        return by_distinct(one, texts, kind)

    return compute


def _keys(texts: pa.Array, path: pa.Array) -> pa.Array:
    """The paths of everything that `path` finds."""
    wanted: JsonPath = _path(constant(path))

    def one(text: str) -> list[str]:
        value = decode(text)
        return [] if value is MISSING else [canonical(way) for way, _ in wanted.walk(value)]

    return by_distinct(one, texts, pa.list_(_TEXT))


def _exists(texts: pa.Array, path: pa.Array) -> pa.Array:
    wanted = _path(constant(path))

    def one(text: str) -> bool:
        value = decode(text)
        found = MISSING if value is MISSING else wanted.find(value)
        return found is not MISSING and found is not None and found != []

    return by_distinct(one, texts, _BOOL)


def _format(text: str) -> str:
    """The text without needless spaces; a text that is no JSON becomes a JSON string."""
    value = decode(text)
    return msgspec.json.encode(text if value is MISSING else value).decode()


def _is_json(text: str) -> bool:
    return decode(text) is not MISSING


@functools.lru_cache(maxsize=256)
def _filter(text: str) -> JsonFilter:
    return JsonFilter(text)


def _match(texts: pa.Array, condition: pa.Array) -> pa.Array:
    wanted = _filter(constant(condition))

    def one(text: str) -> bool:
        value = decode(text)
        return value is not MISSING and wanted.holds(value)

    return by_distinct(one, texts, _BOOL)


FUNCTIONS: dict[str, Factory] = dict(
    [
        *(
            scalar(f"fn_json_{name}", _extract(name), [_TEXT, _TEXT, kind, _BOOL], kind)
            for name, (_, kind) in KINDS.items()
        ),
        *(
            scalar(f"fn_json_{name}_list", _extract_list(name), [_TEXT, _TEXT], pa.list_(kind))
            for name, (_, kind) in KINDS.items()
        ),
        scalar("fn_json_keys", _keys, [_TEXT, _TEXT], pa.list_(_TEXT)),
        scalar("fn_json_exists", _exists, [_TEXT, _TEXT], _BOOL),
        scalar("fn_json_format", lambda texts: by_distinct(_format, texts, _TEXT), [_TEXT], _TEXT),
        scalar("fn_is_json", lambda texts: by_distinct(_is_json, texts, _BOOL), [_TEXT], _BOOL),
        scalar("fn_json_match", _match, [_TEXT, _TEXT], _BOOL),
    ]
)  # fmt: skip
