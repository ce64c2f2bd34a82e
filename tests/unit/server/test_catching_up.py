# SPDX-License-Identifier: Apache-2.0
"""When a partition that has just started may be asked, and that nothing but a log to read keeps it from that."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cremant.log.memory import MemoryLog
from cremant.model.errors import Unavailable
from cremant.model.table import FreshnessSla
from cremant.segment.tail import SpillQuota
from cremant.server.catching_up import CatchUp, EndedBy
from cremant.server.partition import Partition, PartitionId, PartitionState

OWN = PartitionId("trips", "00000000000000aa", 0)


def at(goal: int, **options: Any) -> CatchUp:
    made = CatchUp(10, **options)
    made.goal = goal
    return made


def test_before_its_goal_nothing_ends_it() -> None:
    catching = at(100, bound_ms=50)
    for now_ms in (0, 1_000_000):
        assert not catching.look(99, at_end=True, lag_ms=0, now_ms=now_ms)
    assert not catching.done
    assert catching.progress(40) == "30 of 90 log records"
    assert not CatchUp(0).look(5, at_end=True, lag_ms=0, now_ms=0), "where the log ends is not known yet"


def test_at_its_goal_it_goes_on_to_the_end_of_the_log_or_until_it_is_fresh() -> None:
    catching = at(100)
    assert not catching.look(100, at_end=False, lag_ms=2_001, now_ms=0)
    assert not catching.look(150, at_end=False, lag_ms=None, now_ms=1)
    assert catching.progress(150) == "all read that was there at the start, not fresh yet"
    assert catching.look(200, at_end=False, lag_ms=2_000, now_ms=2)
    assert catching.ended_by is EndedBy.FRESH
    assert not catching.look(200, at_end=True, lag_ms=0, now_ms=3), "said once"
    catching = at(100, fresh_within_ms=500)
    assert not catching.look(100, at_end=False, lag_ms=501, now_ms=0)
    assert catching.look(101, at_end=True, lag_ms=9_999, now_ms=1)
    assert catching.ended_by is EndedBy.END


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40)), max_size=30), st.integers(1, 200))
def test_a_log_that_is_never_read_to_its_end_keeps_it_no_longer_than_its_bound(
    turns: list[tuple[int, int]], bound_ms: int
) -> None:
    catching, offset, now_ms, reached_ms = at(100, bound_ms=bound_ms), 10, 0, None
    for step, pause_ms in turns:
        offset, now_ms = offset + step, now_ms + pause_ms
        if offset >= 100 and reached_ms is None:
            reached_ms = now_ms
        catching.look(offset, at_end=False, lag_ms=None, now_ms=now_ms)
        assert catching.done == (reached_ms is not None and now_ms - reached_ms >= bound_ms)
    assert not catching.done or catching.ended_by is EndedBy.BOUND


class Growing:
    """A log that is appended to while it is read: one more epoch before each read, until it is `still`. `broken`: it
    does not answer."""

    def __init__(self, kit: Any) -> None:
        self.memory = MemoryLog(lambda: int(time.time() * 1000))
        self.epochs = kit.EpochLog(self.memory).create()
        self.still = self.broken = False

    def reader(self, *where: Any) -> Any:
        return _Reader(self, self.memory.reader(*where))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)


class _Reader:
    def __init__(self, log: Growing, reader: Any) -> None:
        self._log, self._reader = log, reader

    def read(self, **bounds: int) -> Any:
        if self._log.broken:
            raise Unavailable("the log does not answer")
        if not self._log.still:
            self._log.epochs.write(1)
        return self._reader.read(**bounds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


@pytest.fixture
def growing(kit: Any) -> Growing:
    made = Growing(kit)
    made.epochs.write(5)
    return made


def started(kit: Any, root: Path, **options: Any) -> Partition:
    return Partition(OWN, kit.START, root, SpillQuota(), **options)


def test_a_server_behind_a_busy_log_is_asked_once_it_is_fresh(growing: Any, kit: Any, tmp_path: Path) -> None:
    newest_ms = growing.epochs.newest_ms
    partition = started(kit, tmp_path, promise=FreshnessSla(max_lag_ms=700))
    for lag_ms in (60_000, 5_000, 900):
        assert partition.turn(growing, newest_ms + lag_ms)
        assert (partition.behind, partition.state) == (True, PartitionState.CATCHING_UP)
    assert partition.catching_up.progress(partition.log_offset).endswith("not fresh yet")
    assert partition.turn(growing, newest_ms + 600)
    assert (partition.behind, partition.state) == (False, PartitionState.CONSUMING)
    assert partition.catching_up.ended_by is EndedBy.FRESH
    # It is not behind again when it lags later: then its watermark says so.
    partition.turn(growing, newest_ms + 99_000)
    assert not partition.behind
    partition.close()


def test_a_dead_pipeline_or_a_paused_table_keeps_nobody_from_answering(growing: Any, kit: Any, tmp_path: Path) -> None:
    growing.still = True
    partition = started(kit, tmp_path)
    while partition.turn(growing, growing.epochs.newest_ms + 10**9):
        pass
    assert not partition.behind
    assert partition.catching_up.ended_by is EndedBy.END
    assert partition.catching_up.end == partition.log_offset
    partition.close()


def test_a_log_that_breaks_down_after_the_goal_keeps_it_no_longer_than_the_bound(
    growing: Any, kit: Any, tmp_path: Path
) -> None:
    partition = started(kit, tmp_path, catch_up_max_ms=30)
    partition.turn(growing, growing.epochs.newest_ms + 10**9)
    assert partition.behind
    growing.broken = True
    kit.eventually(lambda: partition.turn(growing, growing.epochs.newest_ms + 10**9) or not partition.behind)
    assert partition.catching_up.ended_by is EndedBy.BOUND
    assert partition.state is PartitionState.RETRYING
    partition.close()


def test_when_the_log_last_answered_is_told_and_gets_older_while_it_does_not(
    growing: Any, kit: Any, tmp_path: Path
) -> None:
    growing.still = True
    partition = started(kit, tmp_path)
    while partition.turn(growing, 1):
        pass
    first_ms = partition.catching_up.read_at_ms
    assert first_ms is not None
    growing.broken = True
    time.sleep(0.02)
    partition.turn(growing, 1)
    assert partition.catching_up.read_at_ms == first_ms
    growing.broken = False
    kit.eventually(lambda: partition.turn(growing, 1) or partition.catching_up.read_at_ms > first_ms)
    partition.close()
