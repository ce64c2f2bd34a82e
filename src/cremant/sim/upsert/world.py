# SPDX-License-Identifier: Apache-2.0
"""The world of upsert: the world of epochs, whose rows have keys, and what servers and the deep store keep of versions.

Real in here, beside what is real there: candidates and decisions of the coordinator, versions and snapshots of servers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec
import pyarrow as pa

from cremant.completion.rewind import is_taken_back
from cremant.epoch.coverage import Coverage
from cremant.epoch.reader import TakeRows, TakeUpdates
from cremant.epoch.records import EpochMark, Record, RowBlock
from cremant.epoch.safeguards import Safeguards as EpochSafeguards
from cremant.model.cluster import PipelineRecord, Rewind
from cremant.model.offsets import Position
from cremant.model.upsert import Visibility
from cremant.segment.locations import Locations
from cremant.sim.engine import Violation
from cremant.sim.observers import Observers
from cremant.sim.upsert.options import Options, Safeguards
from cremant.sim.upsert.table import Table, Update, rows
from cremant.sim.world import World

if TYPE_CHECKING:
    from cremant.sim.upsert.server import Server

#: (partition, offset, sub-row).
Location = tuple[int, int, int]


class UpsertObservers(Observers):
    """And the table: U-1 what every epoch does to rows, U-2 what every answer shows."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.table = Table()
        #: Row blocks by (epoch, generation): (partition, first, end).
        self._blocks: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        self.answers = 0

    def appended(self, partition: int, record: Record, log_offset: int) -> None:
        if isinstance(record, RowBlock):
            blocks = self._blocks.setdefault((record.epoch, record.generation), [])
            blocks.append((partition, record.range.first, record.range.next))
        super().appended(partition, record, log_offset)

    def _committed(self, mark: EpochMark) -> None:
        super()._committed(mark)
        batches = []
        for partition in range(mark.partition_count):
            covered = Coverage()
            for where, first, end in self._blocks.get((mark.epoch, mark.blocks_generation), ()):
                if where == partition:
                    covered.add(first, end)
            for first, end in covered.ranges():
                batches.append((partition, self._world.rows(partition, first, end, mark.config_version)))
        self.table.close(mark.epoch, batches)

    def taken_back(self, epoch: int) -> None:
        super().taken_back(epoch)
        self.table.take_back(epoch)

    def decided(self, partition: int, effect: TakeRows) -> set[int]:
        """Blocks are taken at the mark, also by who reads an epoch that was taken back later."""
        mark = self._by_epoch.get(effect.epoch)
        return set() if mark is None else {mark.config_version}

    def updated(self, partition: int, epoch: int, taken: set[Update]) -> None:
        """U-1: a closed epoch does to the rows of a partition exactly what the total order says."""
        self.checks += 1
        expected = self.table.updates[epoch].get(partition, set())
        if taken != expected:
            raise Violation(
                "U-1",
                f"epoch {epoch} does {sorted(taken)} to rows of partition {partition}, expected {sorted(expected)}",
            )

    def answered(self, epoch: int, found: list[Location], visibility: Visibility = Visibility.VISIBLE) -> None:
        """U-2: an answer at L shows the rows of the model at L, each once."""
        self.checks += 1
        self.answers += 1
        at = self.closed_at(epoch)
        of_epoch = self.table.visible if visibility is Visibility.VISIBLE else self.table.in_force
        expected = of_epoch[at]
        shown = set(found)
        if len(shown) < len(found) or shown != expected:
            twice = sorted(row for row in shown if found.count(row) > 1)
            raise Violation(
                "U-2",
                f"an answer at epoch {epoch} lacks {sorted(expected - shown)}, shows {sorted(shown - expected)}, and "
                f"{twice} twice",
            )

    def partitions_at(self, epoch: int) -> int:
        """n(L). Later ones have closed nothing up to L, and never will."""
        return self._by_epoch[epoch].partition_count

    def closed_at(self, epoch: int) -> int:
        """The newest committed epoch that is not above `epoch`."""
        return max(known for known in self.table.visible if known <= epoch)


