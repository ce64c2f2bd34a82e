# SPDX-License-Identifier: Apache-2.0
"""Versions of sealed segments that a server lacks: those of peers or the store, brought forward by the log.

Real: `server.replay.Replay`, which brings them forward. As in production a server that serves the segment is asked
first, then the store, then the log has all of it; what does not come is tried again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from cremant.cluster.lowwater import is_void
from cremant.model.errors import CremantError
from cremant.segment import snapshot
from cremant.server.partition_id import PartitionId
from cremant.server.replay import Replay
from cremant.sim.upsert.table import UPSERT
from cremant.sim.world import INCARNATION, TABLE

if TYPE_CHECKING:
    from cremant.sim.upsert.hosted import Hosted
    from cremant.sim.upsert.world import UpsertWorld


class Bringing:
    """A segment on its way to what is closed on a server."""

    def __init__(self, hosted: Hosted, number: int) -> None:
        self.hosted = hosted
        self.number = number
        #: The content that its rows come in.
        self._metadata = hosted.world.metadata(hosted.partition, number)
        self._content = self._metadata.compacted_at
        self._sources = self._all_sources()
        self._replay: Replay | None = None

    def turn(self) -> bool:
        """True when there is nothing more to do: it is served, or nobody could bring it now."""
        if self.number in self.hosted.segments:
            return True
        try:
            if self._replay is None:
                self._replay = next(self._sources, None)
                return self._replay is None
            more = self._replay.turn() if self.hosted.world.schedule.random() < 0.7 else True
            if self._is_ready(self._replay):
                where = self.hosted.world.sealed[self.key][self._content]
                return self._adopt(Held(self._content, self._replay.result(lambda: where)))
            # The log has no more, and the partition here is further: it was trimmed, or its reader went elsewhere.
            if not more and self._replay.epoch < self.hosted.versions.applied:
                self._replay = None
        except CremantError as error:
            self.hosted.world.note(f"segment {self.key} is not brought: {error}")
            self._replay = None
        return False

    @property
    def key(self) -> tuple[int, int]:
        return self.hosted.partition, self.number

    def _is_ready(self, replay: Replay) -> bool:
        if is_void(replay.epoch, self.hosted.world.rewinds) is not None:
            return False
        end = self.hosted.world.cuts[self.hosted.partition][self.number]
        if not self.hosted.world.guards.fetched_caught_up:
            return replay.epoch >= max(end.epoch, self._content)
        return replay.epoch >= max(self.hosted.versions.applied, end.epoch, self._content)

    def _adopt(self, held: Held) -> bool:
        if not self.hosted.serve(self.number, held):
            return False
        self.hosted.disk[self.number] = packed(*self.key, held)
        return True

    def _all_sources(self) -> Iterator[Replay]:
        """Each made when it is its turn."""
        hosted, world = self.hosted, self.hosted.world
        own, metadata = PartitionId(TABLE, INCARNATION, hosted.partition), self._metadata
        peers = [
            server.hosted[hosted.partition]
            for server in world.servers
            if hosted.partition in server.hosted and self.number in server.hosted[hosted.partition].served
        ]
        if peers:
            held = world.schedule.choice(peers).in_memory().get(self.number)
            if held is not None and held.content == self._content:
                copied = unpacked(world, *self.key, packed(*self.key, held))
                yield Replay.from_snapshot(world.log, own, metadata, copied.found)
        stored = world.stored.get(self.key)
        if stored is not None and stored.content == self._content:
            versions, at = unpacked(world, *self.key, stored).found.versions, world.stored_at[self.key]
            versions.closed(at.epoch)
            yield Replay.from_snapshot(world.log, own, metadata, snapshot.Snapshot(versions, at))
        yield Replay.from_rows(world.log, own, metadata, UPSERT.delete_column)


class Packed(NamedTuple):
    """Versions of a segment as bytes. `content`: the epoch at which its rows were compacted, 0: they were not."""

    content: int
    data: bytes


class Held(NamedTuple):
    content: int
    found: snapshot.Snapshot


def packed(partition: int, number: int, held: Held) -> Packed:
    data = snapshot.pack(held.found, segment=f"{partition}/{number}", checksum=str(held.content), compressed=False)
    return Packed(held.content, data)


def unpacked(world: UpsertWorld, partition: int, number: int, kept: Packed) -> Held:
    rows, order = world.sealed[(partition, number)][kept.content]
    found = snapshot.unpack(
        kept.data, segment=f"{partition}/{number}", checksum=str(kept.content), rows=rows.rows,
        locate=lambda: (rows, order),
    )  # fmt: skip
    return Held(kept.content, found)
