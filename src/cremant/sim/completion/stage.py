# SPDX-License-Identifier: Apache-2.0
"""What the script of a scenario does to its world, and how it waits for the moment.

A script is an actor. It brings a fault about at an exact moment and waits, with a deadline, until what must follow has
followed; what it left behind is healed as in every world, and then everything must settle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from cremant.completion.copies import holders_of
from cremant.model.completion import CompletionMode, StorePolicy
from cremant.model.errors import Unavailable
from cremant.model.segments import SegmentMetadata, SegmentStatus
from cremant.sim.completion.controller import Controller, gone
from cremant.sim.completion.options import Options
from cremant.sim.completion.server import Server
from cremant.sim.completion.world import World
from cremant.sim.engine import Actor, Violation

WITHIN_MS = 120_000
_LOOK_EVERY_MS = 20

#: A world in which nothing happens but what the script does.
QUIET = Options(
    servers=3, partitions=1, replication=2, policy=StorePolicy.STORE_BEST_EFFORT, mode=CompletionMode.DEFAULT,
    upload_wait_ms=1_000, safety_ms=4 * 60 * 60 * 1000, epoch_rows=100, segment_rows=400, segment_ms=40_000, loss=0.0,
    duplication=0.0, delay_ms=20, crash=0.0, pause=0.0, away_ms=1_000, wipe=0.0, lag=0.0, divergence=0.0,
    build_failure=0.0, build_ms=200, store_trouble=0.0, controller_crash=0.0, controller_pause=0.0, force=0.0, trim=1.0,
    cut=0.0, rot=0.0, transfer_ms=100, skew_ms=0, move=0.0, policies=0.0, delete=0.0,
)  # fmt: skip


class Stage:
    """`ended`: the script came to its end."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ended = False
        self._struck = ""

    def play(self, script: Script) -> Actor:
        yield from script(self)
        self.ended = True
        self.world.note("the script ends")

    # --- waiting ---

    def until(
        self, what: str, holds: Callable[[], object], within_ms: int = WITHIN_MS, every_ms: int = _LOOK_EVERY_MS
    ) -> Actor:
        ends_ms = self.world.now_ms + within_ms
        while not holds():
            if self.world.now_ms > ends_ms:
                raise Violation("reached", f"{what}: not within {within_ms} ms")
            yield every_ms
        self.world.note(f"script: {what}")

    def until_happened(self, fact: str, within_ms: int = WITHIN_MS) -> Actor:
        yield from self.until(fact, lambda: fact in self.world.happened, within_ms)

    def demand(self, what: str, *, holds: bool) -> None:
        if not holds:
            raise Violation("scenario", f"{what} does not hold")

    # --- looking ---

    def newest(self, status: SegmentStatus) -> SegmentMetadata | None:
        found = [one for one in self.world.observers.segments.values() if one.status is status]
        return max(found, key=lambda one: one.sequence, default=None)

    def now(self, segment: SegmentMetadata) -> SegmentMetadata:
        return self.world.observers.segments[segment.name]

    def done(self) -> list[SegmentMetadata]:
        return [one for one in self.world.observers.segments.values() if one.status is SegmentStatus.DONE]

    def until_newest(self, status: SegmentStatus) -> Actor:
        """Waits for a segment that comes to this state after now."""
        before = set(self._in(status))
        yield from self.until(f"one more segment is {status}", lambda: set(self._in(status)) - before)

    def until_done(self, segment: SegmentMetadata, within_ms: int = WITHIN_MS) -> Actor:
        yield from self.until("it is committed", lambda: self.now(segment).status is SegmentStatus.DONE, within_ms)

    def until_held_by_all(self, segment: SegmentMetadata) -> Actor:
        yield from self.until("all have it", lambda: self.held_by_all(segment))

    def _in(self, status: SegmentStatus) -> list[str]:
        return [one.name for one in self.world.observers.segments.values() if one.status is status]

    def server(self, name: str | None) -> Server:
        assert name is not None
        found: Server = self.world.servers[name]
        return found

    def holders(self, segment: SegmentMetadata) -> list[Server]:
        return [self.server(name) for name in holders_of(self.now(segment))]

    def holds(self, server: Server, segment: SegmentMetadata) -> bool:
        return server.read(segment.name) == self.now(segment).checksum

    def held_by_all(self, segment: SegmentMetadata) -> bool:
        return all(self.holds(self.server(name), segment) for name in self.now(segment).replicas)

    def others(self, segment: SegmentMetadata) -> list[Server]:
        """The replicas beside the committer."""
        now = self.now(segment)
        return [self.server(name) for name in now.replicas if name != now.committer]

    @property
    def controller(self) -> Controller:
        found: Controller = self.world.controllers[-1]
        return found

    # --- doing ---

    def on_write(self, step: str, when: str, do: Callable[[], None]) -> None:
        """Does it once, "before" or "after" the next write of this kind (`Observers.steps_of`)."""

        def strike(steps: frozenset[str], moment: str) -> None:
            if step in steps and moment == when:
                self.world.strike = lambda steps, when: None
                self._struck = f"{when} {step}"
                do()

        self._struck = ""
        self.world.strike = strike

    def until_written(self, step: str, when: str, do: Callable[[], None], within_ms: int = WITHIN_MS) -> Actor:
        self.on_write(step, when, do)
        yield from self.until_struck(within_ms)

    def until_struck(self, within_ms: int = WITHIN_MS) -> Actor:
        """Waits for the write that `on_write` named."""
        yield from self.until("it was written", lambda: self._struck, within_ms)

    def controller_dies(self) -> None:
        """In the middle of what it does; whoever asked it hears nothing."""
        for controller in list(self.world.controllers):
            gone(self.world, controller)
        raise Unavailable("the controller died")

    def controller_stands_still(self) -> Controller:
        """Until it is put back it answers nobody, and another one takes over."""
        still = self.controller
        gone(self.world, still)
        return still

    def until_led(self) -> Actor:
        yield from self.until("another controller leads", lambda: self.world.controllers)

    def lose_disks(self, servers: list[Server], away_ms: int) -> None:
        """At once, whatever is on them."""
        for server in servers:
            server.kill(away_ms)
            server.lose_disk()


Script = Callable[[Stage], Actor]


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """`case`: of the design's failure cases, "" for further ones. `reached`: what must have happened in the end
    (`World.happened`). `options`: what differs from `QUIET`."""

    name: str
    case: str
    what: str
    script: Script
    reached: tuple[str, ...]
    options: dict[str, Any]

    def world_options(self) -> Options:
        return msgspec.structs.replace(QUIET, **self.options)


def registrar(found: list[Scenario]) -> Callable[..., Callable[[Script], Script]]:
    """A decorator that makes a script a scenario by its own name, and puts it into the list."""

    def scenario(
        what: str, *reached: str, case: str = "", options: dict[str, Any] | None = None
    ) -> Callable[[Script], Script]:
        def register(script: Script) -> Script:
            name = getattr(script, "__name__", "").replace("_", "-")
            found.append(
                Scenario(name=name, case=case, what=what, script=script, reached=reached, options=options or {})
            )
            return script

        return register

    return scenario
