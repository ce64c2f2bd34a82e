# SPDX-License-Identifier: Apache-2.0
"""Messages in, rows out: defaults, nulls, special values, lengths, rejects; a row depends on its record alone."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from ingest_kit import FIRST_OFFSET, TIME_MS, config_of, messages_of, schema_of

from cremant.ingest.causes import SAMPLE_BYTES, Cause
from cremant.ingest.plan import Ingested, compile_ingest
from cremant.model.schema import DataType
from cremant.model.upsert import NullKeyPolicy, UpsertConfig

ALL_TYPES: dict[str, Any] = {
    **{kind.lower(): kind.value for kind in DataType},
    **{f"{kind.lower()}s": {"dataType": kind.value, "singleValueField": False} for kind in DataType if kind != "JSON"},
}


def _run(columns: dict[str, Any], records: list[Any], **config: Any) -> Ingested:
    return compile_ingest(schema_of(columns), config_of(**config)).run(messages_of(records))


def _rows(columns: dict[str, Any], records: list[Any], **config: Any) -> list[dict[str, Any]]:
    ingested = _run(columns, records, **config)
    assert ingested.rejected == ()
    rows: list[dict[str, Any]] = ingested.batch.to_pylist()
    return rows


def test_block_schema_has_position_then_columns_then_null_flags() -> None:
    schema = schema_of({"a": "STRING", "mv": {"dataType": "INT", "singleValueField": False}})
    plan = compile_ingest(schema, config_of(nulls=True))
    assert plan.block_schema.names == [
        "$offset", "$subRow", "$ingestionTime", "a", "mv", "ts", "$isNull.a", "$isNull.mv", "$isNull.ts",
    ]  # fmt: skip
    assert [field.name for field in plan.block_schema if field.nullable] == ["$ingestionTime"]
    assert plan.run(messages_of([{}])).batch.schema == plan.block_schema
    assert not any(name.startswith("$isNull") for name in compile_ingest(schema, config_of()).block_schema.names)


def test_null_flags_follow_either_the_table_or_the_schema() -> None:
    schema = schema_of({"a": "STRING"}, enableColumnBasedNullHandling=True)
    assert "$isNull.a" in compile_ingest(schema, config_of()).block_schema.names


def test_values_of_every_type_are_stored_exactly() -> None:
    record = {
        "int": -(2**31), "long": 2**63 - 1, "float": 0.1, "double": 0.1,
    "big_decimal": "12345678901234567890.123456789",
        "boolean": True, "timestamp": 1577836800123, "string": "é😀", "json": '{"a": 1}', "bytes": "DEADbeef",
        "ints": [1, 2], "longs": [-(2**63)], "floats": [0.5], "doubles": [1e300, 2], "big_decimals": ["1.5", 2],
        "booleans": [True, False], "timestamps": [0], "strings": ["", "x"], "bytess": ["00", ""],
        "ts": TIME_MS,
    }  # fmt: skip
    [row] = _rows(ALL_TYPES, [record])
    assert row == {
        "$offset": FIRST_OFFSET, "$subRow": 0, "$ingestionTime": TIME_MS,
        **record,
        "float": 0.10000000149011612, "big_decimal": "12345678901234567890.123456789",
        "bytes": b"\xde\xad\xbe\xef", "bytess": [b"\x00", b""], "big_decimals": ["1.5", "2"],
    }  # fmt: skip


@pytest.mark.parametrize("record", [{}, dict.fromkeys(ALL_TYPES), {f"{kind.lower()}s": [] for kind in DataType}])
def test_missing_cells_are_stored_as_defaults(record: dict[str, Any]) -> None:
    [row] = _rows(ALL_TYPES, [record])
    expected = {
        "int": -(2**31), "long": -(2**63), "float": float("-inf"), "double": float("-inf"), "big_decimal": "0",
        "boolean": False, "timestamp": 0, "string": "null", "json": "null", "bytes": b"",
    }  # fmt: skip
    for name, default in expected.items():
        assert row[name] == default
        if name != "json":
            assert row[f"{name}s"] == [default]


def test_defaults_of_the_schema_and_of_metrics_are_used() -> None:
    columns = {
        "a": {"dataType": "STRING", "defaultNullValue": "none"},
        "n": {"dataType": "INT", "defaultNullValue": "7"},
        "mv": {"dataType": "LONG", "singleValueField": False, "defaultNullValue": -5},
        "sum": {"dataType": "DOUBLE", "metric": True},
    }
    [row] = _rows(columns, [{}])
    assert (row["a"], row["n"], row["mv"], row["sum"]) == ("none", 7, [-5], 0.0)


def test_null_flags_mark_missing_cells_only() -> None:
    columns = {"a": "STRING", "n": "INT", "mv": {"dataType": "INT", "singleValueField": False}, "x": "DOUBLE"}
    records = [
        {"a": "null", "n": -(2**31), "mv": [-(2**31)], "x": 1, "ts": 1},
        {"a": None, "mv": [], "x": float("nan")},
        {"a": "b", "n": 5, "mv": [None, 3], "x": 0},
    ]
    rows = _rows(columns, records, nulls=True)
    flags = [[row[f"$isNull.{name}"] for name in ("a", "n", "mv", "x", "ts")] for row in rows]
    assert flags == [[False] * 5, [True] * 5, [False, False, False, False, True]]
    assert rows[2]["mv"] == [3]


def test_special_doubles_follow_pinot() -> None:
    rows = _rows(
        {"x": "DOUBLE", "f": "FLOAT"}, [b'{"x":-0.0,"f":-0.0}', b'{"x":NaN,"f":"NaN"}', b'{"x":1e400,"f":1e39}']
    )
    assert [str(row["x"]) for row in rows] == ["0.0", "-inf", "inf"]
    assert [str(row["f"]) for row in rows] == ["0.0", "-inf", "inf"]


def test_text_is_cut_at_its_maximal_length_in_characters() -> None:
    columns = {
        "plain": "STRING",
        "short": {"dataType": "STRING", "maxLength": 3},
        "kept": {"dataType": "STRING", "maxLength": 3, "maxLengthExceedStrategy": "NO_ACTION"},
        "replaced": {"dataType": "STRING", "maxLength": 3, "maxLengthExceedStrategy": "SUBSTITUTE_DEFAULT_VALUE"},
        "document": "JSON",
        "mv": {"dataType": "STRING", "maxLength": 2, "singleValueField": False},
        "raw": {"dataType": "BYTES", "maxLength": 1, "maxLengthExceedStrategy": "TRIM_LENGTH"},
    }
    long = "é😀" * 400
    record = {
        "plain": long,
        "short": long,
        "kept": "abcd",
        "replaced": "abcd",
        "document": long,
        "mv": [long, "x"],
        "raw": "abcd",
    }
    [row] = _rows(columns, [record])
    assert row["plain"] == long[:512]
    assert (row["short"], row["kept"], row["replaced"], row["document"]) == ("é😀é", "abcd", "null", long)
    assert (row["mv"], row["raw"]) == (["é😀", "x"], b"\xab")


def test_text_ends_before_the_first_nul() -> None:
    rows = _rows({"a": "STRING"}, [{"a": "x\0y"}, {"a": "\0"}, {"a": "plain"}])
    assert [row["a"] for row in rows] == ["x", "", "plain"]


def test_too_long_text_is_rejected_where_the_schema_says_so() -> None:
    columns = {"a": {"dataType": "STRING", "maxLength": 3, "maxLengthExceedStrategy": "FAIL_INGESTION"}}
    ingested = _run(columns, [{"a": "abc"}, {"a": "abcd"}, {}, {"a": "é😀é"}])
    assert [record.cause for record in ingested.rejected] == [Cause.TOO_LONG]
    assert ingested.batch["$offset"].to_pylist() == [100, 104, 106]


def test_rows_without_a_key_are_rejected_where_the_table_needs_one() -> None:
    schema = schema_of(
        {"a": "LONG", "b": "STRING", "c": {"dataType": "STRING", "maxLength": 2, "maxLengthExceedStrategy": "ERROR"}},
        primaryKeyColumns=["a", "b"],
    )
    records = [
        {"a": 1, "b": "x", "ts": 1}, {"b": "x", "ts": 2}, {"a": None, "b": None, "ts": 3}, {"a": 4, "b": None, "ts": 4},
        {"a": 5, "b": "null", "ts": 5}, {"c": "long", "ts": 6}, {"a": 7, "b": "", "ts": 7},
    ]  # fmt: skip
    upsert = UpsertConfig(comparison_columns=("ts",))
    for config in (config_of(), config_of(nulls=True)):
        plain = compile_ingest(schema, config).run(messages_of(records))
        assert plain.batch.num_rows == 6, "an append table keeps them"
        strict = compile_ingest(schema, msgspec.structs.replace(config, upsert=upsert)).run(messages_of(records))
        assert strict.batch.column("a").to_pylist() == [1, 5, 7]
        assert [((bad.offset - FIRST_OFFSET) // 2, bad.cause) for bad in strict.rejected] == [
            (1, "nullKey"), (2, "nullKey"), (3, "nullKey"), (5, "tooLong")
        ]  # fmt: skip
        assert strict.rejected[2].detail == "primary key column b is null"
        kept = msgspec.structs.replace(config, upsert=msgspec.structs.replace(upsert, null_key=NullKeyPolicy.APPEND))
        assert compile_ingest(schema, kept).run(messages_of(records)).batch.num_rows == 6


def test_rejected_records_are_named_with_offset_cause_and_sample() -> None:
    records = [{"n": 1}, None, b"", b"{oops", b"[1]", {"n": "x" * 1000}, {"n": 2**31}, b'{"n":' + b"[" * 300, {"n": 2}]
    ingested = _run({"n": "INT"}, records)
    assert [(record.offset, record.cause) for record in ingested.rejected] == [
        (102, "emptyMessage"), (104, "emptyMessage"), (106, "malformedJson"), (108, "notAnObject"), (110,
    "wrongType"),
        (112, "outOfRange"), (114, "tooDeep"),
    ]  # fmt: skip
    assert ingested.batch["n"].to_pylist() == [1, 2]
    assert ingested.batch["$offset"].to_pylist() == [100, 116]
    assert ingested.rejected[0].sample == b""
    assert ingested.rejected[2].sample == b"{oops"
    assert len(ingested.rejected[4].sample) == SAMPLE_BYTES
    assert ingested.rejected[5].detail == "column n: 2147483648 does not fit into INT"


def test_continue_on_error_keeps_the_row_with_a_missing_cell() -> None:
    ingested = _run({"n": "INT", "a": "STRING"}, [{"n": "x", "a": "b"}, b"{oops"], nulls=True, continueOnError=True)
    [row] = ingested.batch.to_pylist()
    assert (row["n"], row["$isNull.n"], row["a"]) == (-(2**31), True, "b")
    assert [record.cause for record in ingested.rejected] == ["malformedJson"]


def test_one_bad_record_in_fifty_thousand_costs_only_itself() -> None:
    records: list[Any] = [b'{"n":%d,"a":"v%d"}' % (at, at) for at in range(50_000)]
    records[33_333] = b'{"n":"no number"}'
    ingested = _run({"n": "INT", "a": "STRING"}, records)
    assert [record.offset for record in ingested.rejected] == [FIRST_OFFSET + 2 * 33_333]
    assert ingested.batch["n"].to_pylist() == [at for at in range(50_000) if at != 33_333]


def test_unknown_ingestion_times_are_null() -> None:
    plan = compile_ingest(schema_of({"n": "INT"}), config_of())
    ingested = plan.run(messages_of([{"n": 1}, {"n": 2}], times=[-1, 5]))
    assert ingested.batch["$ingestionTime"].to_pylist() == [None, 5]


def test_extra_fields_are_ignored_and_no_messages_are_no_rows() -> None:
    [row] = _rows({"n": "INT"}, [{"n": 1, "other": {"deep": [1]}, "$offset": 9}])
    assert row["n"] == 1
    assert _run({"n": "INT"}, []).batch.num_rows == 0
    assert _run({"n": "INT"}, [None]).batch.num_rows == 0


def _odd_records(dice: random.Random, count: int) -> list[Any]:
    values: list[Any] = [
        1,
        -1,
        1.5,
        "5",
        "x",
        True,
        None,
        [],
        [1],
        [1, 2],
        ["a", None],
        {"k": [1.0]},
        "é\0",
        2**40,
        "ab",
    ]
    records: list[Any] = []
    for _ in range(count):
        if dice.random() < 0.05:
            records.append(dice.choice([None, b"", b"{", b"[]", b'{"int":1} ', b"{}{}"]))
        else:
            records.append({name: dice.choice(values) for name in dice.sample(sorted(ALL_TYPES), 4)})
    return records


@pytest.mark.parametrize("seed", range(8))
def test_a_row_does_not_depend_on_the_messages_around_it(seed: int) -> None:
    """Rule E-2: whatever the batch, the same record becomes the same bytes, or is refused for the same reason."""
    records = _odd_records(random.Random(seed), 120)
    plan = compile_ingest(schema_of(ALL_TYPES), config_of(nulls=seed % 2 == 0))
    whole = plan.run(messages_of(records))
    singles = [plan.run(messages_of([record], first=FIRST_OFFSET + 2 * at)) for at, record in enumerate(records)]
    assert [record for single in singles for record in single.rejected] == list(whole.rejected)
    apart = pa.Table.from_batches([single.batch for single in singles]).combine_chunks()
    assert apart.equals(pa.Table.from_batches([whole.batch]).combine_chunks())
