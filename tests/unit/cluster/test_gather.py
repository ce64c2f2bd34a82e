# SPDX-License-Identifier: Apache-2.0
"""Gather: whatever servers do, each part is settled once or named, and the end comes in time.

The conversations below are the rules one by one; the property at the end draws the servers' behaviour from dice.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tables import opened, report, sealed, table, view

from cremant.cluster.gather import Gather
from cremant.cluster.gather_messages import (
    Answered,
    Cancel,
    Done,
    Effect,
    Event,
    Failed,
    Probe,
    Refresh,
    Refreshed,
    Send,
    Started,
    Suspected,
    Wake,
    Woke,
)
from cremant.cluster.parts import Part, parts_of
from cremant.cluster.routing import Routes, Wishes
from cremant.model.cluster import ClusterView, TableView
from cremant.model.offsets import OffsetRange, Watermark
from cremant.model.query_codes import QueryCode
from cremant.model.segments import Loss, ReplicaState
from cremant.wire.messages import PartitionAnswer, ServerAnswer

DEADLINE_MS = 1_000.0
SPREAD = Wishes(together=False)


def gather_of(of: TableView, live: tuple[str, ...] = ("s1", "s2", "s3"), **more: Any) -> Gather:
    return Gather(Routes(view(of, live=live), of), parts_of(of).needed, DEADLINE_MS, **{"wishes": SPREAD, **more})


def answer(server: str, **fields: Any) -> ServerAnswer:
    return ServerAnswer(instance=server, **fields)


def sends(effects: list[Effect]) -> dict[str, Send]:
    return {effect.ask.server: effect for effect in effects if isinstance(effect, Send)}


def codes(gather: Gather) -> list[int]:
    return [exception.code for exception in gather.exceptions]


def two_tails() -> TableView:
    """Partition 0 prefers s1, partition 1 prefers s2; both replicate both."""
    return table((opened(0, 0, 0), opened(1, 0, 0)))


def test_all_servers_answer_and_the_answer_is_complete() -> None:
    gather = gather_of(two_tails())
    asked = sends(gather.step(Started(), 0))
    assert set(asked) == {"s1", "s2"}
    assert gather.step(Answered(asked["s1"].ask_id, answer("s1"), "rows 1"), 10) == []
    assert gather.step(Answered(asked["s2"].ask_id, answer("s2"), "rows 2"), 20) == [Done()]
    assert [payload for _, payload in gather.answers] == ["rows 1", "rows 2"]
    assert (gather.exceptions, gather.asked, gather.responded) == ([], {"s1", "s2"}, {"s1", "s2"})


def test_parts_of_a_failed_server_are_asked_of_another_and_it_does_not_count() -> None:
    gather = gather_of(two_tails())
    asked = sends(gather.step(Started(), 0))
    again = sends(gather.step(Failed(asked["s1"].ask_id, "refused"), 5))
    assert [part.partition for part in again["s2"].ask.parts] == [0]
    gather.step(Answered(asked["s2"].ask_id, answer("s2"), None), 10)
    assert Done() in gather.step(Answered(again["s2"].ask_id, answer("s2"), None), 11)
    assert (gather.exceptions, gather.asked, gather.responded) == ([], {"s2"}, {"s2"})


def test_what_a_server_is_missing_is_asked_of_another() -> None:
    of = table((opened(0, 1, 10),), (sealed(0, 0, 0, 10),))
    gather = gather_of(of)
    (send,) = sends(gather.step(Started(), 0)).values()
    first = send.ask.server
    partly = answer(first, missing_segments=("t__0__0__x",))
    (again,) = sends(gather.step(Answered(send.ask_id, partly, "tail"), 5)).values()
    assert again.ask.server != first
    assert again.ask.segments == ("t__0__0__x",)
    assert again.ask.tails({}) == ()
    gather.step(Answered(again.ask_id, answer(again.ask.server), "segment"), 9)
    assert [payload for _, payload in gather.answers] == ["tail", "segment"]
    assert gather.exceptions == []


def test_when_all_replicas_are_behind_the_newest_view_is_tried_once_and_then_it_is_said() -> None:
    of = table((opened(0, 0, 0),))
    gather = gather_of(of)
    now_ms = 0.0
    effects = gather.step(Started(), now_ms)
    rounds = 0
    while sends(effects):
        (send,) = sends(effects).values()
        now_ms += 5
        effects = gather.step(Answered(send.ask_id, answer(send.ask.server, behind_partitions=(0,)), None), now_ms)
        for refresh in [effect for effect in effects if isinstance(effect, Refresh)]:
            assert refresh.at_ms > now_ms
            rounds += 1
            effects = gather.step(Refreshed(gather.routes.view), refresh.at_ms)
    assert (rounds, gather.done) == (1, True)
    assert codes(gather) == [QueryCode.BROKER_SEGMENT_UNAVAILABLE]
    assert "t__0__0__x" in gather.exceptions[0].message


def test_a_tail_sealed_meanwhile_is_found_under_the_newest_view() -> None:
    gather = gather_of(table((opened(0, 0, 0, replicas=("s1",)),)))
    (send,) = sends(gather.step(Started(), 0)).values()
    effects = gather.step(Answered(send.ask_id, answer("s1", behind_partitions=(0,)), None), 5)
    (refresh,) = [effect for effect in effects if isinstance(effect, Refresh)]
    newer = table(
        (opened(0, 1, 20, replicas=("s3",)),), (sealed(0, 0, 0, 20, replicas=("s2",)),)
    )  # fmt: skip
    again = sends(gather.step(Refreshed(view(newer, version=2)), refresh.at_ms))
    assert again["s2"].ask.segments == ("t__0__0__x",)
    assert [tail.from_offset for tail in again["s3"].ask.tails({})] == [20]
    gather.step(Answered(again["s2"].ask_id, answer("s2"), None), 60)
    gather.step(Answered(again["s3"].ask_id, answer("s3"), None), 61)
    assert (gather.done, gather.exceptions) == (True, [])


def test_after_half_of_the_time_a_silent_server_has_a_rival_and_the_loser_is_cancelled() -> None:
    gather = gather_of(table((opened(0, 0, 0),)))
    (send,) = sends(gather.step(Started(), 0)).values()
    (rival,) = sends(gather.step(Woke(), DEADLINE_MS / 2)).values()
    assert rival.ask.server != send.ask.server
    effects = gather.step(Answered(rival.ask_id, answer(rival.ask.server), "in time"), 502)
    assert effects == [Cancel(send.ask_id, send.ask, lost=True), Done()]
    assert gather.step(Answered(send.ask_id, answer(send.ask.server), "late"), 503) == []
    assert [payload for _, payload in gather.answers] == ["in time"]
    assert (gather.asked, gather.responded) == ({rival.ask.server}, {rival.ask.server})


def test_at_the_deadline_silent_servers_are_named() -> None:
    gather = gather_of(table((opened(0, 0, 0, replicas=("s1",)), opened(1, 0, 0, replicas=("s2",)))))
    asked = sends(gather.step(Started(), 0))
    gather.step(Answered(asked["s2"].ask_id, answer("s2"), None), 1)
    assert gather.step(Woke(), DEADLINE_MS) == [Cancel(asked["s1"].ask_id, asked["s1"].ask, lost=False), Done()]
    assert codes(gather) == [QueryCode.SERVER_NOT_RESPONDING]
    assert gather.exceptions[0].message == "1 servers [s1] not responded (s1: no answer in time)"
    assert (gather.asked, gather.responded) == ({"s1", "s2"}, {"s2"})


def test_an_error_of_the_query_itself_is_not_retried() -> None:
    gather = gather_of(table((opened(0, 0, 0),)))
    (send,) = sends(gather.step(Started(), 0)).values()
    failed = answer(send.ask.server, error_code=245, error="too large", behind_partitions=(0,))
    assert gather.step(Answered(send.ask_id, failed, None), 1) == [Done()]
    assert codes(gather) == [245]


@pytest.mark.parametrize("code", [210, 211, 230, 240])
def test_an_error_of_the_server_is_retried_elsewhere(code: int) -> None:
    gather = gather_of(table((opened(0, 0, 0),)))
    (send,) = sends(gather.step(Started(), 0)).values()
    (again,) = sends(
        gather.step(Answered(send.ask_id, answer(send.ask.server, error_code=code, error="x"), None), 1)
    ).values()
    assert again.ask.server != send.ask.server


def test_a_table_without_a_live_server_says_which_segments_are_unavailable() -> None:
    gather = gather_of(table((opened(0, 1, 10),), (sealed(0, 0, 0, 10),)), live=())
    effects = gather.step(Started(), 0)
    (refresh,) = [effect for effect in effects if isinstance(effect, Refresh)]
    assert Done() in gather.step(Refreshed(gather.routes.view), refresh.at_ms)
    assert codes(gather) == [QueryCode.BROKER_SEGMENT_UNAVAILABLE]
    assert gather.asked == set()


def test_servers_have_less_time_than_the_broker() -> None:
    gather = gather_of(table((opened(0, 0, 0),)))
    (send,) = sends(gather.step(Started(), 400.0)).values()
    assert 500 < send.budget_ms < 600


# --- races ---


def two_replicas(*partitions: int) -> TableView:
    """Both replicas able, at the same place."""
    tails = {str(partition): {"s1": report(partition, 10), "s2": report(partition, 10)} for partition in partitions}
    return table(tuple(opened(partition, 0, 0) for partition in partitions), tails=tails)


def racing(of: TableView, **more: Any) -> tuple[Gather, Send, dict[str, Send]]:
    """A gather whose only request took longer than usual: the request, and its rivals."""
    wishes = Wishes(together=True)
    gather = gather_of(of, wishes=wishes, hedge_after_ms=50.0, **{"may_hedge": lambda: True, **more})
    (send,) = sends(gather.step(Started(), 0)).values()
    return gather, send, sends(gather.step(Woke(), 50))


def test_a_request_that_takes_longer_than_usual_is_asked_of_another_replica_too() -> None:
    _, send, rivals = racing(two_replicas(0, 1))
    (rival,) = rivals.values()
    assert rival.ask.server != send.ask.server
    assert set(rival.ask.parts) == set(send.ask.parts)


def test_without_budget_the_server_is_asked_whether_it_lives_and_a_rival_comes_after_half_of_the_time() -> None:
    gather = gather_of(two_replicas(0), wishes=Wishes(together=True), hedge_after_ms=50.0)
    (send,) = sends(gather.step(Started(), 0)).values()
    assert gather.step(Woke(), 50) == [Probe(send.ask), Wake(500.0)]
    assert gather.step(Woke(), 499) == []
    (rival,) = sends(gather.step(Woke(), 500)).values()
    assert rival.ask.server != send.ask.server


def test_replicas_that_are_behind_or_suspect_are_no_early_rivals() -> None:
    behind = table((opened(0, 0, 0),), tails={"0": {"s1": report(0, 90_000), "s2": report(0, 10)}})
    assert racing(behind)[2] == {}
    of = two_replicas(0)
    first = racing(of)[1].ask.server
    other = "s2" if first == "s1" else "s1"
    assert racing(of, suspects=frozenset({other}))[2] == {}


def test_the_request_itself_may_win_and_then_its_rivals_are_cancelled() -> None:
    gather, send, rivals = racing(two_replicas(0, 1))
    (rival,) = rivals.values()
    effects = gather.step(Answered(send.ask_id, answer(send.ask.server), "first"), 60)
    assert effects == [Cancel(rival.ask_id, rival.ask, lost=False), Done()]
    assert [payload for _, payload in gather.answers] == ["first"]


def test_when_the_request_fails_its_rival_runs_on_for_itself() -> None:
    gather, send, rivals = racing(two_replicas(0, 1))
    (rival,) = rivals.values()
    assert sends(gather.step(Failed(send.ask_id, "refused"), 60)) == {}
    assert gather.step(Answered(rival.ask_id, answer(rival.ask.server), "rival"), 70) == [Done()]
    assert ([payload for _, payload in gather.answers], gather.exceptions) == (["rival"], [])


def test_who_failed_is_not_asked_again_when_the_rival_that_ran_on_fails_too() -> None:
    gather, send, rivals = racing(two_replicas(0))
    (rival,) = rivals.values()
    gather.step(Failed(send.ask_id, "refused"), 60)
    assert gather.step(Failed(rival.ask_id, "refused"), 70) == [Refresh(120.0)], "nobody is left on this view"


def test_of_a_partly_answered_request_the_rest_is_not_taken_from_a_rival_that_has_more() -> None:
    """The rival's rows include those that are settled already."""
    gather, send, rivals = racing(two_replicas(0, 1))
    (rival,) = rivals.values()
    partly = answer(send.ask.server, behind_partitions=(1,))
    effects = gather.step(Answered(send.ask_id, partly, "partition 0"), 60)
    assert Cancel(rival.ask_id, rival.ask, lost=False) in effects
    (again,) = sends(effects).values()
    assert [part.partition for part in again.ask.parts] == [1]
    assert gather.step(Answered(rival.ask_id, answer(rival.ask.server), "both"), 61) == []
    assert gather.step(Answered(again.ask_id, answer(again.ask.server), "partition 1"), 62) == [Done()]
    assert [payload for _, payload in gather.answers] == ["partition 0", "partition 1"]


