# SPDX-License-Identifier: Apache-2.0
"""A server: its partitions (hosted.py), its disks, restarts, what it hears of rewinds. Memory dies with a crash, disks
stay, unless they are lost."""

from __future__ import annotations

from collections.abc import Mapping

from cremant.cluster.lowwater import is_void
from cremant.model.cluster import Rewind
from cremant.model.offsets import Position
from cremant.sim.engine import Actor
from cremant.sim.upsert.bringing import Held, Packed, unpacked
from cremant.sim.upsert.compacting import compact
from cremant.sim.upsert.hosted import Hosted
from cremant.sim.upsert.world import UpsertWorld
from cremant.sim.world import TOPIC


class Server:
    def __init__(self, world: UpsertWorld, number: int) -> None:
        self.world = world
        self.number = number
        #: By partition: snapshots by number of the segment; None where only the rows are here.
        self.disks: dict[int, dict[int, Packed | None]] = {}
        self.hosted: dict[int, Hosted] = {}
        #: Rewinds that it has heard of.
        self._heard = 0
        world.servers.append(self)

    def consumes(self, partition: int) -> bool:
        return self.number in self.world.consumers(partition)

    def run(self) -> Actor:
        world, options = self.world, self.world.options
        self._open_new()
        while True:
            yield world.schedule.choice((1, 5, 10, 40))
            if not self.has_heard:
                if world.schedule.random() < 0.3:
                    self._hear()
                else:
                    self._read()
                continue
            if world.chance(options.replica_restart):
                self._restart()
            self._open_new()
            self._read()
            for hosted in list(self.hosted.values()):
                hosted.bring()
                if hosted.unsealed and world.schedule.random() < 0.5:
                    hosted.seal()
                self._chores(hosted)
            if world.chance(options.move):
                self._get_segment()
            if world.chance(options.wipe) and self._is_spare():
                world.note(f"server {self.number} loses its disks")
                self.disks.clear()
                self._restart()

    def _read(self) -> None:
        for hosted in self.hosted.values():
            for _ in range(self.world.schedule.choice((0, 1, 3, 20))):
                if not hosted.read_one():
                    break

    def _chores(self, hosted: Hosted) -> None:
        world = self.world
        if hosted.segments and world.schedule.random() < world.options.snapshot:
            number = world.schedule.choice(sorted(hosted.segments))
            hosted.save(number)
            if world.schedule.random() < 0.3:
                hosted.upload(number)
        if world.options.compaction_ms:
            for number in hosted.served:
                compact(hosted, number)

    def _open_new(self) -> None:
        for partition in range(len(self.world.cuts)):
            if partition not in self.hosted and self.consumes(partition):
                self._open(partition)

    def _open(self, partition: int, in_memory: Mapping[int, Held] | None = None) -> None:
        """Unless there is nothing to read for."""
        disk = self.disks.setdefault(partition, {})
        if disk or self.consumes(partition):
            self.hosted[partition] = Hosted(self, partition, self.consumes(partition), disk, in_memory)

    # --- rewinds ---

    @property
    def has_heard(self) -> bool:
        return self._heard == len(self.world.rewinds)

    @property
    def rewinds(self) -> tuple[Rewind, ...]:
        return self.world.rewinds[: self._heard]

    def rewound(self) -> None:
        """The controller gave segments up: what is here of them has no name any more."""
        for partition, cuts in enumerate(self.world.cuts):
            disk = self.disks.get(partition, {})
            for number in [number for number in disk if number >= len(cuts)]:
                del disk[number]
            if partition in self.hosted:
                self.hosted[partition].names_end = min(self.hosted[partition].names_end, len(cuts))

    def _hear(self) -> None:
        """Partitions are read again from their open segment. What is in memory of the others stays, and is rolled back
        when the Reset comes, if it has not come yet."""
        self._heard = len(self.world.rewinds)
        for partition, hosted in list(self.hosted.items()):
            del self.hosted[partition]
            self._open(partition, hosted.in_memory())

    def _restart(self) -> None:
        self.world.note(f"server {self.number} restarts")
        self._heard = len(self.world.rewinds)
        self.hosted.clear()
        for partition in self.disks:
            self._open(partition)

    @property
    def is_whole(self) -> bool:
        """It reads all that it should, and has the versions of all that was sealed here, or is to be fetched."""
        if any(self.consumes(partition) and partition not in self.hosted for partition in range(len(self.world.cuts))):
            return False
        return all(
            hosted.disk.get(number)
            for hosted in self.hosted.values()
            for number in (*range(1, hosted.open - len(hosted.unsealed)), *hosted.disk)
        )

    def _is_spare(self) -> bool:
        """What a server loses has to survive on the others, in the store and in the log, if they have lost nothing
        themselves."""
        return all(server.is_whole for server in self.world.servers if server is not self)

    def _get_segment(self) -> None:
        """Placement, or a repair, gives this server a segment of a partition that it does not consume."""
        world = self.world
        lacking = [
            (partition, number)
            for partition, number in world.stored
            if number not in self.disks.get(partition, {}) and not self.consumes(partition)
        ]
        if not lacking:
            return
        partition, number = world.trouble.choice(sorted(lacking))
        if partition in self.hosted:
            self.disks[partition][number] = None
            return
        data = world.stored[(partition, number)]
        if self._can_continue(partition, unpacked(world, partition, number, data).found.position):
            self.disks.setdefault(partition, {})[number] = data
            self._open(partition)

    def _can_continue(self, partition: int, at: Position) -> bool:
        """Of an epoch that stays, and the log still has what follows."""
        world = self.world
        return is_void(at.epoch, world.rewinds) is None and world.log.earliest(TOPIC, partition) <= at.log_offset
