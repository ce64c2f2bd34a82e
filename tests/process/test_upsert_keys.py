# SPDX-License-Identifier: Apache-2.0
"""What may happen to the state of a key coordinator, on real processes: its checkpoint is lost, it is made anew on
demand, the table is taken back to an earlier epoch, an append table gets keys. Deleted keys stay deleted, every key has
one row, the greatest; nothing but that is ever in an answer that is complete."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench.cluster import ClusterError, LocalCluster, Rest
from orphans import pipeline_of, second_pipeline

from cremant.log.api import Message
from cremant.log.embedded import EmbeddedLog

PARTITIONS = 4
KEYS = 500
SCHEMA: dict[str, Any] = {
    "schemaName": "acc",
    "primaryKeyColumns": ["k"],
    "dimensionFieldSpecs": [{"name": "k", "dataType": "LONG"}, {"name": "gone", "dataType": "BOOLEAN"}],
    "metricFieldSpecs": [{"name": "v", "dataType": "LONG"}],
    "dateTimeFieldSpecs": [
        {"name": "ts", "dataType": "LONG", "format": "1:MILLISECONDS:EPOCH", "granularity": "1:MILLISECONDS"}
    ],
}
UPSERT = {"mode": "FULL", "comparisonColumns": ["ts"], "deleteRecordColumn": "gone"}


def table_config(*, upsert: bool) -> dict[str, Any]:
    """Small segments, so that rows in force are in sealed ones."""
    streams = {
        "streamType": "embedded",
        "stream.embedded.topic.name": "acc",
        "stream.embedded.consumer.prop.auto.offset.reset": "smallest",
        "realtime.segment.flush.threshold.rows": "1500",
    }
    return {
        "tableName": "acc",
        "tableType": "REALTIME",
        "segmentsConfig": {"timeColumnName": "ts", "schemaName": "acc", "replication": "1"},
        "tenants": {},
        "metadata": {},
        "tableIndexConfig": {"streamConfigs": streams},
        **({"upsertConfig": UPSERT} if upsert else {}),
    }


class Accounts:
    """A table of 500 keys in any partition, with late and deleted rows, and what must be in force of it."""

    def __init__(self, cluster: LocalCluster, *, upsert: bool = True) -> None:
        self.cluster = cluster
        cluster.run("topic", "create", "acc", "--partitions", str(PARTITIONS))
        cluster.rest.add_table(SCHEMA, table_config(upsert=upsert))
        self._log = EmbeddedLog(Path(cluster.ready["logDir"]))
        self._random = random.Random(7)
        self._ends = [0] * PARTITIONS
        self._best: dict[int, tuple[tuple[int, int, int], int, bool]] = {}
        self.rows, self.sum = 0, 0

    def produce(self, count: int) -> None:
        waiting: dict[int, list[Message]] = {}
        for _ in range(count):
            partition, key = self._random.randrange(PARTITIONS), self._random.randrange(KEYS)
            ts, value = 1_700_000_000_000 + self._random.randrange(10**6), self._random.randrange(10**6)
            gone = self._random.random() < 0.15
            row = {"k": key, "v": value, "ts": ts, "gone": gone}
            waiting.setdefault(partition, []).append(Message(json.dumps(row).encode()))
            rank = (ts, partition, self._ends[partition])
            self._ends[partition] += 1
            self.rows, self.sum = self.rows + 1, self.sum + value
            if key not in self._best or self._best[key][0] < rank:
                self._best[key] = (rank, value, gone)
        for partition, messages in waiting.items():
            self._log.append("acc", partition, messages)

    def settle(self, deadline_s: float = 120) -> int:
        """Waits for the exact answer; its epoch."""
        alive = [value for _, value, gone in self._best.values() if not gone]
        self.wait([[len(alive), sum(alive)]], deadline_s)
        epoch: int = self.cluster.rest.query("SELECT COUNT(*) FROM acc")["epoch"]
        return epoch

    def wait(self, expected: list[list[int]], deadline_s: float = 120) -> None:
        self.cluster.rest.wait_for("SELECT COUNT(*), SUM(v) FROM acc", expected, deadline_s=deadline_s)

    def step(self, count: int) -> int:
        self.produce(count)
        return self.settle()

    def close(self) -> None:
        self._log.close()


@pytest.fixture
def accounts(tmp_path: Path) -> Iterator[Accounts]:
    with LocalCluster(tmp_path / "data", servers=1) as cluster:
        made = Accounts(cluster)
        for _ in range(6):
            made.step(1_000)
        yield made
        made.close()


def lose_checkpoint(accounts: Accounts) -> None:
    """The pipeline dies, and its disk with it."""
    cluster = accounts.cluster
    before = pipeline_of(cluster)["generation"]
    os.kill(cluster.pids()["pipeline"], signal.SIGKILL)
    shutil.rmtree(cluster.data_dir / "pipeline" / "tables")
    accounts.step(500)
    assert pipeline_of(cluster)["generation"] > before
    accounts.step(1_500)


def rebuild(accounts: Accounts) -> None:
    told = json.loads(accounts.cluster.run("table", "rebuild-keys", "acc", "--wait", "50", "--json").stdout)
    assert told["seconds"] > 0
    accounts.step(1_500)


def rewind(accounts: Accounts) -> None:
    """Back over sealed segments: the same rows are read again, under epochs that nobody has seen."""
    cluster = accounts.cluster
    epoch = accounts.step(300)
    for _ in range(3):
        last = accounts.step(2_000)
    looked = cluster.run("table", "rewind", "acc", "--to-epoch", str(epoch), "--dry-run", "--json")
    assert json.loads(looked.stdout)["segments"], "something sealed is to be given up"
    assert cluster.run("table", "rewind", "acc", "--to-epoch", str(last + 1_000), "--yes", check=False).returncode
    cluster.run("table", "rewind", "acc", "--to-epoch", str(epoch), "--yes")
    deadline_s = time.monotonic() + 120
    while accounts.settle() <= last:
        assert time.monotonic() < deadline_s, "no epoch after the rewind"
    void = cluster.rest.query(f"SET asOfEpoch = {epoch + 1}; SELECT COUNT(*) FROM acc")
    assert void["exceptions"], void
    accounts.step(2_000)


@pytest.mark.timeout(600)
def test_state_that_is_lost_rebuilt_or_taken_back_changes_nothing(
    accounts: Accounts, phase: Callable[[str], None]
) -> None:
    for name, happens in (
        ("lost", lose_checkpoint),
        ("rebuilt", rebuild),
        ("taken back", rewind),
        ("lost again", lose_checkpoint),
    ):
        began_s = time.monotonic()
        happens(accounts)
        phase(f"{name}: exact again with new rows after {time.monotonic() - began_s:.1f} s")


@pytest.mark.timeout(600)
def test_an_append_table_gets_keys(tmp_path: Path, phase: Callable[[str], None]) -> None:
    with LocalCluster(tmp_path / "data", servers=1) as cluster:
        accounts = Accounts(cluster, upsert=False)
        for _ in range(4):
            accounts.produce(1_000)
            accounts.wait([[accounts.rows, accounts.sum]])
        cluster.rest.call("PUT", "/tables/acc", json=table_config(upsert=True))
        accounts.settle()
        phase("every key has one row")
        accounts.step(1_500)
        accounts.close()


# --- a pipeline on standby ---

#: Correctness, not speed, is judged here: CI machines are many times slower than the aim of 5 s.
TAKEOVER_DEADLINE_S = 180.0
WARM_DEADLINE_S = 240.0
#: What the killed leader closed last has arrived by then.
ARRIVED_S = 0.3
#: One row per key, whatever the epoch.
ONE_ROW_PER_KEY = "SELECT COUNT(*), DISTINCTCOUNT(k) FROM acc"


class Busy:
    """Rows all the time, and questions all the time; complete answers that show a key twice are kept."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=body, daemon=True) for body in (self._produce, self._ask)]
        self.answers = 0
        self.wrong: list[list[int]] = []

    def __enter__(self) -> Busy:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _produce(self) -> None:
        while not self._stop.wait(0.1):
            self._accounts.produce(50)

    def _ask(self) -> None:
        while not self._stop.wait(0.1):
            try:
                (row,) = self._accounts.cluster.rest.rows(ONE_ROW_PER_KEY)
            except (httpx.HTTPError, ClusterError):
                continue
            self.answers += 1
            if row[0] != row[1]:
                self.wrong.append(row)


