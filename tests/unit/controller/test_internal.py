# SPDX-License-Identifier: Apache-2.0
"""The conversations with other roles: membership, the view, pipeline leases, segment completion."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import httpx
import msgspec
import pytest
from control import Cluster, schema, table, tail

from cremant.cluster.leases import holder_name
from cremant.cluster.view_delta import apply
from cremant.model.cluster import ClusterView, InstanceRecord, InstanceReport, Role, SegmentReport, TableView
from cremant.model.limits import INSTANCE_DEAD_AFTER_MS
from cremant.model.offsets import Position
from cremant.model.segments import ReplicaState, SegmentStatus
from cremant.wire.codec import decode, encode
from cremant.wire.messages import (
    BaseRequest,
    CommitEnd,
    CommitEndReply,
    CompletionStatus,
    GenerationReply,
    GenerationRequest,
    Heartbeat,
    HeartbeatReply,
    LeaseReply,
    LeaseRequest,
    SegmentConsumed,
    SegmentConsumedReply,
)
from cremant.wire.view import DELTAS, VIEW_HEADER, ViewDelta

S1, S2 = "Server_127.0.0.1_8098", "Server_127.0.0.1_8097"


def at(offset: int) -> Position:
    return Position(log_offset=offset, epoch=offset, generation=1, next_offset=offset)


# --- membership and view ------------------------------------------------------------------------------------------


def test_a_heartbeat_makes_a_member_that_lives(cluster: Cluster) -> None:
    cluster.beat(S1, nonce="abc")
    (instance,) = cluster.view_where(lambda view: bool(view.instances)).instances
    assert (instance.id, instance.role, instance.url, instance.live, instance.nonce) == (
        S1, Role.SERVER, "http://127.0.0.1:8098", True, "abc",
    )  # fmt: skip


def test_a_silent_member_dies_in_the_view_and_comes_back_with_a_heartbeat(cluster: Cluster) -> None:
    cluster.beat(S1)
    cluster.view_where(lambda view: bool(view.instances) and view.instances[0].live)
    began = time.monotonic()
    cluster.view_where(lambda view: not view.instances[0].live)
    assert time.monotonic() - began > INSTANCE_DEAD_AFTER_MS / 1000 - 0.5
    cluster.beat(S1)
    cluster.view_where(lambda view: view.instances[0].live)


def test_a_replaced_process_is_fenced_also_after_a_restart_of_the_controller(cluster: Cluster) -> None:
    cluster.beat(S1, nonce="old")
    old = cluster._beats[S1]
    cluster.beat(S1, nonce="new")
    for _ in range(2):
        cluster._beats[S1], new = old, cluster._beats[S1]
        answer = cluster.beat(S1)
        assert (answer.status_code, answer.headers["x-cremant-error"]) == (409, "Fenced")
        cluster._beats[S1] = new
        cluster.restart()


def test_heartbeats_that_say_nothing_new_publish_nothing(cluster: Cluster) -> None:
    made = cluster.create()
    for offset in range(3):
        cluster.beat(S1, report=InstanceReport(tails=(tail(made, 0, next_offset=offset),)))
    version = cluster.settled_view().version
    for offset in range(3, 20):
        cluster.beat(S1, report=InstanceReport(tails=(tail(made, 0, next_offset=offset),)))
    time.sleep(0.2)
    view = cluster.view()
    assert view.version == version
    assert view.tables["gold"].tails["0"][S1].watermark.next_offset == 19, "who asks without `since` gets fresh numbers"


def _poll(cluster: Cluster, since: int, nonce: str, timeout_ms: int) -> tuple[int, ClusterView | None]:
    answer = cluster.request("GET", f"/internal/v1/view?since={since}&nonce={nonce}&timeoutMs={timeout_ms}")
    return answer.status_code, decode(answer.content, ClusterView) if answer.status_code == 200 else None


def test_segments_that_a_heartbeat_leaves_out_are_as_they_were(cluster: Cluster) -> None:
    """Also after a restart: a controller that does not know them asks for all."""
    made = cluster.create(partitions=1)
    name = made.partitions[0].consuming.name
    said = SegmentReport(table="gold", segment=name, state=ReplicaState.CONSUMING)
    whole = Heartbeat(
        instance=InstanceRecord(id=S1, role=Role.SERVER, host="127.0.0.1", port=8098), nonce="n1",
        report=InstanceReport(segments=(said,)),
    )  # fmt: skip
    kept = msgspec.structs.replace(whole, report=InstanceReport(), segments_kept=True)
    cluster.send("heartbeat", whole, HeartbeatReply)
    view = cluster.settled_view()
    for _ in range(3):
        assert not cluster.send("heartbeat", kept, HeartbeatReply).say_all
    assert cluster.settled_view().version == view.version
    assert cluster.view().tables["gold"].external == {name: {S1: ReplicaState.CONSUMING}}
    another = msgspec.structs.replace(kept, nonce="n2")
    assert cluster.send("heartbeat", another, HeartbeatReply).say_all
    cluster.controller.stop()
    cluster.start()
    assert cluster.send("heartbeat", kept, HeartbeatReply).say_all
    assert cluster.controller.instances.reports() == {}, "a heartbeat that says too little counts for nothing"
    assert not cluster.send("heartbeat", whole, HeartbeatReply).say_all
    assert not cluster.send("heartbeat", kept, HeartbeatReply).say_all


def test_a_long_poll_without_news_gets_304_at_its_timeout(cluster: Cluster) -> None:
    cluster.beat(S1)
    view = cluster.settled_view()
    began = time.monotonic()
    assert _poll(cluster, view.version, view.controller_nonce, 200) == (304, None)
    assert 0.15 < time.monotonic() - began < 5


def test_a_long_poll_ends_as_soon_as_something_changes(cluster: Cluster) -> None:
    made = cluster.create()
    view = cluster.settled_view()
    timer = threading.Timer(0.2, lambda: cluster.controller.tables.set_paused("gold", paused=True, comment=""))
    timer.start()
    began = time.monotonic()
    status, newer = _poll(cluster, view.version, view.controller_nonce, 10_000)
    assert time.monotonic() - began < 5
    assert status == 200
    assert newer is not None
    assert newer.version > view.version
    assert made.name in newer.tables


def test_a_view_of_another_controller_is_answered_at_once(cluster: Cluster) -> None:
    cluster.beat(S1)
    view = cluster.view_where(lambda view: bool(view.instances))
    status, newer = _poll(cluster, view.version, "another", 10_000)
    assert (status, newer and newer.controller_nonce) == (200, view.controller_nonce)


def _poll_deltas(cluster: Cluster, since: int, nonce: str) -> httpx.Response:
    path = f"/internal/v1/view?since={since}&nonce={nonce}&timeoutMs=10000&deltas=true"
    return cluster.request("GET", path)


def test_who_knows_a_recent_view_gets_only_what_changed_since(cluster: Cluster) -> None:
    cluster.create()
    view = cluster.settled_view()
    for name in ("second", "third"):
        cluster.post("/schemas", schema(name))
        cluster.post("/tables", table(name))
        last = cluster.settled_view()
    answer = _poll_deltas(cluster, view.version, view.controller_nonce)
    assert answer.headers[VIEW_HEADER] == DELTAS
    deltas = decode(answer.content, tuple[ViewDelta, ...])
    assert len(deltas) >= 2
    assert all("gold" not in {**delta.tables, **delta.whole} for delta in deltas)
    assert functools.reduce(apply, deltas, view) == last


def test_a_change_is_never_known_before_the_view_that_it_leads_to(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who applied it would ask for what is newer, and be given the older whole view."""
    view = cluster.controller.view
    ahead: list[int] = []
    cluster.beat(S1)
    before = cluster.settled_view()

    class Watched:
        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            if view._deltas and view._deltas[-1].since >= view.version:
                ahead.append(view.version)
            self._lock.release()

    monkeypatch.setattr(view, "_guard", Watched())
    cluster.create()
    assert cluster.settled_view().version > before.version
    assert ahead == []


