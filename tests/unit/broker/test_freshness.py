# SPDX-License-Identifier: Apache-2.0
"""What answers say of their freshness, what tables promise, and which replicas are asked: over HTTP, and in numbers."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from broker_kit import PARTITIONS, ROWS_PER_EPOCH, Kit, as_upsert, broker_kit, table_of
from hypothesis import given
from hypothesis import strategies as st

from cremant.broker.freshness import freshness_of
from cremant.broker.query import QueryService
from cremant.broker.response import BrokerResponse, Freshness
from cremant.cluster.shown import LATE_MS, Mark, Shown
from cremant.exec.engine import Engine
from cremant.model.offsets import OffsetRange, Watermark
from cremant.model.table import FreshnessSla
from cremant.wire.messages import EpochState, PartitionAnswer, ServerAnswer

COUNT = "select count(*) from gold"
SERVERS = ("Server_1", "Server_2")
OLD_MS = 3_600_000
RECORD = table_of().record


def now() -> int:
    return time.time_ns() // 1_000_000


def show(kit: Kit, server: str, *partitions: int, age_ms: int | None = 0, offset: int = 100) -> None:
    fresh_ms = None if age_ms is None else now() - age_ms
    for partition in partitions:
        mark = Watermark(next_offset=offset, epoch=5, max_ingestion_ms=fresh_ms, source="logAppend")
        kit.servers[server].marks[partition] = mark


@pytest.fixture(scope="module")
def shared_kit() -> Iterator[Kit]:
    with broker_kit() as kit:
        yield kit


@pytest.fixture
def kit(shared_kit: Kit) -> Iterator[Kit]:
    view = shared_kit.view
    for server in SERVERS:
        show(shared_kit, server, 0, 1)
    yield shared_kit
    shared_kit.view = view
    for behaviour in shared_kit.servers.values():
        behaviour.behind, behaviour.refuse, behaviour.mute, behaviour.error_code = False, False, False, 0
        behaviour.asked.clear()
        behaviour.marks.clear()
    shared_kit.forget()


def promise(kit: Kit, **sla: int) -> None:
    gold = kit.view.tables["gold"]
    config = msgspec.structs.replace(gold.record.config, freshness_sla=FreshnessSla(**sla))
    changed = msgspec.structs.replace(gold, record=msgspec.structs.replace(gold.record, config=config))
    version = kit.view.version + 1
    kit.view = msgspec.structs.replace(kit.view, version=version, tables={**kit.view.tables, "gold": changed})


def ask(kit: Kit, sql: str = COUNT) -> dict[str, Any]:
    response = httpx.post(kit.url + "/query/sql", json={"sql": sql}, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def metric(kit: Kit, name: str) -> float:
    lines = httpx.get(kit.url + "/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"pinot_broker_{name}"))


def eventually(condition: Callable[[], bool], deadline_s: float = 30) -> None:
    until_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.05)


# --- what a table promises ---


@pytest.mark.parametrize(
    ("sla", "fresh_ms", "event_ms", "violated"),
    [
        ({}, None, None, False),
        ({"max_lag_ms": 100}, 900, None, False),  # exactly what was promised
        ({"max_lag_ms": 100}, 899, None, True),
        ({"max_lag_ms": 100}, None, 1_000, True),  # nobody knows
        ({"max_lag_ms": 100}, 5_000, None, False),  # a clock ahead
        ({"max_event_age_ms": 100}, 1_000, 900, False),
        ({"max_event_age_ms": 100}, 1_000, 899, True),  # fresh, and the producer is silent
        ({"max_event_age_ms": 100}, 1_000, None, True),
        ({"max_event_age_ms": 100}, None, 1_000, True),
        ({"max_lag_ms": 100, "max_event_age_ms": 50}, 950, 940, True),
    ],
)
def test_a_promise_is_kept_up_to_its_bound_and_broken_by_what_is_not_known(
    sla: dict[str, int], fresh_ms: int | None, event_ms: int | None, violated: bool
) -> None:
    response = BrokerResponse("1", None, sla=FreshnessSla(**sla), now_ms=1_000)
    response.freshness = Freshness(fresh_ms, event_ms, partitions_expected=1)
    fields = response.as_fields()
    assert (fields["freshnessSlaViolated"], fields["freshnessSlaMs"]) == (violated, sla.get("max_lag_ms"))


def test_answers_and_counters_say_whether_the_promise_was_kept(kit: Kit) -> None:
    promise(kit, max_lag_ms=600_000)
    before, observed = metric(kit, "freshnessSlaViolations_total"), metric(kit, "freshnessLagMs_count")
    answer = ask(kit)
    assert (answer["freshnessSlaMs"], answer["freshnessSlaViolated"]) == (600_000, False)
    for server in SERVERS:
        show(kit, server, 1, age_ms=OLD_MS)
    assert ask(kit)["freshnessSlaViolated"] is True
    assert metric(kit, "freshnessSlaViolations_total") == before + 1
    assert metric(kit, "freshnessLagMs_count") == observed + 2, "once per query"


def test_a_query_that_goes_round_again_is_measured_once(kit: Kit) -> None:
    for server in SERVERS:
        show(kit, server, 1, age_ms=OLD_MS)
    observed, waited = metric(kit, "freshnessLagMs_count"), metric(kit, "freshnessWaitMs_count")
    ask(kit, f"set maxFreshnessLagMs = 600000; set timeoutMs = 2000; {COUNT}")
    assert (metric(kit, "freshnessLagMs_count"), metric(kit, "freshnessWaitMs_count")) == (observed + 1, waited + 1)


# --- never fresher than it is ---


def test_a_partition_that_nobody_serves_makes_it_partial_and_unknown(kit: Kit) -> None:
    promise(kit, max_lag_ms=600_000)
    for behaviour in kit.servers.values():
        behaviour.behind = True
    answer = ask(kit, f"set timeoutMs = 3000; {COUNT}")
    assert [one["errorCode"] for one in answer["exceptions"]] == [305]
    assert (answer["minConsumingFreshnessTimeMs"], answer["freshnessLagMs"]) == (0, None)
    assert (answer["freshnessSlaViolated"], answer["numPartitionsReporting"]) == (True, 0)


def test_the_replica_that_is_left_answers_with_the_truth(kit: Kit) -> None:
    kit.servers["Server_1"].refuse = True
    show(kit, "Server_2", 1, age_ms=OLD_MS)
    answer = ask(kit)
    assert (answer["exceptions"], answer["freshnessLagMs"] >= OLD_MS, answer["numPartitionsReporting"]) == ([], True, 2)


def test_a_server_whose_query_failed_leaves_nothing_known(kit: Kit) -> None:
    for behaviour in kit.servers.values():
        behaviour.error_code = 250
    answer = ask(kit)
    assert (answer["freshnessLagMs"], answer["numPartitionsReporting"], answer["numPartitionsExpected"]) == (None, 0, 2)


def tail(partition: int, fresh_ms: int | None, next_offset: int = 10, source: str = "logAppend") -> PartitionAnswer:
    mark = Watermark(next_offset=next_offset, epoch=3, max_ingestion_ms=fresh_ms, source=source)
    return PartitionAnswer(partition=partition, covered=OffsetRange(0, next_offset), watermark=mark)


@given(st.dictionaries(st.integers(0, 3), st.none() | st.integers(1, 10**6)), st.sets(st.integers(0, 3)))
def test_freshness_is_the_least_of_all_partitions_or_unknown(fresh: dict[int, int | None], missing: set[int]) -> None:
    """Of four partitions; of those in `missing` some sealed segment was not answered."""
    answers = [ServerAnswer(instance="s", partitions=(tail(number, value),)) for number, value in fresh.items()]
    found = freshness_of(answers, RECORD, 4, {}, unanswered=missing)
    complete = {number: value for number, value in fresh.items() if number not in missing}
    known = [value for value in complete.values() if value is not None]
    assert found.fresh_ms == (min(known) if len(known) == 4 else None)
    assert found.partitions_reporting == len(complete)


@given(st.integers(1, 20), st.none() | st.integers(1, 100), st.integers(1, 20), st.none() | st.integers(1, 100))
def test_a_proof_counts_for_whoever_shows_as_much_and_takes_nothing_away(
    next_offset: int, shown_ms: int | None, proof_offset: int, proof_ms: int | None
) -> None:
    answer = ServerAnswer(instance="s", partitions=(tail(0, shown_ms, next_offset),))
    found = freshness_of([answer], RECORD, 1, {}, None, {0: Mark(proof_offset, 1, proof_ms)})
    sources = [shown_ms] if next_offset < proof_offset else [shown_ms, proof_ms]
    assert found.fresh_ms == max((one for one in sources if one is not None), default=None)


def test_the_source_is_the_weakest_of_all() -> None:
    tails = (tail(0, 5), tail(1, 5, source="index"), tail(2, 5, source="create"))
    assert freshness_of([ServerAnswer(instance="s", partitions=tails)], RECORD, 3, {}).source == "index"
    assert freshness_of([ServerAnswer(instance="s", partitions=tails[:1])], RECORD, 1, {}).source == "logAppend"


def test_consuming_segments_count_as_asked_for_even_if_their_server_had_no_need_to_read_them() -> None:
    """As in Pinot: queried and fresh or not, before pruning; processed after it; matched with rows that match."""
    of = (tail(0, 700), msgspec.structs.replace(tail(1, 500), matched=False))
    pruned = msgspec.structs.replace(tail(2, 300), processed=False, matched=False)
    response = BrokerResponse("1", None, now_ms=1_000)
    response.answers = [ServerAnswer(instance="a", partitions=of), ServerAnswer(instance="b", partitions=(pruned,))]
    response.freshness = freshness_of(response.answers, RECORD, 3, {})
    fields = response.as_fields()
    names = ("numConsumingSegmentsQueried", "numConsumingSegmentsProcessed", "numConsumingSegmentsMatched")
    assert [fields[name] for name in names] == [3, 2, 1]
    assert (fields["minConsumingFreshnessTimeMs"], fields["freshnessLagMs"]) == (300, 700)


# --- which replica is asked ---


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5_000), st.integers(0, 1_000)), max_size=40))
def test_who_is_late_is_known_when_it_says_how_far_it_is(said: list[tuple[str, int, int]]) -> None:
    """Whoever says that it is within LATE_MS of all others is not late any more, who is further behind is."""
    shown, clock_ms = Shown(), 0.0
    for server, fresh_ms, pause_ms in said:
        clock_ms += pause_ms
        shown.note(0, server, Watermark(next_offset=1, epoch=0, caught_up_at_ms=fresh_ms), offset=1, now_ms=clock_ms)
        newest = max(mark.fresh_ms or 0 for mark in shown.marks[0].values())
        assert ((0, server) in shown.late) == (newest - fresh_ms > LATE_MS)


def test_what_was_said_long_ago_is_not_compared_with_what_is_said_now() -> None:
    shown = Shown()
    for server, fresh_ms, at_ms in (("a", 10_000, 0.0), ("b", 20_000, 10_000.0)):
        shown.note(0, server, Watermark(next_offset=1, epoch=0, caught_up_at_ms=fresh_ms), offset=1, now_ms=at_ms)
    assert not shown.late, "a may be as far by now"
    slow = Watermark(next_offset=1, epoch=0, caught_up_at_ms=18_000)
    shown.note(0, "a", slow, offset=1, now_ms=11_000, age_ms=2_000)
    assert not shown.late, "the answer took two seconds to come"


def test_nobody_is_late_because_of_a_server_that_is_gone() -> None:
    shown = Shown()
    for _ in range(2):
        for server, fresh_ms in (("ahead", 99_000), ("a", 10_000), ("b", 10_000)):
            mark = Watermark(next_offset=1, epoch=0, caught_up_at_ms=fresh_ms)
            shown.note(0, server, mark, offset=1, now_ms=0)
    assert shown.late == {(0, "a"), (0, "b")}
    shown.keep({"a", "b"})
    shown.note(0, "a", Watermark(next_offset=1, epoch=0, caught_up_at_ms=12_000), offset=1, now_ms=1)
    assert shown.late == {(0, "b")}


def test_a_replica_that_stands_still_is_left_and_taken_back_when_it_goes_on(kit: Kit) -> None:
    for server in SERVERS:
        show(kit, server, 0, 1, age_ms=OLD_MS)
    show(kit, "Server_2", 0, 1)

    def fresh() -> bool:
        return bool(ask(kit)["freshnessLagMs"] < OLD_MS)

    eventually(lambda: all(fresh() for _ in range(5)))
    kit.servers["Server_1"].asked.clear()
    assert all(fresh() for _ in range(10))
    assert not kit.servers["Server_1"].asked
    show(kit, "Server_1", 0, 1)

    def is_asked_again() -> bool:
        ask(kit, f"set numReplicaGroupsToQuery = 2; {COUNT}")
        return bool(kit.servers["Server_1"].asked)

    eventually(is_asked_again)


def test_where_the_rows_came_from(kit: Kit) -> None:
    assert "provenance" not in ask(kit)
    found = ask(kit, f"set includeProvenance = true; {COUNT}")["provenance"]
    assert [(one["partition"], one["origin"], one["nextOffset"], one["epoch"]) for one in found] == [
        (0, "consuming", 100, 5), (1, "consuming", 100, 5),
    ]  # fmt: skip
    assert {one["replica"] for one in found} <= set(SERVERS)
    assert all(one["freshnessTimeMs"] and one["freshnessSource"] == "logAppend" for one in found)


# --- monotonic reads ---


@pytest.mark.parametrize("is_upsert", [False, True])
def test_with_a_token_no_broker_and_no_replica_shows_less_than_was_seen(is_upsert: bool) -> None:
    """Two brokers, two replicas that move on at random; a client that asks whichever, and passes its token on."""
    dice = random.Random(5)

    async def client(kit: Kit, brokers: list[QueryService]) -> list[int]:
        seen, token, far = [], None, {(server, partition): 1 for server in SERVERS for partition in range(PARTITIONS)}
        for _ in range(60):
            server, partition = dice.choice(SERVERS), dice.randrange(PARTITIONS)
            far[server, partition] = min(10, far[server, partition] + dice.randint(0, 2))
            for (name, number), epoch in far.items():
                rows, mark_ms = epoch * ROWS_PER_EPOCH, 10_000 + epoch
                mark = Watermark(next_offset=rows, epoch=epoch, max_ingestion_ms=mark_ms)
                kit.servers[name].marks[number] = mark
                kit.servers[name].board.tell("abc", number, EpochState(closed=epoch, partitions=PARTITIONS))
            sql = COUNT if token is None else f"set notBefore = '{token}'; {COUNT}"
            response = await dice.choice(brokers).answer(sql)
            if response.exceptions:
                continue  # flagged: no replica had closed the epoch everywhere
            assert response.result is not None
            seen.append(json.loads(bytes(response.result.rows or b""))[0][0])
            token = response.freshness.read_token
        return seen

    with broker_kit() as kit:
        if is_upsert:
            kit.view = as_upsert(kit.view)
        engine = Engine(threads=1, memory_bytes=64 * 1024 * 1024)
        brokers = [QueryService(lambda: kit.view, engine, f"Broker_h_{number}") for number in range(2)]

        async def scenario() -> list[int]:
            try:
                return await client(kit, brokers)
            finally:
                for broker in brokers:
                    broker.close()

        seen = asyncio.run(scenario())
        engine.close()
    assert seen == sorted(seen)
    assert (len(seen) > 20, len(set(seen)) > 3) == (True, True), "it moved on, and was answered"