class UpsertWorld(World):
    OBSERVERS: ClassVar[type[Observers]] = UpsertObservers
    observers: UpsertObservers
    options: Options

    def __init__(self, seed: int, options: Options, safeguards: EpochSafeguards, guards: Safeguards) -> None:
        super().__init__(seed, options, safeguards)
        self.guards = guards
        self.servers: list[Server] = []
        #: Oldest first; only the last may not be done yet.
        self.rewinds: tuple[Rewind, ...] = ()
        #: Where the rows of sealed segments are, by (partition, number): equal on every replica.
        self.sealed: dict[tuple[int, int], Locations] = {}
        #: Snapshots of their versions in the deep store.
        self.stored: dict[tuple[int, int], bytes] = {}
        self.stored_at: dict[tuple[int, int], Position] = {}

    def rows(self, partition: int, first: int, end: int, config: int) -> pa.RecordBatch:
        return rows(partition, first, end, config, self.options.keys, self.options.spread)

    def segment_range(self, partition: int, number: int) -> tuple[int, int]:
        """Stream offsets of a sealed segment; the first has number 1."""
        cuts = self.cuts[partition]
        return cuts[number - 1].next_offset, cuts[number].next_offset

    # --- rewinds ---

    def rewind(self, epoch: int) -> None:
        """As the controller does it: segments that end above the epoch go, the last one that begins at or before it is
        opened anew (`completion.rewind`); the next start of the pipeline writes the Resets."""
        self.note(f"an operator takes the table back to epoch {epoch}")
        self.reset_to = epoch
        self.rewinds = (*self.rewinds, Rewind(to_epoch=epoch))
        for partition, cuts in enumerate(self.cuts):
            cuts[1:] = [cut for cut in cuts[1:] if cut.epoch <= epoch]
            for kept in (self.sealed, self.stored, self.stored_at):
                for key in [key for key in kept if key[0] == partition and key[1] >= len(cuts)]:
                    del kept[key]
        for key in [key for key, position in self.stored_at.items() if position.epoch > epoch]:
            del self.stored[key], self.stored_at[key]
        for server in self.servers:
            server.rewound()

    def base_taken(self, generation: int, first_epoch: int, reset_to: int | None) -> None:
        super().base_taken(generation, first_epoch, reset_to)
        if reset_to is not None:
            done = msgspec.structs.replace(self.rewinds[-1], next_epoch=first_epoch, generation=generation)
            self.rewinds = (*self.rewinds[:-1], done)

    def is_cut_refused(self, at: Position) -> bool:
        return is_taken_back(PipelineRecord(rewinds=self.rewinds), at)

    def positions_in_store(self, partition: int) -> list[Position]:
        return [position for (where, _), position in self.stored_at.items() if where == partition]

    def store(self, partition: int, number: int, data: bytes, position: Position) -> None:
        self.stored[(partition, number)] = data
        self.stored_at[(partition, number)] = position

    def view(self) -> View:
        """What the controller publishes now."""
        holders: dict[tuple[int, int], tuple[int, ...]] = {}
        for server in self.servers:
            for partition, hosted in server.hosted.items():
                for number in hosted.segments:
                    holders[(partition, number)] = (*holders.get((partition, number), ()), server.number)
        return View(
            at_ms=self.now_ms,
            tails=tuple(len(cuts) for cuts in self.cuts),
            starts=tuple(cuts[-1].next_offset for cuts in self.cuts),
            consumers=tuple(
                tuple(server.number for server in self.servers if server.consumes(partition))
                for partition in range(len(self.cuts))
            ),
            holders=holders,
            rewinds=self.rewinds,
        )


class View(msgspec.Struct, frozen=True, kw_only=True):
    """`tails`: number of the open segment per partition, `starts`: its first offset. `holders`: servers by (partition,
    number) of a sealed segment."""

    at_ms: int
    tails: tuple[int, ...]
    starts: tuple[int, ...]
    consumers: tuple[tuple[int, ...], ...]
    holders: dict[tuple[int, int], tuple[int, ...]]
    rewinds: tuple[Rewind, ...]


def updates_of(effect: TakeUpdates) -> set[Update]:
    return set(zip(*(column.to_pylist() for column in effect.batch.columns), strict=True))