def test_who_knows_another_or_a_forgotten_view_gets_the_whole_one(cluster: Cluster) -> None:
    cluster.create()
    view = cluster.settled_view()
    for since, nonce in ((view.version, "another"), (-1, view.controller_nonce), (-1, "")):
        answer = _poll_deltas(cluster, since, nonce)
        assert VIEW_HEADER not in answer.headers
        assert decode(answer.content, ClusterView).version == view.version


def test_after_a_restart_no_view_calls_everyone_dead(cluster: Cluster) -> None:
    cluster.create(replication=2)
    cluster.controller.stop()
    cluster.start()
    cluster.beat(S1)
    assert _poll(cluster, -1, "", 100) == (304, None), "the second server was not heard yet"
    cluster.beat(S2)
    view = cluster.view_where(lambda view: bool(view.instances))
    assert all(instance.live for instance in view.instances)


def test_a_heartbeat_that_is_no_heartbeat_is_refused_with_its_place(cluster: Cluster) -> None:
    answer = cluster.request("POST", "/internal/v1/heartbeat", content=b'{"nonce": 5}')
    assert answer.status_code == 400
    assert "Heartbeat" in answer.json()["error"]
    answer = cluster.request("POST", "/internal/v1/heartbeat", content=b'{"x": ' + b"[" * 100_000)
    assert answer.status_code == 400


