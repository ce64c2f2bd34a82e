# SPDX-License-Identifier: Apache-2.0
"""Plan: what a query text means, ready to scatter: one SQL text for servers, one for the broker, names and types.

`plan_query` (planner.py) makes it: a pure function of text, options, schema and `now_ms`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cremant.wire.messages import PruneTerm, Shortcut


class Shape(StrEnum):
    LITERAL = "literal"
    SELECTION = "selection"
    DISTINCT = "distinct"
    AGGREGATION = "aggregation"
    GROUP_BY = "groupBy"


@dataclass(frozen=True, slots=True)
class ResultColumn:
    """`type`: Pinot's name, e.g. LONG, STRING_ARRAY, TIMESTAMP."""

    name: str
    type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`table`: raw name, None for a query of literals only (then `literals` is its one row).

    `server_sql` reads table `t` with exactly `columns`; its answers are concatenated to `partials`.
    `reduce_sql` reads `partials`; None: the answer is rows [offset, offset + limit) of the concatenation.
    `paged`: `reduce_sql` applies limit and offset itself; otherwise its result is sliced like that, too.
    The i-th column of the reduced table is `result[i]`.
    `explain`: set for EXPLAIN PLAN FOR; the answer is these rows (see explain.py), nobody runs the query.
    `explains_freshness`: EXPLAIN FRESHNESS FOR; the answer says what holds the query's partitions back.
    """

    shape: Shape
    table: str | None
    server_sql: str
    reduce_sql: str | None
    columns: tuple[str, ...]
    result: tuple[ResultColumn, ...]
    limit: int
    offset: int
    paged: bool = True
    prune: tuple[PruneTerm, ...] = ()
    shortcut: Shortcut = field(default_factory=Shortcut)
    literals: tuple[Any, ...] = ()
    options: dict[str, str] = field(default_factory=dict)
    explain: tuple[tuple[str, int, int], ...] | None = None
    explains_freshness: bool = False
