# SPDX-License-Identifier: Apache-2.0
"""The controller's driver of segment completion over HTTP: who reported, whose lease, which uploads, which leader."""

from __future__ import annotations

from control import Cluster, tail

from cremant.controller.core import LEADER
from cremant.model.cluster import InstanceReport, TableView
from cremant.model.offsets import Position
from cremant.model.segments import SegmentMetadata, StoredVersions, StoreState
from cremant.segment.cuts import TIME_LIMIT
from cremant.store.lease import lead
from cremant.wire.messages import (
    CommitEnd,
    CommitEndReply,
    CompletionStatus,
    SegmentConsumed,
    SegmentConsumedReply,
    SegmentStored,
    SegmentStoredReply,
    VersionsStored,
    VersionsStoredReply,
)

S1, S2 = "Server_127.0.0.1_8098", "Server_127.0.0.1_8097"


def at(offset: int) -> Position:
    return Position(log_offset=offset, epoch=offset, generation=1, next_offset=offset)


def consumed(cluster: Cluster, made: TableView, instance: str, offset: int, reason: str) -> SegmentConsumedReply:
    message = SegmentConsumed(
        instance=instance, table="gold", incarnation=made.record.incarnation, at=at(offset), reason=reason,
        segment=made.partitions[0].consuming.name,
    )  # fmt: skip
    reply: SegmentConsumedReply = cluster.send("segmentConsumed", message, SegmentConsumedReply)
    return reply


def ended(cluster: Cluster, made: TableView, instance: str, offset: int, state: StoreState) -> CompletionStatus:
    message = CommitEnd(
        instance=instance, table="gold", incarnation=made.record.incarnation, token=1, end=at(offset), rows=7,
        segment=made.partitions[0].consuming.name, size_bytes=10, checksum="c1", file_checksum="f1",
        store_state=state, store_error="down" if state is StoreState.FAILED else None,
    )  # fmt: skip
    reply: CommitEndReply = cluster.send("commitEnd", message, CommitEndReply)
    return reply.status


def stored(cluster: Cluster, made: TableView, url: str | None, *, incarnation: str = "") -> SegmentStoredReply:
    message = SegmentStored(
        instance=S1, table="gold", incarnation=incarnation or made.record.incarnation, checksum="c1",
        file_checksum="f1", segment=made.partitions[0].consuming.name, url=url, error=None if url else "down",
    )  # fmt: skip
    reply: SegmentStoredReply = cluster.send("segmentStored", message, SegmentStoredReply)
    return reply


def record(cluster: Cluster, made: TableView) -> SegmentMetadata:
    return cluster.controller.catalog.segments["gold"][made.partitions[0].consuming.name]


def visible(cluster: Cluster, made: TableView, server: str, offset: int, *, error: str | None = None) -> None:
    report = InstanceReport(tails=(tail(made, 0, next_offset=offset, error=error),))
    assert cluster.beat(server, report=report).status_code == 200


def test_a_cut_by_time_waits_for_the_replicas_that_their_heartbeats_show_to_live(cluster: Cluster) -> None:
    made = cluster.create(partitions=1, replication=2)
    visible(cluster, made, S1, 5)
    visible(cluster, made, S2, 9)
    assert consumed(cluster, made, S1, 5, TIME_LIMIT).status is CompletionStatus.HOLD
    decided = consumed(cluster, made, S2, 9, TIME_LIMIT)
    assert (decided.status, decided.end) == (CompletionStatus.COMMIT, at(9))


def test_a_cut_by_time_does_not_wait_for_a_replica_that_stopped(cluster: Cluster) -> None:
    made = cluster.create(partitions=1, replication=2)
    visible(cluster, made, S1, 5)
    visible(cluster, made, S2, 9, error="E-4: a hole")
    assert consumed(cluster, made, S1, 5, TIME_LIMIT).status is CompletionStatus.COMMIT


def test_an_upload_that_lands_after_its_commit_is_recorded_and_others_are_not_wanted(cluster: Cluster) -> None:
    made = cluster.create(partitions=1)
    assert consumed(cluster, made, S1, 7, "rowLimit").status is CompletionStatus.COMMIT
    assert stored(cluster, made, "file:///x").status is CompletionStatus.HOLD
    assert ended(cluster, made, S1, 7, StoreState.FAILED) is CompletionStatus.COMMIT_SUCCESS
    assert (record(cluster, made).store_state, record(cluster, made).store_error) == (StoreState.FAILED, "down")
    assert stored(cluster, made, "file:///x", incarnation="of another").status is CompletionStatus.DISCARD
    assert stored(cluster, made, "file:///x").status is CompletionStatus.KEEP
    assert (record(cluster, made).store_state, record(cluster, made).store_url) == (StoreState.STORED, "file:///x")
    late = stored(cluster, made, "file:///y")
    assert (late.status, late.store_url) == (CompletionStatus.DISCARD, "file:///x")


def test_a_deposed_controller_says_so_and_changes_nothing(cluster: Cluster) -> None:
    made = cluster.create(partitions=1)
    assert lead(cluster.store, LEADER, "another", now_ms=0, lease_ms=60_000, take_over=True) is not None
    assert consumed(cluster, made, S1, 7, "rowLimit").status is CompletionStatus.NOT_LEADER
    assert record(cluster, made).end is None


def versions_stored(
    cluster: Cluster, made: TableView, url: str, log_offset: int, *, incarnation: str = "", checksum: str = "c1"
) -> VersionsStoredReply:
    position = Position(log_offset=log_offset, epoch=log_offset, generation=1, next_offset=5)
    message = VersionsStored(
        instance=S1, table="gold", incarnation=incarnation or made.record.incarnation, checksum=checksum,
        segment=made.partitions[0].consuming.name,
        versions=StoredVersions(url=url, position=position, size_bytes=3, file_checksum="sha256:00"),
    )  # fmt: skip
    reply: VersionsStoredReply = cluster.send("versionsStored", message, VersionsStoredReply)
    return reply


def test_stored_versions_are_named_by_the_record_and_only_go_forward(cluster: Cluster) -> None:
    made = cluster.create(partitions=1, replication=1)
    visible(cluster, made, S1, 5)
    assert versions_stored(cluster, made, "v7", 7).status is CompletionStatus.HOLD, "it is not committed yet"
    consumed(cluster, made, S1, 5, TIME_LIMIT)
    assert ended(cluster, made, S1, 5, StoreState.PENDING) is CompletionStatus.COMMIT_SUCCESS
    keep, discard = CompletionStatus.KEEP, CompletionStatus.DISCARD
    assert versions_stored(cluster, made, "v7", 7) == VersionsStoredReply(status=keep)
    assert versions_stored(cluster, made, "v7", 7) == VersionsStoredReply(status=discard), "the reply was lost"
    assert versions_stored(cluster, made, "v9", 9) == VersionsStoredReply(status=keep, unnamed="v7")
    assert versions_stored(cluster, made, "v7", 7) == VersionsStoredReply(status=discard, unnamed="v7"), "it was late"
    assert versions_stored(cluster, made, "v9", 11) == VersionsStoredReply(status=keep), "unchanged up to a later place"
    known = record(cluster, made).versions
    assert known is not None
    assert (known.url, known.position.log_offset) == ("v9", 11)
    other = versions_stored(cluster, made, "other", 99, checksum="c2")
    assert other == VersionsStoredReply(status=discard, unnamed="other")
    dropped = versions_stored(cluster, made, "dropped", 99, incarnation="00000000000000ff")
    assert dropped == VersionsStoredReply(status=discard, unnamed="dropped")
    assert record(cluster, made).objects == ("v9",)
