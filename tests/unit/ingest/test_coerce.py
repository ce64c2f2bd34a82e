# SPDX-License-Identifier: Apache-2.0
"""Pinot's conversion rules, one value at a time and by column."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cremant.ingest.causes import BadValue, Cause
from cremant.ingest.coerce import CONVERTERS, cell_converter, java_double_text, json_text
from cremant.ingest.coerce_columns import WORK_TYPES, convert_column, decode_hex
from cremant.model.schema import DataType

INT, LONG, DOUBLE, BIG_DECIMAL, BOOLEAN, TIMESTAMP, STRING, JSON, BYTES = (
    DataType(name)
    for name in ("INT", "LONG", "DOUBLE", "BIG_DECIMAL", "BOOLEAN", "TIMESTAMP", "STRING", "JSON", "BYTES")
)


@pytest.mark.parametrize(
    ("data_type", "value", "expected"),
    [
        (INT, True, 1), (INT, 1.9, 1), (INT, -1.9, -1), (INT, " +5 ", 5), (INT, "007", 7), (INT, [3], 3), (INT, [],
    None),
        (LONG, -(2**63), -(2**63)), (LONG, "9223372036854775807", 2**63 - 1),
        (DOUBLE, "1e3d", 1000.0), (DOUBLE, "-Infinity", -math.inf), (DOUBLE, 10**400, math.inf), (DOUBLE, False, 0.0),
        (BIG_DECIMAL, "0.10", "0.1"), (BIG_DECIMAL, 0.1, "0.1"), (BIG_DECIMAL, True, "1"), (BIG_DECIMAL, "-0.0", "0"),
        (BIG_DECIMAL, "0.0000000000000000015", "0.0000000000000000015"), (BIG_DECIMAL, "1e307", "1E+307"),
        (BIG_DECIMAL, " -1e2 ", "-100"), (BIG_DECIMAL, "10E-308", "1E-307"), (BIG_DECIMAL, 2**64, str(2**64)),
        (BOOLEAN, "TRUE", True), (BOOLEAN, "1", True), (BOOLEAN, "yes", False), (BOOLEAN, 2, True), (BOOLEAN, 0.0,
    False),
        (TIMESTAMP, "1970-01-01 00:00:01", 1000), (TIMESTAMP, "1970-01-01T00:00:00.5Z", 500), (TIMESTAMP, "7", 7),
        (TIMESTAMP, "1970-01-01T02:00:00+0200", 0), (TIMESTAMP, "1969-12-31 23:59:59.999999999", -1), (TIMESTAMP,
    7.9, 7),
        (TIMESTAMP, "1970-01-02", 86_400_000), (TIMESTAMP, "1970-1-2 3:04", 97_440_000),
        (STRING, 5, "5"), (STRING, 1.0, "1.0"), (STRING, 1e10, "1.0E10"), (STRING, True, "true"), (STRING, ["x"],
    "x"),
        (STRING, {"a": [1, None]}, '{"a":[1,null]}'), (STRING, 2**70, str(2**70)), (STRING, [{"a": 1}], '{"a":1}'),
        (JSON, "text", "text"), (JSON, {"é": 1.5}, '{"é":1.5}'), (JSON, [1, "a"], '[1,"a"]'), (JSON, 5, "5"),
        (JSON, {"n": 2**70}, f'{{"n":{2**70}}}'), (JSON, {"d": Decimal("0.5")}, '{"d":0.5}'),
        (BYTES, "00fF", b"\x00\xff"), (BYTES, "", b""),
    ],
)  # fmt: skip
def test_single_values(data_type: DataType, value: Any, expected: Any) -> None:
    found = cell_converter(data_type, single_value=True)(value)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("data_type", "value", "cause"),
    [
        (INT, 2**31, Cause.OUT_OF_RANGE), (INT, -(2**31) - 1, Cause.OUT_OF_RANGE), (INT, math.nan,
    Cause.OUT_OF_RANGE),
        (INT, "5.0", Cause.WRONG_TYPE), (INT, "", Cause.WRONG_TYPE), (INT, {}, Cause.WRONG_TYPE), (INT, [1, 2],
    Cause.WRONG_TYPE),
        (LONG, 1e19, Cause.OUT_OF_RANGE), (LONG, "9223372036854775808", Cause.OUT_OF_RANGE),
        (DOUBLE, "x", Cause.WRONG_TYPE), (DOUBLE, "0x1p3", Cause.WRONG_TYPE), (DOUBLE, {"a": 1}, Cause.WRONG_TYPE),
        (BIG_DECIMAL, "1e2000", Cause.OUT_OF_RANGE), (BIG_DECIMAL, "NaN", Cause.WRONG_TYPE), (BIG_DECIMAL, math.inf,
    Cause.OUT_OF_RANGE),
        (BIG_DECIMAL, "1e-999999", Cause.OUT_OF_RANGE), (BIG_DECIMAL, "9" * 2001, Cause.OUT_OF_RANGE),
        (BOOLEAN, {}, Cause.WRONG_TYPE), (TIMESTAMP, True, Cause.WRONG_TYPE), (TIMESTAMP, "tomorrow",
    Cause.WRONG_TYPE),
        (TIMESTAMP, "2020-02-30 00:00:00", Cause.WRONG_TYPE), (STRING, [1, 2], Cause.WRONG_TYPE), (STRING,
    "\ud83d", Cause.WRONG_TYPE),
        (JSON, {"a": "\ud83d"}, Cause.WRONG_TYPE), (BYTES, "abc", Cause.WRONG_TYPE), (BYTES, "zz",
    Cause.WRONG_TYPE), (BYTES, 5, Cause.WRONG_TYPE),
    ],
)  # fmt: skip
def test_refused_values(data_type: DataType, value: Any, cause: Cause) -> None:
    with pytest.raises(BadValue) as caught:
        cell_converter(data_type, single_value=True)(value)
    assert caught.value.cause is cause
    assert len(caught.value.detail) < 200


@pytest.mark.parametrize(
    ("data_type", "value", "expected"),
    [
        (INT, 5, [5]), (INT, [1, None, "2"], [1, 2]), (INT, [], None), (INT, [None], None), (INT, [[1, 2]], [1, 2]),
        (INT, [[1], [2]], [1, 2]), (STRING, [{"a": 1}, "b"], ['{"a":1}', "b"]), (STRING, "x", ["x"]), (INT, [[[]]],
    None),
    ],
)  # fmt: skip
def test_multi_values(data_type: DataType, value: Any, expected: Any) -> None:
    assert cell_converter(data_type, single_value=False)(value) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0"), (-0.0, "-0.0"), (1.0, "1.0"), (100.0, "100.0"), (1234567.0, "1234567.0"), (1e7, "1.0E7"),
        (0.001, "0.001"), (0.0001, "1.0E-4"), (123456789.125, "1.23456789125E8"), (math.nan, "NaN"),
        (-math.inf, "-Infinity"), (1.7976931348623157e308, "1.7976931348623157E308"), (0.00123, "0.00123"),
        (-12.5, "-12.5"),
    ],
)  # fmt: skip
def test_doubles_are_written_as_java_does(value: float, text: str) -> None:
    assert java_double_text(value) == text


def test_json_text_survives_what_the_fast_encoder_refuses() -> None:
    assert json_text({"a": [math.nan, 2**80]}) in (f'{{"a":[null,{2**80}]}}', f'{{"a":[NaN,{2**80}]}}')


_TEXT = st.one_of(
    st.text(max_size=6),
    st.integers().map(str),
    st.floats().map(repr),
    st.datetimes().map(str),
    st.binary(max_size=4).map(bytes.hex),
    st.sampled_from(
        ["true", "TRUE ", "1", "+7", " 7", "1e5", "1.", ".5", "NaN", "Infinity", "0x10", "2020-01-01T00:00:00Z"]
    ),
)
_COLUMNS = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float64(): st.floats(),
    pa.bool_(): st.booleans(),
    pa.string(): _TEXT,
}


@pytest.mark.parametrize("data_type", list(DataType))
@pytest.mark.parametrize("arrow", list(_COLUMNS), ids=str)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_columns_convert_as_their_values_do(data_type: DataType, arrow: pa.DataType, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.none() | _COLUMNS[arrow], max_size=8))
    converted = convert_column(pa.array(values, arrow), data_type)
    assert converted.array.type == WORK_TYPES[data_type]
    for at, value in enumerate(values):
        failed = converted.failed is not None and bool(converted.failed[at])
        found = converted.array[at].as_py()
        try:
            expected = None if value is None else CONVERTERS[data_type](value)
        except BadValue:
            assert failed
            assert found is None
        else:
            assert not failed
            assert found == expected or (found != found and expected != expected)


def test_hex_of_sliced_columns_with_nulls() -> None:
    column = pa.array(["ab", None, "", "CDef", "00"]).slice(1, 3)
    assert decode_hex(column).to_pylist() == [None, b"", b"\xcd\xef"]  # type: ignore[union-attr]
    assert decode_hex(pa.array(["a", "b"])) is None
    assert decode_hex(pa.array([], pa.string())).to_pylist() == []  # type: ignore[union-attr]
