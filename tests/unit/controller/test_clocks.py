# SPDX-License-Identifier: Apache-2.0
"""Wall clocks jump: while a controller runs, between two runs of it, forwards and backwards. Nothing may be lost for
it, nobody may die of it, and no lease may last for ever."""

from __future__ import annotations

import json
import time

import msgspec
import pytest
from control import Cluster, StillClock, table, tail

from cremant.cluster.leases import holder_name
from cremant.controller import clock as clock_module
from cremant.controller.clock import Clock
from cremant.controller.housekeeping import CLOCK_DOUBT_MS, CLOCK_DOUBT_WAIT_MS
from cremant.controller.objects import ORPHAN_SEEN_MS
from cremant.model.cluster import InstanceReport, segment_key
from cremant.model.limits import COMMIT_LEASE_MS, PIPELINE_LEASE_MS
from cremant.model.offsets import Position
from cremant.model.segments import SegmentStatus
from cremant.wire.messages import (
    CompletionStatus,
    LeaseReply,
    LeaseRequest,
    SegmentConsumed,
    SegmentConsumedReply,
)

DAY_MS = 86_400_000
S1, S2 = "Server_127.0.0.1_8098", "Server_127.0.0.1_8097"


@pytest.fixture
def cluster(still_cluster: Cluster) -> Cluster:
    return still_cluster


def _clock(cluster: Cluster) -> StillClock:
    clock = cluster.controller.clock
    assert isinstance(clock, StillClock)
    return clock


def _restart_at(cluster: Cluster, ms_later: int) -> StillClock:
    """Another run of the controller, whose wall clock says something else."""
    cluster.clock = StillClock(_clock(cluster).now_ms() + ms_later)
    cluster.restart()
    return _clock(cluster)


def test_the_clock_of_a_run_goes_on_evenly_while_the_wall_clock_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    before_ms = clock.now_ms()
    real_time = time.time
    for jump_s in (86_400.0, -86_400.0):
        monkeypatch.setattr(clock_module.time, "time", lambda jump_s=jump_s: real_time() + jump_s)
        assert 0 <= clock.now_ms() - before_ms < 60_000
        assert abs(clock.wall_ms() - before_ms - jump_s * 1000) < 60_000


def _expiring_table(cluster: Cluster, age_ms: int) -> str:
    made = cluster.create(partitions=1)
    document = table()
    document["segmentsConfig"] |= {"retentionTimeUnit": "DAYS", "retentionTimeValue": "10"}
    cluster.post("/tables/gold", document, method="PUT")
    opened = made.partitions[0].consuming
    end = Position(log_offset=1, epoch=1, generation=1, next_offset=1)
    sealed = msgspec.structs.replace(
        opened, name="gold__0__900__20260101T0000Z", status=SegmentStatus.DONE, end=end, end_offset=1, rows=1,
        max_time_ms=_clock(cluster).now_ms() - age_ms,
    )  # fmt: skip
    cluster.controller.catalog.commit({segment_key("gold", sealed.name): sealed})
    return sealed.name


@pytest.mark.parametrize("jump_ms", [400 * DAY_MS, -400 * DAY_MS])
def test_retention_deletes_nothing_early_when_the_wall_clock_jumps_in_a_run(cluster: Cluster, jump_ms: int) -> None:
    _expiring_table(cluster, 5 * DAY_MS)
    _clock(cluster).wall_offset_ms = jump_ms
    assert cluster.controller.janitor.expire_segments() == 0
    _clock(cluster).wall_offset_ms = 0
    _clock(cluster).advance(6 * DAY_MS)
    assert cluster.controller.janitor.expire_segments() == 1


def test_after_a_start_far_in_the_future_retention_waits_for_somebody_to_notice(cluster: Cluster) -> None:
    _expiring_table(cluster, 5 * DAY_MS)
    clock = _restart_at(cluster, CLOCK_DOUBT_MS + 6 * DAY_MS)
    assert cluster.controller.janitor.expire_segments() == 0
    clock.advance(CLOCK_DOUBT_WAIT_MS)
    assert cluster.controller.janitor.expire_segments() == 1, "a long stop: it is time"


