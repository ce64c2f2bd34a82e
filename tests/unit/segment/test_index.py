# SPDX-License-Identifier: Apache-2.0
"""The index file: what it holds, that it finds exactly the right rows, and that it is rebuilt rather than believed."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cremant.model.errors import Corrupt
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.model.table import IndexConfig
from cremant.segment.bloom import build_bloom, hash_values, may_contain
from cremant.segment.build import SegmentSpec, build_segment
from cremant.segment.codes import CODES_MAX, Lazy, encode, sorted_interval
from cremant.segment.index import INDEX_FILE, build_index, open_index
from cremant.segment.layout import stored_columns
from cremant.segment.reader import SealedSegment, derive, open_segment, reindexed, verify, verify_index
from cremant.segment.rows import compacted, take_column
from cremant.segment.select import select
from cremant.wire.messages import PruneTerm

NONE = IndexConfig()
ALL = IndexConfig(inverted=("name", "number"), bloom=("name", "number"))


def batch(names: list[str], numbers: list[int], amounts: list[float]) -> pa.RecordBatch:
    columns = [pa.array(names).cast(pa.string_view()), pa.array(numbers, pa.int64()), pa.array(amounts, pa.float64())]
    return pa.RecordBatch.from_arrays(columns, ["name", "number", "amount"])


texts = st.sampled_from(["", "a", "b", "ab", "ä", "twelve bytes", "thirteen byte", "thirteen bytf", "thirteen bytes"])
numbers = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 255, 256, 2**31, 2**63 - 1])
amounts = st.sampled_from([0.0, -0.0, 1.5, float("nan"), float("inf"), -2.0])
rows = st.lists(st.tuples(texts, numbers, amounts), min_size=1, max_size=12)
blocks = st.lists(rows, min_size=1, max_size=4)
terms = st.one_of(
    st.builds(
        lambda op, values: PruneTerm(column="name", op=op, values=tuple(values if op == "in" else values[:1])),
        st.sampled_from(["=", "in", "<", "<=", ">", ">="]), st.lists(texts, min_size=1, max_size=3),
    ),
    st.builds(
        lambda op, values: PruneTerm(column="number", op=op, values=tuple(values if op == "in" else values[:1])),
        st.sampled_from(["=", "in", "<", "<=", ">", ">="]), st.lists(numbers, min_size=1, max_size=3),
    ),
)  # fmt: skip

COMPARE: dict[str, Any] = {
    "=": lambda a, b: a == b[0], "in": lambda a, b: a in b, "<": lambda a, b: a < b[0], "<=": lambda a, b: a <= b[0],
    ">": lambda a, b: a > b[0], ">=": lambda a, b: a >= b[0],
}  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(blocks=blocks, wanted=st.lists(terms, min_size=1, max_size=3), indexes=st.sampled_from([NONE, ALL]))
def test_a_selection_is_exactly_the_rows_that_satisfy_all_terms(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[Any], wanted: list[PruneTerm], indexes: IndexConfig
) -> None:
    batches = [batch(*map(list, zip(*block, strict=True))) for block in blocks]
    path = tmp_path_factory.mktemp("index") / INDEX_FILE
    build_index(path, batches, "c", indexes)
    chosen = select(batches, open_index(path, "c", indexes), wanted, frozenset())
    found = set()
    for number, mask in zip(chosen.batches, chosen.masks, strict=True):
        rows = range(batches[number].num_rows) if mask is None else mask.rows.tolist()
        assert mask is None or mask.count == len(rows)
        found |= {(number, row) for row in rows}
    expected = {
        (number, row)
        for number, block in enumerate(blocks)
        for row, (name, value, _) in enumerate(block)
        if all(COMPARE[term.op](name if term.column == "name" else value, term.values) for term in wanted)
    }
    assert found >= expected
    if chosen.exact:
        assert found == expected
    text_ranges = any(term.column == "name" and term.op not in ("=", "in") for term in wanted)
    assert chosen.exact or text_ranges


def test_columns_of_few_values_are_coded_and_others_are_not() -> None:
    few = encode([pa.array(["b", "a", "b"] * 1000).cast(pa.string_view()), pa.array(["c"]).cast(pa.string_view())])
    assert few is not None
    assert few.values.to_pylist() == ["a", "b", "c"]
    assert few.codes.dtype == np.uint8
    assert few.codes[[0, 1, 3000]].tolist() == [1, 0, 2]
    assert encode([pa.array(np.arange(4 * CODES_MAX + 8) // 2)]) is None
    two_bytes = encode([pa.array(np.arange(300 * 10) % 300)])
    assert two_bytes is not None
    assert two_bytes.codes.dtype == np.uint16


def test_codes_that_many_threads_ask_first_at_once_are_those_of_the_file(tmp_path: Path) -> None:
    """A dictionary that two threads filled would hold its values twice, and no row would match from then on."""
    path = tmp_path / INDEX_FILE
    count = 1_000
    build_index(path, [batch([f"{n:04}" for n in range(count)] * 8, [0] * 8 * count, [0.0] * 8 * count)], "c", NONE)
    indexes = [open_index(path, "c", NONE) for _ in range(300)]
    found: list[set[int]] = [set() for _ in indexes]
    intervals: list[set[tuple[int, int]]] = [set() for _ in indexes]

    def ask() -> None:
        for number, index in enumerate(indexes):
            codes = index.codes("name")
            assert codes is not None
            found[number].add(id(codes))
            intervals[number].add(codes.interval("=", "0007"))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert all(len(own) == 1 for own in found)
    assert all(own == {(7, 8)} for own in intervals)
    assert all(len(codes.sorted_values()) == count for index in indexes if (codes := index.codes("name")))


def test_a_bloom_filter_knows_all_its_values_and_few_others() -> None:
    present = [f"key-{n}" for n in range(20_000)]
    bloom = build_bloom([pa.array(present[:5]), pa.array(present[5:])])
    assert all(may_contain(bloom, value) for value in present[::97])
    assert sum(may_contain(bloom, f"other-{n}") for n in range(2_000)) < 60
    numbers = build_bloom([pa.array(range(0, 100_000, 7))])
    assert all(may_contain(numbers, n) for n in range(0, 100_000, 777))
    assert sum(may_contain(numbers, n) for n in range(1, 14_000, 7)) < 60


def test_hashes_stay_the_same_for_ever() -> None:
    """Files outlive the process that wrote them."""
    assert hash_values(pa.array(["", "a", "Köln"])).tolist() == [
        16294208416658607535,
        5597734381675163294,
        986376154871615138,
    ]
    assert hash_values(pa.array([0, -1, 2**40])).tolist() == [
        16294208416658607535,
        16490336266968443936,
        2296115805719413641,
    ]


@pytest.mark.parametrize("run", [0, 1, 2, 3, 4, 7, 8, 100])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_all_places_of_a_value_are_found_with_few_looks(run: int, after: int) -> None:
    looks = 0

    class Values(Lazy):
        def __getitem__(self, at: Any) -> Any:
            nonlocal looks
            looks += 1
            return super().__getitem__(at)

    values = Values(pa.array([*range(1_000), *[5_000] * run, *range(6_000, 6_000 + after)]))
    assert sorted_interval(values, "=", 5_000) == (1_000, 1_000 + run)
    assert looks <= 11 + 2 * (run.bit_length() + 1)


def test_rows_that_are_sent_bring_no_texts_of_others() -> None:
    texts = pa.array([f"{n}{'ä' * 500}" for n in range(1_000)] + ["short", "", None])
    column = texts.cast(pa.string_view())
    kept = pa.table([take_column(column.slice(0, 1_000), np.array([2, 7]))], ["text"])
    for table in (kept, pa.table([column.slice(998, 5)], ["text"]), pa.table([column.cast(pa.binary_view())], ["b"])):
        sent = compacted(table)
        sent.validate(full=True)
        assert sent.schema == table.schema
        assert sent.to_pylist() == table.to_pylist()
        assert sum(buffer.size for chunk in sent.column(0).chunks for buffer in chunk.buffers()[2:]) <= max(
            2 * sum(len(value) for value in table.column(0).cast(pa.binary()).to_pylist() if value), 64 * 1024
        )


def test_rows_of_views_are_taken_with_their_long_texts_and_from_slices() -> None:
    column = pa.array(["short", "a text longer than a view", "", "another text longer than a view"])
    views = column.cast(pa.string_view())
    for view, plain in ((views, column), (views.slice(1), column.slice(1))):
        taken = take_column(view, np.array([2, 0, 2]))
        taken.validate(full=True)
        assert taken.to_pylist() == plain.take(pa.array([2, 0, 2])).to_pylist()
    with_null = pa.array(["x", None]).cast(pa.string_view())
    assert take_column(with_null, np.array([1, 0])).to_pylist() == [None, "x"]


SCHEMA = Schema(
    name="s",
    fields=(
        FieldSpec(name="name", data_type=DataType.STRING, field_type=FieldType.DIMENSION),
        FieldSpec(
            name="ts", data_type=DataType.LONG, field_type=FieldType.DATE_TIME, format="1:MILLISECONDS:EPOCH",
            granularity="1:MILLISECONDS",
        ),
    ),
)  # fmt: skip


@pytest.fixture
def sealed(tmp_path: Path) -> SealedSegment:
    count = 3_000
    columns = [
        pa.array(range(count)), pa.array([0] * count, pa.int32()), pa.array([1] * count),
        pa.array([f"name-{n}" for n in range(count)]), pa.array(range(count)),
    ]  # fmt: skip
    batch = pa.RecordBatch.from_arrays(columns, schema=stored_columns(SCHEMA))
    built = build_segment(tmp_path, [batch], SegmentSpec(SCHEMA, "ts"), fsync=False)
    return derive(tmp_path, "s", built.checksum, fsync=False, indexes=IndexConfig(inverted=("name",)))


WANTED = IndexConfig(inverted=("name",))


def _works(segment: SealedSegment) -> bool:
    assert segment.index is not None
    [mask] = select(
        segment.batches, segment.index, [PruneTerm(column="name", op="=", values=("name-77",))], frozenset()
    ).masks
    return mask is not None and mask.rows.tolist() == [77] and segment.index.order("name") is not None


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "footer", "other rows"])
def test_an_index_that_is_missing_or_torn_is_built_anew_at_open(sealed: SealedSegment, damage: str) -> None:
    path = sealed.directory / INDEX_FILE
    whole = path.read_bytes()
    match damage:
        case "missing":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "cut":
            path.write_bytes(whole[: len(whole) // 2])
        case "footer":
            path.write_bytes(whole[:-40] + b"x" + whole[-39:])
        case _:
            build_index(path, sealed.batches, "of another segment", WANTED)
    assert _works(open_segment(sealed.directory, WANTED))
    assert path.read_bytes() == whole


def test_other_wishes_of_the_table_give_another_index(sealed: SealedSegment) -> None:
    assert _works(sealed)
    without = open_segment(sealed.directory)
    assert without.index is not None
    assert without.index.order("name") is None
    assert _works(open_segment(sealed.directory, WANTED))


def test_a_flipped_byte_in_an_index_is_found_by_verification(sealed: SealedSegment) -> None:
    path = sealed.directory / INDEX_FILE
    whole = bytearray(path.read_bytes())
    whole[100] ^= 1
    path.write_bytes(whole)
    damaged = open_segment(sealed.directory, WANTED)
    verify(damaged)
    with pytest.raises(Corrupt, match=INDEX_FILE):
        verify_index(damaged)
    mended = reindexed(damaged, WANTED)
    verify_index(mended)
    assert _works(mended)


def test_several_may_build_the_same_index_at_once(sealed: SealedSegment) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = [pool.submit(reindexed, sealed, WANTED) for _ in range(16)]
        for one in made:
            verify_index(one.result())
            assert _works(one.result())
    assert sorted(path.name for path in sealed.directory.iterdir()) == _FILES


def test_an_index_that_was_being_written_when_the_process_was_killed_is_removed(sealed: SealedSegment) -> None:
    path = sealed.directory / INDEX_FILE
    torn = path.with_name(f"{INDEX_FILE}.0123.tmp")
    torn.write_bytes(path.read_bytes()[:1_000])
    assert _works(open_segment(sealed.directory, WANTED))
    assert sorted(path.name for path in sealed.directory.iterdir()) == _FILES


_FILES = ["rows.arrow", "rows.index", "rows.parquet", "segment.json"]


def test_an_index_is_on_the_disk_before_it_has_its_name(sealed: SealedSegment, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is opened by its footer, which says nothing of blocks that a power cut took."""
    done: list[str] = []
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append("synced"), sync(file)))
    monkeypatch.setattr(os, "replace", lambda source, target: (done.append("named"), rename(source, target)))
    reindexed(sealed, WANTED)
    assert done == ["synced", "named"]


def test_a_segment_whose_index_cannot_be_written_is_served_without(
    sealed: SealedSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    (sealed.directory / INDEX_FILE).unlink()
    monkeypatch.setattr("cremant.segment.index.build_index", full)
    opened = open_segment(sealed.directory, WANTED)
    assert opened.index is None
    assert opened.rows == 3_000
