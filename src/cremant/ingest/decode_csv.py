# SPDX-License-Identifier: Apache-2.0
"""CSV messages to columns: one record per message, the header known beforehand (Pinot's CSVMessageDecoder).

Properties (`stream.<type>.decoder.prop.…`): `fileFormat` DEFAULT, EXCEL, RFC4180, MYSQL or TDF; `delimiter`, `header`
(names separated by the delimiter), `quoteCharacter`, `escapeCharacter`, `multiValueDelimiter` (`;`), `nullStringValue`,
`ignoreSurroundingSpaces`. Without `header`, the first line of each message is one.

Rules of Pinot (and Commons CSV): a quote counts at the beginning of a field only, doubled inside it is itself; an empty
field, quoted or not, is missing; line breaks may stand within quotes; surrounding spaces that are ignored are those
outside of quotes. Differences, on purpose: only multi-value columns are split at the multi-value delimiter; a record of
another number of fields than the header's, or a message of more than one record, is rejected (Pinot fills with nulls
and drops what is too many).

Messages that are evidently well-formed are one parse of Arrow's CSV reader; the others are parsed one by one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from cremant.ingest.causes import BadValue, Cause, Refusal
from cremant.ingest.messages import (
    Decoded,
    Piece,
    Schemas,
    as_lists,
    assemble,
    fit,
    hopeless_ones,
    runs_of,
    settle,
    taken,
    work_type,
)
from cremant.model.errors import InvalidConfig
from cremant.model.schema import FieldSpec

PARSE_ROWS = 64 * 1024
PARSE_BYTES = 64 * 1024 * 1024
#: What Java's Character.isWhitespace holds for white space, without line ends.
_SPACES = " \t\x0b\x0c\x1c\x1d\x1e\x1f\u1680\u2028\u2029\u205f\u3000" + "".join(
    chr(code) for code in range(0x2000, 0x200B) if code != 0x2007
)
_UNDERSTOOD = (
    "fileFormat", "delimiter", "header", "quoteCharacter", "escapeCharacter", "multiValueDelimiter",
    "nullStringValue", "ignoreSurroundingSpaces", "recordSeparator", "ignoreEmptyLines",
)  # fmt: skip


class Dialect(NamedTuple):
    delimiter: str = ","
    quote: str | None = '"'
    escape: str | None = None
    null_text: str | None = None
    multi_value_delimiter: str = ";"
    trim: bool = False
    header: tuple[str, ...] | None = None


_FORMATS: dict[str, Dialect] = {
    "DEFAULT": Dialect(),
    "EXCEL": Dialect(),
    "RFC4180": Dialect(),
    "MYSQL": Dialect(delimiter="\t", quote=None, escape="\\", null_text="\\N"),
    "TDF": Dialect(delimiter="\t", trim=True),
}


def parse_dialect(properties: Mapping[str, str]) -> Dialect:
    """Raises InvalidConfig."""
    unknown = sorted(set(properties) - set(_UNDERSTOOD))
    if unknown:
        raise InvalidConfig(
            f"CSV decoder: {', '.join(unknown)} not supported by this version", hint=f"known: {', '.join(_UNDERSTOOD)}"
        )
    name = properties.get("fileFormat", "DEFAULT").upper()
    dialect = _FORMATS.get(name)
    if dialect is None:
        raise InvalidConfig(f"CSV decoder: fileFormat {name!r} is not known", hint=f"one of {', '.join(_FORMATS)}")
    dialect = dialect._replace(
        delimiter=_character(properties, "delimiter", dialect.delimiter) or ",",
        quote=_character(properties, "quoteCharacter", dialect.quote),
        escape=_character(properties, "escapeCharacter", dialect.escape),
        null_text=properties.get("nullStringValue", dialect.null_text),
        multi_value_delimiter=_character(properties, "multiValueDelimiter", dialect.multi_value_delimiter) or "",
        trim=properties.get("ignoreSurroundingSpaces", str(dialect.trim)).strip().lower() == "true",
    )
    marks = [mark for mark in (dialect.delimiter, dialect.quote, dialect.escape) if mark]
    if len(set(marks)) < len(marks) or any(mark in "\r\n\0" for mark in marks):
        raise InvalidConfig(f"CSV decoder: delimiter, quote and escape must be different characters, found {marks}")
    header = properties.get("header")
    if header is None:
        return dialect
    names = tuple(name.strip() for name in header.split(dialect.delimiter))
    if len(set(names)) < len(names) or not all(names):
        raise InvalidConfig(f"CSV decoder: header {header!r} has a name that is empty or there twice")
    return dialect._replace(header=names)


def _character(properties: Mapping[str, str], key: str, default: str | None) -> str | None:
    text = properties.get(key, default)
    if text is None or text == default or text == "":
        return text or None
    text = {"\\t": "\t"}.get(text, text)
    if len(text) != 1 or not text.isascii():
        raise InvalidConfig(f"CSV decoder: {key} must be one ASCII character, found {text!r}")
    return text


class CsvDecoder:
    """Immutable; one per table and config version. Sizes of parses change the speed, never the result."""

    def __init__(
        self,
        fields: tuple[FieldSpec, ...],
        properties: Mapping[str, str],
        *,
        keep_going: bool = False,
        parse_rows: int = PARSE_ROWS,
    ) -> None:
        self._fields = fields
        self._dialect = dialect = parse_dialect(properties)
        self._keep_going = keep_going
        self._parse_rows = parse_rows
        self._types = [work_type(field) for field in fields]
        self._header = dialect.header or ()
        if dialect.header is not None and not any(field.name in dialect.header for field in fields):
            raise InvalidConfig(
                f"CSV decoder: the header {', '.join(dialect.header)} names no column of the schema",
                hint="names are separated by the delimiter",
            )
        self._is_plain, self._is_quoted = _patterns(dialect)

    def schema_ids(self, values: pa.BinaryArray) -> set[int]:
        return set()

    def decode(self, values: pa.BinaryArray, schemas: Schemas = MappingProxyType({})) -> Decoded:
        bad: list[Refusal] = []
        pieces: list[Piece] = []
        hopeless = hopeless_ones(values, bad)
        text = _as_text(values, hopeless, bad)
        fast = ~hopeless
        if self._dialect.header is None:
            fast = np.zeros(len(values), dtype=bool)
        elif fast.any():
            fast &= pc.match_substring_regex(text, self._is_plain).to_numpy(zero_copy_only=False)
            rest = np.flatnonzero(~(fast | hopeless))
            if len(rest) and self._is_quoted:
                good = pc.match_substring_regex(text.take(pa.array(rest)), self._is_quoted)
                fast[rest[good.to_numpy(zero_copy_only=False)]] = True
        for indexes in runs_of(text, np.flatnonzero(fast), self._parse_rows, PARSE_BYTES):
            self._decode_well_formed(taken(text, indexes), indexes, pieces, bad)
        slow = np.flatnonzero(~(fast | hopeless))
        if len(slow):
            self._decode_others(text.take(pa.array(slow)), slow, pieces, bad)
        return assemble(self._types, pieces, bad)

    def _decode_well_formed(
        self, batch: pa.StringArray, indexes: np.ndarray, pieces: list[Piece], bad: list[Refusal]
    ) -> None:
        """One parse. Each message is one line of it, because none has a line break and all quotes match."""
        dialect = self._dialect
        joined = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, len(batch)], pa.int32()), batch), "\n")
        data = joined[0].as_buffer()
        names = [f"f{at}" for at in range(len(self._header))]
        wanted = [names[at] for at, name in enumerate(self._header) if any(name == f.name for f in self._fields)]
        wrong: list[int] = []

        def skip(row: Any) -> str:
            wrong.append(row.number - 1)
            problem = f"{row.actual_columns} fields, the header has {row.expected_columns}"
            bad.append(Refusal(int(indexes[row.number - 1]), Cause.WRONG_FIELD_COUNT, problem))
            return "skip"

        table = pcsv.read_csv(
            pa.BufferReader(data),
            read_options=pcsv.ReadOptions(use_threads=False, block_size=data.size + 1, column_names=names),
            parse_options=pcsv.ParseOptions(
                delimiter=dialect.delimiter, quote_char=dialect.quote or False, double_quote=dialect.quote is not None,
                escape_char=False, newlines_in_values=False, ignore_empty_lines=False, invalid_row_handler=skip,
            ),
            convert_options=pcsv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), include_columns=wanted, strings_can_be_null=False,
                check_utf8=False,
            ),
        )  # fmt: skip
        if wrong:
            keep = np.ones(len(indexes), dtype=bool)
            keep[wrong] = False
            indexes = indexes[keep]
        assert table.num_rows == len(indexes), (table.num_rows, len(indexes))
        found = {name: _whole(table.column(names[at])) for at, name in enumerate(self._header) if names[at] in wanted}
        if dialect.trim:  # no message with quotes comes here then
            found = {name: pc.utf8_trim(texts, characters=_SPACES) for name, texts in found.items()}
        self._finish(found, indexes, pieces, bad)

    def _decode_others(
        self, batch: pa.StringArray, indexes: np.ndarray, pieces: list[Piece], bad: list[Refusal]
    ) -> None:
        """Messages with escapes, line breaks, or something wrong, one by one."""
        kept: list[int] = []
        columns: dict[str, list[str | None]] = {field.name: [] for field in self._fields}
        for at, text in enumerate(batch.to_pylist()):
            try:
                record = self._record(text)
            except BadValue as problem:
                bad.append(Refusal(int(indexes[at]), problem.cause, problem.detail))
                continue
            kept.append(at)
            for name, column in columns.items():
                column.append(record.get(name))
        found = {name: pa.array(column, pa.string()) for name, column in columns.items()}
        self._finish(found, indexes[kept], pieces, bad)

    def _record(self, text: str) -> dict[str, str]:
        """Raises BadValue."""
        records = parse_records(text.removeprefix("\ufeff"), self._dialect)
        if self._dialect.header is None:
            header, *records = records or [[]]
        else:
            header = list(self._header)
        if len(records) != 1:
            raise BadValue(Cause.MALFORMED_CSV, f"{len(records)} records in a message, expected one")
        (cells,) = records
        if len(cells) != len(header):
            raise BadValue(Cause.WRONG_FIELD_COUNT, f"{len(cells)} fields, the header has {len(header)}")
        return dict(zip(header, cells, strict=True))

    def _finish(
        self, found: Mapping[str, pa.StringArray], indexes: np.ndarray, pieces: list[Piece], bad: list[Refusal]
    ) -> None:
        columns = [
            fit(field, self._cells(field, found.get(field.name), len(indexes)), keep_going=self._keep_going)
            for field in self._fields
        ]
        pieces.append(settle(self._fields, indexes, columns, bad))

    def _cells(self, field: FieldSpec, texts: pa.StringArray | None, count: int) -> pa.Array:
        """A column of text, missing cells as nulls; multi-value cells split."""
        if texts is None:
            return pa.nulls(count)
        missing = pc.equal(pc.binary_length(texts), 0)
        if self._dialect.null_text:
            missing = pc.or_(missing, pc.equal(texts, self._dialect.null_text))
        if pc.any(missing).as_py():
            texts = pc.if_else(missing, None, texts)
        if field.single_value:
            return texts
        if not self._dialect.multi_value_delimiter:
            return as_lists(texts)
        lists = pc.split_pattern(texts, self._dialect.multi_value_delimiter)
        items = lists.values
        empty = pc.equal(pc.binary_length(items), 0)
        if pc.any(empty).as_py():
            items = pc.if_else(empty, None, items)
        mask = texts.is_null() if texts.null_count else None
        return pa.ListArray.from_arrays(lists.offsets, items, mask=mask)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _as_text(values: pa.BinaryArray, hopeless: np.ndarray, bad: list[Refusal]) -> pa.StringArray:
    """The messages as text; those that are not UTF-8 become hopeless."""
    values = pc.if_else(pa.array(~hopeless), values, b"") if hopeless.any() else values
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        pass
    for at, message in enumerate(values.to_pylist()):
        try:
            message.decode()
        except UnicodeDecodeError as error:
            bad.append(Refusal(at, Cause.MALFORMED_CSV, f"not UTF-8: {error.reason} at byte {error.start}"))
            hopeless[at] = True
    return pc.if_else(pa.array(~hopeless), values, b"").cast(pa.string())


def _patterns(dialect: Dialect) -> tuple[str, str]:
    """Messages that Arrow and Commons CSV read alike: nothing special in them; or all quotes at their places."""
    escape = re.escape(dialect.escape) if dialect.escape else ""
    quote = re.escape(dialect.quote) if dialect.quote else ""
    delimiter = re.escape(dialect.delimiter)
    plain = rf"^[^{quote}{escape}\r\n\x00\x{{FEFF}}]+$"
    if not quote or dialect.trim:
        return plain, ""
    field = (
        rf"(?:[^{quote}{escape}{delimiter}\r\n\x00\x{{FEFF}}]*"
        rf"|{quote}(?:[^{quote}{escape}\r\n\x00]|{quote}{quote})*{quote})"
    )
    return plain, rf"^{field}(?:{delimiter}{field})*$"


def parse_records(text: str, dialect: Dialect) -> list[list[str]]:
    """The records of a text, as Commons CSV finds them; empty lines are none. Raises BadValue."""
    records: list[list[str]] = []
    at = 0
    while at < len(text):
        if text[at] in "\r\n":
            at += 1
            continue
        cells, at = _one_record(text, at, dialect)
        records.append(cells)
    return records


def _one_record(text: str, at: int, dialect: Dialect) -> tuple[list[str], int]:
    cells: list[str] = []
    while True:
        if dialect.trim:
            while at < len(text) and text[at] in _SPACES and text[at] != dialect.delimiter:
                at += 1
        if dialect.quote and at < len(text) and text[at] == dialect.quote:
            cell, at = _quoted(text, at + 1, dialect)
        else:
            cell, at = _unquoted(text, at, dialect)
        cells.append(cell)
        if at >= len(text) or text[at] in "\r\n":
            return cells, at
        at += 1


def _unquoted(text: str, at: int, dialect: Dialect) -> tuple[str, int]:
    parts: list[str] = []
    while at < len(text) and text[at] != dialect.delimiter and text[at] not in "\r\n":
        part, at = _escaped(text, at, dialect) if text[at] == dialect.escape else (text[at], at + 1)
        parts.append(part)
    cell = "".join(parts)
    return cell.rstrip(_SPACES + "\r\n") if dialect.trim else cell, at


def _quoted(text: str, at: int, dialect: Dialect) -> tuple[str, int]:
    """`at` is behind the opening quote."""
    parts: list[str] = []
    begin = at - 1
    while at < len(text):
        letter = text[at]
        if letter == dialect.escape:
            part, at = _escaped(text, at, dialect)
            parts.append(part)
        elif letter != dialect.quote:
            parts.append(letter)
            at += 1
        elif text[at + 1 : at + 2] == dialect.quote:
            parts.append(letter)
            at += 2
        else:
            return "".join(parts), _behind_quote(text, at + 1, dialect)
    raise BadValue(Cause.MALFORMED_CSV, f"the quote at character {begin + 1} is not closed")


def _behind_quote(text: str, at: int, dialect: Dialect) -> int:
    """The end of a field whose quote is closed; only white space may follow."""
    while at < len(text) and text[at] != dialect.delimiter and text[at] not in "\r\n":
        if text[at] not in _SPACES:
            raise BadValue(Cause.MALFORMED_CSV, f"{text[at]!r} behind the closing quote at character {at + 1}")
        at += 1
    return at


_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}


def _escaped(text: str, at: int, dialect: Dialect) -> tuple[str, int]:
    """What the escape at `at` stands for: a control character or a mark; before anything else, itself."""
    letter = text[at + 1 : at + 2]
    if letter in _ESCAPES:
        return _ESCAPES[letter], at + 2
    if letter and (letter in "\r\n\f\t\b" or letter in (dialect.delimiter, dialect.quote, dialect.escape)):
        return letter, at + 2
    return f"{text[at]}{letter}", at + 1 + len(letter)
