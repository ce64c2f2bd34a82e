# SPDX-License-Identifier: Apache-2.0
"""Cells as Pinot writes them in JSON."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from cremant.broker.arrow import arrow_table
from cremant.broker.encode import encode_rows
from cremant.sql.plan import ResultColumn

VIEW = pa.string_view()
EPOCH = datetime.fromtimestamp(0, UTC).replace(tzinfo=None)
CASES: list[tuple[str, pa.DataType, list[Any], str]] = [
    ("INT", pa.int32(), [1, -(2**31)], "[[1],[-2147483648]]"),
    ("LONG", pa.int64(), [2**53 + 1, -(2**63)], "[[9007199254740993],[-9223372036854775808]]"),
    ("LONG", pa.int64(), [1, None], "[[1],[null]]"),
    ("INT", pa.uint64(), [3], "[[3]]"),
    ("DOUBLE", pa.float64(), [0.0, 0.1, 1e300], "[[0.0],[0.1],[1e300]]"),
    ("DOUBLE", pa.float64(), [float("nan"), float("inf"), float("-inf")], '[["NaN"],["Infinity"],["-Infinity"]]'),
    ("DOUBLE", pa.int64(), [3, None], "[[3.0],[null]]"),
    ("FLOAT", pa.float32(), [0.1, 16777216.0, float("inf")], '[[0.1],[16777216.0],["Infinity"]]'),
    ("BOOLEAN", pa.bool_(), [True, False, None], "[[true],[false],[null]]"),
    ("STRING", pa.string(), ["a\"b\\\n\u00e9", "", None], None),
    ("STRING", VIEW, ["null", "x" * 40], None),
    ("STRING", pa.dictionary(pa.int32(), pa.string()), ["a", "b", "a"], '[["a"],["b"],["a"]]'),
    ("JSON", pa.string(), ['{"a":1}'], '[["{\\"a\\":1}"]]'),
    ("BYTES", pa.binary(), [b"\x00\xff", b""], '[["00ff"],[""]]'),
    ("BIG_DECIMAL", pa.decimal128(38, 18), [Decimal("12.50"), Decimal("100"), Decimal("-0.001")],
     '[["12.5"],["100"],["-0.001"]]'),
    ("TIMESTAMP", pa.int64(), [0, 1_704_067_200_000, 1_704_067_200_120, -1],
     '[["1970-01-01 00:00:00.0"],["2024-01-01 00:00:00.0"],["2024-01-01 00:00:00.12"],["1969-12-31 23:59:59.999"]]'),
    ("STRING_ARRAY", pa.list_(pa.string()), [["a", "b"], [], None], '[[["a","b"]],[[]],[null]]'),
    ("LONG_ARRAY", pa.list_(pa.int64()), [[2**60], [1, 2]], "[[[1152921504606846976]],[[1,2]]]"),
    ("DOUBLE_ARRAY", pa.list_(pa.float64()), [[float("inf"), 1.0]], '[[["Infinity",1.0]]]'),
    ("UNKNOWN", pa.null(), [None], "[[null]]"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "arrow", "values", "expected"), CASES, ids=lambda value: str(value)[:30])
def test_cells_are_written_as_pinot_does(
    kind: str, arrow: pa.DataType, values: list[Any], expected: str | None
) -> None:
    if arrow == VIEW:
        array = pa.array(values).cast(VIEW)
    elif pa.types.is_dictionary(arrow):
        array = pa.array(values).dictionary_encode()
    else:
        array = pa.array(values, arrow)
    text = bytes(encode_rows(pa.table({"c": array}), [ResultColumn("c", kind)]))
    if expected is None:
        assert json.loads(text) == [[value] for value in values]
    else:
        assert text.decode().replace("1e+300", "1e300") == expected


ARROW_CASES: list[tuple[str, pa.DataType, list[Any], pa.DataType, list[Any]]] = [
    ("INT", pa.int64(), [1, None], pa.int32(), [1, None]),
    ("LONG", pa.uint64(), [3], pa.int64(), [3]),
    ("FLOAT", pa.float32(), [0.5, float("inf")], pa.float32(), [0.5, float("inf")]),
    ("DOUBLE", pa.int64(), [3, None], pa.float64(), [3.0, None]),
    ("BOOLEAN", pa.bool_(), [True, None], pa.bool_(), [True, None]),
    ("BOOLEAN", pa.int32(), [1, 0], pa.bool_(), [True, False]),
    ("TIMESTAMP", pa.int64(), [0, None], pa.timestamp("ms"), [EPOCH, None]),
    ("STRING", VIEW, ["a", None], pa.string(), ["a", None]),
    ("STRING", pa.dictionary(pa.int32(), pa.string()), ["a", "b", "a"], pa.string(), ["a", "b", "a"]),
    ("JSON", pa.large_string(), ["{}"], pa.string(), ["{}"]),
    ("BYTES", pa.binary_view(), [b"\x00", None], pa.binary(), [b"\x00", None]),
    ("BIG_DECIMAL", pa.decimal128(38, 18), [Decimal("1.5")], pa.decimal128(38, 18), [Decimal("1.5")]),
    ("BIG_DECIMAL", pa.string(), ["1.5"], pa.string(), ["1.5"]),
    ("STRING_ARRAY", pa.list_(VIEW), [["a"], [], None], pa.list_(pa.string()), [["a"], [], None]),
    ("TIMESTAMP_ARRAY", pa.list_(pa.int64()), [[0]], pa.list_(pa.timestamp("ms")), [[EPOCH]]),
    ("BOOLEAN_ARRAY", pa.list_(pa.int32()), [[1, 0]], pa.list_(pa.bool_()), [[True, False]]),
    ("UNKNOWN", pa.null(), [None], pa.null(), [None]),
]


@pytest.mark.parametrize(
    ("kind", "stored", "values", "wanted", "expected"), ARROW_CASES, ids=lambda value: str(value)[:30]
)
def test_columns_have_the_arrow_types_of_their_pinot_types(
    kind: str, stored: pa.DataType, values: list[Any], wanted: pa.DataType, expected: list[Any]
) -> None:
    array = pa.array(values, _plain(stored)).cast(stored) if _plain(stored) != stored else pa.array(values, stored)
    found = arrow_table(pa.table({"other": array}), [ResultColumn("c", kind)])
    assert found.schema == pa.schema([pa.field("c", wanted)])
    assert found.column("c").to_pylist() == expected
    assert arrow_table(found.slice(0, 0), [ResultColumn("c", kind)]).num_rows == 0


def _plain(stored: pa.DataType) -> pa.DataType:
    """What pyarrow can make from Python values."""
    if pa.types.is_dictionary(stored):
        return pa.string()
    if pa.types.is_list(stored) and stored.value_type == VIEW:
        return pa.list_(pa.string())
    return stored


def test_chunks_and_slices_are_rows_in_order() -> None:
    lists = pa.array([["a"], ["b", "c"], [], ["d"]])
    table = pa.concat_tables(
        [pa.table({"n": [1, 2, 3, 4], "l": lists}).slice(1, 2), pa.table({"n": [9], "l": [["z"]]})]
    )
    columns = [ResultColumn("n", "LONG"), ResultColumn("l", "STRING_ARRAY")]
    assert json.loads(bytes(encode_rows(table, columns))) == [[2, ["b", "c"]], [3, []], [9, ["z"]]]


def test_no_rows_are_an_empty_list() -> None:
    assert bytes(encode_rows(pa.table({"c": pa.array([], pa.int64())}), [ResultColumn("c", "LONG")])) == b"[]"
