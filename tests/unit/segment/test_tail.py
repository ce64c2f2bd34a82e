# SPDX-License-Identifier: Apache-2.0
"""The tail against a plain list of rows: whatever is appended, merged, spilled, dropped or taken back."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cremant.model.cluster import TAIL_QUOTA
from cremant.model.errors import InvariantViolation
from cremant.model.limits import TAIL_MERGE_ROWS
from cremant.segment import tail as tail_module
from cremant.segment.blocks import MERGE_FAN, plan_merge
from cremant.segment.tail import HEAP_BYTES_MAX, SpillQuota, Tail

OLD = pa.schema(
    [
        pa.field("$offset", pa.int64(), nullable=False),
        pa.field("$subRow", pa.int32(), nullable=False),
        pa.field("$ingestionTime", pa.int64()),
        pa.field("a", pa.string(), nullable=False),
    ]
)
NEW = OLD.append(pa.field("b", pa.int64(), nullable=False))

Row = tuple[int, int]


def block(rows: list[Row], schema: pa.Schema = OLD) -> pa.RecordBatch:
    columns = [
        pa.array([offset for offset, _ in rows], pa.int64()),
        pa.array([sub for _, sub in rows], pa.int32()),
        pa.nulls(len(rows), pa.int64()),
        pa.array([f"v{offset}.{sub}" for offset, sub in rows], pa.string()),
    ]
    if len(schema) == 5:
        columns.append(pa.array([offset for offset, _ in rows], pa.int64()))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def rows_in(tail: Tail, first: int = 0, until: int = 2**62) -> list[tuple[int, int, str]]:
    found = []
    for part in tail.snapshot.between(first, until):
        columns = part.batch.to_pydict()
        found += list(zip(columns["$offset"], columns["$subRow"], columns["a"], strict=True))
    return found


class TailAgainstList(RuleBasedStateMachine):
    """Sizes are lowered so that merges, spills and the quota happen all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(tail_module, "TAIL_SPILL_BYTES", 2_000)
        self.patch.setattr(tail_module, "TAIL_MERGE_ROWS", 16)
        self.patch.setattr("cremant.segment.blocks.TAIL_MERGE_ROWS", 16)
        self.quota = SpillQuota(400_000)
        self.tail = Tail(Path(self.directory.name) / "tail", 100, self.quota)
        self.model: list[Row] = []
        self.first, self.next = 100, 100
        self.schema = OLD

    @rule(gaps=st.lists(st.integers(0, 3), max_size=40), subs=st.integers(1, 3), more=st.integers(0, 3))
    def append(self, gaps: list[int], subs: int, more: int) -> None:
        rows: list[Row] = []
        offset = self.next
        for gap in gaps:
            offset += gap
            rows += [(offset, sub) for sub in range(subs)]
            offset += 1
        self.tail.append(block(rows, self.schema), offset + more)
        self.model += rows
        self.next = offset + more

    @rule()
    def evolve(self) -> None:
        self.schema = NEW

    @rule(by=st.integers(0, 60))
    def drop_below(self, by: int) -> None:
        self.tail.drop_below(self.first + by)
        self.first = min(self.first + by, self.next)
        self.model = [row for row in self.model if row[0] >= self.first]

    @rule(by=st.integers(0, 60))
    def truncate(self, by: int) -> None:
        self.next = max(self.first, self.next - by)
        self.tail.truncate(self.next)
        self.model = [row for row in self.model if row[0] < self.next]

    @rule(rounds=st.integers(1, 20))
    def maintain(self, rounds: int) -> None:
        for _ in range(rounds):
            if not self.tail.maintain():
                break

    @rule(a=st.integers(0, 300), b=st.integers(0, 300))
    def slices_hold_exactly_the_offsets_asked_for(self, a: int, b: int) -> None:
        first, until = self.first + min(a, b), self.first + max(a, b)
        expected = [(offset, sub, f"v{offset}.{sub}") for offset, sub in self.model if first <= offset < until]
        assert rows_in(self.tail, first, until) == expected
        assert self.tail.snapshot.count(first, until) == len(expected)

    @invariant()
    def equals_the_list(self) -> None:
        snapshot = self.tail.snapshot
        assert (snapshot.first_offset, snapshot.next_offset) == (self.first, self.next)
        assert snapshot.rows == len(self.model)
        assert [row[:2] for row in rows_in(self.tail)] == self.model

    @invariant()
    def files_are_those_in_use_and_are_paid_for(self) -> None:
        on_disk = set((Path(self.directory.name) / "tail").glob("*"))
        assert on_disk == {block.file for block in self.tail.snapshot.blocks if block.file}
        assert self.quota.used_bytes == self.tail.disk_bytes >= sum(file.stat().st_size for file in on_disk)

    def teardown(self) -> None:
        self.tail.close()
        assert self.quota.used_bytes == 0
        self.patch.undo()
        self.directory.cleanup()


TestTailAgainstList = TailAgainstList.TestCase
TestTailAgainstList.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, TAIL_MERGE_ROWS * 2), max_size=100))
def test_merging_ends_with_few_blocks_and_keeps_their_order(sizes: list[int]) -> None:
    blocks = [[(index, rows)] for index, rows in enumerate(sizes)]
    for _ in range(1000):
        counts = [sum(rows for _, rows in block) for block in blocks]
        plan = plan_merge(counts)
        if plan is None:
            break
        first, end = plan
        assert end - first >= 2
        assert all(count < TAIL_MERGE_ROWS for count in counts[first:end])
        blocks[first:end] = [[part for block in blocks[first:end] for part in block]]
    assert [part for block in blocks for part in block] == list(enumerate(sizes))
    finished = sum(1 for count in counts if count >= TAIL_MERGE_ROWS)
    assert len(blocks) <= (finished + 1) * (6 * (MERGE_FAN - 1) + 1)


