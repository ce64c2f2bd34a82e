# SPDX-License-Identifier: Apache-2.0
"""Routing: which server answers which part of a table. Pure: view and loads in, asks out (design: query.md, "Broker").

Choice of a server for a part, in this order: not avoided (it failed this part before); alive; not suspect; reported to
be able (ONLINE, or a tail without error), replicas before those that still have what moved away; for tails close to the
freshest replica and, where the query names a floor, known to be past it; then the less loaded of the first two in a
fixed order (load.py).

A query over few rows goes to as few servers as possible: a request costs more than its rows. One over many rows is
spread over all replicas, so that they share the work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from cremant.cluster.load import Load, lighter
from cremant.cluster.parts import Ask, Part, Parts, parts_of
from cremant.model.cluster import CATCHING_UP, ClusterView, Role, TableView, TailReport
from cremant.model.segments import ReplicaState, SegmentMetadata
from cremant.wire.messages import PruneTerm

#: A replica this many rows behind the freshest is asked only if nobody better is there: one heartbeat at 20 k rows/s.
TAIL_LAG_ROWS_MAX = 10_000
#: ... or this much later, by what each has proven: reports are up to two heartbeats and an epoch apart.
TAIL_LAG_MS_MAX = 2_000
#: Up to this many rows a query is kept together: scanning them takes about as long as asking one more server.
TOGETHER_ROWS_MAX = 1_000_000

_ABLE, _LEAVING, _UNSURE, _LATE, _UNABLE = range(5)


@dataclass(frozen=True, slots=True)
class Assignment:
    """`unassigned`: parts that no live server could be asked for."""

    asks: tuple[Ask, ...]
    unassigned: tuple[Part, ...]

    def without(self, is_out: Callable[[int], bool]) -> Assignment:
        """The same without some partitions."""
        asks = []
        for ask in self.asks:
            parts = tuple(part for part in ask.parts if not is_out(part.partition))
            if parts:
                asks.append(Ask(ask.server, ask.url, parts))
        return Assignment(tuple(asks), tuple(part for part in self.unassigned if not is_out(part.partition)))


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a query asks of routing.

    `floors`: partition -> offset that must be visible. `known`: (partition, server) -> offset that an answer proved.
    `fixed`: regardless of load (`useFixedReplica`). `together`: on few servers (True), spread (False), as fits (None).
    """

    floors: Mapping[int, int] = field(default_factory=dict)
    known: Mapping[tuple[int, str], int] = field(default_factory=dict)
    fixed: bool = False
    together: bool | None = None
    #: Upsert tables: (partition, server) pairs near the newest closed epoch; others are asked for want of such.
    timely: Collection[tuple[int, str]] | None = None
    #: (partition, server) pairs that others have left behind; they are asked for want of others.
    late: Collection[tuple[int, str]] = ()


NO_WISHES = Wishes()


