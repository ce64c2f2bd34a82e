# SPDX-License-Identifier: Apache-2.0
"""Sealed segments of a controller's tables, without servers: what a committer and its followers would say."""

from __future__ import annotations

from typing import Any

from control import Cluster

from cremant.model.cluster import InstanceReport, SegmentReport
from cremant.model.offsets import Position
from cremant.model.segments import ReplicaState, SegmentMetadata
from cremant.wire.messages import CommitEnd, CommitEndReply, CompletionStatus, SegmentConsumed, SegmentConsumedReply

S1, S2, S3 = "Server_127.0.0.1_8098", "Server_127.0.0.1_8097", "Server_127.0.0.1_8096"


def at(offset: int) -> Position:
    return Position(log_offset=offset, epoch=offset, generation=1, next_offset=offset)


def seal(cluster: Cluster, *, server: str = S1, partition: int = 0, rows: int = 7, **fields: Any) -> SegmentMetadata:
    """Ends the open segment after so many rows, committed by `server`; `fields` of CommitEnd beside. Returns its
    metadata."""
    catalog = cluster.controller.catalog
    record = catalog.tables["gold"]
    opened = catalog.segments["gold"][catalog.partitions["gold"][partition].consuming]
    end = at(opened.start_offset + rows)
    asked = SegmentConsumed(
        instance=server, table="gold", incarnation=record.incarnation, at=end, reason="rowLimit", segment=opened.name
    )
    reply = cluster.send("segmentConsumed", asked, SegmentConsumedReply)
    assert reply.status is CompletionStatus.COMMIT, reply
    ended = CommitEnd(
        instance=server, table="gold", incarnation=record.incarnation, segment=opened.name, token=reply.token, end=end,
        rows=rows, size_bytes=10, checksum="c1", file_checksum="sha256:f1", **fields,
    )  # fmt: skip
    assert cluster.send("commitEnd", ended, CommitEndReply).status is CompletionStatus.COMMIT_SUCCESS
    return catalog.segments["gold"][opened.name]


def holding(*segments: SegmentMetadata, checksum: str | None = "c1") -> InstanceReport:
    """The report of a server that has these segments on its disk (None: it should, and has not)."""
    state = ReplicaState.ONLINE if checksum else ReplicaState.OFFLINE
    return InstanceReport(
        segments=tuple(
            SegmentReport(table="gold", segment=segment.name, state=state, checksum=checksum, bytes=10)
            for segment in segments
        )
    )
