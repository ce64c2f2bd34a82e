# SPDX-License-Identifier: Apache-2.0
"""Where segments are cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cremant.model.offsets import Position
from cremant.model.table import FlushConfig
from cremant.segment.cuts import FORCE_COMMIT, PRESSED, ROW_LIMIT, SIZE_LIMIT, TIME_LIMIT, Closings, Cut


def at(epoch: int, next_offset: int) -> Position:
    return Position(log_offset=10 * epoch, epoch=epoch, generation=1, next_offset=next_offset)


ROWS_1000 = FlushConfig(rows=1000, bytes=10**12, time_ms=10**9)


def closings(*epochs: int) -> Closings:
    """One closed epoch per number of rows; rows are ten bytes each."""
    made = Closings(at(0, 0))
    rows = 0
    for number, count in enumerate(epochs, start=1):
        rows += count
        made.add(at(number, rows), rows, rows * 10)
    return made


def test_a_row_limit_cut_is_the_first_closed_position_past_the_limit() -> None:
    cut = closings(400, 400, 400, 400).wanted_cut(0, ROWS_1000, 0)
    assert cut == Cut(at(3, 1200), ROW_LIMIT)
    assert closings(400, 400).wanted_cut(0, ROWS_1000, 0) is None
    assert closings(500, 500, 1).wanted_cut(0, ROWS_1000, 0) == Cut(at(2, 1000), ROW_LIMIT)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 700), min_size=1, max_size=30), st.integers(1, 29))
def test_row_limit_cuts_do_not_depend_on_when_one_asks_or_where_one_began(epochs: list[int], later: int) -> None:
    """The first replica has read everything since the beginning; the second restarted at the first cut, and asks
    while it is still reading."""
    all_of_it = closings(*epochs)
    first = all_of_it.wanted_cut(0, ROWS_1000, 0)
    if first is None:
        return
    second = all_of_it.wanted_cut(first.at.next_offset, ROWS_1000, 0)
    restarted = Closings(first.at)
    rows = 0
    for number in range(first.at.epoch + 1, min(len(epochs), first.at.epoch + later) + 1):
        rows += epochs[number - 1]
        restarted.add(at(number, first.at.next_offset + rows), rows, rows)
    seen = restarted.wanted_cut(first.at.next_offset, ROWS_1000, 0)
    if seen is not None:
        assert second is not None
        # Idle epochs behind a cut move its log position, never its rows.
        assert (seen.at.next_offset, seen.reason) == (second.at.next_offset, second.reason)
    all_of_it.drop_below(first.at.next_offset)
    assert all_of_it.wanted_cut(first.at.next_offset, ROWS_1000, 0) == second


def test_an_idle_epoch_moves_the_last_position_without_growing_the_history() -> None:
    made = closings(100)
    for epoch in range(2, 1000):
        made.add(at(epoch, 100), 100, 1000)
    assert made.last == at(999, 100)
    assert made.wanted_cut(0, FlushConfig(rows=100), 0) == Cut(at(999, 100), ROW_LIMIT)


def test_bytes_time_and_pressure_cut_too_but_never_an_empty_segment() -> None:
    made = closings(100, 100)
    assert made.wanted_cut(0, FlushConfig(rows=10**9, bytes=1500), 0) == Cut(at(2, 200), SIZE_LIMIT)
    assert made.wanted_cut(0, FlushConfig(time_ms=1000), 999) is None
    assert made.wanted_cut(0, FlushConfig(time_ms=1000), 1000) == Cut(at(2, 200), TIME_LIMIT)
    assert made.wanted_cut(0, FlushConfig(), 0, pressed=True) == Cut(at(2, 200), PRESSED)
    assert made.wanted_cut(200, FlushConfig(time_ms=1), 1000, pressed=True) is None
    filtered_only = closings()
    filtered_only.add(at(1, 500), 0, 0)
    assert filtered_only.wanted_cut(0, FlushConfig(time_ms=1), 1000, pressed=True) is None


def test_a_forced_cut_is_the_first_closed_position_from_the_offset_on_and_never_empty() -> None:
    """Whenever a replica gets there: one that is behind waits, one far ahead cuts at the same place."""
    for epochs in ((100, 100, 100), (100, 100, 100, 100, 100)):
        assert closings(*epochs).wanted_cut(0, ROWS_1000, 0, force_at_offset=250) == Cut(at(3, 300), FORCE_COMMIT)
    assert closings(100, 100).wanted_cut(0, ROWS_1000, 0, force_at_offset=250) is None
    assert closings(100, 100).wanted_cut(0, ROWS_1000, 0, force_at_offset=200) == Cut(at(2, 200), FORCE_COMMIT)
    assert closings(0).wanted_cut(0, ROWS_1000, 0, force_at_offset=0) is None
    made = Closings(at(0, 0))
    made.add(at(1, 50), 0, 0)  # offsets without rows
    made.add(at(2, 80), 10, 100)
    assert made.wanted_cut(0, ROWS_1000, 0, force_at_offset=20) == Cut(at(2, 80), FORCE_COMMIT)


def test_a_reset_takes_closed_positions_back() -> None:
    made = closings(400, 400, 400)
    made.truncate(800, 2)
    assert made.last == at(2, 800)
    assert made.wanted_cut(0, ROWS_1000, 0) is None
