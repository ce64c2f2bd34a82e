# SPDX-License-Identifier: Apache-2.0
"""Building, deriving, opening and verifying sealed segments, with real files."""

from __future__ import annotations

import itertools
import tempfile
from decimal import Decimal
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cremant.model.errors import Behind, Corrupt
from cremant.model.names import INGESTION_TIME, IS_NULL_PREFIX, OFFSET, SUB_ROW
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.model.segments import SegmentForm
from cremant.segment.build import PARQUET_FILE, SegmentSpec, build_segment
from cremant.segment.checksum import content_checksum
from cremant.segment.layout import BATCH_ROWS, Alignment, scan_schema, stored_columns
from cremant.segment.reader import ARROW_FILE, MARKER_FILE, derive, open_segment, slice_from, verify
from cremant.segment.stats import time_unit_ms


def dimension(name: str, kind: DataType, *, single: bool = True) -> FieldSpec:
    return FieldSpec(name=name, data_type=kind, field_type=FieldType.DIMENSION, single_value=single)


EVERY_TYPE = Schema(
    name="every",
    fields=(
        *(dimension(kind.value.lower(), kind) for kind in DataType),
        dimension("tags", DataType.STRING, single=False),
        dimension("numbers", DataType.LONG, single=False),
        FieldSpec(
            name="at",
            data_type=DataType.LONG,
            field_type=FieldType.DATE_TIME,
            format="1:SECONDS:EPOCH",
            granularity="1:SECONDS",
        ),
    ),
)
SPEC = SegmentSpec(schema=EVERY_TYPE, time_column="at")


def rows_of(count: int, first: int = 0) -> list[dict[str, object]]:
    return [
        {
            OFFSET: first + i,
            SUB_ROW: 0,
            INGESTION_TIME: None if i % 3 == 0 else 1_000 + i,
            "int": (i * 7919) % 101 - 50,
            "long": i * 10**12,
            "float": i / 2,
            "double": -i / 4,
            "big_decimal": str(Decimal(i) / 8),
            "boolean": i % 2 == 0,
            "timestamp": 1_700_000_000_000 + i,
            "string": f"späti-{i % 13}",
            "json": '{"a":1}',
            "bytes": bytes([i % 256]) * (i % 5),
            "tags": ["x", "y"][: i % 3],
            "numbers": list(range(i % 4)),
            "at": 1_700_000_000 + i,
        }
        for i in range(count)
    ]


def batch_of(rows: list[dict[str, object]], schema: Schema = EVERY_TYPE) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=stored_columns(schema))


def cut(batch: pa.RecordBatch, borders: list[int]) -> list[pa.RecordBatch]:
    edges = [0, *sorted(borders), batch.num_rows]
    return [batch.slice(a, b - a) for a, b in itertools.pairwise(edges)]


def test_a_segment_that_was_built_and_derived_holds_exactly_its_rows_in_every_type(tmp_path: Path) -> None:
    rows = rows_of(1000)
    built = build_segment(tmp_path, [batch_of(rows)], SPEC, fsync=False)
    sealed = derive(tmp_path, "every__0__0__x", built.checksum, fsync=False)
    aligned = Alignment(EVERY_TYPE)
    scanned = pa.Table.from_batches([aligned.align(batch) for batch in sealed.batches])
    assert scanned.to_pylist() == rows
    assert scanned.schema.equals(scan_schema(EVERY_TYPE))
    assert sealed.rows == built.rows == 1000
    assert pq.read_table(tmp_path / PARQUET_FILE).num_rows == 1000


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=8), st.lists(st.integers(0, 300), max_size=8), st.booleans())
def test_the_same_rows_give_the_same_bytes_however_they_were_blocked(a: list[int], b: list[int], by_int: bool) -> None:
    batch = batch_of(rows_of(300))
    spec = SegmentSpec(schema=EVERY_TYPE, time_column="at", sorted_column="int" if by_int else None)
    with tempfile.TemporaryDirectory() as name:
        first = build_segment(Path(name) / "a", cut(batch, a), spec, fsync=False)
        second = build_segment(Path(name) / "b", cut(batch, b), spec, fsync=False)
        assert first.path.read_bytes() == second.path.read_bytes()
        assert (first.checksum, first.file_checksum) == (second.checksum, second.file_checksum)
        assert derive(Path(name) / "a", "s", first.checksum, fsync=False).marker.checksum == first.checksum


