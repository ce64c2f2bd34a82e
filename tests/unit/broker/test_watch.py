# SPDX-License-Identifier: Apache-2.0
"""How fresh a table is, asked of a broker over HTTP: servers that answer or do not, a controller that says what the
pipeline last said; and EXPLAIN FRESHNESS, which names who holds an answer back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pinotdb
import pytest
from broker_kit import Kit, broker_kit, running
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cremant.broker.watch import Watch
from cremant.model.cluster import PipelineReport, StreamProgress
from cremant.model.offsets import Watermark
from cremant.shell.app import make_app
from cremant.wire.codec import encode
from cremant.wire.freshness import Upstream

EXPLAIN = "EXPLAIN FRESHNESS FOR SELECT count(*) FROM gold"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def mark(age_ms: int, offset: int = 100) -> Watermark:
    """Visible up to `age_ms` ago."""
    at_ms = now_ms() - age_ms
    return Watermark(
        next_offset=offset, epoch=7, max_ingestion_ms=at_ms, caught_up_at_ms=at_ms, source="logAppend"
    )  # fmt: skip


def said(*, closed_age_ms: int = 0, pipeline_age_ms: int = 0, end: int = 100, **more: Any) -> Upstream:
    at_ms = now_ms()
    progress = tuple(
        StreamProgress(
            partition=p, stream_end=end, read_at_ms=at_ms - closed_age_ms, caught_up_at_ms=at_ms - closed_age_ms
        )
        for p in range(2)
    )
    report = PipelineReport(table="gold", incarnation="abc", state="running", partitions=progress, at_ms=at_ms)
    return Upstream(incarnation="abc", pipeline=report, pipeline_id="Pipeline_1", age_ms=pipeline_age_ms, **more)


@dataclass
class Watched:
    kit: Kit
    upstream: Upstream | None = None

    def marks(self, server: str, *ages_ms: int) -> None:
        self.kit.servers[server].marks = {number: mark(age_ms) for number, age_ms in enumerate(ages_ms)}

    def freshness(self) -> dict[str, Any]:
        answer = httpx.get(self.kit.url + "/tables/gold_REALTIME/freshness", timeout=20)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def explained(self, sql: str = EXPLAIN) -> list[list[Any]]:
        answer = httpx.post(self.kit.url + "/query/sql", json={"sql": sql}, timeout=20).json()
        assert answer["exceptions"] == []
        table = answer["resultTable"]
        assert table["dataSchema"]["columnNames"] == ["Partition", "Replica", "Stage", "LagMs", "State", "Reason"]
        rows: list[list[Any]] = table["rows"]
        return rows


@pytest.fixture(scope="module")
def shared() -> Iterator[Watched]:
    async def upstream(request: Request) -> Response:
        return Response(b"no", 500) if watched.upstream is None else Response(encode(watched.upstream))

    app = make_app("controller", [Route("/internal/v1/freshness/{table}", upstream)], ready=lambda: (True, ""))
    with running(app) as url, broker_kit() as kit:
        watched = Watched(kit)
        service = kit.service
        service.watch = Watch(service.marks, service.network.peers, service.broker_id, url)
        yield watched


@pytest.fixture
def gold(shared: Watched) -> Iterator[Watched]:
    shared.upstream = said()
    for server in shared.kit.servers:
        shared.marks(server, 0, 0)
    yield shared
    for behaviour in shared.kit.servers.values():
        behaviour.mute = False


def test_all_is_well(gold: Watched) -> None:
    found = gold.freshness()
    assert (found["state"], found["slaState"], found["freshnessSource"]) == ("caughtUp", "none", "logAppend")
    assert found["observer"] == "Broker_127.0.0.1_8099"
    assert found["pipeline"]["state"] == "running"
    assert (found["numPartitionsExpected"], found["numPartitionsReporting"], found["lagRows"]) == (2, 2, 0)
    for partition in found["partitions"]:
        assert sum(partition["stagesMs"].values()) == partition["freshnessLagMs"]
        assert [replica["serves"] for replica in partition["replicas"]] == [True, True]


def test_a_partition_whose_replicas_are_behind_what_the_pipeline_closed(gold: Watched) -> None:
    gold.marks("Server_1", 0, 9_000)
    gold.marks("Server_2", 0, 8_000)
    gold.upstream = said()
    total, worst, *_ = gold.explained()
    assert total[:3] == [1, "Server_2", "TOTAL"]
    assert 8_000 <= total[3] < 60_000
    assert worst[:3] == [1, "Server_2", "server"]
    assert worst[3] > 0.9 * 8_000
    assert f"fresh as of {total[3]} ms ago; mostly server" in total[5]


def test_a_pipeline_that_was_stopped_is_named(gold: Watched) -> None:
    for server in gold.kit.servers:
        gold.marks(server, 5_000, 5_000)
    gold.upstream = said(closed_age_ms=6_000, pipeline_age_ms=5_000)  # no ms is the server's, whenever the clock ticks
    total, worst, *_ = gold.explained()
    assert worst[2] == "pipeline"
    assert worst[3] == total[3] >= 5_000
    assert "the pipeline was last heard 5.0 s ago" in total[5]


def test_a_stream_that_does_not_answer_is_named(gold: Watched) -> None:
    for server in gold.kit.servers:
        gold.marks(server, 5_000, 5_000)
    gold.upstream = said(closed_age_ms=5_000, stream_error="no answer for 2 s")
    total, worst, *_ = gold.explained()
    assert worst[2] == "stream"
    assert "no answer for 2 s" in total[5]


def test_a_server_that_does_not_answer_is_named_while_another_serves(gold: Watched) -> None:
    gold.kit.servers["Server_1"].mute = True
    found = gold.freshness()
    assert found["serversNotResponding"] == ["Server_1"]
    assert (found["partitions"][0]["replica"], found["partitions"][0]["replicas"][0]["state"]) == (
        "Server_2",
        "unknown",
    )
    assert found["freshnessLagMs"] is not None


def test_who_asks_at_the_same_time_gets_the_same(gold: Watched) -> None:
    hanging, answering = gold.kit.servers.values()
    hanging.mute = True  # so that it takes a while
    before = len(answering.marks_asked)
    with ThreadPoolExecutor(12) as pool:
        found = [one.result() for one in [pool.submit(gold.freshness) for _ in range(12)]]
    assert len(answering.marks_asked) - before == len({one["timeMs"] for one in found}) < len(found)
    assert all(len(one["serversNotResponding"]) == 1 for one in found)


def test_without_servers_nothing_is_known_and_it_says_so(gold: Watched) -> None:
    for behaviour in gold.kit.servers.values():
        behaviour.mute = True
    found = gold.freshness()
    assert (found["freshnessLagMs"], found["state"], found["numPartitionsReporting"]) == (None, "unknown", 0)
    total, *_ = gold.explained()
    assert total[1:4] == [None, "TOTAL", None]
    assert "no server answers" in total[5]


def test_without_a_controller_the_pipeline_is_unknown(gold: Watched) -> None:
    gold.upstream = None
    for server in gold.kit.servers:
        gold.marks(server, 5_000, 5_000)
    found = gold.freshness()
    assert found["pipeline"]["state"] == "unknown"
    assert found["partitions"][0]["stagesMs"]["unknown"] == found["partitions"][0]["freshnessLagMs"]
    assert gold.explained()[1][2] == "unknown"


def test_what_another_incarnation_did_counts_for_nothing(gold: Watched) -> None:
    gold.upstream = Upstream(incarnation="other", stream_error="of the table that was dropped")
    assert gold.freshness()["pipeline"] == {
        "instance": None, "state": "unknown", "reportAgeMs": None, "epoch": None, "error": None, "streamError": None,
    }  # fmt: skip


def test_rows_of_the_stream_that_are_not_visible_are_counted(gold: Watched) -> None:
    for server in gold.kit.servers:
        gold.marks(server, 3_000, 3_000)
    gold.upstream = said(end=90, ends={0: 130, 1: 100})
    found = gold.freshness()
    assert [partition["lagRows"] for partition in found["partitions"]] == [30, 0]
    assert (found["lagRows"], found["state"]) == (30, "behind")


def test_a_table_that_is_not_there(gold: Watched) -> None:
    answer = httpx.get(gold.kit.url + "/tables/nope/freshness", timeout=20)
    assert (answer.status_code, "Table nope_REALTIME not found" in answer.text) == (404, True), answer.text


def test_pinots_python_client_reads_the_rows(gold: Watched) -> None:
    for server in gold.kit.servers:
        gold.marks(server, 0, 6_000)
    url = httpx.URL(gold.kit.url)
    cursor = pinotdb.connect(host=url.host, port=url.port, path="/query/sql", scheme="http").cursor()
    cursor.execute(EXPLAIN)
    assert [column[0] for column in cursor.description] == ["Partition", "Replica", "Stage", "LagMs", "State", "Reason"]
    total, *stages = cursor.fetchall()
    assert (total[0], total[2]) == (1, "TOTAL")
    assert sum(row[3] for row in stages if row[0] == 1) == total[3] >= 6_000


def test_clients_get_a_usual_result(gold: Watched) -> None:
    """As pinotdb reads it: columns with types, rows of equal length."""
    answer = httpx.post(gold.kit.url + "/query/sql", json={"sql": EXPLAIN}, timeout=20).json()
    table = answer["resultTable"]
    assert table["dataSchema"]["columnDataTypes"] == ["INT", "STRING", "STRING", "LONG", "STRING", "STRING"]
    assert {len(row) for row in table["rows"]} == {6}
    assert answer["tablesQueried"] == ["gold"]