def test_rivals_win_only_together_and_count_at_the_deadline_as_far_as_they_are() -> None:
    """Partition 0 is on s1 and s2, partition 1 on s1 and s3: two rivals."""
    of = table((opened(0, 0, 0), opened(1, 0, 0, replicas=("s1", "s3"))))
    for both in (True, False):
        gather = gather_of(of, wishes=Wishes(together=True))
        (send,) = sends(gather.step(Started(), 0)).values()
        assert send.ask.server == "s1"
        rivals = sends(gather.step(Suspected("s1"), 10))
        assert set(rivals) == {"s2", "s3"}
        gather.step(Answered(rivals["s2"].ask_id, answer("s2"), "partition 0"), 20)
        assert gather.answers == []
        if both:
            gather.step(Answered(rivals["s3"].ask_id, answer("s3"), "partition 1"), 30)
            assert (gather.done, gather.exceptions, len(gather.answers)) == (True, [], 2)
        else:
            gather.step(Woke(), DEADLINE_MS)
            assert [payload for _, payload in gather.answers] == ["partition 0"]
            assert codes(gather) == [QueryCode.SERVER_NOT_RESPONDING]
            assert (gather.asked, gather.responded) == ({"s1", "s2"}, {"s2"})


def test_who_waits_for_a_server_that_another_query_suspects_asks_elsewhere_at_once() -> None:
    gather = gather_of(two_replicas(0))
    (send,) = sends(gather.step(Started(), 0)).values()
    (rival,) = sends(gather.step(Suspected(send.ask.server), 5)).values()
    assert rival.ask.server != send.ask.server
    assert sends(gather.step(Suspected(send.ask.server), 6)) == {}


