# SPDX-License-Identifier: Apache-2.0
"""kill -9 of every role, several times, while known rows arrive and queries run: nothing lost, nothing doubled, and no
answer flagged complete was ever wrong. On the embedded log, and with stream and epoch log in Kafka, which is killed and
away for a while, too, and is not there when the cluster starts again.

The checker compares every complete answer with the producer's delivery reports at the offsets that the answer names.
Most answers fall into the time of load and kills, which is as long as the kills take: `CREMANT_KILLS_ROUNDS=10` makes
it longer.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest
from bench.cluster import ClusterError, LocalCluster
from bench.kafka import KafkaCluster
from lanes import WRONG
from ledger import BUCKETS_SQL, SCHEMA, TOTAL_SQL, Checker, EmbeddedSink, KafkaSink, Ledger, table_config

RATE_PER_S = 4_000
PARTITIONS = 4
Kill = tuple[str, float]
#: (role, seconds before the kill). Servers alternate; the pipeline dies most often, twice in quick succession.
KILLS: Sequence[Kill] = (
    ("pipeline", 6.0), ("server-1", 5.0), ("broker", 4.0), ("controller", 5.0), ("pipeline", 6.0), ("pipeline", 3.0),
    ("server-2", 6.0), ("controller", 5.0), ("broker", 3.0), ("server-1", 5.0), ("pipeline", 8.0),
)  # fmt: skip
KILLS_ON_KAFKA: Sequence[Kill] = (
    ("pipeline", 6.0), ("server-1", 5.0), ("kafka", 4.0), ("controller", 5.0), ("pipeline", 5.0), ("server-2", 5.0),
    ("broker", 4.0), ("pipeline", 6.0),
)  # fmt: skip
#: A minute by `CREMANT_KAFKA_AWAY_S=60`, which the whole run has no time for.
KAFKA_AWAY_S = float(os.environ.get("CREMANT_KAFKA_AWAY_S") or 15)
ROUNDS = int(os.environ.get("CREMANT_KILLS_ROUNDS") or 1)
#: A test with fewer than these under load and kills means little.
ANSWERS_MIN, ROWS_MIN = 300, 40_000
Phase = Callable[[str], None]


@pytest.mark.timeout(ROUNDS * 120 + 900)
def test_every_role_is_killed_while_data_flows_and_queries_run(tmp_path: Path, phase: Phase) -> None:
    with LocalCluster(tmp_path / "data", servers=2) as cluster:
        cluster.run("topic", "create", "ledger", "--partitions", str(PARTITIONS))
        cluster.rest.add_table(SCHEMA, table_config(flush_rows=20_000))
        ledger = Ledger(EmbeddedSink(Path(cluster.ready["logDir"])), PARTITIONS)
        kill_under_load(cluster, ledger, KILLS, cluster.kill, phase)
        ledger.close()


@pytest.mark.kafka
@pytest.mark.timeout(ROUNDS * 120 + 900)
def test_every_role_and_kafka_are_killed_while_data_flows_and_queries_run(tmp_path: Path, phase: Phase) -> None:
    with KafkaCluster(tmp_path / "kafka") as kafka:
        options = ("--kafka", kafka.brokers)
        with LocalCluster(tmp_path / "data", servers=2, options=options) as cluster:
            cluster.run("topic", "create", "ledger", "--partitions", str(PARTITIONS), "--kafka", kafka.brokers)
            cluster.rest.add_table(SCHEMA, table_config(flush_rows=20_000, kafka=kafka.brokers))
            ledger = Ledger(KafkaSink(kafka.brokers), PARTITIONS)

            def kill(role: str) -> object:
                if role != "kafka":
                    return cluster.kill(role)
                kafka.kill(1)
                time.sleep(KAFKA_AWAY_S)
                kafka.restart(1, wait=False)
                return f"for {KAFKA_AWAY_S} s"

            kill_under_load(cluster, ledger, KILLS_ON_KAFKA, kill, phase)

            phase("Kafka and the cluster are killed; the cluster starts first")
            kafka.kill(1)
            cluster.kill_supervisor()
            late = threading.Timer(12.0, kafka.restart, args=(1,), kwargs={"wait": False})
            late.start()
            cluster.start()
            took = cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)
            late.join()
            ledger.produce(2_000)
            cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)
            phase(f"exact {took:.1f} s after the start, and again with new rows")
            assert cluster.rest.rows(BUCKETS_SQL) == ledger.expected(ledger.ends())
            ledger.close()


def kill_under_load(
    cluster: LocalCluster,
    ledger: Ledger,
    kills: Sequence[Kill],
    kill: Callable[[str], object],
    phase: Phase,
) -> None:
    """Produces, asks and kills; ends when everything was killed, answers came again after that, every row is in the
    answer and every answer was judged."""
    ledger.produce(1_000)
    cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)
    phase(f"producing at {RATE_PER_S} rows/s, asking, killing")
    checker = Checker(cluster.rest, ledger).start()
    stop = threading.Event()
    producer = threading.Thread(
        target=ledger.produce, args=(10**9,), kwargs={"rate_per_s": RATE_PER_S, "stop": stop.is_set}
    )
    producer.start()
    try:
        for role, delay_s in ROUNDS * tuple(kills):
            time.sleep(delay_s)
            killed = kill(role)
            phase(f"killed {role} ({killed}); {ledger.rows} rows sent, {checker.complete_so_far} complete answers")
        go_on(cluster, ledger, checker)
    finally:
        stop.set()
        producer.join(150)
    assert not producer.is_alive()
    during_load = checker.complete_so_far

    phase("all sent; waiting for the exact answer")
    try:
        took = cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)
    finally:
        findings = checker.stop()
        phase(
            f"{findings.complete} complete answers checked ({during_load} under load), {findings.partial} partial, "
            f"{findings.unanswered} unanswered, longest gap {findings.longest_gap_s:.1f} s, "
            f"{len(findings.wrong)} wrong"
        )
    phase(f"exact {took:.1f} s after the last row")
    assert findings.wrong[:3] == [], WRONG
    assert cluster.rest.rows(BUCKETS_SQL) == ledger.expected(ledger.ends())
    assert ledger.rows > ROWS_MIN


def go_on(cluster: LocalCluster, ledger: Ledger, checker: Checker) -> None:
    """After the last kill, while rows still arrive: until one that came after it is in an answer, and there were enough
    answers for all of this to mean anything."""
    rows_then, until = ledger.rows, time.monotonic() + 240
    while checker.complete_so_far < ANSWERS_MIN or visible_rows(cluster) < rows_then:
        assert time.monotonic() < until, "no new rows in answers long after the last kill"
        time.sleep(0.5)


def visible_rows(cluster: LocalCluster) -> int:
    try:
        return int(cluster.rest.rows(TOTAL_SQL)[0][0])
    except (httpx.HTTPError, ClusterError):
        return 0
