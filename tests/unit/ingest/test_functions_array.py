# SPDX-License-Identifier: Apache-2.0
"""Transforms and filters over multi-value columns and over bytes."""

from __future__ import annotations

from typing import Any

import pytest
from ingest_kit import config_of, messages_of, schema_of

from cremant.ingest.plan import compile_ingest
from cremant.model.errors import InvalidConfig


def multi(data_type: str) -> dict[str, Any]:
    return {"dataType": data_type, "singleValueField": False}


COLUMNS: dict[str, Any] = {
    "tags": multi("STRING"), "nums": multi("LONG"), "text": "STRING", "raw": "BYTES", "i": "INT",
}  # fmt: skip


def run(records: list[dict[str, Any]], expression: str, out: Any) -> Any:
    config = config_of(transforms={"out": expression}, nulls=True)
    return compile_ingest(schema_of({**COLUMNS, "out": out}), config).run(messages_of(records))


CASES: list[tuple[str, Any, list[Any]]] = [
    ("arrayLength(tags)", "INT", [3, 1, None]),
    ("cardinality(nums)", "LONG", [3, None, None]),
    ("arrayElementAtString(tags, 2)", "STRING", ["a", None, None]),
    ("arrayElementAt(nums, 1)", "LONG", [3, None, None]),
    ("arrayContainsString(tags, 'c')", "BOOLEAN", [False, True, None]),
    ("arrayContainsInt(nums, 2)", "BOOLEAN", [True, None, None]),
    ("arrayContains(tags, text)", "BOOLEAN", [True, False, None]),
    ("arraySum(nums)", "DOUBLE", [8.0, None, None]),
    ("arrayMin(nums)", "LONG", [2, None, None]),
    ("arrayMax(nums)", "LONG", [3, None, None]),
    ("arrayToString(tags, '-')", "STRING", ["b-a-b", "c", None]),
    ("arrayToString(nums, '+')", "STRING", ["3+3+2", None, None]),
    ("arraySortString(tags)", multi("STRING"), [["a", "b", "b"], ["c"], None]),
    ("arrayDistinctLong(nums)", multi("STRING"), [["3", "2"], None, None]),
    ("arrayReverse(tags)", multi("STRING"), [["b", "a", "b"], ["c"], None]),
    ("arrayLength(arrayDistinct(tags))", "INT", [2, 1, None]),
    ("split(text, ',')", multi("STRING"), [["b"], ["x", "y"], None]),
    ("split('4,5', ',')", multi("LONG"), [[4, 5], [4, 5], [4, 5]]),
    ("arrayLength(elsewhere)", "INT", [2, None, None]),
    ("tags IS NULL", "BOOLEAN", [False, False, True]),
    ("nums", multi("LONG"), [[3, 3, 2], None, None]),
    ("text", multi("STRING"), [["b"], ["x,y"], None]),
    ("raw", "BYTES", [b"\xbe\xef", b"", None]),
    ("bytesToHex(raw)", "STRING", ["beef", "", None]),
    ("concat(raw, text)", "STRING", ["beefb", "x,y", None]),
    ("hexToBytes('00ff')", "BYTES", [b"\x00\xff"] * 3),
    ("toUtf8(text)", "BYTES", [b"b", b"x,y", None]),
    ("fromUtf8(toUtf8(text))", "STRING", ["b", "x,y", None]),
    ("toBase64(raw)", "STRING", ["vu8=", "", None]),
    ("fromBase64('vu8=')", "BYTES", [b"\xbe\xef"] * 3),
    ("md5(toUtf8(text))", "STRING", ["92eb5ffee6ae2fec3ad71c777531578f", "f10bc3c94b77e1d6b9f98106daf335c1", None]),
    ("raw = hexToBytes('beef')", "BOOLEAN", [True, False, None]),
    ("coalesce(raw, hexToBytes('01'))", "BYTES", [b"\xbe\xef", b"", b"\x01"]),
    ("CASE WHEN arrayContains(tags, 'a') THEN 1 ELSE 0 END", "INT", [1, 0, 0]),
]
RECORDS: list[dict[str, Any]] = [
    {"tags": ["b", "a", "b"], "nums": [3, None, 3, 2], "text": "b", "raw": "beef", "elsewhere": ["p", "q"]},
    {"tags": "c", "nums": [None], "text": "x,y", "raw": "", "elsewhere": []},
    {"tags": []},
]


@pytest.mark.parametrize(("expression", "out", "expected"), CASES, ids=[case[0] for case in CASES])
def test_expression(expression: str, out: Any, expected: list[Any]) -> None:
    ingested = run(RECORDS, expression, out)
    assert not ingested.rejected, ingested.rejected
    rows = ingested.batch.to_pylist()
    assert [None if row["$isNull.out"] else row["out"] for row in rows] == expected
    assert [len(run(RECORDS[:count], expression, out).batch) for count in range(3)] == [0, 1, 2]


def test_a_filter_may_look_into_a_multi_value_column() -> None:
    config = config_of(filter_function="arrayContains(tags, 'a') OR arrayLength(tags) = 1")
    ingested = compile_ingest(schema_of(COLUMNS), config).run(messages_of(RECORDS))
    assert ingested.filtered == 2
    assert ingested.batch.num_rows == 1


@pytest.mark.parametrize(
    ("expression", "out", "cause"),
    [("fromUtf8(raw)", "STRING", "transformFailed"), ("split(text, ',')", multi("LONG"), "transformFailed")],
)
def test_what_cannot_be_computed_rejects_its_row_alone(expression: str, out: Any, cause: str) -> None:
    ingested = run([{"raw": "41", "text": "1,2"}, {"raw": "ff", "text": "1,x"}], expression, out)
    assert [(bad.offset, bad.cause) for bad in ingested.rejected] == [(102, cause)]


@pytest.mark.parametrize(
    ("expression", "out", "reason"),
    [
        ("upper(tags)", "STRING", "argument 1 is multi-value"),
        ("tags = 'x'", "BOOLEAN", "argument 1 is multi-value"),
        ("arrayLength(text)", "INT", "argument 1 is one value"),
        ("tags", "STRING", "gives several values, but the column is single-value"),
        ("arrayElementAt(tags, 0)", "STRING", "elements count from 1"),
    ],
)
def test_lists_where_they_cannot_be_are_refused(expression: str, out: Any, reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        run([], expression, out)