def test_what_a_rival_has_answered_is_not_asked_again_however_often_the_server_is_suspected() -> None:
    of = table((opened(0, 1, 10, replicas=("s1",)),), (sealed(0, 0, 0, 10, replicas=("s1", "s2")),))
    gather = gather_of(of, wishes=Wishes(together=True))
    (send,) = sends(gather.step(Started(), 0)).values()
    (rival,) = sends(gather.step(Suspected("s1"), 5)).values()
    gather.step(Answered(rival.ask_id, answer("s2"), "segment"), 10)
    assert sends(gather.step(Suspected("s1"), 11)) == {}
    assert sends(gather.step(Woke(), DEADLINE_MS / 2)) == {}
    assert gather.step(Answered(send.ask_id, answer("s1"), "both"), 700) == [Done()]
    assert [payload for _, payload in gather.answers] == ["both"]


# --- not before ---


def shown(partition: int, until: int) -> PartitionAnswer:
    watermark = Watermark(next_offset=until, epoch=1)
    return PartitionAnswer(partition=partition, covered=OffsetRange(0, until), watermark=watermark)


def test_the_floor_of_a_partition_travels_with_its_tail() -> None:
    gather = gather_of(two_replicas(0, 1), wishes=Wishes(floors={0: 15}, together=True))
    (send,) = sends(gather.step(Started(), 0)).values()
    assert [(tail.partition, tail.not_before) for tail in send.ask.tails(gather.wishes.floors)] == [(0, 15), (1, 0)]


