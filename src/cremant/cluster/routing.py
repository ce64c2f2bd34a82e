# SPDX-License-Identifier: Apache-2.0
"""Routing: which server answers which part of a table. Pure: view in, asks out (design: query.md, "Broker").

A table is the disjoint union of *parts*: each sealed (DONE) segment, and per partition the tail from the start of its
open segment. Every part is asked of exactly one server, so every row is counted once.

Choice of a server for a part, in this order: not avoided (it failed this part before); alive; not suspect; reported to
be able (ONLINE, or a tail without error); for tails not far behind the freshest replica; then a fixed rotation over the
replicas, which spreads the load and keeps a client's counts from going backwards between two equally good replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cremant.model.cluster import ClusterView, LiveInstance, Role, TableView
from cremant.model.schema import DataType
from cremant.model.segments import ReplicaState, SegmentMetadata, SegmentStatus
from cremant.segment.prune import may_match
from cremant.wire.messages import PruneTerm, TailRequest

#: A replica this many rows behind the freshest is asked only if nobody better is there: one heartbeat at 20 k rows/s.
TAIL_LAG_ROWS_MAX = 10_000


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """Rows that one server has to answer. `segment` is "" for the tail; `from_offset` is where the part begins."""

    partition: int
    from_offset: int
    segment: str = ""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to one server."""

    server: str
    url: str
    parts: tuple[Part, ...]

    @property
    def segments(self) -> tuple[str, ...]:
        return tuple(part.segment for part in self.parts if part.segment)

    @property
    def tails(self) -> tuple[TailRequest, ...]:
        return tuple(
            TailRequest(partition=part.partition, from_offset=part.from_offset)
            for part in self.parts
            if not part.segment
        )


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a table that a query needs. `pruned`: segments that metadata proved to hold no match."""

    needed: tuple[Part, ...]
    pruned: int = 0


@dataclass(frozen=True, slots=True)
class Assignment:
    """`unassigned`: parts that no live server could be asked for."""

    asks: tuple[Ask, ...]
    unassigned: tuple[Part, ...]


def parts_of(table: TableView, prune: Sequence[PruneTerm] = ()) -> Parts:
    """All parts of the table, without the segments that cannot match `prune`."""
    done = [segment for segment in table.segments if segment.status is SegmentStatus.DONE and segment.rows]
    single = frozenset(f.name for f in table.record.table_schema.fields if f.data_type is DataType.FLOAT)
    kept = [segment for segment in done if not prune or _may_match(segment, prune, single)]
    parts = [Part(segment.partition, segment.start_offset, segment.name) for segment in kept]
    parts += [Part(view.record.partition, view.consuming.start_offset) for view in table.partitions]
    return Parts(tuple(sorted(parts)), len(done) - len(kept))


def _may_match(segment: SegmentMetadata, prune: Sequence[PruneTerm], single: frozenset[str]) -> bool:
    def range_of(column: str) -> tuple[object, object] | None:
        known = segment.columns.get(column)
        return (known.min, known.max) if known is not None else None

    return may_match(prune, range_of, single)


def renewed(parts: Iterable[Part], table: TableView) -> tuple[Part, ...]:
    """The same rows as parts of a newer view: what was a tail may be sealed now, a dropped segment is no part."""
    done = {segment.name: segment for segment in table.segments if segment.status is SegmentStatus.DONE}
    opened = {view.record.partition: view.consuming.start_offset for view in table.partitions}
    result: set[Part] = set()
    for part in parts:
        if part.segment:
            if part.segment in done:
                result.add(part)
            continue
        result.update(
            Part(segment.partition, segment.start_offset, segment.name)
            for segment in done.values()
            if segment.partition == part.partition and segment.start_offset >= part.from_offset and segment.rows
        )
        if part.partition in opened:
            result.add(Part(part.partition, max(part.from_offset, opened[part.partition])))
    return tuple(sorted(result))


def assign(
    view: ClusterView,
    table: TableView,
    parts: Iterable[Part],
    *,
    avoid: Mapping[Part, Collection[str]] | None = None,
    suspects: Collection[str] = (),
) -> Assignment:
    """One server for each part. `avoid`: servers not to ask for a part; `suspects`: asked only for want of others."""
    live = {instance.id: instance for instance in view.instances if instance.live and instance.role is Role.SERVER}
    segments = {segment.name: segment for segment in table.segments}
    chosen: dict[str, list[Part]] = {}
    unassigned: list[Part] = []
    for part in parts:
        avoided = avoid.get(part, ()) if avoid else ()
        ranked = _tail_ranks(table, part) if not part.segment else _segment_ranks(table, segments.get(part.segment))
        server = _best(ranked, live, avoided, suspects, _rotation(part, segments))
        if server is None:
            unassigned.append(part)
        else:
            chosen.setdefault(server, []).append(part)
    asks = tuple(Ask(server, live[server].url, tuple(chosen[server])) for server in sorted(chosen))
    return Assignment(asks, tuple(unassigned))


def _rotation(part: Part, segments: Mapping[str, SegmentMetadata]) -> int:
    segment = segments.get(part.segment)
    return part.partition + (segment.sequence if segment is not None else 0)


def _best(
    ranks: Mapping[str, int],
    live: Mapping[str, LiveInstance],
    avoided: Collection[str],
    suspects: Collection[str],
    rotation: int,
) -> str | None:
    candidates = sorted(server for server in ranks if server in live and server not in avoided)
    if not candidates:
        return None
    count = len(candidates)
    return min(
        candidates,
        key=lambda server: (
            server in suspects,
            ranks[server],
            (candidates.index(server) - rotation) % count,
        ),
    )


def _segment_ranks(table: TableView, segment: SegmentMetadata | None) -> dict[str, int]:
    """0: reported ONLINE. 1: assigned, says nothing (may serve it from its tail). 2: reported something else."""
    if segment is None:
        return {}
    ranks = dict.fromkeys(segment.replicas, 1)
    for server, state in table.external.get(segment.name, {}).items():
        ranks[server] = 0 if state is ReplicaState.ONLINE else 2
    return ranks


def _tail_ranks(table: TableView, part: Part) -> dict[str, int]:
    """0: consuming, near the freshest. 1: behind, or says nothing yet. 2: in error."""
    partition = next((view for view in table.partitions if view.record.partition == part.partition), None)
    ranks = dict.fromkeys(partition.record.replicas if partition is not None else (), 1)
    reports = table.tails.get(str(part.partition), {})
    newest = max((report.watermark.next_offset for report in reports.values()), default=0)
    for server, report in reports.items():
        if report.error is not None:
            ranks[server] = 2
        elif newest - report.watermark.next_offset > TAIL_LAG_ROWS_MAX or report.state == "catchingUp":
            ranks[server] = 1
        else:
            ranks[server] = 0
    return ranks


def routing_table(view: ClusterView, table: TableView) -> dict[str, list[str]]:
    """Server -> names of the segments it would be asked for (Pinot's `/debug/routingTable`)."""
    opened = {part.record.partition: part.consuming.name for part in table.partitions}
    assignment = assign(view, table, parts_of(table).needed)
    return {ask.server: sorted(part.segment or opened[part.partition] for part in ask.parts) for ask in assignment.asks}
