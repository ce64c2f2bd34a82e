# SPDX-License-Identifier: Apache-2.0
"""A reader of a partition and the versions that it keeps; real: the reader, `PartitionVersions`, `Versions`."""

from __future__ import annotations

from cremant.epoch.coverage import rows_from
from cremant.epoch.reader import (
    CaughtUp,
    Effect,
    EpochClosed,
    GapTaken,
    PartitionReader,
    RolledBack,
    Stopped,
    TakeRows,
    TakeUpdates,
)
from cremant.epoch.records import EpochMark
from cremant.log.api import OffsetExpired
from cremant.model.offsets import Position
from cremant.segment.tail_versions import PartitionVersions
from cremant.sim.engine import Violation
from cremant.sim.upsert.table import UPSERT
from cremant.sim.upsert.world import UpsertWorld, updates_of


class Feed:
    """A reader of a partition from a position on, and the versions that it keeps."""

    def __init__(self, world: UpsertWorld, partition: int, start: Position, rows_from_offset: int) -> None:
        self.world = world
        self.partition = partition
        self.reader = PartitionReader(partition, start, upsert=True, safeguards=world.safeguards)
        self.next_log = start.log_offset
        self.end = start.next_offset
        self.versions = PartitionVersions(rows_from_offset, start.epoch, UPSERT.delete_column, start.log_offset)
        #: Partitions of the last mark.
        self.partitions = 0
        self._taken: set[tuple[int, int, int]] = set()
        #: Log offset of the record at hand.
        self.at = start.log_offset

    def read_one(self) -> bool:
        try:
            record = self.world.read(self.partition, self.next_log)
        except OffsetExpired as error:
            raise Violation("E-4", f"partition {self.partition}: {error}") from error
        if record is None:
            return False
        self.at = self.next_log
        self.next_log += 1
        for effect in self.reader.step(record, self.at):
            self.carry_out(effect)
            if isinstance(effect, EpochClosed) and isinstance(record, EpochMark):
                self.partitions = record.partition_count
        return True

    def carry_out(self, effect: Effect) -> None:
        observers = self.world.observers
        match effect:
            case TakeRows():
                observers.took_rows(self.partition, self.end, effect)
                self.end = effect.range.next
                kept = rows_from(effect.batch, self.versions.rows_from)
                if kept.num_rows:
                    self.versions.take(kept, effect.epoch)
            case GapTaken():
                observers.took_gap(self.partition, self.end, effect)
                self.end = effect.range.next
            case TakeUpdates():
                self._taken = updates_of(effect)
                self.versions.apply(effect.epoch, effect.batch, at=self.at)
            case EpochClosed():
                observers.closed(self.partition, effect)
                observers.updated(self.partition, effect.epoch, self._taken)
                self._taken = set()
                self.versions.closed(effect.epoch, at=self.at)
                self.closed(effect.position)
            case CaughtUp():
                observers.caught_up(self.partition, self.end, effect)
            case RolledBack():
                self.end = effect.next_offset
                self.versions.roll_back(effect.epoch, effect.next_offset, at=self.at)
            case Stopped():
                self.stopped(effect)
            case _:
                pass

    def closed(self, position: Position) -> None:
        pass

    def stopped(self, effect: Stopped) -> None:
        raise Violation(effect.rule, effect.message)
