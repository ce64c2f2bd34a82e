# SPDX-License-Identifier: Apache-2.0
"""Keys, ranks and candidates: bytes whose equality and order are those of the rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from upsert_model import UpsertModel

from cremant.ingest.candidates import Candidates, epochs_of, places_of, values_of
from cremant.ingest.keys import KeyEncoder
from cremant.model.errors import InvalidConfig
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.model.upsert import UpsertConfig

LONGS = st.integers(-(2**63), 2**63 - 1)
VALUES: dict[DataType, st.SearchStrategy[Any]] = {
    DataType.INT: st.integers(-(2**31), 2**31 - 1),
    DataType.LONG: LONGS,
    DataType.FLOAT: st.floats(width=32),
    DataType.DOUBLE: st.floats(),
    DataType.BOOLEAN: st.booleans(),
    DataType.TIMESTAMP: LONGS,
    DataType.STRING: st.text(max_size=6),
    DataType.BYTES: st.binary(max_size=6) | st.sampled_from([b"", b"\0", b"\0\0", b"\0\xff", b"a\0", b"a\0\xff"]),
}


def field(name: str, data_type: DataType) -> FieldSpec:
    return FieldSpec(name=name, data_type=data_type, field_type=FieldType.DIMENSION)


def table(keys: tuple[DataType, ...], comparison: tuple[DataType, ...]) -> tuple[Schema, UpsertConfig]:
    fields = [field(f"k{at}", kind) for at, kind in enumerate(keys)]
    fields += [field(f"c{at}", kind) for at, kind in enumerate(comparison)]
    names = tuple(f"k{at}" for at in range(len(keys)))
    schema = Schema(name="t", fields=tuple(fields), primary_key_columns=names)
    return schema, UpsertConfig(comparison_columns=tuple(f"c{at}" for at in range(len(comparison))))


def block(schema: Schema, rows: list[tuple[Any, ...]], *, first: int = 0, null: dict[str, Any] | None = None) -> Any:
    """Rows of the schema's columns at offsets `first`, ..."""
    columns = {"$offset": pa.array(range(first, first + len(rows)), pa.int64())}
    columns["$subRow"] = pa.array([0] * len(rows), pa.int32())
    for at, spec in enumerate(schema.fields):
        columns[spec.name] = pa.array([row[at] for row in rows], spec.arrow_type)
    for name, mask in (null or {}).items():
        columns[f"$isNull.{name}"] = pa.array(mask, pa.bool_())
    return pa.RecordBatch.from_pydict(columns)


def candidates_of(schema: Schema, upsert: UpsertConfig, rows: list[tuple[Any, ...]], **given_: Any) -> list[Any]:
    """(key, candidate, partition, offset, sub-row, epoch) of each candidate."""
    candidates = Candidates(schema, upsert)
    candidates.add(block(schema, rows, **given_), 3, 9)
    batch = candidates.finish()
    values = values_of(batch.column("candidate"))
    columns = [*batch.columns[::-1], *places_of(values), epochs_of(values)]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def same(a: Any, b: Any) -> bool:
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


@given(st.data())
def test_keys_are_equal_iff_their_values_are(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=3).map(tuple))
    schema, _ = table(kinds, ())
    rows = data.draw(st.lists(st.tuples(*(VALUES[kind] for kind in kinds)), min_size=1, max_size=6))
    keys = KeyEncoder(schema).keys(block(schema, rows)).to_pylist()
    for a, row in zip(keys, rows, strict=True):
        assert 1 <= a[-1] <= 10
        for b, other in zip(keys, rows, strict=True):
            assert (a == b) == all(same(x, y) for x, y in zip(row, other, strict=True)), (row, other)


