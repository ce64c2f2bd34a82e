# SPDX-License-Identifier: Apache-2.0
"""CSV messages: the columnar parse and the one for odd messages agree, and what is wrong is said."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ingest_kit import config_of, messages_of, schema_of

from cremant.ingest.causes import BadValue, Cause
from cremant.ingest.decode_csv import CsvDecoder, Dialect, parse_dialect, parse_records
from cremant.ingest.messages import work_type
from cremant.ingest.plan import Ingested, compile_ingest
from cremant.model.errors import InvalidConfig
from cremant.model.schema import DataType, FieldSpec, FieldType

CSV = "org.apache.pinot.plugin.inputformat.csv.CSVMessageDecoder"
COLUMNS = {"a": "STRING", "n": "INT", "tags": {"dataType": "STRING", "singleValueField": False}}


def run(messages: list[bytes | None], **properties: str) -> Ingested:
    given = {"header": "a,n,tags", **properties}
    stream = {"decoder.class.name": CSV, **{f"decoder.prop.{key}": value for key, value in given.items()}}
    return compile_ingest(schema_of(COLUMNS), config_of(stream=stream, nulls=True)).run(messages_of(messages))


def rows(ingested: Ingested, *names: str) -> list[list[Any]]:
    assert not ingested.rejected, ingested.rejected
    return [[row[name] for name in names or ("a", "n", "tags")] for row in ingested.batch.to_pylist()]


def test_a_record_is_a_row_and_fields_are_found_by_the_header() -> None:
    assert rows(run([b"x,1,t", b'"y, z",-2,"p;q"', b"w,3,\n"])) == [
        ["x", 1, ["t"]], ["y, z", -2, ["p", "q"]], ["w", 3, ["null"]],
    ]  # fmt: skip
    assert rows(run([b"t,x,1"], header="tags,a,n")) == [["x", 1, ["t"]]]
    assert rows(run([b"x,1,y"], header="a,n,other")) == [["x", 1, ["null"]]]


def test_empty_fields_and_the_null_string_are_missing() -> None:
    ingested = run([b',,""', b"NULL,5,NULL;x", b"NULL,NULL,NULL"], nullStringValue="NULL")
    assert [[row[f"$isNull.{name}"] for name in ("a", "n", "tags")] for row in ingested.batch.to_pylist()] == [
        [True, True, True], [True, False, False], [True, True, True],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("properties", "message", "expected"),
    [
        ({"delimiter": "|", "header": "a|n|tags"}, b"x,y|1|p;q", ["x,y", 1, ["p", "q"]]),
        ({"delimiter": "\t", "header": "a\tn\ttags"}, b"x\t1\tp", ["x", 1, ["p"]]),
        ({"quoteCharacter": "'"}, b"'it''s',1,p", ["it's", 1, ["p"]]),
        ({"escapeCharacter": "\\"}, rb"x\,y,1,p\"q", ["x,y", 1, ['p"q']]),
        ({"escapeCharacter": "\\"}, rb'"a\n\"b",1,p', ['a\n"b', 1, ["p"]]),
        ({"multiValueDelimiter": "|"}, b"x;y,1,p|q||r", ["x;y", 1, ["p", "q", "r"]]),
        ({"ignoreSurroundingSpaces": "true"}, b' x , 1 , "p" ', ["x", 1, ["p"]]),
        ({"ignoreSurroundingSpaces": "true"}, b' " a " , 1 ,\t" p ;q"', [" a ", 1, [" p ", "q"]]),
        ({"ignoreSurroundingSpaces": "true"}, b'" ",1,p', [" ", 1, ["p"]]),
        ({"ignoreSurroundingSpaces": "true"}, "\u2003x\x0b,1,\u00a0p\u00a0".encode(), ["x", 1, ["\u00a0p\u00a0"]]),
        ({"ignoreSurroundingSpaces": "true", "escapeCharacter": "\\"}, rb'x\t\n ,1,"p\t"', ["x", 1, ["p\t"]]),
        ({"fileFormat": "TDF", "header": "a\tn\ttags"}, b' a \t1\t" b " ', ["a", 1, [" b "]]),
        ({"fileFormat": "MYSQL", "header": "a\tn\ttags"}, b'"x"\t\\N\ta\\tb', ['"x"', -(2**31), ["a\tb"]]),
        ({"fileFormat": "TDF", "header": "a\tn\ttags"}, b"x\t1\tp", ["x", 1, ["p"]]),
        ({}, b'"two\nlines",1,"a ""b"""', ["two\nlines", 1, ['a "b"']]),
        ({}, b'x"y,1,"p"', ['x"y', 1, ["p"]]),
        ({}, b"\xef\xbb\xbfx,1,p", ["x", 1, ["p"]]),
        ({}, b"x,1,p\r\n", ["x", 1, ["p"]]),
        ({}, "é,1,😀".encode(), ["é", 1, ["😀"]]),
    ],
)
def test_dialects(properties: dict[str, str], message: bytes, expected: list[Any]) -> None:
    assert rows(run([message], **properties)) == [expected]


def test_a_text_with_the_multi_value_delimiter_stays_whole_in_a_single_value_column() -> None:
    assert rows(run([b"x;y,1,p"])) == [["x;y", 1, ["p"]]]


