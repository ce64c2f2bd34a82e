# SPDX-License-Identifier: Apache-2.0
"""JSON functions of the expression language. Paths: `$.a.b[0]['c']`, no wildcards."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pyarrow as pa

from cremant.ingest.causes import BadValue
from cremant.ingest.coerce import json_text, to_double, to_string
from cremant.ingest.evaluate import Body, Function, Kind, Value, by_value, either, literal_text
from cremant.ingest.functions import cast_kind, function
from cremant.model.errors import InvalidConfig

_STEP = re.compile(r"\.([A-Za-z_$][\w$\-]*)|\[(\d+)\]|\['((?:[^'\\]|\\.)*)'\]|\[\"((?:[^\"\\]|\\.)*)\"\]")


def parse_path(text: str, where: str) -> tuple[str | int, ...]:
    """The steps of a path. Raises InvalidConfig."""
    at = 1
    steps: list[str | int] = []
    while text.startswith("$") and at < len(text):
        found = _STEP.match(text, at)
        if found is None:
            break
        steps.append(
            int(found[2]) if found[2] is not None else next(part for part in found.groups() if part is not None)
        )
        at = found.end()
    if not text.startswith("$") or at != len(text):
        raise InvalidConfig(
            f"{where}: JSON path {text!r} is not supported by this version", hint="for example $.a.b[0]['c']"
        )
    return tuple(steps)


def _walk(value: Any, steps: tuple[str | int, ...]) -> Any:
    for step in steps:
        if isinstance(step, str):
            value = value.get(step) if isinstance(value, dict) else None
        else:
            value = value[step] if isinstance(value, list) and step < len(value) else None
        if value is None:
            return None
    return value


def _to_long(value: Any) -> int:
    number = int(value) if isinstance(value, str) else int(to_double(value)) if isinstance(value, float) else value
    if not isinstance(number, int) or not -(2**63) <= number < 2**63:
        raise ValueError(f"{value!r} is not a LONG")
    return int(number)


def _to_boolean(value: Any) -> bool:
    return value is True or str(value).lower() in ("true", "1")


_EXTRACTORS: dict[Kind, Callable[[Any], Any]] = {
    Kind.STRING: lambda value: json_text(value) if isinstance(value, (dict, list)) else to_string(value),
    Kind.LONG: _to_long,
    Kind.DOUBLE: to_double,
    Kind.BOOLEAN: _to_boolean,
}


def _extract(kind: Kind, path_at: int = 1, default_at: int = 2) -> Callable[[dict[int, Any], str], Body]:
    def make(literals: dict[int, Any], where: str) -> Body:
        steps = parse_path(literal_text(literals, path_at, where), where)
        default = literals.get(default_at)
        convert = _EXTRACTORS[kind]

        def one(text: str | None) -> Any:
            if text is None:
                return None
            try:
                found = _walk(msgspec.json.decode(text), steps)
                return default if found is None else convert(found)
            except (msgspec.MsgspecError, BadValue) as error:
                raise ValueError(str(error)) from error

        def body(args: list[Value], count: int) -> Value:
            taken = by_value(one, args[0].array, kind)
            return Value(taken.array, either(args[0].failed, taken.failed))

        try:
            pa.scalar(default, kind.arrow)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise InvalidConfig(f"{where}: default {default!r} is not of kind {kind.name}") from error
        return body

    return make


def _extract_scalar(literals: dict[int, Any], where: str) -> Body:
    return _extract(cast_kind(literals[2], where), default_at=3)(literals, where)


def _format(literals: dict[int, Any], where: str) -> Body:
    """JSON columns and objects are read as JSON text already."""
    return lambda args, count: args[0]


_S, _ANY = Kind.STRING, None

JSON_FUNCTIONS: tuple[Function, ...] = (
    function("jsonpathstring", (_S, _S, _S), _S, _extract(Kind.STRING), 2, 3, (1, 2)),
    function("jsonpathlong", (_S, _S, Kind.LONG), Kind.LONG, _extract(Kind.LONG), 2, 3, (1, 2)),
    function("jsonpathdouble", (_S, _S, Kind.DOUBLE), Kind.DOUBLE, _extract(Kind.DOUBLE), 2, 3, (1, 2)),
    function(
        "jsonextractscalar",
        (_S, _S, _S, _ANY),
        lambda literals, where: cast_kind(literals[2], where),
        _extract_scalar,
        3,
        4,
        (1, 2, 3),
    ),
    function("jsonformat", (_S,), _S, _format),
)
