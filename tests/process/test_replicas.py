# SPDX-License-Identifier: Apache-2.0
"""Two servers that replicate everything, and a broker one can trust: a server that hangs costs nobody the answer, time
never goes backwards for who asks with a token, and a query that nobody waits for ends everywhere."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench.cluster import LocalCluster, Rest, command, is_complete, token_offsets
from lanes import WRONG
from ledger import SCHEMA, TOTAL_SQL, Checker, EmbeddedSink, Ledger, table_config

PARTITIONS = 2
#: Time enough for any answer on any machine: one that waited for a stopped server would be partial at its end.
PATIENT_MS = 60_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("replicas") / "data", servers=2) as running:
        running.run("topic", "create", "ledger", "--partitions", str(PARTITIONS))
        running.rest.add_table(SCHEMA, table_config(flush_rows=5_000))
        yield running


@pytest.fixture(scope="module")
def ledger(cluster: LocalCluster) -> Iterator[Ledger]:
    made = Ledger(EmbeddedSink(Path(cluster.ready["logDir"])), PARTITIONS)
    made.produce(20_000)
    cluster.rest.wait_for(TOTAL_SQL, made.total(), deadline_s=240)
    yield made
    made.close()


@contextlib.contextmanager
def stopped(cluster: LocalCluster, *roles: str) -> Iterator[None]:
    """These processes hang: they hold their connections and answer nothing."""
    pids = [cluster.pids()[role] for role in roles]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 30) -> None:
    until_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until_s, f"{what}: not within {deadline_s} s"
        time.sleep(0.05)


def running(cluster: LocalCluster) -> dict[str, str]:
    found: dict[str, str] = httpx.get(cluster.rest.broker + "/queries", timeout=10).json()
    return found


def post(cluster: LocalCluster, sql: str, *, timeout_s: float = 30) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.post(
        cluster.rest.broker + "/query/sql", json={"sql": sql}, timeout=timeout_s
    ).json()  # fmt: skip
    return answer


def with_token(token: str, sql: str = TOTAL_SQL) -> str:
    return f"SET notBefore = '{token}'; {sql}"


def forged(token: str, **changes: Any) -> str:
    content = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))) | changes
    return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")


def both_servers_live(cluster: LocalCluster) -> bool:
    instances = cluster.rest.call("GET", "/liveinstances")["instances"]
    return sum(name.startswith("Server") for name in instances) == 2


def patient_answer_s(cluster: LocalCluster, ledger: Ledger) -> float:
    """Seconds until the whole right answer came."""
    began_s = time.monotonic()
    answer = post(cluster, f"SET timeoutMs = {PATIENT_MS}; {TOTAL_SQL}", timeout_s=2 * PATIENT_MS / 1000)
    assert is_complete(answer), answer["exceptions"]
    assert answer["resultTable"]["rows"] == ledger.total()
    return time.monotonic() - began_s


def rivals_asked(cluster: LocalCluster) -> float:
    metrics = httpx.get(cluster.rest.broker + "/metrics", timeout=10).text
    (line,) = (line for line in metrics.splitlines() if line.startswith("pinot_broker_hedgedRequests_total "))
    return float(line.split()[1])


@pytest.mark.timeout(300)
def test_a_server_that_hangs_costs_no_answer_before_and_after_it_is_called_dead(
    cluster: LocalCluster, ledger: Ledger, phase: Callable[[str], None]
) -> None:
    """It stands still until enough answers came: none of them can be its own, and each is whole."""
    phase("usual latencies")
    for _ in range(40):
        assert is_complete(cluster.rest.query(TOTAL_SQL))
    for role in ("server-1", "server-2"):
        latencies: list[float] = []
        checker = Checker(cluster.rest, ledger, threads=3).start()
        time.sleep(0.5)
        hedged = rivals_asked(cluster)
        with stopped(cluster, role):
            while both_servers_live(cluster):
                latencies.append(patient_answer_s(cluster, ledger))
            latencies += [patient_answer_s(cluster, ledger) for _ in range(20)]
            hedged = rivals_asked(cluster) - hedged
        findings = checker.stop()
        latencies.sort()
        p99 = latencies[int(len(latencies) * 0.99)]
        phase(
            f"{role} hung: {len(latencies)} answers, p50 {latencies[len(latencies) // 2] * 1000:.0f} ms, "
            f"p99 {p99 * 1000:.0f} ms, longest {latencies[-1] * 1000:.0f} ms, {hedged:.0f} requests asked of another "
            f"replica, too; beside it {findings.complete} complete, {findings.partial} partial"
        )
        assert findings.wrong == [], WRONG
        assert (findings.partial, findings.unanswered) == (0, 0)
        wait_until(lambda: both_servers_live(cluster), "the server is back")


@pytest.mark.timeout(300)
def test_answers_with_a_token_never_go_back(
    cluster: LocalCluster, ledger: Ledger, phase: Callable[[str], None]
) -> None:
    done = threading.Event()
    producer = threading.Thread(
        target=ledger.produce, args=(1_000_000,), kwargs={"rate_per_s": 2_000, "batch": 100, "stop": done.is_set}
    )
    producer.start()
    seen: list[tuple[int, dict[int, int]]] = []
    flagged = 0
    answer = cluster.rest.query(TOTAL_SQL)
    try:
        for round_ in range(4):
            role = ("server-1", "server-2")[round_ % 2]
            hang = stopped(cluster, role) if round_ < 2 else contextlib.nullcontext()
            with hang:
                until_s = time.monotonic() + 1.5
                while time.monotonic() < until_s:
                    later = cluster.rest.query(with_token(answer["readToken"]))
                    if not is_complete(later):
                        flagged += 1
                        continue
                    answer = later
                    seen.append((later["resultTable"]["rows"][0][0], token_offsets(later)))
    finally:
        done.set()
        producer.join(30)
    phase(f"{len(seen)} answers with tokens, {flagged} flagged")
    for (count, offsets), (next_count, next_offsets) in itertools.pairwise(seen):
        assert next_count >= count
        assert all(next_offsets[partition] >= offset for partition, offset in offsets.items())
    assert len(seen) > 20
    assert seen[-1][0] > seen[0][0]

    phase("a token from the future, and tokens that are none")
    token = answer["readToken"]
    cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=60)
    ends = ledger.ends()
    ahead = forged(token, o={str(partition): end + 1 for partition, end in ends.items()})
    short = post(cluster, f"SET timeoutMs = 2500; {with_token(ahead)}")
    assert short["partialResult"] is True
    assert {exception["errorCode"] for exception in short["exceptions"]} <= {305, 427}
    assert "notBefore" in short["exceptions"][0]["message"]
    waiting: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: waiting.append(post(cluster, with_token(ahead))))
    thread.start()
    time.sleep(0.3)
    ledger.produce(200)
    thread.join(30)
    assert is_complete(waiting[0]), waiting[0]["exceptions"]
    offsets = token_offsets(waiting[0])
    assert all(offsets[partition] > end for partition, end in ends.items())
    for bad, said in (
        ("nonsense", "no token"),
        (forged(token, t="other"), "other"),
        (forged(token, i="earlier"), "dropped"),
        (forged(token, o={"7": 1}), "partition 7"),
        (forged(token, o={"0": -1}), "partition 0"),
    ):
        refused = post(cluster, with_token(bad))["exceptions"]
        assert [exception["errorCode"] for exception in refused] == [700]
        assert said in refused[0]["message"]


@pytest.mark.timeout(300)
def test_a_query_ends_when_it_is_cancelled_or_its_client_hangs_up(
    cluster: LocalCluster, ledger: Ledger, phase: Callable[[str], None]
) -> None:
    answers: list[dict[str, Any]] = []
    with stopped(cluster, "server-1", "server-2"):
        sql = f"SET clientQueryId = 'mine'; SET timeoutMs = 60000; {TOTAL_SQL}"
        thread = threading.Thread(target=lambda: answers.append(post(cluster, sql, timeout_s=70)))
        thread.start()
        wait_until(lambda: sql in running(cluster).values(), "the query is listed")
        response = httpx.delete(cluster.rest.broker + "/clientQuery/mine?verbose=true", timeout=10)
        assert response.status_code == 200
        assert response.text.startswith("Cancelled client query: mine on servers: ['http://")
        thread.join(10)
        assert [exception["errorCode"] for exception in answers[0]["exceptions"]] == [503]
        assert httpx.delete(cluster.rest.broker + "/clientQuery/mine", timeout=10).status_code == 404

        phase("cancelled; now the client hangs up")
        with pytest.raises(httpx.ReadTimeout):
            post(cluster, f"SET timeoutMs = 60000; {TOTAL_SQL}", timeout_s=0.5)
        wait_until(lambda: running(cluster) == {}, "the query whose client hung up has ended")
    wait_until(lambda: both_servers_live(cluster), "the servers are back")
    cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=60)


@pytest.mark.timeout(300)
def test_the_broker_answers_while_the_controller_hangs_and_a_new_one_says_that_it_waits(
    cluster: LocalCluster, ledger: Ledger, tmp_path: Path, phase: Callable[[str], None]
) -> None:
    with stopped(cluster, "controller"):
        until_s = time.monotonic() + 5.0  # longer than it takes to call an instance dead
        while time.monotonic() < until_s:
            assert cluster.rest.rows(TOTAL_SQL) == ledger.total()
            time.sleep(0.05)
    phase("a broker whose controller is not there")
    controller = cluster.rest.controller
    with socket.socket() as relay:
        relay.bind(("127.0.0.1", 0))
        port = relay.getsockname()[1]
        environment = {**os.environ, "CREMANT_CONTROLLER_URL": f"http://127.0.0.1:{port}"}
        data_dir = tmp_path / "broker"
        process = subprocess.Popen(
            command("start", "broker", "--port", "0", "--data-dir", str(data_dir)),
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            wait_until((data_dir / "address.json").exists, "the broker listens", 60)
            url = json.loads((data_dir / "address.json").read_text())["url"]
            health = httpx.get(url + "/health", timeout=10)
            assert health.status_code == 503
            assert health.text == f"waiting for the first view from the controller at http://127.0.0.1:{port}"
            refused = httpx.post(url + "/query/sql", json={"sql": TOTAL_SQL}, timeout=10).json()
            assert "not heard from the controller yet" in refused["exceptions"][0]["message"]
            relay.listen(16)
            threading.Thread(target=_forward, args=(relay, controller), daemon=True).start()
            wait_until(lambda: httpx.get(url + "/health", timeout=10).status_code == 200, "the broker has a view", 60)
            other = Rest(controller, url)
            assert other.rows(TOTAL_SQL) == ledger.total()
            other.close()
        finally:
            process.terminate()
            process.wait(20)


def _forward(relay: socket.socket, controller: str) -> None:
    """Connections to `relay` reach the controller from now on."""
    host, _, port = controller.removeprefix("http://").partition(":")

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    with contextlib.suppress(OSError):  # closed at the end of the test
        while True:
            near, _ = relay.accept()
            far = socket.create_connection((host, int(port)))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=copy, args=pair, daemon=True).start()
