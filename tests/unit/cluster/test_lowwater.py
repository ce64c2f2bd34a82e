# SPDX-License-Identifier: Apache-2.0
"""Which epoch a query is answered at: never one that a pair in use would have to guess, never an earlier one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cremant.cluster.lowwater import EPOCH_LAG_MAX, Chosen, LowWater, Marks, Pair, backed, is_void
from cremant.model.cluster import Rewind
from cremant.model.upsert import Cut, Visibility
from cremant.wire.messages import EpochsReply, EpochState


def state(closed: int, partitions: int = 2, horizon: int = 0) -> EpochState:
    return EpochState(closed=closed, horizon=horizon, partitions=partitions)


def reply(**partitions: EpochState) -> EpochsReply:
    """`p0=...`: of the only table, `i`."""
    epochs = {"i": {name[1:]: one for name, one in partitions.items()}} if partitions else {}
    return EpochsReply(instance="", nonce="n", version=1, epochs=epochs)


def epoch_of(marks: Marks, *pairs: Pair) -> int:
    chosen = marks.choose(pairs)
    assert chosen is not None
    return chosen.epoch


def test_the_lowest_of_the_pairs_in_use_counts_and_no_other() -> None:
    marks = Marks({(0, "a"): state(7), (0, "b"): state(3), (1, "a"): state(6), (1, "b"): state(9)})
    assert epoch_of(marks, (0, "a"), (1, "a")) == 6
    assert epoch_of(marks, (0, "a"), (1, "b")) == 7
    assert epoch_of(marks, (0, "b"), (1, "b")) == 3
    assert epoch_of(marks, (0, "a")) == 7


def test_before_the_first_epoch_there_is_nothing() -> None:
    assert Marks({(0, "a"): state(0, 0)}).choose([(0, "a")]) == Chosen(0)


def test_of_pairs_that_nobody_has_heard_of_nothing_is_guessed() -> None:
    assert Marks({(0, "b"): state(4)}).choose([(0, "a")]) is None
    assert Marks({}, least=Chosen(5, 2)).choose([(0, "a")]) == Chosen(5, 2)
    assert Marks({}, as_of=3).choose([(0, "a")]) == Chosen(3)


def test_before_it_had_keys_a_table_is_shown_as_the_append_table_it_was() -> None:
    marks = Marks({(0, "a"): state(7)}, keyed_from=7)
    assert marks.cut(Chosen(6)) == Cut(epoch=6, visibility=Visibility.ALL, unkeyed=True)
    assert marks.cut(Chosen(7)) == Cut(epoch=7, visibility=Visibility.VISIBLE)


def test_who_has_not_heard_of_all_partitions_is_told() -> None:
    low = LowWater()
    low.told("a", reply(p0=state(7, 3), p1=state(5, 2)))
    assert low.lacks("i", Chosen(7, 3), 2)
    assert not low.lacks("i", Chosen(7, 3), 3)
    assert not low.lacks("i", Chosen(5, 2), 2)
    assert low.lacks("i", Chosen(6), 2)  # it had two or three then
    assert not low.lacks("i", Chosen(4), 2)
    assert not low.lacks("i", Chosen(9), 2)  # nobody has said


def test_neither_the_floor_nor_a_token_is_undercut() -> None:
    states = {(0, "a"): state(7)}
    assert Marks(states, least=Chosen(8, 2)).choose([(0, "a")]) == Chosen(8, 2)
    assert Marks(states, least=Chosen(6, 2)).choose([(0, "a")]) == Chosen(7, 2)
    assert epoch_of(Marks(states, least=Chosen(6, 2), as_of=4), (0, "a")) == 4


def test_a_new_partition_does_not_take_the_table_back() -> None:
    grown = {(0, "a"): state(101, 3), (1, "a"): state(101, 3)}
    for new in ({}, {(2, "a"): state(0, 0)}):
        assert Marks(grown | new).choose([(0, "a"), (1, "a"), (2, "a")]) == Chosen(101, 3)
    # Partition 1 has not heard of it: what was closed before is asked without partition 2.
    apart = {(0, "a"): state(101, 3), (1, "a"): state(100, 2), (2, "a"): state(101, 3)}
    chosen = Marks(apart).choose([(0, "a"), (1, "a"), (2, "a")])
    assert chosen == Chosen(100, 2)
    assert chosen is not None
    assert chosen.ignores(2)
    assert not chosen.ignores(1)
    # A new one that is slow, behind a floor from before it came.
    slow = {(0, "a"): state(101, 3), (1, "a"): state(101, 3), (2, "a"): state(50, 0)}
    assert Marks(slow, least=Chosen(100, 2)).choose([(0, "a"), (1, "a"), (2, "a")]) == Chosen(100, 2)


pairs = st.tuples(st.integers(0, 4), st.sampled_from("abc"))


@settings(deadline=None)
@given(
    closed=st.dictionaries(pairs, st.integers(0, 30), min_size=1), growth=st.lists(st.integers(1, 30), max_size=3),
    floor=st.integers(0, 30),
)  # fmt: skip
def test_an_answer_at_l_has_all_partitions_of_l(
    closed: dict[tuple[int, str], int], growth: list[int], floor: int
) -> None:
    """Of a table that grew from two partitions at the epochs `growth`."""

    def count(epoch: int) -> int:
        return 2 + sum(epoch >= at for at in growth) if epoch else 0

    states = {pair: state(epoch, count(epoch)) for pair, epoch in closed.items()}
    chosen = Marks(states, least=Chosen(floor, count(floor))).choose(closed)
    assert chosen is not None
    assert chosen.epoch >= floor
    assert chosen.epoch in {floor, *closed.values()}
    assert chosen.partitions == count(chosen.epoch)
    if chosen.epoch > floor:
        asked = [epoch for (partition, _), epoch in closed.items() if not chosen.ignores(partition)]
        assert all(epoch >= chosen.epoch or epoch == 0 for epoch in asked)


def test_what_a_server_does_not_name_any_more_it_does_not_serve() -> None:
    known = LowWater()
    known.told("a", reply(p0=state(5), p1=state(5)))
    known.told("b", reply(p0=state(5)))
    known.told("a", reply(p1=state(6)))
    assert set(known.states("i")) == {(1, "a"), (0, "b")}
    assert known.knows("i", [0, 1])
    known.gone("b")
    assert set(known.states("i")) == {(1, "a")}
    assert not known.knows("i", [0, 1])
    known.keep(["j"])
    assert known.states("i") == {}


def test_replicas_far_behind_or_below_the_floor_are_not_timely() -> None:
    known = LowWater()
    known.told("a", reply(p0=state(100), p1=state(90)))
    known.told("b", reply(p0=state(100 - EPOCH_LAG_MAX), p1=state(90)))
    known.told("c", reply(p0=state(99 - EPOCH_LAG_MAX), p1=state(91)))
    assert known.timely("i") == {(0, "a"), (0, "b"), (1, "a"), (1, "b"), (1, "c")}
    known.answered("i", Chosen(96, 2))
    # Nobody of partition 1 is there: all of them have to wait, and nobody is better than another.
    assert known.timely("i") == {(0, "a"), (1, "a"), (1, "b"), (1, "c")}
    known.answered("i", Chosen(90, 2))
    assert known.floor("i") == Chosen(96, 2)


def test_a_rewind_makes_epochs_void() -> None:
    rewinds = (Rewind(to_epoch=10, next_epoch=20), Rewind(to_epoch=15, next_epoch=30), Rewind(to_epoch=35))
    assert [backed(epoch, rewinds) for epoch in (9, 10, 11, 15, 19, 20, 29, 30, 35, 36, 99)] == [
        9, 10, 10, 10, 10, 10, 10, 30, 35, 35, 35,
    ]  # fmt: skip
    assert is_void(30, rewinds) is None
    known = LowWater()
    known.told("a", reply(p0=state(40), p1=state(33)))
    known.answered("i", Chosen(40, 2))
    marks = known.marks("i", rewinds)
    assert marks.least == Chosen(35, 2)
    assert epoch_of(marks, (0, "a"), (1, "a")) == 35
    after = (*rewinds[:2], Rewind(to_epoch=35, next_epoch=50))
    known.told("a", reply(p0=state(51), p1=state(52)))
    assert epoch_of(known.marks("i", after), (0, "a"), (1, "a")) == 51
