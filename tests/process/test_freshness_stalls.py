# SPDX-License-Identifier: Apache-2.0
"""One thing at a time stands still, and whoever asks is told which, truthfully: the pipeline is stopped, the table is
paused, one server hangs, is dead, both hang, Kafka is away. Rows arrive all the while.

What is claimed is judged at any time: no answer, and no replica's line of `GET /tables/{table}/freshness`, may say that
it is as fresh as of a time before which it misses a row. That the matter is named takes two seconds at most; a machine
that does other things, too, has longer, unless `CREMANT_FRESHNESS_STRICT=1`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench.cluster import LocalCluster
from bench.kafka import KafkaCluster
from freshness_checker import PLAIN, FreshnessChecker
from freshness_ledger import APPEND, TOPIC, MomentLedger, schema, table_config
from lanes import WRONG
from stopping import stopped

from cremant.log.api import Log
from cremant.log.embedded import EmbeddedLog
from cremant.log.kafka import KafkaLog

PARTITIONS = 2
RATE_PER_S = 200
SLA_MS = 1_500
#: How long it may take until the matter is named.
TOLD_S = 2.0 if os.environ.get("CREMANT_FRESHNESS_STRICT") else 30.0
HEALED_S = 120.0
Phase = Callable[[str], None]
Json = dict[str, Any]


class World:
    """A cluster with one table, its producer, and whoever asks all the time."""

    def __init__(self, cluster: LocalCluster, phase: Phase, kafka: str = "") -> None:
        self.cluster = cluster
        self.phase = phase
        options = ("--kafka", kafka) if kafka else ()
        cluster.run("topic", "create", TOPIC, "--partitions", str(PARTITIONS), *options)
        log: Log = KafkaLog(kafka) if kafka else EmbeddedLog(Path(cluster.ready["logDir"]))
        self.ledger = MomentLedger(log, PARTITIONS)
        config = table_config(APPEND, flush_rows=5_000, kafka=kafka) | {"freshnessSla": {"maxLagMs": SLA_MS}}
        cluster.rest.add_table(schema(APPEND), config)
        self.checker = FreshnessChecker(
            lambda: cluster.rest, self.ledger, threads=1, tables=(APPEND,), wishes={PLAIN: 1}, pause_s=0.1
        )
        self._stop = threading.Event()
        self._producer = threading.Thread(target=self.ledger.produce, args=(RATE_PER_S, self._stop), daemon=True)
        #: What replicas were said to be: observer, partition, fresh as of (ms), visible offset.
        self._claims: list[tuple[str, int, int, int]] = []

    def start(self) -> None:
        self._producer.start()
        self.until("fresh", self.is_fresh)
        self.checker.start()

    def stop(self) -> None:
        """Judges all that was claimed."""
        self.end_load()
        findings = self.checker.stop()
        self.phase(f"{findings.told()}; {len(self._claims):,} lines about replicas")
        assert findings.wrong[:3] == [], WRONG
        for observer, partition, fresh_ms, visible in self._claims:
            had = self.ledger.rows_before(partition, fresh_ms)
            assert visible >= had, (
                f"{WRONG}: {observer}: partition {partition} as of {fresh_ms}: {visible} of {had} rows"
            )
        assert findings.claims >= 5
        self.ledger.close()

    def end_load(self) -> None:
        self._stop.set()
        self._producer.join(60)
        assert not self._producer.is_alive()

    # --- asking ---

    def told(self, observer: str) -> Json:
        """What `observer` says of the table's freshness."""
        url = getattr(self.cluster.rest, observer)
        response = httpx.get(f"{url}/tables/{APPEND}/freshness", timeout=30, trust_env=False)
        response.raise_for_status()
        said: Json = response.json()
        for partition in said["partitions"]:
            for replica in partition["replicas"]:
                if replica["freshTimeMs"] is not None:
                    claim = (observer, partition["partition"], replica["freshTimeMs"], replica["visibleOffset"])
                    self._claims.append(claim)
                    assert sum(replica["stagesMs"].values()) == replica["freshnessLagMs"], replica
        return said

    def answer(self, said: str = "") -> Json:
        return self.cluster.rest.query(f"{said}SELECT COUNT(*) FROM {APPEND}", timeout_s=60)

    def explained(self) -> list[Json]:
        """Rows of EXPLAIN FRESHNESS, by column."""
        answer = self.cluster.rest.query(f"EXPLAIN FRESHNESS FOR SELECT COUNT(*) FROM {APPEND}", timeout_s=60)
        assert not answer["exceptions"], answer["exceptions"]
        table = answer["resultTable"]
        return [dict(zip(table["dataSchema"]["columnNames"], row, strict=True)) for row in table["rows"]]

    def metric(self, observer: str, name: str) -> float:
        """Of this table, over all other labels; 0 without."""
        text = httpx.get(getattr(self.cluster.rest, observer) + "/metrics", timeout=30, trust_env=False).text
        lines = [line for line in text.splitlines() if line.startswith(name + "{") and f'table="{APPEND}' in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def until(self, what: str, *conditions: Callable[[], bool], deadline_s: float = HEALED_S) -> float:
        """Seconds until each of them held once."""
        began_s = time.monotonic()
        waiting = list(conditions)
        while waiting:
            waiting = [condition for condition in waiting if not condition()]
            took_s = time.monotonic() - began_s
            if waiting:
                assert took_s < deadline_s, f"not {what} within {deadline_s} s: {self._everything()}"
                time.sleep(0.05)
        return took_s

    def is_fresh(self) -> bool:
        """Both observers, and an answer, say that the promise is kept."""
        try:
            both = [self.told(observer)["slaState"] for observer in ("broker", "controller")]
            answer = self.answer()
        except httpx.HTTPError:
            return False
        return both == ["ok", "ok"] and answer["freshnessSlaViolated"] is False

    def stall(self, name: str, *conditions: Callable[[], bool]) -> None:
        """In the middle of a stall: until it is told."""
        took_s = self.until(f"told: {name}", *conditions, deadline_s=TOLD_S + SLA_MS / 1000)
        self.phase(f"{name}: told after {took_s:.1f} s")

    def healed(self, name: str) -> None:
        self.phase(f"{name}: fresh again after {self.until(f'healed: {name}', self.is_fresh):.1f} s")

    def _everything(self) -> Json:
        said = {observer: self.told(observer) for observer in ("broker", "controller")}
        answer = self.answer("SET timeoutMs = 1000; ")
        return said | {"answer": {key: answer.get(key) for key in answer if "resh" in key or "xcept" in key}}

    # --- what is to be told ---

    def holds_back(self, stage: str, state: str = "") -> Callable[[], bool]:
        """Both observers and EXPLAIN name the stage; the promise is broken, and the alert fires."""

        def held() -> bool:
            for observer in ("broker", "controller"):
                said = self.told(observer)
                stages = {partition["heldBackBy"] for partition in said["partitions"]}
                if stages != {stage} or said["slaState"] != "violated" or said["alert"]["state"] != "firing":
                    return False
                if state and said["state"] != state:
                    return False
            whole, greatest, *_ = self.explained()
            assert whole["Stage"] == "TOTAL"
            return bool(greatest["Stage"] == stage)

        return held

    def metrics_fire(self) -> Callable[[], bool]:
        """The controller's gauge, and the broker's counter of answers that broke the promise."""
        before = self.metric("broker", "pinot_broker_freshnessSlaViolations_total")

        def fire() -> bool:
            counted = self.metric("broker", "pinot_broker_freshnessSlaViolations_total") - before
            return counted > 0 and self.metric("controller", "pinot_controller_freshnessSlaViolated") == 1

        return fire

    def answers_are_old(self, since_s: float) -> Callable[[], bool]:
        """An answer says that it is at least so old as the stall (its rows cannot be newer), and breaks the promise."""

        def old() -> bool:
            stalled_ms = (time.monotonic() - since_s) * 1000
            answer = self.answer()
            assert answer["freshnessLagMs"] is None or answer["freshnessLagMs"] >= stalled_ms - 100, answer
            return answer["freshnessSlaViolated"] is True

        return old


@contextlib.contextmanager
def hanging(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.mark.timeout(600)
def test_whatever_stands_still_is_named_and_nobody_claims_more_than_is_there(tmp_path: Path, phase: Phase) -> None:
    with LocalCluster(tmp_path / "data", servers=2) as cluster:
        world = World(cluster, phase)
        world.start()
        try:
            pipeline_stopped(world)
            table_paused(world)
            one_server_hangs(world)
            one_server_is_dead(world)
            both_servers_hang(world)
        finally:
            world.stop()


def pipeline_stopped(world: World) -> None:
    with stopped(world.cluster.pids()["pipeline"], world.cluster.ready["logDir"]):
        since_s, metrics = time.monotonic(), world.metrics_fire()
        old = world.answers_are_old(since_s)
        world.stall("the pipeline is stopped", world.holds_back("pipeline"), old, metrics)
        time.sleep(SLA_MS / 1000)
        assert old(), "it is told as long as it lasts"
    world.healed("the pipeline goes on")
    world.until("quiet", lambda: world.metric("controller", "pinot_controller_freshnessSlaViolated") == 0)


def table_paused(world: World) -> None:
    world.cluster.rest.call("POST", f"/tables/{APPEND}/pauseConsumption")
    try:
        world.stall("the table is paused", world.holds_back("pipeline", "paused"))
    finally:
        world.cluster.rest.call("POST", f"/tables/{APPEND}/resumeConsumption")
    world.healed("the table is resumed")


def one_server_hangs(world: World) -> None:
    """The other one is as fresh as ever, and queries go there."""
    pid = world.cluster.pids()["server-1"]
    with hanging([pid]):
        world.stall("a server hangs", _one_is_silent(world))
        world.until("as fresh as ever", world.is_fresh)
    world.healed("the server goes on")


def one_server_is_dead(world: World) -> None:
    """Nobody restarts it: the supervisor is stopped."""
    with hanging([world.cluster.ready["pid"]]):
        world.cluster.kill("server-1")
        world.stall("a server is dead", _one_is_silent(world))
        world.until("as fresh as ever", world.is_fresh)
    world.until("restarted", lambda: not world.told("broker")["serversNotResponding"])
    world.healed("the server is restarted")


def _one_is_silent(world: World) -> Callable[[], bool]:
    return lambda: len(world.told("broker")["serversNotResponding"]) == 1


def both_servers_hang(world: World) -> None:
    """Nobody knows how fresh the table is, and nobody says."""
    pids = world.cluster.pids()
    with hanging([pids["server-1"], pids["server-2"]]):

        def unknown() -> bool:
            said = world.told("broker")
            return (
                said["freshnessLagMs"] is None and said["slaState"] == "unknown" and said["numPartitionsReporting"] == 0
            )

        world.stall("both servers hang", unknown)
        answer = world.answer("SET timeoutMs = 1500; ")
        assert answer["exceptions"]
        assert answer["minConsumingFreshnessTimeMs"] == 0
        assert answer["freshnessLagMs"] is None
        assert answer["freshnessSlaViolated"] is True
    world.healed("the servers go on")


@pytest.mark.kafka
@pytest.mark.timeout(600)
def test_a_kafka_that_does_not_answer_is_named(tmp_path: Path, phase: Phase) -> None:
    """Nobody appends meanwhile, and nobody can know that: the table is said to be as old as it may be."""
    with KafkaCluster(tmp_path / "kafka") as kafka, LocalCluster(tmp_path / "data", servers=2) as cluster:
        world = World(cluster, phase, kafka.brokers)
        world.start()
        try:
            world.end_load()
            kafka.pause(1)
            try:
                since_s = time.monotonic()
                world.stall("Kafka is stopped", world.holds_back("stream"), world.answers_are_old(since_s))
            finally:
                kafka.resume(1)
            world.healed("Kafka goes on")
        finally:
            world.stop()
