# SPDX-License-Identifier: Apache-2.0
"""Bytes of epoch log records: golden files of all versions, damage, foreign tables, hashes."""

from __future__ import annotations

import importlib.util
import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cremant.epoch.format import (
    VERSION,
    BlockHead,
    UnknownFormat,
    UpdateHead,
    WrongIncarnation,
    content_hash,
    decode,
    encode,
    key_of,
    kind_of,
    peek,
    row_block,
    to_message,
)
from cremant.epoch.records import EpochMark, Fence, PartitionMark, RowBlock, UpdateBlock
from cremant.model.errors import Corrupt, InvariantViolation, NoResource
from cremant.model.offsets import OffsetRange

GOLDEN = Path(__file__).parents[2] / "golden" / "epoch"
_spec = importlib.util.spec_from_file_location("epoch_samples", GOLDEN / "samples.py")
assert _spec is not None
assert _spec.loader is not None
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)

INCARNATION = golden.INCARNATION
SAMPLES = golden.samples()


def block(first: int, end: int) -> RowBlock:
    count = end - first
    batch = pa.record_batch(
        {
            "$offset": np.arange(first, end, dtype=np.int64),
            "$subRow": np.zeros(count, np.int32),
            "$ingestionTime": pa.nulls(count, pa.int64()),
            "value": np.arange(first, end, dtype=np.float64),
        }
    )
    return row_block(
        generation=1, epoch=1, config_version=1, range=OffsetRange(first, end), batch=batch, timestamp_type="create"
    )


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("v*/*.bin")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_version_ever_written_is_read(path: Path) -> None:
    record = decode(path.read_bytes(), INCARNATION)
    assert golden.as_json(record) == json.loads(path.with_suffix(".json").read_text())


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_the_newest_version_is_written_as_the_golden_file_says(name: str) -> None:
    """Blocks carry Arrow's own bytes, which may change between its releases: their content is compared."""
    stored = (GOLDEN / f"v{VERSION}" / f"{name}.bin").read_bytes()
    written = encode(SAMPLES[name], INCARNATION)
    if isinstance(SAMPLES[name], RowBlock | UpdateBlock):
        assert golden.as_json(decode(written, INCARNATION)) == golden.as_json(decode(stored, INCARNATION))
    else:
        assert written == stored


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_record_survives_the_way_through_bytes(name: str) -> None:
    record = SAMPLES[name]
    data = encode(record, INCARNATION)
    for form in (data, memoryview(data), pa.py_buffer(data)):
        assert decode(form, INCARNATION) == record
    message = to_message(record, INCARNATION)
    assert message.value == data
    assert message.key == key_of(record)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_peek_tells_everything_but_the_rows(name: str) -> None:
    record = SAMPLES[name]
    head = peek(encode(record, INCARNATION), INCARNATION)
    assert kind_of(head) is kind_of(record)
    if isinstance(record, RowBlock):
        assert isinstance(head, BlockHead)
        assert head.rows == record.rows
        for field in set(BlockHead.__struct_fields__) - {"rows"}:
            assert getattr(head, field) == getattr(record, field)
    elif isinstance(record, UpdateBlock):
        assert head == UpdateHead(generation=7, epoch=12, updates=record.updates, content_hash=record.content_hash)
    else:
        assert head == record


def test_peek_does_not_need_the_body_to_be_whole() -> None:
    data = bytearray(encode(SAMPLES["row_block"], INCARNATION))
    data[-1] ^= 1
    assert peek(bytes(data), INCARNATION) == peek(encode(SAMPLES["row_block"], INCARNATION), INCARNATION)
    with pytest.raises(Corrupt):
        decode(bytes(data), INCARNATION)


def test_decoded_columns_are_views_into_the_bytes() -> None:
    data = pa.py_buffer(encode(block(0, 10_000), INCARNATION))
    before = pa.total_allocated_bytes()
    record = decode(data, INCARNATION)
    assert isinstance(record, RowBlock)
    assert pa.total_allocated_bytes() - before < 1024


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_no_damaged_byte_goes_unnoticed(name: str) -> None:
    """Each byte in turn is flipped. Padding is the only place where nothing depends on it."""
    data = encode(SAMPLES[name], INCARNATION)
    unnoticed = []
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x55
        try:
            found = decode(bytes(damaged), INCARNATION)
        except (Corrupt, UnknownFormat, WrongIncarnation):
            continue
        unnoticed.append(at)
        assert found == SAMPLES[name]
    assert all(data[at] == 0 for at in unnoticed)
    assert len(unnoticed) < 64


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_record_cut_short_is_refused(name: str) -> None:
    data = encode(SAMPLES[name], INCARNATION)
    for length in range(len(data)):
        with pytest.raises((Corrupt, UnknownFormat)):
            decode(data[:length], INCARNATION)


