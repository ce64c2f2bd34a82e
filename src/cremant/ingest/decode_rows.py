# SPDX-License-Identifier: Apache-2.0
"""The JSON decoder for messages that the columnar one refuses: one by one, every oddity decided here.

Accepted beyond RFC 8259, because the columnar decoder accepts it, too, and both must agree: the literals NaN, Infinity
and Inf (with sign), a byte order mark, numbers too large for a double (infinite), halves of surrogate pairs in fields
that no column reads. Of duplicate keys the last one counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec

from cremant.ingest.causes import BadValue, Cause, Refusal
from cremant.ingest.coerce import cell_converter, plain
from cremant.model.limits import MESSAGE_DEPTH_MAX
from cremant.model.schema import DataType, FieldSpec

_STRINGS_AND_LITERALS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[+-]?(?:NaN|Inf(?:inity)?)', re.DOTALL)
_STRINGS_AND_BRACKETS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class DecodedRows:
    """Cells by column, for the messages at `kept` (indexes into the input); `bad` has the others."""

    columns: list[list[Any]]
    kept: list[int]
    bad: list[Refusal]


def _parse_integer(digits: str) -> int | float:
    """Python refuses to read integers of thousands of digits; as doubles they are infinite."""
    return int(digits) if len(digits) < 1000 else float(digits)


class RowDecoder:
    """Decodes messages one by one. `keep_going` (Pinot's continueOnError): a cell that cannot be converted becomes a
    missing one instead of rejecting its row."""

    def __init__(self, fields: Iterable[FieldSpec], *, keep_going: bool = False) -> None:
        fields = tuple(fields)
        self._keep_going = keep_going
        #: With BIG_DECIMAL columns, fractions are read exactly.
        self._exact = any(field.data_type is DataType.BIG_DECIMAL for field in fields)
        self._columns: list[tuple[str, Callable[[Any], Any]]] = [
            (field.name, self._converter(field)) for field in fields
        ]
        self._lenient = json.JSONDecoder(parse_float=Decimal if self._exact else None, parse_int=_parse_integer)
        self._decode = msgspec.json.Decoder(float_hook=Decimal).decode if self._exact else msgspec.json.Decoder().decode

    def _converter(self, field: FieldSpec) -> Callable[[Any], Any]:
        convert = cell_converter(field.data_type, single_value=field.single_value)
        if not self._exact or field.data_type is DataType.BIG_DECIMAL:
            return convert
        return lambda value: convert(plain(value))

    def decode(self, messages: list[bytes]) -> DecodedRows:
        columns: list[list[Any]] = [[] for _ in self._columns]
        kept: list[int] = []
        bad: list[Refusal] = []
        appends = [column.append for column in columns]
        for at, message in enumerate(messages):
            try:
                cells = self._cells(self.record(message))
            except BadValue as problem:
                bad.append(Refusal(at, problem.cause, problem.detail))
                continue
            kept.append(at)
            for append, cell in zip(appends, cells, strict=True):
                append(cell)
        return DecodedRows(columns, kept, bad)

    def record(self, message: bytes) -> dict[str, Any]:
        """The message as an object. Raises BadValue."""
        if message.count(b"[") + message.count(b"{") > MESSAGE_DEPTH_MAX:
            _check_depth(message)
        try:
            record = self._decode(message)
        except (msgspec.MsgspecError, ValueError):
            record = self._decode_leniently(message)
        if not isinstance(record, dict):
            raise BadValue(Cause.NOT_AN_OBJECT, f"the message is {_kind(record)}, not an object")
        return record

    def _decode_leniently(self, message: bytes) -> Any:
        try:
            text = message.removeprefix(_BOM).decode()
        except UnicodeDecodeError as error:
            raise BadValue(Cause.MALFORMED_JSON, f"not UTF-8: {error.reason} at byte {error.start}") from None
        text = _STRINGS_AND_LITERALS.sub(_spell_out, text)
        try:
            return self._lenient.decode(text)
        except ValueError as error:
            raise BadValue(Cause.MALFORMED_JSON, str(error)) from None

    def _cells(self, record: dict[str, Any]) -> list[Any]:
        cells = []
        for name, convert in self._columns:
            value = record.get(name)
            if value is not None:
                try:
                    value = convert(value)
                except BadValue as refusal:
                    if not self._keep_going:
                        raise BadValue(refusal.cause, f"column {name}: {refusal.detail}") from None
                    value = None
            cells.append(value)
        return cells


def _spell_out(found: re.Match[str]) -> str:
    token = found[0]
    if token[0] == '"':
        return token
    if token.endswith("NaN"):
        return "NaN"
    return "-Infinity" if token[0] == "-" else token if token[0] == "+" else "Infinity"


def _kind(value: Any) -> str:
    names = {list: "an array", str: "text", bool: "a boolean", int: "a number", float: "a number", Decimal: "a number"}
    return names.get(type(value), "null")


def _check_depth(message: bytes) -> None:
    depth = 0
    for found in _STRINGS_AND_BRACKETS.finditer(message):
        token = found[0]
        if token in (b"[", b"{"):
            depth += 1
            if depth > MESSAGE_DEPTH_MAX:
                raise BadValue(Cause.TOO_DEEP, f"nested deeper than {MESSAGE_DEPTH_MAX}")
        elif token in (b"]", b"}"):
            depth -= 1