def test_an_answer_that_ends_before_the_floor_settles_nothing() -> None:
    gather = gather_of(two_replicas(0), wishes=Wishes(floors={0: 15}))
    (send,) = sends(gather.step(Started(), 0)).values()
    old = answer(send.ask.server, partitions=(shown(0, 14),))
    (again,) = sends(gather.step(Answered(send.ask_id, old, "old"), 5)).values()
    assert again.ask.server != send.ask.server
    gather.step(Answered(again.ask_id, answer(again.ask.server, partitions=(shown(0, 15),)), "new"), 6)
    assert ([payload for _, payload in gather.answers], gather.exceptions) == (["new"], [])


def test_a_floor_that_no_replica_reaches_is_named() -> None:
    gather = gather_of(two_replicas(0), wishes=Wishes(floors={0: 15}))
    effects = gather.step(Started(), 0)
    while sends(effects):
        (send,) = sends(effects).values()
        effects = gather.step(Answered(send.ask_id, answer(send.ask.server, behind_partitions=(0,)), None), 5)
        for refresh in [effect for effect in effects if isinstance(effect, Refresh)]:
            effects = gather.step(Refreshed(gather.routes.view), refresh.at_ms)
    assert codes(gather) == [QueryCode.BROKER_SEGMENT_UNAVAILABLE]
    assert "no replica showed partition 0 up to 15, which the query must see (notBefore" in gather.exceptions[0].message
    assert "s1: is behind; s2: is behind" in gather.exceptions[0].message


