# SPDX-License-Identifier: Apache-2.0
"""What kill -9 does not show: a pipeline that was believed dead and goes on, and a checkpoint from the past.

Tests with kills alone pass even with all the fencing removed; these do not.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.cluster import LocalCluster, command, descendants
from lanes import WRONG
from ledger import BUCKETS_SQL, SCHEMA, TOTAL_SQL, Checker, EmbeddedSink, Ledger, table_config

PARTITIONS = 3


@contextlib.contextmanager
def second_pipeline(cluster: LocalCluster, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another pipeline process on the same log, with a disk of its own: what an operator starts on a second machine."""
    directory.mkdir(parents=True)
    with (directory / "log.jsonl").open("wb") as log:
        process = subprocess.Popen(
            command(
                "start", "pipeline", "--data-dir", str(directory), "--port", "0",
                "--controller", cluster.rest.controller, "--log-dir", cluster.ready["logDir"],
                "--store-uri", str(cluster.data_dir / "store"),
            ),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def pipeline_of(cluster: LocalCluster) -> dict[str, Any]:
    """Who holds the table's lease, the generation in force, and what the holder reports."""
    (table,) = json.loads(cluster.run("status", "--json").stdout)["tables"]
    pipeline: dict[str, Any] = table["pipeline"]
    return pipeline


def wait_for_another_holder(cluster: LocalCluster, old: str, deadline_s: float) -> dict[str, Any]:
    """Until another pipeline holds the lease and runs (its report is of the generation in force)."""
    until = time.monotonic() + deadline_s
    while True:
        pipeline = pipeline_of(cluster)
        report = pipeline["report"] or {}
        is_new = pipeline["holder"] not in (None, old)
        if is_new and report.get("state") == "running" and report["generation"] == pipeline["generation"]:
            return pipeline
        assert time.monotonic() < until, f"nobody took over from {old} within {deadline_s} s: {pipeline}"
        time.sleep(0.25)


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
            shutil.copytree(data / "pipeline", copy, ignore_dangling_symlinks=True, copy_function=_copy_if_there)
            ledger.produce(20_000, rate_per_s=5_000, batch=200)
            cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)
            ledger.produce(1_000)
            phase(f"{attempt}: {ledger.rows} rows; killing everything, restoring the pipeline's directory")
            cluster.kill_supervisor()
            time.sleep(0.5)
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


def told(pipeline: dict[str, Any]) -> str:
    return f"{pipeline['holder']} of generation {pipeline['generation']}"


def _after(ledger: Ledger, stop: threading.Event, producer: threading.Thread) -> list[list[object]]:
    """Ends the producer and returns the total it reached."""
    stop.set()
    producer.join(30)
    return ledger.total()


def _copy_if_there(source: str, target: str) -> None:
    """Spark deletes old files of its checkpoint while we copy: what is gone is not part of the copy."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)