def test_after_an_ordinary_restart_retention_goes_on_at_once(cluster: Cluster) -> None:
    _expiring_table(cluster, 11 * DAY_MS)
    _restart_at(cluster, 60_000)
    assert cluster.controller.janitor.expire_segments() == 1


def _lease(cluster: Cluster, incarnation: str, holder: str) -> bool:
    request = LeaseRequest(holder=holder, table="gold", incarnation=incarnation)
    reply: LeaseReply = cluster.send("pipeline/lease", request, LeaseReply)
    return reply.held


@pytest.mark.parametrize("jump_ms", [-400 * DAY_MS, 400 * DAY_MS])
def test_a_dead_pipelines_lease_lasts_one_lease_after_a_restart_whatever_the_clock_says(
    cluster: Cluster, jump_ms: int
) -> None:
    made = cluster.create()
    one, two = holder_name("Pipeline_a", "n1"), holder_name("Pipeline_b", "n2")
    assert _lease(cluster, made.record.incarnation, one)
    clock = _restart_at(cluster, jump_ms)
    assert not _lease(cluster, made.record.incarnation, two), "the holder gets one full lease"
    clock.advance(PIPELINE_LEASE_MS)
    assert _lease(cluster, made.record.incarnation, two)


@pytest.mark.parametrize("jump_ms", [-400 * DAY_MS, 400 * DAY_MS])
def test_a_dead_committer_is_replaced_after_a_restart_whatever_the_clock_says(cluster: Cluster, jump_ms: int) -> None:
    made = cluster.create(partitions=1, replication=2)
    at = Position(log_offset=7, epoch=7, generation=1, next_offset=7)

    def consumed(instance: str) -> CompletionStatus:
        message = SegmentConsumed(
            instance=instance, table="gold", incarnation=made.record.incarnation, at=at, reason="rowLimit",
            segment=made.partitions[0].consuming.name,
        )  # fmt: skip
        reply: SegmentConsumedReply = cluster.send("segmentConsumed", message, SegmentConsumedReply)
        return reply.status

    assert consumed(S1) is CompletionStatus.COMMIT
    clock = _restart_at(cluster, jump_ms)
    assert consumed(S2) is CompletionStatus.HOLD
    clock.advance(COMMIT_LEASE_MS)
    assert consumed(S2) is CompletionStatus.COMMIT


@pytest.mark.parametrize("jump_ms", [-400 * DAY_MS, 400 * DAY_MS])
def test_a_jump_of_the_wall_clock_kills_nobody(cluster: Cluster, jump_ms: int) -> None:
    made = cluster.create(replication=2)
    cluster.beat(S1, report=InstanceReport(tails=(tail(made, 0),)))
    _clock(cluster).wall_offset_ms = jump_ms
    cluster.controller.instances.refresh_liveness()
    assert all(instance.live for instance in cluster.view().instances)


def test_a_dropped_tables_bytes_go_although_the_clock_went_back(cluster: Cluster) -> None:
    cluster.create()
    cluster.controller.stop()
    cluster.controller.tables.drop("gold")
    _restart_at(cluster, -400 * DAY_MS)
    cluster.controller.tables.finish_drops()
    assert cluster.controller.catalog.being_removed() == []


def test_an_upload_in_progress_is_no_orphan_because_the_clock_jumped(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the store's clock it is old at once; by ours it was only just seen."""
    monkeypatch.setattr("cremant.controller.objects.ORPHAN_OBJECT_AGE_MS", -1)
    made = cluster.create()
    (cluster.directory / "object").write_bytes(b"x")
    cluster.deep_store.put(f"gold/{made.record.incarnation}/one.parquet", cluster.directory / "object")
    objects = cluster.controller.objects
    assert [objects.sweep(), objects.sweep()] == [0, 0]
    _clock(cluster).advance(ORPHAN_SEEN_MS)
    assert objects.sweep() == 1


def test_the_server_measures_ages_by_the_controllers_clock(cluster: Cluster) -> None:
    answer = cluster.beat(S1)
    assert json.loads(answer.content)["nowMs"] == _clock(cluster).now_ms()
