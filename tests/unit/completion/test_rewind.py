# SPDX-License-Identifier: Apache-2.0
"""Going back to a closed epoch: which segments go, where consumption begins anew, which cuts no longer count."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cremant.completion.rewind import is_taken_back, plan_rewind, without_later
from cremant.model.cluster import PartitionRecord, PipelineRecord, Rewind
from cremant.model.offsets import Position
from cremant.model.segments import SegmentMetadata, SegmentStatus, StoredVersions


def at(epoch: int, *, generation: int = 1) -> Position:
    return Position(log_offset=epoch * 2, epoch=epoch, generation=generation, next_offset=epoch * 10)


def segment(sequence: int, start: int, end: int | None) -> SegmentMetadata:
    return SegmentMetadata(
        name=f"t__0__{sequence}__20260101T0000Z", partition=0, sequence=sequence,
        status=SegmentStatus.IN_PROGRESS if end is None else SegmentStatus.DONE, start_offset=at(start).next_offset,
        start=at(start), created_ms=0, replicas=("s1",), end=None if end is None else at(end),
        end_offset=None if end is None else at(end).next_offset,
    )  # fmt: skip


def partition(segments: list[SegmentMetadata]) -> dict[int, PartitionRecord]:
    last = segments[-1]
    record = PartitionRecord(
        partition=0, consuming=last.name, sequence=last.sequence, replicas=("s1", "s2"), start_offset=0
    )
    return {0: record}


CHAIN = [segment(3, 0, 10), segment(4, 10, 20), segment(5, 20, None)]


@pytest.mark.parametrize(
    ("epoch", "start", "dropped"),
    [(25, 20, [5]), (20, 20, [5]), (19, 10, [4, 5]), (10, 10, [4, 5]), (9, 0, [3, 4, 5]), (0, 0, [3, 4, 5])],
)
def test_the_segment_that_holds_the_epoch_goes_with_all_that_follow(epoch: int, start: int, dropped: list[int]) -> None:
    (plan,) = plan_rewind("t", partition(CHAIN), CHAIN, epoch, 0)
    assert [gone.sequence for gone in plan.dropped] == dropped
    assert (plan.opened.start, plan.opened.start_offset) == (at(start), at(start).next_offset)
    assert (plan.opened.status, plan.opened.end, plan.opened.replicas) == (
        SegmentStatus.IN_PROGRESS,
        None,
        ("s1", "s2"),
    )
    assert (plan.partition.consuming, plan.partition.sequence) == (plan.opened.name, 6), "a name of its own"


def test_what_retention_took_cannot_be_gone_back_to() -> None:
    with pytest.raises(LookupError):
        plan_rewind("t", partition(CHAIN), CHAIN[1:], 9, 0)


@given(
    cuts=st.lists(st.integers(1, 60), min_size=1, max_size=6, unique=True).map(sorted), epoch=st.integers(0, 70),
    again=st.integers(0, 70),
)  # fmt: skip
def test_what_is_left_joins_what_is_opened_also_the_second_time(cuts: list[int], epoch: int, again: int) -> None:
    starts = [0, *cuts]
    chain = [
        segment(number, start, starts[number + 1] if number + 1 < len(starts) else None)
        for number, start in enumerate(starts)
    ]
    for back in (epoch, again):
        (plan,) = plan_rewind("t", partition(chain), chain, back, 0)
        kept = [one for one in chain if one not in plan.dropped]
        assert all(one.end is not None and one.end.epoch <= back for one in kept), "nothing sealed is newer"
        assert plan.opened.start == (kept[-1].end if kept else at(0))
        assert all(one.sequence < plan.opened.sequence for one in chain)
        chain = [*kept, plan.opened]


def test_positions_of_taken_back_epochs_decide_no_cut() -> None:
    pending = PipelineRecord(rewinds=(Rewind(to_epoch=7),))
    assert not is_taken_back(pending, at(7))
    assert is_taken_back(pending, at(8)), "until the Reset is there, who knows"
    done = PipelineRecord(rewinds=(Rewind(to_epoch=7, next_epoch=12, generation=3),))
    assert is_taken_back(done, at(8, generation=2)), "closed before the Reset"
    assert is_taken_back(done, at(11, generation=3)), "rolled forward by the start that wrote the Reset"
    assert not is_taken_back(done, at(12, generation=3))
    assert not is_taken_back(done, at(6, generation=2))
    twice = msgspec.structs.replace(done, rewinds=(*done.rewinds, Rewind(to_epoch=12)))
    assert is_taken_back(twice, at(13, generation=3))
    assert not is_taken_back(twice, at(12, generation=3))


def test_stored_versions_with_updates_that_are_taken_back_are_continued_from_further_back() -> None:
    def versions(epoch: int, position: Position | None = None) -> StoredVersions:
        return StoredVersions(url=f"v{epoch}", position=position or at(epoch), size_bytes=1, file_checksum="sha256:0")

    older, same, later = (msgspec.structs.replace(CHAIN[0], versions=versions(epoch)) for epoch in (11, 12, 13))
    changed = msgspec.structs.replace(later, versions=versions(13, at(9)))
    assert without_later([older, same, later, CHAIN[1]], 12, {0: at(9)}) == [changed]
