# SPDX-License-Identifier: Apache-2.0
"""Avro messages to columns: a record with a schema known beforehand, or in Confluent's wire format (a zero byte, the id
of the writer's schema in a registry as four bytes, the record).

Each message is read with the schema it was written with; fields are found by name, so fields that come and go between
versions are missing cells, as in Pinot. Decoding is fastavro's, message by message; what follows is by column. The
registry is not asked here: its answers come in as an argument (pure, rule E-2: an id never changes its meaning).
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import fastavro
import fastavro._read_py as fastavro_slow
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.ingest.avro_schema import Compiled, FieldKind, compile_schema, per_ms, reading_of
from cremant.ingest.causes import BadValue, Cause, Refusal
from cremant.ingest.coerce import cell_converter
from cremant.ingest.messages import (
    Decoded,
    Piece,
    Schemas,
    assemble,
    bytes_of,
    fit,
    hopeless_ones,
    settle,
    taken,
    work_type,
)
from cremant.model.errors import InvalidConfig
from cremant.model.limits import MESSAGE_DEPTH_MAX
from cremant.model.schema import DataType, FieldSpec

#: Magic byte and schema id of the wire format.
WIRE_HEAD_BYTES = 5
_ARROW: dict[str, pa.DataType] = {
    "boolean": pa.bool_(), "int": pa.int64(), "long": pa.int64(), "float": pa.float64(), "double": pa.float64(),
    "string": pa.string(), "enum": pa.string(), "bytes": pa.binary(), "fixed": pa.binary(),
}  # fmt: skip
#: What fastavro raises for bytes that are not a record of the schema.
_BROKEN = (EOFError, ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError)
#: Frames that fastavro's reader in Python needs for a level of nesting, with room.
_FRAMES_PER_LEVEL = 12


class AvroDecoder:
    """Every message is a record of one schema. Immutable."""

    def __init__(self, fields: tuple[FieldSpec, ...], schema_text: str, *, keep_going: bool = False) -> None:
        self._records = _Records(fields, keep_going=keep_going)
        self._schema = compile_schema(schema_text, "Avro decoder, schema")

    def schema_ids(self, values: pa.BinaryArray) -> set[int]:
        return set()

    def decode(self, values: pa.BinaryArray, schemas: Schemas = MappingProxyType({})) -> Decoded:
        bad: list[Refusal] = []
        pieces: list[Piece] = []
        indexes = np.flatnonzero(~hopeless_ones(values, bad))
        if len(indexes):
            self._records.decode(self._schema, taken(values, indexes), indexes, 0, pieces, bad)
        return assemble(self._records.types, pieces, bad)


class RegistryDecoder:
    """Every message names its schema. Immutable; compiled schemas are kept, since ids never change their meaning."""

    def __init__(self, fields: tuple[FieldSpec, ...], *, keep_going: bool = False) -> None:
        self._records = _Records(fields, keep_going=keep_going)

    def schema_ids(self, values: pa.BinaryArray) -> set[int]:
        ids, _ = _ids_of(values)
        return set(np.unique(ids[ids >= 0]).tolist())

    def decode(self, values: pa.BinaryArray, schemas: Schemas = MappingProxyType({})) -> Decoded:
        bad: list[Refusal] = []
        pieces: list[Piece] = []
        hopeless = hopeless_ones(values, bad)
        ids, first = _ids_of(values)
        ids[hopeless] = -2
        for at in np.flatnonzero(ids == -1).tolist():
            detail = f"the first byte is {first[at]}, not 0: not in a schema registry's wire format"
            if not first[at]:
                detail = f"{len(values[at].as_py())} bytes are too few for a schema registry's wire format"
            bad.append(Refusal(at, Cause.MALFORMED_AVRO, detail))
        for schema_id in np.unique(ids[ids >= 0]).tolist():
            indexes = np.flatnonzero(ids == schema_id)
            try:
                schema = _schema_of(schema_id, schemas[schema_id])
            except BadValue as problem:
                bad.extend(Refusal(at, problem.cause, problem.detail) for at in indexes.tolist())
                continue
            self._records.decode(schema, taken(values, indexes), indexes, WIRE_HEAD_BYTES, pieces, bad)
        return assemble(self._records.types, pieces, bad)


def _schema_of(schema_id: int, text: str | None) -> Compiled:
    """Raises BadValue."""
    if text is None:
        raise BadValue(Cause.UNKNOWN_SCHEMA, f"the schema registry knows no schema of id {schema_id}")
    found = _compiled(schema_id, text)
    if isinstance(found, str):
        raise BadValue(Cause.UNKNOWN_SCHEMA, found)
    return found


@lru_cache(maxsize=1_000)
def _compiled(schema_id: int, text: str) -> Compiled | str:
    try:
        return compile_schema(text, f"schema {schema_id} of the registry")
    except InvalidConfig as error:
        return str(error)


def _ids_of(values: pa.BinaryArray) -> tuple[np.ndarray, np.ndarray]:
    """Schema id of each message, -1 where it has none; and its first byte (0 where there is none)."""
    offsets, data = bytes_of(values)
    begin = offsets[:-1].astype(np.int64)
    lengths = offsets[1:] - offsets[:-1]
    if not len(data):
        return np.full(len(values), -1, dtype=np.int64), np.zeros(len(values), dtype=np.uint8)
    last = len(data) - 1
    first = np.where(lengths > 0, data[np.minimum(begin, last)], 0).astype(np.uint8)
    ids = np.zeros(len(values), dtype=np.int64)
    for at in range(1, WIRE_HEAD_BYTES):
        ids = (ids << 8) | data[np.minimum(begin + at, last)]
    return np.where((lengths >= WIRE_HEAD_BYTES) & (first == 0), ids, -1), first


class _Records:
    """Records of one schema to columns."""

    def __init__(self, fields: tuple[FieldSpec, ...], *, keep_going: bool) -> None:
        self._fields = fields
        self._keep_going = keep_going
        self.types = [work_type(field) for field in fields]

    def decode(
        self, schema: Compiled, values: pa.BinaryArray, indexes: np.ndarray, head: int, pieces: list[Piece],
        bad: list[Refusal],
    ) -> None:  # fmt: skip
        with _room_to_nest() if schema.recursive else nullcontext():
            records, kept = _read(schema, values, indexes, head, bad)
            columns = [self._column(field, schema, records) for field in self._fields]
        pieces.append(settle(self._fields, indexes[kept], columns, bad))

    def _column(
        self, field: FieldSpec, schema: Compiled, records: list[dict[str, Any]]
    ) -> tuple[pa.Array, dict[int, BadValue]]:
        kind = schema.fields.get(field.name)
        if kind is None or kind.kind == "null":
            return pa.nulls(len(records), work_type(field)), {}
        name = field.name
        cells = [record[name] for record in records]
        if kind.kind in _ARROW:
            column = _scalars(field, kind, cells)
            if column is not None:
                return fit(field, column, keep_going=self._keep_going)
        elif kind.item is not None and kind.item.kind in _ARROW and not field.single_value:
            column = _arrays(field, kind.item, cells)
            if column is not None:
                return fit(field, column, keep_going=self._keep_going)
        return self._one_by_one(field, schema, kind, cells)

    def _one_by_one(
        self, field: FieldSpec, schema: Compiled, kind: FieldKind, cells: list[Any]
    ) -> tuple[pa.Array, dict[int, BadValue]]:
        """Nested values, and kinds that do not belong to the column's type."""
        plain = reading_of(kind, field.data_type) if kind.kind in _ARROW else schema.plain[field.name]
        if kind.item is not None and kind.item.kind in _ARROW and field.data_type is not DataType.JSON:
            item = reading_of(kind.item, field.data_type)
            plain = None if item is None else lambda values: [None if v is None else item(v) for v in values]
        convert = cell_converter(field.data_type, single_value=field.single_value)
        done: list[Any] = []
        problems: dict[int, BadValue] = {}
        for row, cell in enumerate(cells):
            try:
                if cell is not None:
                    cell = convert(plain(cell) if plain else cell)
            except BadValue as problem:
                problems[row] = problem
                cell = None
            except (OverflowError, ValueError) as error:
                problems[row] = BadValue(Cause.OUT_OF_RANGE, f"{cell!r} is out of range: {error}")
                cell = None
            done.append(cell)
        return pa.array(done, work_type(field)), {} if self._keep_going else problems


