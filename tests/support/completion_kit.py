# SPDX-License-Identifier: Apache-2.0
"""A cluster of real processes under load, and what must hold of its copies at the end of whatever was done to it."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from feed import Feed
from server_kit import Cluster, Process

from cremant.model.segments import SegmentMetadata
from cremant.store.deepstore import MARKER

FLUSH_ROWS = 1_500
PARTITIONS = 2
#: Sources that did not give a segment; labels: source, cause.
FAILURES = "pinot_server_segmentDownloadFailures_total"


def completion(policy: str, mode: str = "DEFAULT", upload_wait_ms: int = 500) -> dict[str, Any]:
    wanted = {"storePolicy": policy, "completionMode": mode, "uploadWaitMs": upload_wait_ms}
    return {"peerSegmentDownloadScheme": "http", "completionConfig": wanted}


@contextlib.contextmanager
def running(
    root: Path, *, servers: int = 2, settings: dict[str, Any] | None = None, **segments: Any
) -> Iterator[tuple[Cluster, Feed]]:
    cluster = Cluster(root, **(settings or {}))
    broker = None
    try:
        cluster.form(servers, PARTITIONS, FLUSH_ROWS, 2, **segments)
        broker = cluster.add("broker", "broker")
        with Feed(cluster, broker.url) as feed:
            yield cluster, feed
    finally:
        if broker is not None:
            broker.close()
        cluster.close()


def wait_until(condition: Callable[[], Any], what: str, deadline_s: float = 60) -> Any:
    """What the condition gives; nobody's answer counts as no. Looks again and again, but takes a fifth of a core for it
    at most: what is waited for needs the cores."""
    until_s = time.monotonic() + deadline_s
    while True:
        began_s = time.monotonic()
        with contextlib.suppress(httpx.HTTPError, AssertionError):
            if found := condition():
                return found
        looked_s = time.monotonic() - began_s
        if began_s > until_s:
            pytest.fail(f"{what}: not within {deadline_s} s")
        time.sleep(max(0.02, 4 * looked_s))


def sealed(cluster: Cluster) -> list[SegmentMetadata]:
    return list(cluster.view().tables["trips"].segments)


def opened(cluster: Cluster) -> list[SegmentMetadata]:
    return [partition.consuming for partition in cluster.view().tables["trips"].partitions]


def metric(process: Process, name: str, **labels: str) -> float:
    """The sum of all samples of this name with these labels."""
    text = httpx.get(f"{process.url}/metrics", timeout=10, trust_env=False).text
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(want in line for want in wanted))


def totals(cluster: Cluster) -> dict[str, int]:
    found: dict[str, int] = cluster.http.get(f"{cluster.controller.url}/tables/trips/copies").json()["totals"]
    return found


def commits_go_on(cluster: Cluster, count: int = 2 * PARTITIONS, deadline_s: float = 60) -> None:
    before = wait_until(lambda: sealed(cluster) or [None], "the controller answers")
    known = {segment.name for segment in before if segment is not None}
    wait_until(
        lambda: len({segment.name for segment in sealed(cluster)} - known) >= count, f"{count} commits", deadline_s
    )


def converged(cluster: Cluster, feed: Feed, *, stored: bool) -> None:
    """No more rows come. Every segment is on two servers, and in the store; each server alone has every row once; the
    chain of segments has no hole; nobody has files that no record names."""
    feed.pause()
    wait_until(lambda: all(len(segment.copies) == 2 for segment in sealed(cluster)), "two copies of each", 90)
    if stored:
        wait_until(lambda: totals(cluster)["uploadBacklog"] == 0, "each is in the store", 90)
    wait_until(feed.is_exact, "the broker's answer is exact")
    for server in cluster.servers:
        if all(server.id in segment.replicas for segment in (*sealed(cluster), *opened(cluster))):
            wait_until(lambda server=server: cluster.holds_everything(server), f"{server.id} has every row once")
    ends = dict.fromkeys(range(PARTITIONS), 0)
    for segment in sorted(sealed(cluster), key=lambda one: (one.partition, one.sequence)):
        assert segment.start_offset == ends[segment.partition], segment.name
        assert {copy.checksum for copy in segment.copies.values()} == {segment.checksum}
        ends[segment.partition] = segment.end_offset or 0
    for server in cluster.servers:
        wait_until(lambda server=server: not left_over(cluster, server), f"{server.id} has nothing left over", 40)


def left_over(cluster: Cluster, server: Process) -> list[str]:
    """Files and directories of a server that are no part of a segment it should have."""
    wanted = {segment.name for segment in sealed(cluster) if server.id in segment.replicas}
    found = [path for path in (server.data_dir / "segments").glob("*/*") if path.name not in wanted]
    return [str(path) for path in (*found, *(server.data_dir / "scratch").glob("*"))]


def in_store(root: Path) -> set[str]:
    return {path.name for path in (root / "store").rglob("*") if path.is_file() and path.name != MARKER}


def named(cluster: Cluster) -> set[str]:
    return {(segment.store_url or "").rpartition("/")[2] for segment in sealed(cluster)}


def wipe(server: Process) -> None:
    """kill -9, and its disk is gone. Its name is not: that would be another server."""
    server.kill()
    for name in ("segments", "scratch", "tails"):
        shutil.rmtree(server.data_dir / name, ignore_errors=True)
