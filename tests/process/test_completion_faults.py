# SPDX-License-Identifier: Apache-2.0
"""What can go wrong while segments are completed, on real processes: committers, followers and controllers die at
whatever step they are at, the store is away, hangs and comes back. Rows flow and queries run all the time. At the end
every server has every row once, every segment is twice on disk and once in the store, and nothing is left over."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench.outage import away
from bench.s3 import S3Server
from completion_kit import (
    PARTITIONS,
    commits_go_on,
    completion,
    converged,
    in_store,
    metric,
    named,
    opened,
    running,
    sealed,
    totals,
    wait_until,
)
from server_kit import Cluster, Process

from cremant.model.limits import REPAIR_UPLOADS_MAX
from cremant.model.segments import SegmentMetadata, SegmentStatus, StoreState

Phase = Callable[[str], None]


def kill_a_committer(cluster: Cluster) -> Process:
    """kill -9 at the moment at which a commit is seen that no other replica has a copy of, or one under way."""

    def caught() -> Process | None:
        table = cluster.view().tables["trips"]
        alone = [one for one in table.segments if len(one.copies) < 2]
        under_way = [p.consuming for p in table.partitions if p.consuming.status is SegmentStatus.COMMITTING]
        for segment in (*under_way, *alone):
            for server in cluster.servers:
                if server.id == segment.committer:
                    server.kill()
                    return server
        return None

    found: Process = wait_until(caught, "somebody commits")
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["DEFAULT", "DOWNLOAD"])
def test_committers_die_while_the_store_is_away(tmp_path: Path, mode: str, phase: Phase) -> None:
    with running(tmp_path, **completion("STORE_BEST_EFFORT", mode)) as (cluster, feed):
        commits_go_on(cluster)
        with away(tmp_path / "store"):
            commits_go_on(cluster)
            for _ in range(2):
                dead = kill_a_committer(cluster)
                commits_go_on(cluster)
                dead.start()
                phase("a committer died, commits went on")
            commits_go_on(cluster)
            assert any("store" in (segment.store_error or "") for segment in sealed(cluster))
        converged(cluster, feed, stored=True)
        wait_until(lambda: in_store(tmp_path) == named(cluster), "one object per segment")
        phase(feed.checked())


@pytest.mark.timeout(300)
def test_controllers_die_and_a_server_joins_while_the_store_is_away(tmp_path: Path, phase: Phase) -> None:
    with running(tmp_path, **completion("STORE_BEST_EFFORT")) as (cluster, feed):
        commits_go_on(cluster)
        dice = random.Random("controllers")
        with away(tmp_path / "store"):
            for _ in range(5):
                time.sleep(dice.uniform(0.1, 1.0))
                cluster.controller.kill()
                cluster.controller.start()
            commits_go_on(cluster)
            phase("controllers died")
            newcomer = cluster.add("server", "newcomer")
            cluster.servers.append(newcomer)
            wait_until(lambda: newcomer.id in {one.id for one in cluster.view().instances}, "the newcomer is known")
            job = wait_until(lambda: _rebalance(cluster), "a rebalance begins")
            wait_until(lambda: _status(cluster, job) != "IN_PROGRESS", "the rebalance ends", 120)
            assert _status(cluster, job) == "DONE"
            assert any(newcomer.id in segment.copies for segment in sealed(cluster))
            backlog = totals(cluster)["uploadBacklog"]
            assert backlog >= 4 * PARTITIONS
        phase(f"the newcomer has its part; the store is back, {backlog} segments are missing there")
        feed.pause()
        most, until_s = 0.0, time.monotonic() + 120
        while totals(cluster)["uploadBacklog"]:
            most = max(most, metric(cluster.controller, "cremant_repair_uploads"))
            assert time.monotonic() < until_s, f"the backlog does not drain: {totals(cluster)}"
            time.sleep(0.05)
        assert most <= REPAIR_UPLOADS_MAX
        converged(cluster, feed, stored=True)
        wait_until(lambda: in_store(tmp_path) == named(cluster), "one object per segment")
        phase(feed.checked())


def _rebalance(cluster: Cluster) -> str | None:
    answer = cluster.http.post(f"{cluster.controller.url}/tables/trips/rebalance").json()
    return answer.get("jobId") if answer.get("status") == "IN_PROGRESS" else None


def _status(cluster: Cluster, job: str) -> str:
    found = cluster.http.get(f"{cluster.controller.url}/rebalanceStatus/{job}").json()
    return str(found["tableRebalanceProgressStats"]["status"])


@pytest.mark.timeout(300)
def test_a_store_that_hangs_holds_up_nothing_and_of_two_committers_one_counts(tmp_path: Path, phase: Phase) -> None:
    with S3Server() as s3:
        settings = s3.settings(tmp_path, prefix="trips")
        with running(tmp_path, settings=settings, **completion("STORE_BEST_EFFORT")) as (cluster, feed):
            commits_go_on(cluster)
            with s3.hanging():
                longest_s = _longest_between_commits(cluster, 12 * PARTITIONS)
                phase(f"hung: {longest_s:.1f} s between commits at most")
                before = metric(cluster.controller, "cremant_upload_backlog")
                assert before >= 4 * PARTITIONS
            wait_until(lambda: totals(cluster)["uploadBacklog"] <= PARTITIONS, "the backlog drains", 120)
            phase("what the store missed has landed")

            _change(cluster, completion("STORE_REQUIRED"))
            commits_go_on(cluster)
            with contextlib.ExitStack() as hangs:
                hung_store = hangs.enter_context(contextlib.ExitStack())
                hung_store.enter_context(s3.hanging())
                stale = wait_until(lambda: _all_committing(cluster), "commits wait for the store")
                stopped = next(one for one in cluster.servers if one.id in {each.committer for each in stale})
                hangs.enter_context(stopped.stopped())
                others = wait_until(lambda: _taken_over(cluster, stale, stopped), "another takes over", 90)
                phase(f"{stopped.id} hangs, {len(others)} commits were taken over")
                hung_store.close()
                names = {segment.name for segment in others}
                wait_until(lambda: names <= {segment.name for segment in sealed(cluster)}, "they are committed", 60)
                commits_go_on(cluster)
            done = {segment.name: segment for segment in sealed(cluster) if segment.name in names}
            assert all(segment.committer != stopped.id for segment in done.values())
            phase("the stale committer is back")
            converged(cluster, feed, stored=True)
            wait_until(lambda: s3.objects() == named(cluster), "one object per segment", 90)
            assert all(segment.store_state is StoreState.STORED for segment in sealed(cluster))
        phase(feed.checked())


def _longest_between_commits(cluster: Cluster, count: int) -> float:
    known, last_s, longest_s = len(sealed(cluster)), time.monotonic(), 0.0
    target = known + count
    while known < target:
        found = len(sealed(cluster))
        now_s = time.monotonic()
        if found > known:
            known, last_s = found, now_s
        longest_s = max(longest_s, now_s - last_s)
        assert longest_s < 20, "a store that hangs holds up commits"
        time.sleep(0.02)
    return longest_s


def _change(cluster: Cluster, segments: dict[str, Any]) -> None:
    config = cluster.config | {"segmentsConfig": cluster.config["segmentsConfig"] | segments}
    answer = cluster.http.put(f"{cluster.controller.url}/tables/trips", json=config)
    assert answer.status_code == 200, answer.text


def _all_committing(cluster: Cluster) -> list[SegmentMetadata]:
    found = opened(cluster)
    return found if all(segment.status is SegmentStatus.COMMITTING for segment in found) else []


def _taken_over(cluster: Cluster, stale: list[SegmentMetadata], stopped: Process) -> list[SegmentMetadata]:
    """The commits of `stopped` that have another committer now."""
    wanted = {segment.name for segment in stale if segment.committer == stopped.id}
    found = [one for one in opened(cluster) if one.name in wanted and one.committer != stopped.id]
    return found if len(found) == len(wanted) else []
