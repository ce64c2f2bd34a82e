# SPDX-License-Identifier: Apache-2.0
"""Queries that demand freshness, over HTTP: they wait, are refused, or are flagged; and never get less unflagged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from broker_kit import PARTITIONS, Kit, as_upsert, broker_kit
from counted import message, rows

from cremant.broker import marks as marks_module
from cremant.broker.demand import Demand, OnStale, demand_of, settled, shortfall
from cremant.cluster.shown import Mark, Shown
from cremant.model.errors import QueryError
from cremant.model.limits import BROKER_QUERIES_RUNNING_MAX
from cremant.model.offsets import Watermark
from cremant.wire.messages import EpochState

COUNT = "select count(*) from gold"
SERVERS = ("Server_1", "Server_2")
#: What is fresh or stale here, whatever the machine does.
FRESH_MS, OLD_MS = 600_000, 3_600_000


def now() -> int:
    return time.time_ns() // 1_000_000


@pytest.fixture(scope="module")
def shared_kit() -> Iterator[Kit]:
    with broker_kit() as kit:
        yield kit


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine is not a server that does not answer."""
    monkeypatch.setattr(marks_module, "LOOK_TIMEOUT_S", 5.0)


@pytest.fixture
def kit(shared_kit: Kit) -> Iterator[Kit]:
    """All replicas are fresh."""
    view = shared_kit.view
    for server in SERVERS:
        show(shared_kit, server, 0, 1, age_ms=0)
    yield shared_kit
    shared_kit.view = view
    for behaviour in shared_kit.servers.values():
        behaviour.delay_s, behaviour.behind, behaviour.refuse, behaviour.mute = 0.0, False, False, False
        behaviour.asked.clear()
        behaviour.marks_asked.clear()
        behaviour.marks.clear()
    shared_kit.forget()


def show(kit: Kit, server: str, *partitions: int, age_ms: int | None, offset: int = 100, epoch: int = 5) -> None:
    """So far is it; `age_ms` None: nothing is proven."""
    fresh_ms = None if age_ms is None else now() - age_ms
    for partition in partitions:
        mark = Watermark(next_offset=offset, epoch=epoch, max_ingestion_ms=fresh_ms, source="logAppend")
        kit.servers[server].marks[partition] = mark


def ask(kit: Kit, options: str, sql: str = COUNT) -> dict[str, Any]:
    response = httpx.post(kit.url + "/query/sql", json={"sql": f"{options}; {sql}"}, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def later(call: Callable[[], object], after_s: float = 0.3) -> threading.Timer:
    timer = threading.Timer(after_s, call)
    timer.start()
    return timer


# --- what may be demanded ---


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"maxfreshnesslagms": "2s"}, "maxFreshnessLagMs: expected a whole number of ms of 0 or more, found '2s'"),
        ({"maxfreshnesslagms": "-1"}, "maxFreshnessLagMs: expected"),
        ({"maxfreshnesslagms": "9" * 30}, "maxFreshnessLagMs: expected"),
        ({"minfreshnesstimems": "0"}, "minFreshnessTimeMs: expected a whole number of ms of 1 or more, found '0'"),
        ({"maxfreshnesslagms": "5", "onstale": "hope"}, "onStale: expected 'wait', 'error' or 'partial', found 'hope'"),
        ({"onstale": ""}, "onStale: expected"),
        ({"readyourwrites": "41"}, "readYourWrites: not a token of writes"),
        ({"readyourwrites": '{"0": -1}'}, "readYourWrites: not a token of writes"),
        ({"maxfreshnesslagms": "5", "asofepoch": "3"}, "asOfEpoch asks for the past"),
    ],
)
def test_what_is_no_demand_is_refused_with_what_was_expected(options: dict[str, str], said: str) -> None:
    with pytest.raises(QueryError, match="QueryValidationError") as error:
        demand_of(options)
    assert (int(error.value.code), said in str(error.value)) == (700, True), str(error.value)


def test_a_demand_as_it_is_said() -> None:
    assert demand_of({"onstale": "error", "timeoutms": "5"}) is None, "nothing that could be stale is asked for"
    options = {"maxfreshnesslagms": "2000", "onstale": "Partial", "readyourwrites": '{"0": 41, "3": 0}'}
    assert demand_of(options) == Demand(2000, None, {0: 42, 3: 1}, OnStale.PARTIAL)
    both = Demand(max_lag_ms=100, min_fresh_ms=950)
    assert (both.least_ms(1_000), both.least_ms(2_000), Demand(rows={0: 1}).least_ms(5)) == (950, 1_900, 0)


