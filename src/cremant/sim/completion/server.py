# SPDX-License-Identifier: Apache-2.0
"""Servers: what outlives their processes, and the hand that kills, pauses, wipes and damages them."""

from __future__ import annotations

from cremant.model.errors import Unavailable
from cremant.sim.completion.process import Process
from cremant.sim.completion.world import Killed, Watched, World
from cremant.sim.engine import Actor


class Server:
    """`full`: no file can be written. `lags`: it does not read its log. `diverges`: it builds other rows."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.id = f"s{number}"
        #: Segment -> content, as its marker says.
        self.disk = Watched(world.observers.changed)
        #: Segments whose bytes are not what the marker says any more.
        self.rotten: set[str] = set()
        self.full = False
        self.lags = False
        self.diverges = False
        self.process: Process | None = None
        self._back_ms = 0

    @property
    def runs(self) -> bool:
        return self.process is not None

    @property
    def answers(self) -> bool:
        process = self.process
        return process is not None and process.lives and self.world.now_ms >= process.paused_until_ms

    def read(self, segment: str) -> str | None:
        """What is in the file."""
        content: str | None = self.disk.get(segment)
        return f"{content} with a bit turned" if segment in self.rotten else content

    def ordered(self, what: str, segment: str) -> Actor:
        process = self.process
        if process is None:
            raise Unavailable(f"{self.id} is down")
        try:
            yield from process.ordered(what, segment)
        except Killed:
            raise Unavailable(f"{self.id} went down") from None

    # --- what happens to it ---

    def kill(self, away_ms: int) -> None:
        if self.process is not None:
            self.world.note(f"{self.id} is killed, for {away_ms} ms")
            self.process.lives = False
            self.process = None
        self._back_ms = self.world.now_ms + away_ms

    def stand_still(self, ms: int) -> None:
        if self.process is not None:
            self.world.note(f"{self.id} stands still for {ms} ms")
            self.process.paused_until_ms = self.world.now_ms + ms

    def lose_disk(self) -> None:
        self.world.note(f"{self.id} loses its disk")
        self.world.observers.wiped(self.disk)
        self.rotten.clear()
        self.disk.lose_all()

    def rot(self, segment: str) -> None:
        self.world.note(f"{self.id}: {segment} rots")
        self.rotten.add(segment)
        self.world.observers.wiped([segment])
        self.world.observers.changed()

    def heal(self) -> None:
        self.full = self.lags = self.diverges = False
        self._back_ms = 0
        if self.process is not None:
            self.process.paused_until_ms = 0

    def run(self) -> Actor:
        number = 0
        while True:
            number += 1
            self.process = Process(self.world, self, number)
            self.world.note(f"{self.id} starts")
            self.world.spawn(self.process.run(), 1)
            while self.runs:
                yield 1_000
                self._trouble()
            while self.world.now_ms < self._back_ms:
                yield min(1_000, self._back_ms - self.world.now_ms)
            self._trouble_with_disk()

    def _trouble(self) -> None:
        world, options = self.world, self.world.options
        if world.chance(options.pause):
            self.stand_still(world.trouble.randint(1_000, options.away_ms))
        if world.chance(options.crash):
            self.kill(world.trouble.randint(500, options.away_ms))

    def _trouble_with_disk(self) -> None:
        """While the server is down. While it runs nobody would notice: then what is believed of copies is not so."""
        world, options = self.world, self.world.options
        if world.chance(options.wipe) and world.observers.is_mended(self.id, whole=True):
            self.lose_disk()
        elif self.disk and world.chance(options.rot) and world.observers.is_mended(self.id):
            self.rot(world.trouble.choice(sorted(self.disk)))
