# SPDX-License-Identifier: Apache-2.0
"""A server's copy of one partition: the real reader, a tail that knows offsets, cuts, restarts from positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from cremant.epoch.reader import (
    CaughtUp,
    Effect,
    EpochClosed,
    Fenced,
    GapTaken,
    PartitionReader,
    RolledBack,
    Stopped,
    TakeRows,
    TakeUpdates,
)
from cremant.log.api import OffsetExpired
from cremant.model.offsets import Position
from cremant.sim.engine import Actor, Violation

if TYPE_CHECKING:
    from cremant.sim.world import World


class Replica:
    """`end`: first offset that the tail does not hold. `segment`: index of the one being consumed."""

    def __init__(self, world: World, partition: int, number: int) -> None:
        self.world = world
        self.partition = partition
        self.number = number
        self.segment = 1
        self.segment_start = world.cuts[partition][0].next_offset
        #: What survives a crash: a closed position and the segment it lies in.
        self.stored = (world.cuts[partition][0], self.segment, self.segment_start)
        self.reader, self.next_log, self.end = self._open(self.stored[0])

    def _open(self, at: Position) -> tuple[PartitionReader, int, int]:
        options, safeguards = self.world.options, self.world.safeguards
        reader = PartitionReader(self.partition, at, upsert=options.staged, safeguards=safeguards)
        return reader, at.log_offset, at.next_offset

    def run(self) -> Actor:
        world = self.world
        while True:
            yield world.schedule.choice((1, 5, 10, 40))
            if world.chance(world.options.replica_restart):
                self.restart()
            for _ in range(world.schedule.choice((1, 3, 20))):
                if not self.read_one():
                    break

    def read_one(self) -> bool:
        try:
            record = self.world.read(self.partition, self.next_log)
        except OffsetExpired as error:
            raise Violation("E-4", f"replica {self.number} of partition {self.partition}: {error}") from error
        if record is None:
            return False
        at = self.next_log
        self.next_log += 1
        for effect in self.reader.step(record, at):
            self.carry_out(effect)
        return True

    def carry_out(self, effect: Effect) -> None:
        observers = self.world.observers
        match effect:
            case TakeRows():
                observers.took_rows(self.partition, self.end, effect)
                self.end = effect.range.next
            case GapTaken():
                observers.took_gap(self.partition, self.end, effect)
                self.end = effect.range.next
            case EpochClosed():
                observers.closed(self.partition, effect)
                self.closed(effect.position)
            case CaughtUp():
                observers.caught_up(self.partition, self.end, effect)
            case Stopped():
                raise Violation(effect.rule, f"replica {self.number} stopped: {effect.message}")
            case TakeUpdates() | Fenced():
                pass
            case RolledBack():
                self.end = effect.next_offset
            case _:
                assert_never(effect)

    def closed(self, position: Position) -> None:
        if position.next_offset - self.segment_start >= self.world.options.segment_rows:
            self.world.report_cut(self.partition, self.segment, position)
            self.segment += 1
            self.segment_start = position.next_offset
            self.stored = (position, self.segment, self.segment_start)
        elif self.world.schedule.random() < self.world.options.store:
            self.stored = (position, self.segment, self.segment_start)

    def restart(self) -> None:
        """From its own files, or from nothing but the cluster's segments."""
        cuts = self.world.cuts[self.partition]
        if self.world.trouble.random() < 0.3:
            self.stored = (cuts[-1], len(cuts), cuts[-1].next_offset)
        position, self.segment, self.segment_start = self.stored
        self.world.note(f"replica {self.number} of partition {self.partition} restarts at epoch {position.epoch}")
        self.reader, self.next_log, self.end = self._open(position)
