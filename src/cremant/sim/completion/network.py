# SPDX-License-Identifier: Apache-2.0
"""The network of the world of completion: who reaches whom, one way at a time, and peers that answer wrongly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cremant.sim.engine import Actor

if TYPE_CHECKING:
    from cremant.sim.completion.world import World

#: Whichever controller answers.
CONTROLLER = "controller"


class Network:
    """`cuts`: (from, to) of whom nothing arrives, though the other way is open. `damaged`: servers whose archives are
    `torn` or `corrupt`, or that say `404` of what they have. `late`: server -> by how many ms what it
    says of segments takes longer; heartbeats do not."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.cuts: set[tuple[str, str]] = set()
        self.damaged: dict[str, str] = {}
        self.late: dict[str, int] = {}

    def loses(self, sender: str, receiver: str) -> bool:
        """Whether this message does not arrive."""
        if (sender, receiver) in self.cuts:
            self._world.happened.add("cut one way")
            return True
        return self._world.chance(self._world.options.loss)

    def run(self) -> Actor:
        """Random cuts, for a while each."""
        world = self._world
        while world.faults:
            yield 1_000
            if not world.chance(world.options.cut):
                continue
            servers = sorted(world.servers)
            ends = [world.trouble.choice(servers), world.trouble.choice((CONTROLLER, *servers))]
            world.trouble.shuffle(ends)
            cut = (ends[0], ends[1])
            self.cuts.add(cut)
            world.note(f"nothing of {cut[0]} reaches {cut[1]}")
            world.spawn(self._mended(cut), world.trouble.randint(1_000, world.options.away_ms))

    def _mended(self, cut: tuple[str, str]) -> Actor:
        self.cuts.discard(cut)
        yield from ()

    def heal(self) -> None:
        self.cuts.clear()
        self.damaged.clear()
        self.late.clear()
