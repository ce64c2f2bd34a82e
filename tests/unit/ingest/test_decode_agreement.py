# SPDX-License-Identifier: Apache-2.0
"""The columnar decoder and the row decoder agree on every message, however messages are batched."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cremant.ingest.causes import Cause
from cremant.ingest.decode_json import JsonDecoder
from cremant.ingest.decode_rows import RowDecoder
from cremant.ingest.messages import work_type
from cremant.model.limits import MESSAGE_BYTES_MAX
from cremant.model.schema import DataType, FieldSpec, FieldType


def _field(name: str, data_type: DataType, *, single: bool = True) -> FieldSpec:
    return FieldSpec(name=name, data_type=data_type, field_type=FieldType.DIMENSION, single_value=single)


SINGLE = tuple(_field(f"c_{kind.lower()}", kind) for kind in DataType)
MULTI = tuple(_field(f"m_{kind.lower()}", kind, single=False) for kind in DataType if kind is not DataType.JSON)
WITHOUT_DECIMALS = tuple(field for field in (*SINGLE, *MULTI) if field.data_type is not DataType.BIG_DECIMAL)

NUMBERS = [
    "0", "-0", "1", "-1", "7", "42", "1.0", "1.5", "-1.5", "-0.0", "1e3", "1E+2", "1e-3", "2147483647", "2147483648",
    "-2147483648", "-2147483649", "9223372036854775807", "9223372036854775808", "-9223372036854775808",
    "-9223372036854775809", "9007199254740993", "9007199254740993.0", "123456789012345678901234567890", "1e18",
    "1e19",
    "1e20", "1e38", "1e39", "1e308", "1e400", "-1e400", "1e-400", "0.1", "0.30000000000000004",
    "0.1234567890123456789", "99999999999999999999.999999999999999999", "100000000000000000000", "3.4028236e38",
    "16777217", "0.1000000000000000055511151231257827", "NaN", "Infinity", "-Infinity", "Inf", "-Inf", "1e10", "1e60",
    "5.8e58", "12345678901234567890123456789012345678901234567890123456789012345678901234567890",
    "1.9999999999999999999",
    "9" * 400, "1577836800000", "1577836800000.7",
]  # fmt: skip
TEXTS = [
    '""', '"x"', '"5"', '" 5 "', '"+5"', '"-5"', '"5.0"', '"007"', '"0x1f"', '"1e3"', '"1d"', '"NaN"', '"Infinity"',
    '"inf"', '"true"', '" TRUE"', '"1"', '"no"', '"2020-01-01 00:00:00"', '"2020-01-01T00:00:00.123Z"',
    '"2020-02-30"',
    '"2020-01-01T01:00:00+02:00"', '"1577836800000"', '"0000-01-01 00:00:00"', '"2020-1-1 1:02:03.4"', '"deadBEEF"',
    '"abc"', '"ab"', '"\\u00e9\\ud83d\\ude00"', '"\\ud83d"', '"\\ud83d x"', '"a\\u0000b"', '"é😀"',
    '"9223372036854775808"',
    '"0.1234567890123456789"', '"1e400"', '".5"', '"5."', '"1_0"', '"٣"', '"\\/"', '"{\\"a\\":1}"',
    '"99999999999999999999999"',
    '"\\n"', '"Infinity,NaN: Inf"',
]  # fmt: skip
OTHERS = ["true", "false", "null", "{}", '{"a":1}', '{"a":[1,{"b":1.0}],"c":"é"}', '{"n":NaN}', '{"s":"\\ud83d"}']
ARRAYS = [
    "[]", "[null]", "[null,null]", "[1]", "[1,2]", "[1,null,3]", "[1.5,2]", '["a","b"]', '["1","2"]', "[[1,2]]",
    "[[1],[2]]", "[true,false]", "[1,true]", '["ab","cd"]', "[{\"a\":1},2]", "[[],1]", "[0.1,0.25]", "[NaN,1.5]",
    '["2020-01-01 00:00:00",5]', "[9223372036854775808]", '["\\ud83d"]', "[-0.0]", "[1e400,2]",
]  # fmt: skip
ALL_VALUES = NUMBERS + TEXTS + OTHERS + ARRAYS

WHOLE_MESSAGES = [
    b"", b" ", b"null", b"[]", b"5", b'"x"', b"{", b"}", b"{}", b"{}{}", b'{"a":1}{"b":2}', b"{}\n{}", b'{"x":1,}',
    b"{'x':1}",
    b'{"c_int":1', b'"c_long":2}', b',"c_long":2}', b'{"c_int":1}\n', b'  {"c_int":1}\r\n',
    b'\xef\xbb\xbf{"c_int":1}',
    b'{"c_int":1,"c_int":2}', b'{"c_int":1,"c_int":"x"}', b'{"x":1,"x":"y"}', b'{"c_string":"\xff"}',
    b'{"x":"\xff","c_int":1}',
    b'{"c_string":"\xed\xa0\xbd"}', b'{"c_string":"a\tb"}', b'{"c_string":"a\x00b"}', b'{"c_int":01}',
    b'{"c_int":1.}',
    b'{"c_int":+1}', b'{"c_int":.5}', b'{"x":Inf,"c_int":1}', b'{"x":-NaN,"c_int":1}', b'{"x":NaN,"c_int":"5"}',
    b'{"x":1e999,"c_int":5}',
    b'{"x":"\\ud83d","c_int":5}', b'{"\\u0063_int":5}', b'{"c_int":5}//', b'{"c_int":5} x', b'{"c_int"\n:\n5\n}',
    b'{"C_INT":5}',
    b'{"x":' + b"[" * 199 + b"]" * 199 + b',"c_int":5}', b'{"x":' + b"[" * 200 + b"]" * 200 + b',"c_int":5}',
    b'{"c_json":' + b"[" * 150 + b"]" * 150 + b',"c_int":5}', b'{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"x":"' + b"[{" * 500 + b'","c_int":5}', b'{"x":[' + b",".join([b"{}"] * 300) + b'],"c_int":5}', b"{" * 100_000,
    b'{"x":' + b"9" * 5000 + b',"c_int":5}', b'{"c_int":' + b"9" * 5000 + b"}", b'{"c_string":' + b"9" * 5000 + b"}",
    b'{"x":"' + b'\\"' * 20_000, b'{"c_string":"' + b"y" * 100_000 + b'"}', b'{"x":nulL}', b'{"x":tru}',
    b'{"c_int":5,"y":\x00}', b"{\x00}",
    b'{"c_int":5}\x00', b'\x00{"c_int":5}', b'{"c_int":5,"y":Infinit}', b'{"c_int":5,"y":+Infinity}',
    b'{"c_int":5,"y":--1}',
    b'{"c_int":5,"y":"Inf\\"NaN"}', b'\x0b{"c_int":5}', b'{"c_int":5}\x0c', b'\xc2\xa0{"c_int":5}',
]  # fmt: skip


def _reference(fields: tuple[FieldSpec, ...], messages: list[bytes | None]) -> list[Any]:
    """Row by row: the cells of each message, or the cause why it is refused."""
    rows = RowDecoder(fields)
    results: list[Any] = []
    for message in messages:
        if not message or not message.strip(b" \t\r\n"):
            results.append(Cause.EMPTY_MESSAGE)
            continue
        decoded = rows.decode([message])
        if decoded.bad:
            results.append(decoded.bad[0].cause)
        else:
            results.append(
                [pa.array(cells, work_type(field))[0] for cells, field in zip(decoded.columns, fields, strict=True)]
            )
    return results


def _columnar(decoder: JsonDecoder, messages: list[bytes | None]) -> list[Any]:
    decoded = decoder.decode(pa.array(messages, pa.binary()))
    results: list[Any] = [None] * len(messages)
    for refusal in decoded.bad:
        assert results[refusal.at] is None
        results[refusal.at] = refusal.cause
    for row, at in enumerate(decoded.kept.tolist()):
        assert results[at] is None
        results[at] = [column[row] for column in decoded.columns]
    assert all(result is not None for result in results)
    for column in decoded.columns:
        column.validate(full=True)
    return results


def _plain(result: Any) -> Any:
    if isinstance(result, Cause):
        return result
    return [_comparable(cell.as_py()) for cell in result]


def _comparable(value: Any) -> Any:
    """Missing cells of multi-value columns have several forms until they are finished."""
    if isinstance(value, list):
        return [_comparable(item) for item in value if item is not None] or None
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value
    return value


def _assert_agreement(fields: tuple[FieldSpec, ...], messages: list[bytes | None], **sizes: int) -> None:
    expected = _reference(fields, messages)
    found = _columnar(JsonDecoder(fields, **sizes), messages)
    for message, one, other in zip(messages, expected, found, strict=True):
        assert _plain(one) == _plain(other), message and message[:300]


@pytest.mark.parametrize("fields", [SINGLE + MULTI, WITHOUT_DECIMALS], ids=["with decimals", "without decimals"])
def test_each_odd_value_alone_is_decoded_alike(fields: tuple[FieldSpec, ...]) -> None:
    for field in fields:
        for value in ALL_VALUES:
            _assert_agreement((field,), [f'{{"{field.name}":{value}}}'.encode()])


def test_each_odd_value_among_ordinary_ones_is_decoded_alike() -> None:
    for field in WITHOUT_DECIMALS:
        messages: list[bytes | None] = [f'{{"{field.name}":{value}}}'.encode() for value in ALL_VALUES]
        _assert_agreement((field,), messages, chunk_rows=3)


@pytest.mark.parametrize("message", WHOLE_MESSAGES, ids=lambda message: repr(message[:30]))
def test_each_odd_message_is_decoded_alike_alone_and_between_others(message: bytes) -> None:
    _assert_agreement(WITHOUT_DECIMALS, [message])
    _assert_agreement(WITHOUT_DECIMALS, [b'{"c_int":1}', message, b'{"c_int":2}'])
    _assert_agreement(WITHOUT_DECIMALS, [b'{"c_int":"1"}', message, b'{"c_int":"2"}'])


def test_neighbours_that_complete_each_other_do_not_become_one_row() -> None:
    _assert_agreement(SINGLE, [b'{"c_int":1', b',"c_long":2}', b'{"c_int":3}{"c_int":4}'])
    _assert_agreement(SINGLE, [b'{"c_string":"a', b'b"}', b"{}{}"])
    _assert_agreement(SINGLE, [b'{"x":[{"y":1}', b'{"z":1}]}', b"{}{}"])
    _assert_agreement(SINGLE, [b'{"x":{"y":1}', b'{"z":1}}', b"{}{}"])


@pytest.mark.parametrize("seed", range(30))
def test_random_batches_are_decoded_alike(seed: int) -> None:
    """Batches from nearly clean to thoroughly odd; columns that consistently show one odd kind of value, too."""
    dice = random.Random(seed)
    fields = tuple(dice.sample(SINGLE + MULTI, dice.randint(1, 6)))
    oddness = dice.choice([0.0, 0.01, 0.1, 0.9])
    usual = {
        field.name: dice.choice(
            [NUMBERS[2:6], TEXTS[2:3], ["true", "false"], ['"ab"', '"cd"'], ["1.5"], ["[1,2]"], ALL_VALUES]
        )
        for field in fields
    }
    messages: list[bytes | None] = []
    for _ in range(dice.choice([5, 60, 300])):
        if dice.random() < oddness / 4:
            messages.append(dice.choice([*WHOLE_MESSAGES, None]))
            continue
        pairs = [
            f'"{field.name}":{dice.choice(ALL_VALUES if dice.random() < oddness else usual[field.name])}'
            for field in fields
            if dice.random() < 0.9
        ]
        dice.shuffle(pairs)
        space = dice.choice(["", " ", "\n"]) if dice.random() < oddness else ""
        messages.append((space + "{" + f",{space}".join(pairs) + "}" + space).encode())
    _assert_agreement(fields, messages, chunk_rows=dice.choice([2, 7, 50]), parse_rows=dice.choice([10, 100, 1000]))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.dictionaries(st.sampled_from([field.name for field in SINGLE + MULTI] + ["x"]), _JSON, max_size=5),
        min_size=1,
        max_size=6,
    )
)
def test_any_json_objects_are_decoded_alike(records: list[dict[str, Any]]) -> None:
    fields = SINGLE + MULTI
    _assert_agreement(
        fields,
        [json.dumps(record, ensure_ascii=len(records) % 2 == 0).encode(errors="surrogatepass") for record in records],
        chunk_rows=2,
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.binary(max_size=30)
        | st.text(alphabet='{}[]",:0123456789.eE+-ntrufalsNIy \n\\c_i', max_size=30).map(str.encode),
        max_size=5,
    )
)
def test_any_bytes_are_decoded_alike(messages: list[bytes | None]) -> None:
    _assert_agreement(SINGLE, [*messages, b'{"c_int":1}'])


def test_too_large_messages_are_refused_without_being_parsed() -> None:
    huge = b'{"c_int":1,"x":"' + b"y" * MESSAGE_BYTES_MAX + b'"}'
    decoded = JsonDecoder(SINGLE).decode(pa.array([b'{"c_int":1}', huge, b'{"c_int":2}'], pa.binary()))
    assert [(refusal.at, refusal.cause) for refusal in decoded.bad] == [(1, Cause.TOO_LARGE)]
    assert decoded.kept.tolist() == [0, 2]


def test_slices_of_an_array_are_decoded_as_if_they_were_whole() -> None:
    values = pa.array([b'{"c_int":%d}' % number for number in range(20)] + [None, b"{}"], pa.binary())
    for start in (0, 1, 7, 19, 20):
        decoded = JsonDecoder(SINGLE).decode(values.slice(start, 5))
        ints = decoded.columns[0].to_pylist()
        assert ints == [number for number in range(start, min(start + 5, 20))] + ([None] if start + 5 > 21 else [])


def test_nothing_is_decoded_from_no_messages() -> None:
    decoded = JsonDecoder(SINGLE + MULTI).decode(pa.array([], pa.binary()))
    assert [len(column) for column in decoded.columns] == [0] * len(SINGLE + MULTI)
    assert decoded.bad == []
