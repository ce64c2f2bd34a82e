# SPDX-License-Identifier: Apache-2.0
"""kill -9 of every role, several times, while known rows arrive and queries run: nothing lost, nothing doubled, and no
answer flagged complete was ever wrong. On the embedded log, and with stream and epoch log in Kafka, which is killed and
away for a while, too, and is not there when the cluster starts again.

The checker compares every complete answer with the producer's delivery reports at the offsets that the answer names.
Most answers fall into the time of load and kills.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from bench.cluster import LocalCluster
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
Phase = Callable[[str], None]


@pytest.mark.timeout(900)
def test_every_role_is_killed_while_data_flows_and_queries_run(tmp_path: Path, phase: Phase) -> None:
    with LocalCluster(tmp_path / "data", servers=2) as cluster:
        cluster.run("topic", "create", "ledger", "--partitions", str(PARTITIONS))
        cluster.rest.add_table(SCHEMA, table_config(flush_rows=20_000))
        ledger = Ledger(EmbeddedSink(Path(cluster.ready["logDir"])), PARTITIONS)
        kill_under_load(cluster, ledger, 300_000, KILLS, cluster.kill, phase)
        ledger.close()


@pytest.mark.kafka
@pytest.mark.timeout(900)
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
                threading.Event().wait(KAFKA_AWAY_S)
                kafka.restart(1, wait=False)
                return f"for {KAFKA_AWAY_S} s"

            kill_under_load(cluster, ledger, 150_000, KILLS_ON_KAFKA, kill, phase)

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
    rows: int,
    kills: Sequence[Kill],
    kill: Callable[[str], object],
    phase: Phase,
) -> None:
    """Produces, asks and kills; ends when every row is in the answer and every answer was judged."""
    ledger.produce(1_000)
    cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)
    phase(f"producing {rows} rows at {RATE_PER_S}/s, asking, killing")
    checker = Checker(cluster.rest, ledger).start()
    producer = threading.Thread(target=ledger.produce, args=(rows - 1_000,), kwargs={"rate_per_s": RATE_PER_S})
    producer.start()
    for role, delay_s in kills:
        threading.Event().wait(delay_s)
        killed = kill(role)
        phase(f"killed {role} ({killed}); {ledger.rows} rows sent, {checker.complete_so_far} complete answers")
    producer.join(rows / RATE_PER_S + 120)
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
    assert during_load > 300, "too few answers under load for this test to mean anything"
    assert cluster.rest.rows(BUCKETS_SQL) == ledger.expected(ledger.ends())
    assert ledger.total()[0][0] == rows