def test_row_groups_do_not_depend_on_blocks_beyond_one_group(tmp_path: Path) -> None:
    count = 300_000
    batch = pa.RecordBatch.from_arrays(
        [pa.array(range(count)), pa.repeat(pa.scalar(0, pa.int32()), count), pa.nulls(count, pa.int64())],
        schema=pa.schema(list(stored_columns(EVERY_TYPE))[:3]),
    )
    first = build_segment(tmp_path / "a", cut(batch, [7, 131_072, 140_000]), SPEC, fsync=False)
    second = build_segment(tmp_path / "b", [batch], SPEC, fsync=False)
    assert first.file_checksum == second.file_checksum
    assert pq.ParquetFile(first.path).num_row_groups == 3


def test_sorted_segments_are_ordered_by_column_then_offset_and_keep_their_offsets(tmp_path: Path) -> None:
    rows = rows_of(500)
    spec = SegmentSpec(schema=EVERY_TYPE, time_column="at", sorted_column="int")
    built = build_segment(tmp_path, [batch_of(rows)], spec, fsync=False)
    sealed = derive(tmp_path, "s", built.checksum, fsync=False)
    found = pa.Table.from_batches(sealed.batches).to_pylist()
    expected = sorted(rows, key=lambda row: (row["int"], row[OFFSET]))
    assert [row[OFFSET] for row in found] == [row[OFFSET] for row in expected]
    part = slice_from(sealed.batches, 100, 200)
    assert sorted(pa.Table.from_batches(part)[OFFSET].to_pylist()) == list(range(100, 200))


def test_metadata_says_ranges_times_and_newest_ingestion(tmp_path: Path) -> None:
    built = build_segment(tmp_path, [batch_of(rows_of(100))], SPEC, fsync=True)
    assert (built.columns["int"].min, built.columns["int"].max) == (-50, 50)
    assert (built.columns["string"].min, built.columns["string"].max) == ("späti-0", "späti-9")
    assert "tags" not in built.columns
    assert "bytes" not in built.columns
    assert built.min_time_ms == 1_700_000_000_000
    assert built.max_time_ms == 1_700_000_099_000
    assert built.max_ingestion_ms == 1_098


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_float_column_with_nan_or_infinity_has_no_range(tmp_path: Path, value: float) -> None:
    rows = rows_of(10)
    rows[3]["double"] = value
    assert "double" not in build_segment(tmp_path, [batch_of(rows)], SPEC, fsync=False).columns


@pytest.mark.parametrize(
    ("text", "unit_ms"),
    [
        ("1:MILLISECONDS:EPOCH", 1),
        ("5:MINUTES:EPOCH", 300_000),
        ("EPOCH|DAYS|1", 86_400_000),
        ("EPOCH|SECONDS", 1_000),
        ("EPOCH", 1),
        ("1:MILLISECONDS:TIMESTAMP", 1),
        ("TIMESTAMP", 1),
        ("1:DAYS:SIMPLE_DATE_FORMAT:yyyyMMdd", None),
        ("SIMPLE_DATE_FORMAT|yyyyMMdd", None),
    ],
)
def test_units_of_time_formats_are_read_as_pinot_writes_them(text: str, unit_ms: int | None) -> None:
    spec = FieldSpec(
        name="t", data_type=DataType.LONG, field_type=FieldType.DATE_TIME, format=text, granularity="1:DAYS"
    )
    assert time_unit_ms(spec) == unit_ms


def test_rows_older_than_a_column_get_its_default_and_count_as_null(tmp_path: Path) -> None:
    old = Schema(name="every", fields=EVERY_TYPE.fields[:3])
    early = batch_of(
        [{k: r[k] for k in (OFFSET, SUB_ROW, INGESTION_TIME, "int", "long", "float")} for r in rows_of(5)], old
    )
    late = batch_of(rows_of(5, first=5))
    built = build_segment(tmp_path, [early, late], SPEC, fsync=False)
    sealed = derive(tmp_path, "s", built.checksum, fsync=False)
    table = pa.Table.from_batches([Alignment(EVERY_TYPE, null_handling=True).align(b) for b in sealed.batches])
    assert table["string"].to_pylist()[:6] == ["null"] * 5 + ["späti-0"]
    assert table["tags"].to_pylist()[:5] == [["null"]] * 5
    aligned = Alignment(EVERY_TYPE, null_handling=True).align(early)
    assert aligned.column(IS_NULL_PREFIX + "string").to_pylist() == [True] * 5
    assert aligned.column(IS_NULL_PREFIX + "int").to_pylist() == [False] * 5