class Routes:
    """A table under one view, prepared for routing: made once per view, used by all its queries."""

    def __init__(self, view: ClusterView, table: TableView) -> None:
        self.view = view
        self.table = table
        #: Live servers and where they are.
        self.urls = {one.id: one.url for one in view.instances if one.live and one.role is Role.SERVER}
        self._segments = {segment.name: segment for segment in table.segments}
        self._replicas = {part.record.partition: part.record.replicas for part in table.partitions}
        #: Partition -> live servers that replicate it.
        self.replicas = {
            partition: tuple(server for server in servers if server in self.urls)
            for partition, servers in self._replicas.items()
        }
        self._ranks: dict[Part, dict[str, int]] = {}
        self._best: dict[Part, tuple[str, ...]] = {}
        self._whole: Parts | None = None

    def parts(self, prune: Sequence[PruneTerm] = ()) -> Parts:
        """The table's parts, without the segments that cannot match."""
        if prune:
            return parts_of(self.table, prune)
        if self._whole is None:
            self._whole = parts_of(self.table)
        return self._whole

    def ranks(self, part: Part, wishes: Wishes = NO_WISHES) -> dict[str, int]:
        """Live server -> how able it is to answer the part."""
        if not part.segment and (wishes.floors.get(part.partition) or wishes.known):
            return self._alive(_tail_ranks(self._replicas, self._reports(part), part, wishes))
        known = self._ranks.get(part)
        if known is None:
            if part.segment:
                known = self._alive(_segment_ranks(self.table, self._segments.get(part.segment)))
            else:
                known = self._alive(_tail_ranks(self._replicas, self._reports(part), part, wishes))
            self._ranks[part] = known
        return known

    def best(self, part: Part) -> tuple[str, ...]:
        """The most able servers, in a fixed order."""
        known = self._best.get(part)
        if known is None:
            known = self._best[part] = _equals(self.ranks(part), (), (), None)
        return known

    def few_rows(self, parts: Iterable[Part]) -> bool:
        """All parts have about TOGETHER_ROWS_MAX rows at most."""
        rows = 0
        for part in parts:
            rows += self.rows(part)
            if rows > TOGETHER_ROWS_MAX:
                return False
        return True

    def rows(self, part: Part) -> int:
        """About how many rows the part has."""
        if part.segment:
            segment = self._segments.get(part.segment)
            return segment.rows if segment is not None else 0
        reports = self._reports(part).values()
        return max(0, max((report.watermark.next_offset for report in reports), default=0) - part.from_offset)

    def loss(self, part: Part) -> str | None:
        """In words, if the part is recorded as lost: it is named in every answer that needs it (I-8)."""
        segment = self._segments.get(part.segment)
        if segment is None or segment.lost is None:
            return None
        lost = segment.lost
        return (
            f"{segment.name} is lost: {lost.rows} rows of partition {segment.partition}, offsets [{lost.start_offset}, "
            f"{lost.end_offset}) ({lost.cause}); delete it to accept that"
        )

    def rotation(self, part: Part) -> int:
        segment = self._segments.get(part.segment)
        return part.partition + (segment.sequence if segment is not None else 0)

    def _reports(self, part: Part) -> Mapping[str, TailReport]:
        return self.table.tails.get(str(part.partition), {})

    def _alive(self, ranks: dict[str, int]) -> dict[str, int]:
        return {server: rank for server, rank in ranks.items() if server in self.urls}


def _segment_ranks(table: TableView, segment: SegmentMetadata | None) -> dict[str, int]:
    """Able: a replica that reported ONLINE. Leaving: ONLINE, but no replica any more, so it will delete it soon.
    Unsure: assigned, says nothing (may serve it from its tail). Unable: reported else. Of a lost segment only who has
    it all the same is asked."""
    if segment is None:
        return {}
    ranks = dict.fromkeys(segment.replicas, _UNSURE)
    if segment.lost is not None:
        states = table.external.get(segment.name, {})
        return {server: _ABLE for server in segment.replicas if states.get(server) is ReplicaState.ONLINE}
    for server, state in table.external.get(segment.name, {}).items():
        able = _ABLE if server in ranks else _LEAVING
        ranks[server] = able if state is ReplicaState.ONLINE else _UNABLE
    return ranks


def _tail_ranks(
    replicas: Mapping[int, Collection[str]], reports: Mapping[str, TailReport], part: Part, wishes: Wishes
) -> dict[str, int]:
    """Able: near the freshest and past the floor. Leaving: that, but no replica any more. Unsure: behind, or says
    nothing yet. Unable: in error."""
    partition = part.partition
    ranks = dict.fromkeys(replicas.get(partition, ()), _UNSURE)
    reached = {
        server: max(report.watermark.next_offset, wishes.known.get((partition, server), 0))
        for server, report in reports.items()
    }
    newest = max(reached.values(), default=0)
    fresh_ms = {server: report.watermark.freshness_ms for server, report in reports.items()}
    freshest_ms = max((value for value in fresh_ms.values() if value is not None), default=0)
    floor = wishes.floors.get(partition, 0)
    for server, report in reports.items():
        proven_ms = fresh_ms[server]
        if report.error is not None:
            ranks[server] = _UNABLE
        elif (
            report.state == CATCHING_UP
            or newest - reached[server] > TAIL_LAG_ROWS_MAX
            or freshest_ms - (proven_ms if proven_ms is not None else 0) > TAIL_LAG_MS_MAX
            or reached[server] < floor
        ):
            ranks[server] = _UNSURE
        else:
            ranks[server] = _ABLE if server in ranks else _LEAVING
    return ranks