def _read(
    schema: Compiled, values: pa.BinaryArray, indexes: np.ndarray, head: int, bad: list[Refusal]
) -> tuple[list[dict[str, Any]], list[int]]:
    """The records of the messages that are such, and which they are."""
    read: Any = _read_recursive if schema.recursive else fastavro.schemaless_reader
    records: list[dict[str, Any]] = []
    kept: list[int] = []
    for at, message in enumerate(values.to_pylist()):
        stream = io.BytesIO(message)
        if head:
            stream.seek(head)
        try:
            record = read(stream, schema.parsed, None)
        except BadValue as problem:
            bad.append(Refusal(int(indexes[at]), problem.cause, problem.detail))
            continue
        except _BROKEN as error:
            detail = f"not a record of its schema: {type(error).__name__}: {error}".rstrip(": ")
            bad.append(Refusal(int(indexes[at]), Cause.MALFORMED_AVRO, detail))
            continue
        left = len(message) - stream.tell()
        if left:
            bad.append(Refusal(int(indexes[at]), Cause.MALFORMED_AVRO, f"{left} bytes are left behind the record"))
            continue
        records.append(record)
        kept.append(at)
    return records, kept


def _read_recursive(stream: io.BytesIO, schema: Any, reader_schema: None) -> Any:
    """A record that may hold its own kind. fastavro's compiled reader ends the process where a message nests some
    thousand levels, so the other one reads, which stops at a depth. Raises BadValue, and what the reader raises."""
    try:
        record = fastavro_slow.schemaless_reader(stream, schema, reader_schema)
    except RecursionError:
        raise _too_deep() from None
    level: list[Any] = [record]
    depth = 0
    while level:
        depth += 1
        if depth > MESSAGE_DEPTH_MAX:
            raise _too_deep()
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, (dict, list))
        ]
    return record


