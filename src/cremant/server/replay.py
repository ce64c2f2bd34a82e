# SPDX-License-Identifier: Apache-2.0
"""Versions of one sealed segment brought forward by the epoch log, beside whatever the partition itself reads.

A snapshot from elsewhere is as of its own position; the partition here may be further. And where there is no snapshot,
the segment's range of the log has everything: its rows, superseded as they are taken, and all updates since.

Rules: a private reader believes what any reader of the log believes (E-1 to E-4); rows are looked at only for where
they are; nothing of the table is touched. What comes out counts once it has everything that the partition here has.
"""

from __future__ import annotations

from typing import assert_never

import numpy as np
import pyarrow as pa

from cremant.epoch import format as records
from cremant.epoch.effects import (
    CaughtUp,
    Effect,
    EpochClosed,
    Fenced,
    GapTaken,
    RolledBack,
    Stopped,
    TakeRows,
    TakeUpdates,
)
from cremant.epoch.reader import PartitionReader
from cremant.log.api import Log, LogReader, OffsetExpired
from cremant.model.errors import Corrupt, InvariantViolation, NotFound
from cremant.model.limits import MIB
from cremant.model.names import OFFSET
from cremant.model.offsets import Position
from cremant.model.segments import SegmentMetadata
from cremant.segment.snapshot import Locate, Snapshot
from cremant.segment.tail_versions import PartitionVersions
from cremant.segment.versions import Versions
from cremant.server.partition import PartitionId

_TURN_MESSAGES_MAX = 256
_TURN_BYTES_MAX = 8 * MIB
#: No row of the log is the tail's: only the segment's are looked after.
_NO_ROWS = 2**62


class Replay:
    """Not thread-safe. `position`: just after the last epoch that is in."""

    def __init__(
        self, log: Log, own: PartitionId, metadata: SegmentMetadata, start: Position, versions: PartitionVersions
    ) -> None:
        assert metadata.end is not None
        self.position = start
        self._log = log
        self._own = own
        self._name, self._compacted_at = metadata.name, metadata.compacted_at
        self._first, self._end = metadata.start_offset, metadata.end.next_offset
        self._versions = versions
        self._machine = PartitionReader(own.partition, start, upsert=True)
        self._source: LogReader | None = None

    @classmethod
    def from_snapshot(cls, log: Log, own: PartitionId, metadata: SegmentMetadata, found: Snapshot) -> Replay:
        """What the log has from the snapshot's position on. Its versions are written to. Raises Corrupt."""
        assert metadata.end is not None
        versions = PartitionVersions(_NO_ROWS, found.position.epoch, None)
        if not versions.attach(metadata.name, metadata.start_offset, metadata.end.next_offset, found.versions):
            raise Corrupt(
                f"versions of segment {metadata.name} as of epoch {found.position.epoch} have the updates up to epoch "
                f"{found.versions.epoch} only"
            )
        return cls(log, own, metadata, found.position, versions)

    @classmethod
    def from_rows(cls, log: Log, own: PartitionId, metadata: SegmentMetadata, delete_column: str | None) -> Replay:
        """All of it, from the segment's start."""
        start = metadata.start
        return cls(log, own, metadata, start, PartitionVersions(start.next_offset, start.epoch, delete_column))

    @property
    def epoch(self) -> int:
        """Updates up to this epoch are in. A snapshot may be ahead of its position."""
        held = self._versions.attached().get(self._name)
        return held.epoch if held is not None else self._versions.epoch

    def turn(self) -> bool:
        """Reads on, within bounds; False when there was nothing. Raises NotFound when the log does not have it (any
        more), InvariantViolation when a rule does not hold there, PeerError."""
        topic, partition = self._own.topic, self._own.partition
        try:
            if self._source is None:
                self._source = self._log.reader(topic, partition, self.position.log_offset)
            batch = self._source.read(max_messages=_TURN_MESSAGES_MAX, max_bytes=_TURN_BYTES_MAX)
        except OffsetExpired as error:
            raise NotFound(
                f"segment {self._name}: its versions are to be continued from {self.position.log_offset} on, the epoch "
                f"log begins at {error.earliest}"
            ) from error
        if batch is None:
            return False
        for index, log_offset in enumerate(batch.offsets.tolist()):
            record = records.decode(batch.values[index].as_buffer(), self._own.incarnation)
            for effect in self._machine.step(record, log_offset):
                self._apply(effect)
        return True

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None

    def result(self, locate: Locate) -> Snapshot:
        """As of `position`. Raises NotFound when the log ended before the segment did, Corrupt when its rows are not
        those of the segment."""
        held = self._versions.attached().get(self._name)
        if held is not None:
            return Snapshot(held, self.position)
        if self.position.next_offset < self._end:
            raise NotFound(f"segment {self._name}: the epoch log ends before offset {self._end}")
        found = self._versions.tail
        if self._compacted_at:
            found = found.compacted(found.kept(self._compacted_at), self._compacted_at)
        locations, order = locate()
        same = locations.rows == found.rows and np.array_equal(
            locations.all_offsets(), found.locations.all_offsets()
        )  # fmt: skip
        if not same or not np.array_equal(locations.all_sub_rows(), found.locations.all_sub_rows()):
            raise Corrupt(f"segment {self._name}: the epoch log has other rows in its range than the segment")
        versions = Versions(
            locations, found.valid_from, found.valid_until, base=found.base, epoch=found.epoch, deleted=found.deleted,
            order=order, horizon=found.horizon,
        )  # fmt: skip
        return Snapshot(versions, self.position)

    def _apply(self, effect: Effect) -> None:
        match effect:
            case TakeRows(batch=batch, epoch=epoch):
                self._versions.take(self._own_rows(batch), epoch)
            case TakeUpdates(epoch=epoch, batch=updates):
                self._versions.apply(epoch, self._own_rows(updates))
            case EpochClosed(epoch=epoch, position=position):
                self._versions.closed(epoch)
                self.position = position
            case RolledBack(epoch=epoch, next_offset=next_offset):
                self._versions.roll_back(epoch, next_offset)
                self.position = self._machine.position
            case Stopped(rule=rule, message=message, hint=hint):
                raise InvariantViolation(rule, message, hint=hint)
            case GapTaken() | CaughtUp() | Fenced():
                pass
            case _:
                assert_never(effect)

    def _own_rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Of rows or updates, sorted by offset: those of the segment."""
        offsets = batch.column(OFFSET).to_numpy()
        first, end = np.searchsorted(offsets, (self._first, self._end)).tolist()
        return batch.slice(first, end - first)
