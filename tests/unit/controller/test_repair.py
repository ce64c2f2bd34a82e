# SPDX-License-Identifier: Apache-2.0
"""Repair, carried out: what it writes into the records, whom it asks, and what a hanging server does not delay."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from control import Cluster, heartbeat_of, table, tail
from repairing import advance, repaired_by_hand
from sealed import S1, S2, S3, holding, seal

from cremant.controller.repair import ServerCalls
from cremant.log.api import Message
from cremant.model.cluster import InstanceReport, Role, segment_key
from cremant.model.errors import Corrupt, NoResource, StoreFailed, Unavailable
from cremant.model.limits import LOSS_AFTER_MS, REPAIR_AWAY_MS, REPAIR_BACKOFF_FIRST_MS
from cremant.model.names import epoch_topic
from cremant.model.segments import Copy, Loss, StoreState
from cremant.shell.app import error_response
from cremant.shell.journal import Journal
from cremant.wire.messages import HeartbeatReply


def test_a_segment_that_misses_in_the_store_is_uploaded_by_who_has_it(still_cluster: Cluster) -> None:
    cluster, servers = still_cluster, repaired_by_hand(still_cluster)
    cluster.create(partitions=1, replication=2)
    segment = seal(cluster, store_state=StoreState.FAILED, store_error="down")
    repair = cluster.controller.repair
    cluster.beat(S2, report=holding(segment))
    repair.run_copies()
    assert servers.asked == [(S2, f"/segments/gold_REALTIME/{segment.name}/upload")], "its committer reports nothing"
    assert repair.report.uploading == 1
    repair.run_copies()
    assert len(servers.asked) == 1
    servers.waiting.pop()("the disk is on fire")
    assert (repair.report.uploading, repair.report.upload_failures_total) == (0, 1)
    assert repair.causes("gold") == {segment.name: "the disk is on fire"}
    advance(cluster, 2 * REPAIR_BACKOFF_FIRST_MS, S2)
    repair.run_copies()
    assert len(servers.asked) == 2


def test_an_operator_can_have_uploads_asked_for_at_once(still_cluster: Cluster) -> None:
    cluster, servers = still_cluster, repaired_by_hand(still_cluster)
    cluster.create(partitions=1, replication=2)
    stored = seal(cluster, store_state=StoreState.STORED, store_url="file:///a")
    pending = seal(cluster, store_state=StoreState.PENDING)
    cluster.beat(S1, report=holding(stored, pending))
    cluster.controller.repair.run_copies()
    assert servers.asked == [], "the committer has its time"
    answer = cluster.post("/segments/gold/uploadFromServerToDeepstore")
    assert answer == {"status": "Upload of 1 segments asked for", "segments": [pending.name]}
    cluster.controller.repair.run_copies()
    assert servers.asked == [(S1, f"/segments/gold_REALTIME/{pending.name}/upload")]
    assert cluster.post(f"/segments/gold/uploadFromServerToDeepstore?segmentNames={stored.name}")["segments"] == []
    assert "no-such" in str(
        cluster.post("/segments/gold/uploadFromServerToDeepstore?segmentNames=no-such", status=404)["error"]
    )


def test_what_comes_to_miss_something_during_a_run_is_not_decided_by_what_was_said_before(
    still_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, _ = still_cluster, repaired_by_hand(still_cluster)
    cluster.create(partitions=1, replication=2)
    repair = cluster.controller.repair
    seal(cluster, store_state=StoreState.FAILED)
    missing, looks = repair._copies.missing, list[int]()

    def not_yet() -> Any:
        looks.append(1)
        return missing() if len(looks) > 1 else frozenset()

    monkeypatch.setattr(repair._copies, "missing", not_yet)
    repair.run_copies()
    assert (len(looks), repair.report.looked_at) == (2, 0)
    repair.run_copies()
    assert repair.report.looked_at == 1


def test_what_nothing_is_missing_of_is_not_read_in_a_run(still_cluster: Cluster) -> None:
    cluster, _ = still_cluster, repaired_by_hand(still_cluster)
    cluster.create(partitions=1)
    for _ in range(20):
        seal(cluster, store_state=StoreState.STORED, store_url="file:///a")
    missing = seal(cluster, store_state=StoreState.FAILED)
    repair = cluster.controller.repair
    repair.run_copies()
    assert (repair.report.looked_at, repair.report.written, repair.report.missing) == (1, 0, 1)
    cluster.request("DELETE", f"/segments/gold/{missing.name}")
    repair.run_copies()
    assert (repair.report.looked_at, repair.report.missing) == (0, 0)
    metrics = cluster.request("GET", "/metrics").text
    assert "cremant_repair_records_read_total 1.0" in metrics
    cluster.restart()
    assert cluster.controller.repair._copies.missing() == frozenset(), "a restart makes the same index"


def test_what_a_run_costs_is_what_is_missing_not_what_there_is(still_cluster: Cluster) -> None:
    """3 of 10,000 segments miss in the store."""
    cluster, servers = still_cluster, repaired_by_hand(still_cluster)
    cluster.create(partitions=1, replication=2)
    one, catalog = seal(cluster, store_state=StoreState.STORED, store_url="file:///a"), cluster.controller.catalog
    copies = {server: Copy(checksum="c1", verified_at_ms=0) for server in (S1, S2)}
    known = [
        msgspec.structs.replace(
            one, name=f"gold__0__{number}__20270101T0000Z", sequence=number, copies=copies, store_changed_ms=0,
            store_state=StoreState.FAILED if number % 4_000 == 1_000 else StoreState.STORED,
        )
        for number in range(1_000, 11_000)
    ]  # fmt: skip
    catalog.commit({segment_key("gold", segment.name): segment for segment in known})
    for server in (S1, S2):
        cluster.beat(server, report=holding(one, *known))
    repair = cluster.controller.repair
    written: list[int] = []
    catalog.on_change(lambda: written.append(1))
    repair.run_copies()
    assert (repair.report.missing, repair.report.looked_at, repair.report.reports_read) == (3, 3, 2 * 10_001)
    assert len(servers.asked) == 3
    for waiting in servers.waiting:
        waiting("the store is down")
    begun_s = time.perf_counter()
    for _ in range(20):
        advance(cluster, 100)
        repair.run_copies()
    each_ms = (time.perf_counter() - begun_s) * 1000 / 20
    assert (repair.report.reports_read, repair.report.reports_read_total) == (0, 2 * 10_001), "they are as they were"
    assert repair.report.looked_at_total <= 3 * repair.report.runs_total
    assert written == [], "nothing changed"
    assert each_ms < 5, f"{each_ms:.2f} ms a run"


def test_a_server_that_stays_away_is_made_up_for(still_cluster: Cluster) -> None:
    cluster, _ = still_cluster, repaired_by_hand(still_cluster)
    made = cluster.create(partitions=1, replication=2)
    cluster.beat(S3)
    segment = seal(cluster, store_state=StoreState.STORED, store_url="file:///a")
    cluster.beat(S1, report=holding(segment))
    cluster.beat(S2, report=holding(segment))
    controller = cluster.controller
    for _ in range(4):  # in steps: a long one would count as a pause of the controller
        advance(cluster, 1_000, S2, S3)
    controller.repair.run_copies()
    controller.repair.run_liveness()
    for _ in range(2):
        advance(cluster, REPAIR_AWAY_MS, S2, S3)
        controller.repair.run_copies()
        controller.repair.run_liveness()
    catalog = controller.catalog
    assert set(catalog.partitions["gold"][0].replicas) == {S2, S3}
    opened = catalog.segments["gold"][catalog.partitions["gold"][0].consuming]
    assert set(opened.replicas) == {S2, S3}
    assert catalog.segments["gold"][segment.name].replicas == (*made.partitions[0].record.replicas, S3)
    cluster.beat(S3, report=holding(segment))
    advance(cluster, REPAIR_BACKOFF_FIRST_MS, S2, S3)
    controller.repair.run_copies()
    repaired = catalog.segments["gold"][segment.name]
    assert set(repaired.replicas) == set(repaired.copies) == {S2, S3}


def test_a_loss_is_recorded_shown_and_taken_back(still_cluster: Cluster) -> None:
    cluster, _ = still_cluster, repaired_by_hand(still_cluster)
    made = cluster.create(partitions=1)
    segment = seal(cluster, store_state=StoreState.FAILED)
    repair = cluster.controller.repair
    cluster.beat(S1, report=holding(segment, checksum=None))
    assert cluster.controller.catalog.segments["gold"][segment.name].copies == {}
    advance(cluster, LOSS_AFTER_MS, S1)
    repair.run_copies()
    shown = cluster.get("/tables/gold/copies")
    assert shown["segments"][segment.name]["safety"] == "noCopy", "the epoch log still has it"
    topic = epoch_topic("gold", made.record.incarnation)
    for _ in range(5):
        cluster.log.append(topic, 0, [Message(value=b"x")])
    cluster.log.trim(topic, 0, 3)
    repair.run_copies()
    lost = cluster.get("/tables/gold/copies")
    assert lost["totals"]["lost"] == 1
    assert (lost["segments"][segment.name]["lost"]["startOffset"], lost["segments"][segment.name]["lost"]["rows"]) == (
        0,
        7,
    )
    assert cluster.get("/status")["tables"][0]["segments"]["lost"] == [segment.name]
    assert 'cremant_segments_lost{table="gold"} 1.0' in cluster.request("GET", "/metrics").text
    cluster.restart()
    servers = repaired_by_hand(cluster)
    assert cluster.get("/tables/gold/copies")["totals"]["lost"] == 1, "it is durable"
    cluster.beat(S1, report=holding(segment))
    cluster.controller.repair.run_copies()
    assert cluster.get("/tables/gold/copies")["totals"]["lost"] == 0
    assert servers.asked == []


def test_deleting_a_lost_segment_accepts_the_loss(still_cluster: Cluster) -> None:
    cluster, _ = still_cluster, repaired_by_hand(still_cluster)
    cluster.create(partitions=1)
    segment = seal(cluster, store_state=StoreState.FAILED)
    loss = Loss(at_ms=1, rows=7, start_offset=0, end_offset=7, cause="-")
    with cluster.controller.catalog.lock:
        lost = msgspec.structs.replace(segment, lost=loss, copies={})
        cluster.controller.catalog.commit({segment_key("gold", segment.name): lost})
    cluster.view_where(lambda view: any(one.lost for one in view.tables["gold"].segments))
    assert cluster.request("DELETE", f"/segments/gold/{segment.name}").status_code == 200
    cluster.view_where(lambda view: not view.tables["gold"].segments)
    assert cluster.controller.repair._copies.missing() == frozenset()


def test_stopped_replicas_are_asked_to_start_again(still_cluster: Cluster) -> None:
    cluster, servers = still_cluster, repaired_by_hand(still_cluster)
    made = cluster.create(partitions=1)
    stopped = msgspec.structs.replace(tail(made, 0, error="E-4: no"), state="stopped")
    cluster.beat(S1, report=InstanceReport(tails=(stopped,)))
    cluster.controller.repair.run_liveness()
    path = f"/segments/gold_REALTIME/{made.partitions[0].consuming.name}/reset"
    assert servers.asked == [(S1, path)]
    cluster.controller.repair.run_liveness()
    assert servers.asked == [(S1, path)], "later each time"


def test_resets_reach_the_servers_they_are_for(still_cluster: Cluster) -> None:
    cluster, servers = still_cluster, repaired_by_hand(still_cluster)
    made = cluster.create(partitions=2, replication=2)
    name = made.partitions[0].consuming.name
    answer = cluster.post(f"/segments/gold_REALTIME/{name}/reset")
    assert answer == {"status": f"Successfully reset segment: {name} of table: gold_REALTIME"}
    path = f"/segments/gold_REALTIME/{name}/reset"
    assert sorted(servers.asked) == sorted([(S1, path), (S2, path)])
    servers.asked.clear()
    cluster.post(f"/segments/gold/{name}/reset?targetInstance={S2}")
    assert servers.asked == [(S2, path)]
    assert cluster.request("POST", "/segments/gold/nothing/reset").status_code == 404
    servers.asked.clear()
    broken = msgspec.structs.replace(tail(made, 0, error="E-4: no"), state="stopped")
    cluster.beat(S1, report=InstanceReport(tails=(broken,)))
    cluster.post("/segments/gold/reset?errorSegmentsOnly=true")
    assert servers.asked == [(S1, path)]
    servers.asked.clear()
    cluster.post("/segments/gold/reset")
    assert len(servers.asked) == 4


def test_tables_of_other_policies_and_dropped_ones_leave_the_index(still_cluster: Cluster) -> None:
    cluster, _ = still_cluster, repaired_by_hand(still_cluster)
    cluster.create(partitions=1, replication=2)
    segment = seal(cluster, store_state=StoreState.FAILED)
    cluster.beat(S1, report=holding(segment))
    cluster.beat(S2, report=holding(segment))
    copies = cluster.controller.repair._copies
    assert len(copies.missing()) == 1
    config = table(replication=2)
    config["segmentsConfig"] |= {
        "peerSegmentDownloadScheme": "http", "completionConfig": {"storePolicy": "PEERS_ONLY"},
    }  # fmt: skip
    cluster.post("/tables/gold", config, method="PUT")
    assert copies.missing() == frozenset()
    assert cluster.request("POST", "/segments/gold/uploadFromServerToDeepstore").status_code == 409
    config["segmentsConfig"]["completionConfig"] = {"storePolicy": "STORE_BEST_EFFORT"}
    cluster.post("/tables/gold", config, method="PUT")
    assert len(copies.missing()) == 1
    cluster.request("DELETE", "/tables/gold")
    assert copies.missing() == frozenset()


def test_a_server_that_does_not_answer_delays_nobody_and_is_an_error_in_the_end(cluster: Cluster) -> None:
    """A real call to a port that nobody listens on, and one to a server that is no member."""
    cluster.beat(S1)
    calls, ended, done = ServerCalls(cluster.controller.instances), [], threading.Semaphore(0)

    def note(error: str, *, of_store: bool = False) -> None:
        assert not of_store
        ended.append(error)
        done.release()

    with cluster.controller.catalog.lock:
        calls.post(S1, ["/a", "/b"], 500, note)
        calls.post("Server_nowhere_1", ["/a"], 500, note)
    assert done.acquire(timeout=30)
    assert done.acquire(timeout=30)
    assert len(ended) == 2, "once each, however many paths"
    assert any("is no member" in error for error in ended)
    assert any(S1 in error for error in ended)
    calls.close()


def test_what_the_store_did_is_told_from_what_the_server_did(cluster: Cluster) -> None:
    cluster.beat(S1)
    calls, done = ServerCalls(cluster.controller.instances), threading.Semaphore(0)
    heard: list[tuple[str, bool]] = []

    def note(error: str, *, of_store: bool = False) -> None:
        heard.append((error, of_store))
        done.release()

    for kind, status in ((StoreFailed, 503), (Corrupt, 500), (Unavailable, 503)):
        answer = error_response(status, "it went wrong", kind=kind.__name__)
        told = httpx.Response(status, content=bytes(answer.body), headers=dict(answer.headers))
        calls._client = httpx.Client(transport=httpx.MockTransport(lambda request, told=told: told))
        calls.post(S1, ["/segments/gold_REALTIME/one/upload"], 500, note)
        assert done.acquire(timeout=30)
    assert [of_store for _, of_store in heard] == [True, False, False]
    assert all("it went wrong" in error for error, _ in heard)
    calls.close()


def test_repair_runs_by_itself_on_threads_of_its_own(cluster: Cluster) -> None:
    names = {thread._thread.name for thread in cluster.controller._housekeeping}
    assert {"repair of consumption", "repair of copies"} <= names
    deadline_s = time.monotonic() + 30
    while not cluster.controller.repair.report.runs_total:
        assert time.monotonic() < deadline_s
        cluster.send("heartbeat", heartbeat_of(S1), HeartbeatReply)
        time.sleep(0.05)
    assert cluster.controller.instances.live(Role.SERVER) == [S1]


def test_a_story_names_the_servers_that_do_not_tell_theirs(cluster: Cluster, tmp_path: Path) -> None:
    cluster.create(partitions=1)
    cluster.controller.journal = journal = Journal(tmp_path / "journal", "controller", "Controller_x_1")
    log = logging.getLogger("cremant")
    log.setLevel(logging.INFO)
    log.addHandler(journal)
    try:
        segment = seal(cluster, store_state=StoreState.STORED, store_url="file:///a")
    finally:
        log.removeHandler(journal)
    told = cluster.get(f"/segments/gold_REALTIME/{segment.name}/story")
    assert [event["event"] for event in told["events"]] == ["segment consumed", "segment commit ended"]
    assert all(event["cause"] for event in told["events"])
    assert list(told["silent"]) == [S1], "nobody listens there"


def test_a_store_that_is_away_holds_up_no_deletion(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it keeps then is named by nobody, and swept later."""
    cluster.create(partitions=1)
    incarnation = cluster.controller.catalog.tables["gold"].incarnation
    url = f"file://{cluster.deep_store.root}/gold/{incarnation}/y.parquet"
    segments = [seal(cluster, store_state=StoreState.STORED, store_url=url) for _ in range(3)]

    def away(name: str) -> None:
        raise Unavailable(f"{name}: the store hangs")

    monkeypatch.setattr(cluster.deep_store, "delete", away)
    assert cluster.controller.janitor.delete_segments("gold", segments) == 3
    assert cluster.controller.catalog.segments["gold"].keys().isdisjoint(segment.name for segment in segments)