def test_a_server_that_ran_out_of_time_over_a_floor_is_behind() -> None:
    gather = gather_of(two_replicas(0), wishes=Wishes(floors={0: 15}))
    (send,) = sends(gather.step(Started(), 0)).values()
    late = answer(send.ask.server, error_code=250, error="the query did not finish")
    (again,) = sends(gather.step(Answered(send.ask_id, late, None), 5)).values()
    assert again.ask.server != send.ask.server


def test_a_floor_below_what_is_sealed_is_met() -> None:
    of = table((opened(0, 1, 20),), (sealed(0, 0, 0, 20),))
    gather = gather_of(of, wishes=Wishes(floors={0: 15}, together=True))
    (send,) = sends(gather.step(Started(), 0)).values()
    gather.step(Answered(send.ask_id, answer(send.ask.server), "all"), 5)
    assert (gather.done, gather.exceptions) == (True, [])


# --- any behaviour of servers ---


@dataclass
class World:
    """Carries out effects on virtual time. What servers do is drawn from `dice`."""

    gather: Gather
    dice: random.Random
    newest: ClusterView
    now_ms: float = 0.0
    queue: list[tuple[float, int, Event]] = field(default_factory=list)
    count: int = 0

    def run(self) -> None:
        effects = self.gather.step(Started(), self.now_ms)
        while True:
            for effect in effects:
                self.perform(effect)
            if self.gather.done or not self.queue:
                return
            self.now_ms, _, event = heapq.heappop(self.queue)
            effects = self.gather.step(event, self.now_ms)

    def perform(self, effect: Effect) -> None:
        match effect:
            case Send():
                self.serve(effect)
            case Wake(at_ms):
                self.put(at_ms, Woke())
            case Cancel() | Probe():
                pass  # the answer may still come
            case Refresh(at_ms):
                self.put(at_ms, Refreshed(self.newest))
            case Done():
                pass

    def serve(self, send: Send) -> None:
        dice, ask = self.dice, send.ask
        at_ms = self.now_ms + dice.choice([1, 20, 60, 300, 700, 1_200])
        if dice.random() < 0.1:
            self.put(at_ms - 1, Suspected(ask.server))
        match dice.randrange(6):
            case 0:
                self.put(at_ms, Failed(send.ask_id, "refused"))
            case 1:
                pass  # silent
            case 2:
                code = dice.choice([200, 211, 230, 245])
                self.put(at_ms, Answered(send.ask_id, answer(ask.server, error_code=code, error="x"), None))
            case 3:
                lost = [part for part in ask.parts if dice.random() < 0.5]
                header = answer(
                    ask.server,
                    missing_segments=tuple(part.segment for part in lost if part.segment),
                    behind_partitions=tuple(part.partition for part in lost if not part.segment),
                )
                self.put(at_ms, Answered(send.ask_id, header, [part for part in ask.parts if part not in lost]))
            case _:
                self.put(at_ms, Answered(send.ask_id, answer(ask.server), list(ask.parts)))
                if dice.random() < 0.2:
                    self.put(at_ms + 1, Answered(send.ask_id, answer(ask.server), list(ask.parts)))

    def put(self, at_ms: float, event: Event) -> None:
        self.count += 1
        heapq.heappush(self.queue, (max(at_ms, self.now_ms), self.count, event))


