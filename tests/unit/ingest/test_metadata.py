# SPDX-License-Identifier: Apache-2.0
"""Columns from around a message: its key, headers, offset, partition and time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from ingest_kit import FIRST_OFFSET, TIME_MS, config_of, messages_of, schema_of

from cremant.ingest.plan import compile_ingest
from cremant.log.api import MessageBatch
from cremant.model.errors import InvalidConfig
from cremant.model.upsert_json import completed_by

POPULATED = {"metadata.populate": "true"}


def batch() -> MessageBatch:
    """Three messages: with all, with nothing, with bytes that are no text."""
    plain = messages_of([{"a": 1}, {"a": 2}, {"a": 3}], times=[TIME_MS, -1, TIME_MS])
    around = replace(
        plain.metadata,
        keys=pa.array([b"k1", None, b"\xff"], pa.binary()),
        headers=((("who", b"old"), ("who", b"me"), ("n", b"7")), (), (("n", b"seven"),)),
    )
    return replace(plain, metadata=around)


COLUMNS = {
    "a": "INT", "__key": "BYTES", "__header$who": "STRING", "__metadata$offset": "LONG", "__metadata$partition": "INT",
    "__metadata$recordTimestamp": "TIMESTAMP",
}  # fmt: skip


def test_the_schema_may_have_them_as_columns() -> None:
    ingested = compile_ingest(schema_of(COLUMNS), config_of(stream=POPULATED, nulls=True)).run(batch(), partition=3)
    assert not ingested.rejected
    rows = ingested.batch.to_pylist()
    assert [[row[name] for name in COLUMNS] for row in rows] == [
        [1, b"k1", "me", 100, 3, TIME_MS], [2, b"", "null", 102, 3, 0], [3, b"\xff", "null", 104, 3, TIME_MS],
    ]  # fmt: skip
    assert [[name for name in COLUMNS if row[f"$isNull.{name}"]] for row in rows] == [
        [], ["__key", "__header$who", "__metadata$recordTimestamp"], ["__header$who"],
    ]  # fmt: skip


def test_a_value_that_does_not_fit_rejects_its_row_alone() -> None:
    plan = compile_ingest(schema_of({"a": "INT", "__key": "STRING", "__header$n": "INT"}), config_of(stream=POPULATED))
    ingested = plan.run(batch())
    assert [(row["a"], row["__key"], row["__header$n"]) for row in ingested.batch.to_pylist()] == [
        (1, "k1", 7), (2, "null", -(2**31)),
    ]  # fmt: skip
    assert [(bad.offset, bad.cause, bad.detail) for bad in ingested.rejected] == [
        (104, "wrongType", "column __key: b'\\xff' is not UTF-8 text")
    ]


def test_transforms_and_filters_use_them() -> None:
    config = config_of(
        stream=POPULATED,
        transforms={"k": 'upper("__key")', "at": '"__metadata$offset" + 1', "n": '"__header$n"'},
        filter_function='"__metadata$offset" = 104',
    )
    ingested = compile_ingest(schema_of({"a": "INT", "k": "STRING", "at": "LONG", "n": "STRING"}), config).run(batch())
    assert [(row["k"], row["at"], row["n"]) for row in ingested.batch.to_pylist()] == [
        ("K1", 101, "7"), ("null", 103, "null"),
    ]  # fmt: skip


def test_without_the_stream_property_they_are_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"set the stream property stream.embedded.metadata.populate to true"):
        compile_ingest(schema_of({"a": "INT", "__key": "STRING"}), config_of())
    with pytest.raises(InvalidConfig, match="is not populated"):
        compile_ingest(schema_of({"a": "STRING"}), config_of(transforms={"a": '"__metadata$offset"'}))


@pytest.mark.parametrize("name", ["__metadata$color"])
def test_an_unknown_kind_of_metadata_is_refused(name: str) -> None:
    config: Any = config_of(stream=POPULATED, transforms={"a": f'"{name}"'})
    with pytest.raises(InvalidConfig, match="recordTimestamp"):
        compile_ingest(schema_of({"a": "STRING"}), config)


def test_an_upsert_table_fills_its_column_kafka_offset() -> None:
    """Without a word on metadata in the table config. As with every transform, a value in the message goes first."""
    schema = schema_of({"k": "INT", "KafkaOffset": "LONG"}, primaryKeyColumns=["k"], updateSemantic="upsert")
    config = completed_by(schema, config_of())
    assert config.upsert is not None
    done = compile_ingest(schema, config).run(messages_of([{"k": 1, "KafkaOffset": 7}, {"k": 1}]))
    assert done.batch.column("KafkaOffset").to_pylist() == [7, FIRST_OFFSET + 2]
