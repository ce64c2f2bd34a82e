# SPDX-License-Identifier: Apache-2.0
"""Policies and replication of a live table: what is refused, and what repair makes of what the table had."""

from __future__ import annotations

from typing import Any

import pytest
from control import Cluster, StillClock, table, tail
from repairing import advance, repaired_by_hand
from sealed import S1, S2, holding, seal

from cremant.controller import rest_tables
from cremant.model.cluster import InstanceReport, SegmentReport
from cremant.model.limits import REPAIR_BACKOFF_FIRST_MS, SURPLUS_AFTER_MS, UPLOAD_PATIENCE_MS
from cremant.model.segments import ReplicaState, SegmentMetadata, StoreState


def _config(replication: int = 2, policy: str | None = None, *, peers: bool = True, **segments: Any) -> dict[str, Any]:
    config = table(replication=replication)
    config["segmentsConfig"] |= segments
    if peers:
        config["segmentsConfig"]["peerSegmentDownloadScheme"] = "http"
    if policy:
        config["segmentsConfig"]["completionConfig"] = {"storePolicy": policy}
    return config


def _change(cluster: Cluster, config: dict[str, Any], status: int = 200) -> str:
    answer = cluster.post("/tables/gold", config, method="PUT", status=status)
    return str(answer["status"] if status == 200 else answer["error"])


def _repair(cluster: Cluster, ms: int, *segments: SegmentMetadata) -> None:
    """`ms` later: who is a replica holds these by now."""
    advance(cluster, ms)
    known = cluster.controller.catalog.segments["gold"]
    for server in (S1, S2):
        cluster.beat(server, report=holding(*(s for s in segments if server in known[s.name].replicas)))
    cluster.controller.repair.run_copies()


def test_a_live_table_goes_through_all_policies_and_back(still_cluster: Cluster) -> None:
    cluster, servers = still_cluster, repaired_by_hand(still_cluster)
    cluster.create(partitions=1, replication=2)
    known, copies = cluster.controller.catalog.segments, cluster.controller.repair._copies
    first = seal(cluster, store_state=StoreState.STORED, store_url="file:///a")
    _repair(cluster, 0, first)
    assert copies.missing() == frozenset()

    _change(cluster, _config(policy="STORE_BEST_EFFORT"))
    second = seal(cluster, store_state=StoreState.FAILED)
    _repair(cluster, UPLOAD_PATIENCE_MS, first, second)
    assert [path for _, path in servers.asked] == [f"/segments/gold_REALTIME/{second.name}/upload"]
    servers.waiting.pop()("the store is down")

    _change(cluster, _config(policy="PEERS_ONLY"))
    third = seal(cluster, store_state=StoreState.NONE)
    _repair(cluster, UPLOAD_PATIENCE_MS, first, second, third)
    assert copies.missing() == frozenset(), "two copies each, and the store is not wanted"
    assert known["gold"][first.name].store_url == "file:///a", "what is there is not taken away"
    assert "PEERS_ONLY" in str(cluster.post("/segments/gold/uploadFromServerToDeepstore", status=409)["error"])

    servers.asked.clear()
    _change(cluster, _config(policy="STORE_REQUIRED"))
    _repair(cluster, UPLOAD_PATIENCE_MS, first, second, third)
    assert {key.segment for key in copies.missing()} == {second.name, third.name}
    assert servers.asked, "one at a time, since the store was down last"
    assert all(path.endswith("/upload") for _, path in servers.asked)


