# SPDX-License-Identifier: Apache-2.0
"""What a tail is made of: blocks of rows, immutable snapshots of them, and the rule by which small ones are merged.

A query takes one snapshot and works on it undisturbed, whatever is appended, merged, spilled or dropped meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from cremant.model.limits import TAIL_MERGE_ROWS
from cremant.model.names import OFFSET
from cremant.segment.layout import Alignment
from cremant.segment.stats import column_range

#: Blocks of one size class that are merged at once: each row is copied at most log8(64 Ki) = 6 times.
MERGE_FAN = 8
#: Ranges are kept for blocks that are worth skipping.
RANGE_ROWS_MIN = 8 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class TailBlock:
    """Rows in (offset, sub-row) order. `file` is the spill file that `batch` is mapped from, None on the heap.

    `batch` is in stored form on the heap (merging copies it anyway) and in scan form in a file."""

    batch: pa.RecordBatch
    offsets: np.ndarray
    bytes: int
    file: Path | None = None
    _ranges: dict[str, tuple[Any, Any] | None] = field(default_factory=dict)
    _scans: list[tuple[Alignment, pa.RecordBatch]] = field(default_factory=list)

    @classmethod
    def of(cls, batch: pa.RecordBatch, file: Path | None = None) -> TailBlock:
        return cls(batch, batch.column(OFFSET).to_numpy(), int(batch.nbytes), file)

    @property
    def rows(self) -> int:
        return len(self.offsets)

    @property
    def first(self) -> int:
        return int(self.offsets[0])

    @property
    def last(self) -> int:
        return int(self.offsets[-1])

    def indices(self, from_offset: int, until: int) -> tuple[int, int]:
        """Row numbers [a, b) of the offsets in [from_offset, until)."""
        first, last = self.first, self.last
        a = 0 if from_offset <= first else int(np.searchsorted(self.offsets, from_offset))
        b = self.rows if until > last else int(np.searchsorted(self.offsets, until))
        return a, max(a, b)

    def part(self, from_offset: int, until: int) -> TailBlock | None:
        """The rows of these offsets, without a copy; itself when that is all of them."""
        a, b = self.indices(from_offset, until)
        if b - a == self.rows:
            return self
        if a == b:
            return None
        batch = self.batch.slice(a, b - a)
        return TailBlock(batch, self.offsets[a:b], self.bytes * (b - a) // self.rows, self.file)

    def scan(self, alignment: Alignment) -> pa.RecordBatch:
        """The rows in scan form; made once per block and version of the schema."""
        for known, batch in self._scans:
            if known is alignment:
                return batch
        batch = alignment.align(self.batch)
        self._scans[:] = [(alignment, batch)]
        return batch

    def range_of(self, column: str) -> tuple[Any, Any] | None:
        """(min, max) of a column, None when unknown: small block, column not there, not comparable exactly."""
        if column not in self._ranges:
            index = self.batch.schema.get_field_index(column)
            worth = self.rows >= RANGE_ROWS_MIN and index >= 0
            self._ranges[column] = column_range(self.batch.column(index)) if worth and _ranged(self, index) else None
        return self._ranges[column]


def _ranged(block: TailBlock, index: int) -> bool:
    kind = block.batch.schema.field(index).type
    return bool(
        pa.types.is_integer(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind)
        or pa.types.is_boolean(kind) or pa.types.is_string(kind) or pa.types.is_string_view(kind)
    )  # fmt: skip


class TailPart(NamedTuple):
    """Rows [a, b) of a block."""

    block: TailBlock
    a: int
    b: int

    @property
    def rows(self) -> int:
        return self.b - self.a

    @property
    def batch(self) -> pa.RecordBatch:
        """As they are kept: stored or scan form."""
        return self.block.batch.slice(self.a, self.rows)

    def scan(self, alignment: Alignment) -> pa.RecordBatch:
        whole = self.block.scan(alignment)
        return whole if self.rows == self.block.rows else whole.slice(self.a, self.rows)


@dataclass(frozen=True, slots=True)
class TailSnapshot:
    """A tail at one instant: exactly the rows with first_offset <= `$offset` < next_offset."""

    first_offset: int
    next_offset: int
    blocks: tuple[TailBlock, ...]
    rows: int

    def between(self, from_offset: int, until: int) -> tuple[TailPart, ...]:
        """The rows of [from_offset, until); nothing is copied."""
        parts = (TailPart(block, *block.indices(from_offset, until)) for block in self.blocks)
        return tuple(part for part in parts if part.rows)

    def count(self, from_offset: int, until: int) -> int:
        """How many rows `between` would give."""
        return sum(part.rows for part in self.between(from_offset, until))

    def blocks_between(self, from_offset: int, until: int) -> tuple[TailBlock, ...]:
        """The same as blocks of their own."""
        parts = (block.part(from_offset, until) for block in self.blocks)
        return tuple(part for part in parts if part is not None)


def plan_merge(rows: Sequence[int]) -> tuple[int, int] | None:
    """Which neighbours [i, j) to merge, given the rows of each block; None when all is well.

    Blocks of `TAIL_MERGE_ROWS` and more are finished and separate runs of smaller ones. A run is merged (up to the
    finished size) when it holds enough for a finished block, or `MERGE_FAN` blocks of its largest size class."""
    start = 0
    for end in range(len(rows) + 1):
        if end < len(rows) and rows[end] < TAIL_MERGE_ROWS:
            continue
        found = _merge_in_run(rows, start, end)
        if found is not None:
            return found
        start = end + 1
    return None


def _merge_in_run(rows: Sequence[int], start: int, end: int) -> tuple[int, int] | None:
    total = 0
    for index in range(start, end):
        total += rows[index]
        if total >= TAIL_MERGE_ROWS:
            return start, index + 1
    for size_class in range(_size_class(TAIL_MERGE_ROWS)):
        first, found = start, 0
        for index in range(start, end):
            own = _size_class(rows[index])
            if own > size_class:
                first, found = index + 1, 0
                continue
            found += own == size_class
            if found == MERGE_FAN:
                return first, index + 1
    return None


def _size_class(rows: int) -> int:
    """0 for 1 to 7 rows, 1 for 8 to 63, ..."""
    return (max(rows, 1).bit_length() - 1) // 3
