# SPDX-License-Identifier: Apache-2.0
"""What the controller says of copies: where a segment's bytes are, what is safe, what waits for its upload."""

from __future__ import annotations

from control import Cluster, StillClock
from sealed import S1, S2, holding, seal

from cremant.controller.rebalances import segment_unit
from cremant.model.cluster import InstanceRecord, InstanceReport, Role, SegmentReport
from cremant.model.jobs import RebalanceJob
from cremant.model.segments import ReplicaState, StoreState
from cremant.wire.messages import Heartbeat


def test_copies_name_holders_store_state_and_safety(cluster: Cluster) -> None:
    cluster.create(partitions=1, replication=2)
    stored = seal(cluster, store_state=StoreState.STORED, store_url="file:///store/a")
    failed = seal(cluster, store_state=StoreState.FAILED, store_error="disk on fire")
    answer = cluster.get("/tables/gold/copies")
    assert answer["storePolicy"] == "STORE_REQUIRED"
    assert answer["totals"] == {
        "safe": 1, "singleCopy": 1, "noCopy": 0, "lost": 0, "uploadBacklog": 1, "uploadFailed": 1,
    }  # fmt: skip
    assert answer["segments"][stored.name]["safety"] == "safe"
    assert answer["segments"][stored.name]["store"]["url"] == "file:///store/a"
    single = answer["segments"][failed.name]
    assert (single["safety"], single["store"]["state"], single["store"]["error"]) == (
        "singleCopy", "failed", "disk on fire",
    )  # fmt: skip
    assert single["store"]["changedMsAgo"] >= 0
    assert list(single["holders"]) == [S1]
    assert single["holders"][S1]["checksum"] == "c1"
    assert single["holders"][S1]["live"] is True
    assert list(cluster.get("/tables/gold_REALTIME/copies?unsafe=true")["segments"]) == [failed.name]
    assert cluster.request("GET", "/tables/silver/copies").status_code == 404


def test_a_second_verified_copy_makes_a_segment_safe_everywhere_it_is_told(cluster: Cluster) -> None:
    cluster.create(partitions=1, replication=2)
    segment = seal(cluster, store_state=StoreState.FAILED, store_error="no")
    told = cluster.get("/status")["tables"][0]["segments"]
    assert (told["singleCopy"], told["uploadBacklog"], told["uploadError"]) == (1, 1, "no")
    metrics = cluster.request("GET", "/metrics").text
    assert 'cremant_segments_single_copy{table="gold"} 1.0' in metrics
    assert 'cremant_upload_backlog{table="gold"} 1.0' in metrics
    cluster.beat(S2, report=holding(segment))
    assert cluster.get("/status")["tables"][0]["segments"]["singleCopy"] == 0
    metrics = cluster.request("GET", "/metrics").text
    assert 'cremant_segments_single_copy{table="gold"} 0.0' in metrics
    assert 'cremant_segments_unsafe{table="gold"} 0.0' in metrics
    assert 'cremant_upload_backlog{table="gold"} 1.0' in metrics, "it is safe, and its upload still missing"


def test_what_comes_late_does_not_bring_a_copy_back(cluster: Cluster) -> None:
    """A server says that its file is gone; what it had said before arrives, or arrives a second time."""
    cluster.create(partitions=1, replication=2)
    segment = seal(cluster, store_state=StoreState.FAILED)
    gone = SegmentReport(table="gold", segment=segment.name, state=ReplicaState.OFFLINE)
    record = InstanceRecord(id=S2, role=Role.SERVER, host="127.0.0.1", port=8098)
    had = Heartbeat(instance=record, nonce="n1", report=holding(segment), number=1)
    lacks = Heartbeat(instance=record, nonce="n1", report=InstanceReport(segments=(gone,)), number=2)
    for beat, holders in ((had, {S1, S2}), (lacks, {S1}), (had, {S1})):
        cluster.controller.heartbeat(beat)
        assert set(cluster.get("/tables/gold/copies")["segments"][segment.name]["holders"]) == holders


def test_a_rebalance_counts_verified_copies_and_knows_the_only_ones(cluster: Cluster) -> None:
    made = cluster.create(partitions=1)
    only = seal(cluster, store_state=StoreState.FAILED)
    stored = seal(cluster, store_state=StoreState.STORED, store_url="file:///a")
    cluster.beat(S1, report=holding(only, stored))
    from_tail = tuple(
        SegmentReport(table="gold", segment=segment.name, state=ReplicaState.ONLINE) for segment in (only, stored)
    )
    cluster.beat(S2, report=InstanceReport(segments=from_tail))
    job = RebalanceJob(
        job_id="j",
        table="gold",
        incarnation=made.record.incarnation,
        target={0: (S2,)},
        units=0,
        started_ms=0,
        stall_ms=1,
    )
    units = cluster.controller.rebalances.units(job)
    moving = units[segment_unit(only.name)]
    assert (moving.able, moving.sole) == ({S1}, {S1}), "who serves it from its tail has no copy yet"
    assert units[segment_unit(stored.name)].sole == frozenset()
    cluster.beat(S2, report=holding(only, stored))
    units = cluster.controller.rebalances.units(job)
    assert units[segment_unit(only.name)].able == {S1}, "who is no replica may be deleting what it has"


def test_a_reset_that_reaches_nobody_says_so(still_cluster: Cluster) -> None:
    made = still_cluster.create(partitions=1, replication=1)
    name, replica = made.partitions[0].consuming.name, made.partitions[0].record.replicas[0]
    other = S2 if replica == S1 else S1
    still_cluster.beat(other)
    path = f"/segments/gold/{name}/reset"
    assert replica in still_cluster.post(f"{path}?targetInstance={other}", status=404)["error"]
    for asked in (path, "/segments/gold/reset"):
        assert "not alive" in still_cluster.post(f"{asked}?targetInstance=Server_nowhere_1", status=409)["error"]
    assert isinstance(still_cluster.clock, StillClock)
    while replica in still_cluster.controller.instances.live(Role.SERVER):
        still_cluster.clock.advance(1_000)  # in steps: a long one would count as a pause of the controller
        still_cluster.controller.instances.refresh_liveness()
    assert replica in still_cluster.post(path, status=409)["error"]