def test_more_and_fewer_replicas_are_made_of_what_is_there(still_cluster: Cluster) -> None:
    cluster, _ = still_cluster, repaired_by_hand(still_cluster)
    cluster.create(partitions=1, replication=1)
    known = cluster.controller.catalog.segments
    stored = seal(cluster, store_state=StoreState.STORED, store_url="file:///a")
    assert "needs 2 live servers, found 1" in _change(cluster, _config(2), status=400)
    cluster.beat(S2)
    _change(cluster, _config(2))
    _repair(cluster, 0, stored)
    assert known["gold"][stored.name].replicas == (S1, S2)
    _repair(cluster, REPAIR_BACKOFF_FIRST_MS, stored)
    assert set(known["gold"][stored.name].copies) == {S1, S2}

    unstored = seal(cluster, store_state=StoreState.FAILED)
    _repair(cluster, REPAIR_BACKOFF_FIRST_MS, stored, unstored)
    assert known["gold"][unstored.name].replicas == (S1, S2)
    assert "replication is < 2" in _change(cluster, _config(1), status=400)
    _change(cluster, _config(1, peers=False))
    for _ in range(2):
        _repair(cluster, SURPLUS_AFTER_MS, stored, unstored)
    assert known["gold"][stored.name].replicas == (S1,), "where the partition is consumed"
    assert known["gold"][unstored.name].replicas == (S1, S2), "the store does not have it"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (_config(1), "replication is < 2"),
        (_config(2, "PEERS_ONLY", peers=False), "PEERS_ONLY needs servers that fetch from each other"),
        (_config(2, "STORE_REQUIRED", enableSegmentUploadToController="false"), "contradicts"),
        (_config(2, "STORE_BEST_EFFORT", enableSegmentUploadToController="true"), "contradicts"),
        (_config(2, "NEVER"), "expected one of STORE_REQUIRED"),
        (_config(2, completionConfig={"completionMode": "UPLOAD"}), "expected one of DEFAULT, DOWNLOAD"),
        (_config(2, completionConfig={"uploadWaitMs": 15_000}), "0 to 14999"),
        (_config(2, peerSegmentDownloadScheme="ftp", peers=False), "Must be one of http or https"),
    ],
)
def test_what_contradicts_itself_is_refused_at_creation_and_on_a_live_table(
    cluster: Cluster, config: dict[str, Any], why: str
) -> None:
    cluster.create(partitions=1, replication=2)
    before = cluster.get("/tables/gold")
    assert why in _change(cluster, config, status=400)
    assert cluster.get("/tables/gold") == before
    cluster.request("DELETE", "/tables/gold")
    assert why in str(cluster.post("/tables", config, status=400)["error"])
    assert "gold" not in cluster.controller.catalog.tables


