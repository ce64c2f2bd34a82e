# SPDX-License-Identifier: Apache-2.0
"""The parts of a table: the disjoint pieces of its rows that a query asks servers for. Pure.

A table is the disjoint union of its parts: each sealed (DONE) segment, and per partition the tail from the start of its
open segment. Every part is answered by exactly one server, so every row is counted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cremant.model.cluster import TableView
from cremant.model.schema import DataType
from cremant.model.segments import SegmentMetadata, SegmentStatus
from cremant.segment.partitions import PartitionPruner
from cremant.segment.prune import may_match
from cremant.wire.messages import PruneTerm, TailRequest


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

    def tails(self, floors: Mapping[int, int]) -> tuple[TailRequest, ...]:
        """`floors`: partition -> offset below which every row must be in the answer (`notBefore`)."""
        return tuple(
            TailRequest(
                partition=part.partition, from_offset=part.from_offset, not_before=floors.get(part.partition, 0)
            )
            for part in self.parts
            if not part.segment
        )


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a table that a query needs. `pruned`: segments that metadata proved to hold no match."""

    needed: tuple[Part, ...]
    pruned: int = 0


def parts_of(table: TableView, prune: Sequence[PruneTerm] = ()) -> Parts:
    """All parts of the table, without the segments that cannot match `prune`."""
    done = [segment for segment in table.segments if segment.status is SegmentStatus.DONE and _has_rows(segment)]
    single = frozenset(f.name for f in table.record.table_schema.fields if f.data_type is DataType.FLOAT)
    by_partition = PartitionPruner(prune)
    kept = [
        segment
        for segment in done
        if not prune or (_may_match(segment, prune, single) and by_partition.may_match(segment.partitioning))
    ]
    parts = [Part(segment.partition, segment.start_offset, segment.name) for segment in kept]
    parts += [Part(view.record.partition, view.consuming.start_offset) for view in table.partitions]
    return Parts(tuple(sorted(parts)), len(done) - len(kept))


def _has_rows(segment: SegmentMetadata) -> bool:
    """Or had some: whoever asks for an epoch from before they went is to be refused."""
    return segment.rows > 0 or segment.compacted_at > 0


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
            if segment.partition == part.partition and segment.start_offset >= part.from_offset and _has_rows(segment)
        )
        if part.partition in opened:
            result.add(Part(part.partition, max(part.from_offset, opened[part.partition])))
    return tuple(sorted(result))