# --- pipeline -----------------------------------------------------------------------------------------------------


def _lease(cluster: Cluster, made: TableView, holder: str, *, release: bool = False) -> LeaseReply:
    request = LeaseRequest(holder=holder, table="gold", incarnation=made.record.incarnation, release=release)
    reply: LeaseReply = cluster.send("pipeline/lease", request, LeaseReply)
    return reply


def _generation(cluster: Cluster, made: TableView, holder: str) -> Any:
    request = GenerationRequest(holder=holder, table="gold", incarnation=made.record.incarnation)
    return cluster.send("pipeline/generation", request, GenerationReply)


def _refused(cluster: Cluster, path: str, message: Any) -> str:
    answer = cluster.request("POST", f"/internal/v1/{path}", content=encode(message))
    assert (answer.status_code, answer.headers["x-cremant-error"]) == (409, "Fenced")
    return str(answer.json()["error"])


def test_only_the_lease_holder_gets_generations_and_each_once(cluster: Cluster) -> None:
    made = cluster.create()
    one, two = holder_name("P_a", "n1"), holder_name("P_b", "n1")
    assert _lease(cluster, made, one).held
    assert not _lease(cluster, made, two).held
    assert [_generation(cluster, made, one).generation for _ in range(3)] == [1, 2, 3]
    request = GenerationRequest(holder=two, table="gold", incarnation=made.record.incarnation)
    assert "does not hold" in _refused(cluster, "pipeline/generation", request)
    assert not _lease(cluster, made, one, release=True).held
    assert _lease(cluster, made, two).held
    assert _generation(cluster, made, two).generation == 4


def test_a_restarted_pipeline_takes_the_lease_of_its_own_dead_process_at_once(cluster: Cluster) -> None:
    made = cluster.create()
    name = "Pipeline_127.0.0.1_8100"
    cluster.beat(name, Role.PIPELINE, nonce="n1")
    assert _lease(cluster, made, holder_name(name, "n1")).held
    cluster.beat(name, Role.PIPELINE, nonce="n2")
    assert _lease(cluster, made, holder_name(name, "n2")).held
    old = LeaseRequest(holder=holder_name(name, "n1"), table="gold", incarnation=made.record.incarnation)
    assert "newer process" in _refused(cluster, "pipeline/lease", old)


def test_generations_go_on_after_a_restart_and_the_holder_keeps_its_lease(cluster: Cluster) -> None:
    made = cluster.create()
    one, two = holder_name("P_a", "n1"), holder_name("P_b", "n1")
    _lease(cluster, made, one)
    assert _generation(cluster, made, one).generation == 1
    cluster.restart()
    assert not _lease(cluster, made, two).held
    assert _lease(cluster, made, one).held
    assert _generation(cluster, made, one).generation == 2


def test_the_base_is_kept_for_the_next_generation(cluster: Cluster) -> None:
    made = cluster.create()
    one = holder_name("P_a", "n1")
    _lease(cluster, made, one)
    _generation(cluster, made, one)
    incarnation = made.record.incarnation
    base = BaseRequest(table="gold", incarnation=incarnation, generation=1, base=5, checkpoint="c1")
    assert cluster.send("pipeline/base", base, GenerationReply).base == 5
    granted = _generation(cluster, made, one)
    assert (granted.generation, granted.base, granted.checkpoint) == (2, 5, "c1")
    assert "not in force" in _refused(cluster, "pipeline/base", base)


def test_the_pipeline_of_a_dropped_table_is_fenced(cluster: Cluster) -> None:
    made = cluster.create()
    cluster.request("DELETE", "/tables/gold")
    request = LeaseRequest(holder="P:n", table="gold", incarnation=made.record.incarnation)
    assert "dropped" in _refused(cluster, "pipeline/lease", request)


def test_renewals_write_nothing(cluster: Cluster) -> None:
    made = cluster.create()
    _lease(cluster, made, "P:n")
    revision = cluster.store.revision
    for _ in range(5):
        assert _lease(cluster, made, "P:n").held
    assert cluster.store.revision == revision


# --- completion ---------------------------------------------------------------------------------------------------


def _consumed(cluster: Cluster, made: TableView, instance: str, position: Position) -> SegmentConsumedReply:
    message = SegmentConsumed(
        instance=instance, table="gold", incarnation=made.record.incarnation, at=position, reason="rowLimit",
        segment=made.partitions[0].consuming.name,
    )  # fmt: skip
    reply: SegmentConsumedReply = cluster.send("segmentConsumed", message, SegmentConsumedReply)
    return reply


