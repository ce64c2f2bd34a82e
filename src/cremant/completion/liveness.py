# SPDX-License-Identifier: Apache-2.0
"""Repair of consumption: partitions whose servers stay away get others, replicas that stopped are started again. Pure.

Rules

- Who is away for REPAIR_AWAY_MS is not just restarting. While most servers are away the whole cluster is, and nothing
  moves for longer: else the first server that is back would get everything.
- A partition's rows are in its epoch log from the start of its open segment on, so any server can take over. A server
  that stays away is replaced one for one; where there is no other it stays, and reads on when it returns.
- A replica that stopped for good (a rule did not hold) is started anew from its open segment, later each time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from cremant.model.cluster import PartitionRecord
from cremant.model.limits import REPAIR_AWAY_MS, REPAIR_MOSTLY_AWAY_MS, RESET_BACKOFF_FIRST_MS, RESET_BACKOFF_MAX_MS


class Absence:
    """Since when servers are away."""

    def __init__(self) -> None:
        self._since_ms: dict[str, int] = {}

    def notice(self, wanted: Collection[str], live: frozenset[str], now_ms: int) -> frozenset[str]:
        """Of `wanted`, those that have been away for long."""
        gone = set(wanted) - live
        self._since_ms = {server: self._since_ms.get(server, now_ms) for server in sorted(gone)}
        patience_ms = REPAIR_AWAY_MS if len(gone) <= len(live) else REPAIR_MOSTLY_AWAY_MS
        return frozenset(server for server, since_ms in self._since_ms.items() if now_ms - since_ms >= patience_ms)

    def since_ms(self, server: str, now_ms: int) -> int:
        """`now_ms` if it is not away."""
        return self._since_ms.get(server, now_ms)


@dataclass(frozen=True, slots=True)
class Stopped:
    """A replica that reads no more. `segment`: the partition's open one."""

    table: str
    partition: int
    segment: str
    server: str


@dataclass(frozen=True, slots=True)
class Place:
    """The partition's replicas from now on."""

    table: str
    partition: int
    replicas: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reset:
    """Ask the server to start its replica of the open segment anew."""

    stopped: Stopped


@dataclass(slots=True)
class _Resets:
    count: int = 0
    retry_at_ms: int = 0


@dataclass(slots=True)
class Liveness:
    """Not thread-safe."""

    _absence: Absence = field(default_factory=Absence)
    _resets: dict[Stopped, _Resets] = field(default_factory=dict)

    def step(
        self,
        partitions: Mapping[str, Iterable[PartitionRecord]],
        live: frozenset[str],
        stopped: Iterable[Stopped],
        now_ms: int,
        *,
        moving: Collection[str] = (),
        leaving: Collection[str] = (),
    ) -> tuple[Place | Reset, ...]:
        """`partitions` by table; `moving`: tables whose replicas somebody else is moving; `leaving`: servers that get
        nothing new."""
        everyone = [(table, record) for table, records in sorted(partitions.items()) for record in records]
        load: dict[str, int] = dict.fromkeys(sorted(live), 0)
        for _, record in everyone:
            for server in record.replicas:
                load[server] = load.get(server, 0) + 1
        away, usable = self._absence.notice(load, live, now_ms), live.difference(leaving)
        places = [
            Place(table, record.partition, replicas)
            for table, record in everyone
            if table not in moving and (replicas := _without(record.replicas, away, usable, load)) != record.replicas
        ]
        return (*places, *self._restart(stopped, now_ms))

    def _restart(self, stopped: Iterable[Stopped], now_ms: int) -> list[Reset]:
        found = sorted(stopped, key=lambda one: (one.table, one.partition, one.server))
        # How often it was tried is forgotten only when the open segment is another one.
        kept = {(one.table, one.partition, one.server): one.segment for one in found}
        self._resets = {
            one: resets for one, resets in self._resets.items()
            if kept.get((one.table, one.partition, one.server), one.segment) == one.segment
            and now_ms - resets.retry_at_ms < RESET_BACKOFF_MAX_MS
        }  # fmt: skip
        orders = []
        for one in found:
            resets = self._resets.setdefault(one, _Resets())
            if now_ms < resets.retry_at_ms:
                continue
            resets.count += 1
            resets.retry_at_ms = now_ms + min(RESET_BACKOFF_MAX_MS, RESET_BACKOFF_FIRST_MS << min(resets.count, 16))
            orders.append(Reset(one))
        return orders


def _without(
    replicas: tuple[str, ...], away: frozenset[str], usable: frozenset[str], load: dict[str, int]
) -> tuple[str, ...]:
    """The replicas with others instead of those that are away; `load` counts the changes in."""
    changed = list(replicas)
    for index, server in enumerate(replicas):
        others = [other for other in sorted(usable) if other not in changed]
        if server in away and others:
            changed[index] = min(others, key=lambda other: (load[other], other))
            load[changed[index]] += 1
    return tuple(changed)
