# SPDX-License-Identifier: Apache-2.0
"""How fresh a table is, asked of the controller: from heartbeats and the stream, each case that holds a table back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from control import Cluster, OneLog, StillClock, schema
from control import table as table_config

from cremant.log.api import Log, Message
from cremant.log.memory import MemoryLog
from cremant.model.cluster import InstanceReport, PipelineReport, Role, StreamProgress, TailReport
from cremant.model.errors import Unavailable
from cremant.model.offsets import Watermark
from cremant.model.table import StreamConfig

SERVERS = ("Server_a_1", "Server_b_1")


class FailingLog(OneLog):
    """A stream that can be stopped."""

    stopped = False

    @contextlib.contextmanager
    def stream(self, stream: StreamConfig) -> Iterator[Log]:
        if self.stopped:
            raise Unavailable("broker kafka:9092 is away")
        yield self.epoch


class Table:
    """`gold` with two partitions on two servers, and what its processes say."""

    def __init__(self, path: Path, sla_ms: int | None = 2_000) -> None:
        self.clock = StillClock()
        self.log = FailingLog(MemoryLog(self.clock.now_ms))
        self.cluster = Cluster(path, clock=self.clock, logs=self.log)
        for name in SERVERS:
            self.cluster.beat(name)
        self.cluster.post("/topics", {"name": "events", "partitions": 2})
        self.cluster.post("/schemas", schema())
        config = table_config(replication=2)
        if sla_ms is not None:
            config["metadata"] = {"customConfigs": {"freshness.sla.ms": str(sla_ms)}}
        self.cluster.post("/tables", config)
        self.incarnation = self.cluster.controller.catalog.tables["gold"].incarnation
        self.pipeline_state = "running"
        self.stream_error: str | None = None

    def produce(self, partition: int, count: int) -> None:
        self.log.epoch.append("events", partition, [Message(b"{}") for _ in range(count)])

    def advance(self, ms: int) -> None:
        """In steps: a controller that stood still counts that against nobody."""
        for _ in range(ms // 100):
            self.clock.advance(100)
            self.cluster.controller.instances.refresh_liveness()

    def tail(self, partition: int, offset: int, fresh_ms: int, **more: Any) -> TailReport:
        """Fresh as of `fresh_ms` ago."""
        now_ms = self.clock.now_ms()
        mark = Watermark(
            next_offset=offset, epoch=3, max_ingestion_ms=now_ms - fresh_ms, caught_up_at_ms=now_ms - fresh_ms,
            source="logAppend",
        )  # fmt: skip
        return TailReport(
            table="gold", incarnation=self.incarnation, partition=partition, first_offset=0, rows=offset,
            watermark=mark, log_offset=9, log_end=9, log_read_at_ms=now_ms, at_ms=now_ms, last_indexed_ms=now_ms,
            **more,
        )  # fmt: skip

    def servers_say(self, *tails: TailReport, servers: tuple[str, ...] = SERVERS) -> None:
        for name in servers:
            self.cluster.beat(name, report=InstanceReport(tails=tails))

    def pipeline_says(self, *, end: int, closed_age_ms: int, read_age_ms: int) -> None:
        now_ms = self.clock.now_ms()
        partitions = tuple(
            StreamProgress(
                partition=p, stream_end=end, read_at_ms=now_ms - read_age_ms, closed=end,
                caught_up_at_ms=now_ms - closed_age_ms,
            )
            for p in range(2)
        )  # fmt: skip
        report = PipelineReport(
            table="gold", incarnation=self.incarnation, state=self.pipeline_state, partitions=partitions,
            stream_error=self.stream_error, at_ms=now_ms,
        )  # fmt: skip
        self.cluster.beat("Pipeline_p_1", Role.PIPELINE, report=InstanceReport(pipelines=(report,)))

    @property
    def freshness(self) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.get("/tables/gold/freshness")
        return found


@pytest.fixture
def gold(tmp_path: Path) -> Iterator[Table]:
    made = Table(tmp_path)
    yield made
    made.cluster.close()


def test_a_table_that_is_fresh(gold: Table) -> None:
    gold.produce(0, 5)
    gold.pipeline_says(end=5, closed_age_ms=100, read_age_ms=50)
    gold.servers_say(gold.tail(0, 5, 100), gold.tail(1, 0, 120))
    found = gold.freshness
    assert (found["state"], found["slaState"], found["alert"]["state"]) == ("caughtUp", "ok", "ok")
    assert (found["freshnessLagMs"], found["worstPartition"], found["lagRows"]) == (120, 1, 0)
    assert found["freshnessSource"] == "logAppend"
    assert (found["numPartitionsExpected"], found["numPartitionsReporting"]) == (2, 2)
    assert found["partitions"][0]["streamEnd"] == 5
    for partition in found["partitions"]:
        assert sum(partition["stagesMs"].values()) == partition["freshnessLagMs"]


def test_a_table_without_a_promise_fires_nothing(tmp_path: Path) -> None:
    gold = Table(tmp_path, sla_ms=None)
    try:
        assert (gold.freshness["slaState"], gold.freshness["alert"]["state"]) == ("none", "ok")
    finally:
        gold.cluster.close()


def test_one_replica_behind_is_told_but_the_table_is_as_fresh_as_the_other(gold: Table) -> None:
    gold.produce(0, 5)
    gold.pipeline_says(end=5, closed_age_ms=100, read_age_ms=50)
    gold.servers_say(gold.tail(0, 5, 100), gold.tail(1, 0, 100))
    gold.servers_say(gold.tail(0, 2, 9_000), gold.tail(1, 0, 100), servers=SERVERS[1:])
    found = gold.freshness
    first, second = found["partitions"][0]["replicas"]
    assert (found["freshnessLagMs"], found["partitions"][0]["replica"]) == (100, SERVERS[0])
    assert (first["state"], second["state"], second["lagRows"]) == ("caughtUp", "behind", 3)
    assert second["heldBackBy"] == "server"


def test_a_dead_pipeline_is_named_and_rows_wait_for_it(gold: Table) -> None:
    gold.pipeline_says(end=0, closed_age_ms=0, read_age_ms=0)
    gold.servers_say(gold.tail(0, 0, 0), gold.tail(1, 0, 0))
    told = (gold.tail(0, 0, 0), gold.tail(1, 0, 0))
    gold.advance(2_500)
    gold.produce(0, 7)
    gold.servers_say(*told)
    found = gold.freshness
    assert (found["slaState"], found["alert"]["state"]) == ("violated", "firing")
    assert found["alert"]["sinceMs"] == gold.clock.now_ms() - 500
    assert found["pipeline"]["state"] == "silent"
    assert (found["partitions"][0]["heldBackBy"], found["partitions"][0]["lagRows"]) == ("pipeline", 7)
    assert "last heard 2.5 s ago" in found["partitions"][0]["reason"]
    assert 'pinot_controller_freshnessSlaViolated{table="gold_REALTIME"} 1.0' in _metrics(gold)


def test_a_stopped_stream_is_named(gold: Table) -> None:
    gold.log.stopped = True
    gold.stream_error = "no answer"
    gold.pipeline_says(end=0, closed_age_ms=4_000, read_age_ms=3_900)
    gold.servers_say(gold.tail(0, 0, 4_000), gold.tail(1, 0, 4_000))
    worst = gold.freshness["partitions"][0]
    assert (worst["heldBackBy"], worst["stagesMs"]["stream"], worst["stagesMs"]["pipeline"]) == ("stream", 3_900, 100)
    assert "kafka:9092 is away" in worst["reason"]


def test_a_paused_table_is_paused(gold: Table) -> None:
    gold.pipeline_says(end=0, closed_age_ms=5_000, read_age_ms=5_000)
    gold.servers_say(gold.tail(0, 0, 5_000), gold.tail(1, 0, 5_000))
    gold.cluster.post("/tables/gold/pauseConsumption?comment=upgrade")
    found = gold.freshness
    assert (found["state"], found["slaState"]) == ("paused", "violated")
    assert "the table is paused: upgrade" in found["alert"]["reason"]


def test_without_any_replica_freshness_is_unknown_and_fires(gold: Table) -> None:
    gold.pipeline_says(end=0, closed_age_ms=0, read_age_ms=0)
    gold.servers_say(gold.tail(0, 0, 0), gold.tail(1, 0, 0))
    gold.advance(1_600)
    gold.pipeline_says(end=0, closed_age_ms=0, read_age_ms=0)
    found = gold.freshness
    assert (found["freshnessLagMs"], found["slaState"], found["alert"]["state"]) == (None, "unknown", "firing")
    assert found["serversNotResponding"] == list(SERVERS)
    replica = found["partitions"][0]["replicas"][0]
    assert (replica["state"], replica["heldBackBy"]) == ("unknown", "server")
    assert replica["stagesMs"]["server"] == 1_600


def test_an_epoch_log_that_does_not_answer_is_named(gold: Table) -> None:
    gold.pipeline_says(end=0, closed_age_ms=50, read_age_ms=40)
    now_ms = gold.clock.now_ms()
    silent = [gold.tail(p, 0, 3_000) for p in range(2)]
    gold.servers_say(*(msgspec.structs.replace(tail, log_read_at_ms=now_ms - 3_000) for tail in silent))
    assert gold.freshness["partitions"][0]["heldBackBy"] == "log"


def test_what_a_broker_asks_the_controller_for(gold: Table) -> None:
    gold.produce(1, 3)
    gold.pipeline_says(end=3, closed_age_ms=0, read_age_ms=0)
    gold.advance(700)
    found = gold.cluster.get("/internal/v1/freshness/gold")
    assert (found["ageMs"], found["ends"], found["pipelineId"]) == (700, {"0": 0, "1": 3}, "Pipeline_p_1")
    gold.log.stopped = True
    gold.advance(700)
    assert "is away" in gold.cluster.get("/internal/v1/freshness/gold")["streamError"]


def test_a_table_that_is_not_there_is_not_found(gold: Table) -> None:
    assert gold.cluster.request("GET", "/tables/nope/freshness").status_code == 404


def test_gauges_of_a_dropped_table_vanish(gold: Table) -> None:
    gold.servers_say(gold.tail(0, 0, 100), gold.tail(1, 0, 120))
    assert 'pinot_controller_freshnessLagMs{partition="1",table="gold_REALTIME"} 120.0' in _metrics(gold)
    gold.cluster.request("DELETE", "/tables/gold")
    assert 'table="gold_REALTIME"' not in _metrics(gold)


def _metrics(gold: Table) -> str:
    return gold.cluster.request("GET", "/metrics").text


def test_before_anything_is_known_the_first_that_is_missing_is_named(gold: Table) -> None:
    nothing = [msgspec.structs.replace(gold.tail(p, 0, 0), watermark=Watermark(next_offset=0, epoch=0)) for p in (0, 1)]
    gold.servers_say(*nothing)
    assert gold.freshness["partitions"][0]["heldBackBy"] == "pipeline"
    assert gold.freshness["alert"]["reason"].endswith("no pipeline has said anything of the table")
    gold.pipeline_says(end=0, closed_age_ms=0, read_age_ms=0)
    assert gold.freshness["partitions"][0]["reason"] == "nothing came yet whose time is known"
    gold.servers_say(*(msgspec.structs.replace(tail, log_end=40, state="catchingUp") for tail in nothing))
    found = gold.freshness["partitions"][0]["replicas"][0]
    assert (found["heldBackBy"], found["reason"]) == ("server", "it catches up: 9 of 40 records of its log")
    assert not found["serves"]
