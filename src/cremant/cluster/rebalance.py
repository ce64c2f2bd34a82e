# SPDX-License-Identifier: Apache-2.0
"""Rebalancing a table: where its replicas should be, and the safe way there. Pure and deterministic.

A *unit* is what moves by itself: one sealed segment, or the consuming tail of one partition. Segments live where their
partition is consumed, so a plan names servers per partition.

Rules
- The target spreads the table within one partition of even, then all tables; a replica moves only where that needs it
  (or its server is gone), so a balanced table is left alone.
- Make before break: a unit first gains its new replicas, and loses old ones only when every replica of the target is
  *able* (has the data and serves it). Hence at no step fewer replicas are able than before, up to the target's number.
- A step is a function of the present records and reports alone: a controller that restarts in the middle goes on.
- The last verified copy of a segment is never given up (I-6), not even where downtime is allowed.
- The live committer of a segment whose cut is decided keeps its tail until the segment is sealed.
- At most UNITS_MOVING_MAX units are on their way at once, so that a move does not starve queries.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cremant.cluster.placement import check_servers
from cremant.cluster.routing import TAIL_LAG_ROWS_MAX
from cremant.model.cluster import TailReport
from cremant.model.limits import UNITS_MOVING_MAX

Replicas = tuple[str, ...]

# --- where to -----------------------------------------------------------------------------------------------------


def plan_target(
    current: Mapping[int, Sequence[str]], replication: int, servers: Iterable[str], elsewhere: Mapping[str, int]
) -> dict[int, Replicas]:
    """Replicas per partition. `current`: those of now; `servers`: that may be used; `elsewhere`: partitions of other
    tables per server. Raises NotEnoughServers."""
    levels = _Levels(check_servers(replication, servers), elsewhere, current)
    for partition in sorted(current):
        levels.placed[partition] = [server for server in current[partition] if server in levels.own]
        for server in levels.placed[partition]:
            levels.own[server] += 1
    for partition in sorted(current):
        levels.drop_surplus(partition, replication)
    for partition in sorted(current):
        levels.fill(partition, replication)
    while levels.move_one():
        pass
    return {partition: tuple(replicas) for partition, replicas in levels.placed.items()}


class _Levels:
    """A plan in the making. Each move lowers (sum of own squared, sum of all squared), so moving ends."""

    def __init__(
        self, servers: Sequence[str], elsewhere: Mapping[str, int], current: Mapping[int, Sequence[str]]
    ) -> None:
        self.own = dict.fromkeys(servers, 0)
        self.placed: dict[int, list[str]] = {}
        self._current = current
        self._servers = list(servers)
        self._elsewhere = elsewhere

    def _total(self, server: str) -> int:
        return self.own[server] + self._elsewhere.get(server, 0)

    def _rank(self, server: str, partition: int) -> tuple[int, int, int]:
        turn = (self._servers.index(server) - partition) % len(self._servers)
        return self.own[server], self._total(server), turn

    def drop_surplus(self, partition: int, replication: int) -> None:
        replicas = self.placed[partition]
        while len(replicas) > replication:
            fullest = max(replicas, key=lambda server: (self.own[server], self._total(server), replicas.index(server)))
            replicas.remove(fullest)
            self.own[fullest] -= 1

    def fill(self, partition: int, replication: int) -> None:
        replicas = self.placed[partition]
        while len(replicas) < replication:
            others = [server for server in self._servers if server not in replicas]
            emptiest = min(others, key=lambda server: self._rank(server, partition))
            replicas.append(emptiest)
            self.own[emptiest] += 1

    def move_one(self) -> bool:
        """Makes the spread more even by one replica. Rather by moving those that are new where they stand: they travel
        anyway, so that costs nothing."""
        return self._even_out(self._free_route) or self._even_out(self._first_movable)

    def _even_out(self, route: Callable[[str, str], list[tuple[int, str, str]]]) -> bool:
        by_fullness = sorted(self._servers, key=lambda server: (-self.own[server], -self._total(server), server))
        for source in by_fullness:
            for goal in reversed(by_fullness):
                if self._gains(source, goal) and (moves := route(source, goal)):
                    for partition, giver, taker in moves:
                        replicas = self.placed[partition]
                        replicas[replicas.index(giver)] = taker
                    self.own[source] -= 1
                    self.own[goal] += 1
                    return True
        return False

    def _gains(self, source: str, goal: str) -> bool:
        own = self.own[source] - self.own[goal]
        return own >= 2 or (own == 1 and self._total(source) - self._total(goal) >= 2)

    def _first_movable(self, source: str, goal: str) -> list[tuple[int, str, str]]:
        movable = (p for p in sorted(self.placed) if source in self.placed[p] and goal not in self.placed[p])
        return [(partition, source, goal) for partition in itertools.islice(movable, 1)]

    def _free_route(self, source: str, goal: str) -> list[tuple[int, str, str]]:
        """The shortest chain of moves of new replicas that takes one from `source` and brings one to `goal`; between
        them a server may take one and give another. Empty if there is none."""
        came: dict[str, tuple[int, str]] = {source: (-1, source)}
        queue = deque([source])
        while queue and goal not in came:
            giver = queue.popleft()
            for partition in sorted(self.placed):
                replicas = self.placed[partition]
                if giver not in replicas or giver in self._current[partition]:
                    continue
                for taker in self._servers:
                    if taker not in replicas and taker not in came:
                        came[taker] = (partition, giver)
                        queue.append(taker)
        moves: list[tuple[int, str, str]] = []
        at = goal if goal in came else source
        while at != source:
            partition, giver = came[at]
            moves.append((partition, giver, at))
            at = giver
        return moves[::-1]


# --- the way there ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unit:
    """`able`: replicas that have the data and serve it now; of a sealed segment, from verified bytes of their own.
    `pinned`: replicas that must not leave yet. `sole`: those that hold the only copies there are, wherever they are."""

    replicas: Replicas
    target: Replicas
    able: frozenset[str]
    pinned: frozenset[str] = frozenset()
    sole: frozenset[str] = frozenset()

    @property
    def settled(self) -> bool:
        return set(self.replicas) == set(self.target)

    @property
    def grown(self) -> bool:
        """Has all replicas of the target, and some to give up."""
        return set(self.target) < set(self.replicas)

    @property
    def awaited(self) -> frozenset[str]:
        """Replicas of the target that are not able yet."""
        return frozenset(self.target) - self.able


@dataclass(frozen=True, slots=True)
class Step:
    """What to do now: `changes` are units' next replicas, `awaited` says who is waited for. `done`: nothing is left."""

    changes: dict[str, Replicas] = field(default_factory=dict)
    awaited: dict[str, frozenset[str]] = field(default_factory=dict)
    done: bool = False


