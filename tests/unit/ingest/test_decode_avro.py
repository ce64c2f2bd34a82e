# SPDX-License-Identifier: Apache-2.0
"""Avro messages, with a schema of the table's or in a registry's wire format; the same rows as JSON and CSV give."""

from __future__ import annotations

import datetime
import io
import json
import struct
import uuid
from decimal import Decimal
from typing import Any

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ingest_kit import config_of, messages_of, schema_of

from cremant.ingest.plan import Ingested, compile_ingest
from cremant.model.errors import InvalidConfig
from cremant.model.limits import MESSAGE_BYTES_MAX, MESSAGE_DEPTH_MAX

PACKAGE = "org.apache.pinot.plugin.inputformat.avro"
SIMPLE = f"{PACKAGE}.SimpleAvroMessageDecoder"
CONFLUENT = f"{PACKAGE}.confluent.KafkaConfluentSchemaRegistryAvroMessageDecoder"
MS = 1_700_000_000_123


def record(*fields: tuple[str, Any], name: str = "r") -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": name, "type": kind} for name, kind in fields]}


def written(schema: dict[str, Any], value: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
    return stream.getvalue()


def run(
    columns: dict[str, Any], schema: dict[str, Any], messages: list[bytes | None], **config: Any
) -> Ingested:  # fmt: skip
    stream = {"decoder.class.name": SIMPLE, "decoder.prop.schema": json.dumps(schema)}
    return compile_ingest(schema_of(columns), config_of(stream=stream, **config)).run(messages_of(messages))


def one(data_type: str, kind: Any, value: Any, *, single: bool = True) -> Any:
    """The cell of a column of `data_type` for a field of Avro type `kind`; or (cause, detail)."""
    schema = record(("x", kind))
    column = {"dataType": data_type, "singleValueField": single}
    ingested = run({"x": column}, schema, [written(schema, {"x": value})])
    if ingested.rejected:
        return ingested.rejected[0].cause, ingested.rejected[0].detail
    return ingested.batch.column("x")[0].as_py()


def nested_array(levels: int) -> Any:
    kind: Any = "bytes"
    for _ in range(levels):
        kind = {"type": "array", "items": kind}
    return kind


def logical(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": name, **more}


DAY = datetime.date(2023, 11, 14)
MOMENT = datetime.datetime(2023, 11, 14, 22, 13, 20, 123_456, tzinfo=datetime.UTC)
ENUM = {"type": "enum", "name": "color", "symbols": ["RED", "GREEN"]}
POINT = record(("x", "int"), ("label", ["null", "string"]), ("raw", "bytes"), name="point")


@pytest.mark.parametrize(
    ("data_type", "kind", "value", "expected"),
    [
        ("INT", "int", -5, -5),
        ("INT", "long", 2**31, ("outOfRange", "column x: 2147483648 does not fit into INT")),
        ("LONG", "long", -(2**63), -(2**63)),
        ("LONG", "boolean", True, 1),
        ("LONG", "string", "12", 12),
        ("LONG", "string", "twelve", ("wrongType", "column x: 'twelve' is not a value of type LONG")),
        ("DOUBLE", "float", 0.5, 0.5),
        ("FLOAT", "double", 0.1, 0.10000000149011612),
        ("DOUBLE", "double", float("nan"), float("-inf")),
        ("BOOLEAN", "boolean", True, True),
        ("STRING", "string", "é😀", "é😀"),
        ("STRING", "float", 0.1, "0.1"),
        ("STRING", "double", 1e10, "1.0E10"),
        ("STRING", "bytes", b"\xde\xad", "dead"),
        ("STRING", ENUM, "GREEN", "GREEN"),
        ("BYTES", "bytes", b"\x00\xff", b"\x00\xff"),
        ("BYTES", {"type": "fixed", "name": "f", "size": 2}, b"ab", b"ab"),
        ("BYTES", "string", "beef", b"\xbe\xef"),
        ("INT", "bytes", b"5", ("wrongType", "column x: b'5' is not a value of type INT")),
        ("STRING", ["null", "string"], None, "null"),
        ("STRING", ["null", "string", "long"], 5, "5"),
        ("STRING", ["null", "string", "long"], "five", "five"),
        ("LONG", ["null", "string", "long"], "five", ("wrongType", "column x: 'five' is not a value of type LONG")),
        ("TIMESTAMP", logical("long", "timestamp-millis"), MOMENT, MS),
        ("TIMESTAMP", logical("long", "timestamp-micros"), MOMENT, MS),
        ("LONG", ["null", logical("long", "timestamp-micros")], MOMENT, MS),
        ("LONG", logical("long", "timestamp-micros"), -1, -1),
        ("STRING", logical("long", "timestamp-micros"), MOMENT, "2023-11-14 22:13:20.123456"),
        ("STRING", logical("long", "timestamp-millis"), 0, "1970-01-01 00:00:00.0"),
        ("STRING", logical("int", "date"), DAY, "2023-11-14"),
        ("TIMESTAMP", logical("int", "date"), DAY, 1_699_920_000_000),
        ("INT", logical("int", "date"), DAY, 19_675),
        ("STRING", logical("int", "time-millis"), datetime.time(1, 2, 3, 500_000), "01:02:03.5"),
        ("LONG", logical("long", "time-micros"), datetime.time(0, 0, 1), 1_000_000),
        ("BIG_DECIMAL", logical("bytes", "decimal", precision=9, scale=3), Decimal("-12.345"), "-12.345"),
        ("DOUBLE", logical("bytes", "decimal", precision=9, scale=3), Decimal("12.5"), 12.5),
        ("STRING", logical("bytes", "decimal", precision=9, scale=3), Decimal("12.500"), "12.500"),
        ("STRING", logical("string", "uuid"), uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005"),
        ("JSON", POINT, {"x": 1, "label": None, "raw": b"ab"}, '{"x":1,"label":null,"raw":"YWI="}'),
        ("STRING", POINT, {"x": 1, "label": "p", "raw": b""}, '{"x":1,"label":"p","raw":""}'),
        ("JSON", {"type": "map", "values": logical("int", "date")}, {"k": DAY}, '{"k":"2023-11-14"}'),
        ("JSON", {"type": "array", "items": "int"}, [1, 2], "[1,2]"),
        ("INT", {"type": "array", "items": "int"}, [7], 7),
        (
            "INT", {"type": "array", "items": "int"}, [1, 2],
            ("wrongType", "column x: an array of 2 values is not a value of type INT"),
        ),
    ],
)  # fmt: skip
def test_a_value_of_each_avro_type_in_a_column(data_type: str, kind: Any, value: Any, expected: Any) -> None:
    assert one(data_type, kind, value) == expected


@pytest.mark.parametrize(
    ("data_type", "items", "value", "expected"),
    [
        ("INT", "int", [1, 2], [1, 2]),
        ("LONG", ["null", "long"], [1, None, 3], [1, 3]),
        ("STRING", "string", [], ["null"]),
        ("STRING", "long", [1, 2], ["1", "2"]),
        ("TIMESTAMP", logical("long", "timestamp-micros"), [MOMENT, MOMENT], [MS, MS]),
        ("BYTES", "bytes", [b"a", b"b"], [b"a", b"b"]),
        ("DOUBLE", logical("bytes", "decimal", precision=4, scale=1), [Decimal("1.5"), Decimal("2")], [1.5, 2.0]),
        ("STRING", POINT, [{"x": 1, "label": None, "raw": b""}] * 2, ['{"x":1,"label":null,"raw":""}'] * 2),
        ("INT", "string", ["1", "x"], ("wrongType", "column x: 'x' is not a value of type INT")),
    ],
)
def test_arrays_in_multi_value_columns(data_type: str, items: Any, value: Any, expected: Any) -> None:
    assert one(data_type, {"type": "array", "items": items}, value, single=False) == expected


@pytest.mark.parametrize("data_type", ["STRING", "JSON", "DOUBLE", "BIG_DECIMAL", "LONG"])
def test_a_decimal_of_too_many_bytes_is_rejected_at_once(data_type: str) -> None:
    schema = record(("x", {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}))
    huge = written(record(("x", "bytes")), {"x": b"\x7f" * (MESSAGE_BYTES_MAX - 10)})
    ingested = run({"x": data_type}, schema, [huge, written(record(("x", "bytes")), {"x": b"\x7f"})])
    assert [(bad.offset, bad.cause) for bad in ingested.rejected] == [(100, "outOfRange")]
    assert ingested.batch.num_rows == 1


def test_texts_of_decimals_are_numbers() -> None:
    assert one("BIG_DECIMAL", "string", "+05.50") == "5.5"
    assert one("BIG_DECIMAL", "string", "many") == ("wrongType", "column x: 'many' is not a value of type BIG_DECIMAL")


def test_a_single_value_is_the_only_element_of_a_multi_value_cell() -> None:
    assert one("LONG", ["null", "long"], 5, single=False) == [5]
    assert one("LONG", ["null", "long"], None, single=False) == [-(2**63)]


def test_bad_bytes_are_rejected_alone_and_say_why() -> None:
    schema = record(("s", "string"), ("n", "long"))
    good = written(schema, {"s": "x", "n": 1})
    ingested = run(
        {"s": "STRING", "n": "LONG"}, schema, [good, b"\x09", good + b"!!", b"\x02\xff\x02", None, b"", good]
    )
    assert [(bad.offset, bad.cause) for bad in ingested.rejected] == [
        (102, "malformedAvro"), (104, "malformedAvro"), (106, "malformedAvro"), (108, "emptyMessage"),
        (110, "emptyMessage"),
    ]  # fmt: skip
    assert "2 bytes are left behind the record" in ingested.rejected[1].detail
    assert ingested.batch.column("s").to_pylist() == ["x", "x"]


def test_a_message_that_nests_too_deep_is_rejected_and_does_not_end_the_process() -> None:
    schema = record(("x", "int"), ("next", ["null", "r"]))
    deep = [MESSAGE_DEPTH_MAX - 1, MESSAGE_DEPTH_MAX, 5_000, 1_000_000]
    messages = [b"\x00\x02" * levels + b"\x00\x00" for levels in deep]
    ingested = run({"x": "INT", "next": "JSON"}, schema, [*messages])
    assert [bad.cause for bad in ingested.rejected] == ["tooDeep"] * 3
    assert ingested.batch.num_rows == 1


@pytest.mark.parametrize(
    "schema",
    [
        "{", "[1]", '"string"', '{"type": "record", "name": "r"}',
        '{"type":"record","name":"r","fields":[{"name":"x","type":"nope"}]}',
    ],
)  # fmt: skip
def test_a_schema_that_is_none_is_refused(schema: str) -> None:
    stream = {"decoder.class.name": SIMPLE, "decoder.prop.schema": schema}
    with pytest.raises(InvalidConfig, match="Avro decoder"):
        compile_ingest(schema_of({"x": "INT"}), config_of(stream=stream), lambda path: path)


ODD_SCHEMAS = {
    "scale that is no number": record(("x", {"type": "int", "logicalType": "date", "scale": "many"})),
    "logical type that is no name": record(("x", {"type": "int", "logicalType": ["date"]})),
}
BROKEN_SCHEMAS = {
    "union in a union": json.dumps(record(("x", ["null", ["null", "int"]]))),
    "deep": '{"type": "record", "name": "r", "fields": ' + "[" * 5_000 + "]" * 5_000 + "}",
    "deep, read": json.dumps(record(("x", nested_array(MESSAGE_DEPTH_MAX)))),
    "items without bytes": json.dumps(record(("x", {"type": "array", "items": "null"}))),
    "scale": json.dumps(record(("x", {"type": "bytes", "logicalType": "decimal", "precision": 10**9, "scale": 10**9}))),
    "items of an empty record": json.dumps(record(("x", {"type": "array", "items": record(name="nothing")}))),
}


@pytest.mark.parametrize("what", ODD_SCHEMAS)
def test_logical_types_that_make_no_sense_are_none(what: str) -> None:
    schema = ODD_SCHEMAS[what]
    ingested = run({"x": "INT"}, schema, [written(record(("x", "int")), {"x": 7})])
    assert ingested.batch.column("x").to_pylist() == [7]


@pytest.mark.parametrize("what", BROKEN_SCHEMAS)
def test_a_schema_of_the_registry_that_cannot_be_read_rejects_its_messages(what: str) -> None:
    message = struct.pack(">bI", 0, 1) + b"\x02"
    ingested = confluent({"x": "STRING"}).run(messages_of([message]), schemas={1: BROKEN_SCHEMAS[what]})
    assert [bad.cause for bad in ingested.rejected] == ["unknownSchema"]


def test_schemas_may_nest_as_deep_as_messages() -> None:
    kind = nested_array(MESSAGE_DEPTH_MAX - 10)
    value: Any = b"z"
    for _ in range(MESSAGE_DEPTH_MAX - 10):
        value = [value]
    assert one("JSON", kind, value).strip("[]") == '"eg=="'


def test_records_of_one_name_in_different_namespaces_are_read_apart() -> None:
    inner = [
        {"type": "record", "name": "point", "namespace": space, "fields": [{"name": "v", "type": kind}]}
        for space, kind in (("a", "bytes"), ("b", "string"))
    ]
    outer = record(("first", inner[0]), ("second", inner[1]), ("third", "a.point"), name="outer")
    value = {"first": {"v": b"z"}, "second": {"v": "z"}, "third": {"v": b"y"}}
    expected = '{"first":{"v":"eg=="},"second":{"v":"z"},"third":{"v":"eQ=="}}'
    assert one("JSON", outer, value) == expected


def test_the_records_of_a_union_are_told_apart_by_their_fields() -> None:
    kind = [
        record(("v", logical("int", "date")), name="dated"),
        record(("v", "int"), ("w", "string"), name="counted"),
        {"type": "map", "values": "bytes"},
    ]
    assert one("JSON", kind, {"v": 1}) == '{"v":"1970-01-02"}'
    assert one("JSON", kind, {"v": 1, "w": "z"}) == '{"v":1,"w":"z"}'
    assert one("JSON", kind, {"k": b"z"}) == '{"k":"eg=="}'


def test_branches_of_a_union_that_look_alike_are_left_as_they_were_read() -> None:
    records = [record(("v", kind), name=f"of_{kind}") for kind in ("bytes", "string")]
    assert one("JSON", records, {"v": b"z"}) == '{"v":"eg=="}'
    assert one("JSON", records, {"v": "z"}) == '{"v":"z"}'
    numbers = record(("x", [logical("int", "date"), logical("long", "timestamp-millis")]))
    ingested = run({"x": "STRING"}, numbers, [b"\x00\x02", b"\x02\x02"])
    assert ingested.batch.column("x").to_pylist() == ["1", "1"]


def test_a_schema_may_be_a_file() -> None:
    stream = {"decoder.class.name": SIMPLE, "decoder.prop.schema": "/schemas/r.avsc"}
    schema = record(("x", "int"))
    plan = compile_ingest(
        schema_of({"x": "INT"}), config_of(stream=stream), {"/schemas/r.avsc": json.dumps(schema)}.__getitem__
    )
    assert plan.run(messages_of([written(schema, {"x": 5})])).batch.column("x").to_pylist() == [5]
    compile_ingest(schema_of({"x": "INT"}), config_of(stream=stream))  # checked where the file is not


# --- a registry ---


def wire(schema_id: int, schema: dict[str, Any], value: dict[str, Any]) -> bytes:
    return struct.pack(">bI", 0, schema_id) + written(schema, value)


def confluent(columns: dict[str, Any]) -> Any:
    stream = {"decoder.class.name": CONFLUENT, "decoder.prop.schema.registry.rest.url": "http://127.0.0.1:8081"}
    return compile_ingest(schema_of(columns), config_of(stream=stream, nulls=True))


def test_each_message_is_read_with_the_schema_it_was_written_with() -> None:
    old, new = record(("a", "int"), ("gone", "string")), record(("b", ["null", "string"]), ("a", "long"))
    batch = messages_of(
        [wire(1, old, {"a": 1, "gone": "x"}), wire(258, new, {"a": 2, "b": "y"}), wire(1, old, {"a": 3, "gone": ""})]
    )
    plan = confluent({"a": "LONG", "b": "STRING"})
    assert plan.schema_ids(batch) == {1, 258}
    ingested = plan.run(batch, schemas={1: json.dumps(old), 258: json.dumps(new)})
    assert not ingested.rejected
    assert [(row["a"], row["b"], row["$isNull.b"]) for row in ingested.batch.to_pylist()] == [
        (1, "null", True), (2, "y", False), (3, "null", True),
    ]  # fmt: skip


def test_what_is_not_in_the_wire_format_or_of_an_unknown_schema_is_rejected() -> None:
    schema = record(("a", "int"))
    batch = messages_of(
        [b'{"a":1}', wire(1, schema, {"a": 1}), b"\x00\x00", wire(7, schema, {"a": 1}), wire(8, schema, {"a": 1}), None]
    )
    plan = confluent({"a": "INT"})
    assert plan.schema_ids(batch) == {1, 7, 8}
    ingested = plan.run(batch, schemas={1: json.dumps(schema), 7: None, 8: '"string"'})
    assert [(bad.offset, bad.cause) for bad in ingested.rejected] == [
        (100, "malformedAvro"), (104, "malformedAvro"), (106, "unknownSchema"), (108, "unknownSchema"),
        (110, "emptyMessage"),
    ]  # fmt: skip
    assert [bad.detail for bad in ingested.rejected[:3]] == [
        "the first byte is 123, not 0: not in a schema registry's wire format",
        "2 bytes are too few for a schema registry's wire format",
        "the schema registry knows no schema of id 7",
    ]
    assert ingested.batch.num_rows == 1


# --- agreement of the formats ---

AGREED = {
    "s": "STRING", "i": "INT", "l": "LONG", "d": "DOUBLE", "b": "BOOLEAN", "t": "TIMESTAMP",
    "tags": {"dataType": "STRING", "singleValueField": False},
    "ls": {"dataType": "LONG", "singleValueField": False},
}  # fmt: skip
AVRO_AGREED = record(
    ("s", ["null", "string"]), ("i", ["null", "int"]), ("l", ["null", "long"]), ("d", ["null", "double"]),
    ("b", ["null", "boolean"]), ("t", ["null", logical("long", "timestamp-millis")]),
    ("tags", {"type": "array", "items": "string"}), ("ls", {"type": "array", "items": "long"}), ("ts", "long"),
)  # fmt: skip
WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0;"), min_size=1, max_size=8)
ROWS = st.fixed_dictionaries(
    {
        "s": st.none() | WORDS, "i": st.none() | st.integers(-(2**31), 2**31 - 1),
        "l": st.none() | st.integers(-(2**63), 2**63 - 1), "d": st.none() | st.floats(allow_nan=False),
        "b": st.none() | st.booleans(), "t": st.none() | st.integers(-(10**13), 10**13),
        "tags": st.lists(WORDS, max_size=3), "ls": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
        "ts": st.just(5),
    }
)  # fmt: skip


def csv_of(row: dict[str, Any]) -> bytes:
    def cell(value: Any) -> str:
        if isinstance(value, list):
            return cell(";".join(map(str, value)))
        text = "" if value is None else "true" if value is True else str(value)
        text = {"inf": "Infinity", "-inf": "-Infinity"}.get(text, text)
        return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in '",\r\n') else text

    return ",".join(cell(row[name]) for name in [*AGREED, "ts"]).encode()


@settings(deadline=None)
@given(st.lists(ROWS, max_size=5))
def test_the_same_rows_as_json_csv_and_avro_give_the_same_blocks(values: list[dict[str, Any]]) -> None:
    schema = schema_of(AGREED)
    csv = {
        "decoder.class.name": "org.apache.pinot.plugin.inputformat.csv.CSVMessageDecoder",
        "decoder.prop.header": ",".join([*AGREED, "ts"]),
    }
    simple = {"decoder.class.name": SIMPLE, "decoder.prop.schema": json.dumps(AVRO_AGREED)}
    from_json = compile_ingest(schema, config_of(nulls=True)).run(messages_of([*values]))
    from_csv = compile_ingest(schema, config_of(nulls=True, stream=csv)).run(messages_of([csv_of(v) for v in values]))
    from_avro = compile_ingest(schema, config_of(nulls=True, stream=simple)).run(
        messages_of([written(AVRO_AGREED, v) for v in values])
    )
    assert not from_json.rejected
    assert from_csv == from_json
    assert from_avro == from_json
