# SPDX-License-Identifier: Apache-2.0
"""What a user's function hands on becomes blocks: nulls of its making, keys of its making."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cremant.ingest.plan import compile_ingest
from cremant.model.cluster import TableRecord
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.model.table import FlushConfig, StreamConfig, TableConfig
from cremant.model.upsert import NullKeyPolicy, UpsertConfig
from cremant.pipeline.function import apart_by_key, to_block, with_rejected
from cremant.pipeline.reports import Account


def record(*, nulls: bool = False, null_key: NullKeyPolicy = NullKeyPolicy.REJECT) -> TableRecord:
    types = {"id": DataType.STRING, "at": DataType.TIMESTAMP, "gone": DataType.BOOLEAN}
    fields = tuple(FieldSpec(name=name, data_type=kind, field_type=FieldType.DIMENSION) for name, kind in types.items())
    config = TableConfig(
        name="t", time_column="at", replication=1, stream=StreamConfig(stream_type="embedded", topic="t"),
        flush=FlushConfig(), null_handling=nulls,
        upsert=UpsertConfig(comparison_columns=("at",), null_key=null_key),
    )  # fmt: skip
    schema = Schema(name="t", fields=fields, primary_key_columns=("id",))
    return TableRecord(config=config, table_schema=schema, incarnation="0" * 16)


def handed_on(ids: list[str | None], schema: pa.Schema) -> pa.Table:
    """Rows as Spark gives them back, of a source that had a value in every cell."""
    count = len(ids)
    columns = {
        "$offset": pa.array(range(count), pa.int64()), "$subRow": pa.array([0] * count, pa.int32()),
        "$ingestionTime": pa.array([1] * count, pa.int64()), "id": pa.array(ids, pa.string()),
        "at": pa.array(range(count), pa.int64()), "gone": pa.array([False] * count),
    }  # fmt: skip
    return pa.table({field.name: columns.get(field.name, pa.array([False] * count)) for field in schema})


@pytest.mark.parametrize(("policy", "kept"), [(NullKeyPolicy.REJECT, [0, 2]), (NullKeyPolicy.APPEND, [0, 1, 2])])
def test_a_key_that_a_function_made_null_is_no_default_key(policy: NullKeyPolicy, kept: list[int]) -> None:
    made = record(nulls=True, null_key=policy)
    schema = compile_ingest(made.table_schema, made.config).block_schema
    defaults = {field.name: field.default for field in made.table_schema.fields}
    rows, _ = apart_by_key(handed_on(["a", None, "c"], schema), made)
    block = to_block(rows, schema, defaults, "t")
    assert block.column("$offset").to_pylist() == kept
    assert block.column("$isNull.id").to_pylist() == [offset == 1 for offset in kept]
    assert not any(block.column("$isNull.at").to_pylist())


def test_where_nulls_are_not_stored_a_null_key_is_rejected_all_the_same() -> None:
    made = record()
    schema = compile_ingest(made.table_schema, made.config).block_schema
    kept, keyless = apart_by_key(handed_on([None, "b"], schema), made)
    assert kept.column("id").to_pylist() == ["b"]
    account = Account(causes={"tooLong": 1}, timestamp_type="logAppend", rejected_from_ms=5)
    assert with_rejected(account, keyless) == Account(
        causes={"tooLong": 1, "nullKey": 1}, timestamp_type="logAppend", rejected_from_ms=1
    )
    assert with_rejected(account, keyless.slice(0, 0)) is account
