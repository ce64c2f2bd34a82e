# SPDX-License-Identifier: Apache-2.0
"""`cremant freshness` as people and scripts see it, and the line on freshness below answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from cremant.cli import freshness as module
from cremant.cli.ages import ago, fresh_text
from cremant.cli.client import Client
from cremant.cli.find import Target
from cremant.cli.freshness import PROMISE_BROKEN, freshness
from cremant.cli.sql import print_table
from cremant.model.cluster import as_json
from cremant.model.errors import NotFound
from cremant.wire.freshness import (
    Alert,
    PartitionFreshness,
    PipelineFreshness,
    ReplicaFreshness,
    Stages,
    TableFreshness,
)

TARGET = Target(controller="http://c:9000", broker="http://b:8099", log_dir=None)


def document(lag_ms: int | None = 120, *, sla_state: str = "ok", state: str = "caughtUp") -> dict[str, Any]:
    split = None if lag_ms is None else Stages(pipeline=lag_ms - lag_ms // 4, server=lag_ms // 4)
    replica = ReplicaFreshness(
        instance="Server_[a]_1", live=True, responds=True, serves=True, report_age_ms=1, state=state,
        tail_state="consuming", freshness_lag_ms=lag_ms, fresh_time_ms=1, freshness_source="logAppend",
        visible_offset=12_345, epoch=7, lag_rows=3, last_event_age_ms=5, last_indexed_ms=1, rejected=0, log_offset=1,
        log_end=1, error=None, stages_ms=split, held_back_by="pipeline", reason="the pipeline was last heard 9 s ago",
    )  # fmt: skip
    partition = PartitionFreshness(
        partition=0, replica="Server_[a]_1", state=state, freshness_lag_ms=lag_ms, fresh_time_ms=1,
        last_event_age_ms=5, visible_offset=12_345, stream_end=12_348, stream_read_age_ms=1, lag_rows=3,
        stages_ms=split, held_back_by="pipeline", reason="the pipeline was last heard 9 s ago", replicas=(replica,),
    )  # fmt: skip
    firing = sla_state in ("violated", "unknown")
    found: dict[str, Any] = as_json(
        TableFreshness(
            table="shop", observer="Broker_b_8099", time_ms=10_000, state=state, freshness_lag_ms=lag_ms,
            min_fresh_time_ms=1, last_event_age_ms=5, freshness_source="logAppend", lag_rows=3,
            num_partitions_expected=1, num_partitions_reporting=1, freshness_sla_ms=2_000, max_event_age_ms=60_000,
            sla_state=sla_state,
            alert=Alert(state="firing" if firing else "ok", reason="it is old" if firing else None, since_ms=4_000),
            worst_partition=0, servers_not_responding=(),
            pipeline=PipelineFreshness(
                instance="Pipeline_1", state="running", report_age_ms=300, epoch=7, error=None, stream_error=None
            ),
            partitions=(partition,),
        )
    )  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("sla_state", "status"), [("ok", 0), ("none", 0), ("violated", PROMISE_BROKEN), ("unknown", PROMISE_BROKEN)]
)
def test_scripts_see_a_broken_promise_in_the_exit_status(
    sla_state: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Client, "freshness", lambda _client, table: document(sla_state=sla_state))
    assert freshness(TARGET, "shop", watch=False, as_json=True) == status
    assert json.loads(capsys.readouterr().out)["slaState"] == sla_state


def test_what_people_see(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Client, "freshness", lambda _client, table: document())
    assert freshness(TARGET, "shop", watch=False, as_json=False) == 0
    printed = capsys.readouterr().out
    for words in ("shop is caughtUp, fresh as of 0.1 s ago (1/1 partitions)", "at most 2.0 s, an event each 60 s: ok",
                  "Server_[a]_1", "12,345", "12,348", "3 rows", "pipeline 90 ms, server 30 ms", "(logAppend)",
                  "pipeline running, epoch 7, heard 0.3 s ago"):  # fmt: skip
        assert words in printed
    assert "broken" not in printed


def test_people_see_who_is_to_blame(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        Client, "freshness", lambda _client, table: document(9_000, sla_state="violated", state="behind")
    )
    freshness(TARGET, "shop", watch=False, as_json=False)
    printed = capsys.readouterr().out
    assert printed.count("pipeline: the pipeline was last heard 9 s ago (partition 0)") == 1
    assert "promise broken for 6.0 s: it is old" in printed


def test_watching_ends_with_ctrl_c_and_the_status_of_the_last_look(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter([document(), document(sla_state="violated")])

    def look(_client: Client, table: str) -> dict[str, Any]:
        try:
            return next(looks)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(Client, "freshness", look)
    monkeypatch.setattr(module, "_WATCH_EVERY_S", 0.0)
    assert freshness(TARGET, "shop", watch=True, as_json=True) == PROMISE_BROKEN
    assert [json.loads(line)["slaState"] for line in capsys.readouterr().out.splitlines()] == ["ok", "violated"]


def test_the_controller_is_asked_where_no_broker_answers() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        if request.url.host == "b":
            raise httpx.ConnectError("refused")
        if request.url.path == "/tables/nope/freshness":
            return httpx.Response(404, json={"code": 404, "error": "Table nope not found"})
        return httpx.Response(200, json=document())

    with Client("http://c:9000", "http://b:8099") as client:
        client._http = httpx.Client(transport=httpx.MockTransport(answer))
        assert client.freshness("shop")["table"] == "shop"
        with pytest.raises(NotFound, match="nope"):
            client.freshness("nope")
    assert asked[:2] == ["http://b:8099/tables/shop/freshness", "http://c:9000/tables/shop/freshness"]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"freshnessLagMs": 412, "numPartitionsExpected": 4, "numPartitionsReporting": 4},
         "fresh as of 0.4 s ago (4/4 partitions)"),
        ({"freshnessLagMs": None, "numPartitionsExpected": 4, "numPartitionsReporting": 3},
         "freshness unknown (3/4 partitions)"),
    ],
)  # fmt: skip
def test_a_line_on_freshness_stands_below_answers(
    answer: dict[str, Any], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fresh_text(answer) == text
    table = {"dataSchema": {"columnNames": ["n"], "columnDataTypes": ["LONG"]}, "rows": [[1]]}
    print_table({"resultTable": table, **answer})
    assert text in capsys.readouterr().err


def test_a_broken_promise_stands_there_too(capsys: pytest.CaptureFixture[str]) -> None:
    table = {"dataSchema": {"columnNames": ["n"], "columnDataTypes": ["LONG"]}, "rows": [[1]]}
    print_table({"resultTable": table, "freshnessLagMs": 9_000, "numPartitionsExpected": 1,
                 "numPartitionsReporting": 1, "freshnessSlaViolated": True})  # fmt: skip
    assert "the table promises more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ms", "text"), [(0, "0.0 s"), (7, "0.01 s"), (99, "0.10 s"), (412, "0.4 s"), (9_999, "10.0 s"), (65_000, "65 s"),
                     (600_000, "10 min"), (None, "-")]
)  # fmt: skip
def test_ages(ms: int | None, text: str) -> None:
    assert ago(ms) == text