def assign(
    routes: Routes,
    parts: Iterable[Part],
    *,
    avoid: Mapping[Part, Collection[str]] | None = None,
    suspects: Collection[str] = (),
    loads: Mapping[str, Load] | None = None,
    wishes: Wishes = NO_WISHES,
    like: str | None = None,
) -> Assignment:
    """One server for each part. `avoid`: servers not to ask for a part; `suspects`: asked only for want of others;
    `like`: only servers that are no suspects and at least as able as that one."""
    usual = not avoid and not suspects and like is None
    groups: dict[tuple[str, ...], list[Part]] = {}
    for part in parts:
        is_usual = usual and (bool(part.segment) or not wishes.floors)
        best = routes.best(part) if is_usual else ()
        if not is_usual or not _all_timely(part, best, wishes):
            best = _best(routes, part, avoid, suspects, wishes, like)
        groups.setdefault(best, []).append(part)
    unassigned = groups.pop((), [])
    known = {} if loads is None or wishes.fixed else loads
    together = wishes.together
    if together is None:
        together = not wishes.fixed and routes.few_rows(part for group in groups.values() for part in group)
    chosen = _together(routes, groups, known) if together else _spread(routes, groups, known)
    asks = tuple(Ask(server, routes.urls[server], tuple(chosen[server])) for server in sorted(chosen))
    return Assignment(asks, tuple(unassigned))


def _all_timely(part: Part, servers: Iterable[str], wishes: Wishes) -> bool:
    if wishes.timely is None and not wishes.late:
        return True
    return all(_is_timely(part, server, wishes) for server in servers)


def _is_timely(part: Part, server: str, wishes: Wishes) -> bool:
    """Sealed segments of an append table do not grow old."""
    pair = (part.partition, server)
    if wishes.timely is not None:
        return pair in wishes.timely and pair not in wishes.late
    return bool(part.segment) or pair not in wishes.late


def _best(
    routes: Routes, part: Part, avoid: Mapping[Part, Collection[str]] | None, suspects: Collection[str],
    wishes: Wishes, like: str | None,
) -> tuple[str, ...]:  # fmt: skip
    ranks = routes.ranks(part, wishes)
    if wishes.timely is not None or wishes.late:
        ranks = {one: able if _is_timely(part, one, wishes) else max(able, _LATE) for one, able in ranks.items()}
    worst = None if like is None else ranks.get(like, _UNABLE)
    return _equals(ranks, avoid.get(part, ()) if avoid else (), suspects, worst)


def _equals(
    ranks: Mapping[str, int], avoided: Collection[str], suspects: Collection[str], worst: int | None
) -> tuple[str, ...]:
    """The best candidates, in a fixed order."""
    best: list[str] = []
    best_rank = (True, _UNABLE + 1)
    for server, able in ranks.items():
        if server in avoided or (worst is not None and (able > worst or server in suspects)):
            continue
        rank = (server in suspects, able)
        if rank < best_rank:
            best, best_rank = [server], rank
        elif rank == best_rank:
            best.append(server)
    return tuple(sorted(best))


def _spread(
    routes: Routes, groups: Mapping[tuple[str, ...], list[Part]], loads: Mapping[str, Load]
) -> dict[str, list[Part]]:
    chosen: dict[str, list[Part]] = {}
    for servers, parts in groups.items():
        for part in parts:
            chosen.setdefault(_one_of(servers, routes.rotation(part), loads), []).append(part)
    return chosen


def _together(
    routes: Routes, groups: Mapping[tuple[str, ...], list[Part]], loads: Mapping[str, Load]
) -> dict[str, list[Part]]:
    """Again and again the server that has most of what is left; of several such, as always."""
    chosen: dict[str, list[Part]] = {}
    left = dict(groups)
    while left:
        counts: dict[str, int] = {}
        for servers, parts in left.items():
            for server in servers:
                counts[server] = counts.get(server, 0) + len(parts)
        most = max(counts.values())
        candidates = tuple(sorted(server for server, count in counts.items() if count == most))
        rotation = crc32(routes.table.name.encode()) + min(parts[0].partition for parts in left.values())
        server = _one_of(candidates, rotation, loads)
        chosen[server] = [part for servers, parts in left.items() if server in servers for part in parts]
        left = {servers: parts for servers, parts in left.items() if server not in servers}
    return chosen


def _one_of(servers: tuple[str, ...], rotation: int, loads: Mapping[str, Load]) -> str:
    first = servers[rotation % len(servers)]
    if len(servers) == 1 or not loads:
        return first
    return lighter(first, servers[(rotation + 1) % len(servers)], loads)


def routing_table(routes: Routes, prune: Sequence[PruneTerm] = ()) -> dict[str, list[str]]:
    """Server -> names of the segments it would be asked for (Pinot's `/debug/routingTable`)."""
    opened = {part.record.partition: part.consuming.name for part in routes.table.partitions}
    asks = assign(routes, routes.parts(prune).needed).asks
    return {ask.server: sorted(part.segment or opened[part.partition] for part in ask.parts) for ask in asks}
