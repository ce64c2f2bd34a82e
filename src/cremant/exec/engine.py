# SPDX-License-Identifier: Apache-2.0
"""Engine: runs one DataFusion SQL text over Arrow batches, within a deadline and a share of memory (design: query.md).

A server runs `server_sql` over the pieces of its segments and tails (table `t`); a broker runs `reduce_sql` over the
servers' answers (table `partials`). Rules:

- The answer holds exactly the rows of the pieces given (rows whose validity bit is off are not there).
- Past the deadline the query is cancelled (its plan is dropped between two batches, no thread goes on burning CPU)
  and QueryError 250 is raised; past its memory QueryError 245. Other queries do not notice.
- Thread-safe: any thread may call `run`; calls run side by side on one shared pool of `threads`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from cremant.segment.scan import Piece


@dataclass(frozen=True, slots=True)
class RunStats:
    """`matched` has one entry per piece key: rows of it that passed the filter are known only in total."""

    rows_scanned: int = 0
    rows_matched: int = 0
    elapsed_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class RunResult:
    """`table` may have zero rows, but always has the columns and types of the query."""

    table: pa.Table
    stats: RunStats


class Engine:
    """One per process. `threads`: cores for queries; `memory_bytes`: for all running queries together."""

    def __init__(self, *, threads: int, memory_bytes: int, spill_dir: str | None = None) -> None:
        raise NotImplementedError

    def run(
        self,
        sql: str,
        pieces: Sequence[Piece],
        columns: Sequence[str],
        schema: pa.Schema,
        *,
        deadline_s: float,
        constants: dict[str, str] | None = None,
    ) -> RunResult:
        """Runs `sql` over table `t`, made of `columns` of `pieces`.

        `schema`: the scan form of ALL columns a piece may have (`segment.layout.scan_schema` plus `$` columns); it
        gives `t` its types when there are no pieces. `deadline_s`: absolute, on `time.monotonic()`.
        `constants`: virtual columns that are the same for every row of this server (`$hostName`).
        `$segmentName` and `$partitionId` are filled from the piece. Raises QueryError (200, 245, 250).
        """
        raise NotImplementedError

    def reduce(self, sql: str, partials: Sequence[pa.Table], *, deadline_s: float) -> pa.Table:
        """Runs `sql` over table `partials`, the concatenation of `partials` (at least one; all of one schema)."""
        raise NotImplementedError
