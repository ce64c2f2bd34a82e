# SPDX-License-Identifier: Apache-2.0
"""What kill -9 does not show: a pipeline that was believed dead and goes on, and a checkpoint from the past.

Tests with kills alone pass even with all the fencing removed; these do not.
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.cluster import LocalCluster, descendants
from lanes import WRONG
from ledger import BUCKETS_SQL, SCHEMA, TOTAL_SQL, Checker, EmbeddedSink, Ledger, table_config
from orphans import copy_while_it_runs, pipeline_of, second_pipeline, signal_all, told, wait_for_another_holder

PARTITIONS = 3


@pytest.mark.timeout(900)
def test_a_stopped_pipeline_that_wakes_up_after_its_successor_took_over_changes_nothing(
    tmp_path: Path, phase: Callable[[str], None]
) -> None:
    """SIGSTOP of driver, JVM and Python workers in mid-flight; the lease lapses; a second pipeline takes over; SIGCONT:
    the first one's blocks and marks come late, with a lower generation."""
    with LocalCluster(tmp_path / "data", servers=1) as cluster:
        cluster.run("topic", "create", "ledger", "--partitions", str(PARTITIONS))
        cluster.rest.add_table(SCHEMA, table_config(flush_rows=15_000, replication=1))
        ledger = Ledger(EmbeddedSink(Path(cluster.ready["logDir"])), PARTITIONS)
        ledger.produce(1_000)
        cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)
        checker = Checker(cluster.rest, ledger).start()
        stop = threading.Event()
        producer = threading.Thread(
            target=ledger.produce,
            args=(10_000_000,),
            kwargs={"rate_per_s": 2_000, "batch": 100, "stop": stop.is_set},
        )
        producer.start()
        try:
            time.sleep(3)
            first = cluster.pids()["pipeline"]
            old = pipeline_of(cluster)
            whole = [first, *descendants(first)]
            signal_all(whole, signal.SIGSTOP)
            phase(f"stopped {told(old)}, {len(whole)} processes; {ledger.rows} rows sent")
            with second_pipeline(cluster, tmp_path / "second"):
                new = wait_for_another_holder(cluster, old["holder"], 240)
                phase(f"{told(new)} took over")
                time.sleep(2)
                signal_all(whole, signal.SIGCONT)
                phase("the old one goes on")
                time.sleep(6)
                assert pipeline_of(cluster)["holder"] == new["holder"]
                cluster.rest.wait_for(TOTAL_SQL, _after(ledger, stop, producer), deadline_s=240)
                assert cluster.rest.rows(BUCKETS_SQL) == ledger.expected(ledger.ends())
                phase(f"exact at {ledger.rows} rows with both pipelines running; the second one ends")
            ledger.produce(5_000)
            third = wait_for_another_holder(cluster, new["holder"], 240)
            cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)
            phase(f"{told(third)} took over, exact at {ledger.rows} rows")
        finally:
            stop.set()
            producer.join(30)
            findings = checker.stop()
            phase(f"{findings.complete} complete answers checked, {len(findings.wrong)} wrong")
        assert findings.wrong[:3] == [], WRONG
        assert findings.complete > 200
        assert cluster.rest.rows(BUCKETS_SQL) == ledger.expected(ledger.ends())
        ledger.close()


@pytest.mark.timeout(900)
def test_a_checkpoint_restored_from_an_earlier_copy_loses_and_doubles_nothing(
    tmp_path: Path, phase: Callable[[str], None]
) -> None:
    """The pipeline's directory is copied while it runs; later everything is killed, the old copy put in its place, and
    the cluster started again: commits of the copy are behind the log."""
    data = tmp_path / "data"
    with LocalCluster(data, servers=1) as cluster:
        cluster.run("topic", "create", "ledger", "--partitions", str(PARTITIONS))
        cluster.rest.add_table(SCHEMA, table_config(flush_rows=8_000, replication=1))
        ledger = Ledger(EmbeddedSink(Path(cluster.ready["logDir"])), PARTITIONS)
        ledger.produce(10_000, rate_per_s=5_000, batch=200)
        cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)
        for attempt in (1, 2):
            copy = tmp_path / f"copy-{attempt}"
            copy_while_it_runs(data / "pipeline", copy)
            ledger.produce(20_000, rate_per_s=5_000, batch=200)
            cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)
            ledger.produce(1_000)
            phase(f"{attempt}: {ledger.rows} rows; killing everything, restoring the pipeline's directory")
            cluster.kill_supervisor()
            ledger.produce(500)
            shutil.rmtree(data / "pipeline")
            shutil.copytree(copy, data / "pipeline")
            cluster.start()
            took = cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)
            phase(f"{attempt}: exact {took:.1f} s after the start")
            assert cluster.rest.rows(BUCKETS_SQL) == ledger.expected(ledger.ends())
            ledger.produce(3_000)
            cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)
        assert cluster.rest.rows(BUCKETS_SQL) == ledger.expected(ledger.ends())
        ledger.close()


def _after(ledger: Ledger, stop: threading.Event, producer: threading.Thread) -> list[list[object]]:
    """Ends the producer and returns the total it reached."""
    stop.set()
    producer.join(30)
    return ledger.total()
