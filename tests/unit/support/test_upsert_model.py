# SPDX-License-Identifier: Apache-2.0
"""The reference model itself: its two ways to the same answer agree, and the small cases are as people say them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.upsert_model import DELETE, INSERT, History, UpsertModel, Version

ROWS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 4), st.none() | st.integers(0, 3), st.booleans(), st.integers(0, 3)),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(rows=ROWS)
def test_step_by_step_is_the_same_as_all_at_once(rows: list[tuple[int, int, int | None, bool, int]]) -> None:
    model = UpsertModel()
    history = History(model, partitions=3)
    next_offset = [0, 0, 0]
    closed: list[tuple[int, ...]] = [(0, 0, 0)]
    for number, (partition, key, comparison, deleted, epoch_after) in enumerate(rows):
        model.apply(partition, next_offset[partition], 0, key, comparison, deleted, value=number)
        next_offset[partition] += 1
        if epoch_after == 0:
            ends = tuple(next_offset)
            assert history.close(len(closed), ends) == model.updates(closed[-1], ends)
            closed.append(ends)
    for epoch, ends in enumerate(closed):
        assert history.at(epoch) == model.at(ends)
        assert history.ends_at(epoch) == (ends if epoch else ())


def test_the_greatest_comparison_wins_whatever_arrives_last() -> None:
    model = UpsertModel()
    model.apply(0, 0, 0, "ada", 10, value="new")
    model.apply(1, 0, 0, "ada", 9, value="late")
    assert model.at((1, 1))["ada"].value == "new"
    assert model.updates((1, 0), (1, 1)) == {}
    model.apply(1, 1, 0, "ada", 10, value="equal, higher partition")
    assert model.at((1, 2))["ada"].value == "equal, higher partition"
    assert model.updates((1, 1), (1, 2)) == {0: {(0, 0, DELETE)}, 1: {(1, 0, INSERT)}}


def test_a_deleted_key_is_hidden_until_a_newer_row_revives_it() -> None:
    model = UpsertModel()
    history = History(model, partitions=1)
    model.apply(0, 0, 0, "ada", 1)
    model.apply(0, 1, 0, "ada", 3, deleted=True)
    model.apply(0, 2, 0, "ada", 2)
    model.apply(0, 3, 0, "ada", 4)
    assert [sorted(model.at((end,))) for end in range(5)] == [[], ["ada"], [], [], ["ada"]]
    assert model.winners((3,))["ada"].deleted
    assert history.close(5, (2,)) == {0: {(1, 0, INSERT)}}
    assert history.close(8, (4,)) == {0: {(1, 0, DELETE), (3, 0, INSERT)}}
    assert history.versions == {
        (0, 0, 0): Version(5, 5), (0, 1, 0): Version(5, 8), (0, 2, 0): Version(8, 8), (0, 3, 0): Version(8, None),
    }  # fmt: skip
    assert (history.at(4), history.at(7), sorted(history.at(8))) == ({}, {}, ["ada"])


def test_a_null_key_is_no_row_and_null_compares_lowest() -> None:
    model = UpsertModel()
    model.apply(0, 0, 0, None, 1)
    model.apply(0, 1, 0, ("ada", 1), (0, 5))
    model.apply(0, 2, 0, ("ada", 1), (None, 9))
    model.apply(0, 3, 0, (0.0, 1), float("nan"))
    model.apply(0, 4, 0, (-0.0, 1), float("inf"))
    assert sorted(row.offset for row in model.at((5,)).values()) == [1, 3]
