# SPDX-License-Identifier: Apache-2.0
"""A partition on a server: a reader, versions of its tail and segments, their snapshots on the disk.

Real: the reader, `PartitionVersions`, `Versions`, the masks of queries, the bytes of snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cremant.cluster.lowwater import is_void
from cremant.epoch.reader import Effect, RolledBack, Stopped
from cremant.model.offsets import Position
from cremant.model.upsert import Cut, Visibility
from cremant.segment import snapshot
from cremant.segment.locations import Int32s, Locations
from cremant.segment.versions import Flags, Versions
from cremant.sim.engine import Violation
from cremant.sim.upsert.bringing import Bringing, Held, Packed, packed, unpacked
from cremant.sim.upsert.feed import Feed
from cremant.sim.upsert.world import Location
from cremant.sim.world import TOPIC
from cremant.wire.messages import EpochState

if TYPE_CHECKING:
    from cremant.sim.upsert.server import Server

#: Beyond all offsets: a partition that is followed for the sake of its segments keeps no rows.
_NO_ROWS = 1 << 61


class Found(NamedTuple):
    """Rows of a partition at a cut, with the epoch since which each is in force."""

    offsets: np.ndarray
    sub_rows: np.ndarray
    since: np.ndarray


class Hosted(Feed):
    """A partition on a server. `segments`: those served, by number. `consumes`: its tail, too."""

    def __init__(
        self, server: Server, partition: int, consumes: bool, disk: dict[int, Packed | None],
        in_memory: Mapping[int, Held] | None = None,
    ) -> None:  # fmt: skip
        """`in_memory`: versions that are newer than the disk's."""
        self.server = server
        self.world = server.world
        self.partition = partition
        self.consumes = consumes
        self.disk = disk
        self.segments: dict[int, Versions] = {}
        self.ranges: dict[int, tuple[int, int]] = {}
        #: Which rows of it: the epoch at which they were compacted, 0: all.
        self.contents: dict[int, int] = {}
        #: Segments from this number on were given up by a rewind; others may have got the number since.
        self.names_end = 1 << 61
        #: A Reset took back rows that are sealed here: it stands still until it hears of the rewind.
        self.is_stopped = False
        #: Log offset from which on their updates are still to come.
        self.since: dict[int, int] = {}
        self.bringing: list[Bringing] = []
        #: Decided cuts whose rows are still the tail's: numbers.
        self.unsealed: list[int] = []
        world, cuts = server.world, server.world.cuts[partition]
        found = {number: unpacked(world, partition, number, data) for number, data in disk.items() if data}
        found.update({number: one for number, one in (in_memory or {}).items() if number in found})
        self.open = self._first_to_consume(found) if consumes else 0
        self.start = cuts[self.open - 1].next_offset if consumes else _NO_ROWS
        self._consumes_from = cuts[self.open - 1].log_offset
        starts = [cuts[self.open - 1]] if consumes else []
        if world.guards.snapshot_position or not starts:
            positions = [held.found.position for held in found.values()]
            starts += [position for position in positions if not is_void(position.epoch, world.rewinds)]
        # All are of epochs that were taken back: every partition was opened anew at or before that.
        starts = starts or [cuts[-1]]
        super().__init__(world, partition, min(starts, key=lambda at: at.log_offset), self.start)
        for number, kept in found.items():
            at = kept.found.position
            lost = is_void(at.epoch, world.rewinds) is not None and self.versions.has_read(at.log_offset)
            if lost or not self.serve(number, kept):
                world.note(f"server {server.number}: versions of segment {(partition, number)} cannot be continued")
                disk[number] = None

    def _first_to_consume(self, found: Mapping[int, Held]) -> int:
        """A sealed segment that is not here is read again, or fetched: always, if the log does not have it."""
        world, cuts = self.world, self.world.cuts[self.partition]
        number = 1
        while number < len(cuts):
            if number not in found:
                is_there = world.log.earliest(TOPIC, self.partition) <= cuts[number - 1].log_offset
                if (self.partition, number) not in world.sealed or (is_there and world.schedule.random() < 0.5):
                    break
            number += 1
        return number

    def serve(self, number: int, held: Held) -> bool:
        first, end = self.world.segment_range(self.partition, number)
        versions, since = held.found.versions, held.found.position.log_offset
        if not self.versions.attach(str(number), first, end, versions, since=since):
            if self.world.guards.fetched_caught_up:
                return False
            versions.closed(self.versions.applied)
            self.versions.attach(str(number), first, end, versions, since=since)
        self.segments[number], self.since[number], self.ranges[number] = versions, since, (first, end)
        self.contents[number] = held.content
        return True

    @property
    def served(self) -> list[int]:
        """Numbers of segments, as the controller knows them."""
        return [number for number in self.segments if number < self.names_end]

    def read_one(self) -> bool:
        return not self.is_stopped and super().read_one()

    def stopped(self, effect: Stopped) -> None:
        """A Reset to before where it began to read stops it, too."""
        if self.server.has_heard:
            super().stopped(effect)
        self.is_stopped = True

    def carry_out(self, effect: Effect) -> None:
        if isinstance(effect, RolledBack) and self.consumes and self.at >= self._consumes_from:
            self.is_stopped = effect.next_offset < self.versions.rows_from
        super().carry_out(effect)

    def in_memory(self) -> dict[int, Held]:
        """What is served, as of where it was read to; not what is ahead of that."""
        position = self.reader.position
        return {
            number: Held(self.contents[number], snapshot.Snapshot(versions, position))
            for number, versions in self.segments.items()
            if self.since[number] <= position.log_offset and number < self.names_end
        }

    # --- segments end ---

    def closed(self, position: Position) -> None:
        if not self.consumes or position.next_offset - self.start < self.world.options.segment_rows:
            return
        if not self.server.has_heard:
            return  # nobody knows of the segment that it consumes any more
        if self.world.guards.cut_not_void and self.world.is_cut_refused(position):
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
            contents = self.world.sealed.setdefault((self.partition, number), {0: (rows, self._order(rows))})
            known, order = contents[0]
            versions.order = order
            if known.rows != rows.rows or not np.array_equal(known.all_offsets(), rows.all_offsets()):
                raise Violation("I-3", f"partition {self.partition}: segment {number} has other rows elsewhere")
            if not self.serve(number, Held(0, snapshot.Snapshot(versions, self.reader.position))):
                raise Violation("seal", f"partition {self.partition}: segment {number} lacks updates of its own tail")
        self.versions.drop_below(end)
        self.save(number)
        self.upload(number)

    def _order(self, locations: Locations) -> Int32s | None:
        """The rows of a segment of a sorted table stand in another order."""
        if not self.world.options.sorted_rows:
            return None
        noise = locations.all_offsets() * 7919 % 104_729 + locations.all_sub_rows()
        return np.argsort(noise, kind="stable").astype(np.int32)

    def save(self, number: int) -> None:
        found = self.in_memory().get(number)
        if found is not None:
            self.disk[number] = packed(self.partition, number, found)

    def upload(self, number: int) -> None:
        if (data := self.disk.get(number)) and self.world.schedule.random() < self.world.options.upload:
            self.world.store(self.partition, number, data)

    # --- segments come from elsewhere ---

    def bring(self) -> None:
        """What was sealed and is not here; what is on its way goes on."""
        world = self.world
        coming = {one.number for one in self.bringing}
        own = [number for number, data in self.disk.items() if not data]
        for number in (*range(1, self.open - len(self.unsealed)), *own):
            if number not in self.segments and number not in coming and (self.partition, number) in world.sealed:
                coming.add(number)
                world.note(f"server {self.server.number} gets segment {number} of partition {self.partition}")
                self.bringing.append(Bringing(self, number))
        self.bringing = [one for one in self.bringing if not one.turn()]

    # --- queries ---

    @property
    def state(self) -> EpochState:
        return EpochState(closed=self.versions.epoch, partitions=self.partitions)

    def at_cut(self, cut: Cut, numbers: list[int], tail_from: int | None) -> Found | str:
        """What was asked for, exactly; else in words why not."""
        void = self.versions.is_void(cut.epoch) or is_void(cut.epoch, self.server.rewinds)
        if self.world.guards.void_refused and void:
            return "refused"
        if self.is_stopped:
            return "behind"
        if self.versions.epoch < cut.epoch and self.world.guards.cut_awaited:
            return "behind"
        wanted = list(numbers)
        tail: tuple[Versions, int] | None = None
        if tail_from is not None:
            if not self.consumes:
                return "missing"
            at = tail_from if self.world.guards.tail_from_offset else self.versions.rows_from
            number = next((n for n in self.segments if self.ranges[n][0] == at), 0)
            while at < self.versions.rows_from and number in self.segments:
                wanted.append(number)
                at = self.ranges[number][1]
                number += 1
            if at < self.versions.rows_from:
                return "missing"
            tail = (self.versions.tail, at)
        if any(number not in self.segments for number in wanted) or any(n >= self.names_end for n in numbers):
            return "missing"
        if self.world.guards.horizon_refused and any(self.segments[n].horizon > cut.epoch for n in wanted):
            return "refused"
        found = [self._found(self.segments[number], cut, 0) for number in wanted]
        if tail is not None:
            found.append(self._found(tail[0], cut, tail[1]))
        empty = [np.empty(0, np.int64)]
        return Found(*(np.concatenate(empty + [getattr(one, name) for one in found]) for name in Found._fields))

    def _found(self, versions: Versions, cut: Cut, first: int) -> Found:
        """In the order of the segment's rows, by the masks that queries share."""
        places = slice(None) if versions.order is None else versions.order
        (one,) = versions.masks(cut, (versions.rows,))
        mask: Flags = one.flags if one is not None else np.ones(versions.rows, np.bool_)
        if not self.world.guards.half_open and cut.visibility is not Visibility.ALL:
            ended_now = versions.valid_until == cut.epoch - versions.base
            mask = mask | (ended_now & (versions.valid_from < versions.valid_until))[places]
        offsets = versions.locations.all_offsets()[places]
        mask = mask & (offsets >= first)
        since, _ = versions.epochs_of(cut)
        return Found(offsets[mask], versions.locations.all_sub_rows()[places][mask], since[mask])


def located(partition: int, found: Found) -> list[Location]:
    pairs = zip(found.offsets.tolist(), found.sub_rows.tolist(), strict=True)
    return [(partition, offset, sub_row) for offset, sub_row in pairs]