def test_the_content_does_not_depend_on_columns_that_no_row_has_yet(tmp_path: Path) -> None:
    """Two replicas, one of which already knows of a new column, seal the same segment."""
    old = Schema(name="every", fields=EVERY_TYPE.fields[:3])
    rows = [{k: r[k] for k in (OFFSET, SUB_ROW, INGESTION_TIME, "int", "long", "float")} for r in rows_of(5)]
    knows_old = SegmentSpec(schema=old, time_column="at")
    a = build_segment(tmp_path / "a", [batch_of(rows, old)], knows_old, fsync=False)
    b = build_segment(tmp_path / "b", [batch_of(rows, old)], SPEC, fsync=False)
    assert (a.checksum, a.file_checksum) == (b.checksum, b.file_checksum)


def test_another_default_or_order_later_gives_other_content_but_not_in_the_committed_form(tmp_path: Path) -> None:
    older = batch_of(rows_of(20)).drop_columns(["double", "bytes"])
    younger = batch_of(rows_of(20, first=20))
    built = build_segment(tmp_path / "a", [older, younger], SPEC, fsync=False)
    assert built.form == SegmentForm(filled={"double": None, "bytes": None})
    fields = tuple(
        msgspec.structs.replace(spec, default_null_value={"double": 7.5, "bytes": "ff"}.get(spec.name))
        for spec in EVERY_TYPE.fields
    )
    now = SegmentSpec(msgspec.structs.replace(EVERY_TYPE, fields=fields), "at", sorted_column="int")
    other = build_segment(tmp_path / "b", [older, younger], now, fsync=False)
    assert other.checksum != built.checksum
    for form, checksum in ((built.form, built.checksum), (other.form, other.checksum)):
        again = build_segment(tmp_path / checksum, [older, younger], SPEC.formed(form), fsync=False)
        assert again.checksum == checksum
        assert build_segment(tmp_path / checksum, [older, younger], now.formed(form), fsync=False).checksum == checksum


def test_a_build_with_a_schema_older_than_the_rows_waits(tmp_path: Path) -> None:
    old = SegmentSpec(schema=Schema(name="every", fields=EVERY_TYPE.fields[:3]), time_column="at")
    with pytest.raises(Behind, match="does not have yet"):
        build_segment(tmp_path, [batch_of(rows_of(5))], old, fsync=False)


def test_an_empty_range_is_a_segment_without_rows(tmp_path: Path) -> None:
    built = build_segment(tmp_path, [], SPEC, fsync=False)
    assert derive(tmp_path, "s", built.checksum, fsync=False).rows == 0
    assert open_segment(tmp_path).batches == ()


def test_the_checksum_is_over_content_and_not_over_arrow_form() -> None:
    plain = pa.RecordBatch.from_pydict({"a": pa.array(["x", "y", "x", None]), "b": pa.array([True, False, None, True])})
    coded = pa.RecordBatch.from_pydict(
        {
            "b": pa.array([None, True, False, None, True]).slice(1),
            "a": pa.array(["x", "y", "x", None]).dictionary_encode(),
        }
    )
    view = pa.RecordBatch.from_pydict({"a": plain["a"].cast(pa.string_view()), "b": plain["b"]})
    assert content_checksum([plain]) == content_checksum([coded]) == content_checksum([view])
    assert content_checksum([plain]) == content_checksum([plain.slice(0, 1), plain.slice(1)])
    moved = pa.RecordBatch.from_pydict({"a": pa.array(["xy", "", "x", None]), "b": plain["b"]})
    assert content_checksum([moved]) != content_checksum([plain])


def sealed_in(directory: Path) -> None:
    built = build_segment(directory, [batch_of(rows_of(1000))], SPEC, fsync=False)
    derive(directory, "s", built.checksum, fsync=False)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.unlink()
    path.write_bytes(data)