def test_a_write_that_fails_leaves_no_upload_under_way_for_ever(still_cluster: Cluster) -> None:
    cluster, servers = still_cluster, repaired_by_hand(still_cluster)
    cluster.create(partitions=1, replication=2)
    strange = Copy(checksum="c1", verified_at_ms=0)
    catalog = cluster.controller.catalog
    first, second = (seal(cluster, store_state=StoreState.FAILED) for _ in range(2))
    pruned = msgspec.structs.replace(first, copies={**first.copies, S3: strange})
    catalog.commit({segment_key("gold", first.name): pruned})
    cluster.beat(S2, report=holding(second))
    fails = cluster.controller.repair._write

    def full(orders: Any) -> int:
        raise NoResource("the disk is full")

    cluster.controller.repair._write = full  # type: ignore[method-assign]
    with pytest.raises(NoResource):
        cluster.controller.repair.run_copies()
    assert servers.asked == [(S2, f"/segments/gold_REALTIME/{second.name}/upload")]
    servers.waiting.pop()("")
    cluster.controller.repair._write = fails  # type: ignore[method-assign]
    assert cluster.controller.repair.report.uploading == 0
    advance(cluster, REPAIR_BACKOFF_FIRST_MS, S2)
    cluster.controller.repair.run_copies()
    assert S3 not in catalog.segments["gold"][first.name].copies