def test_keys_of_columns_do_not_run_into_each_other() -> None:
    schema, _ = table((DataType.STRING, DataType.STRING), ())
    keys = KeyEncoder(schema).keys(block(schema, [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")])).to_pylist()
    assert len(set(keys)) == 4
    assert keys[0] == b"ab\x02\0\0\0\x08c\x01\0\0\0\x08"


def test_a_key_has_the_same_bytes_in_a_slice_of_a_batch() -> None:
    schema, upsert = table((DataType.STRING, DataType.LONG), (DataType.BYTES, DataType.DOUBLE))
    rows = [(f"k{number}", number, bytes([number]), number / 2) for number in range(20)]
    whole = candidates_of(schema, upsert, rows)
    candidates = Candidates(schema, upsert)
    for first in range(0, 20, 7):
        candidates.add(block(schema, rows).slice(first, 7), 3, 9)
    sliced = candidates.finish()
    assert [tuple(row) for row in zip(*(c.to_pylist() for c in sliced.columns[::-1]), strict=True)] == [
        row[:2] for row in whole
    ]


def order_of(value: Any) -> tuple[Any, ...]:
    return (1, 0) if isinstance(value, float) and math.isnan(value) else (0, value)


@given(st.data())
def test_ranks_order_as_comparison_values_do_then_by_place(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=2).map(tuple))
    schema, upsert = table((DataType.LONG,), kinds)
    values = data.draw(st.lists(st.tuples(*(VALUES[kind] for kind in kinds)), min_size=2, max_size=8))
    found = candidates_of(schema, upsert, [(number, *value) for number, value in enumerate(values)])
    by_rank = [row[3] for row in sorted(found, key=lambda row: row[1])]
    expected = sorted(range(len(values)), key=lambda at: (*(order_of(value) for value in values[at]), at))
    # UTF-8 orders as code points do.
    assert by_rank == expected


def test_null_comparison_values_are_lowest() -> None:
    schema, upsert = table((DataType.LONG,), (DataType.LONG, DataType.STRING))
    rows = [(0, -(2**63), ""), (1, 5, "x"), (2, 5, ""), (3, -5, "x")]
    null = {"c0": [False, True, False, False], "c1": [False, False, True, False]}
    found = candidates_of(schema, upsert, rows, null=null)
    assert [row[3] for row in sorted(found, key=lambda row: row[1])] == [1, 0, 3, 2]


def test_rows_with_a_null_key_are_keys_of_their_own() -> None:
    schema, upsert = table((DataType.LONG, DataType.STRING), (DataType.LONG,))
    rows = [(7, "null", 1), (7, "null", 2), (7, "null", 3), (7, "null", 4)]
    found = candidates_of(schema, upsert, rows, null={"k1": [True, True, False, False]})
    assert sorted(row[3] for row in found) == [0, 1, 3]
    assert {row[0][-1] for row in found} == {0x7F, 8}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2), st.sampled_from(["", "a", "b"])), max_size=40),
    st.integers(1, 11),
)
def test_one_candidate_per_key_the_models_winner(rows: list[tuple[int, int, str]], size: int) -> None:
    schema, upsert = table((DataType.LONG,), (DataType.LONG, DataType.STRING))
    candidates, model = Candidates(schema, upsert), UpsertModel()
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        partition = first % 3
        candidates.add(block(schema, part, first=first), partition, 4)
        for at, (key, *comparison) in enumerate(part, first):
            model.apply(partition, at, 0, key, tuple(comparison))
    batch = candidates.finish()
    places = places_of(values_of(batch.column("candidate")))
    found = set(zip(*(column.tolist() for column in places), strict=True))
    assert found == {row.location for row in model.winners([99, 99, 99]).values()}
    assert batch.num_rows == len(found)
    assert candidates.finish().num_rows == 0


def test_candidates_are_reduced_while_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cremant.ingest.candidates.PENDING_ROWS_MAX", 100)
    schema, upsert = table((DataType.LONG,), (DataType.LONG,))
    candidates = Candidates(schema, upsert)
    for number in range(50):
        candidates.add(block(schema, [(key, number) for key in range(10)], first=10 * number), 0, number)
        assert candidates._rows <= 120
    batch = candidates.finish()
    assert batch.num_rows == 10
    assert set(epochs_of(values_of(batch.column("candidate"))).tolist()) == {49}


def test_partition_and_epoch_may_differ_by_row() -> None:
    schema, upsert = table((DataType.LONG,), (DataType.LONG,))
    candidates = Candidates(schema, upsert)
    candidates.add(block(schema, [(1, 1), (2, 2)]), np.array([5, 6]), np.array([70, 80]))
    batch = candidates.finish()
    values = values_of(batch.column("candidate"))
    assert (places_of(values).partition.tolist(), epochs_of(values).tolist()) == ([5, 6], [70, 80])


def test_tables_that_cannot_be_compared_are_refused() -> None:
    schema, upsert = table((DataType.LONG,), (DataType.BIG_DECIMAL,))
    with pytest.raises(InvalidConfig, match="c0 is a BIG_DECIMAL"):
        Candidates(schema, upsert).add(block(schema, [(1, "2")]), 0, 1)
    with pytest.raises(InvalidConfig, match="no comparison column nope"):
        Candidates(schema, UpsertConfig(comparison_columns=("nope",)))
    with pytest.raises(InvalidConfig, match="no primaryKeyColumns"):
        Candidates(Schema(name="t", fields=schema.fields), UpsertConfig(comparison_columns=("c0",)))