def _ended(cluster: Cluster, made: TableView, instance: str, token: int, position: Position) -> CompletionStatus:
    message = CommitEnd(
        instance=instance, table="gold", incarnation=made.record.incarnation, token=token, end=position, rows=7,
        segment=made.partitions[0].consuming.name, size_bytes=10, checksum="c1", file_checksum="f1", store_url=None,
        min_time_ms=5, max_time_ms=9,
    )  # fmt: skip
    reply: CommitEndReply = cluster.send("commitEnd", message, CommitEndReply)
    return reply.status


def test_a_segment_is_cut_committed_and_followed_by_the_next(cluster: Cluster) -> None:
    made = cluster.create(partitions=1, replication=2)
    reply = _consumed(cluster, made, S1, at(7))
    assert (reply.status, reply.end, reply.token) == (CompletionStatus.COMMIT, at(7), 1)
    assert _consumed(cluster, made, S2, at(7)).status is CompletionStatus.HOLD
    deciding = cluster.view_where(lambda view: view.tables["gold"].partitions[0].consuming.end is not None)
    assert deciding.tables["gold"].segments == (), "not sealed yet: queries still take its rows from the tail"
    assert _ended(cluster, made, S1, 1, at(7)) is CompletionStatus.COMMIT_SUCCESS
    view = cluster.view_where(lambda view: bool(view.tables["gold"].segments)).tables["gold"]
    assert (view.segments[0].status, view.segments[0].end_offset) == (SegmentStatus.DONE, 7)
    assert view.partitions[0].consuming.start == at(7)
    assert view.partitions[0].record.sequence == 1
    assert _consumed(cluster, made, S2, at(7)).status is CompletionStatus.KEEP


def test_completion_goes_on_after_a_restart_at_any_point(cluster: Cluster) -> None:
    made = cluster.create(partitions=1, replication=2)
    assert _consumed(cluster, made, S1, at(7)).token == 1
    cluster.restart()
    assert _consumed(cluster, made, S2, at(9)).status is CompletionStatus.HOLD, "the committer keeps a full lease"
    assert _ended(cluster, made, S1, 1, at(7)) is CompletionStatus.COMMIT_SUCCESS
    cluster.restart()
    assert _ended(cluster, made, S1, 1, at(7)) is CompletionStatus.COMMIT_SUCCESS, "its reply was lost"
    assert _ended(cluster, made, S2, 1, at(7)) is CompletionStatus.FAILED


def test_a_segment_of_a_dropped_table_is_discarded(cluster: Cluster) -> None:
    made = cluster.create(partitions=1)
    cluster.request("DELETE", "/tables/gold")
    assert _consumed(cluster, made, S1, at(7)).status is CompletionStatus.DISCARD


def test_holders_register_their_verified_copies_once(cluster: Cluster) -> None:
    made = cluster.create(partitions=1, replication=2)
    name = made.partitions[0].consuming.name
    _consumed(cluster, made, S1, at(7))
    _ended(cluster, made, S1, 1, at(7))
    said = SegmentReport(table="gold", segment=name, state=ReplicaState.ONLINE, checksum="c1", bytes=10)
    cluster.beat(S2, report=InstanceReport(segments=(said,)))
    revision = cluster.store.revision
    cluster.beat(S2)
    assert cluster.store.revision == revision
    view = cluster.view_where(lambda view: len(view.tables["gold"].segments[0].copies) == 2).tables["gold"]
    assert view.external[name] == {S2: ReplicaState.ONLINE}
    assert sorted(view.segments[0].copies) == [S2, S1]
    wrong = SegmentReport(table="gold", segment=name, state=ReplicaState.ONLINE, checksum="c9")
    cluster.beat(S2, report=InstanceReport(segments=(wrong,)))
    cluster.view_where(lambda view: view.tables["gold"].external[name] == {S2: ReplicaState.ERROR})


def test_a_building_committers_heartbeats_keep_its_lease(cluster: Cluster) -> None:
    made = cluster.create(partitions=1, replication=2)
    name = made.partitions[0].consuming.name
    _consumed(cluster, made, S1, at(7))
    commits = cluster.controller.commits
    before = commits._renewed_until_ms["gold", name]
    time.sleep(0.02)
    building = SegmentReport(table="gold", segment=name, state=ReplicaState.CONSUMING, progress=1)
    cluster.beat(S1, report=InstanceReport(segments=(building,)))
    renewed = commits._renewed_until_ms["gold", name]
    assert renewed > before
    time.sleep(0.02)
    cluster.beat(S1)
    assert commits._renewed_until_ms["gold", name] == renewed, "no progress, no renewal"
