# SPDX-License-Identifier: Apache-2.0
"""What an operator asks for, on real processes with data flowing: rows that were just produced are sealed, and a table
that moves to another server gets there although the controller dies on the way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench.cluster import ClusterError, LocalCluster, command
from lanes import WRONG
from ledger import BUCKETS_SQL, SCHEMA, TOTAL_SQL, Checker, EmbeddedSink, Ledger, table_config

from cremant.log.api import Message

PARTITIONS = 4
FLUSH_ROWS = 2_000


class HttpSink:
    """Rows over `POST /topics/{topic}`."""

    def __init__(self, controller: str) -> None:
        self._http = httpx.Client(base_url=controller, timeout=60, trust_env=False)

    def append(self, shares: dict[int, list[Message]]) -> dict[int, int]:
        lines = [
            json.dumps({"key": (message.key or b"").decode(), "value": json.loads(message.value or b"")})
            for messages in shares.values()
            for message in messages
        ]
        answer = self._http.post("/topics/ledger?keyed=true", content="\n".join(lines))
        answer.raise_for_status()
        taken = {int(partition): ranges for partition, ranges in answer.json()["offsets"].items()}
        assert {partition: sum(end - first for first, end in ranges) for partition, ranges in taken.items()} == {
            partition: len(messages) for partition, messages in shares.items()
        }
        return {partition: ranges[0][0] for partition, ranges in taken.items()}

    def close(self) -> None:
        self._http.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("operator") / "data", servers=2) as running:
        running.run("topic", "create", "ledger", "--partitions", str(PARTITIONS))
        running.rest.add_table(SCHEMA, table_config(flush_rows=FLUSH_ROWS))
        yield running


@pytest.fixture(scope="module")
def ledger(cluster: LocalCluster) -> Iterator[Ledger]:
    made = Ledger(HttpSink(cluster.rest.controller), PARTITIONS)
    made.produce(1_000)
    cluster.rest.wait_for(TOTAL_SQL, made.total(), deadline_s=240)
    yield made
    made.close()


@pytest.mark.timeout(300)
def test_rows_are_sealed_once_a_force_commit_that_came_right_behind_them_is_done(
    cluster: LocalCluster, ledger: Ledger, phase: Callable[[str], None]
) -> None:
    """Few rows, and more than fit into one segment."""
    for rows in (300, 1, 3 * PARTITIONS * FLUSH_ROWS):
        ledger.produce(rows, batch=10_000)
        job = force_commit(cluster)
        assert job["segmentsForceCommitted"]
        wait_until(lambda job=job: not status_of(cluster, job)["segmentsYetToBeCommitted"], "the job is done", 120)
        assert sealed_rows(cluster) == ledger.rows
        phase(f"{rows} rows: sealed with {len(job['segmentsForceCommitted'])} segments that were open")
    assert cluster.rest.rows(BUCKETS_SQL) == ledger.expected(ledger.ends())
    nothing = force_commit(cluster)
    assert (nothing["segmentsForceCommitted"], nothing["segmentsYetToBeCommitted"]) == ([], [])


@pytest.mark.timeout(300)
def test_a_rebalance_goes_on_after_the_controller_was_killed_in_the_middle_of_it(
    cluster: LocalCluster, ledger: Ledger, tmp_path: Path, phase: Callable[[str], None]
) -> None:
    """The newcomer stands still meanwhile, so that the job cannot be through before the controller dies."""
    done = threading.Event()
    ledger.sink.close()
    ledger.sink = EmbeddedSink(Path(cluster.ready["logDir"]))  # the controller is away for a while
    producer = threading.Thread(
        target=ledger.produce, args=(10_000_000,), kwargs={"rate_per_s": 2_000, "batch": 100, "stop": done.is_set}
    )
    checker = Checker(cluster.rest, ledger).start()
    producer.start()
    with another_server(cluster, tmp_path / "newcomer") as newcomer:
        try:
            wait_until(lambda: len(live_servers(cluster)) == 3, "the new server is live", 60)
            wait_until(lambda: sealed_rows(cluster) >= PARTITIONS * FLUSH_ROWS, "there are segments to move", 60)
            job = cluster.rest.call("POST", "/tables/ledger/rebalance")["jobId"]
            newcomer.send_signal(signal.SIGSTOP)
            before = progress(cluster, job)
            assert before["status"] == "IN_PROGRESS"
            killed = cluster.kill("controller")
            wait_until(lambda: cluster.pids()["controller"] not in (0, killed), "the supervisor starts another", 60)
            wait_until(lambda: answers(cluster), "the controller is back", 60)
            after = progress(cluster, job)
            assert after["status"] == "IN_PROGRESS"
            phase(f"the controller is back, {after['rebalanceProgressStatsOverall']}")
            newcomer.send_signal(signal.SIGCONT)
            wait_until(lambda: progress(cluster, job)["status"] != "IN_PROGRESS", "the job ends", 120)
            assert progress(cluster, job)["status"] == "DONE"
            phase("the job is done")
        finally:
            newcomer.send_signal(signal.SIGCONT)
            done.set()
            producer.join(60)
        cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=120)
        assert cluster.rest.rows(BUCKETS_SQL) == ledger.expected(ledger.ends())
        findings = checker.stop()
        phase(f"{ledger.rows} rows, {findings.complete} complete answers, {findings.partial} partial")
        assert findings.wrong[:3] == [], WRONG
        assert findings.complete > 20
        placed = cluster.rest.call("GET", "/tables/ledger/idealstate")["REALTIME"]
        shares = [sum(server in servers for servers in placed.values()) for server in live_servers(cluster)]
        assert all(len(servers) == 2 for servers in placed.values())
        assert min(shares) > 0, placed


def force_commit(cluster: LocalCluster) -> dict[str, Any]:
    answer = cluster.rest.call("POST", "/tables/ledger/forceCommit")
    return status_of(cluster, {"jobId": answer["forceCommitJobId"]})


def status_of(cluster: LocalCluster, job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = cluster.rest.call("GET", f"/tables/forceCommitStatus/{job['jobId']}")
    return found


def sealed_rows(cluster: LocalCluster) -> int:
    (table,) = cluster.rest.call("GET", "/status")["tables"]
    return int(table["segments"]["rows"])


def progress(cluster: LocalCluster, job: str) -> dict[str, Any]:
    found: dict[str, Any] = cluster.rest.call("GET", f"/rebalanceStatus/{job}")["tableRebalanceProgressStats"]
    return found


def live_servers(cluster: LocalCluster) -> list[str]:
    instances = cluster.rest.call("GET", "/liveinstances")["instances"]
    return [name for name in instances if name.startswith("Server")]


def answers(cluster: LocalCluster) -> bool:
    with contextlib.suppress(httpx.HTTPError, ClusterError):
        cluster.rest.call("GET", "/version")
        return True
    return False


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float) -> None:
    until_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until_s, f"{what}: not within {deadline_s} s"
        time.sleep(0.1)


@contextlib.contextmanager
def another_server(cluster: LocalCluster, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    directory.mkdir()
    with (directory / "log.jsonl").open("wb") as log:
        process = subprocess.Popen(
            command(
                "start", "server", "--data-dir", str(directory), "--port", "0",
                "--controller", cluster.rest.controller, "--log-dir", cluster.ready["logDir"],
                "--store-uri", str(cluster.data_dir / "store"),
            ),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(10)
