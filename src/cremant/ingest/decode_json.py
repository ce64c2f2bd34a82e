# SPDX-License-Identifier: Apache-2.0
"""JSON messages to columns, columnar: many messages are one parse of Arrow's JSON reader, with the table's own types.

Arrow's reader fails a whole batch for one odd value, and would misalign rows if a message were not exactly one object.
So a batch goes through these steps, each exact, and falls through to the next only where it must:

1. Every message begins with `{` and ends with `}` (after trimming). Joined by newlines, a boundary `}\\n{` cannot lie
   inside a valid JSON value, so as many rows as messages means: one each. Others are decoded one by one.
2. Parse with the columns' own types.
3. Parse with the types that a sample of the batch shows (numbers written as text, text written as numbers, ...), then
   convert by column.
4. The same in chunks, so that one odd row costs only its chunk; chunks that still fail are decoded row by row.

Which step decoded a message must not show in its row: property tests compare them.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from cremant.ingest.causes import BadValue, Refusal
from cremant.ingest.coerce_columns import WIDE_DECIMAL, WORK_TYPES, convert_column, exactly_convertible
from cremant.ingest.decode_rows import RowDecoder
from cremant.ingest.messages import (
    Decoded,
    Piece,
    Schemas,
    assemble,
    bytes_of,
    hopeless_ones,
    runs_of,
    taken,
    work_type,
)
from cremant.model.limits import MESSAGE_DEPTH_MAX
from cremant.model.schema import DataType, FieldSpec

#: Messages of one parse: large enough to amortise the call, small enough that its columns stay in cache.
PARSE_ROWS = 16 * 1024
PARSE_BYTES = 64 * 1024 * 1024
#: A chunk of a batch that failed: one odd row costs about 5 ms of row-by-row work.
CHUNK_ROWS = 1024
#: After so many failed chunks in a row the rest is not tried columnar.
CHUNK_FAILURES = 3
SAMPLE_ROWS = 16

#: Numbers that Arrow's decimal parser might get wrong silently go row by row: long digit runs, large exponents.
_RISKY_DECIMAL = r"[0-9.]{40}|[0-9.][eE]\+?[0-9]{2}"

_READ_TYPES: dict[DataType, pa.DataType] = {
    **WORK_TYPES,
    DataType.BIG_DECIMAL: WIDE_DECIMAL,
    DataType.BYTES: pa.string(),
}
#: Column type -> the kinds of JSON value a sample may show -> the type to read the column as instead.
_Reads = dict[tuple[str, ...], pa.DataType]
_TEXT: _Reads = {("str",): pa.string()}
_FLAG: _Reads = {("bool",): pa.bool_()}
_COUNT: _Reads = {("int",): pa.int64()}
_FRACTION: _Reads = {("float",): pa.float64(), ("float", "int"): pa.float64()}
_OTHER_READS: dict[DataType, _Reads] = {
    DataType.INT: {**_FRACTION, **_TEXT, **_FLAG},
    DataType.LONG: {**_FRACTION, **_TEXT, **_FLAG},
    DataType.TIMESTAMP: {**_FRACTION, **_TEXT},
    DataType.FLOAT: {**_TEXT, **_FLAG},
    DataType.DOUBLE: {**_TEXT, **_FLAG},
    DataType.BIG_DECIMAL: {**_FLAG},
    DataType.BOOLEAN: {**_COUNT, **_FRACTION, **_TEXT},
    DataType.STRING: {**_COUNT, **_FLAG},
    DataType.JSON: {**_COUNT, **_FLAG},
    DataType.BYTES: {},
}


class _Refused(Exception):
    """A columnar parse did not work out; the messages are tried another way."""


class JsonDecoder:
    """Decodes batches of messages into the given columns. Immutable; one per table and config version. Sizes of parses
    and chunks change the speed, never the result."""

    def __init__(
        self,
        fields: tuple[FieldSpec, ...],
        *,
        keep_going: bool = False,
        parse_rows: int = PARSE_ROWS,
        chunk_rows: int = CHUNK_ROWS,
    ) -> None:
        self._fields = fields
        self._parse_rows = parse_rows
        self._chunk_rows = chunk_rows
        self._rows = RowDecoder(fields, keep_going=keep_going)
        self._has_decimal = any(field.data_type is DataType.BIG_DECIMAL for field in fields)
        self._read = pa.schema([pa.field(field.name, _default_read(field)) for field in fields])
        self._types = [work_type(field) for field in fields]

    def schema_ids(self, values: pa.BinaryArray) -> set[int]:
        return set()

    def decode(self, values: pa.BinaryArray, schemas: Schemas = MappingProxyType({})) -> Decoded:
        """`values`: nullable binary array of messages."""
        bad: list[Refusal] = []
        messages = _trimmed(values)
        fast, slow = self._sort_out(messages, bad)
        pieces: list[Piece] = []
        for indexes in runs_of(messages, fast, self._parse_rows, PARSE_BYTES):
            self._decode_batch(taken(messages, indexes), indexes, pieces, bad)
        if len(slow):
            self._decode_rows(values.take(pa.array(slow)), slow, pieces, bad)
        return assemble(self._types, pieces, bad)

    def _sort_out(self, messages: pa.BinaryArray, bad: list[Refusal]) -> tuple[np.ndarray, np.ndarray]:
        """Indexes of messages for the columnar decoder and for the other one; hopeless ones go to `bad`."""
        hopeless = hopeless_ones(messages, bad)
        fast = ~hopeless
        offsets, data = bytes_of(messages)
        if len(data):
            first = data[np.minimum(offsets[:-1], len(data) - 1)]
            last = data[np.maximum(offsets[1:] - 1, 0)]
            fast &= (first == ord("{")) & (last == ord("}")) & (offsets[1:] > offsets[:-1])
            deep = _maybe_deep(offsets, data, int(np.count_nonzero(fast)))
            if deep is not None:
                fast &= ~deep
        if self._has_decimal and fast.any():
            risky = pc.match_substring_regex(pc.fill_null(messages, b""), _RISKY_DECIMAL)
            fast &= ~risky.to_numpy(zero_copy_only=False)
        return np.flatnonzero(fast), np.flatnonzero(~(fast | hopeless))

    def _decode_batch(
        self,
        batch: pa.BinaryArray,
        indexes: np.ndarray,
        pieces: list[Piece],
        bad: list[Refusal],
    ) -> None:
        for read in self._reads(batch):
            try:
                pieces.append((indexes, self._parse(batch, read)))
                return
            except _Refused:
                continue
        if len(batch) <= self._chunk_rows:
            self._decode_rows(batch, indexes, pieces, bad)
            return
        failures = 0
        read = self._sampled_read(batch)
        for start in range(0, len(batch), self._chunk_rows):
            chunk = batch.slice(start, self._chunk_rows)
            at = indexes[start : start + self._chunk_rows]
            if failures >= CHUNK_FAILURES:
                self._decode_rows(batch.slice(start), indexes[start:], pieces, bad)
                return
            try:
                pieces.append((at, self._parse(chunk, read)))
                failures = 0
            except _Refused:
                failures += 1
                self._decode_rows(chunk, at, pieces, bad)

    def _reads(self, batch: pa.BinaryArray) -> Any:
        """The types to try: the columns' own, then those a sample shows, if they differ."""
        yield self._read
        sampled = self._sampled_read(batch)
        if sampled != self._read:
            yield sampled

    def _sampled_read(self, batch: pa.BinaryArray) -> pa.Schema:
        step = max(1, len(batch) // SAMPLE_ROWS)
        kinds: list[set[str]] = [set() for _ in self._fields]
        for at in range(0, len(batch), step):
            try:
                record = self._rows.record(batch[at].as_py())
            except BadValue:
                continue
            for field, seen in zip(self._fields, kinds, strict=True):
                value = record.get(field.name)
                if value is not None:
                    seen.add(_kind_of(value))
        return pa.schema(
            [
                pa.field(field.name, _other_read(field, seen) or _default_read(field))
                for field, seen in zip(self._fields, kinds, strict=True)
            ]
        )

    def _parse(self, batch: pa.BinaryArray, read: pa.Schema) -> list[pa.Array]:
        """One parse of Arrow's reader, rows exactly those of `batch`. Raises _Refused."""
        joined = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, len(batch)], pa.int32()), batch), b"\n")
        try:
            text = joined.cast(pa.string())[0].as_buffer()
            table = pj.read_json(
                pa.BufferReader(text),
                read_options=pj.ReadOptions(use_threads=False, block_size=text.size + 1),
                parse_options=pj.ParseOptions(explicit_schema=read, unexpected_field_behavior="ignore"),
            )
        except pa.ArrowInvalid as error:
            raise _Refused from error
        if table.num_rows != len(batch):
            raise _Refused
        return [
            self._convert(table.column(at).combine_chunks(), field, wanted)
            for at, (field, wanted) in enumerate(zip(self._fields, self._types, strict=True))
        ]

    def _convert(self, array: pa.Array | pa.ChunkedArray, field: FieldSpec, wanted: pa.DataType) -> pa.Array:
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
        if array.type == wanted:
            return array
        if field.single_value:
            return _convert_all(array, field.data_type)
        if not pa.types.is_list(array.type):
            single = _convert_all(array, field.data_type)
            offsets = np.concatenate(([0], np.cumsum(single.is_valid().to_numpy(zero_copy_only=False))))
            lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), single.drop_null(), type=wanted)
            return lists
        items = _convert_all(array.values, field.data_type)
        mask = array.is_null() if array.null_count else None
        return pa.ListArray.from_arrays(array.offsets, items, type=wanted, mask=mask)

    def _decode_rows(
        self,
        batch: pa.BinaryArray,
        indexes: np.ndarray,
        pieces: list[Piece],
        bad: list[Refusal],
    ) -> None:
        decoded = self._rows.decode(batch.to_pylist())
        bad.extend(refusal._replace(at=int(indexes[refusal.at])) for refusal in decoded.bad)
        columns = [pa.array(cells, kind) for cells, kind in zip(decoded.columns, self._types, strict=True)]
        pieces.append((indexes[decoded.kept], columns))


