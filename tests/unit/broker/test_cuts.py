# SPDX-License-Identifier: Apache-2.0
"""Queries of upsert tables, over HTTP: one cut for all servers, never an earlier one for a client, epochs that are
asked for, and what is refused. Each epoch brings ten rows to each of two partitions, so the count tells the epoch."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from broker_kit import PARTITIONS, ROWS_PER_EPOCH, Kit, as_upsert, broker_kit

from cremant.broker.freshness import freshness_of
from cremant.model.cluster import Rewind
from cremant.model.query_codes import QueryCode
from cremant.model.upsert import Cut, Visibility
from cremant.wire.messages import EpochState, ServerAnswer

COUNT = "select count(*) from gold"
SERVERS = ("Server_1", "Server_2")


@pytest.fixture
def kit() -> Iterator[Kit]:
    with broker_kit() as kit:
        kit.view = as_upsert(kit.view)
        yield kit


def close(
    kit: Kit, epoch: int, *servers: str, partitions: tuple[int, ...] = (0, 1), horizon: int = 0, of: int = PARTITIONS
) -> None:
    """`of`: partitions of the table at that epoch."""
    for server in servers or SERVERS:
        for partition in partitions:
            state = EpochState(closed=epoch, horizon=horizon, partitions=of)
            kit.servers[server].board.tell("abc", partition, state)


def ask(kit: Kit, sql: str = COUNT, options: str = "") -> dict[str, Any]:
    body = {"sql": sql, "queryOptions": options}
    response = httpx.post(kit.url + "/query/sql", json=body, timeout=20)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def count_at(epoch: int) -> int:
    return PARTITIONS * ROWS_PER_EPOCH * epoch


def count_of(answer: dict[str, Any]) -> int:
    assert not answer["exceptions"], answer["exceptions"]
    rows: int = answer["resultTable"]["rows"][0][0]
    return rows


def until(kit: Kit, epoch: int) -> dict[str, Any]:
    """The first answer at this epoch: news travel in milliseconds."""
    deadline_s = time.monotonic() + 5
    while (answer := ask(kit))["epoch"] != epoch:
        assert time.monotonic() < deadline_s
    return answer


def cuts(kit: Kit) -> set[Cut | None]:
    return {query.cut for behaviour in kit.servers.values() for query in behaviour.asked}


def test_an_answer_names_its_epoch_and_all_servers_were_asked_at_it(kit: Kit) -> None:
    close(kit, 3)
    answer = ask(kit)
    assert count_of(answer) == count_at(3)
    assert answer["epoch"] == 3
    assert cuts(kit) == {Cut(epoch=3)}


def test_news_of_closed_epochs_arrive_without_being_asked_for(kit: Kit) -> None:
    close(kit, 1)
    assert ask(kit)["epoch"] == 1
    close(kit, 2)
    began_s = time.monotonic()
    until(kit, 2)
    assert time.monotonic() - began_s < 1.0


def test_the_slowest_partition_in_use_decides(kit: Kit) -> None:
    close(kit, 5, partitions=(0,))
    close(kit, 4, partitions=(1,))
    assert count_of(ask(kit)) == count_at(4)


def test_a_replica_that_stands_still_is_not_asked_and_holds_nobody_back(kit: Kit) -> None:
    close(kit, 90, "Server_1")
    close(kit, 2, "Server_2")
    until(kit, 90)  # as soon as the broker has heard of Server_1
    kit.servers["Server_2"].asked.clear()
    assert ask(kit, options="timeoutMs=2000")["epoch"] == 90
    assert not kit.servers["Server_2"].asked


@pytest.mark.parametrize("options", ["", "asOfEpoch=4"])
def test_a_view_that_lacks_partitions_of_the_epoch_gives_no_answer(kit: Kit, options: str) -> None:
    close(kit, 3)
    until(kit, 3)
    close(kit, 4, of=PARTITIONS + 1)
    deadline_s = time.monotonic() + 5
    while not (answer := ask(kit, options=options))["exceptions"]:  # as soon as the broker has heard of epoch 4
        assert answer["epoch"] == 3 or options
        assert time.monotonic() < deadline_s
    assert [one["errorCode"] for one in answer["exceptions"]] == [QueryCode.BROKER_SEGMENT_UNAVAILABLE]
    assert "not heard yet of all partitions" in answer["exceptions"][0]["message"]
    assert answer["partialResult"]


def test_answers_that_are_not_used_take_no_room(kit: Kit) -> None:
    """A query that begins again gets them once more."""
    close(kit, 3)
    until(kit, 3)
    sql = "select ts, user_id from gold limit 1000"
    once_bytes = next(
        size for size in range(500, 100_000, 500)
        if not ask(kit, sql, f"maxQueryResponseSizeBytes={size}")["exceptions"]
    )  # fmt: skip
    close(kit, 4, of=PARTITIONS + 1)
    deadline_s = time.monotonic() + 5
    while not (answer := ask(kit, sql, f"maxQueryResponseSizeBytes={once_bytes * 2}"))["exceptions"]:
        assert time.monotonic() < deadline_s
    assert [one["errorCode"] for one in answer["exceptions"]] == [QueryCode.BROKER_SEGMENT_UNAVAILABLE]


def test_before_the_first_epoch_there_are_no_rows(kit: Kit) -> None:
    close(kit, 0)
    answer = ask(kit)
    assert count_of(answer) == 0
    assert answer["epoch"] == 0


def test_without_a_word_from_any_server_no_rows_are_shown(kit: Kit) -> None:
    answer = ask(kit)
    assert answer["partialResult"]
    assert [one["errorCode"] for one in answer["exceptions"]] == [QueryCode.BROKER_SEGMENT_UNAVAILABLE]
    assert "resultTable" not in answer
    assert not cuts(kit)


def test_for_partitions_without_a_live_replica_no_query_waits(kit: Kit) -> None:
    live = tuple(msgspec.structs.replace(one, live=False) for one in kit.view.instances)
    kit.view = msgspec.structs.replace(kit.view, version=3, instances=live)
    began_s = time.monotonic()
    assert ask(kit)["partialResult"]
    assert time.monotonic() - began_s < 0.8


def test_an_answer_without_tails_names_its_epoch_too(kit: Kit) -> None:
    sealed = ServerAnswer(cause_id="", instance="Server_1")
    found = freshness_of([sealed], kit.view.tables["gold"].record, 2, {}, 7)
    assert found.epoch == 7
    assert found.read_token is not None
    nothing = freshness_of([], kit.view.tables["gold"].record, 2, {}, 7)
    assert (nothing.epoch, nothing.read_token) == (None, None), "epoch 7 may never be closed"


def test_a_client_never_goes_back_whichever_replica_answers(kit: Kit) -> None:
    close(kit, 16, "Server_1")
    close(kit, 5, "Server_2")
    until(kit, 16)  # as soon as the broker has heard of Server_1
    kit.servers["Server_1"].refuse = True
    answer = ask(kit, options="timeoutMs=1500")
    assert answer["partialResult"], "Server_2 has not closed what was shown before"
    close(kit, 17, "Server_2")
    assert until(kit, 17)["resultTable"]["rows"] == [[200]]


def test_a_token_is_the_epoch_and_the_answer_is_not_older(kit: Kit) -> None:
    close(kit, 4)
    token = ask(kit)["readToken"]
    with broker_kit() as other:  # another broker of the same cluster, whose servers are behind
        other.view = as_upsert(other.view)
        close(other, 3)
        answer = ask(other, options=f"notBefore={token};timeoutMs=1000")
        assert answer["partialResult"]
        assert "has not closed epoch 4" in answer["exceptions"][0]["message"]
        close(other, 5)
        until(other, 5)
        assert ask(other, options=f"notBefore={token}")["epoch"] == 5


def test_an_epoch_may_be_asked_for_and_does_not_hold_later_queries(kit: Kit) -> None:
    close(kit, 8)
    assert count_of(ask(kit, options="asOfEpoch=2")) == count_at(2)
    assert ask(kit, options="asOfEpoch=2")["epoch"] == 2
    assert count_of(ask(kit)) == count_at(8)
    assert ask(kit, options="asOfEpoch=0")["resultTable"]["rows"] == [[0]]


def test_an_epoch_that_is_not_known_any_more_is_refused_with_the_oldest(kit: Kit) -> None:
    close(kit, 50, horizon=40)
    answer = ask(kit, options="asOfEpoch=39")
    assert [one["errorCode"] for one in answer["exceptions"]] == [QueryCode.QUERY_VALIDATION]
    assert "40" in answer["exceptions"][0]["message"]
    assert count_of(ask(kit, options="asOfEpoch=40")) == count_at(10)  # the partitions have a hundred rows


@pytest.mark.parametrize(
    ("options", "visibility"),
    [("", Visibility.VISIBLE), ("skipUpsert=true", Visibility.ALL), ("skipUpsertDelete=true", Visibility.IN_FORCE)],
)
def test_versions_may_be_asked_for(kit: Kit, options: str, visibility: Visibility) -> None:
    close(kit, 3)
    ask(kit, options=options)
    assert {cut.visibility for cut in cuts(kit) if cut is not None} == {visibility}
    assert None not in cuts(kit)


def test_what_a_rewind_took_back_is_refused_and_the_floor_goes_back(kit: Kit) -> None:
    close(kit, 9)
    token = ask(kit)["readToken"]
    kit.view = as_upsert(kit.view, version=3, rewinds=(Rewind(to_epoch=5, next_epoch=20),))
    assert ask(kit)["epoch"] == 5
    for options in (f"notBefore={token}", "asOfEpoch=9", "asOfEpoch=19"):
        answer = ask(kit, options=options)
        assert [one["errorCode"] for one in answer["exceptions"]] == [QueryCode.QUERY_VALIDATION], options
        assert "rewind to epoch 5" in answer["exceptions"][0]["message"]
    close(kit, 21)
    until(kit, 21)
    assert not ask(kit, options="asOfEpoch=20")["exceptions"]


def test_a_query_whose_epoch_nobody_knows_begins_again_until_servers_and_broker_agree(kit: Kit) -> None:
    """After a rewind it takes all of them a moment to hear of it; each time the query waits a little longer."""
    close(kit, 3)
    ask(kit)
    for behaviour in kit.servers.values():
        behaviour.lost_until_s = time.monotonic() + 0.15
    assert count_of(ask(kit)) == count_at(3)
    for behaviour in kit.servers.values():
        behaviour.lost_until_s = math.inf
    assert ask(kit)["exceptions"], "it does not try for ever"
    began_s = time.monotonic()
    assert ask(kit, options="timeoutMs=40")["exceptions"], "nor for longer than it may take"
    assert time.monotonic() - began_s < 5


@pytest.mark.parametrize("options", ["asOfEpoch=-1", "asOfEpoch=soon", "asOfEpoch=99999999999999999999"])
def test_what_is_no_epoch_is_a_bad_request(kit: Kit, options: str) -> None:
    body = {"sql": COUNT, "queryOptions": options}
    response = httpx.post(kit.url + "/query/sql", json=body, timeout=20)
    assert response.status_code == 400 or response.json()["exceptions"], response.text
    assert "asOfEpoch" in response.text


def test_append_tables_are_asked_without_a_cut(kit: Kit) -> None:
    gold = kit.view.tables["gold"]
    config = msgspec.structs.replace(gold.record.config, upsert=None)
    record = msgspec.structs.replace(gold.record, config=config)
    table = msgspec.structs.replace(gold, record=record)
    kit.view = msgspec.structs.replace(kit.view, version=9, tables={**kit.view.tables, "gold": table})
    assert ask(kit)["resultTable"]["rows"] == [[200]]
    assert cuts(kit) == {None}
    assert "not an upsert table" in ask(kit, options="asOfEpoch=3")["exceptions"][0]["message"]
