# SPDX-License-Identifier: Apache-2.0
"""Functions over multi-value columns and over bytes.

A multi-value argument is a list per row without nulls; an empty one is null. Pinot's names end in the element's type
(`arrayContainsInt`, `arrayDistinctString`); here the column has a type, so all are one function.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.ingest.evaluate import (
    Body,
    Function,
    Kind,
    Value,
    by_value,
    constant,
    either,
    literal_number,
    literal_text,
    to_kind,
)
from cremant.ingest.functions import function, kind_of
from cremant.model.errors import InvalidConfig

_L, _S, _B, _BYTES, _ANY = Kind.LONG, Kind.STRING, Kind.BOOLEAN, Kind.BYTES, None


def lists_without_nulls(lists: pa.ListArray) -> pa.ListArray:
    """Nulls taken out of cells, empty cells null."""
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    items = lists.flatten()
    if items.null_count:
        valid = items.is_valid().to_numpy(zero_copy_only=False)
        parents = np.repeat(np.arange(len(lists)), counts)
        counts = np.bincount(parents[valid], minlength=len(lists))
        items = items.drop_null()
    return _as_lists(items, counts)


def _as_lists(items: pa.Array, counts: np.ndarray) -> pa.ListArray:
    offsets = np.concatenate(([0], np.cumsum(counts)))
    empty = counts == 0
    mask = pa.array(empty) if empty.any() else None
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), items, mask=mask)


def _parts(lists: pa.ListArray) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """Items, how many each row has, and the row of each."""
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return lists.flatten(), counts, np.repeat(np.arange(len(lists)), counts)


def _length(args: list[Value], count: int) -> Value:
    return Value(pc.list_value_length(args[0].array).cast(pa.int64()), args[0].failed)


def _element_at(literals: dict[int, Any], where: str) -> Body:
    """Counts from 1; null where there is none."""
    place = literal_number(literals, 1, where)
    if place < 1:
        raise InvalidConfig(f"{where}: elements count from 1, found {place}")

    def body(args: list[Value], count: int) -> Value:
        items, counts, _ = _parts(args[0].array)
        begins = np.cumsum(counts) - counts
        there = counts >= place
        picked = pa.array(begins + place - 1, pa.int64(), mask=~there)
        return Value(items.take(picked), args[0].failed)

    return body


def _contains(args: list[Value], count: int) -> Value:
    lists, wanted = args
    items, _, rows = _parts(lists.array)
    kind = kind_of(items) or Kind.STRING
    wanted = to_kind(wanted, kind)
    same = pc.equal(to_kind(Value(items), kind).array, wanted.array.take(pa.array(rows)))
    hits = np.bincount(rows[pc.fill_null(same, False).to_numpy(zero_copy_only=False)], minlength=count)
    found = pc.if_else(lists.array.is_valid(), pa.array(hits > 0), None)
    return Value(found, either(lists.failed, wanted.failed))


def _folded(name: str) -> Callable[[dict[int, Any], str], Body]:
    """sum, min, max, mean of each cell."""

    def body(args: list[Value], count: int) -> Value:
        items, _, rows = _parts(args[0].array)
        numbers = to_kind(Value(items), Kind.DOUBLE)
        table = pa.table({"row": rows, "item": numbers.array}).group_by("row").aggregate([("item", name)])
        result = np.full(count, np.nan)
        result[table["row"].to_numpy()] = table[f"item_{name}"].to_numpy()
        failed = None
        if numbers.failed is not None:
            failed = np.zeros(count, dtype=bool)
            failed[rows[numbers.failed]] = True
        missing = args[0].array.is_null().to_numpy(zero_copy_only=False)
        return Value(pa.array(result, mask=missing), either(args[0].failed, failed))

    return lambda literals, where: body


def _sorted_rows(rows: np.ndarray, items: pa.Array) -> np.ndarray:
    order = pc.sort_indices(pa.table({"row": rows, "item": items}), [("row", "ascending"), ("item", "ascending")])
    return np.asarray(order.to_numpy())


def _sort(args: list[Value], count: int) -> Value:
    items, counts, rows = _parts(args[0].array)
    return Value(_as_lists(items.take(pa.array(_sorted_rows(rows, items))), counts), args[0].failed)


def _reverse(args: list[Value], count: int) -> Value:
    items, counts, rows = _parts(args[0].array)
    order = np.lexsort((-np.arange(len(items)), rows))
    return Value(_as_lists(items.take(pa.array(order)), counts), args[0].failed)


def _distinct(args: list[Value], count: int) -> Value:
    """The first of equal ones stays where it is."""
    items, _, rows = _parts(args[0].array)
    codes = items.dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)
    _, first = np.unique(rows * (int(codes.max(initial=0)) + 1) + codes, return_index=True)
    first.sort()
    counts = np.bincount(rows[first], minlength=count)
    return Value(_as_lists(items.take(pa.array(first)), counts), args[0].failed)


def _join(literals: dict[int, Any], where: str) -> Body:
    separator = literal_text(literals, 1, where)

    def body(args: list[Value], count: int) -> Value:
        items, counts, _ = _parts(args[0].array)
        texts = to_kind(Value(items), Kind.STRING).array
        return Value(pc.binary_join(_as_lists(texts, counts), separator), args[0].failed)

    return body


def _split(literals: dict[int, Any], where: str) -> Body:
    delimiter = literal_text(literals, 1, where)
    if not delimiter:
        raise InvalidConfig(f"{where}: the delimiter is empty")
    return lambda args, count: Value(pc.split_pattern(args[0].array, delimiter), args[0].failed)


def _same(args: list[Value], count: int) -> Value:
    return args[0]


def _each(compute: Callable[[Any], Any], kind: Kind) -> Callable[[dict[int, Any], str], Body]:
    """`compute` for each distinct value; ValueError fails its rows."""

    def body(args: list[Value], count: int) -> Value:
        if args[0].array.null_count == count:
            return Value(constant(None, kind, count), args[0].failed)
        done = by_value(lambda item: None if item is None else compute(item), args[0].array, kind)
        return Value(done.array, either(args[0].failed, done.failed))

    return lambda literals, where: body


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


def _always(body: Body) -> Callable[[dict[int, Any], str], Body]:
    return lambda literals, where: body


ARRAY_FUNCTIONS: tuple[Function, ...] = (
    function("arraylength", (_ANY,), _L, _always(_length), arrays=(0,)),
    function("arrayelementat", (_ANY, _L), None, _element_at, literals=(1,), arrays=(0,)),
    function("arraycontains", (_ANY, _ANY), _B, _always(_contains), arrays=(0,)),
    *(
        function(name, (_ANY,), Kind.DOUBLE, _folded(fold), arrays=(0,))
        for name, fold in (("arraysum", "sum"), ("arraymin", "min"), ("arraymax", "max"), ("arrayaverage", "mean"))
    ),
    function("arraysort", (_ANY,), None, _always(_sort), arrays=(0,), many=True),
    function("arrayreverse", (_ANY,), None, _always(_reverse), arrays=(0,), many=True),
    function("arraydistinct", (_ANY,), None, _always(_distinct), arrays=(0,), many=True),
    function("arraytostring", (_ANY, _S), _S, _join, literals=(1,), arrays=(0,)),
    function("split", (_S, _S), _S, _split, literals=(1,), many=True),
)
BYTES_FUNCTIONS: tuple[Function, ...] = (
    function("hextobytes", (_BYTES,), _BYTES, _always(_same)),
    function("bytestohex", (_BYTES,), _S, _always(lambda args, count: to_kind(args[0], Kind.STRING))),
    function(
        "toutf8", (_S,), _BYTES, _always(lambda args, count: Value(args[0].array.cast(pa.binary()), args[0].failed))
    ),
    function("fromutf8", (_BYTES,), _S, _each(bytes.decode, Kind.STRING)),
    function("tobase64", (_BYTES,), _S, _each(lambda item: base64.b64encode(item).decode(), Kind.STRING)),
    function("frombase64", (_S,), _BYTES, _each(_from_base64, Kind.BYTES)),
    function("md5", (_BYTES,), _S, _each(lambda item: hashlib.md5(item).hexdigest(), Kind.STRING)),
    function("sha", (_BYTES,), _S, _each(lambda item: hashlib.sha1(item).hexdigest(), Kind.STRING)),
    function("sha256", (_BYTES,), _S, _each(lambda item: hashlib.sha256(item).hexdigest(), Kind.STRING)),
    function("sha512", (_BYTES,), _S, _each(lambda item: hashlib.sha512(item).hexdigest(), Kind.STRING)),
)
ARRAY_ALIASES = {
    "cardinality": "arraylength",
    "arrayjoin": "arraytostring",
    **{
        f"array{verb}{kind}": f"array{verb}"
        for verb in ("contains", "sort", "reverse", "distinct", "elementat", "sum", "min", "max")
        for kind in ("int", "long", "float", "double", "string")
    },
}