def test_what_a_run_changes_is_one_commit_however_much_it_is(still_cluster: Cluster) -> None:
    cluster, _ = still_cluster, repaired_by_hand(still_cluster)
    cluster.create(partitions=3, replication=2)
    catalog, repair = cluster.controller.catalog, cluster.controller.repair
    strange = Copy(checksum="c1", verified_at_ms=0)
    for partition in range(3):
        segment = seal(cluster, partition=partition, store_state=StoreState.STORED, store_url="file:///a")
        held = msgspec.structs.replace(segment, copies={**segment.copies, S3: strange})
        catalog.commit({segment_key("gold", segment.name): held})
    cluster.beat(S3)
    commits: list[int] = []
    catalog.on_change(lambda: commits.append(1))
    repair.run_copies()
    assert (repair.report.written, len(commits)) == (3, 1)
    assert all(S3 not in one.copies for one in catalog.segments["gold"].values())
    for _ in range(4):  # in steps: a long one would count as a pause of the controller
        advance(cluster, 1_000, S2, S3)
    repair.run_liveness()
    for _ in range(2):
        advance(cluster, REPAIR_AWAY_MS, S2, S3)
    commits.clear()
    repair.run_liveness()
    assert all(S1 not in one.replicas for one in catalog.partitions["gold"].values())
    assert len(commits) == 1
