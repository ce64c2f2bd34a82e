# SPDX-License-Identifier: Apache-2.0
"""Where a sealed segment's bytes are, and what that makes of it: safe, a single copy, without any, lost. Pure.

Rules

- A *holder* is a server that has verified the committed content on its own disk. It stays one while it is away: its
  disk comes back with it.
- Who is to delete its own copy relies on holders that serve the segment now. One that has just come back may have lost
  its disk: it stays in the record until it says so.
- *Safe* = in the deep store, or two holders: the loss of any one server loses nothing. Before that the segment's range
  of the epoch log is kept (I-6), so that lost copies can be made again from it.
- Of an upsert table, a copy is the rows and the versions of them: which are in force, as of a position of the epoch
  log. What the log has from there on is needed to bring them up to date, and so it is kept (I-6).
- *Lost* is what somebody recorded: no copy, and the epoch log has the range no more. It is never guessed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

from cremant.completion.safeguards import ALL, Safeguards
from cremant.model.completion import StorePolicy
from cremant.model.segments import ReplicaState, SegmentMetadata, SegmentStatus, StoredVersions, StoreState


class Safety(StrEnum):
    SAFE = "safe"
    SINGLE_COPY = "singleCopy"
    #: No holder and nothing in the store, but not given up: the epoch log may have it, or the holder's disk come back.
    NO_COPY = "noCopy"
    LOST = "lost"


def holders_of(segment: SegmentMetadata) -> tuple[str, ...]:
    """Servers that have the committed content, by name."""
    return tuple(sorted(name for name, copy in segment.copies.items() if copy.checksum == segment.checksum))


def is_last_copy(segment: SegmentMetadata, instance: str, states: Mapping[str, ReplicaState]) -> bool:
    """Whether nobody but `instance` is known to have the segment. `states`: what live servers report of it."""
    serving = {server for server, state in states.items() if state is ReplicaState.ONLINE and server != instance}
    return segment.store_url is None and serving.isdisjoint(holders_of(segment))


def safety_of(segment: SegmentMetadata) -> Safety:
    """Of a DONE segment."""
    holders = len(holders_of(segment))
    if segment.store_state is StoreState.STORED or holders >= 2:
        return Safety.SAFE
    if holders:
        return Safety.SINGLE_COPY
    return Safety.LOST if segment.lost is not None else Safety.NO_COPY


def is_safe(segment: SegmentMetadata) -> bool:
    """Survives the loss of any one server."""
    return segment.status is SegmentStatus.DONE and safety_of(segment) is Safety.SAFE


def misses_store(segment: SegmentMetadata, policy: StorePolicy) -> bool:
    """The table's policy wants a copy in the store that is not there. An upload under way counts as missing, too."""
    return (
        policy is not StorePolicy.PEERS_ONLY
        and segment.status is SegmentStatus.DONE
        and segment.store_state is not StoreState.STORED
    )


def _may_go(segment: SegmentMetadata, safeguards: Safeguards) -> bool:
    return is_safe(segment) or (bool(holders_of(segment)) and not safeguards.two_copies)


def with_versions(segment: SegmentMetadata, checksum: str, versions: StoredVersions) -> SegmentMetadata | None:
    """The record of a DONE segment as it is to be, now that the store has its versions as of a later position; None
    when they are of another content, or no later than those that it names (positions in the epoch log only grow)."""
    known = segment.versions
    if segment.checksum != checksum:
        return None
    if known is not None and known.position.log_offset >= versions.position.log_offset:
        return None
    return msgspec.structs.replace(segment, versions=versions)


class Totals(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Sealed segments of a table by where their bytes are. `upload_backlog`: wanted in the store and not there;
    `upload_failed` of them were tried in vain last."""

    safe: int = 0
    single_copy: int = 0
    no_copy: int = 0
    lost: int = 0
    upload_backlog: int = 0
    upload_failed: int = 0


def totals(segments: Iterable[SegmentMetadata], policy: StorePolicy) -> Totals:
    counts = dict.fromkeys(Safety, 0)
    backlog = failed = 0
    for segment in segments:
        if segment.status is not SegmentStatus.DONE:
            continue
        counts[safety_of(segment)] += 1
        if misses_store(segment, policy):
            backlog += 1
            failed += segment.store_state is StoreState.FAILED
    return Totals(
        safe=counts[Safety.SAFE], single_copy=counts[Safety.SINGLE_COPY], no_copy=counts[Safety.NO_COPY],
        lost=counts[Safety.LOST], upload_backlog=backlog, upload_failed=failed,
    )  # fmt: skip


#: Server -> epoch log offset from which its newest snapshot of one segment's versions is to be continued.
Snapshots = Mapping[str, int]


def replay_floor(segment: SegmentMetadata, snapshots: Snapshots, safeguards: Safeguards = ALL) -> int:
    """The log offset from which the epoch log is needed to know which rows of a DONE segment of an upsert table are in
    force, whichever one server is lost. `snapshots`: what live servers have on their disks.

    The newest snapshot that survives: the one in the store, or the one that all but one holder are at least as new as.
    Without either, versions come from reading the segment's whole range again. Beside that, no live replica is to lose
    the log behind its own snapshot: it would have to fetch another one."""
    floor = segment.start.log_offset
    if segment.store_state is StoreState.STORED and segment.versions is not None:
        floor = segment.versions.position.log_offset
    held = sorted((snapshots[holder] for holder in holders_of(segment) if holder in snapshots), reverse=True)
    needed = 2 if safeguards.two_copies else 1
    if len(held) >= needed:
        floor = max(floor, held[needed - 1])
    return min([floor, *snapshots.values()])


def trim_floor(
    segments: Iterable[SegmentMetadata],
    visible_offsets: Iterable[int] = (),
    safeguards: Safeguards = ALL,
    *,
    snapshots: Mapping[str, Snapshots] | None = None,
) -> int:
    """The log offset below which one partition's epoch log is no longer needed; 0 = keep all. `visible_offsets`: how
    far (stream offset) each live replica has read. `snapshots`: of an upsert table, by segment.

    What a replica could still have to read is kept: from the start of the open segment, of the segment that a live
    replica is still reading, of every segment that is not safe (a lost one excepted: its range is gone already), and of
    the newest sealed segment. Retention may have left none: then from the mark that the open one's start stands behind,
    which a pipeline that starts reads. On upsert tables also what the versions of any sealed segment are brought up to
    date with."""
    ordered = sorted(segments, key=lambda segment: segment.sequence)
    if not ordered:
        return 0
    present = [segment for segment in ordered if segment.lost is None]
    needed = []
    if safeguards.unsafe_kept:
        needed += [segment.start.log_offset for segment in present if not _may_go(segment, safeguards)]
    if snapshots is not None:
        sealed = (segment for segment in present if segment.status is SegmentStatus.DONE)
        needed += [replay_floor(segment, snapshots.get(segment.name, {}), safeguards) for segment in sealed]
    for offset in visible_offsets:
        behind = [segment for segment in ordered if segment.start_offset <= offset]
        needed.append(behind[-1].start.log_offset if behind else 0)
    newest = ordered[-2].start.log_offset if len(ordered) > 1 else max(0, ordered[-1].start.log_offset - 1)
    return min([*needed, newest])
