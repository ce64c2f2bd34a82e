# SPDX-License-Identifier: Apache-2.0
"""Which rows may be among the first N of an order, told by its first column alone: one pass over its values, and the
engine sorts a few rows instead of looking at all (2 M rows: 4 ms of CPU instead of 20).

Rules:

- No row of the answer is lost: a row goes only if N rows that exist and match are strictly better by this column. Ties
  stay, whatever the rest of the order is; and so do NaNs, whose place the engine knows.
- Only rows whose filter is settled take part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from cremant.exec.stop import Stop
from cremant.exec.tables import is_few
from cremant.segment.rows import RowMask
from cremant.segment.scan import Piece

#: For longer answers the engine's sort is as good.
TOP_ROWS_MAX = 1_000


def narrowed(
    pieces: Sequence[Piece], column: str, *, descending: bool, limit: int, is_settled: bool, stop: Stop
) -> tuple[list[Piece], int]:
    """The pieces, where it is known with masks of rows that may be among the first `limit`; and how many rows that
    exist and match are left out by them. `is_settled`: the query has no filter, or else only pieces that are `exact`
    take part. Raises QueryError when it is to stop."""
    best = _Best(limit, descending=descending)
    found: dict[int, list[np.ndarray]] = {}
    for piece in reversed(pieces):  # newer rows are often the greater ones
        if is_settled or piece.exact:
            stop.check()
            found[id(piece)] = [
                best.candidates(batch.column(column), piece.chosen(number))
                for number, batch in enumerate(piece.batches)
            ]
    if best.bound is None:
        return list(pieces), 0
    fewer = []
    for piece in pieces:
        if id(piece) in found:
            parts = zip(piece.batches, found[id(piece)], strict=True)
            masks = tuple(best.kept(batch.column(column), rows) for batch, rows in parts)
            piece = replace(piece, masks=masks, immutable=False)
        fewer.append(piece)
    left_out = sum(_rows(one, seen=False) - _rows(two, seen=True) for one, two in zip(pieces, fewer, strict=True))
    return fewer, left_out


def _rows(piece: Piece, *, seen: bool) -> int:
    """How many rows there are to look at; `seen`: as the engine's input has them, which leaves out few rows only."""
    masks = [piece.chosen(number) for number in range(len(piece.batches))]
    if seen and not piece.exact:
        masks = [mask if mask is None or is_few(mask) else piece.existing(n) for n, mask in enumerate(masks)]
    rows = [batch.num_rows if mask is None else mask.count for batch, mask in zip(piece.batches, masks, strict=True)]
    return sum(rows)


class _Best:
    """The best `limit` values so far; `bound` is the worst of them once there are so many. It only gets better, so what
    was no candidate once will never be."""

    def __init__(self, limit: int, *, descending: bool) -> None:
        self.bound: np.generic | None = None
        self._limit = limit
        self._descending = descending
        self._values: np.ndarray | None = None

    def candidates(self, column: pa.Array, mask: RowMask | None) -> np.ndarray:
        """Numbers of the rows of a batch that are not worse than the bound; it learns from them."""
        values = column.to_numpy(zero_copy_only=False)
        if self.bound is None:
            rows = np.arange(len(values)) if mask is None else mask.rows
        else:
            flags = self._not_worse(values, self.bound)
            rows = np.flatnonzero(flags if mask is None else np.logical_and(flags, mask.flags, out=flags))
        if len(rows):
            self._learn(values[rows])
        return rows

    def kept(self, column: pa.Array, rows: np.ndarray) -> RowMask:
        """Of these rows those that are still not worse."""
        flags = np.zeros(len(column), np.bool_)
        if len(rows) and self.bound is not None:
            rows = rows[self._not_worse(column.to_numpy(zero_copy_only=False)[rows], self.bound)]
            flags[rows] = True
        return RowMask(flags, len(rows))

    def _not_worse(self, values: np.ndarray, bound: np.generic) -> np.ndarray:
        """NaN is not worse."""
        worse = values < bound if self._descending else values > bound
        return np.logical_not(worse, out=worse)

    def _learn(self, more: np.ndarray) -> None:
        if more.dtype.kind == "f":
            more = more[~np.isnan(more)]
        values = more if self._values is None else np.concatenate([self._values, more])
        if len(values) >= self._limit:
            at = len(values) - self._limit if self._descending else self._limit - 1
            ordered = np.partition(values, at)
            self.bound, values = ordered[at], ordered[at:] if self._descending else ordered[: at + 1]
        self._values = values
