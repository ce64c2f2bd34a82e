# SPDX-License-Identifier: Apache-2.0
"""Brokers and those who ask them. Real: what a broker knows of closed epochs, and L (`cremant.cluster.lowwater`).

What a broker knows is late: the view by up to `view_age_ms`, closed epochs by the way of a message; only replies bring
the newest. A query asks one server per partition and sealed segment; a second attempt of a part asks at the same L.
"""

from __future__ import annotations

from collections.abc import Generator

import msgspec

from cremant.cluster.lowwater import Chosen, LowWater, Marks, backed, is_void
from cremant.model.upsert import Cut, Visibility
from cremant.sim.engine import Actor, Violation
from cremant.sim.upsert.hosted import Found, located
from cremant.sim.upsert.world import Location, UpsertWorld, View
from cremant.sim.world import INCARNATION
from cremant.wire.messages import EpochsReply

#: Times that one part is asked, and that a query begins anew.
ATTEMPTS_MAX = 12
RESTARTS_MAX = 5


class Part(msgspec.Struct, frozen=True):
    """What one server is asked of one partition. `tail_from`: None = only segments."""

    partition: int
    numbers: tuple[int, ...]
    tail_from: int | None
    servers: tuple[int, ...]


class Broker:
    def __init__(self, world: UpsertWorld, number: int) -> None:
        self.world = world
        self.number = number
        self.marks = LowWater()
        self.view: View = world.view()
        self._version = 0

    def run(self) -> Actor:
        """Views and pushed epochs arrive, each some time after it was true."""
        world = self.world
        while True:
            view = world.view()
            server = world.schedule.choice(world.servers)
            reply = self._reply(server.number)
            yield world.schedule.choice((2, 8, max(2, world.options.view_age_ms)))
            self.view = view
            self.marks.told(str(server.number), reply)

    def _reply(self, server: int) -> EpochsReply:
        self._version += 1
        hosted = self.world.servers[server].hosted
        states = {str(partition): one.state for partition, one in hosted.items()}
        return EpochsReply(instance=str(server), nonce="", version=self._version, epochs={INCARNATION: states})

    def query(
        self, not_before: int, as_of: int | None, visibility: Visibility = Visibility.VISIBLE
    ) -> Generator[int, None, tuple[int, list[Location]] | None]:
        """L and the rows of a whole answer; None if there was none in time."""
        for _ in range(RESTARTS_MAX):
            answer = yield from self._attempt(not_before, as_of, visibility)
            if answer is not None:
                if as_of is None:
                    self.marks.answered(INCARNATION, answer[0])
                return answer[0].epoch, [row for part, found in answer[1] for row in located(part.partition, found)]
            yield self.world.schedule.choice((1, 5, 20))
        return None

    def _attempt(
        self, not_before: int, as_of: int | None, visibility: Visibility
    ) -> Generator[int, None, tuple[Chosen, list[tuple[Part, Found]]] | None]:
        parts, rewinds, partitions = self._parts(), self.view.rewinds, len(self.view.tails)
        if parts is None or is_void(not_before, rewinds) or (as_of is not None and is_void(as_of, rewinds)):
            return None
        marks = self.marks.marks(INCARNATION, rewinds, not_before=not_before, as_of=as_of, visibility=visibility)
        chosen = self._choose(marks, parts)
        if chosen is None:
            return None
        found: list[tuple[Part, Found]] = []
        for part in parts:
            if chosen.ignores(part.partition):
                continue
            rows = yield from self._ask(part, marks, chosen)
            if rows is None:
                return None
            found.append((part, rows))
        if self.world.guards.partitions_known and self.marks.lacks(INCARNATION, chosen, partitions):
            return None
        return chosen, found

    def _choose(self, marks: Marks, parts: list[Part]) -> Chosen | None:
        guards = self.world.guards
        if not guards.floor_kept:
            marks = Marks(marks.states, marks.timely, as_of=marks.as_of, visibility=marks.visibility)
        pairs = [(part.partition, str(part.servers[0])) for part in parts]
        if not guards.growth_counted:
            first = marks.choose([pair for pair in pairs if pair[0] == 0])
            return None if first is None else Chosen(first.epoch, 1)
        if not guards.cut_lowest and marks.as_of is None:
            epochs = [marks.states[pair].closed for pair in pairs if pair in marks.states]
            return Chosen(max([marks.least.epoch, *epochs])) if epochs else None
        return marks.choose(pairs)

    def _parts(self) -> list[Part] | None:
        """By partition and server. None while nobody has a part."""
        view, choice = self.view, self.world.schedule.choice
        parts = []
        for partition, consumers in enumerate(view.consumers):
            if not consumers:
                return None
            order = list(consumers)
            self.world.schedule.shuffle(order)
            parts.append(Part(partition, (), view.starts[partition], tuple(order)))
            for number in range(1, view.tails[partition]):
                holders = view.holders.get((partition, number), ())
                if not holders:
                    return None
                first = choice(holders)
                others = tuple(holder for holder in holders if holder != first)
                parts.append(Part(partition, (number,), None, (first, *others)))
        return parts

    def _ask(self, part: Part, marks: Marks, chosen: Chosen) -> Generator[int, None, Found | None]:
        """A server that is behind is asked again, then another one; always at the same L."""
        world = self.world
        cut = marks.cut(chosen)
        for attempt in range(ATTEMPTS_MAX):
            server = world.servers[part.servers[attempt // 2 % len(part.servers)]]
            yield world.schedule.choice((1, 2, 10))
            hosted = server.hosted.get(part.partition)
            if hosted is None:
                continue
            if not world.guards.cut_kept and attempt and marks.as_of is None:
                cut = Cut(epoch=max(hosted.versions.epoch, 1), visibility=cut.visibility)
            answer = hosted.at_cut(cut, list(part.numbers), part.tail_from)
            reply = self._reply(server.number)
            if isinstance(answer, Found):
                yield 1
                self.marks.told(str(server.number), reply)
                return answer
        return None


class Client:
    """Asks any broker, and passes on the token of what it has seen (U-3)."""

    def __init__(self, world: UpsertWorld, brokers: list[Broker]) -> None:
        self.world = world
        self.brokers = brokers
        self.seen = 0
        self.answers = 0
        self.newest = 0

    def run(self) -> Actor:
        world = self.world
        while True:
            yield world.schedule.choice((5, 20, 40))
            broker = world.schedule.choice(self.brokers)
            # A token that a rewind made void is refused; who asked asks without it.
            self.seen = backed(self.seen, broker.view.rewinds)
            dice = world.schedule.random()
            as_of = world.schedule.randint(0, self.seen) if dice < 0.15 else None
            visibility = Visibility.IN_FORCE if 0.15 < dice < 0.3 else Visibility.VISIBLE
            rewinds = world.rewinds
            answer = yield from broker.query(self.seen, as_of, visibility)
            if answer is None:
                continue
            epoch, rows = answer
            world.observers.answered(epoch, rows, visibility, rewinds)
            self.answers += 1
            if as_of is None:
                if epoch < backed(self.seen, world.rewinds):
                    raise Violation("U-3", f"an answer at epoch {epoch} after one at epoch {self.seen}")
                self.seen = epoch
            elif epoch != as_of:
                raise Violation("U-3", f"asked as of epoch {as_of}, answered as of {epoch}")
