# SPDX-License-Identifier: Apache-2.0
"""Who keeps the versions of a server's sealed segments up to date (upsert tables), and from where after a start.

Each partition of which this server holds sealed segments has one reader of its epoch log, whose updates reach all of
them: the partition that is consumed here, or, where only sealed segments are, a *follower*, which keeps no rows.

Rules:

- Versions on disk say from where the log is to be read on (`HostedSegment.follow_from`). A reader begins at the oldest
  of these; what a segment has already is skipped.
- When a reader ends, its segments remember how far it was. So partitions and followers replace each other without
  reading anything twice.
- Versions that cannot be continued (the log no longer has what they lack) are given up: the segment is not served until
  others have brought newer ones (validity.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import numpy as np

from cremant.cluster.lowwater import is_void
from cremant.model.cluster import PipelineRecord
from cremant.model.errors import Corrupt, NotFound
from cremant.model.offsets import Position
from cremant.segment import snapshot
from cremant.segment.locations import locations_of
from cremant.segment.reader import SealedSegment
from cremant.segment.versions import Flags, Versions, deleted_rows
from cremant.server.partition import Partition, PartitionState
from cremant.server.partition_id import NO_ROWS
from cremant.server.table import HostedSegment, HostedTable
from cremant.shell.logs import log_event, log_failure

_log = logging.getLogger(__name__)


def open_versions(hosted: HostedSegment) -> None:
    """The versions that this server's disk has of a segment it has opened, if they are of the same content."""
    sealed = hosted.sealed
    if sealed is None:
        return
    try:
        found = snapshot.read(
            sealed.directory, segment=sealed.name, checksum=sealed.marker.checksum, rows=sealed.rows,
            locate=lambda: locations_of(sealed.batches),
        )  # fmt: skip
    except NotFound:
        return
    except Corrupt as error:
        log_failure(_log, "versions on disk are not usable, they are fetched", error, segment=sealed.name)
        return
    hosted.versions = found.versions
    hosted.follow_from = hosted.snapshot = found.position
    if found.written is not None:
        hosted.saved = (found.written, found.versions.changes)


def replay_from(table: HostedTable, partition: int, earliest: int) -> Position | None:
    """Where the oldest versions of the partition's segments are to be continued. `earliest`: of the log; versions that
    would need more are given up. A follower ends."""
    end_follower(table, partition)
    with table.lock:
        for hosted in _of(table, partition):
            at = hosted.follow_from
            if at is not None and at.log_offset < earliest and hosted.versions is not None:
                _give_up(hosted)
        return _oldest(table, partition)


def _oldest(table: HostedTable, partition: int) -> Position | None:
    """Position that the versions of all segments have at least; those of epochs that were taken back since can be
    continued from further back only: where the partition's open segment begins."""
    positions = [hosted.follow_from for hosted in _of(table, partition) if hosted.versions is not None]
    known = [at for at in positions if at is not None and is_void(at.epoch, table.rewinds) is None]
    return min(known, key=lambda position: position.log_offset, default=None)


def begin_unknown(table: HostedTable, record: PipelineRecord) -> None:
    """Segments from before their table had keys: nothing of them is in force until the seed, whose epoch the record
    tells once it has begun, says so."""
    keyed_from = record.keyed_from
    if not record.generation:  # nothing is known of the pipeline
        return
    with table.lock:
        for hosted in table.segments.values():
            end, sealed, reader = hosted.metadata.end, hosted.sealed, table.updater(hosted.metadata.partition)
            if hosted.versions is not None or sealed is None or end is None or reader is None:
                continue
            if hosted.metadata.compacted_at:  # the seed names rows that are gone
                continue
            applied = reader.versions.applied if reader.versions is not None else 0
            if keyed_from is None or (end.epoch < keyed_from and applied < keyed_from):
                locations, order = locations_of(sealed.batches)
                hosted.versions = Versions.unknown(locations, epoch=applied, deleted=_deleted(table, sealed))
                hosted.versions.order = order


