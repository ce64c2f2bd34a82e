# SPDX-License-Identifier: Apache-2.0
"""Where a segment may end: closed positions of a partition, and the criteria that ask for a cut.

A segment is cut only at a closed position (just after a mark). So a row-limit cut is the first closed position past the
limit, counted from the segment's start: a function of the log, the same on every replica, whenever it is asked.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import NamedTuple

from cremant.model.offsets import Position
from cremant.model.table import FlushConfig

ROW_LIMIT = "rowLimit"
SIZE_LIMIT = "sizeLimit"
TIME_LIMIT = "timeLimit"
FORCE_COMMIT = "forceCommit"
#: Pinot's word for: the server has no room for more rows.
PRESSED = "indexCapacityThresholdBreached"


class Cut(NamedTuple):
    at: Position
    reason: str


class Closings:
    """Closed positions of one partition in log order, with rows and bytes taken up to each. 48 bytes per epoch that
    brought rows; those of sealed segments are dropped. Not thread-safe."""

    def __init__(self, start: Position) -> None:
        self._columns = tuple(array("q", [value]) for value in (*_fields(start), 0, 0))

    @property
    def last(self) -> Position:
        return self._position(len(self._columns[0]) - 1)

    def add(self, position: Position, rows: int, size_bytes: int) -> None:
        """`rows`, `size_bytes`: taken since the reader started, up to this position. An epoch that accounts for no
        offset replaces its predecessor: the later position saves reading it again."""
        offsets = self._columns[3]
        if offsets[-1] == position.next_offset and len(offsets) > 1:
            self._drop_last()
        for column, value in zip(self._columns, (*_fields(position), rows, size_bytes), strict=True):
            column.append(value)

    def drop_below(self, offset: int) -> None:
        """Positions before `offset` are history; the one that precedes it stays, as the base of counts."""
        keep = max(0, bisect_right(self._columns[3], offset) - 1)
        for column in self._columns:
            del column[:keep]

    def truncate(self, offset: int, epoch: int) -> None:
        """Positions past `offset`, or of epochs above `epoch`, were taken back."""
        while len(self._columns[0]) > 1 and (self._columns[3][-1] > offset or self._columns[1][-1] > epoch):
            self._drop_last()

    def rows_from(self, start_offset: int) -> int:
        """Rows of closed epochs from the segment start on."""
        return self._columns[4][-1] - self._columns[4][self._base(start_offset)]

    def wanted_cut(
        self,
        start_offset: int,
        flush: FlushConfig,
        age_ms: int,
        *,
        pressed: bool = False,
        force_at_offset: int | None = None,
    ) -> Cut | None:
        """The cut that the criteria ask for, if any: rows first (deterministic), then bytes, then what an operator
        wants (the first closed position from there on), then time. `pressed`: the server has no room for more rows.
        Never an empty segment."""
        base = self._base(start_offset)
        rows, sizes = self._columns[4], self._columns[5]
        last = len(rows) - 1
        if last <= base or rows[last] == rows[base]:
            return None
        at = bisect_left(rows, rows[base] + flush.rows, base + 1)
        if at <= last:
            return Cut(self._position(at), ROW_LIMIT)
        at = bisect_left(sizes, sizes[base] + flush.bytes, base + 1)
        if at <= last:
            return Cut(self._position(at), SIZE_LIMIT)
        if force_at_offset is not None and self._columns[3][last] >= force_at_offset:
            at = bisect_left(self._columns[3], force_at_offset, base + 1)
            at = max(at, bisect_right(rows, rows[base], base + 1))
            return Cut(self._position(at), FORCE_COMMIT)
        if pressed:
            return Cut(self._position(last), PRESSED)
        if age_ms >= flush.time_ms:
            return Cut(self._position(last), TIME_LIMIT)
        return None

    def _base(self, start_offset: int) -> int:
        return max(0, bisect_right(self._columns[3], start_offset) - 1)

    def _position(self, index: int) -> Position:
        log_offset, epoch, generation, next_offset, _, _ = (column[index] for column in self._columns)
        return Position(log_offset=log_offset, epoch=epoch, generation=generation, next_offset=next_offset)

    def _drop_last(self) -> None:
        for column in self._columns:
            column.pop()


def reached(closed: Position, end: Position) -> bool:
    """Rows up to the cut `end` are here and closed."""
    return closed.epoch >= end.epoch and closed.next_offset >= end.next_offset


def _fields(position: Position) -> tuple[int, int, int, int]:
    return position.log_offset, position.epoch, position.generation, position.next_offset