def test_the_least_mark_that_will_do_is_taken_and_of_what_is_short_the_freshest() -> None:
    shown = Shown()
    for server, offset, fresh in (("a", 10, 1_000), ("b", 30, 3_000), ("dead", 99, 9_000)):
        mark = Watermark(next_offset=offset, epoch=1, caught_up_at_ms=fresh)
        shown.note(0, server, mark, offset=offset, now_ms=0)
    replicas = {0: ("a", "b"), 1: ()}
    had = settled(Demand(min_fresh_ms=1), shown, replicas, 900)
    assert (had.marks, had.unmet) == ({0: Mark(10, 1, 1_000)}, (1,))
    had = settled(Demand(min_fresh_ms=1), shown, replicas, 3_001)
    assert (had.marks[0].offset, had.unmet) == (30, (0, 1)), "the dead one shows nobody anything"
    had = settled(Demand(rows={0: 31, 7: 1}), shown, {0: ("a", "b")}, 0)
    assert had.unmet == (0, 7)
    assert shortfall(Demand(rows={0: 31, 7: 1}), had, 0, why={7: "no such partition"}) == (
        "partition 0 is visible up to offset 29, the row at 30 is missing; "
        "partition 7 is not known to be visible anywhere (no such partition)"
    )


# --- fresh enough ---


def test_what_is_fresh_enough_is_answered_at_once_and_next_time_nobody_is_even_asked(kit: Kit) -> None:
    for server in SERVERS:
        show(kit, server, 0, 1, age_ms=-OLD_MS)  # however slow the machine: nobody looks after what seems late
    answer = ask(kit, f"set maxFreshnessLagMs = {FRESH_MS}")
    assert (rows(answer), answer["freshnessLagMs"] <= FRESH_MS) == (200, True)
    for behaviour in kit.servers.values():
        assert all(one.timeout_ms <= marks_module.WAIT_MAX_MS for one in behaviour.marks_asked)
        behaviour.marks_asked.clear()
    assert rows(ask(kit, f"set maxFreshnessLagMs = {FRESH_MS}; set onStale = 'error'")) == 200
    assert [behaviour.marks_asked for behaviour in kit.servers.values()] == [[], []]


def test_the_replica_that_proves_it_is_asked_for_the_rows(kit: Kit) -> None:
    """Each replica is fresh in one partition: the query takes each from where it is fresh."""
    for server, old in zip(SERVERS, (0, 1), strict=True):
        show(kit, server, old, age_ms=OLD_MS, offset=90)
    for _ in range(5):
        answer = ask(kit, f"set maxFreshnessLagMs = {FRESH_MS}; set onStale = 'error'")
        assert (rows(answer), answer["freshnessLagMs"] <= FRESH_MS) == (200, True)


def test_an_answer_that_shows_as_much_as_a_proof_is_as_fresh_even_if_its_server_does_not_know(kit: Kit) -> None:
    show(kit, "Server_1", 0, 1, age_ms=OLD_MS)  # the same rows; it has not heard that they are all there is
    kit.servers["Server_2"].refuse = True
    answer = ask(kit, f"set maxFreshnessLagMs = {FRESH_MS}; set onStale = 'error'")
    assert (rows(answer), answer["freshnessLagMs"] <= FRESH_MS) == (200, True)


def test_exactly_the_bound_is_fresh() -> None:
    demand = Demand(max_lag_ms=100)
    assert demand.is_met(0, Mark(0, 0, 900), demand.least_ms(1_000))
    assert not demand.is_met(0, Mark(0, 0, 899), demand.least_ms(1_000))
    assert not demand.is_met(0, Mark(0, 0, None), demand.least_ms(1_000)), "what is not known is stale"


# --- stale: refused, flagged, waited for ---


@pytest.mark.parametrize("age_ms", [OLD_MS, None])
def test_what_is_stale_is_refused_at_once_with_its_partition_and_age(kit: Kit, age_ms: int | None) -> None:
    for server in SERVERS:
        show(kit, server, 1, age_ms=age_ms)
    began_s = time.monotonic()
    answer = ask(kit, f"set maxFreshnessLagMs = {FRESH_MS}; set onStale = 'error'; set timeoutMs = 50000")
    text = message(answer)
    assert time.monotonic() - began_s < 25, "it was to be refused, not to wait"
    assert f"DataFreshnessError: the answer is not as fresh as demanded (maxFreshnessLagMs = {FRESH_MS})" in text
    assert ("partition 1 is 36" in text) if age_ms else ("partition 1 is of unknown freshness" in text)
    assert "partition 0" not in text
    assert ("resultTable" in answer, answer["numPartitionsReporting"]) == (False, 2)
    assert (answer["freshnessLagMs"] is None) == (age_ms is None)
    assert not any(behaviour.asked for behaviour in kit.servers.values()), "no rows were read for it"


