# SPDX-License-Identifier: Apache-2.0
"""Partitions of a column's values: hashed as Pinot does it, found in the rows, and no reason to lose a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cremant.log.partitioner import partition_of
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.model.segments import ColumnPartitions
from cremant.model.table import ColumnPartitioning, PartitionFunction
from cremant.segment.build import SegmentSpec, build_segment
from cremant.segment.layout import BATCH_ROWS, stored_columns
from cremant.segment.partitions import (
    PARTITION_IDS_MAX,
    PartitionCollector,
    PartitionPruner,
    java_hash_codes,
    partitions_of_values,
)
from cremant.wire.codec import decode, encode
from cremant.wire.messages import PruneTerm

MURMUR, MODULO, HASH_CODE = PartitionFunction.MURMUR, PartitionFunction.MODULO, PartitionFunction.HASH_CODE
KINDS = {
    "text": DataType.STRING, "small": DataType.INT, "number": DataType.LONG, "real": DataType.DOUBLE,
    "at": DataType.TIMESTAMP,
}  # fmt: skip
SCHEMA = Schema(
    name="t",
    fields=(
        *(FieldSpec(name=name, data_type=kind, field_type=FieldType.DIMENSION) for name, kind in KINDS.items()),
        FieldSpec(name="many", data_type=DataType.STRING, field_type=FieldType.DIMENSION, single_value=False),
    ),
)


def by(function: PartitionFunction, partitions: int) -> ColumnPartitioning:
    return ColumnPartitioning(function=function, partitions=partitions)


def equals(column: str, *values: Any) -> PruneTerm:
    return PruneTerm(column=column, op="=" if len(values) == 1 else "in", values=values)


def collected(how: ColumnPartitioning, column: str, *batches: list[Any]) -> ColumnPartitions | None:
    collector = PartitionCollector(SCHEMA, {column: how})
    kind = SCHEMA.field(column).arrow_type  # type: ignore[union-attr]
    for values in batches:
        collector.add(pa.RecordBatch.from_arrays([pa.array(values, kind)], [column]))
    return collector.partitions().get(column)


# --- hashing ---


@settings(deadline=None)
@given(st.lists(st.text(max_size=20)), st.integers(1, 2**31 - 1))
def test_murmur_is_the_partition_that_kafka_clients_choose_for_that_key(texts: list[str], partitions: int) -> None:
    found = partitions_of_values(pa.array(texts, pa.string()), by(MURMUR, partitions))
    assert found.tolist() == [partition_of(text.encode(), partitions) for text in texts]


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.integers(1, 2**31 - 1))
def test_numbers_are_hashed_by_their_text_and_divided_as_they_are(numbers: list[int], partitions: int) -> None:
    values = pa.array(numbers, pa.int64())
    by_text = partitions_of_values(values, by(MURMUR, partitions)).tolist()
    assert by_text == [partition_of(str(number).encode(), partitions) for number in numbers]
    assert partitions_of_values(values, by(MODULO, partitions)).tolist() == [n % partitions for n in numbers]


def java_hash_code(text: str) -> int:
    """One text, plain integers."""
    units = text.encode("utf-16-le")
    found = 0
    for at in range(0, len(units), 2):
        found = (31 * found + int.from_bytes(units[at : at + 2], "little")) & 0xFFFFFFFF
    return found - 2**32 if found >= 2**31 else found


@given(st.lists(st.text(max_size=20)), st.integers(0, 5))
@example(["", "a", "ä", "€", "𝄞", "x𝄞y"], 2)
def test_hash_codes_are_javas(texts: list[str], skipped: int) -> None:
    array = pa.array(texts, pa.string()).slice(skipped)
    assert java_hash_codes(array).astype("int32").tolist() == [java_hash_code(text) for text in texts[skipped:]]


def test_hash_codes_that_are_known() -> None:
    texts = pa.array(["", "a", "hello", "polygenelubricants"])
    assert java_hash_codes(texts).astype("int32").tolist() == [0, 97, 99162322, -(2**31)]
    assert partitions_of_values(texts, by(HASH_CODE, 7)).tolist() == [0, 97 % 7, 99162322 % 7, 0]


# --- what a segment has ---


@pytest.mark.parametrize("column", ["text", "small", "number"])
def test_a_segment_names_the_partitions_that_its_rows_have(column: str) -> None:
    values = [str(n) if column == "text" else n for n in (3, 11, 4, 3)]
    expected = tuple(sorted({partition_of(str(value).encode(), 64) for value in values}))
    found = collected(by(MURMUR, 64), column, values[:2], [], values[2:])
    assert found == ColumnPartitions(function=MURMUR, partitions=64, ids=expected)


@pytest.mark.parametrize("column", ["real", "at", "many", "unknown"])
def test_columns_of_other_types_have_no_partitions(column: str) -> None:
    collector = PartitionCollector(SCHEMA, {column: by(MURMUR, 4)})
    collector.add(pa.RecordBatch.from_arrays([pa.array([1])], [column]))
    assert collector.partitions() == {}


def test_partitions_that_are_not_all_known_or_too_many_are_not_told() -> None:
    how = by(MODULO, 1_000_000)
    assert collected(how, "number", list(range(PARTITION_IDS_MAX))) is not None
    assert collected(how, "number", list(range(PARTITION_IDS_MAX + 1))) is None
    assert collected(how, "number", [1], list(range(PARTITION_IDS_MAX + 1)), [1]) is None
    assert collected(how, "number", [1, None]) is None
    assert collected(by(MURMUR, 4), "text", ["a"], ["x" * 257], ["a"]) is None
    collector = PartitionCollector(SCHEMA, {"text": by(MURMUR, 4)})
    collector.add(pa.RecordBatch.from_arrays([pa.array([1])], ["number"]))
    assert collector.partitions() == {}


def test_files_and_checksums_are_the_same_with_partitions_and_without(tmp_path: Path) -> None:
    count = BATCH_ROWS + 7
    fields = {
        "$offset": list(range(count)), "$subRow": [0] * count, "$ingestionTime": [1] * count,
        "text": [f"k{n % 3}" for n in range(count)], "small": [1] * count, "number": [n * 4 + 1 for n in range(count)],
        "real": [0.5] * count, "at": [0] * count, "many": [["x"]] * count,
    }  # fmt: skip
    schema = stored_columns(SCHEMA)
    rows = pa.RecordBatch.from_arrays([pa.array(fields[f.name], f.type) for f in schema], schema=schema)
    wanted = {"number": by(MODULO, 4), "text": by(HASH_CODE, 1_000)}
    plain = build_segment(tmp_path / "plain", [rows], SegmentSpec(SCHEMA, "at"), fsync=False)
    told = build_segment(tmp_path / "told", [rows], SegmentSpec(SCHEMA, "at", None, wanted), fsync=False)
    assert plain.path.read_bytes() == told.path.read_bytes()
    assert (plain.checksum, plain.file_checksum, plain.partitioning) == (told.checksum, told.file_checksum, {})
    assert told.partitioning["number"] == ColumnPartitions(function=MODULO, partitions=4, ids=(1,))
    assert told.partitioning["text"].ids == tuple(sorted({java_hash_code(f"k{n}") % 1_000 for n in range(3)}))
    assert decode(encode(told.partitioning["text"]), ColumnPartitions) == told.partitioning["text"]


# --- pruning ---


def test_only_equality_with_values_of_other_partitions_drops_a_segment() -> None:
    known = {"number": ColumnPartitions(function=MODULO, partitions=4, ids=(1, 2))}
    for dropped in (
        [equals("number", 3)], [equals("number", 0, 7)], [equals("other", 1), equals("number", -1)],
        [equals("number", -(2**63))],
    ):  # fmt: skip
        assert not PartitionPruner(dropped).may_match(known)
    for term in (
        equals("number", 1), equals("number", 0, 2), equals("other", 3), equals("number", 3.0),
        equals("number", 0, 3.5), equals("number", True), equals("number", "3"), equals("number", 2**63 + 3),
        PruneTerm(column="number", op=">", values=(3,)), PruneTerm(column="number", op="in", values=()),
    ):  # fmt: skip
        assert PartitionPruner([term]).may_match(known), term
    assert PartitionPruner([equals("number", 3)]).may_match({})


def test_texts_that_cannot_be_hashed_drop_nothing() -> None:
    known = {"text": ColumnPartitions(function=MURMUR, partitions=2**31 - 1, ids=(1,))}
    assert not PartitionPruner([equals("text", "a")]).may_match(known)
    for value in ("\ud800", "x" * 257, 1.5):
        assert PartitionPruner([equals("text", value)]).may_match(known)


texts = st.text(alphabet="abä𝄞 01", max_size=3)
numbers = st.integers(-5, 5) | st.sampled_from([-(2**63), 2**63 - 1, -(2**31), 2**31 - 1])


@settings(deadline=None)
@given(st.data(), st.sampled_from(list(PartitionFunction)), st.integers(1, 9), st.booleans())
def test_no_segment_that_has_the_value_is_dropped_however_the_stream_was_partitioned(
    data: st.DataObject, function: PartitionFunction, partitions: int, is_partitioned: bool
) -> None:
    column = "number" if function is MODULO else data.draw(st.sampled_from(["text", "number"]))
    values = st.lists(texts if column == "text" else numbers, min_size=1, max_size=20)
    how = by(function, partitions)
    rows: list[Any] = data.draw(values)
    homes = partitions_of_values(pa.array(rows), how).tolist()
    segments: dict[int, list[Any]] = {}
    for at, (row, home) in enumerate(zip(rows, homes, strict=True)):
        segments.setdefault(home if is_partitioned else at % 4, []).append(row)
    wanted = data.draw(values)
    pruner = PartitionPruner([equals(column, *wanted)])
    for held in segments.values():
        known = collected(how, column, held)
        assert known is not None
        if set(wanted) & set(held):
            assert pruner.may_match({column: known})
    if is_partitioned and len(wanted) == 1:
        kept = sum(pruner.may_match({column: collected(how, column, held)}) for held in segments.values())  # type: ignore[dict-item]
        assert kept <= 1
