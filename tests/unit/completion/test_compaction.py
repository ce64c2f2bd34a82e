# SPDX-License-Identifier: Apache-2.0
"""Which segments are compacted, when and as of which epoch; what the record says afterwards, and what a rewind does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cremant.completion.compaction import (
    ORDER_MS,
    ORDERS_MAX,
    Compact,
    Compactions,
    Order,
    Sight,
    Withdraw,
    after_compaction,
)
from cremant.completion.rewind import compacted_past, without_later
from cremant.model.cluster import PipelineRecord, Rewind
from cremant.model.offsets import Position
from cremant.model.segments import Copy, SegmentMetadata, SegmentStatus, StoredVersions, StoreState
from cremant.model.upsert import CompactionConfig, UpsertConfig
from cremant.wire.messages import SegmentCompacted

HISTORY_MS = 10_000
CONFIG = CompactionConfig(buffer_ms=5_000, percent=30, count=10)
KEYED = PipelineRecord(generation=1, keyed_from=1)


def at(epoch: int) -> Position:
    return Position(log_offset=10 * epoch, epoch=epoch, generation=1, next_offset=100 * epoch)


def segment(name: str = "s", **fields: Any) -> SegmentMetadata:
    made = SegmentMetadata(
        name=name, partition=0, sequence=0, status=SegmentStatus.DONE, start_offset=0, start=at(0), created_ms=0,
        replicas=("a", "b"), end=at(4), end_offset=400, rows=100, checksum="whole", file_checksum="sha256:1",
        max_ingestion_ms=0, copies={name: Copy(checksum="whole", verified_at_ms=0) for name in ("a", "b")},
    )  # fmt: skip
    return msgspec.structs.replace(made, **fields)


class Run:
    """A table whose low-water mark grows by one each second."""

    def __init__(self, *segments: SegmentMetadata, config: CompactionConfig | None = CONFIG) -> None:
        self.machine = Compactions()
        self.segments = list(segments)
        self.upsert = UpsertConfig(comparison_columns=("ts",), history_ms=HISTORY_MS, compaction=config)
        self.pipeline = KEYED
        self.superseded = {one.name: 50 for one in segments}
        self.incarnation = "one"
        self.now_ms = 0
        self.silent = False

    @property
    def mark(self) -> int:
        return self.now_ms // 1000

    def step(self, elapsed_ms: int = 1_000) -> tuple[Order, ...]:
        self.now_ms += elapsed_ms
        sight = Sight(
            table="t", incarnation=self.incarnation, upsert=self.upsert, pipeline=self.pipeline,
            low_water_mark=None if self.silent else self.mark, segments=tuple(self.segments),
            superseded=self.superseded,
        )  # fmt: skip
        return self.machine.step([sight], self.now_ms)

    def until(self, steps: int = 60) -> tuple[Order, ...]:
        return next((orders for _ in range(steps) if (orders := self.step())), ())


def test_an_epoch_is_old_enough_and_all_rows_of_the_segment_are_of_before() -> None:
    run = Run(segment())
    (found,) = run.until()
    assert isinstance(found, Compact)
    assert (found.table, found.segment) == ("t", "s")
    assert 4 <= found.epoch <= run.mark - HISTORY_MS // 1000
    assert run.mark - HISTORY_MS // 1000 - found.epoch <= 1, "and no older than it need be"


@given(st.lists(st.tuples(st.integers(0, 4_000), st.integers(0, 3), st.booleans()), min_size=1, max_size=80))
def test_no_epoch_is_younger_than_the_history(moves: list[tuple[int, int, bool]]) -> None:
    """Whatever is seen when: what was ordered had been applied everywhere `historyMs` before."""
    machine, now_ms, mark = Compactions(), 0, 0
    upsert = UpsertConfig(
        comparison_columns=("ts",), history_ms=HISTORY_MS, compaction=CompactionConfig(buffer_ms=0)
    )  # fmt: skip
    seen: list[tuple[int, int]] = []
    for elapsed_ms, grown, silent in moves:
        now_ms, mark = now_ms + elapsed_ms, mark + grown
        sight = Sight(
            table="t", incarnation="one", pipeline=KEYED, low_water_mark=None if silent else mark, upsert=upsert,
            segments=(segment(),), superseded={"s": 50},
        )  # fmt: skip
        for found in machine.step([sight], now_ms):
            assert isinstance(found, Compact)
            assert any(then <= now_ms - HISTORY_MS and closed >= found.epoch for then, closed in seen)
        if not silent:
            seen.append((now_ms, mark))


REASONS: dict[str, dict[str, Any]] = {
    "a replica has not registered": {"copies": {"a": Copy(checksum="whole", verified_at_ms=0)}},
    "a replica has other content": {
        "copies": {"a": Copy(checksum="whole", verified_at_ms=0), "b": Copy(checksum="other", verified_at_ms=0)}
    },
    "its upload is under way": {"store_state": StoreState.PENDING},
    "its upload failed": {"store_state": StoreState.FAILED},
    "it ends at an epoch that is too young": {"end": at(10_000)},
    "its rows are too young": {"max_ingestion_ms": 10**9},
    "it is being compacted": {"compacting": 3},
    "it was compacted later": {"compacted_at": 10_000},
    "it has few rows": {"rows": 1_000},
}


@pytest.mark.parametrize("why", REASONS)
def test_a_segment_is_left_alone(why: str) -> None:
    assert Run(segment()).until()
    assert not Run(segment(**REASONS[why])).until()


def test_a_table_is_left_alone() -> None:
    few, unsaid, off = Run(segment()), Run(segment()), Run(segment(), config=None)
    few.superseded["s"] = 9
    unsaid.superseded.clear()
    silent = Run(segment())
    silent.silent = True
    keyless, rewinding = Run(segment()), Run(segment())
    keyless.pipeline = PipelineRecord(generation=1, keyed_from=2**62)
    rewinding.pipeline = msgspec.structs.replace(KEYED, rewinds=(Rewind(to_epoch=3),))
    for run in (few, unsaid, off, silent, keyless, rewinding):
        assert not run.until()


def test_few_at_a_time_and_the_largest_first() -> None:
    run = Run(*(segment(f"s{number}") for number in range(4)))
    run.superseded = {f"s{number}": 40 + number for number in range(4)}
    assert [order.segment for order in run.until()] == ["s3", "s2"]
    run.segments[3] = segment("s3", compacting=3)
    run.segments[2] = segment("s2", compacting=3)
    assert ORDERS_MAX == 2
    assert not run.step()
    run.segments[3] = segment("s3", compacted_at=3, rows=57)
    run.superseded["s3"] = 0
    assert [order.segment for order in run.step()] == ["s1"]


def carry_out(run: Run, orders: tuple[Order, ...]) -> None:
    """What the controller writes down."""
    for order in orders:
        at, server = (order.epoch, order.server) if isinstance(order, Compact) else (None, None)
        run.segments = [
            msgspec.structs.replace(one, compacting=at, compactor=server) if one.name == order.segment else one
            for one in run.segments
        ]


def test_an_order_that_nobody_carries_out_is_withdrawn_and_goes_to_the_next_replica() -> None:
    run = Run(*(segment(f"s{number}") for number in range(3)))
    run.superseded = {"s0": 60, "s1": 50, "s2": 40}
    carry_out(run, run.until())
    assert [one.compactor for one in run.segments] == ["a", "a", None]
    assert not run.step(), "seen for the first time"
    assert not run.step(ORDER_MS - 1_000)
    orders = run.step()
    assert [order.segment for order in orders if isinstance(order, Withdraw)] == ["s0", "s1"]
    assert len(orders) == 2, "their places are free with the next look"
    carry_out(run, orders)
    found = []
    for _ in range(2):
        orders = run.until()
        carry_out(run, orders)
        found += [(order.segment, order.server) for order in orders if isinstance(order, Compact)]
    assert found == [("s2", "a"), ("s0", "b")], "who has failed at none comes first; of s0 it is the other one's turn"


def test_a_table_that_is_not_compacted_any_more_has_no_orders() -> None:
    run = Run(segment("s0"), segment("s1"))
    carry_out(run, run.until())
    run.upsert = msgspec.structs.replace(run.upsert, compaction=None)
    orders = run.step()
    assert [(type(order), order.segment) for order in orders] == [(Withdraw, "s0"), (Withdraw, "s1")]
    carry_out(run, orders)
    assert not run.step()


def test_what_began_anew_waits_for_the_history_again() -> None:
    """A table of that name, a rewind: what was seen before says nothing of its epochs."""
    for change in ({"incarnation": "other"}, {"pipeline": PipelineRecord(
        generation=2, keyed_from=1, rewinds=(Rewind(to_epoch=6, next_epoch=8, asked_ms=5, generation=2),)
    )}):  # fmt: skip
        run = Run(segment())
        assert run.until()
        vars(run).update(change)
        assert not any(run.step() for _ in range(HISTORY_MS // 1000))
        assert run.until()


SAID = SegmentCompacted(
    instance="a", table="t", incarnation="one", segment="s", epoch=7, before="whole", checksum="less",
    file_checksum="sha256:2", rows=40, size_bytes=9,
)  # fmt: skip


def test_the_record_says_what_is_left_and_who_can_make_it() -> None:
    ordered = segment(compacting=7, compactor="a", rows_removed=5)
    done = after_compaction(ordered, SAID, 99)
    assert done is not None
    assert (done.rows, done.rows_removed, done.compacted_at, done.compacting) == (40, 65, 7, None)
    assert done.compactor is None
    assert {holder: copy.checksum for holder, copy in done.copies.items()} == {"a": "less", "b": "less"}
    assert done.columns == ordered.columns
    assert after_compaction(done, SAID, 99) is None, "said twice"
    nothing = after_compaction(ordered, msgspec.structs.replace(SAID, checksum="whole", rows=100), 99)
    assert nothing == msgspec.structs.replace(ordered, compacting=None, compactor=None)


def test_what_was_not_ordered_is_not_wanted() -> None:
    for ordered in (segment(), segment(compacting=8), segment(compacting=7, checksum="other")):
        assert after_compaction(ordered, SAID, 99) is None


def test_an_object_goes_only_for_another_one() -> None:
    position = at(9)
    before = StoredVersions(url="v1", position=position, size_bytes=1, file_checksum="sha256:3")
    stored = segment(compacting=7, store_state=StoreState.STORED, store_url="u1", versions=before)
    assert after_compaction(stored, SAID, 99) is None, "the segment was uploaded meanwhile, what is left was not"
    versions = msgspec.structs.replace(before, url="v2")
    done = after_compaction(stored, msgspec.structs.replace(SAID, url="u2", versions=versions), 99)
    assert done is not None
    assert (done.store_state, done.objects) == (StoreState.STORED, ("u2", "v2"))


def test_a_rewind_takes_back_orders_and_goes_not_behind_what_is_gone() -> None:
    ordered, done = segment("s1", compacting=7), segment("s2", compacted_at=5)
    assert without_later([ordered, done], 6, {0: at(4)}) == [msgspec.structs.replace(ordered, compacting=None)]
    assert compacted_past([ordered, done], 4) == done
    assert compacted_past([ordered, done], 5) is None
    assert compacted_past([], 5) is None
