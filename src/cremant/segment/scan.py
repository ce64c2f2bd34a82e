# SPDX-License-Identifier: Apache-2.0
"""What a query scans: a piece of one partition, as Arrow record batches in scan form.

Source: query design, "Server". Whoever makes a piece guarantees that its batches carry exactly the columns of
`layout.scan_schema` of the table's current schema, and that they stay readable as long as the piece is referenced:
batches of sealed segments and spilled tails are mapped files, and a mapping outlives the deletion of its file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from cremant.segment.index import SegmentIndex
from cremant.segment.rows import RowMask


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one sealed segment, or of a tail.

    `key` identifies the content while the process lives: equal keys of immutable pieces mean equal rows, so an engine
    may cache by it. `validity`, if given, says per batch of `batches` which rows exist for the query (None: all of
    them). Append tables always pass None.

    `masks`, if given, says per batch which existing rows may satisfy the query's filter (None: all that exist); if
    `exact`, they all do, and nobody need evaluate it again. `index` and `first_rows` (number within the segment of each
    batch's first row) are there for sealed segments: codes of columns are found by them.

    `made`: columns that the batches do not have, by name: number of a batch -> its values, none of them null.
    """

    key: str
    partition: int
    segment: str
    batches: tuple[pa.RecordBatch, ...]
    rows: int
    validity: tuple[RowMask | None, ...] | None
    immutable: bool
    masks: tuple[RowMask | None, ...] | None = None
    exact: bool = False
    index: SegmentIndex | None = None
    first_rows: tuple[int, ...] = ()
    made: Mapping[str, Callable[[int], pa.Array]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Every row of its batches exists for the query."""
        return self.validity is None or all(mask is None for mask in self.validity)

    @property
    def existing_rows(self) -> int:
        """How many rows exist."""
        return self.rows - sum(mask.hidden for mask in self.validity or () if mask is not None)

    def existing(self, number: int) -> RowMask | None:
        """Rows of batch `number` that exist; None: all of them."""
        return self.validity[number] if self.validity is not None else None

    def chosen(self, number: int) -> RowMask | None:
        """Rows of batch `number` that exist and may satisfy the filter; None: all of them."""
        mask = self.masks[number] if self.masks is not None else None
        return mask if mask is not None else self.existing(number)
