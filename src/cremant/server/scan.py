# SPDX-License-Identifier: Apache-2.0
"""What a query scans of what was found: pieces, without what metadata and indexes rule out, and Pinot's counters.

Rule: only what cannot match is left out; what was left out still counts in `docs_total`, as in Pinot. A segment counts
as pruned when none of its rows is handed on.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from cremant.exec.stop import Stop
from cremant.exec.tables import DOC_ID
from cremant.model.upsert import Cut
from cremant.segment.prune import may_match
from cremant.segment.scan import Piece
from cremant.segment.select import Selection, select
from cremant.server.table import HostedTable, Resolved, ResolvedTail, SegmentPart, TailRows
from cremant.server.visible import (
    VALID_FROM,
    VALID_UNTIL,
    is_empty,
    made_of_segment,
    made_of_tail,
    segment_validity,
    tail_validity,
    with_batches,
)
from cremant.wire.messages import ServerQuery


@dataclass(slots=True)
class Scan:
    """What of the resolved rows is scanned, and what was counted on the way."""

    pieces: list[Piece] = field(default_factory=list)
    docs_total: int = 0
    segments_queried: int = 0
    segments_pruned: int = 0
    #: Partitions whose tail had rows that were not pruned away.
    scanned_tails: set[int] = field(default_factory=set)

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)


def plan_scan(table: HostedTable, found: Resolved, query: ServerQuery, stop: Stop) -> Scan:
    """Pieces of everything found that may match. Raises QueryError when it is to stop."""
    scan = Scan()
    for part in found.segments:
        stop.check()
        if isinstance(part, SegmentPart):
            _add_segment(scan, table, found, query, part)
        else:
            scan.segments_queried += 1
            _add_tail(scan, table, found, query, part)
    for tail in found.tails:
        stop.check()
        _add_resolved_tail(scan, table, found, query, tail)
    return scan


def _add_resolved_tail(scan: Scan, table: HostedTable, found: Resolved, query: ServerQuery, tail: ResolvedTail) -> None:
    """The whole counts as one (consuming) segment, however much of it is sealed here already."""
    pieces, pruned = len(scan.pieces), scan.segments_pruned
    scan.segments_queried += 1
    for part in tail.sealed:
        scan.segments_queried -= 1
        _add_segment(scan, table, found, query, part)
    _add_tail(scan, table, found, query, tail.rows)
    scanned = len(scan.pieces) > pieces
    scan.segments_pruned = pruned + (0 if scanned or not tail.covered.length else 1)
    if scanned or not tail.covered.length:
        scan.scanned_tails.add(tail.partition)


def _add_segment(scan: Scan, table: HostedTable, found: Resolved, query: ServerQuery, part: SegmentPart) -> None:
    ranges = part.hosted.metadata.columns
    scan.segments_queried += 1
    if part.whole:
        scan.docs_total += part.sealed.marker.rows

    def range_of(column: str) -> tuple[Any, Any] | None:
        known = ranges.get(column)
        return (known.min, known.max) if known is not None else None

    if not may_match(query.prune, range_of, table.single_precision):
        if not part.whole:
            scan.docs_total += sum(batch.num_rows for batch in part.batches(found.alignment))
        piece = None
    elif part.whole:
        piece = _whole_segment(table, found, query, part)
    else:
        piece = _part_of_segment(table, found, query, part)
        scan.docs_total += piece.rows
    if piece is None or not piece.rows:
        scan.segments_pruned += 1
    else:
        scan.pieces.append(piece)


def _whole_segment(table: HostedTable, found: Resolved, query: ServerQuery, part: SegmentPart) -> Piece:
    batches, index = part.batches(found.alignment), part.sealed.index
    firsts, rows = [], 0
    for batch in batches:
        firsts.append(rows)
        rows += batch.num_rows
    validity = segment_validity(part, batches, found.cut)
    piece = Piece(
        _key(table, found, query, part), part.hosted.metadata.partition, part.sealed.name, batches, rows, validity,
        immutable=True, index=index, first_rows=tuple(firsts),
        made=made_of_segment(part, batches, _made_at(found, query)),
    )  # fmt: skip
    numbers = tuple(range(len(batches)))
    chosen = Selection(numbers, (None,) * len(batches), exact=False)
    if index is not None and query.prune and DOC_ID not in query.columns:
        chosen = select(batches, index, query.prune, table.single_precision, validity)
        masks = dict(zip(chosen.batches, chosen.masks, strict=True))
        piece = dataclasses.replace(
            piece, masks=tuple(masks.get(number) for number in numbers), exact=chosen.exact and query.shortcut.exact
        )
    if DOC_ID in query.columns:
        return piece
    return with_batches(piece, [number for number in chosen.batches if not is_empty(validity, number)], chosen)


def _part_of_segment(table: HostedTable, found: Resolved, query: ServerQuery, part: SegmentPart) -> Piece:
    batches = part.batches(found.alignment)
    rows = sum(batch.num_rows for batch in batches)
    key = _key(table, found, query, part)
    return Piece(
        key, part.hosted.metadata.partition, part.sealed.name, batches, rows,
        segment_validity(part, batches, found.cut), immutable=False,
        made=made_of_segment(part, batches, _made_at(found, query)),
    )  # fmt: skip


def _made_at(found: Resolved, query: ServerQuery) -> Cut | None:
    """As of when columns of versions are shown; None: the query has none of them."""
    return found.cut if not _MADE.isdisjoint(query.columns) else None


_MADE = frozenset({VALID_FROM, VALID_UNTIL})


def _key(table: HostedTable, found: Resolved, query: ServerQuery, part: SegmentPart) -> str:
    checksum = part.sealed.marker.checksum
    return f"{table.name}/{query.incarnation}/{part.sealed.name}/{checksum}/{found.schema_version}"


def _add_tail(scan: Scan, table: HostedTable, found: Resolved, query: ServerQuery, rows: TailRows) -> None:
    scan.docs_total += sum(part.rows for part in rows.parts)
    kept = tuple(part for part in rows.parts if may_match(query.prune, part.block.range_of, table.single_precision))
    if not kept:
        return
    key = f"{table.name}/{query.incarnation}/tail/{rows.partition}"
    chosen = TailRows(rows.partition, rows.segment, kept, rows.versions)
    batches = chosen.batches(found.alignment)
    count = sum(part.rows for part in kept)
    scan.pieces.append(
        Piece(
            key, rows.partition, rows.segment, batches, count, tail_validity(chosen, found.cut), immutable=False,
            made=made_of_tail(chosen, _made_at(found, query)),
        )
    )  # fmt: skip