def test_ten_thousand_single_row_blocks_become_a_few_while_each_row_is_copied_a_few_times() -> None:
    counts: list[int] = []
    copied = 0
    for _ in range(10_000):
        counts.append(1)
        while (plan := plan_merge(counts)) is not None:
            total = sum(counts[plan[0] : plan[1]])
            copied += total
            counts[plan[0] : plan[1]] = [total]
    assert len(counts) <= 6 * MERGE_FAN
    assert copied <= 6 * 10_000


def test_a_snapshot_stays_readable_after_everything_was_dropped_and_the_files_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_module, "TAIL_SPILL_BYTES", 1_000)
    tail = Tail(tmp_path / "t", 0, SpillQuota())
    count = TAIL_MERGE_ROWS
    tail.append(block([(offset, 0) for offset in range(count)]), count)
    while tail.maintain():
        pass
    assert tail.disk_bytes > 0
    assert tail.heap_bytes == 0
    snapshot = tail.snapshot
    tail.close()
    assert not (tmp_path / "t").exists()
    assert snapshot.blocks[0].batch.column("a")[count - 1].as_py() == f"v{count - 1}.0"


def test_past_the_disk_quota_the_tail_says_so_before_the_heap_overflows_and_recovers_by_dropping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_module, "TAIL_SPILL_BYTES", 100_000)
    monkeypatch.setattr(tail_module, "HEAP_BYTES_MAX", 400_000)
    monkeypatch.setattr(tail_module, "TAIL_MERGE_ROWS", 1_000)
    monkeypatch.setattr("cremant.segment.blocks.TAIL_MERGE_ROWS", 1_000)
    tail = Tail(tmp_path / "t", 0, SpillQuota(300_000))
    offset = 0
    while tail.blocked is None:
        tail.append(block([(offset + i, 0) for i in range(1_000)]), offset + 1_000)
        offset += 1_000
        while tail.maintain():
            pass
        assert offset < 1_000_000
    assert tail.blocked == TAIL_QUOTA
    assert tail.heap_bytes < 500_000
    assert tail.disk_bytes <= 300_000
    tail.drop_below(offset - 1_000)
    assert tail.blocked is None
    assert tail.disk_bytes == 0
    assert HEAP_BYTES_MAX > 400_000


def test_tails_of_a_server_that_take_too_much_memory_together_spill_sooner_and_then_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_module, "TAIL_SPILL_BYTES", 1_600_000)
    monkeypatch.setattr(tail_module, "HEAP_BYTES_MAX", 6_400_000)
    quota = SpillQuota(4_000_000, heap_limit_bytes=1_000_000)
    tails = [Tail(tmp_path / str(number), 0, quota) for number in range(20)]
    offset = 0
    while any(tail.blocked is None for tail in tails):
        for tail in tails:
            if tail.blocked is None:
                end = tail.snapshot.next_offset
                tail.append(block([(end + i, 0) for i in range(1_000)]), end + 1_000)
            while tail.maintain():
                pass
        offset += 1
        assert offset < 1_000
        # Alone none of them would have spilled or waited: a row more than the limit is what each has in hand.
        assert quota.heap_bytes < 1_000_000 + 20 * 150_000
        assert quota.heap_bytes == sum(tail.heap_bytes for tail in tails)
    assert {tail.blocked for tail in tails} == {TAIL_QUOTA}
    assert 3_000_000 < quota.used_bytes <= 4_000_000
    for tail in tails:
        rows = tail.snapshot.rows
        assert sum(part.rows for part in tail.snapshot.between(0, 10**9)) == rows == tail.snapshot.next_offset
        tail.drop_below(rows)
        assert tail.blocked is None
        tail.close()
    assert (quota.heap_bytes, quota.used_bytes) == (0, 0)


@pytest.mark.parametrize(("rows", "end"), [([(4, 0)], 6), ([(6, 0)], 6), ([], 4)])
def test_rows_outside_of_their_range_are_an_invariant_violation_and_change_nothing(
    tmp_path: Path, rows: list[Row], end: int
) -> None:
    tail = Tail(tmp_path / "t", 5, SpillQuota())
    with pytest.raises(InvariantViolation, match="E-2"):
        tail.append(block(rows), end)
    assert tail.snapshot.next_offset == 5
    assert tail.snapshot.rows == 0


def test_readers_see_all_rows_while_another_thread_merges_and_spills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_module, "TAIL_SPILL_BYTES", 5_000)
    monkeypatch.setattr(tail_module, "TAIL_MERGE_ROWS", 64)
    monkeypatch.setattr("cremant.segment.blocks.TAIL_MERGE_ROWS", 64)
    tail = Tail(tmp_path / "t", 0, SpillQuota())
    done = threading.Event()

    def merge() -> None:
        while not done.is_set():
            tail.maintain()

    thread = threading.Thread(target=merge)
    thread.start()
    try:
        for number in range(300):
            tail.append(block([(number * 5 + i, 0) for i in range(5)]), number * 5 + 5)
            snapshot = tail.snapshot
            offsets = [int(o) for part in snapshot.between(0, 2**62) for o in part.batch.column(0).to_pylist()]
            assert offsets == list(range(number * 5 + 5))
    finally:
        done.set()
        thread.join()
