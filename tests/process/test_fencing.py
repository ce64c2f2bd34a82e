# SPDX-License-Identifier: Apache-2.0
"""What kill -9 does not show: a pipeline that was believed dead and goes on, and a checkpoint from the past.

Tests with kills alone pass even with all the fencing removed; this one does not. `CREMANT_FENCING_RESTORED=5` restores
checkpoints one after the other.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.cluster import LocalCluster
from lanes import WRONG
from ledger import BUCKETS_SQL, SCHEMA, TOTAL_SQL, Checker, EmbeddedSink, Ledger, table_config
from orphans import copy_while_it_runs, pipeline_of, second_pipeline, told, wait_for_another_holder
from stopping import stopped

PARTITIONS = 3
RESTORED = int(os.environ.get("CREMANT_FENCING_RESTORED") or 1)


@pytest.mark.timeout(900)
def test_orphans_that_wake_up_and_checkpoints_from_the_past_change_nothing(
    tmp_path: Path, phase: Callable[[str], None]
) -> None:
    """One cluster is put through both, so that the checkpoint that comes back belongs to the fourth generation at
    least."""
    with (
        LocalCluster(tmp_path / "data", servers=1) as cluster,
        contextlib.closing(Ledger(EmbeddedSink(Path(cluster.ready["logDir"])), PARTITIONS)) as ledger,
    ):
        cluster.run("topic", "create", "ledger", "--partitions", str(PARTITIONS))
        cluster.rest.add_table(SCHEMA, table_config(flush_rows=10_000, replication=1))
        ledger.produce(1_000)
        cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)
        checker = Checker(cluster.rest, ledger).start()
        try:
            a_stopped_pipeline_wakes_up(cluster, ledger, tmp_path / "second", phase)
        finally:
            findings = checker.stop()
            phase(f"{findings.complete} complete answers checked, {len(findings.wrong)} wrong")
        assert findings.wrong[:3] == [], WRONG
        assert findings.complete > 200
        for attempt in range(1, RESTORED + 1):
            a_checkpoint_comes_back(cluster, ledger, tmp_path / f"copy-{attempt}", phase)


def a_stopped_pipeline_wakes_up(
    cluster: LocalCluster, ledger: Ledger, directory: Path, phase: Callable[[str], None]
) -> None:
    """SIGSTOP of driver, JVM and Python workers in mid-flight; the lease lapses; a second pipeline takes over; SIGCONT:
    the first one's blocks and marks come late, with a lower generation."""
    stop = threading.Event()
    producer = threading.Thread(
        target=ledger.produce, args=(10_000_000,), kwargs={"rate_per_s": 2_000, "batch": 100, "stop": stop.is_set}
    )
    producer.start()
    try:
        time.sleep(3)
        old = pipeline_of(cluster)
        with (
            stopped(cluster.pids()["pipeline"], cluster.ready["logDir"]) as first,
            second_pipeline(cluster, directory),
        ):
            phase(f"stopped {told(old)}, {len(first.pids)} processes; {ledger.rows} rows sent")
            new = wait_for_another_holder(cluster, old["holder"], 240)
            phase(f"{told(new)} took over")
            time.sleep(2)
            first.go_on()
            phase("the old one goes on")
            time.sleep(6)
            assert pipeline_of(cluster)["holder"] == new["holder"]
            stop.set()
            producer.join(60)
            cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)
            assert cluster.rest.rows(BUCKETS_SQL) == ledger.expected(ledger.ends())
            phase(f"exact at {ledger.rows} rows with both pipelines running; the second one ends")
    finally:
        stop.set()
        producer.join(60)
    ledger.produce(5_000)
    third = wait_for_another_holder(cluster, new["holder"], 240)
    cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)
    assert cluster.rest.rows(BUCKETS_SQL) == ledger.expected(ledger.ends())
    phase(f"{told(third)} took over, exact at {ledger.rows} rows")


def a_checkpoint_comes_back(cluster: LocalCluster, ledger: Ledger, copy: Path, phase: Callable[[str], None]) -> None:
    """The pipeline's directory is copied while it runs; later everything is killed, the old copy put in its place, and
    the cluster started again: commits of the copy are behind the log."""
    home = cluster.data_dir / "pipeline"
    copy_while_it_runs(home, copy)
    ledger.produce(20_000, rate_per_s=5_000, batch=200)
    cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)
    ledger.produce(1_000)
    phase(f"{ledger.rows} rows; killing everything, restoring the pipeline's directory")
    cluster.kill_supervisor()
    ledger.produce(500)
    shutil.rmtree(home)
    shutil.copytree(copy, home)
    cluster.start()
    took = cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)
    assert cluster.rest.rows(BUCKETS_SQL) == ledger.expected(ledger.ends())
    phase(f"exact {took:.1f} s after the start")
    ledger.produce(3_000)
    cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)
    assert cluster.rest.rows(BUCKETS_SQL) == ledger.expected(ledger.ends())
