# SPDX-License-Identifier: Apache-2.0
"""Where segments are cut, and the conversation by which one replica completes a segment."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from cremant.model.offsets import Position
from cremant.model.segments import SegmentMetadata, SegmentStatus
from cremant.model.table import FlushConfig
from cremant.segment.build import Built
from cremant.segment.cuts import ROW_LIMIT, SIZE_LIMIT, TIME_LIMIT, Closings, Cut
from cremant.segment.sealing import ASK_AGAIN_MS, CATCH_UP_MS, NOTHING, Sealing, StepKind
from cremant.wire.messages import CommitEndReply, CompletionStatus, SegmentConsumedReply


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
    assert made.wanted_cut(0, FlushConfig(), 0, pressed=True) == Cut(at(2, 200), SIZE_LIMIT)
    assert made.wanted_cut(200, FlushConfig(time_ms=1), 1000, pressed=True) is None
    filtered_only = closings()
    filtered_only.add(at(1, 500), 0, 0)
    assert filtered_only.wanted_cut(0, FlushConfig(time_ms=1), 1000, pressed=True) is None


def test_a_reset_takes_closed_positions_back() -> None:
    made = closings(400, 400, 400)
    made.truncate(800, 2)
    assert made.last == at(2, 800)
    assert made.wanted_cut(0, ROWS_1000, 0) is None


# --- the conversation ---

END = at(3, 1200)


def metadata(status: SegmentStatus, *, checksum: str | None = None, stored: bool = True) -> SegmentMetadata:
    decided = status is not SegmentStatus.IN_PROGRESS
    return SegmentMetadata(
        name="t__0__0__x", partition=0, sequence=0, status=status, start_offset=0, start=at(0, 0), created_ms=0,
        replicas=("me",), end=END if decided else None, end_offset=1200 if decided else None, checksum=checksum,
        store_url="file:///x" if stored and checksum else None,
    )  # fmt: skip


OPEN = metadata(SegmentStatus.IN_PROGRESS)
COMMITTING = metadata(SegmentStatus.COMMITTING)
DONE = metadata(SegmentStatus.DONE, checksum="good")
WANTED = Cut(END, ROW_LIMIT)


def built(checksum: str = "good") -> Built:
    return Built(Path("x"), 1200, 1, checksum, "f", {}, None, None, None)


def reply(status: CompletionStatus, end: Position | None = END, token: int = 1) -> SegmentConsumedReply:
    return SegmentConsumedReply(status=status, end=end, token=token)


def test_the_committer_asks_builds_commits_and_installs() -> None:
    """nothing -> ASK -> COMMIT -> BUILD -> COMMIT -> COMMIT_SUCCESS -> INSTALL"""
    sealing = Sealing("s")
    assert sealing.next_step(OPEN, at(2, 800), None, 0) == NOTHING
    assert sealing.next_step(OPEN, END, WANTED, 0).cut == WANTED
    sealing.answered(reply(CompletionStatus.COMMIT), 0)
    assert sealing.next_step(OPEN, END, WANTED, 1).kind is StepKind.BUILD
    sealing.was_built(built(), END)
    step = sealing.next_step(COMMITTING, END, None, 2)
    assert (step.kind, step.token, step.end) == (StepKind.COMMIT, 1, END)
    sealing.commit_answered(CommitEndReply(status=CompletionStatus.COMMIT_SUCCESS), 3)
    assert sealing.next_step(COMMITTING, END, None, 4).kind is StepKind.INSTALL


def test_a_follower_builds_the_decided_cut_and_installs_once_the_metadata_agrees() -> None:
    """ASK -> HOLD with the cut -> BUILD -> asks on -> DONE, same checksum -> INSTALL"""
    sealing = Sealing("s")
    sealing.answered(reply(CompletionStatus.HOLD), 0)
    assert sealing.next_step(COMMITTING, END, None, 1).kind is StepKind.BUILD
    sealing.was_built(built(), END)
    assert sealing.next_step(COMMITTING, END, None, 1) == NOTHING
    assert sealing.next_step(COMMITTING, END, None, ASK_AGAIN_MS).kind is StepKind.ASK
    assert sealing.next_step(DONE, END, None, ASK_AGAIN_MS).kind is StepKind.INSTALL


def test_a_follower_takes_over_when_the_lease_of_the_committer_lapses() -> None:
    sealing = Sealing("s")
    sealing.answered(reply(CompletionStatus.HOLD), 0)
    sealing.was_built(built(), END)
    sealing.answered(reply(CompletionStatus.COMMIT, token=2), 600)
    step = sealing.next_step(COMMITTING, END, None, 601)
    assert (step.kind, step.token) == (StepKind.COMMIT, 2)


def test_a_replica_behind_the_cut_reads_on_before_it_asks_or_builds() -> None:
    sealing = Sealing("s")
    sealing.answered(reply(CompletionStatus.CATCH_UP), 0)
    assert sealing.next_step(COMMITTING, at(2, 800), None, 10_000) == NOTHING
    assert sealing.next_step(COMMITTING, END, None, 10_000).kind is StepKind.ASK
    sealing.answered(reply(CompletionStatus.KEEP), 10_000)
    assert sealing.next_step(COMMITTING, END, None, 10_001).kind is StepKind.BUILD


def test_a_replica_far_behind_a_done_segment_fetches_it_instead_of_reading_on_for_ever() -> None:
    sealing = Sealing("s")
    assert sealing.next_step(DONE, at(1, 400), None, 0) == NOTHING
    assert sealing.next_step(DONE, at(1, 400), None, CATCH_UP_MS - 1) == NOTHING
    assert sealing.next_step(DONE, at(1, 400), None, CATCH_UP_MS).kind is StepKind.FETCH
    assert Sealing("s").next_step(DONE, END, None, 0).kind is StepKind.BUILD
    assert Sealing("s").next_step(DONE, None, None, 0).kind is StepKind.FETCH


def test_own_rows_that_differ_from_the_committed_ones_are_never_installed() -> None:
    sealing = Sealing("s")
    sealing.was_built(built("other"), END)
    assert sealing.next_step(DONE, END, None, 0).kind is StepKind.FETCH
    assert sealing.diverged


def test_what_was_built_for_another_cut_is_built_again() -> None:
    sealing = Sealing("s")
    sealing.was_built(built(), at(2, 800))
    assert sealing.next_step(DONE, END, None, 0).kind is StepKind.BUILD


def test_a_refused_commit_and_any_failure_start_over_with_a_question_after_a_pause() -> None:
    for fail in (
        lambda s: s.commit_answered(CommitEndReply(status=CompletionStatus.FAILED), 0),
        lambda s: s.failed(ASK_AGAIN_MS, 0),
    ):
        sealing = Sealing("s")
        sealing.answered(reply(CompletionStatus.COMMIT), 0)
        sealing.was_built(built(), END)
        fail(sealing)
        assert sealing.next_step(COMMITTING, END, None, 1) == NOTHING
        assert sealing.next_step(COMMITTING, END, None, ASK_AGAIN_MS).kind is StepKind.ASK


def test_without_rows_of_its_own_a_server_asks_nothing_about_an_open_segment() -> None:
    assert Sealing("s").next_step(OPEN, None, None, 0) == NOTHING