def test_what_is_stale_is_answered_and_flagged_if_that_will_do(kit: Kit) -> None:
    for server in SERVERS:
        show(kit, server, 0, age_ms=OLD_MS)
    answer = ask(kit, f"set maxFreshnessLagMs = {FRESH_MS}; set onStale = 'partial'")
    assert "partition 0 is 36" in message(answer)
    assert (answer["partialResult"], answer["resultTable"]["rows"]) == (True, [[200]])
    assert answer["freshnessLagMs"] >= OLD_MS


def test_a_query_waits_until_its_data_is_fresh_and_no_longer(kit: Kit) -> None:
    for server in SERVERS:
        show(kit, server, 1, age_ms=OLD_MS, offset=90)
    began_s = time.monotonic()
    timer = later(lambda: show(kit, "Server_2", 1, age_ms=0))
    answer = ask(kit, f"set maxFreshnessLagMs = {FRESH_MS}; set timeoutMs = 50000")
    assert 0.25 <= time.monotonic() - began_s < 25
    assert (rows(answer), answer["freshnessLagMs"] <= FRESH_MS) == (200, True)
    timer.join()
    text = httpx.get(kit.url + "/metrics").text
    assert 'pinot_broker_staleQueries_total{outcome="waited",table="gold_REALTIME"}' in text


def test_a_query_that_waited_in_vain_is_refused_in_time_and_says_who_does_not_answer(kit: Kit) -> None:
    for server in SERVERS:
        show(kit, server, 1, age_ms=OLD_MS)
    kit.servers["Server_2"].mute = True
    began_s = time.monotonic()
    answer = ask(kit, f"set maxFreshnessLagMs = {FRESH_MS}; set timeoutMs = 3000")
    text = message(answer)
    assert time.monotonic() - began_s < 20
    for said in ("after waiting", "partition 1 is 36", "Server_2: ", "EXPLAIN FRESHNESS"):
        assert said in text
    assert kit.service.marks.waiting.total() == 0


def test_a_query_slower_than_its_own_bound_says_so(kit: Kit) -> None:
    for server in SERVERS:
        show(kit, server, 0, 1, age_ms=-OLD_MS)
    answer = ask(kit, "set maxFreshnessLagMs = 200; set timeoutMs = 30000")
    assert (rows(answer), answer["freshnessLagMs"]) == (200, 0), "a clock ahead makes nothing fresher than now"
    for server in SERVERS:
        show(kit, server, 0, 1, age_ms=-2_500)
        kit.servers[server].delay_s = 3.0
    kit.forget()
    answer = ask(kit, "set maxFreshnessLagMs = 200; set timeoutMs = 30000")
    assert "the query itself took" in message(answer)


# --- own writes ---


def test_own_writes_are_waited_for(kit: Kit) -> None:
    for server in SERVERS:
        show(kit, server, 0, 1, age_ms=0, offset=90)
    began_s = time.monotonic()
    timer = later(lambda: show(kit, "Server_1", 0, 1, age_ms=0))
    assert rows(ask(kit, """set readYourWrites = '{"0": 99}'; set timeoutMs = 50000""")) == 200
    assert time.monotonic() - began_s >= 0.25
    timer.join()
    asked = [tail for server in SERVERS for query in kit.servers[server].asked for tail in query.tails]
    assert {(tail.partition, tail.not_before >= 100) for tail in asked} >= {(0, True)}


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ('{"0": 100}', "partition 0 is visible up to offset 99, the row at 100 is missing"),
        ('{"7": 5}', "partition 7 is not known to be visible anywhere (table gold has no such partition)"),
    ],
)
def test_writes_that_never_come_are_named(kit: Kit, token: str, said: str) -> None:
    assert said in message(ask(kit, f"set readYourWrites = '{token}'; set timeoutMs = 3000"))
    answer = ask(kit, f"set readYourWrites = '{token}'; set onStale = 'partial'")
    assert (said in message(answer), answer["resultTable"]["rows"]) == (True, [[200]])