def next_step(units: Mapping[str, Unit], *, downtime: bool = False, moving_max: int = UNITS_MOVING_MAX) -> Step:
    """One step of all units (by key). `downtime`: at once, whether the new replicas are able or not; only who holds the
    only copies stays until somebody of the target has one."""
    step = Step(done=all(unit.settled for unit in units.values()))
    moving = sum(unit.grown for unit in units.values())
    for key in sorted(units):
        unit = units[key]
        if unit.settled:
            continue
        if downtime:
            wanted = _at_once(unit)
            if set(wanted) != set(unit.replicas):
                step.changes[key] = wanted
            else:
                step.awaited[key] = unit.awaited
        elif unit.grown:
            kept = _after_break(unit)
            if kept != unit.replicas:
                step.changes[key] = kept
            elif unit.awaited:
                step.awaited[key] = unit.awaited
        elif moving < moving_max:
            moving += 1
            step.changes[key] = with_target(unit)
    return step


def with_target(unit: Unit) -> Replicas:
    return (*unit.replicas, *(server for server in unit.target if server not in unit.replicas))


def _at_once(unit: Unit) -> Replicas:
    if unit.able.intersection(unit.target):
        return unit.target
    return (*unit.target, *(server for server in unit.replicas if server in unit.sole and server not in unit.target))


def _after_break(unit: Unit) -> Replicas:
    if unit.awaited:
        return unit.replicas
    return tuple(server for server in unit.replicas if server in unit.target or server in unit.pinned)


# --- who is able --------------------------------------------------------------------------------------------------


def able_tails(reports: Mapping[str, TailReport]) -> frozenset[str]:
    """Servers whose tail of a partition has caught up: consuming, without error, near the freshest. `reports`: of live
    servers."""
    newest = max((report.watermark.next_offset for report in reports.values()), default=0)
    return frozenset(
        server
        for server, report in reports.items()
        if report.error is None
        and report.state == "consuming"
        and newest - report.watermark.next_offset <= TAIL_LAG_ROWS_MAX
    )


def gone_servers(target: Mapping[int, Collection[str]], usable: Collection[str]) -> set[str]:
    """Servers of a target that may not be used: they are away, or to be taken out. The plan needs others."""
    return {server for replicas in target.values() for server in replicas} - set(usable)
