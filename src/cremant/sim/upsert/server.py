# SPDX-License-Identifier: Apache-2.0
"""A server: readers of its partitions, versions of their tails and segments, snapshots on its disk.

Real: the reader, `PartitionVersions`, `Versions`, the bytes of snapshots. Memory dies with a crash, the disk stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from cremant.cluster.lowwater import is_void
from cremant.model.offsets import Position
from cremant.model.upsert import Cut, Visibility
from cremant.segment import snapshot
from cremant.segment.locations import Locations
from cremant.segment.versions import Flags, Versions
from cremant.sim.engine import Actor, Violation
from cremant.sim.upsert.feed import Feed
from cremant.sim.upsert.world import Location, UpsertWorld
from cremant.wire.messages import EpochState

#: Beyond all offsets: a partition that is followed for the sake of its segments keeps no rows.
_NO_ROWS = 1 << 61


class Found(NamedTuple):
    """Rows of a partition at a cut, with the epoch since which each is in force."""

    offsets: np.ndarray
    sub_rows: np.ndarray
    since: np.ndarray


class CatchUp(Feed):
    """A fetched segment on its way to what is closed here: a reader of its own replays the log into its versions."""

    def __init__(self, world: UpsertWorld, partition: int, number: int, found: snapshot.Snapshot) -> None:
        super().__init__(world, partition, found.position, _NO_ROWS)
        self.number = number
        self.found = found
        first, end = world.segment_range(partition, number)
        self.versions.attach(str(number), first, end, found.versions, since=found.position.log_offset)

    @property
    def position(self) -> Position:
        return self.reader.position


class Hosted(Feed):
    """A partition on a server. `segments`: those served, by number. `consumes`: its tail, too."""

    def __init__(
        self, server: Server, partition: int, consumes: bool, disk: dict[int, bytes],
        in_memory: Mapping[int, snapshot.Snapshot] | None = None,
    ) -> None:  # fmt: skip
        """`in_memory`: versions that are newer than the disk's."""
        self.server = server
        self.consumes = consumes
        self.disk = disk
        self.segments: dict[int, Versions] = {}
        #: Log offset from which on their updates are still to come.
        self.since: dict[int, int] = {}
        self.fetched: list[CatchUp] = []
        #: Decided cuts whose rows are still the tail's: numbers.
        self.unsealed: list[int] = []
        world, cuts = server.world, server.world.cuts[partition]
        found = {number: unpacked(world, partition, number, data) for number, data in disk.items()}
        found.update({number: one for number, one in (in_memory or {}).items() if number in found})
        self.open = 1
        while self.open in found:
            self.open += 1
        self.start = cuts[self.open - 1].next_offset if consumes else _NO_ROWS
        starts = [cuts[self.open - 1]] if consumes else []
        if world.guards.snapshot_position or not starts:
            starts += [one.position for one in found.values() if not is_void(one.position.epoch, world.rewinds)]
        # All are of epochs that were taken back: every partition was opened anew at or before that.
        starts = starts or [cuts[-1]]
        super().__init__(world, partition, min(starts, key=lambda at: at.log_offset), self.start)
        for number, kept in found.items():
            self._serve(number, kept)

    def _serve(self, number: int, found: snapshot.Snapshot) -> bool:
        first, end = self.world.segment_range(self.partition, number)
        versions, since = found.versions, found.position.log_offset
        if not self.versions.attach(str(number), first, end, versions, since=since):
            if self.world.guards.fetched_caught_up:
                return False
            versions.closed(self.versions.applied)
            self.versions.attach(str(number), first, end, versions, since=since)
        self.segments[number], self.since[number] = versions, since
        return True

    def in_memory(self) -> dict[int, snapshot.Snapshot]:
        """What is served, as of where it was read to; not what is ahead of that."""
        position = self.reader.position
        return {
            number: snapshot.Snapshot(versions, position)
            for number, versions in self.segments.items()
            if self.since[number] <= position.log_offset
        }

    # --- segments end ---

    def closed(self, position: Position) -> None:
        if not self.consumes or position.next_offset - self.start < self.world.options.segment_rows:
            return
        if self.world.is_cut_refused(position):
            return
        self.world.report_cut(self.partition, self.open, position)
        self.unsealed.append(self.open)
        self.open += 1
        self.start = position.next_offset

    def seal(self) -> None:
        """The oldest cut's rows become a segment; what the tail knew of them is handed over."""
        number = self.unsealed.pop(0)
        first, end = self.world.segment_range(self.partition, number)
        if number not in self.segments:
            versions = self.versions.tail_versions(first, end)
            assert versions is not None
            rows = versions.locations
            known = self.world.sealed.setdefault((self.partition, number), rows)
            if known.rows != rows.rows or not np.array_equal(known.all_offsets(), rows.all_offsets()):
                raise Violation("I-3", f"partition {self.partition}: segment {number} has other rows elsewhere")
            if not self._serve(number, snapshot.Snapshot(versions, self.reader.position)):
                raise Violation("seal", f"partition {self.partition}: segment {number} lacks updates of its own tail")
        self.versions.drop_below(end)
        self.save(number)
        if (self.partition, number) not in self.world.stored:
            self.upload(number)

    def save(self, number: int) -> None:
        found = self.in_memory().get(number)
        if found is not None:
            self.disk[number] = packed(self.partition, number, found)

    def upload(self, number: int) -> None:
        if number not in self.disk:
            return
        found = unpacked(self.world, self.partition, number, self.disk[number])
        self.world.store(self.partition, number, self.disk[number], found.position)

    def positions(self) -> list[Position]:
        """From where the log is needed for this, at whatever moment the server dies."""
        cuts = self.world.cuts[self.partition]
        number = 1
        while number in self.disk:
            number += 1
        needed = [cuts[number - 1]] if self.consumes else []
        needed += [unpacked(self.world, self.partition, number, data).position for number, data in self.disk.items()]
        return needed + [one.position for one in self.fetched] + [self.reader.position]

    # --- segments come from elsewhere ---

    def fetch(self, number: int, data: bytes) -> None:
        self.fetched.append(
            CatchUp(self.world, self.partition, number, unpacked(self.world, self.partition, number, data))
        )

    def catch_up(self) -> None:
        for one in list(self.fetched):
            for _ in range(self.world.schedule.choice((0, 2, 20))):
                if not one.read_one():
                    break
            ready = one.found.versions.epoch >= self.versions.applied
            if (ready or not self.world.guards.fetched_caught_up) and one.number not in self.segments:
                found = snapshot.Snapshot(one.found.versions, one.position)
                if self._serve(one.number, found):
                    self.disk[one.number] = packed(self.partition, one.number, found)
                    self.fetched.remove(one)
            elif one.number in self.segments:
                self.fetched.remove(one)

    # --- queries ---

    @property
    def state(self) -> EpochState:
        return EpochState(closed=self.versions.epoch, partitions=self.partitions)

    def at_cut(self, cut: Cut, numbers: list[int], tail_from: int | None) -> Found | str:
        """What was asked for, exactly; else in words why not."""
        void = self.versions.is_void(cut.epoch) or is_void(cut.epoch, self.world.rewinds)
        if self.world.guards.void_refused and void:
            return "refused"
        if self.versions.epoch < cut.epoch and self.world.guards.cut_awaited:
            return "behind"
        wanted = list(numbers)
        tail: tuple[Versions, int] | None = None
        if tail_from is not None:
            if not self.consumes:
                return "missing"
            at = tail_from if self.world.guards.tail_from_offset else self.versions.rows_from
            number = next((n for n in self.segments if self.world.segment_range(self.partition, n)[0] == at), 0)
            while at < self.versions.rows_from and number in self.segments:
                wanted.append(number)
                at = self.world.segment_range(self.partition, number)[1]
                number += 1
            if at < self.versions.rows_from:
                return "missing"
            tail = (self.versions.tail, at)
        if any(number not in self.segments for number in wanted):
            return "missing"
        found = [self._found(self.segments[number], cut, 0) for number in wanted]
        if tail is not None:
            found.append(self._found(tail[0], cut, tail[1]))
        empty = [np.empty(0, np.int64)]
        return Found(*(np.concatenate(empty + [getattr(one, name) for one in found]) for name in Found._fields))

    def _found(self, versions: Versions, cut: Cut, first: int) -> Found:
        mask: Flags = versions.mask(cut)
        if not self.world.guards.half_open and cut.visibility is not Visibility.ALL:
            ended_now = versions.valid_until == cut.epoch - versions.base
            mask = mask | (ended_now & (versions.valid_from < versions.valid_until))
        offsets = versions.locations.all_offsets()
        mask = mask & (offsets >= first)
        since, _ = versions.epochs_of(cut)
        return Found(offsets[mask], versions.locations.all_sub_rows()[mask], since[mask])


