# SPDX-License-Identifier: Apache-2.0
"""The world of upsert: the world of epochs, whose rows have keys, and what servers and the deep store keep of versions.

Real in here, beside what is real there: candidates and decisions of the coordinator, versions and snapshots of servers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec
import pyarrow as pa

from cremant.cluster.lowwater import backed, is_void
from cremant.completion.compaction import Compactions
from cremant.completion.copies import trim_floor
from cremant.completion.rewind import compacted_past, is_taken_back
from cremant.epoch.coverage import Coverage
from cremant.epoch.reader import TakeRows, TakeUpdates
from cremant.epoch.records import EpochMark, Record, RowBlock
from cremant.epoch.safeguards import Safeguards as EpochSafeguards
from cremant.epoch.scan import PartitionScan
from cremant.epoch.start import ReadTo
from cremant.model.cluster import PipelineRecord, Rewind
from cremant.model.offsets import Position
from cremant.model.segments import Copy, SegmentMetadata, SegmentStatus, StoredVersions, StoreState
from cremant.model.upsert import Visibility
from cremant.pipeline.plan import SeedPlan
from cremant.segment.locations import Int32s, Locations
from cremant.sim.engine import Violation
from cremant.sim.observers import Observers
from cremant.sim.upsert.bringing import Packed, unpacked
from cremant.sim.upsert.options import Options, Safeguards
from cremant.sim.upsert.table import Table, Update, rows
from cremant.sim.world import TOPIC, World

if TYPE_CHECKING:
    from cremant.sim.upsert.server import Server

#: (partition, offset, sub-row).
Location = tuple[int, int, int]


class UpsertObservers(Observers):
    """And the table: U-1 what every epoch does to rows, U-2 what every answer shows."""

    _world: UpsertWorld

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.table = Table()
        #: Row blocks by (epoch, generation): (partition, first, end).
        self._blocks: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        #: Seeds by (epoch, generation): what they leave out.
        self._seeds: dict[tuple[int, int], SeedPlan] = {}
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
        self.table.close(mark.epoch, batches, self._seeds.get((mark.epoch, mark.blocks_generation)))

    def seeded(self, epoch: int, generation: int, plan: SeedPlan) -> None:
        """A batch is a seed, planned so."""
        self._seeds[(epoch, generation)] = plan

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

    def answered(self, epoch: int, found: list[Location], visibility: Visibility, rewinds: tuple[Rewind, ...]) -> None:
        """U-2: an answer at L shows the rows of the model at L, each once. `rewinds`: as they were when it was asked
        for."""
        self.checks += 1
        self.answers += 1
        of_epoch = self.table.visible if visibility is Visibility.VISIBLE else self.table.in_force
        expected = of_epoch[self.closed_at(epoch, self._world.rewinds)]
        shown = set(found)
        if shown != expected:  # a rewind may have been carried out meanwhile
            expected = of_epoch[self.closed_at(epoch, rewinds)]
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

    def closed_at(self, epoch: int, rewinds: tuple[Rewind, ...]) -> int:
        """What a number stands for: its own epoch, else the newest one below that was committed and not taken back."""
        if epoch in self.table.visible:
            return epoch
        done = [rewind for rewind in rewinds if rewind.done]
        return backed(max(known for known in self.table.visible if known <= epoch), done)


class UpsertWorld(World):
    OBSERVERS: ClassVar[type[Observers]] = UpsertObservers
    observers: UpsertObservers
    options: Options

    def __init__(self, seed: int, options: Options, safeguards: EpochSafeguards, guards: Safeguards) -> None:
        super().__init__(seed, options, safeguards)
        self.guards = guards
        self.state_dropped = guards.state_dropped
        self.servers: list[Server] = []
        #: Oldest first; only the last may not be done yet.
        self.rewinds: tuple[Rewind, ...] = ()
        #: Where the rows of sealed segments are, and their order, by (partition, number) and by the epoch at which they
        #: were compacted (0: all rows). Equal on every replica.
        self.sealed: dict[tuple[int, int], dict[int, tuple[Locations, Int32s | None]]] = {}
        #: What the records say, and what was ordered.
        self.compacted_at: dict[tuple[int, int], int] = {}
        self.compacting: dict[tuple[int, int], int] = {}
        self.compactions = Compactions()
        #: Those whose rows are in the deep store; and snapshots of their versions there.
        self.uploaded: set[tuple[int, int]] = set()
        self.stored: dict[tuple[int, int], Packed] = {}
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
        opened anew (`completion.rewind`); the next start of the pipeline writes the Resets. Refused where partitions
        were added since, or where the log no longer has what would be read again, or the mark."""
        opened = [[cut for cut in cuts if cut.epoch <= epoch][-1] for cuts in self.cuts]
        gone = any(self.log.earliest(TOPIC, partition) > at.log_offset for partition, at in enumerate(opened))
        if gone or self.reset_to is not None or self.observers.partitions_at(epoch) != len(self.cuts):
            return
        scan = self.scan(0, PartitionScan(ReadTo(0, opened[0], 0)))
        if epoch not in scan.epochs:
            return
        segments = [self.metadata(*key) for key in self.sealed]
        if self.guards.compacted_kept and compacted_past(segments, epoch) is not None:
            return
        self.compacting.clear()
        self.note(f"an operator takes the table back to epoch {epoch}")
        self.reset_to = epoch
        self.rewinds = (*self.rewinds, Rewind(to_epoch=epoch))
        for partition, cuts in enumerate(self.cuts):
            cuts[1:] = [cut for cut in cuts[1:] if cut.epoch <= epoch]
            for kept in (self.sealed, self.stored, self.stored_at, self.compacted_at):
                for key in [key for key in kept if key[0] == partition and key[1] >= len(cuts)]:
                    del kept[key]
            self.uploaded -= {key for key in self.uploaded if key[0] == partition and key[1] >= len(cuts)}
        for key in [key for key, position in self.stored_at.items() if position.epoch > epoch]:
            self.stored_at[key] = opened[key[0]]
        for server in self.servers:
            server.rewound()

    def base_taken(self, generation: int, first_epoch: int, reset_to: int | None) -> None:
        super().base_taken(generation, first_epoch, reset_to)
        if reset_to is not None:
            done = msgspec.structs.replace(self.rewinds[-1], next_epoch=first_epoch, generation=generation)
            self.rewinds = (*self.rewinds[:-1], done)

    def is_cut_refused(self, at: Position) -> bool:
        return is_taken_back(PipelineRecord(rewinds=self.rewinds), at)

    def store(self, partition: int, number: int, data: Packed) -> None:
        """As the controller takes it: of the recorded content, and as of a later position (`copies.with_versions`)."""
        key, position = (partition, number), unpacked(self, partition, number, data).found.position
        if data.content != self.compacted_at.get(key, 0):
            return
        self.uploaded.add(key)
        known = self.stored_at.get(key)
        taken_back = is_void(position.epoch, self.rewinds) is not None
        if not taken_back and (known is None or known.log_offset < position.log_offset):
            self.stored[key], self.stored_at[key] = data, position

    # --- what the controller knows ---

    def consumers(self, partition: int) -> tuple[int, ...]:
        """Servers that are to consume a partition."""
        servers = self.options.servers
        return tuple(server for server in range(servers) if (server - partition) % servers < self.options.replicas)

    def metadata(self, partition: int, number: int) -> SegmentMetadata:
        """The record of a segment; the open one comes after the sealed ones."""
        cuts, key = self.cuts[partition], (partition, number)
        start, end = cuts[number - 1], cuts[number] if number < len(cuts) else None
        holders = [server for server in self.servers if number in server.disks.get(partition, {})]
        at, compacted_at = self.stored_at.get(key), self.compacted_at.get(key, 0)
        checksum, contents = str(compacted_at), self.sealed.get(key)
        return SegmentMetadata(
            name=f"{partition}/{number}", partition=partition, sequence=number, created_ms=0,
            replicas=tuple(map(str, self.consumers(partition))), compacted_at=compacted_at,
            compacting=self.compacting.get(key), rows=contents[compacted_at][0].rows if contents else 0,
            status=SegmentStatus.DONE if contents else SegmentStatus.IN_PROGRESS,
            start=start, start_offset=start.next_offset, end=end, checksum=checksum,
            copies={str(server.number): Copy(checksum=checksum, verified_at_ms=0) for server in holders},
            store_state=StoreState.STORED if key in self.uploaded else StoreState.NONE,
            versions=StoredVersions(url="", position=at, size_bytes=0, file_checksum="") if at is not None else None,
        )  # fmt: skip

    def trim(self) -> None:
        """The epoch log, as far as the controller would."""
        for partition, cuts in enumerate(self.cuts):
            segments = [self.metadata(partition, number) for number in range(1, len(cuts) + 1)]
            hosted = [server.hosted[partition] for server in self.servers if partition in server.hosted]
            snapshots: dict[str, dict[str, int]] = {}
            for one in hosted:
                for number, data in one.disk.items():
                    if data:
                        at = unpacked(self, partition, number, data).found.position.log_offset
                        snapshots.setdefault(f"{partition}/{number}", {})[str(one.server.number)] = at
            floor = trim_floor(
                segments, [one.end for one in hosted if one.consumes], self.guards.copies,
                snapshots=snapshots if self.guards.log_kept else None,
            )  # fmt: skip
            self.log.trim(TOPIC, partition, floor)

    def view(self) -> View:
        """What the controller publishes now."""
        holders: dict[tuple[int, int], tuple[int, ...]] = {}
        for server in self.servers:
            for partition, hosted in server.hosted.items():
                for number in hosted.served:
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
