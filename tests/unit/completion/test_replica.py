# SPDX-License-Identifier: Apache-2.0
"""A replica's half of segment completion: the conversation by which it completes one segment."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cremant.completion.replica import (
    ASK_AGAIN_MS,
    CATCH_UP_MS,
    FETCHES_BEFORE_BUILD,
    TRANSITIONS,
    Sealing,
    Sight,
    Step,
    StepKind,
    UploadSeen,
    transition_table,
)
from cremant.model.completion import CompletionConfig, CompletionMode, StorePolicy
from cremant.model.limits import BACKOFF_FIRST_MS, BACKOFF_MAX_MS
from cremant.model.offsets import Position
from cremant.model.segments import SegmentMetadata, SegmentStatus, StoreState
from cremant.segment.build import Built
from cremant.segment.cuts import ROW_LIMIT, Cut
from cremant.wire.messages import CommitEndReply, CompletionStatus, SegmentConsumedReply

REQUIRED, BEST_EFFORT, PEERS_ONLY = StorePolicy
DOWNLOAD = CompletionConfig(mode=CompletionMode.DOWNLOAD)
_reached: set[str] = set()


def at(epoch: int, next_offset: int) -> Position:
    return Position(log_offset=10 * epoch, epoch=epoch, generation=1, next_offset=next_offset)


END, BEFORE = at(3, 1200), at(2, 800)
WANTED = Cut(END, ROW_LIMIT)


def metadata(status: SegmentStatus, *, checksum: str | None = None) -> SegmentMetadata:
    decided = status is not SegmentStatus.IN_PROGRESS
    return SegmentMetadata(
        name="t__0__0__x", partition=0, sequence=0, status=status, start_offset=0, start=at(0, 0), created_ms=0,
        replicas=("me",), end=END if decided else None, end_offset=1200 if decided else None, checksum=checksum,
    )  # fmt: skip


OPEN = metadata(SegmentStatus.IN_PROGRESS)
COMMITTING = metadata(SegmentStatus.COMMITTING)
DONE = metadata(SegmentStatus.DONE, checksum="good")


def built(checksum: str = "good") -> Built:
    return Built(Path("x"), 1200, 1, checksum, "f", {}, None, None, None)


def reply(status: CompletionStatus, end: Position | None = END, token: int = 1) -> SegmentConsumedReply:
    return SegmentConsumedReply(status=status, end=end, token=token)


def step(sealing: Sealing, segment: SegmentMetadata, closed: Position | None, now_ms: int = 0, **seen: Any) -> Step:
    found = sealing.next_step(Sight(segment, closed, **seen), now_ms)
    _reached.add(found.rule)
    return found


def kind(*arguments: Any, **seen: Any) -> StepKind:
    return step(*arguments, **seen).kind


def told_to_commit(checksum: str = "good") -> Sealing:
    """Built, and about to commit."""
    sealing = Sealing("s")
    sealing.answered(reply(CompletionStatus.COMMIT), 0)
    sealing.was_built(built(checksum), END)
    return sealing


# --- deciding -----------------------------------------------------------------------------------------------------


def test_the_committer_asks_builds_uploads_commits_and_installs() -> None:
    """nothing -> ASK -> COMMIT -> BUILD -> UPLOAD -> COMMIT -> COMMIT_SUCCESS -> INSTALL"""
    sealing = Sealing("s")
    assert kind(sealing, OPEN, BEFORE) is StepKind.NOTHING
    assert step(sealing, OPEN, END, wanted=WANTED).cut == WANTED
    sealing.answered(reply(CompletionStatus.COMMIT), 0)
    assert kind(sealing, OPEN, END, 1, wanted=WANTED) is StepKind.BUILD
    sealing.was_built(built(), END)
    assert kind(sealing, COMMITTING, END, 2) is StepKind.UPLOAD
    sealing.upload_began(1, 2)
    assert kind(sealing, COMMITTING, END, 3, upload=UploadSeen()) is StepKind.NOTHING
    commit = step(sealing, COMMITTING, END, 4, upload=UploadSeen(url="file:///x"))
    assert commit == Step(
        StepKind.COMMIT, "stored", end=END, token=1, store_state=StoreState.STORED, store_url="file:///x"
    )
    sealing.commit_answered(CommitEndReply(status=CompletionStatus.COMMIT_SUCCESS), 5)
    assert kind(sealing, COMMITTING, END, 6) is StepKind.INSTALL


def test_a_follower_builds_the_decided_cut_and_installs_once_the_metadata_agrees() -> None:
    """ASK -> HOLD with the cut -> BUILD -> asks on -> DONE, same checksum -> INSTALL"""
    sealing = Sealing("s")
    sealing.answered(reply(CompletionStatus.HOLD), 0)
    assert kind(sealing, COMMITTING, END, 1) is StepKind.BUILD
    sealing.was_built(built(), END)
    assert kind(sealing, COMMITTING, END, 1) is StepKind.NOTHING
    assert kind(sealing, COMMITTING, END, ASK_AGAIN_MS) is StepKind.ASK
    assert kind(sealing, DONE, END, ASK_AGAIN_MS) is StepKind.INSTALL


def test_a_follower_takes_over_when_the_lease_of_the_committer_lapses() -> None:
    sealing = Sealing("s")
    sealing.answered(reply(CompletionStatus.HOLD), 0)
    sealing.was_built(built(), END)
    sealing.answered(reply(CompletionStatus.COMMIT, token=2), 600)
    taken = step(sealing, COMMITTING, END, 601)
    assert (taken.kind, taken.token) == (StepKind.UPLOAD, 2)


def test_a_replica_behind_the_cut_reads_on_before_it_asks_or_builds() -> None:
    sealing = Sealing("s")
    sealing.answered(reply(CompletionStatus.CATCH_UP), 0)
    assert kind(sealing, COMMITTING, BEFORE, 10_000) is StepKind.NOTHING
    assert kind(sealing, COMMITTING, END, 10_000) is StepKind.ASK
    sealing.answered(reply(CompletionStatus.KEEP), 10_000)
    assert kind(sealing, COMMITTING, END, 10_001) is StepKind.BUILD


def test_a_refused_commit_and_a_failed_step_start_over_with_a_question_after_a_pause() -> None:
    for fail in (
        lambda s: s.commit_answered(CommitEndReply(status=CompletionStatus.FAILED), 0),
        lambda s: s.failed(StepKind.COMMIT, ASK_AGAIN_MS, 0),
    ):
        sealing = told_to_commit()
        fail(sealing)
        assert kind(sealing, COMMITTING, END, 1) is StepKind.NOTHING
        assert kind(sealing, COMMITTING, END, ASK_AGAIN_MS) is StepKind.ASK


def test_without_rows_of_its_own_a_server_asks_nothing_about_an_open_segment() -> None:
    assert kind(Sealing("s"), OPEN, None) is StepKind.NOTHING


# --- what a commit waits for --------------------------------------------------------------------------------------


def test_with_peers_only_a_commit_waits_for_nothing_and_uploads_nothing() -> None:
    commit = step(told_to_commit(), COMMITTING, END, policy=PEERS_ONLY)
    assert (commit.kind, commit.store_state, commit.store_url) == (StepKind.COMMIT, StoreState.NONE, None)


def test_by_best_effort_a_commit_waits_for_its_upload_for_so_long_and_goes_on() -> None:
    seen = {"policy": BEST_EFFORT, "completion": CompletionConfig(upload_wait_ms=2_000)}
    sealing = told_to_commit()
    assert kind(sealing, COMMITTING, END, 100, **seen) is StepKind.UPLOAD
    sealing.upload_began(1, 100)
    assert kind(sealing, COMMITTING, END, 2_099, upload=UploadSeen(), **seen) is StepKind.NOTHING
    landed = step(sealing, COMMITTING, END, 2_099, upload=UploadSeen(url="file:///x"), **seen)
    assert (landed.kind, landed.store_state) == (StepKind.COMMIT, StoreState.STORED)
    late = step(sealing, COMMITTING, END, 2_100, upload=UploadSeen(), **seen)
    assert (late.kind, late.store_state) == (StepKind.COMMIT, StoreState.PENDING)
    failed = step(sealing, COMMITTING, END, 101, upload=UploadSeen(error="no route"), **seen)
    assert (failed.kind, failed.store_state, failed.store_error) == (StepKind.COMMIT, StoreState.FAILED, "no route")


def test_by_best_effort_nobody_waits_for_a_store_that_is_not_known_to_work() -> None:
    sealing = told_to_commit()
    sealing.upload_began(1, 0)
    commit = step(sealing, COMMITTING, END, 1, policy=BEST_EFFORT, upload=UploadSeen(hurried=True))
    assert (commit.kind, commit.store_state) == (StepKind.COMMIT, StoreState.PENDING)


def test_where_the_store_is_required_a_failed_upload_is_repeated_with_growing_pauses() -> None:
    sealing, now_ms, pauses = told_to_commit(), 0, []
    for _ in range(9):
        sealing.upload_began(1, now_ms)
        began_ms = now_ms
        while kind(sealing, COMMITTING, END, now_ms, upload=UploadSeen(error="no route", hurried=True)) is (
            StepKind.NOTHING
        ):
            now_ms += 50
        pauses.append(now_ms - began_ms)
        assert kind(sealing, COMMITTING, END, now_ms, upload=UploadSeen(error="no route")) is StepKind.UPLOAD
    assert pauses == [min(BACKOFF_MAX_MS, BACKOFF_FIRST_MS * 2**n) for n in range(9)]


def test_a_policy_that_changes_counts_at_once() -> None:
    """An upload that nobody waits for any longer, and one that a commit waits for from now on."""
    sealing = told_to_commit()
    sealing.upload_began(1, 0)
    down = UploadSeen(error="no route")
    assert kind(sealing, COMMITTING, END, 1, policy=REQUIRED, upload=down) is StepKind.NOTHING
    assert kind(sealing, COMMITTING, END, 1, policy=BEST_EFFORT, upload=down) is StepKind.COMMIT
    assert step(sealing, COMMITTING, END, 1, policy=PEERS_ONLY, upload=down).store_state is StoreState.NONE
    assert kind(told_to_commit(), COMMITTING, END, 1, policy=REQUIRED) is StepKind.UPLOAD


def test_each_attempt_to_commit_has_an_upload_of_its_own() -> None:
    sealing = told_to_commit()
    sealing.upload_began(1, 0)
    sealing.answered(reply(CompletionStatus.COMMIT, token=3), 1)
    again = step(sealing, COMMITTING, END, 2, upload=UploadSeen(url="file:///of-token-1"))
    assert (again.kind, again.token) == (StepKind.UPLOAD, 3)


def test_an_attempt_that_fails_where_an_earlier_one_failed_shows_no_progress() -> None:
    sealing = Sealing("s")
    sealing.answered(reply(CompletionStatus.COMMIT), 0)
    shown = []
    for _ in range(3):
        sealing.building.begin()
        for _ in range(5):
            sealing.building.step()
        shown.append(sealing.progress)
    assert shown == [5, 5, 5]
    sealing.answered(reply(CompletionStatus.COMMIT, token=3), 0)
    assert sealing.progress == 0  # another lease: whatever it does next counts


# --- once it is DONE ----------------------------------------------------------------------------------------------


def test_a_replica_far_behind_fetches_the_segment_and_reads_on_without_a_deadline() -> None:
    """Whichever works first."""
    sealing = Sealing("s")
    assert kind(sealing, DONE, BEFORE, 0, has_source=True) is StepKind.NOTHING
    assert kind(sealing, DONE, BEFORE, CATCH_UP_MS - 1, has_source=True) is StepKind.NOTHING
    assert kind(sealing, DONE, BEFORE, CATCH_UP_MS, has_source=False) is StepKind.NOTHING
    assert kind(sealing, DONE, BEFORE, CATCH_UP_MS, has_source=True) is StepKind.FETCH
    assert kind(sealing, DONE, BEFORE, CATCH_UP_MS, has_source=True, fetching=True) is StepKind.NOTHING
    sealing.failed(StepKind.FETCH, 60_000, CATCH_UP_MS)
    assert kind(sealing, DONE, BEFORE, CATCH_UP_MS + 59_999, has_source=True) is StepKind.NOTHING
    assert kind(sealing, DONE, END, CATCH_UP_MS + 1, has_source=True) is StepKind.BUILD
    assert kind(sealing, DONE, END, CATCH_UP_MS + 1, has_source=True, fetching=True) is StepKind.BUILD


def test_a_replica_without_the_rows_fetches_at_once() -> None:
    sealing = Sealing("s")
    assert kind(sealing, DONE, None) is StepKind.FETCH
    assert kind(sealing, DONE, None, fetching=True) is StepKind.NOTHING
    sealing.failed(StepKind.FETCH, 1_000, 0)
    assert kind(sealing, DONE, None, 999) is StepKind.NOTHING
    assert kind(sealing, DONE, None, 1_000) is StepKind.FETCH


def test_what_cannot_be_built_for_now_is_fetched_or_built_later() -> None:
    sealing = Sealing("s")
    assert kind(sealing, DONE, END) is StepKind.BUILD
    sealing.failed(StepKind.BUILD, 1_000, 0)
    assert kind(sealing, DONE, END, 1) is StepKind.NOTHING
    assert kind(sealing, DONE, END, 1, has_source=True) is StepKind.FETCH
    assert kind(sealing, DONE, END, 1_000, has_source=True) is StepKind.BUILD


def test_own_rows_that_differ_from_the_committed_ones_are_never_installed() -> None:
    sealing = Sealing("s")
    sealing.was_built(built("other"), END)
    assert kind(sealing, DONE, END) is StepKind.FETCH
    assert sealing.diverged


def test_what_was_built_for_another_cut_is_built_again() -> None:
    sealing = Sealing("s")
    sealing.was_built(built(), BEFORE)
    assert kind(sealing, DONE, END) is StepKind.BUILD


def test_an_install_that_failed_begins_with_a_build_or_a_fetch() -> None:
    sealing = told_to_commit()
    sealing.commit_answered(CommitEndReply(status=CompletionStatus.COMMIT_SUCCESS), 0)
    assert kind(sealing, DONE, END) is StepKind.INSTALL
    sealing.failed(StepKind.INSTALL, 1_000, 0)
    assert kind(sealing, DONE, END, 999) is StepKind.NOTHING
    assert kind(sealing, DONE, END, 1_000) is StepKind.BUILD


# --- DOWNLOAD -----------------------------------------------------------------------------------------------------


def test_in_download_mode_followers_do_not_build_and_fetch_as_soon_as_somebody_has_it() -> None:
    sealing = Sealing("s")
    sealing.answered(reply(CompletionStatus.HOLD), 0)
    assert kind(sealing, COMMITTING, END, 1, completion=DOWNLOAD) is StepKind.NOTHING
    assert kind(sealing, DONE, END, 2, completion=DOWNLOAD, has_source=True) is StepKind.FETCH
    assert kind(sealing, DONE, BEFORE, 2, completion=DOWNLOAD, has_source=True) is StepKind.FETCH


def test_in_download_mode_the_committer_builds_whoever_it_is() -> None:
    sealing = Sealing("s")
    sealing.answered(reply(CompletionStatus.HOLD), 0)
    sealing.answered(reply(CompletionStatus.COMMIT, token=2), 600)
    assert kind(sealing, COMMITTING, END, 601, completion=DOWNLOAD) is StepKind.BUILD


@pytest.mark.parametrize("answer", [None, CompletionStatus.KEEP])
def test_in_download_mode_a_committer_whose_reply_was_lost_keeps_what_it_built(answer: CompletionStatus | None) -> None:
    sealing = told_to_commit()
    sealing.failed(StepKind.COMMIT, 100, 0)
    if answer is not None:
        sealing.answered(reply(answer), 200)
    assert kind(sealing, DONE, END, 201, completion=DOWNLOAD, has_source=True) is StepKind.INSTALL


def test_in_download_mode_a_replica_that_has_the_rows_builds_when_fetching_fails_and_fails() -> None:
    sealing = Sealing("s")
    for attempt in range(FETCHES_BEFORE_BUILD):
        assert kind(sealing, DONE, END, attempt * 10, completion=DOWNLOAD, has_source=True) is StepKind.FETCH
        sealing.failed(StepKind.FETCH, 10, attempt * 10)
        between = kind(sealing, DONE, END, attempt * 10 + 1, completion=DOWNLOAD, has_source=True)
    assert between is StepKind.BUILD
    assert kind(Sealing("s"), DONE, END, 0, completion=DOWNLOAD, has_source=False) is StepKind.BUILD


# --- the table ----------------------------------------------------------------------------------------------------


def test_a_segment_that_others_have_compacted_is_fetched_whatever_the_tail_has() -> None:
    """built as committed once, and not installed before its rows went -> FETCH, and that is no divergence"""
    sealing = told_to_commit("as it was")
    compacted = msgspec.structs.replace(DONE, compacted_at=7)
    assert step(sealing, compacted, END).rule == "compacted"
    assert kind(sealing, compacted, END) is StepKind.FETCH
    assert not sealing.diverged


def test_every_row_of_the_table_is_reached_and_printed() -> None:
    for name, case in sorted(globals().items()):
        standalone = name.startswith("test_") and case is not test_every_row_of_the_table_is_reached_and_printed
        if standalone and not inspect.signature(case).parameters:
            case()
    assert {row[0] for row in TRANSITIONS} == _reached
    assert len(transition_table().splitlines()) == len(TRANSITIONS) + 2