class Server:
    def __init__(self, world: UpsertWorld, number: int) -> None:
        self.world = world
        self.number = number
        #: By partition: snapshots by number of the segment.
        self.disks: dict[int, dict[int, bytes]] = {}
        self.hosted: dict[int, Hosted] = {}
        world.servers.append(self)

    def consumes(self, partition: int) -> bool:
        servers = self.world.options.servers
        replicas = min(self.world.options.replicas, servers)
        return (self.number - partition) % servers < replicas

    def run(self) -> Actor:
        world, options = self.world, self.world.options
        self._open_new()
        while True:
            yield world.schedule.choice((1, 5, 10, 40))
            if world.chance(options.replica_restart):
                self._restart()
            self._open_new()
            for hosted in list(self.hosted.values()):
                for _ in range(world.schedule.choice((0, 1, 3, 20))):
                    if not hosted.read_one():
                        break
                hosted.catch_up()
                if hosted.unsealed and world.schedule.random() < 0.5:
                    hosted.seal()
                self._chores(hosted)
            if world.chance(options.move):
                self._get_segment()

    def _chores(self, hosted: Hosted) -> None:
        world = self.world
        if hosted.segments and world.schedule.random() < world.options.snapshot:
            number = world.schedule.choice(sorted(hosted.segments))
            hosted.save(number)
            if world.schedule.random() < 0.3:
                hosted.upload(number)

    def _open_new(self) -> None:
        for partition in range(len(self.world.cuts)):
            if partition not in self.hosted and self.consumes(partition):
                self._open(partition)

    def _open(self, partition: int, in_memory: Mapping[int, snapshot.Snapshot] | None = None) -> None:
        """Unless there is nothing to read for. Snapshots of epochs that were taken back are of no use."""
        disk = self.disks.setdefault(partition, {})
        for number in list(disk):
            position = unpacked(self.world, partition, number, disk[number]).position
            if is_void(position.epoch, self.world.rewinds) and number not in (in_memory or {}):
                del disk[number]
        if disk or self.consumes(partition):
            self.hosted[partition] = Hosted(self, partition, self.consumes(partition), disk, in_memory)

    def rewound(self) -> None:
        """Segments that were given up are deleted; partitions are read again from their open segment. What is in memory
        of the others stays, and is rolled back when the Reset comes."""
        world = self.world
        for partition, disk in self.disks.items():
            for number in [number for number in disk if number >= len(world.cuts[partition])]:
                del disk[number]
            hosted = self.hosted.pop(partition, None)
            if hosted is not None:
                self._open(partition, hosted.in_memory())

    def _restart(self) -> None:
        self.world.note(f"server {self.number} restarts")
        self.hosted.clear()
        for partition in self.disks:
            self._open(partition)

    def _get_segment(self) -> None:
        """Placement, or a repair, gives this server a segment: from a peer, else from the store."""
        world = self.world
        lacking = [
            (partition, number)
            for partition, number in world.stored
            if number not in self.disks.get(partition, {}) and not self._coming(partition, number)
        ]
        if not lacking:
            return
        partition, number = world.trouble.choice(sorted(lacking))
        peers = [
            server.hosted[partition]
            for server in world.servers
            if partition in server.hosted and number in server.hosted[partition].segments
        ]
        if peers and world.trouble.random() < 0.6:
            peer = world.trouble.choice(peers)
            found = peer.in_memory().get(number)
            data = packed(partition, number, found) if found is not None else world.stored[(partition, number)]
        else:
            data = world.stored[(partition, number)]
        if is_void(unpacked(world, partition, number, data).position.epoch, world.rewinds):
            return
        world.note(f"server {self.number} gets segment {number} of partition {partition}")
        if partition not in self.hosted:
            self.disks.setdefault(partition, {})[number] = data
            self._open(partition)
        else:
            self.hosted[partition].fetch(number, data)

    def _coming(self, partition: int, number: int) -> bool:
        hosted = self.hosted.get(partition)
        if hosted is None:
            return False
        own = self.consumes(partition) and number >= hosted.open - len(hosted.unsealed)
        return own or any(one.number == number for one in hosted.fetched)


def packed(partition: int, number: int, found: snapshot.Snapshot) -> bytes:
    return snapshot.pack(found, segment=f"{partition}/{number}", checksum="", compressed=False)


def unpacked(world: UpsertWorld, partition: int, number: int, data: bytes) -> snapshot.Snapshot:
    rows: Locations = world.sealed[(partition, number)]
    return snapshot.unpack(
        data, segment=f"{partition}/{number}", checksum="", rows=rows.rows, locate=lambda: (rows, None)
    )


def located(partition: int, found: Found) -> list[Location]:
    pairs = zip(found.offsets.tolist(), found.sub_rows.tolist(), strict=True)
    return [(partition, offset, sub_row) for offset, sub_row in pairs]
