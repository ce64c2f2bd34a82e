# SPDX-License-Identifier: Apache-2.0
"""Gather: whatever servers do, each part is settled once or named, and the end comes in time.

The conversations below are the rules one by one; the property at the end draws the servers' behaviour from dice.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from small_tables import opened, sealed, table, view

from cremant.cluster.gather import (
    Answered,
    Done,
    Effect,
    Event,
    Failed,
    Gather,
    Refresh,
    Refreshed,
    Send,
    Started,
    Wake,
    Woke,
)
from cremant.cluster.routing import Part, parts_of
from cremant.model.cluster import ClusterView, TableView
from cremant.model.query_codes import QueryCode
from cremant.wire.messages import ServerAnswer

DEADLINE_MS = 1_000.0


def gather_of(of: TableView, live: tuple[str, ...] = ("s1", "s2", "s3")) -> Gather:
    return Gather(view(of, live=live), of, parts_of(of).needed, DEADLINE_MS)


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
    assert gather.unresponsive == {"s1"}


def test_what_a_server_is_missing_is_asked_of_another() -> None:
    of = table((opened(0, 1, 10),), (sealed(0, 0, 0, 10),))
    gather = gather_of(of)
    (send,) = sends(gather.step(Started(), 0)).values()
    first = send.ask.server
    partly = answer(first, missing_segments=("t__0__0__x",))
    (again,) = sends(gather.step(Answered(send.ask_id, partly, "tail"), 5)).values()
    assert again.ask.server != first
    assert again.ask.segments == ("t__0__0__x",)
    assert again.ask.tails == ()
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
            effects = gather.step(Refreshed(gather.view), refresh.at_ms)
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
    assert [tail.from_offset for tail in again["s3"].ask.tails] == [20]
    gather.step(Answered(again["s2"].ask_id, answer("s2"), None), 60)
    gather.step(Answered(again["s3"].ask_id, answer("s3"), None), 61)
    assert (gather.done, gather.exceptions) == (True, [])


def test_a_silent_server_is_given_up_for_another_replica_and_its_late_answer_dropped() -> None:
    gather = gather_of(table((opened(0, 0, 0),)))
    (send,) = sends(gather.step(Started(), 0)).values()
    (again,) = sends(gather.step(Woke(), DEADLINE_MS / 2)).values()
    assert again.ask.server != send.ask.server
    assert gather.step(Answered(send.ask_id, answer("s1"), "late"), 501) == []
    gather.step(Answered(again.ask_id, answer("s2"), "in time"), 502)
    assert [payload for _, payload in gather.answers] == ["in time"]


def test_at_the_deadline_silent_servers_are_named() -> None:
    gather = gather_of(table((opened(0, 0, 0, replicas=("s1",)), opened(1, 0, 0, replicas=("s2",)))))
    asked = sends(gather.step(Started(), 0))
    gather.step(Answered(asked["s2"].ask_id, answer("s2"), None), 1)
    assert gather.step(Woke(), DEADLINE_MS) == [Done()]
    assert codes(gather) == [QueryCode.SERVER_NOT_RESPONDING]
    assert gather.exceptions[0].message == "1 servers [s1] not responded"
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
    assert Done() in gather.step(Refreshed(gather.view), refresh.at_ms)
    assert codes(gather) == [QueryCode.BROKER_SEGMENT_UNAVAILABLE]
    assert gather.asked == set()


def test_servers_have_less_time_than_the_broker() -> None:
    gather = gather_of(table((opened(0, 0, 0),)))
    (send,) = sends(gather.step(Started(), 400.0)).values()
    assert 500 < send.budget_ms < 600


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
            case Refresh(at_ms):
                self.put(at_ms, Refreshed(self.newest))
            case Done():
                pass

    def serve(self, send: Send) -> None:
        dice, ask = self.dice, send.ask
        at_ms = self.now_ms + dice.choice([1, 20, 300, 700, 1_200])
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
    gather = gather_of(of, live=live)
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