def test_texts_of_decimals_are_stored_as_numbers_are_and_others_rejected() -> None:
    stream = {"decoder.class.name": CSV, "decoder.prop.header": "d,z"}
    plan = compile_ingest(schema_of({"d": "BIG_DECIMAL"}), config_of(stream=stream))
    messages = [b"+5,", b"007.10,", b"1e3,", b"-0,", b"many,", b'"12345678901234567890.5",']
    ingested = plan.run(messages_of(messages))
    assert ingested.batch.column("d").to_pylist() == ["5", "7.1", "1000", "0", "12345678901234567890.5"]
    assert [(bad.offset, bad.cause) for bad in ingested.rejected] == [(108, "wrongType")]


def test_without_a_header_each_message_brings_its_own() -> None:
    stream = {"decoder.class.name": CSV}
    plan = compile_ingest(schema_of(COLUMNS), config_of(stream=stream))
    ingested = plan.run(messages_of([b"n,a\n5,x", b'tags,a\r\n"p;q",y\r\n', b"a,n"]))
    assert [(row["a"], row["n"], row["tags"]) for row in ingested.batch.to_pylist()] == [
        ("x", 5, ["null"]), ("y", -(2**31), ["p", "q"]),
    ]  # fmt: skip
    assert [(bad.cause, bad.detail) for bad in ingested.rejected] == [
        ("malformedCsv", "0 records in a message, expected one")
    ]


@pytest.mark.parametrize(
    ("message", "cause", "detail"),
    [
        (b"x,1", "wrongFieldCount", "2 fields, the header has 3"),
        (b"x,1,p,q", "wrongFieldCount", "4 fields, the header has 3"),
        (b'"x",1,p,"q"', "wrongFieldCount", "4 fields, the header has 3"),
        (b'"x,1,p', "malformedCsv", "the quote at character 1 is not closed"),
        (b'"x"y,1,p', "malformedCsv", "'y' behind the closing quote at character 4"),
        (b"x,1,p\ny,2,q", "malformedCsv", "2 records in a message, expected one"),
        (b"x,1,\xff", "malformedCsv", "not UTF-8: invalid start byte at byte 4"),
        (b"\n", "malformedCsv", "0 records in a message, expected one"),
        (b"", "emptyMessage", "the message is empty"),
        (None, "emptyMessage", "the message has no value (a tombstone)"),
        (b"x,many,p", "wrongType", "column n: 'many' is not a value of type INT"),
        (b"x,99999999999,p", "outOfRange", "column n: '99999999999' does not fit into INT"),
    ],
)
def test_what_is_wrong_is_rejected_alone_with_its_cause(message: bytes | None, cause: str, detail: str) -> None:
    ingested = run([b"v,1,p", message, b'"w",2,"q"'])
    assert [(bad.offset, bad.cause, bad.detail) for bad in ingested.rejected] == [(102, cause, detail)]
    assert ingested.batch.column("a").to_pylist() == ["v", "w"]
    assert ingested.rejected[0].sample == (message or b"")


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ({"delimiter": "ab"}, "delimiter must be one ASCII character"),
        ({"delimiter": '"'}, "must be different characters"),
        ({"fileFormat": "WEIRD"}, "fileFormat 'WEIRD' is not known"),
        ({"header": "a,,n"}, "empty or there twice"),
        ({"header": "x,y"}, "names no column of the schema"),
        ({"commentMarker": "#"}, "commentMarker not supported"),
    ],
)
def test_a_config_that_cannot_be_is_refused(properties: dict[str, str], reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        run([], **properties)


FIELDS = (
    FieldSpec(name="a", data_type=DataType.STRING, field_type=FieldType.DIMENSION),
    FieldSpec(name="b", data_type=DataType.STRING, field_type=FieldType.DIMENSION, single_value=False),
    FieldSpec(name="c", data_type=DataType.INT, field_type=FieldType.DIMENSION),
)
TEXTS = st.lists(
    st.sampled_from(['"', '""', ",", ";", "\n", "\r\n", " ", "x", "é", "\\", "\0", "5", "-1", ""]), max_size=9
)


@settings(deadline=None)
@given(st.lists(TEXTS.map("".join), max_size=6), st.sampled_from([None, "\\"]), st.sampled_from([True, False]))
def test_the_parse_of_many_messages_equals_the_parse_of_each(texts: list[str], escape: str | None, trim: bool) -> None:
    properties = {"header": "a,b,c", "ignoreSurroundingSpaces": str(trim).lower()}
    if escape:
        properties["escapeCharacter"] = escape
    decoder = CsvDecoder(FIELDS, properties, parse_rows=2)
    decoded = decoder.decode(pa.array([text.encode() for text in texts], pa.binary()))
    found: list[Any] = [None] * len(texts)
    for refusal in decoded.bad:
        found[refusal.at] = refusal.cause
    for row, at in enumerate(decoded.kept.tolist()):
        found[at] = [column[row].as_py() for column in decoded.columns]
    assert found == [reference(text, parse_dialect(properties), decoder) for text in texts]
    for column, field in zip(decoded.columns, FIELDS, strict=True):
        assert column.type == work_type(field)


def reference(text: str, dialect: Dialect, decoder: CsvDecoder) -> Any:
    """One message, by the parser for odd ones."""
    if not text:
        return Cause.EMPTY_MESSAGE
    try:
        records = parse_records(text, dialect)
    except BadValue as problem:
        return problem.cause
    if len(records) != 1:
        return Cause.MALFORMED_CSV
    if len(records[0]) != 3:
        return Cause.WRONG_FIELD_COUNT
    a, b, c = records[0]
    if c:
        try:
            number = int(c.strip("".join(map(chr, range(33)))))
        except ValueError:
            return Cause.WRONG_TYPE
    parts = [part or None for part in b.split(";")] if b else []
    return [a or None, parts or None, number if c else None]