def rows_of(parts: list[Part], ends: dict[Part, int]) -> list[tuple[int, int]]:
    return [(part.partition, row) for part in parts for row in range(part.from_offset, ends[part])]


@pytest.mark.parametrize("seed", range(400))
def test_no_row_is_counted_twice_and_a_complete_answer_misses_none(seed: int) -> None:
    dice = random.Random(seed)
    replicas = ("s1", "s2", "s3")[: dice.randrange(1, 4)]
    segments = (sealed(0, 0, 0, 10, replicas=replicas), sealed(1, 0, 0, 7, replicas=replicas))
    of = table((opened(0, 1, 10, replicas=replicas), opened(1, 1, 7, replicas=replicas)), segments)
    # By the time the view is refreshed, the tail of partition 0 may have been sealed up to 15.
    later = table(
        (opened(0, 2, 15, replicas=replicas), opened(1, 1, 7, replicas=replicas)),
        (*segments, sealed(0, 1, 10, 15, replicas=replicas)),
    )
    ends = {
        Part(0, 0, "t__0__0__x"): 10, Part(1, 0, "t__1__0__x"): 7, Part(0, 10): 20, Part(1, 7): 9,
        Part(0, 10, "t__0__1__x"): 15, Part(0, 15): 20,
    }  # fmt: skip
    live = tuple(name for name in ("s1", "s2", "s3") if dice.random() < 0.9)
    gather = gather_of(
        of, live=live, wishes=Wishes(together=dice.random() < 0.5), hedge_after_ms=dice.choice([10.0, 50.0, 2_000.0]),
        may_hedge=lambda: dice.random() < 0.7,
    )  # fmt: skip
    world = World(gather, dice, view(dice.choice([of, later]), version=2))
    world.run()
    assert gather.done
    assert world.now_ms <= DEADLINE_MS
    rows = [row for _, payload in gather.answers for row in rows_of(payload, ends)]
    assert len(rows) == len(set(rows)), "a row was counted twice"
    everything = {(0, row) for row in range(20)} | {(1, row) for row in range(9)}
    assert set(rows) <= everything
    if not gather.exceptions:
        assert set(rows) == everything, "flagged complete, but rows are missing"
        assert gather.asked == gather.responded
    else:
        assert set(rows) != everything, "flagged partial, but everything is there"
    assert gather.responded <= gather.asked


# --- any order of events ---


@st.composite
def scripts(draw: st.DrawFn) -> tuple[TableView, list[tuple[int, int, int]], bool]:
    """A small table whose parts live on overlapping replicas, and what happens next, as indexes into what can."""
    names = ("s1", "s2", "s3")
    some = st.sets(st.sampled_from(names), min_size=1).map(lambda found: tuple(sorted(found)))
    partitions = tuple(opened(partition, 1, 10, replicas=draw(some)) for partition in range(draw(st.integers(1, 3))))
    segments = tuple(
        sealed(part.record.partition, 0, 0, 10, replicas=draw(some)) for part in partitions if draw(st.booleans())
    )
    steps = draw(
        st.lists(
            st.tuples(st.sampled_from((0, 1, 2, 3, 3, 4, 4, 4, 5)), st.integers(0, 50), st.integers(0, 7)), max_size=40
        )
    )
    return table(partitions, segments), steps, draw(st.booleans())