def test_a_segment_is_opened_from_its_marker_and_survives_its_deletion_while_open(tmp_path: Path) -> None:
    sealed_in(tmp_path)
    opened = open_segment(tmp_path)
    verify(opened)
    for file in (PARQUET_FILE, ARROW_FILE, MARKER_FILE):
        (tmp_path / file).unlink()
    assert pa.Table.from_batches(opened.batches)["int"].to_pylist() == [row["int"] for row in rows_of(1000)]


@pytest.mark.parametrize("file", [PARQUET_FILE, ARROW_FILE])
def test_a_flipped_byte_is_found_and_the_file_is_named(tmp_path: Path, file: str) -> None:
    sealed_in(tmp_path)
    flip(tmp_path / file, 2000)
    with pytest.raises(Corrupt, match=file):
        verify(open_segment(tmp_path))


def test_a_text_that_points_out_of_its_file_is_found_and_not_followed(tmp_path: Path) -> None:
    """It would end the process."""
    sealed_in(tmp_path)
    text = "späti-1".encode()
    view = len(text).to_bytes(4, "little") + text
    flip(tmp_path / ARROW_FILE, (tmp_path / ARROW_FILE).read_bytes().index(view) + 2)  # 16 MB long, and elsewhere
    with pytest.raises(Corrupt, match=f"{ARROW_FILE}: damaged"):
        verify(open_segment(tmp_path))


@pytest.mark.parametrize("file", [PARQUET_FILE, ARROW_FILE])
def test_a_truncated_file_is_refused_at_open(tmp_path: Path, file: str) -> None:
    sealed_in(tmp_path)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:-1])
    with pytest.raises(Corrupt, match=file):
        open_segment(tmp_path)


def test_a_directory_without_marker_is_not_a_segment(tmp_path: Path) -> None:
    sealed_in(tmp_path)
    (tmp_path / MARKER_FILE).unlink()
    with pytest.raises(Corrupt, match="never completed"):
        open_segment(tmp_path)


def test_bytes_with_other_content_than_promised_are_refused(tmp_path: Path) -> None:
    build_segment(tmp_path, [batch_of(rows_of(10))], SPEC, fsync=False)
    with pytest.raises(Corrupt, match="content checksum"):
        derive(tmp_path, "s", "0" * 32, fsync=False)
    assert not (tmp_path / MARKER_FILE).exists()


def test_a_file_that_is_not_parquet_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / PARQUET_FILE).write_bytes(b"PAR1 this is not one")
    with pytest.raises(Corrupt, match=PARQUET_FILE):
        derive(tmp_path, "s", "0" * 32, fsync=False)


def test_zones_are_the_ranges_of_each_batch(tmp_path: Path) -> None:
    """Batches of a segment, not only whole segments, can be left out of a scan; where NaN or long text could make a
    range lie, none is known."""
    schema = Schema(name="wide", fields=(dimension("long", DataType.LONG), dimension("double", DataType.DOUBLE),
                                         dimension("city", DataType.STRING),
                                         dimension("numbers", DataType.LONG, single=False)))  # fmt: skip
    count = 2 * BATCH_ROWS + 5
    offsets = np.arange(count)
    columns = [pa.array(offsets), pa.array(np.zeros(count, np.int32)), pa.nulls(count, pa.int64()),
               pa.array(offsets * 3 % 200_003), pa.array(offsets / 2), pa.array(["x"] * count),
               pa.array([[1, 2]] * count)]  # fmt: skip
    stored = stored_columns(schema)
    batch = pa.RecordBatch.from_arrays(
        [column.cast(field.type) for column, field in zip(columns, stored, strict=True)], schema=stored
    )
    built = build_segment(tmp_path, [batch], SegmentSpec(schema=schema, time_column="long"), fsync=False)
    sealed = derive(tmp_path, "s", built.checksum, fsync=False)
    assert len(sealed.batches) == 3
    assert sealed.index is not None
    for number, part in enumerate(sealed.batches):
        for name in (OFFSET, SUB_ROW, "long", "double"):
            low, high = pc.min_max(part.column(name)).as_py().values()
            assert sealed.index.zone(number, name) == (low, high)
        for name in (INGESTION_TIME, "numbers", "absent"):
            assert sealed.index.zone(number, name) is None
