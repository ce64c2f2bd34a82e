# SPDX-License-Identifier: Apache-2.0
"""Ideal state and external view of a table, derived: from records what should be, from reports what is. Pure.

Rules: a DONE segment should be ONLINE on its replicas, an open one CONSUMING on its partition's replicas. What a live
server reports counts; a replica that is ONLINE with another content than the metadata's is in ERROR (I-3). Dead
servers do not appear in the external view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cremant.model.cluster import InstanceReport, PartitionRecord, SegmentReport
from cremant.model.segments import Copy, ReplicaState, SegmentMetadata, SegmentStatus

#: segment name -> instance id -> state
States = dict[str, dict[str, ReplicaState]]


def ideal_state(partitions: Iterable[PartitionRecord], segments: Iterable[SegmentMetadata]) -> States:
    """What every replica should be, segments by name."""
    consuming = {record.consuming: record for record in partitions}
    states: States = {}
    for segment in sorted(segments, key=lambda s: s.name):
        if segment.status is SegmentStatus.DONE:
            states[segment.name] = dict.fromkeys(sorted(segment.replicas), ReplicaState.ONLINE)
        elif segment.name in consuming:
            replicas = consuming[segment.name].replicas
            states[segment.name] = dict.fromkeys(sorted(replicas), ReplicaState.CONSUMING)
    return states


def external_view(
    table: str,
    incarnation: str,
    partitions: Iterable[PartitionRecord],
    segments: Mapping[str, SegmentMetadata],
    reports: Mapping[str, InstanceReport],
) -> States:
    """What live servers say they have. `reports`: instance id -> last report of a live server."""
    online, done = ReplicaState.ONLINE, SegmentStatus.DONE
    open_segments = {record.partition: record.consuming for record in partitions}
    states: States = {}
    for instance in sorted(reports):
        report = reports[instance]
        for tail in report.tails:
            if tail.table != table or tail.incarnation != incarnation or tail.partition not in open_segments:
                continue
            state = ReplicaState.ERROR if tail.error else ReplicaState.CONSUMING
            states.setdefault(open_segments[tail.partition], {})[instance] = state
        for said in report.segments:
            if said.table != table or (metadata := segments.get(said.segment)) is None:
                continue
            # The usual case first: this runs for every replica of every segment.
            usual = said.state is online and metadata.status is done and said.checksum == metadata.checksum
            state = online if usual else replica_state(metadata, said)
            known = states.get(said.segment)
            if known is None:
                states[said.segment] = {instance: state}
            else:
                known[instance] = state
    return {name: states[name] for name in sorted(states)}


def replica_state(metadata: SegmentMetadata, said: SegmentReport) -> ReplicaState:
    if said.state is not ReplicaState.ONLINE:
        return said.state
    if metadata.status is not SegmentStatus.DONE:
        return ReplicaState.CONSUMING  # sealed ahead of the commit: its rows are still the tail's
    differs = metadata.checksum is not None and said.checksum is not None and said.checksum != metadata.checksum
    # Who has rows that others have let go of already gives the same answers.
    return ReplicaState.ERROR if differs and not metadata.compacted_at else ReplicaState.ONLINE


def new_copies(metadata: SegmentMetadata, instance: str, said: SegmentReport, now_ms: int) -> dict[str, Copy] | None:
    """`copies` with this holder registered, or None when nothing changes: only verified, committed content counts, and
    only of a replica: who lost that part serves its files a moment longer, then deletes them. Who has the content and
    cannot serve it (an upsert table whose versions are still on their way) stays a holder."""
    if metadata.status is not SegmentStatus.DONE or metadata.checksum is None or instance not in metadata.replicas:
        return None
    known = metadata.copies.get(instance)
    holds = said.state is ReplicaState.ONLINE and said.checksum == metadata.checksum
    if holds and (known is None or known.checksum != metadata.checksum):
        return {**metadata.copies, instance: Copy(checksum=metadata.checksum, verified_at_ms=now_ms)}
    lost = said.checksum != metadata.checksum and said.state in (ReplicaState.ERROR, ReplicaState.OFFLINE)
    if lost and known is not None:
        return {holder: copy for holder, copy in metadata.copies.items() if holder != instance}
    return None