def _default_read(field: FieldSpec) -> pa.DataType:
    base = _READ_TYPES[field.data_type]
    return base if field.single_value else pa.list_(base)


def _other_read(field: FieldSpec, kinds: set[str]) -> pa.DataType | None:
    if field.single_value:
        return _OTHER_READS[field.data_type].get(tuple(sorted(kinds)))
    if kinds and "list" not in kinds and "dict" not in kinds:
        own = {DataType.BOOLEAN: {"bool"}, DataType.STRING: {"str"}, DataType.JSON: {"str"}, DataType.BYTES: {"str"}}
        if kinds <= own.get(field.data_type, {"int", "float"}):
            return _READ_TYPES[field.data_type]
    return None


def _kind_of(value: Any) -> str:
    name = type(value).__name__
    return "float" if name == "Decimal" else name


def _convert_all(array: pa.Array, data_type: DataType) -> pa.Array:
    if not exactly_convertible(array, data_type):
        raise _Refused
    converted = convert_column(array, data_type)
    if converted.failed is not None:
        raise _Refused
    return converted.array


def _trimmed(values: pa.BinaryArray) -> pa.BinaryArray:
    """The messages without white space around them; the same array if none has any."""
    offsets, data = bytes_of(values)
    if not len(data):
        return values
    lengths = offsets[1:] - offsets[:-1]
    first = data[np.minimum(offsets[:-1], len(data) - 1)]
    last = data[np.maximum(offsets[1:] - 1, 0)]
    if not (((first <= 32) | (last <= 32)) & (lengths > 0)).any():
        return values
    return pc.ascii_trim(values.view(pa.string()), characters=" \t\r\n").view(pa.binary())


def _maybe_deep(offsets: np.ndarray, data: np.ndarray, candidates: int) -> np.ndarray | None:
    """Messages with more brackets than may nest, None if there is none (nearly always). `candidates`: how many messages
    have one bracket at least; if all brackets together are few more, no message can have too many."""
    begin, end = int(offsets[0]), int(offsets[-1])
    # '[' and '{' differ in one bit.
    opening = (data[begin:end] | 0x20) == ord("{")
    if int(np.count_nonzero(opening)) - candidates < MESSAGE_DEPTH_MAX:
        return None
    before = np.searchsorted(np.flatnonzero(opening), offsets - begin)
    return np.asarray(np.diff(before) > MESSAGE_DEPTH_MAX)
