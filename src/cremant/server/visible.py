# SPDX-License-Identifier: Apache-2.0
"""Which rows of what was found exist for a query, at its cut: versions of a segment or of a tail, as masks of batches.

Rule: masks belong to the very rows that were resolved with them. A tail's versions cover its rows and perhaps more;
those of a segment stand in the segment's own order of rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from cremant.model.errors import QueryError
from cremant.model.query_codes import QueryCode
from cremant.model.upsert import Cut
from cremant.segment.blocks import TailPart
from cremant.segment.rows import RowMask
from cremant.segment.scan import Piece
from cremant.segment.select import Selection
from cremant.segment.versions import Versions
from cremant.server.table import SegmentPart, TailRows

VALID_FROM = "$validFrom"
VALID_UNTIL = "$validUntil"

Masks = tuple[RowMask | None, ...]
Columns = Mapping[str, Callable[[int], pa.Array]]


def segment_validity(part: SegmentPart, batches: Sequence[pa.RecordBatch], cut: Cut | None) -> Masks | None:
    """Per batch of the segment; None: an append table."""
    versions = part.versions
    if versions is None or cut is None:
        return None
    lengths = [batch.num_rows for batch in batches]
    if part.whole:
        return versions.masks(cut, lengths)
    flags = versions.mask(cut)
    flags[: versions.locations.first_at(part.from_offset)] = False
    flags[versions.locations.first_at(part.until) :] = False
    ordered = flags if versions.order is None else flags[versions.order]
    ends = np.cumsum(lengths).tolist()
    parts = [ordered[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    return tuple(RowMask(flags, int(np.count_nonzero(flags))) for flags in parts)


def tail_validity(rows: TailRows, cut: Cut | None) -> Masks | None:
    """Per part of the tail."""
    if rows.versions is None or cut is None:
        return None
    return rows.versions.masks(cut, _spans(rows, rows.versions))[1::2]


def made_of_segment(part: SegmentPart, batches: Sequence[pa.RecordBatch], cut: Cut | None) -> Columns:
    """`$validFrom` and `$validUntil` of its batches."""
    if part.versions is None or cut is None:
        return {}
    ends = np.cumsum([0, *(batch.num_rows for batch in batches)]).tolist()
    return _made(part.versions, cut, lambda number: slice(ends[number], ends[number + 1]))


def made_of_tail(rows: TailRows, cut: Cut | None) -> Columns:
    if rows.versions is None or cut is None:
        return {}
    ends = np.cumsum([0, *_spans(rows, rows.versions)]).tolist()
    return _made(rows.versions, cut, lambda number: slice(ends[2 * number + 1], ends[2 * number + 2]))


def _made(versions: Versions, cut: Cut, rows_of: Callable[[int], slice]) -> Columns:
    both = functools.cache(lambda: versions.epochs_of(cut))
    return {
        VALID_FROM: lambda number: pa.array(both()[0][rows_of(number)]),
        VALID_UNTIL: lambda number: pa.array(both()[1][rows_of(number)]),
    }


def _spans(rows: TailRows, versions: Versions) -> list[int]:
    """Numbers of rows, alternately between parts and of parts."""
    spans, at, fits = [], 0, True
    for part in rows.parts:
        first = versions.locations.first_at(int(part.block.offsets[part.a]))
        spans += [first - at, part.rows]
        at = first + part.rows
        fits = fits and at <= versions.rows and _are_at(versions, first, part)
    if not fits or min(spans, default=0) < 0:
        raise QueryError(
            QueryCode.SERVER_TABLE_MISSING, f"partition {rows.partition} was taken back to an earlier epoch meanwhile"
        )
    return spans


def _are_at(versions: Versions, first: int, part: TailPart) -> bool:
    """The part's first and last row are where its versions are looked for: both are read one after the other."""
    rows, offsets = (first, first + part.rows - 1), (part.block.offsets[part.a], part.block.offsets[part.b - 1])
    return all(versions.location(row)[0] == offset for row, offset in zip(rows, offsets, strict=True))


def is_empty(validity: Masks | None, number: int) -> bool:
    """No row of the batch exists."""
    mask = validity[number] if validity is not None else None
    return mask is not None and not mask.count


def with_batches(piece: Piece, numbers: Sequence[int], chosen: Selection) -> Piece:
    """The piece with only these batches; `numbers` are some of the chosen ones, whose masks they take."""
    if len(numbers) == len(piece.batches):
        return piece
    masks = dict(zip(chosen.batches, chosen.masks, strict=True))
    batches = tuple(piece.batches[number] for number in numbers)
    return dataclasses.replace(
        piece, batches=batches, rows=sum(batch.num_rows for batch in batches), immutable=False,
        validity=tuple(piece.validity[number] for number in numbers) if piece.validity is not None else None,
        masks=tuple(masks[number] for number in numbers) if piece.masks is not None else None,
        first_rows=tuple(piece.first_rows[number] for number in numbers),
        made={name: _renumbered(make, tuple(numbers)) for name, make in piece.made.items()},
    )  # fmt: skip


def _renumbered(make: Callable[[int], pa.Array], numbers: tuple[int, ...]) -> Callable[[int], pa.Array]:
    return lambda number: make(numbers[number])
