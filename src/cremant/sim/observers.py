# SPDX-License-Identifier: Apache-2.0
"""What must hold, checked after each step by somebody who sees everything.

The oracle follows each partition's log record by record as it is appended, with the rules in their shortest form and no
bookkeeping: which config version each stream offset got (first in log order), which epochs closed where. Replicas are
compared with it at every effect. It knows nothing of hashes, counts, staging or restarts; that is what it checks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cremant.epoch.protocol import RunPlan
from cremant.epoch.reader import CaughtUp, EpochClosed, GapTaken, TakeRows
from cremant.epoch.records import EpochMark, Fence, Gap, Record, Reset, RowBlock, UpdateBlock
from cremant.model.offsets import Position
from cremant.sim.engine import Violation

if TYPE_CHECKING:
    from cremant.sim.world import World

#: Config "version" of an offset that a Gap took.
GAP = 0


class Interval(msgspec.Struct):
    first: int
    next: int
    config: int


class PartitionOracle:
    def __init__(self, partition: int, start: int, staged: bool) -> None:
        self.partition = partition
        self.staged = staged
        self.generation = 0
        self.epoch = 0
        self.start = self.next = start
        self.resets = 0
        self.epoch_max = 0
        #: Which config each offset got, ascending and without holes.
        self.taken: list[Interval] = []
        #: Closed epochs: where a reader stands just after their mark.
        self.closed: dict[int, Position] = {}
        self.gaps: list[tuple[int, int]] = []

    def follow(self, record: Record, log_offset: int) -> EpochMark | None:
        """Answers a mark that closed an epoch here."""
        if isinstance(record, RowBlock | UpdateBlock | EpochMark):
            self.epoch_max = max(self.epoch_max, record.epoch)
        if isinstance(record, Fence):
            self.generation = max(self.generation, record.generation)
        elif record.generation < self.generation:
            pass
        elif isinstance(record, Reset):
            back = self.closed.get(record.epoch)
            self.epoch = record.epoch if back is not None else 0
            self.next = back.next_offset if back is not None else self.start
            self.resets += 1
        elif isinstance(record, RowBlock) and record.epoch > self.epoch and not self.staged:
            self._take(record.range.first, record.range.next, record.config_version)
        elif isinstance(record, Gap):
            self.gaps.append((record.range.first, record.range.next))
            if not self.staged:
                self._take(record.range.first, record.range.next, GAP)
        elif isinstance(record, EpochMark) and record.epoch > self.epoch:
            if self.staged:
                self._take(self.next, record.partitions[self.partition].end, record.config_version)
            self.epoch = record.epoch
            self.closed[record.epoch] = Position(
                log_offset=log_offset + 1, epoch=record.epoch, generation=self.generation, next_offset=self.next
            )
            return record
        return None

    def _take(self, first: int, end: int, config: int) -> None:
        if first <= self.next < end:
            self.taken.append(Interval(self.next, end, config))
            self.next = end

    def configs(self, first: int, end: int) -> set[int]:
        """Config versions of the offsets of [first, end); -1 for those not taken at all."""
        found = {-1} if end > self.next else set()
        for piece in reversed(self.taken):
            if piece.next <= first:
                break
            if piece.first < end:
                found.add(piece.config)
        return found

    def is_gap(self, first: int, end: int) -> bool:
        for low, high in sorted(self.gaps):
            if low <= first < high:
                first = high
        return first >= end


class Observers:
    """`committed`: epochs in the order in which partition 0 committed them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.oracles: list[PartitionOracle] = []
        self.committed: list[EpochMark] = []
        self._by_epoch: dict[int, EpochMark] = {}
        self.checks = 0

    def add_partition(self, start: int) -> None:
        self.oracles.append(PartitionOracle(len(self.oracles), start, self._world.options.staged))

    def appended(self, partition: int, record: Record, log_offset: int) -> None:
        resets = self.oracles[partition].resets
        closed = self.oracles[partition].follow(record, log_offset)
        if isinstance(record, Reset) and partition == 0 and self.oracles[0].resets > resets:
            self.taken_back(record.epoch)
        if closed is None:
            return
        if partition == 0:
            self._committed(closed)
        elif closed.epoch not in self._by_epoch:
            raise Violation("E-3", f"epoch {closed.epoch} closed in partition {partition}, not in partition 0")
        elif closed.partitions != self._by_epoch[closed.epoch].partitions:
            raise Violation("E-3", f"epoch {closed.epoch} has another vector in partition {partition}")

    def taken_back(self, epoch: int) -> None:
        """A Reset in partition 0 decided so."""
        self.committed = [mark for mark in self.committed if mark.epoch <= epoch]

    def _committed(self, mark: EpochMark) -> None:
        """E-5 epochs grow; I-7 a batch takes effect once: each epoch begins where the one before ended."""
        self.checks += 1
        if self.committed:
            last = self.committed[-1]
            if mark.epoch <= last.epoch or mark.previous != last.epoch:
                raise Violation("E-5", f"epoch {mark.epoch} (previous {mark.previous}) committed after {last.epoch}")
            if mark.partition_count < last.partition_count:
                raise Violation("E-7", f"epoch {mark.epoch} lost a partition")
            for partition, line in enumerate(last.partitions):
                if mark.partitions[partition].end < line.end:
                    raise Violation("I-7", f"epoch {mark.epoch} ends before epoch {last.epoch} in {partition}")
        self.committed.append(mark)
        self._by_epoch[mark.epoch] = mark

    def planned(self, run: RunPlan, seen: int) -> None:
        """E-5: the first new epoch is above every epoch that stood in front of the Fences."""
        self.checks += 1
        first = run.base + run.first_batch
        if first <= seen:
            raise Violation(
                "E-5", f"generation {run.generation} begins with epoch {first}, epoch {seen} was in the log"
            )

    # --- a replica's effects ---

    def took_rows(self, partition: int, end: int, effect: TakeRows) -> None:
        """E-2, E-6: each offset once, in order, with the content of the config decided first in log order."""
        self.checks += 1
        first, following = effect.range.first, effect.range.next
        if first != end:
            raise Violation("E-2", f"partition {partition}: rows of [{first}, {following}) after offset {end}")
        decided = self.decided(partition, effect)
        if decided != {effect.config_version}:
            raise Violation(
                "E-6",
                f"partition {partition}: [{first}, {following}) shown with config {effect.config_version}, the log "
                f"decided {sorted(decided)}",
            )
        if not effect.batch.equals(self._world.rows(partition, first, following, effect.config_version)):
            raise Violation("E-2", f"partition {partition}: rows of [{first}, {following}) are not the stream's")

    def decided(self, partition: int, effect: TakeRows) -> set[int]:
        """Config versions that the rows of the range may have."""
        return self.oracles[partition].configs(effect.range.first, effect.range.next)

    def took_gap(self, partition: int, end: int, effect: GapTaken) -> None:
        self.checks += 1
        first, following = effect.range.first, effect.range.next
        if first != end or not self.oracles[partition].is_gap(first, following):
            raise Violation("E-2", f"partition {partition}: a gap of [{first}, {following}) after offset {end}")

    def closed(self, partition: int, effect: EpochClosed) -> None:
        """E-1, E-4: every replica closes the same epochs at the same positions, with partition 0's vector."""
        self.checks += 1
        expected = self.oracles[partition].closed.get(effect.epoch)
        found = effect.position
        if expected is not None and not self._world.safeguards.position_generation:
            # The safeguard is away on purpose: it is its harm that must be seen, not its absence.
            found = msgspec.structs.replace(found, generation=expected.generation)
        if expected != found:
            raise Violation("E-1", f"partition {partition}: closed at {found}, expected {expected}")
        if self._by_epoch[effect.epoch].partitions[partition] != effect.line:
            raise Violation("E-4", f"partition {partition}: epoch {effect.epoch} closed with another line")

    def caught_up(self, partition: int, end: int, effect: CaughtUp) -> None:
        """A freshness that is claimed is true."""
        self.checks += 1
        there = self._world.stream[partition].end_at(effect.at_ms)
        if end < there:
            raise Violation(
                "freshness", f"partition {partition}: caught up at {effect.at_ms}, but {end} of {there} offsets are in"
            )
