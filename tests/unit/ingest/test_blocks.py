# SPDX-License-Identifier: Apache-2.0
"""Parts cover their range without a hole, and their content depends on the records alone."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ingest_kit import FIRST_OFFSET, TIME_MS, config_of, messages_of, schema_of

from cremant.epoch.content import content_hash
from cremant.ingest.blocks import to_blocks
from cremant.ingest.plan import compile_ingest
from cremant.log.api import MessageBatch
from cremant.model.errors import InvariantViolation
from cremant.model.offsets import OffsetRange

COLUMNS: dict[str, Any] = {
    "n": "INT", "a": "STRING", "flag": "BOOLEAN", "mv": {"dataType": "STRING", "singleValueField": False},
}  # fmt: skip
SCHEMA = schema_of(COLUMNS)
PLAN = compile_ingest(SCHEMA, config_of(nulls=True, filter_function="n < 0"))


def _records(seed: int, count: int) -> list[Any]:
    dice = random.Random(seed)
    good = [
        {"n": number, "a": f"v{number}", "flag": number % 2 == 0, "mv": ["x"] * (number % 3)} for number in range(50)
    ]
    return [dice.choice([*good, {"n": -1}, {"n": "bad"}, None, {"a": None}]) for _ in range(count)]


@pytest.mark.parametrize("seed", range(10))
def test_parts_cover_the_range_and_count_everything_once(seed: int) -> None:
    records = _records(seed, 97)
    ingested = PLAN.run(messages_of(records))
    whole = OffsetRange(FIRST_OFFSET - 3, FIRST_OFFSET + 2 * len(records) + 5)
    parts = to_blocks(ingested, whole, 10)
    assert parts[0].range.first == whole.first
    assert parts[-1].range.next == whole.next
    assert all(one.range.next == other.range.first for one, other in itertools.pairwise(parts))
    assert all(part.batch.num_rows <= 10 for part in parts)
    assert all(part.batch.num_rows == 10 for part in parts[:-1])
    assert sum(part.rejected for part in parts) == len(ingested.rejected)
    assert sum(part.filtered for part in parts) == ingested.filtered
    assert sum(part.batch.num_rows for part in parts) == ingested.batch.num_rows
    for part in parts:
        offsets = part.batch["$offset"].to_pylist()
        assert all(part.range.first <= offset < part.range.next for offset in offsets)


@pytest.mark.parametrize("seed", range(6))
def test_a_part_hashes_as_its_records_ingested_alone(seed: int) -> None:
    """Content hashes compare replays (rule E-2): where a batch began or was cut must not show."""
    records = _records(seed, 60)
    last = FIRST_OFFSET + 2 * len(records)
    for part in to_blocks(PLAN.run(messages_of(records)), OffsetRange(FIRST_OFFSET, last), 7):
        first, end = ((offset - FIRST_OFFSET) // 2 for offset in (part.range.first, part.range.next))
        alone = PLAN.run(messages_of(records[first:end], first=part.range.first))
        [again] = to_blocks(alone, part.range, 1000)
        accounts = [(one.rejected, one.filtered, one.max_ingestion_ms, one.rejected_from_ms) for one in (again, part)]
        assert accounts[0] == accounts[1]
        assert content_hash(again.batch) == content_hash(part.batch)


def test_a_range_without_rows_is_one_empty_part() -> None:
    ingested = PLAN.run(messages_of([{"n": -1}, None]))
    [part] = to_blocks(ingested, OffsetRange(FIRST_OFFSET, FIRST_OFFSET + 4), 10)
    assert (part.batch.num_rows, part.rejected, part.filtered) == (0, 1, 1)
    assert part.max_ingestion_ms == TIME_MS, "messages count, not rows"


#: What becomes of a message: a row, dropped by the filter, rejected (an error, a tombstone).
_FATES: dict[str, Any] = {"row": {"n": 1}, "filtered": {"n": -1}, "error": {"n": "bad"}, "tombstone": None}


@given(st.lists(st.tuples(st.sampled_from(sorted(_FATES)), st.integers(-1, 5)), min_size=1, max_size=30), st.data())
def test_a_part_tells_the_newest_of_its_messages_and_the_oldest_error(
    messages: list[tuple[str, int]], data: st.DataObject
) -> None:
    """Producers' clocks: neither in order nor always given."""
    times = [at_ms for _, at_ms in messages]
    ingested = PLAN.run(messages_of([_FATES[fate] for fate, _ in messages], times=times))
    whole = OffsetRange(FIRST_OFFSET, FIRST_OFFSET + 2 * len(messages))
    for part in to_blocks(ingested, whole, data.draw(st.integers(1, 5))):
        inside = [
            (fate, at_ms)
            for number, (fate, at_ms) in enumerate(messages)
            if part.range.first <= FIRST_OFFSET + 2 * number < part.range.next and at_ms >= 0
        ]
        assert part.max_ingestion_ms == max((at_ms for _, at_ms in inside), default=None)
        refused = [at_ms for fate, at_ms in inside if fate == "error"]
        assert part.rejected_from_ms == min(refused, default=None)