def test_a_policy_that_wants_a_store_which_fails_is_accepted_and_says_so(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.create(partitions=1, replication=2)
    _change(cluster, _config(policy="PEERS_ONLY"))
    monkeypatch.setattr(rest_tables, "probe", lambda store, scratch: "it is read-only")
    answer = cluster.post("/tables/gold", _config(policy="STORE_REQUIRED"), method="PUT")
    assert "it is read-only" in answer["warnings"][0]
    assert "warnings" not in cluster.post("/tables/gold", _config(policy="STORE_REQUIRED"), method="PUT")
    assert "warnings" not in cluster.post("/tables/gold", _config(policy="PEERS_ONLY"), method="PUT")


def test_calls_that_operate_segments_refuse_what_they_cannot_do(still_cluster: Cluster) -> None:
    cluster, servers = still_cluster, repaired_by_hand(still_cluster)
    cluster.create(partitions=1)
    opened = cluster.controller.catalog.partitions["gold"][0].consuming
    for path, status, why in (
        ("/segments/nope/x/reset", 404, "Table nope_REALTIME not found"),
        ("/segments/nope/reset", 404, "Table nope_REALTIME not found"),
        ("/segments/gold_OFFLINE/reset", 404, "gold_OFFLINE not found"),
        (f"/segments/gold/{opened}/reset?type=OFFLINE", 404, "not found"),
        (f"/segments/gold/{opened}/reset?type=both", 400, "expected realtime or offline, found 'both'"),
        ("/segments/gold/..%2F..%2Fetc/reset", 404, "Not Found"),
        ("/segments/gold/..x/reset", 404, "Failed to find segment: ..x"),
        ("/segments/gold/reset?errorSegmentsOnly=perhaps", 400, "expected true or false, found 'perhaps'"),
        ("/segments/nope/uploadFromServerToDeepstore", 404, "Table nope_REALTIME not found"),
        ("/segments/gold/uploadFromServerToDeepstore?segmentNames=..%2Fx", 404, "Failed to find segments: ['../x']"),
        (f"/segments/gold/uploadFromServerToDeepstore?segmentNames={opened}", 409, "not sealed yet"),
        ("/tables/gold/forceCommit?segments=..%2Fx", 400, "not a consuming segment"),
        ("/tables/gold/forceCommit?partitions=-1", 400, "no partition -1"),
        ("/tables/gold/forceCommit?type=OFFLINE", 404, "not found"),
        ("/tables/gold/pauseConsumption?type=OFFLINE", 404, "Table gold_REALTIME not found!"),
        ("/tables/gold/resumeConsumption?type=OFFLINE", 404, "Table gold_REALTIME not found!"),
        ("/tables/nope/resumeConsumption", 404, "Table nope_REALTIME not found!"),
    ):
        assert why in str(cluster.post(path, status=status)["error"]), path
    assert servers.asked == []
    assert cluster.get("/tables/gold/pauseStatus")["pauseFlag"] is False


def test_states_tell_of_a_dead_server_an_error_and_a_segment_between_cut_and_install(still_cluster: Cluster) -> None:
    """As Pinot: who is dead stays in the ideal state and is absent from the external view."""
    cluster, servers = still_cluster, repaired_by_hand(still_cluster)
    made = cluster.create(partitions=1, replication=2)
    sealed = seal(cluster, store_state=StoreState.STORED, store_url="file:///a")
    opened = cluster.controller.catalog.partitions["gold"][0].consuming

    def told(what: str) -> Any:
        return cluster.get(f"/tables/gold/{what}")["REALTIME"]

    def said(state: ReplicaState, checksum: str | None = None, error: str | None = None) -> InstanceReport:
        report = SegmentReport(table="gold", segment=sealed.name, state=state, checksum=checksum, error=error)
        return InstanceReport(segments=(report,), tails=(tail(made, 0, next_offset=7),))

    online, consuming = {S1: "ONLINE", S2: "ONLINE"}, {S1: "CONSUMING", S2: "CONSUMING"}
    assert told("idealstate") == {sealed.name: online, opened: consuming}
    cluster.beat(S1, report=said(ReplicaState.ONLINE, "c1"))
    cluster.beat(S2, report=said(ReplicaState.CONSUMING))
    assert told("externalview") == {sealed.name: {S1: "ONLINE", S2: "CONSUMING"}, opened: consuming}, "S2 builds"
    for state, checksum, error in (
        (ReplicaState.ERROR, None, "the disk is full"),
        (ReplicaState.ONLINE, "other bytes", None),
    ):
        cluster.beat(S2, report=said(state, checksum, error))
        assert told("externalview")[sealed.name] == {S1: "ONLINE", S2: "ERROR"}
    assert told("idealstate")[sealed.name] == online, "what should be does not change"
    cluster.beat(S2, report=said(ReplicaState.OFFLINE))
    assert told("externalview")[sealed.name] == {S1: "ONLINE", S2: "OFFLINE"}
    broken = InstanceReport(tails=(tail(made, 0, error="E-4: no"),))
    cluster.beat(S2, report=broken)
    assert told("externalview") == {sealed.name: {S1: "ONLINE"}, opened: {S1: "CONSUMING", S2: "ERROR"}}
    failing = SegmentReport(table="gold", segment=opened, state=ReplicaState.ERROR, error="its rows cannot be built")
    cluster.beat(S2, report=InstanceReport(segments=(failing,), tails=(tail(made, 0, next_offset=7),)))
    assert told("externalview")[opened] == {S1: "CONSUMING", S2: "ERROR"}, "it consumes, and cannot seal"
    cluster.post("/segments/gold/reset?errorSegmentsOnly=true")
    assert servers.asked == [(S2, f"/segments/gold_REALTIME/{opened}/reset")]
    assert isinstance(cluster.clock, StillClock)
    for _ in range(5):
        advance(cluster, 1_000, S1)
    assert told("externalview") == {sealed.name: {S1: "ONLINE"}, opened: {S1: "CONSUMING"}}
    assert told("idealstate") == {sealed.name: online, opened: consuming}
    by_server = cluster.get("/segments/gold/servers")[0]["serverToSegmentsMap"]
    assert by_server == {S1: [sealed.name, opened], S2: [sealed.name, opened]}