@contextmanager
def _room_to_nest() -> Iterator[None]:
    """A stack on which every message of at most MESSAGE_DEPTH_MAX levels can be read, wherever it is called from."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + _FRAMES_PER_LEVEL * MESSAGE_DEPTH_MAX)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def _too_deep() -> BadValue:
    return BadValue(Cause.TOO_DEEP, f"nested deeper than {MESSAGE_DEPTH_MAX}")


def _scalars(field: FieldSpec, kind: FieldKind, cells: list[Any]) -> pa.Array | None:
    """A column as Arrow holds the Avro type; None if the values must be looked at one by one."""
    reading = reading_of(kind, field.data_type)
    if kind.logical == "decimal" and field.data_type not in (DataType.STRING, DataType.JSON, DataType.BYTES):
        return None
    try:
        if reading is not None:
            cells = [None if cell is None else reading(cell) for cell in cells]
            column = pa.array(cells) if cells and any(cell is not None for cell in cells) else pa.nulls(len(cells))
        else:
            column = pa.array(cells, _ARROW[kind.kind])
    except (OverflowError, ValueError, pa.ArrowException):
        return None
    per = per_ms(kind)
    if per > 1 and reading is None:
        column = _floor_divided(column, per)
    if pa.types.is_binary(column.type) and field.data_type is not DataType.BYTES:
        return None
    return column


def _arrays(field: FieldSpec, item: FieldKind, cells: list[Any]) -> pa.ListArray | None:
    lengths = [0 if cell is None else len(cell) for cell in cells]
    items = _scalars(field, item, [value for cell in cells if cell for value in cell])
    if items is None:
        return None
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), items)


def _floor_divided(column: pa.Array, by: int) -> pa.Array:
    quotient = pc.divide(column, by)
    exact = pc.equal(pc.multiply(quotient, by), column)
    return pc.if_else(pc.or_(exact, pc.greater_equal(column, 0)), quotient, pc.subtract(quotient, 1))