def test_writes_that_were_taken_back_are_waited_for_again(kit: Kit) -> None:
    """A rewind: what servers have shown before is not there any more, and comes again."""
    own = """set readYourWrites = '{"0": 99}'; set timeoutMs = 50000"""
    assert rows(ask(kit, own)) == 200
    for server in SERVERS:
        show(kit, server, 0, age_ms=0, offset=50)
    timer = later(lambda: [show(kit, server, 0, age_ms=0) for server in SERVERS])
    assert rows(ask(kit, own)) == 200
    timer.join()


def test_what_a_client_has_seen_is_waited_for_without_a_turn(kit: Kit) -> None:
    token = ask(kit, "set timeoutMs = 50000")["readToken"]
    kit.forget()
    for server in SERVERS:
        show(kit, server, 0, age_ms=0, offset=90)
        kit.servers[server].asked.clear()
    timer = later(lambda: show(kit, "Server_2", 0, age_ms=0))
    assert rows(ask(kit, f"set notBefore = '{token}'; set timeoutMs = 50000")) == 200
    timer.join()
    assert len(kit.servers["Server_1"].asked) <= 1, "no server was asked for rows before they were there"


# --- upsert tables: the same, by epochs ---


def close(kit: Kit, epoch: int, *servers: str) -> None:
    for server in servers:
        for partition in range(PARTITIONS):
            kit.servers[server].board.tell("abc", partition, EpochState(closed=epoch, partitions=PARTITIONS))


def test_of_an_upsert_table_the_demand_becomes_the_least_epoch() -> None:
    with broker_kit() as kit:
        kit.view = as_upsert(kit.view)
        for server in SERVERS:
            show(kit, server, 0, 1, age_ms=OLD_MS, offset=50, epoch=5)
        close(kit, 5, *SERVERS)
        text = message(ask(kit, f"set maxFreshnessLagMs = {FRESH_MS}; set onStale = 'error'"))
        assert "partition 0 is 36" in text
        assert "partition 1 is 36" in text

        def closes() -> None:
            close(kit, 6, *SERVERS)
            for server in SERVERS:
                show(kit, server, 0, 1, age_ms=0, offset=60, epoch=6)

        timer = later(closes)
        answer = ask(kit, """set readYourWrites = '{"1": 59}'; set timeoutMs = 50000""")
        assert (rows(answer), answer["epoch"]) == (120, 6)
        answer = ask(kit, f"set maxFreshnessLagMs = {FRESH_MS}; set onStale = 'error'")
        assert (rows(answer), answer["freshnessLagMs"] <= FRESH_MS) == (120, True)
        timer.join()


# --- bounds ---


def test_only_so_many_wait_and_one_table_leaves_places_to_others(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks_module, "BROKER_QUERIES_AWAITING_ROWS_MAX", 4)
    for server in SERVERS:
        show(kit, server, 1, age_ms=OLD_MS)
    stale = f"set maxFreshnessLagMs = {FRESH_MS}; set timeoutMs = 50000"
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(ask, kit, stale) for _ in range(2)]
        until_s = time.monotonic() + 20
        while kit.service.marks.waiting["gold"] < 2:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        refused = ask(kit, stale)
        assert [one["errorCode"] for one in refused["exceptions"]] == [429]
        assert "2 of them for table gold; at most 4 do, 2 of a table" in refused["exceptions"][0]["message"]
        assert rows(ask(kit, "set timeoutMs = 50000")) == 200, "who demands nothing does not wait for them"
        show(kit, "Server_1", 1, age_ms=0)
        assert [rows(one.result(50)) for one in waiting] == [200, 200]


def test_waiting_takes_no_turn_of_those_that_run_and_ends_with_a_cancel(kit: Kit) -> None:
    for server in SERVERS:
        show(kit, server, 1, age_ms=OLD_MS)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            ask, kit, f"set maxFreshnessLagMs = {FRESH_MS}; set timeoutMs = 50000; set clientQueryId = 'w'"
        )
        until_s = time.monotonic() + 20
        while not kit.service.marks.waiting:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert kit.service.admission._free._value == BROKER_QUERIES_RUNNING_MAX
        request_id = kit.service.request_id_of("w")
        assert httpx.delete(f"{kit.url}/query/{request_id}").status_code == 200
        assert [one["errorCode"] for one in waiting.result(20)["exceptions"]] == [503]
    assert kit.service.marks.waiting.total() == 0
