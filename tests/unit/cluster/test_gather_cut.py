# SPDX-License-Identifier: Apache-2.0
"""Gather on upsert tables: one cut for all parts of a query, whatever servers do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from small_tables import opened, sealed, table, view

from cremant.cluster.gather import Gather
from cremant.cluster.gather_messages import Answered, Done, Effect, Failed, Refresh, Refreshed, Send, Started
from cremant.cluster.lowwater import Chosen, Marks, Pair
from cremant.cluster.parts import Part, parts_of
from cremant.cluster.routing import Routes, Wishes
from cremant.model.cluster import TableView
from cremant.model.offsets import OffsetRange, Watermark
from cremant.model.query_codes import QueryCode
from cremant.model.upsert import Cut, Visibility
from cremant.wire.messages import EpochState, PartitionAnswer, ServerAnswer

DEADLINE_MS = 1_000.0
MARK = Watermark(next_offset=9, epoch=7)
LIVE = ("s1", "s2", "s3")


def marks(closed: Mapping[Pair, int], partitions: int = 2, **more: Any) -> Marks:
    states = {pair: EpochState(closed=epoch, partitions=partitions) for pair, epoch in closed.items()}
    return Marks(states, frozenset(states), **more)


def gather_of(of: TableView, known: Marks, **more: Any) -> Gather:
    wishes = Wishes(together=False, timely=known.timely)
    return Gather(
        Routes(view(of, live=LIVE), of), parts_of(of).needed, DEADLINE_MS, wishes=wishes, marks=lambda: known, **more
    )


def asks(effects: list[Effect]) -> list[Send]:
    return [effect for effect in effects if isinstance(effect, Send)]


def full(send: Send, **fields: Any) -> Answered:
    out = {*fields.get("behind_partitions", ()), *fields.get("refused_partitions", ())}
    tails = tuple(
        PartitionAnswer(
            partition=part.partition, covered=OffsetRange(0, 9), watermark=Watermark(next_offset=9, epoch=7)
        )
        for part in send.ask.parts
        if not part.segment and part.partition not in out
    )
    return Answered(send.ask_id, ServerAnswer(instance=send.ask.server, partitions=tails, **fields), send.ask.parts)


def two_tails() -> TableView:
    """Partition 0 prefers s1, partition 1 prefers s2; both replicate both."""
    return table((opened(0, 0, 0), opened(1, 0, 0)))


def test_the_cut_is_the_lowest_of_the_pairs_that_are_asked() -> None:
    known = marks({(0, "s1"): 7, (1, "s2"): 6, (1, "s1"): 2, (0, "s2"): 2}, visibility=Visibility.ALL)
    gather = gather_of(two_tails(), known)
    sent = asks(gather.step(Started(), 0))
    assert {send.ask.server for send in sent} == {"s1", "s2"}
    assert gather.cut == Cut(epoch=6, visibility=Visibility.ALL)
    for send in sent:
        gather.step(full(send), 5)
    assert gather.done
    assert not gather.exceptions
    assert gather.chosen == Chosen(6, 2)


def test_a_retry_asks_at_the_same_cut_though_more_is_closed_by_now() -> None:
    known = {"now": marks({(0, "s1"): 7, (1, "s2"): 6})}
    gather = gather_of(two_tails(), known["now"])
    gather.marks = lambda: known["now"]
    one, two = asks(gather.step(Started(), 0))
    known["now"] = marks({(number, server): 9 for number in (0, 1) for server in ("s1", "s2")})
    (again,) = asks(gather.step(Failed(one.ask_id, "gone"), 5))
    assert gather.cut == Cut(epoch=6)
    gather.step(full(two), 6)
    assert gather.step(full(again), 7) == [Done()]
    assert gather.cut == Cut(epoch=6)


def test_of_a_partition_that_is_behind_no_part_is_settled() -> None:
    """Its sealed segment, too, is asked of another replica: half of a partition at a cut is nothing."""
    of = table((opened(0, 1, 10), opened(1, 0, 0)), (sealed(0, 0, 0, 10),))
    gather = gather_of(of, marks({(number, server): 5 for number in (0, 1) for server in ("s1", "s2")}))
    sent = {send.ask.server: send for send in asks(gather.step(Started(), 0))}
    first = next(send for send in sent.values() if Part(0, 10) in send.ask.parts)
    more = asks(gather.step(full(first, behind_partitions=(0,)), 5))
    lost = {part for part in first.ask.parts if part.partition == 0}
    assert {part for send in more for part in send.ask.parts} == lost
    assert all(send.ask.server != first.ask.server for send in more)


def test_nothing_is_asked_while_nobody_has_said_what_is_closed() -> None:
    known: dict[str, Marks] = {"now": marks({})}
    of = two_tails()
    gather = Gather(
        Routes(view(of, live=LIVE), of), parts_of(of).needed, DEADLINE_MS, wishes=Wishes(), marks=lambda: known["now"]
    )
    effects = gather.step(Started(), 0)
    assert not asks(effects)
    assert any(isinstance(effect, Refresh) for effect in effects)
    assert gather.cut is None
    known["now"] = marks({(0, "s1"): 4, (1, "s1"): 4})
    (send,) = asks(gather.step(Refreshed(gather.routes.view), 50))
    assert gather.cut == Cut(epoch=4)
    assert gather.step(full(send), 60) == [Done()]


def test_without_any_word_the_answer_says_so_instead_of_showing_all_versions() -> None:
    gather = gather_of(two_tails(), marks({}))
    gather.step(Started(), 0)
    assert not asks(gather.step(Refreshed(gather.routes.view), 50))
    assert gather.done
    (exception,) = gather.exceptions
    assert exception.code == QueryCode.BROKER_SEGMENT_UNAVAILABLE
    assert "has not said which epochs are closed" in exception.message


def test_partitions_that_came_after_the_cut_are_not_asked() -> None:
    of = table((opened(0, 0, 0), opened(1, 0, 0), opened(2, 0, 0)))
    known = marks({(0, "s1"): 7, (1, "s2"): 7}, partitions=2)
    gather = gather_of(of, known)
    sent = asks(gather.step(Started(), 0))
    assert {part.partition for send in sent for part in send.ask.parts} == {0, 1}
    for send in sent:
        gather.step(full(send), 5)
    assert gather.done
    assert not gather.exceptions


def refused_everywhere(gather: Gather) -> None:
    pending = asks(gather.step(Started(), 0))
    while pending and not gather.done:
        send = pending.pop()
        partitions = tuple({part.partition for part in send.ask.parts})
        effects = gather.step(full(send, refused_partitions=partitions, horizon=12), 5)
        pending += asks(effects)
        if any(isinstance(effect, Refresh) for effect in effects):
            pending += asks(gather.step(Refreshed(gather.routes.view), 60))


def test_a_cut_that_nobody_knows_any_more_makes_the_query_begin_anew() -> None:
    gather = gather_of(two_tails(), marks({(0, "s1"): 7, (1, "s2"): 6}), may_restart=True)
    refused_everywhere(gather)
    assert gather.done
    assert gather.stale
    assert not gather.answers


def test_an_epoch_that_was_asked_for_is_refused_with_the_oldest_that_is_known() -> None:
    gather = gather_of(two_tails(), marks({(0, "s1"): 70, (1, "s2"): 70}, as_of=5))
    refused_everywhere(gather)
    assert gather.done
    assert not gather.stale
    (exception,) = gather.exceptions
    assert exception.code == QueryCode.QUERY_VALIDATION
    assert "asOfEpoch 5" in exception.message
    assert "12" in exception.message


def test_replicas_that_are_not_timely_are_asked_last() -> None:
    known = marks({(0, "s2"): 7, (1, "s2"): 7})
    gather = gather_of(two_tails(), known)
    (send,) = asks(gather.step(Started(), 0))
    assert send.ask.server == "s2"
    (again,) = asks(gather.step(Failed(send.ask_id, "gone"), 5))
    assert again.ask.server == "s1"
    assert gather.cut == Cut(epoch=7)


said = st.sampled_from(["full", "behind", "refused", "failed"])


@settings(deadline=None)
@given(data=st.data(), restart=st.booleans())
def test_whatever_servers_do_each_part_is_settled_once_at_one_cut(data: st.DataObject, restart: bool) -> None:
    of = table(
        (opened(0, 2, 20), opened(1, 1, 5), opened(2, 0, 0)),
        (sealed(0, 0, 0, 10), sealed(0, 1, 10, 20), sealed(1, 0, 0, 5)),
    )
    pairs = [(number, server) for number in range(3) for server in ("s1", "s2")]
    closed = {pair: data.draw(st.integers(1, 5)) for pair in pairs}
    gather = gather_of(of, marks(closed, partitions=3), may_restart=restart)
    cuts = set()
    pending: list[Effect] = gather.step(Started(), 0)
    while pending and not gather.done:
        effect = pending.pop(0)
        match effect:
            case Send():
                cuts.add(gather.cut)
                word = data.draw(said)
                partition = effect.ask.parts[data.draw(st.integers(0, len(effect.ask.parts) - 1))].partition
                if word == "failed":
                    pending += gather.step(Failed(effect.ask_id, "gone"), 1)
                elif word == "full":
                    pending += gather.step(full(effect), 1)
                else:
                    pending += gather.step(full(effect, **{f"{word}_partitions": (partition,), "horizon": 3}), 1)
            case Refresh():
                pending += gather.step(Refreshed(gather.routes.view), 50)
    assert gather.done
    assert len(cuts) == 1
    settled = [part for answer, parts in gather.answers for part in _settled(answer, parts)]
    assert len(settled) == len(set(settled))
    if not gather.exceptions:
        assert set(settled) == set(gather.parts)


def _settled(answer: ServerAnswer, parts: tuple[Part, ...]) -> list[Part]:
    out = {*answer.behind_partitions, *answer.refused_partitions}
    return [part for part in parts if part.partition not in out]
