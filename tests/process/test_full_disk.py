# SPDX-License-Identifier: Apache-2.0
"""Full disks: what is asked says so in one line, queries go on, nothing acknowledged is lost, and when there is room
again everything goes on by itself. The disks are small file systems in memory that grow when the test says so."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bench.cluster import ClusterError, LocalCluster
from ledger import BUCKETS_SQL, SCHEMA, TOTAL_SQL, EmbeddedSink, Ledger, table_config

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount file systems")
PARTITIONS = 2


@contextlib.contextmanager
def small_disk(directory: Path, size: str) -> Iterator[None]:
    """Skips where mounting is not allowed (containers)."""
    directory.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def resize(directory: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(directory)], check=True)


def lines(first: int, count: int) -> str:
    rows = (
        {"key": f"k{n}", "bucket": 0, "v": 1, "ts": 1_760_000_000_000, "note": "x" * 400} for n in range(first, count)
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


def messages(cluster: LocalCluster) -> int:
    """What readers of the stream can see: every acknowledged message, and perhaps some that were refused as a batch."""
    (topic,) = json.loads(cluster.run("topic", "list", "--json").stdout)["topics"]
    return int(topic["messages"])


def told(cluster: LocalCluster) -> str:
    """What `cremant status` says."""
    return cluster.run("status", check=False).stdout


@pytest.mark.timeout(600)
def test_a_full_disk_of_stream_and_epoch_log(tmp_path: Path, phase: Callable[[str], None]) -> None:
    log = tmp_path / "log"
    with small_disk(log, "12m"), LocalCluster(tmp_path / "data", servers=1, options=("--log-dir", str(log))) as cluster:
        cluster.run("topic", "create", "ledger", "--partitions", str(PARTITIONS))
        cluster.rest.add_table(SCHEMA, table_config(flush_rows=1_000_000, replication=1))
        cluster.run("produce", "ledger", "-", stdin=lines(0, 1_000))
        cluster.rest.wait_for("SELECT COUNT(*) FROM ledger", [[1_000]], deadline_s=240)

        phase("producing until the disk is full")
        batch = 0
        while not (refused := cluster.run("produce", "ledger", "-", stdin=lines(0, 2_000), check=False)).returncode:
            batch += 1
            assert batch < 40, "40 MB went into 12 MiB"
        assert refused.returncode == 1, refused
        assert "No space left" in refused.stderr or "full" in refused.stderr, refused.stderr
        assert "Traceback" not in refused.stderr
        assert len(refused.stderr.strip().splitlines()) <= 4, refused.stderr

        phase(f"full after {batch} batches; queries go on")
        for _ in range(10):
            answer = cluster.rest.query("SELECT COUNT(*) FROM ledger")
            assert answer["resultTable"]["rows"][0][0] >= 1_000
            time.sleep(0.3)

        phase("room again")
        resize(log, "200m")
        acknowledged = messages(cluster)
        assert acknowledged >= 1_000 + 2_000 * batch
        cluster.rest.wait_for("SELECT COUNT(*) FROM ledger", [[acknowledged]], deadline_s=240)
        cluster.run("produce", "ledger", "-", stdin=lines(0, 100))
        cluster.rest.wait_for("SELECT COUNT(*) FROM ledger", [[acknowledged + 100]], deadline_s=240)


@pytest.mark.timeout(600)
def test_a_full_disk_of_a_server(tmp_path: Path, phase: Callable[[str], None]) -> None:
    disk = tmp_path / "data" / "server-1"
    with small_disk(disk, "3m"), LocalCluster(tmp_path / "data", servers=1) as cluster:
        cluster.run("topic", "create", "ledger", "--partitions", str(PARTITIONS))
        cluster.rest.add_table(SCHEMA, table_config(flush_rows=4_000, replication=1))
        ledger = Ledger(EmbeddedSink(Path(cluster.ready["logDir"])), PARTITIONS)
        ledger.produce(1_000)
        cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)

        phase("sealing until the disk is full")
        until = time.monotonic() + 60
        while not (problem := _problem(cluster)):
            ledger.produce(8_000)
            cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=120)
            assert time.monotonic() < until, f"{ledger.rows} rows on 3 MiB, and nobody complains: {told(cluster)}"
        phase(f"{ledger.rows} rows; status: {problem}")
        assert "Traceback" not in told(cluster)
        assert cluster.rest.rows(BUCKETS_SQL) == ledger.expected(ledger.ends())

        phase("room again")
        resize(disk, "200m")
        ledger.produce(8_000)
        cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)
        _wait_until_sealed(cluster, ledger.rows)
        assert cluster.rest.rows(BUCKETS_SQL) == ledger.expected(ledger.ends())
        ledger.close()


def _problem(cluster: LocalCluster) -> str:
    """What stands below the tables in `cremant status`: nothing while all is well."""
    last = told(cluster).strip().splitlines()[-1]
    return last if "space" in last.lower() or "full" in last.lower() else ""


def _wait_until_sealed(cluster: LocalCluster, rows: int) -> None:
    until = time.monotonic() + 120
    while True:
        (table,) = json.loads(cluster.run("status", "--json").stdout)["tables"]
        segments = table["segments"]
        if segments["online"] == segments["done"] and segments["rows"] >= rows - 4_000 * PARTITIONS:
            return
        if time.monotonic() > until:
            raise ClusterError(f"not sealed: {segments}")
        time.sleep(0.5)