def test_a_record_of_a_recreated_table_is_refused_by_rule_e8() -> None:
    data = encode(Fence(generation=1), INCARNATION)
    with pytest.raises(WrongIncarnation) as refused:
        decode(data, "1111111111111111")
    assert refused.value.rule == "E-8"
    with pytest.raises(WrongIncarnation):
        peek(data, "1111111111111111")
    with pytest.raises(InvariantViolation):
        encode(Fence(generation=1), "12")


def test_a_newer_format_version_is_named_in_the_error() -> None:
    data = bytearray(encode(Fence(generation=1), INCARNATION))
    data[4] = VERSION + 1
    with pytest.raises(UnknownFormat, match=f"version {VERSION + 1}"):
        decode(bytes(data), INCARNATION)


def test_bytes_of_something_else_are_refused() -> None:
    with pytest.raises(UnknownFormat):
        decode(b"{}", INCARNATION)
    with pytest.raises(UnknownFormat):
        peek(b"x" * 1000, INCARNATION)


def test_a_record_past_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cremant.epoch.format.RECORD_BYTES_MAX", 1000)
    with pytest.raises(NoResource, match="1000"):
        encode(block(0, 1000), INCARNATION)


def test_equal_rows_hash_equal_whatever_buffer_they_stand_in() -> None:
    whole = block(0, 100).batch
    slice_of = whole.slice(17, 40)
    copied = pa.record_batch({name: pa.array(slice_of.column(name).to_pylist(), slice_of.schema.field(name).type)
                              for name in slice_of.schema.names})  # fmt: skip
    assert content_hash(slice_of) == content_hash(copied)
    assert content_hash(slice_of) != content_hash(whole.slice(18, 40))


@settings(max_examples=60, deadline=None)
@given(
    words=st.lists(st.none() | st.text(max_size=5), min_size=1, max_size=20),
    first=st.integers(0, 19),
    length=st.integers(0, 20),
)
def test_the_hash_is_a_function_of_rows_and_types(words: list[str | None], first: int, length: int) -> None:
    """A slice of a batch hashes like the same rows built anew: strings, lists, booleans, decimals, nulls."""
    count = len(words)
    whole = pa.record_batch(
        {
            "word": pa.array(words, pa.string()),
            "words": pa.array(
                [[word] * (i % 3) if word else [] for i, word in enumerate(words)], pa.list_(pa.string())
            ),
            "flag": pa.array([None if i % 4 == 3 else i % 2 == 0 for i in range(count)], pa.bool_()),
            "price": pa.array([str(Decimal(i) / 8) for i in range(count)]),
            "n": pa.array(range(count), pa.int64()),
        }
    )
    part = whole.slice(min(first, count), length)
    again = pa.RecordBatch.from_pylist(part.to_pylist(), schema=whole.schema)
    assert content_hash(part) == content_hash(again)
    narrow = pa.record_batch({"n": again.column("n").cast(pa.int32())})
    assert content_hash(narrow) != content_hash(again.select(["n"]))
    if part.num_rows:
        assert content_hash(part) != content_hash(part.slice(1))


def test_rows_outside_their_range_are_refused() -> None:
    batch = block(10, 20).batch
    for range_ in (OffsetRange(11, 20), OffsetRange(10, 19), OffsetRange(20, 10)):
        with pytest.raises(InvariantViolation) as refused:
            row_block(generation=1, epoch=1, config_version=1, range=range_, batch=batch, timestamp_type="create")
        assert refused.value.rule == "E-2"
    backwards = pa.concat_batches([batch.slice(5), batch.slice(0, 5)])
    with pytest.raises(InvariantViolation, match="order"):
        row_block(
            generation=1, epoch=1, config_version=1, range=OffsetRange(10, 20), batch=backwards, timestamp_type="create"
        )


@settings(max_examples=100, deadline=None)
@given(
    generation=st.integers(0, 2**63),
    epoch=st.integers(0, 2**62),
    ends=st.lists(st.integers(0, 2**62), max_size=20),
    newest=st.none() | st.integers(0, 2**42),
)
def test_any_mark_survives_the_way_through_bytes(
    generation: int, epoch: int, ends: list[int], newest: int | None
) -> None:
    mark = EpochMark(
        generation=generation,
        epoch=epoch,
        previous=epoch // 2,
        blocks_generation=generation // 2,
        config_version=3,
        partitions=tuple(PartitionMark(end=end, rows=end // 3, max_ingestion_ms=newest) for end in ends),
    )
    assert decode(encode(mark, INCARNATION), INCARNATION) == mark
    assert peek(encode(mark, INCARNATION), INCARNATION) == mark