@contextlib.contextmanager
def nobody_restarts(cluster: LocalCluster) -> Iterator[None]:
    """The supervisor of `cremant up` stands still: who takes over is decided, and not by who is quicker."""
    os.kill(cluster.ready["pid"], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(cluster.ready["pid"], signal.SIGCONT)


def wait_until(condition: Callable[[], bool], deadline_s: float, what: str) -> None:
    until_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until_s, f"{what}: not within {deadline_s:.0f} s"
        time.sleep(0.2)


def is_warm(log: Path) -> bool:
    """Whether the pipeline that writes this log says so."""
    return '"warmed up"' in log.read_text(encoding="utf-8", errors="replace")


def seconds_until_next_epoch(rest: Rest, deadline_s: float) -> float:
    """Until an answer is as of a later epoch than those of the first moments."""
    began_s = time.monotonic()
    time.sleep(ARRIVED_S)
    before = None
    while time.monotonic() - began_s < deadline_s:
        with contextlib.suppress(httpx.HTTPError):
            epoch = rest.query("SELECT COUNT(*) FROM acc").get("epoch")
            before = epoch if before is None else before
            if epoch is not None and before is not None and epoch > before:
                return time.monotonic() - began_s
        time.sleep(0.02)
    raise AssertionError(f"no epoch was closed within {deadline_s:.0f} s")


def instance(data_dir: Path) -> str:
    found: str = json.loads((data_dir / "instance.json").read_text(encoding="utf-8"))["id"]
    return found


def holder(cluster: LocalCluster) -> str:
    """The instance that holds the table's lease."""
    return str(pipeline_of(cluster)["holder"]).rpartition(":")[0]


@pytest.mark.timeout(900)
def test_a_standby_takes_over_an_upsert_table(tmp_path: Path, phase: Callable[[str], None]) -> None:
    with LocalCluster(tmp_path / "data", servers=1) as cluster:
        accounts = Accounts(cluster)
        for _ in range(4):
            accounts.step(1_000)
        leader, beside = cluster.data_dir / "pipeline", tmp_path / "standby"
        with second_pipeline(cluster, beside, "--standby", "--set", f"checkpoint_dir={leader}") as standby:
            wait_until(lambda: is_warm(beside / "log.jsonl"), WARM_DEADLINE_S, "the standby is warm")
            kill = {instance(leader): lambda: cluster.kill("pipeline"), instance(beside): standby.kill}
            first, generation = holder(cluster), pipeline_of(cluster)["generation"]
            with Busy(accounts) as busy, nobody_restarts(cluster):
                kill[first]()
                took_s = seconds_until_next_epoch(cluster.rest, TAKEOVER_DEADLINE_S)
                second = holder(cluster)
                phase(f"next epoch {took_s:.1f} s after kill -9: {first} -> {second}")
            assert second in kill, second
            assert second != first
            accounts.settle(240)
            assert busy.answers
            assert busy.wrong == []
            with Busy(accounts) as busy:
                kill[second]()
                took_s = seconds_until_next_epoch(cluster.rest, WARM_DEADLINE_S)
                phase(f"and after kill -9 of that one, too: {took_s:.1f} s, {holder(cluster)}")
            accounts.settle(240)
            assert busy.wrong == []
            # Each takeover takes one, and a start that fails on a busy machine; two that fight for the lease take one
            # every second of the whole test.
            assert generation + 2 <= pipeline_of(cluster)["generation"] <= generation + 20
            log = (beside / "log.jsonl").read_text(encoding="utf-8")
            assert "keys are rebuilt" not in log, "the checkpoint is shared"
        accounts.close()
