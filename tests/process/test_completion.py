# SPDX-License-Identifier: Apache-2.0
"""The deep store goes away while rows flow, on a real cluster of two servers: by best effort commits go on without it,
where it is required they wait while rows and queries go on; when it is back, what it missed lands. The policy is
changed on the live table in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench.cluster import LocalCluster
from bench.outage import away
from lanes import WRONG
from ledger import SCHEMA, TOTAL_SQL, Checker, EmbeddedSink, Findings, Ledger, table_config

PARTITIONS = 2
FLUSH_ROWS = 4_000
Copies = dict[str, dict[str, Any]]


def config(policy: str) -> dict[str, Any]:
    document = table_config(flush_rows=FLUSH_ROWS)
    completion = {"storePolicy": policy, "uploadWaitMs": 2_000}
    document["segmentsConfig"] |= {"peerSegmentDownloadScheme": "http", "completionConfig": completion}
    return document


def copies(cluster: LocalCluster) -> Copies:
    found: Copies = cluster.rest.call("GET", "/tables/ledger/copies")["segments"]
    return found


def states(cluster: LocalCluster) -> list[str]:
    return [segment["store"]["state"] for segment in copies(cluster).values()]


def statuses(cluster: LocalCluster) -> list[str]:
    """Of the segment that each partition's rows go into."""
    view = cluster.rest.call("GET", "/internal/v1/view")["tables"]["ledger"]
    return [partition["consuming"]["status"] for partition in view["partitions"]]


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 120) -> None:
    until_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until_s, f"{what}: not within {deadline_s} s"
        time.sleep(0.1)


def checked(findings: Findings) -> None:
    assert findings.wrong == [], WRONG
    assert findings.unanswered == 0
    assert findings.complete > 0


@pytest.mark.timeout(600)
def test_commits_and_queries_go_on_while_the_store_is_away_and_what_it_missed_lands(
    tmp_path: Path, phase: Callable[[str], None]
) -> None:
    with LocalCluster(tmp_path / "data", servers=2) as cluster:
        store = Path(cluster.ready["dataDir"]) / "store"
        cluster.run("topic", "create", "ledger", "--partitions", str(PARTITIONS))
        cluster.rest.add_table(SCHEMA, config("STORE_BEST_EFFORT"))
        ledger = Ledger(EmbeddedSink(Path(cluster.ready["logDir"])), PARTITIONS)

        def produce(rows: int) -> None:
            ledger.produce(rows)
            cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)

        phase("with the store")
        produce(12_000)
        wait_until(lambda: len(copies(cluster)) >= PARTITIONS, "the first segments")
        wait_until(lambda: set(states(cluster)) == {"stored"}, "the first segments are stored")

        phase("by best effort, without the store")
        checker = Checker(cluster.rest, ledger, threads=2).start()
        with away(store):
            before = set(copies(cluster))
            produce(24_000)
            wait_until(lambda: len(set(copies(cluster)) - before) >= PARTITIONS, "segments committed without the store")
            wait_until(
                lambda: all(len(segment["holders"]) == 2 for segment in copies(cluster).values()), "both have each"
            )
            without = {name: segment for name, segment in copies(cluster).items() if name not in before}
            assert {segment["store"]["state"] for segment in without.values()} == {"failed"}
            assert all("store" in segment["store"]["error"] for segment in without.values())
            assert all(segment["safety"] == "safe" for segment in without.values())
        wait_until(lambda: set(states(cluster)) == {"stored"}, "what the store missed has landed")

        phase("required, without the store: rows and queries go on, commits wait")
        cluster.rest.call("PUT", "/tables/ledger", json=config("STORE_REQUIRED"))
        with away(store):
            before = set(copies(cluster))
            produce(24_000)
            wait_until(lambda: statuses(cluster).count("COMMITTING") == PARTITIONS, "commits wait in each partition")
            assert set(copies(cluster)) == before
        wait_until(lambda: len(set(copies(cluster)) - before) >= PARTITIONS, "commits that waited")
        wait_until(lambda: set(states(cluster)) == {"stored"}, "everything is stored")
        findings = checker.stop()
        phase(f"{findings.complete} complete answers, {findings.partial} partial")
        checked(findings)
        cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=60)
        ledger.close()