def test_a_log_that_gives_no_times_gives_none_on() -> None:
    """Whatever is around a message is optional."""
    plain = messages_of([{"n": 1}, {"n": "bad"}])
    bare = MessageBatch(offsets=plain.offsets, values=plain.values, next_offset=plain.next_offset)
    ingested = PLAN.run(bare)
    assert ingested.batch["$ingestionTime"].to_pylist() == [None]
    [part] = to_blocks(ingested, OffsetRange(FIRST_OFFSET, bare.next_offset), 10)
    assert (part.rejected, part.max_ingestion_ms, part.rejected_from_ms) == (1, None, None)


def test_an_empty_range_has_no_part() -> None:
    assert to_blocks(PLAN.run(messages_of([])), OffsetRange(5, 5), 10) == []


@pytest.mark.parametrize("wrong", [OffsetRange(FIRST_OFFSET + 1, 1000), OffsetRange(0, FIRST_OFFSET + 3)])
@pytest.mark.parametrize("records", [[{"n": 1}] * 3, [None] * 3, [{"n": -1}] * 3])
def test_anything_outside_the_range_is_a_violation(wrong: OffsetRange, records: list[Any]) -> None:
    with pytest.raises(InvariantViolation, match="E-2"):
        to_blocks(PLAN.run(messages_of(records)), wrong, 10)


def test_rows_of_one_record_are_never_split() -> None:
    ingested = PLAN.run(messages_of([{"n": 1}, {"n": 2}, {"n": 3}]))
    doubled = pa.Table.from_batches([ingested.batch, ingested.batch]).sort_by("$offset").combine_chunks()
    several = type(ingested)(doubled.to_batches()[0], (), ())
    parts = to_blocks(several, OffsetRange(FIRST_OFFSET, FIRST_OFFSET + 6), 3)
    assert [part.batch.num_rows for part in parts] == [2, 2, 2]
    assert [part.batch.num_rows for part in to_blocks(several, OffsetRange(FIRST_OFFSET, 200), 1)] == [2, 2, 2]


def test_a_block_is_cut_where_it_grows_too_large() -> None:
    schema = schema_of({"name": {"dataType": "STRING", "maxLength": 1_000_000}})
    sizes = [10] * 50 + [500_000] * 3 + [10] * 50
    ingested = compile_ingest(schema, config_of()).run(messages_of([{"name": "x" * size} for size in sizes]))
    parts = to_blocks(ingested, OffsetRange(100, 400), 1_000, 600_000)
    assert [part.range.first for part in parts[1:]] == [part.range.next for part in parts[:-1]]
    assert (parts[0].range.first, parts[-1].range.next) == (100, 400)
    assert all(part.batch.nbytes < 600_000 for part in parts)
    assert 3 <= len(parts) <= 12
    assert sum(part.batch.num_rows for part in parts) == 103


def test_a_row_that_transforms_make_too_large_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cremant.ingest.plan.BLOCK_BYTES_MAX", 50_000)
    columns = {name: {"dataType": "STRING", "maxLength": 100_000} for name in ("a", "b", "c")}
    config = config_of(transforms={"b": "concat(a, a, '')", "c": "concat(a, a, '')"})
    ingested = compile_ingest(schema_of(columns), config).run(messages_of([{"a": "x" * 12_000}, {"a": "x"}] * 2))
    assert [(bad.offset, bad.cause) for bad in ingested.rejected] == [(100, "tooLarge"), (104, "tooLarge")]
    assert "a row of 60" in ingested.rejected[0].detail
    assert ingested.batch.num_rows == 2


def test_of_a_batch_larger_than_a_block_only_rows_larger_than_a_block_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cremant.ingest.plan.BLOCK_BYTES_MAX", 3_000)
    sizes = [50, *[1, 3_500, 3_500, 2_500] * 50, 1]
    schema = schema_of({"name": {"dataType": "STRING", "maxLength": 10_000}})
    ingested = compile_ingest(schema, config_of(nulls=True)).run(messages_of([{"name": "x" * size} for size in sizes]))
    assert [bad.offset for bad in ingested.rejected] == [
        FIRST_OFFSET + 2 * at for at, size in enumerate(sizes) if size > 3_000
    ]
    assert {bad.cause for bad in ingested.rejected} == {"tooLarge"}
    assert [len(name) for name in ingested.batch.column("name").to_pylist()] == [size for size in sizes if size < 3_000]
