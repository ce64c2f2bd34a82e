# SPDX-License-Identifier: Apache-2.0
"""Pinot's schema JSON: what is read, answered, listed as unknown, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cremant.model.errors import InvalidConfig
from cremant.model.schema import DataType, FieldType
from cremant.model.schema_json import check_compatible, parse_schema, schema_to_json

GOLDEN = Path(__file__).parents[2] / "golden" / "rest"


def _schema(*dimensions: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"schemaName": "t", "dimensionFieldSpecs": list(dimensions), **more}


def _answer_of(number: str) -> tuple[Any, Any]:
    [path] = GOLDEN.glob(f"{number}-*.json")
    document = json.loads(path.read_text())
    return document["request"]["body"], document["response"]["body"]


def test_a_schema_is_answered_as_pinot_answers_it() -> None:
    written, answered = _answer_of("015")
    schema, unrecognized = parse_schema(written)
    assert unrecognized == answered.pop("unrecognizedProperties") == {}
    assert json.dumps(schema_to_json(schema)) == json.dumps(answered)
    _, stored = _answer_of("021")
    assert json.dumps(schema_to_json(parse_schema(stored)[0])) == json.dumps(stored)


def test_reading_what_was_answered_changes_nothing() -> None:
    document = _schema(
        {"name": "a", "dataType": "STRING", "maxLength": 10, "maxLengthExceedStrategy": "NO_ACTION", "notNull": True},
        {"name": "b", "dataType": "INT", "singleValueField": False, "defaultNullValue": "5"},
        {"name": "c", "dataType": "BYTES", "defaultNullValue": "ff"},
        metricFieldSpecs=[{"name": "m", "dataType": "BIG_DECIMAL", "transformFunction": "plus(b, 1)"}],
        dateTimeFieldSpecs=[
            {"name": "d", "dataType": "STRING", "format": "SIMPLE_DATE_FORMAT|yyyy-MM-dd", "granularity": "DAYS|1",
             "sampleValue": "2020-01-01"},
        ],
        primaryKeyColumns=["a"],
        enableColumnBasedNullHandling=True,
        description="about",
        tags=["x"],
    )  # fmt: skip
    schema, unrecognized = parse_schema(document)
    assert unrecognized == {}
    again, _ = parse_schema(schema_to_json(schema))
    assert again == schema
    assert schema_to_json(again) == schema_to_json(schema)
    assert schema.field("b").default == 5  # type: ignore[union-attr]
    assert schema.field("c").default == b"\xff"  # type: ignore[union-attr]


@pytest.mark.parametrize("data_type", list(DataType))
def test_every_type_can_be_a_dimension(data_type: DataType) -> None:
    schema, _ = parse_schema(_schema({"name": "a", "dataType": data_type.value}))
    assert schema.fields[0].data_type is data_type


def test_a_default_that_is_pinots_own_is_left_out() -> None:
    schema, _ = parse_schema(_schema({"name": "a", "dataType": "STRING", "defaultNullValue": "null"}))
    assert "defaultNullValue" not in schema_to_json(schema)["dimensionFieldSpecs"][0]


def test_unknown_keys_are_listed_by_pointer() -> None:
    document = _schema({"name": "a", "dataType": "INT", "colour": "red"}, **{"new/key": {"x": 1}})
    schema, unrecognized = parse_schema(document)
    assert unrecognized == {"/new~1key": {"x": 1}, "/dimensionFieldSpecs/0/colour": "red"}
    assert "new/key" not in schema_to_json(schema)


def test_an_old_time_column_is_read_as_the_date_time_column_it_means() -> None:
    spec = {"name": "t", "dataType": "LONG", "timeType": "DAYS"}
    schema, _ = parse_schema({"schemaName": "t", "timeFieldSpec": {"incomingGranularitySpec": spec}})
    field = schema.fields[0]
    assert (field.field_type, field.format, field.granularity) == (FieldType.DATE_TIME, "1:DAYS:EPOCH", "1:DAYS")
    other = {**spec, "timeType": "HOURS"}
    with pytest.raises(InvalidConfig, match="differ"):
        parse_schema(
            {"schemaName": "t", "timeFieldSpec": {"incomingGranularitySpec": spec, "outgoingGranularitySpec": other}}
        )


DATE = {"name": "d", "dataType": "LONG", "format": "1:DAYS:EPOCH", "granularity": "1:DAYS"}


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ([], "Object from Array"),
        ({}, "Missing required property 'schemaName'"),
        ({"schemaName": 5}, r"String from Integer 5 \(at /schemaName\)"),
        ({"schemaName": "a__b", "dimensionFieldSpecs": [{"name": "a", "dataType": "INT"}]}, "table name 'a__b'"),
        (_schema(), "no columns"),
        (_schema({"dataType": "INT"}), r"'name' \(at /dimensionFieldSpecs/0\)"),
        (_schema({"name": "a"}), r"'dataType' \(at /dimensionFieldSpecs/0\)"),
        (_schema({"name": "a", "dataType": "NOPE"}), r'"NOPE": not one of the values accepted: \[INT.*0/dataType'),
        (_schema({"name": "a", "dataType": "UUID"}), "UUID is not supported by this version"),
        (_schema({"name": "a", "dataType": "MAP"}), "MAP is not supported by this version"),
        (_schema({"name": "a", "dataType": "INT"}, complexFieldSpecs=[{"name": "m"}]), "complexFieldSpecs"),
        (_schema({"name": "a", "dataType": "INT"}, {"name": "a", "dataType": "INT"}), "declared twice"),
        (_schema({"name": "$a", "dataType": "INT"}), "not allowed"),
        (_schema({"name": "a", "dataType": "INT", "singleValueField": "no"}), "Boolean from String"),
        (_schema({"name": "a", "dataType": "INT", "defaultNullValue": "x"}), "defaultNullValue 'x'"),
        (_schema({"name": "a", "dataType": "STRING", "maxLength": 0}), "maxLength must be positive"),
        (_schema({"name": "a", "dataType": "STRING", "maxLengthExceedStrategy": "CUT"}), "'CUT' is not one of"),
        (_schema(metricFieldSpecs=[{"name": "a", "dataType": "STRING"}]), "metric column a"),
        (_schema(metricFieldSpecs=[{"name": "a", "dataType": "INT", "singleValueField": False}]), "only dimensions"),
        (_schema(dateTimeFieldSpecs=[{"name": "d", "dataType": "LONG"}]), "'format'"),
        (_schema(dateTimeFieldSpecs=[{**DATE, "format": "1:FORTNIGHTS:EPOCH"}]), "unknown time unit"),
        (_schema(dateTimeFieldSpecs=[{**DATE, "format": "DAYS"}]), "not a date-time format"),
        (_schema(dateTimeFieldSpecs=[{**DATE, "granularity": "1:DAYS:x"}]), "granularity"),
        (_schema({"name": "a", "dataType": "INT"}, primaryKeyColumns=["b"]), "primary key column 'b'"),
        (_schema("a"), "Object from String"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_refused_and_the_place_is_named(document: Any, reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        parse_schema(document)


def test_a_refusal_repeats_the_document_as_pinot_does() -> None:
    written, answered = _answer_of("019")
    with pytest.raises(InvalidConfig) as caught:
        parse_schema(written)
    assert caught.value.http_status == 400
    prefix, _, _ = answered["error"].partition(" Reason:")
    assert caught.value.message.replace(" ", "").startswith(prefix.replace(" ", ""))


def test_columns_may_be_added_but_not_removed_or_changed() -> None:
    a, b = {"name": "a", "dataType": "INT"}, {"name": "b", "dataType": "STRING"}
    old, _ = parse_schema(_schema(a))
    check_compatible(old, parse_schema(_schema(b, a))[0])
    for changed in (_schema(b), _schema({**a, "dataType": "LONG"}), _schema({**a, "singleValueField": False})):
        new, _ = parse_schema(changed)
        with pytest.raises(InvalidConfig, match=r"not backward-compatible.*column a"):
            check_compatible(old, new)
        check_compatible(old, new, force=True)