def _deleted(table: HostedTable, sealed: SealedSegment) -> Flags | None:
    """In (offset, sub-row) order."""
    upsert = table.record.config.upsert
    found = [deleted_rows(batch, upsert.delete_column if upsert is not None else None) for batch in sealed.batches]
    if all(flags is None for flags in found):
        return None
    lengths = [batch.num_rows for batch in sealed.batches]
    flags = np.concatenate(
        [part if part is not None else np.zeros(rows, np.bool_) for part, rows in zip(found, lengths, strict=True)]
    )
    order = locations_of(sealed.batches)[1]
    if order is None:
        return flags
    ordered = np.empty_like(flags)
    ordered[order] = flags
    return ordered


def attach(table: HostedTable, partition: Partition) -> None:
    """The reader's updates reach the versions of its segments; versions that lack some already are given up."""
    versions = partition.versions
    if versions is None:
        return
    with table.lock:
        attached = versions.attached()
        for hosted in _of(table, partition.id.partition):
            metadata, own = hosted.metadata, hosted.versions
            if own is None or attached.get(metadata.name) is own:
                continue
            assert metadata.end is not None
            since = hosted.follow_from.log_offset if hosted.follow_from is not None else 0
            first, end = metadata.start_offset, metadata.end.next_offset
            void = hosted.follow_from is not None and is_void(hosted.follow_from.epoch, table.rewinds) is not None
            # A reader that is past the Reset perhaps would not take them back.
            lost = void and versions.has_read(since)
            if lost or not versions.attach(metadata.name, first, end, own, since=since):
                _give_up(hosted)
        for name in attached.keys() - {hosted.metadata.name for hosted in _of(table, partition.id.partition)}:
            versions.detach(name)


def leave(table: HostedTable, partition: Partition) -> None:
    """A reader ends: its segments remember how far it was."""
    if partition.versions is None:
        return
    with partition.lock, table.lock:
        position, attached = partition.position, partition.versions.attached()
        for name, versions in attached.items():
            hosted = table.segments.get(name)
            current = partition.versions.is_current(name)
            partition.versions.detach(name)
            if hosted is not None and hosted.versions is versions and current:
                hosted.follow_from = position


def to_read_again(table: HostedTable) -> set[int]:
    """Partitions that are consumed as of a table without keys, which has some by now; and those that began with what
    their sealed segments lack, which the log has lost meanwhile: then these are given up."""
    keyed = table.record.config.upsert is not None
    return {
        number for number, partition in table.partitions.items()
        if (partition.versions is not None) != keyed or partition.lacks_history
    }  # fmt: skip


def wanted_followers(table: HostedTable) -> set[int]:
    """Partitions whose sealed segments nobody keeps up to date. Followers without a segment end."""
    for number, follower in list(table.followers.items()):
        if follower.state is PartitionState.STOPPED or follower.lacks_history:
            _give_up_all(table, number)
    with table.lock:
        held = {hosted.metadata.partition for hosted in table.segments.values() if hosted.versions is not None}
        idle = [number for number in table.followers if number not in held or number in table.partitions]
        wanted = held - table.partitions.keys() - table.followers.keys()
    for number in idle:
        end_follower(table, number)
    return wanted


def follow(table: HostedTable, partition: int, earliest: int, begin: Callable[[Position], Partition]) -> None:
    """Starts a follower. `begin` makes one that reads from a position and keeps no rows."""
    start = replay_from(table, partition, earliest)
    if start is None:
        return
    follower = begin(msgspec.structs.replace(start, next_offset=NO_ROWS))
    attach(table, follower)
    with table.lock:
        table.followers[partition] = follower
    log_event(_log, "versions of sealed segments are followed", partition=str(follower.id), epoch=start.epoch)


def end_follower(table: HostedTable, partition: int) -> None:
    with table.lock:
        follower = table.followers.pop(partition, None)
    if follower is not None:
        leave(table, follower)
        follower.close()


def _of(table: HostedTable, partition: int) -> list[HostedSegment]:
    return [hosted for hosted in table.segments.values() if hosted.metadata.partition == partition]


def _give_up_all(table: HostedTable, partition: int) -> None:
    """What the log has does not fit to the versions here."""
    end_follower(table, partition)
    with table.lock:
        for hosted in _of(table, partition):
            if hosted.versions is not None:
                _give_up(hosted)


def _give_up(hosted: HostedSegment) -> None:
    log_event(_log, "versions of a segment cannot be continued here, they are fetched", segment=hosted.metadata.name)
    hosted.versions = hosted.follow_from = None