@settings(max_examples=2_000, deadline=None)
@given(scripts())
def test_whatever_the_order_of_answers_failures_duplicates_and_races_no_part_counts_twice(
    script: tuple[TableView, list[tuple[int, int, int]], bool],
) -> None:
    of, steps, together = script
    gather = gather_of(of, wishes=Wishes(together=together), hedge_after_ms=30.0, may_hedge=lambda: True)
    sent: list[Send] = []
    ended: set[int] = set()
    clock = itertools.count(0, 23)

    def step(event: Event) -> None:
        for effect in gather.step(event, float(next(clock))):
            match effect:
                case Send():
                    sent.append(effect)
                case _:
                    pass

    step(Started())
    for kind, which, mask in steps:
        if gather.done:
            break
        under_way = [send for send in sent if send.ask_id not in ended]
        among = under_way if under_way and which % 5 else sent  # sometimes a duplicate, or one that was given up
        send = among[which % len(among)] if among else None
        if kind in (2, 4, 5) and send is not None:
            ended.add(send.ask_id)
        match kind:
            case 0:
                step(Woke())
            case 1:
                step(Refreshed(gather.routes.view))
            case _ if send is None:
                step(Woke())
            case 2:
                step(Failed(send.ask_id, "refused"))
            case 3:
                step(Suspected(send.ask.server))
            case 4:
                lost = [part for index, part in enumerate(send.ask.parts) if mask >> (index % 3) & 1]
                header = answer(
                    send.ask.server,
                    missing_segments=tuple(part.segment for part in lost if part.segment),
                    behind_partitions=tuple(part.partition for part in lost if not part.segment),
                )
                step(Answered(send.ask_id, header, [part for part in send.ask.parts if part not in lost]))
            case _:
                step(Answered(send.ask_id, answer(send.ask.server), list(send.ask.parts)))
    if not gather.done:
        gather.step(Woke(), DEADLINE_MS)
    assert gather.done
    counted = [part for _, payload in gather.answers for part in payload]
    assert len(counted) == len(set(counted)), "a part was counted twice"
    needed = set(parts_of(of).needed)
    assert set(counted) <= needed
    assert bool(gather.exceptions) == (set(counted) != needed), "complete or flagged, never both or neither"
    assert gather.responded <= gather.asked


def test_a_lost_segment_is_named_at_once_in_every_answer_that_needs_it() -> None:
    """Nobody is asked for it and nothing waited for; the rest is answered."""
    loss = Loss(at_ms=1, rows=10, start_offset=0, end_offset=10, cause="no server has a copy")
    segments = (msgspec.structs.replace(sealed(0, 0, 0, 10), lost=loss), sealed(0, 1, 10, 20))
    external = {segments[1].name: {"s1": ReplicaState.ONLINE, "s2": ReplicaState.ONLINE}}
    of = table((opened(0, 2, 20),), segments, external, {"0": {"s1": report(0, 30)}})
    gather = gather_of(of)
    asked = sends(gather.step(Started(), 0.0))
    assert {part.segment for send in asked.values() for part in send.ask.parts} == {segments[1].name, ""}
    for server, send in asked.items():
        covered = tuple(
            PartitionAnswer(partition=0, covered=OffsetRange(20, 30), watermark=Watermark(next_offset=30, epoch=1))
            for part in send.ask.parts
            if not part.segment
        )
        gather.step(Answered(send.ask_id, answer(server, partitions=covered), None), 1.0)
    assert gather.done
    assert codes(gather) == [QueryCode.BROKER_SEGMENT_UNAVAILABLE]
    assert segments[0].name in gather.exceptions[0].message
    assert "is lost: 10 rows of partition 0, offsets [0, 10) (no server has a copy)" in gather.exceptions[0].message


def test_a_lost_segment_that_somebody_has_all_the_same_is_answered() -> None:
    loss = Loss(at_ms=1, rows=10, start_offset=0, end_offset=10, cause="its holders s1 are away")
    segment = msgspec.structs.replace(sealed(0, 0, 0, 10), lost=loss)
    of = table((), (segment,), {segment.name: {"s1": ReplicaState.ONLINE, "s2": ReplicaState.OFFLINE}})
    gather = gather_of(of)
    asked = sends(gather.step(Started(), 0.0))
    assert list(asked) == ["s1"]
    gather.step(Answered(asked["s1"].ask_id, answer("s1"), None), 1.0)
    assert gather.done
    assert codes(gather) == []
