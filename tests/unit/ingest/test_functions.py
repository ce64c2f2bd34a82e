# SPDX-License-Identifier: Apache-2.0
"""The functions of transforms and filters: expression, columns in, value out."""

from __future__ import annotations

import math
from typing import Any

import pytest
from ingest_kit import config_of, messages_of, schema_of

from cremant.ingest.plan import compile_ingest
from cremant.model.errors import InvalidConfig

MS = 1_577_934_245_678  # 2020-01-02 03:04:05.678 UTC, a Thursday

#: record -> expression -> what a column of the type holds afterwards.
CASES: list[tuple[dict[str, Any], str, str, Any]] = [
    # arithmetic
    ({"i": 7, "j": 2}, "i + j * 3", "LONG", 13),
    ({"i": 7, "j": 2}, "(i + j) * 3", "LONG", 27),
    ({"i": 7, "j": 2}, "i / j", "DOUBLE", 3.5),
    ({"i": 7, "j": 2}, "divide(i, j)", "LONG", 3),
    ({"i": -7, "j": 2}, "i % j", "LONG", -1),
    ({"d": -7.5, "j": 2}, "mod(d, j)", "DOUBLE", -1.5),
    ({"i": 2**53 + 1, "j": 0}, "plus(i, j)", "LONG", 2**53 + 1),
    ({"i": 5}, "-i", "LONG", -5),
    ({"i": 5}, "minus(i, -2)", "LONG", 7),
    ({"i": 5}, "times(i, 2, 3)", "LONG", 30),
    ({"d": -1.5}, "abs(d)", "DOUBLE", 1.5),
    ({"d": 1.2}, "ceil(d)", "DOUBLE", 2.0),
    ({"d": -1.2}, "floor(d)", "DOUBLE", -2.0),
    ({"d": 9}, "sqrt(d)", "DOUBLE", 3.0),
    ({"d": 2}, "power(d, 10)", "LONG", 1024),
    ({"d": 2, "i": 5}, "least(d, i, 9)", "DOUBLE", 2.0),
    ({"d": 2, "i": 5}, "greatest(d, i)", "DOUBLE", 5.0),
    ({"i": 1, "j": 0}, "i / j", "DOUBLE", math.inf),
    # text
    ({"a": "Ab", "b": "c"}, "concat(a, b)", "STRING", "Abc"),
    ({"a": "Ab", "b": "c"}, "concat(a, b, '-')", "STRING", "Ab-c"),
    ({"a": "Ab", "i": 5}, "a || i", "STRING", "Ab5"),
    ({"a": "ÄbC"}, "lower(a)", "STRING", "äbc"),
    ({"a": "äbC"}, "UPPER(a)", "STRING", "ÄBC"),
    ({"a": "  x "}, "trim(a)", "STRING", "x"),
    ({"a": "  x "}, "ltrim(a)", "STRING", "x "),
    ({"a": "  x "}, "rtrim(a)", "STRING", "  x"),
    ({"a": "héllo"}, "substr(a, 1, 3)", "STRING", "él"),
    ({"a": "héllo"}, "substr(a, 3)", "STRING", "lo"),
    ({"a": "héllo"}, "substr(a, 1, -1)", "STRING", "éllo"),
    ({"a": "a.b.c"}, "replace(a, '.', '/')", "STRING", "a/b/c"),
    ({"a": "héllo"}, "length(a)", "INT", 5),
    ({"a": "abc"}, "reverse(a)", "STRING", "cba"),
    ({"a": "it's"}, "a = 'it''s'", "BOOLEAN", True),
    ({"a": "abc"}, "startsWith(a, 'ab')", "BOOLEAN", True),
    ({"a": "abc"}, "contains(a, 'x')", "BOOLEAN", False),
    ({"a": "abc"}, "a LIKE 'a_c'", "BOOLEAN", True),
    ({"a": "abc"}, "a NOT LIKE '%b%'", "BOOLEAN", False),
    ({"a": "abc"}, "regexp_like(a, '^a.*c$')", "BOOLEAN", True),
    # logic
    ({"i": 5}, "i >= 5 AND NOT i <> 5", "BOOLEAN", True),
    ({"i": 5}, "i < 5 OR i = 5", "BOOLEAN", True),
    ({"i": 5}, "i IN (1, 5)", "BOOLEAN", True),
    ({"a": "x"}, "a NOT IN ('y', 'z')", "BOOLEAN", True),
    ({"i": 5}, "i BETWEEN 1 AND 5", "BOOLEAN", True),
    ({"i": 5}, "equals(i, '5')", "BOOLEAN", True),
    ({}, "a IS NULL", "BOOLEAN", True),
    ({"a": "x"}, "a IS NOT NULL", "BOOLEAN", True),
    ({"b": "x"}, "coalesce(a, b, 'z')", "STRING", "x"),
    ({}, "coalesce(a, b, 'z')", "STRING", "z"),
    ({"i": 5}, "nullif(i, 5)", "LONG", -(2**63)),
    ({"i": 5}, "case when i > 3 then 'big' when i > 1 then 'middle' else 'small' end", "STRING", "big"),
    ({"i": 1}, "CASE WHEN i > 3 THEN 'big' END", "STRING", "null"),
    ({"flag": True}, "CASE WHEN flag THEN 1 ELSE 0 END", "INT", 1),
    ({"a": "12"}, "CAST(a AS LONG) + 1", "LONG", 13),
    ({"d": 1.9}, "cast(d, 'INT')", "INT", 1),
    ({"d": 1.5}, "CAST(d AS STRING)", "STRING", "1.5"),
    ({"i": 5}, "CAST(i AS BOOLEAN)", "BOOLEAN", True),
    ({"i": 5}, "TRUE", "BOOLEAN", True),
    # time
    ({"t": MS}, "toEpochSeconds(t)", "LONG", MS // 1000),
    ({"t": MS}, "ToEpochMinutes(t)", "LONG", MS // 60_000),
    ({"t": MS}, "toEpochHours(t)", "LONG", MS // 3_600_000),
    ({"t": MS}, "toEpochDays(t)", "INT", 18263),
    ({"t": -1}, "toEpochDays(t)", "LONG", 0),
    ({"t": MS}, "toEpochMinutesRounded(t, 10)", "LONG", MS // 600_000 * 10),
    ({"t": MS}, "toEpochMinutesBucket(t, 10)", "LONG", MS // 600_000),
    ({"i": 18263}, "fromEpochDays(i)", "TIMESTAMP", 1_577_923_200_000),
    ({"i": 10}, "fromEpochSecondsBucket(i, 5)", "LONG", 50_000),
    ({"t": MS}, "toDateTime(t, 'yyyy-MM-dd''T''HH:mm:ss.SSSZ')", "STRING", "2020-01-02T03:04:05.678+0000"),
    ({"t": MS}, "toDateTime(t, 'EEE, d MMM yyyy h:mm a', 'America/New_York')", "STRING", "Wed, 1 Jan 2020 10:04 PM"),
    ({"a": "2020-01-02 03:04"}, "fromDateTime(a, 'yyyy-MM-dd HH:mm')", "LONG", 1_577_934_240_000),
    ({"a": "20200102"}, "fromDateTime(a, 'yyyyMMdd', 'Europe/Berlin')", "LONG", 1_577_919_600_000),
    ({"t": MS}, "dateTrunc('day', t)", "LONG", 1_577_923_200_000),
    ({"t": MS}, "DATETRUNC('WEEK', t)", "LONG", 1_577_664_000_000),
    ({"t": MS}, "dateTrunc('month', t, 'MILLISECONDS', 'UTC', 'DAYS')", "LONG", 18262),
    ({"i": MS // 1000}, "dateTrunc('hour', i, 'SECONDS')", "LONG", MS // 3_600_000 * 3600),
    ({"t": MS}, "dateTrunc('day', t, 'MILLISECONDS', 'Europe/Berlin')", "LONG", 1_577_919_600_000),
    ({"t": MS}, "timeConvert(t, 'MILLISECONDS', 'HOURS')", "LONG", MS // 3_600_000),
    ({"t": MS}, "dateTimeConvert(t, '1:MILLISECONDS:EPOCH', '1:DAYS:EPOCH', '1:DAYS')", "LONG", 18263),
    (
        {"t": MS},
        "dateTimeConvert(t, '1:MILLISECONDS:EPOCH', '1:DAYS:SIMPLE_DATE_FORMAT:yyyyMMdd', '1:DAYS')",
        "STRING",
        "20200102",
    ),
    ({"t": MS}, "year(t) * 10000 + month(t) * 100 + day(t)", "INT", 20200102),
    ({"t": MS}, "hour(t, 'Europe/Berlin')", "INT", 4),
    ({"t": MS}, "dayOfWeek(t)", "INT", 4),
    ({"t": MS}, "week(t)", "INT", 1),
    # JSON
    ({"p": {"a": {"b": [1, {"c": "x"}]}}}, "jsonPathString(p, '$.a.b[1].c')", "STRING", "x"),
    ({"p": {"a": {"b": [1]}}}, "jsonPathString(p, '$.a')", "STRING", '{"b":[1]}'),
    ({"p": '{"a": 5}'}, "jsonPathLong(p, '$.a')", "LONG", 5),
    ({"p": {"a k": 1.5}}, "jsonPathDouble(p, '$[''a k'']')", "DOUBLE", 1.5),
    ({"p": {}}, "jsonPathLong(p, '$.a', 7)", "LONG", 7),
    ({"p": {}}, "jsonPathString(p, '$.a')", "STRING", "null"),
    ({"p": {"a": "9"}}, "jsonExtractScalar(p, '$.a', 'INT')", "INT", 9),
    ({"p": {"a": [1, "é"]}}, "jsonFormat(p)", "STRING", '{"a":[1,"é"]}'),
    # columns that are not in the schema are read as their use asks
    ({"not there": 5}, '"not there" * 2', "LONG", 10),
    ({"raw": "5"}, "fromEpochSeconds(raw)", "LONG", 5000),
    ({"raw": 5}, "raw = 'five'", "BOOLEAN", False),
]
COLUMNS: dict[str, Any] = {
    "i": "LONG", "j": "INT", "d": "DOUBLE", "a": "STRING", "b": "STRING", "flag": "BOOLEAN", "t": "TIMESTAMP",
}  # fmt: skip


@pytest.mark.parametrize(("record", "expression", "data_type", "expected"), CASES, ids=[case[1] for case in CASES])
def test_expression(record: dict[str, Any], expression: str, data_type: str, expected: Any) -> None:
    plan = compile_ingest(schema_of({**COLUMNS, "out": data_type}), config_of(transforms={"out": expression}))
    ingested = plan.run(messages_of([record, {"out": 1}, {}]))
    assert [item for item in ingested.rejected if item.offset == 100] == []
    found = ingested.batch["out"].to_pylist()[0]
    assert found == expected
    assert type(found) is type(expected)


NULL_IN_NULL_OUT = [
    case[1] for case in CASES if not any(word in case[1].upper() for word in ("NULL", "COALESCE", "CASE", "7)", "TRUE"))
]


@pytest.mark.parametrize("expression", NULL_IN_NULL_OUT)
def test_null_arguments_give_a_missing_cell(expression: str) -> None:
    plan = compile_ingest(
        schema_of({**COLUMNS, "out": "STRING"}), config_of(nulls=True, transforms={"out": expression})
    )
    ingested = plan.run(messages_of([{}]))
    assert ingested.rejected == ()
    assert ingested.batch["$isNull.out"].to_pylist() == [True]


FAILING = [
    ("fromDateTime(a, 'yyyy-MM-dd')", {"a": "yesterday"}),
    ("fromDateTime(a, 'yyyy-MM-dd')", {"a": "2020-02-30"}),
    ("CAST(a AS LONG)", {"a": "x"}),
    ("jsonPathLong(a, '$.x')", {"a": "{broken"}),
    ("jsonPathLong(a, '$.x')", {"a": '{"x":"y"}'}),
    ("i * 4611686018427387904", {"i": 3}),
    ("fromEpochDays(i)", {"i": 2**62}),
    ("toDateTime(i, 'yyyy')", {"i": 2**62}),
    ("length(a) + CAST(a AS LONG)", {"a": "x"}),
]


@pytest.mark.parametrize(("expression", "record"), FAILING)
def test_what_cannot_be_computed_rejects_its_row_only(expression: str, record: dict[str, Any]) -> None:
    schema = schema_of({**COLUMNS, "out": "LONG"})
    records = [{"j": 1}, {**record, "j": 2}, {**record, "j": 3, "out": 9}, {"j": 4}]
    ingested = compile_ingest(schema, config_of(transforms={"out": expression})).run(messages_of(records))
    assert [(item.offset, item.cause) for item in ingested.rejected] == [(102, "transformFailed")]
    assert expression in ingested.rejected[0].detail
    assert ingested.batch["j"].to_pylist() == [1, 3, 4]
    kept = compile_ingest(schema, config_of(transforms={"out": expression}, continueOnError=True)).run(
        messages_of(records)
    )
    assert kept.batch["j"].to_pylist() == [1, 2, 3, 4]
    assert kept.rejected == ()


def test_only_the_branch_that_is_taken_can_fail() -> None:
    schema = schema_of({"a": "STRING", "out": "LONG"})
    expression = "CASE WHEN a = '' THEN 0 WHEN a = 'x' THEN 1 ELSE CAST(a AS LONG) END"
    ingested = compile_ingest(schema, config_of(transforms={"out": expression})).run(
        messages_of([{"a": ""}, {"a": "x"}, {"a": "7"}, {"a": "y"}])
    )
    assert ingested.batch["out"].to_pylist() == [0, 1, 7]
    assert len(ingested.rejected) == 1
    for guard in ("a <> 'x' AND CAST(a AS LONG) > 5", "NOT (a = 'x' OR CAST(a AS LONG) <= 5)"):
        filtered = compile_ingest(schema, config_of(filter_function=guard)).run(
            messages_of([{"a": "x"}, {"a": "7"}, {"a": "3"}])
        )
        assert filtered.rejected == ()
        assert filtered.filtered_offsets == (102,)


REFUSED = [
    ("now()", "not deterministic"), ("ago('PT1H')", "not deterministic"), ("rand()", "not deterministic"),
    ("Groovy({a + b}, a, b)", "Groovy"), ("nosuch(a)", "function 'nosuch' is not supported"), ("a +", "unexpected"),
    ("lower(a", r"expected \)"), ("lower()", "expected 1 arguments, found 0"), ("substr(a, i)", "must be a literal"),
    ("substr(a, 'x')", "must be an integer"), ("toDateTime(t, 'QQ')", "letter 'Q'"), ("a $ b", "expected|unexpected"),
    ("toDateTime(t, 'yyyy', 'Mars/Olympus')", "unknown time zone"), ("dateTrunc('eon', t)", "cannot truncate"),
    ("jsonPathString(a, '$..x')", "JSON path"), ("lower(mv)", "argument 1 is multi-value"),
    ("arrayLength(a)", "argument 1 is one value"), ("split(a, ',')", "gives several values"),
    ("lower(__key)", "message metadata"), ("CAST(a AS BLOB)", "cannot cast"), ("regexp_like(a, '(')", "pattern"),
    ("out + 1", "cannot contain the destination"), ("'unterminated", "unexpected"), ("(" * 60 + "1" + ")" * 60,
    "deeper"),
    ("toEpochDaysRounded(t, 0)", "must be positive"), ("case when a then b", "expected END"), ("", "unexpected"),
    ("timeConvert(i, 'HOURS', 'FORTNIGHTS')", "unknown time unit"),
]  # fmt: skip


@pytest.mark.parametrize(("expression", "reason"), REFUSED)
def test_what_cannot_run_is_refused_when_the_table_is_made(expression: str, reason: str) -> None:
    columns = {**COLUMNS, "mv": {"dataType": "STRING", "singleValueField": False}, "raw": "BYTES", "out": "LONG"}
    if expression:
        with pytest.raises(InvalidConfig, match=reason):
            compile_ingest(schema_of(columns), config_of(transforms={"out": expression}))
        if "out" not in expression:
            with pytest.raises(InvalidConfig, match=reason):
                compile_ingest(schema_of(columns), config_of(filter_function=expression))


def test_unknown_functions_are_answered_with_the_known_ones() -> None:
    with pytest.raises(InvalidConfig) as caught:
        compile_ingest(schema_of({"out": "LONG"}), config_of(transforms={"out": "nosuch(1)"}))
    assert "datetrunc" in caught.value.hint
    assert "jsonpathstring" in caught.value.hint


def test_transforms_feed_each_other_in_any_order() -> None:
    transforms = {"c": "b * 10", "b": "a + 1", "a": "CAST(raw AS LONG)", "helper": "c + 1", "d": "helper * 2"}
    schema = schema_of({"a": "LONG", "b": "INT", "c": "DOUBLE", "d": "STRING"})
    [row] = compile_ingest(schema, config_of(transforms=transforms)).run(messages_of([{"raw": "4"}])).batch.to_pylist()
    assert (row["a"], row["b"], row["c"], row["d"]) == (4, 5, 50.0, "102.0")


def test_cycles_of_transforms_are_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"cycle.*\['a', 'b'\]"):
        compile_ingest(schema_of({"a": "LONG", "b": "LONG"}), config_of(transforms={"a": "b + 1", "b": "a + 1"}))


def test_a_value_in_the_message_wins_over_the_transform() -> None:
    schema = schema_of({"a": "LONG", "mv": {"dataType": "STRING", "singleValueField": False}})
    plan = compile_ingest(schema, config_of(transforms={"a": "raw * 2", "mv": "concat(text, '!')"}))
    rows = plan.run(messages_of([{"a": 1, "raw": 9, "mv": ["x", "y"], "text": "z"}, {"raw": 9, "text": "z"}, {}])).batch
    assert rows["a"].to_pylist() == [1, 18, -(2**63)]
    assert rows["mv"].to_pylist() == [["x", "y"], ["z!"], ["null"]]


def test_old_schemas_carry_their_transforms_in_field_specs() -> None:
    schema = schema_of({"a": {"dataType": "LONG", "transformFunction": "raw + 1"}})
    assert compile_ingest(schema, config_of()).run(messages_of([{"raw": 1}])).batch["a"].to_pylist() == [2]


def test_the_filter_drops_records_for_which_it_is_true() -> None:
    schema = schema_of({"a": "STRING", "n": "INT"})
    plan = compile_ingest(schema, config_of(filter_function="n < 0 OR kind = 'test'"))
    records = [{"n": 1}, {"n": -1}, {"a": "no n at all"}, {"n": 5, "kind": "test"}, {"n": 5, "kind": "real"}, None]
    ingested = plan.run(messages_of(records))
    assert ingested.filtered_offsets == (102, 106)
    assert ingested.filtered == 2
    assert ingested.batch["$offset"].to_pylist() == [100, 104, 108]
    assert [item.offset for item in ingested.rejected] == [110]


def test_the_filter_sees_what_transforms_made() -> None:
    plan = compile_ingest(schema_of({"n": "INT"}), config_of(transforms={"n": "raw * 2"}, filter_function="n > 5"))
    assert plan.run(messages_of([{"raw": 2}, {"raw": 3}])).filtered_offsets == (102,)
