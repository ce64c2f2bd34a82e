# SPDX-License-Identifier: Apache-2.0
"""What a query scans: a piece of one partition, as Arrow record batches in scan form.

Source: query design, "Server". Whoever makes a piece guarantees that its batches carry exactly the columns of
`layout.scan_schema` of the table's current schema, and that they stay readable as long as the piece is referenced:
batches of sealed segments and spilled tails are mapped files, and a mapping outlives the deletion of its file.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from cremant.segment.index import SegmentIndex
from cremant.segment.rows import RowMask


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one sealed segment, or of a tail.

    `key` identifies the content while the process lives: equal keys of immutable pieces mean equal rows, so an engine
    may cache by it. `validity`, if given, is one boolean per row over the concatenation of `batches`: rows where it is
    false do not exist for the query. Append tables always pass None.

    `masks`, if given, says per batch which rows may satisfy the query's filter (None: all of them); if `exact`, they
    all do, and nobody need evaluate it again. `index` and `first_rows` (number within the segment of each batch's
    first row) are there for sealed segments: codes of columns are found by them.
    """

    key: str
    partition: int
    segment: str
    batches: tuple[pa.RecordBatch, ...]
    rows: int
    validity: pa.BooleanArray | None
    immutable: bool
    masks: tuple[RowMask | None, ...] | None = None
    exact: bool = False
    index: SegmentIndex | None = None
    first_rows: tuple[int, ...] = ()
