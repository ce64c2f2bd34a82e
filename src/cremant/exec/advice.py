# SPDX-License-Identifier: Apache-2.0
"""What to do about a query that needs more memory than it may have: by the shape of its SQL.

Exact percentiles and distinct counts hold every value they saw; their sketches hold a few kilobytes per group.
"""

from __future__ import annotations

from cremant.model.errors import QueryError
from cremant.model.query_codes import QueryCode

_LESS = "group by fewer values, lower LIMIT, or raise query_memory_bytes"
#: Marks of SQL (two_phase.py writes it) -> what needs less. The first that applies is said.
_SKETCHES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("count(DISTINCT ", "agg_distinct_", "array_agg(DISTINCT ", " AS d0 "), "DISTINCTCOUNTHLL needs little memory"),
    (("_pack(", "agg_moments4(", "agg_counts(", "agg_histogram("), ""),
    (("agg_percentile(", "array_agg("), "PERCENTILETDIGEST and PERCENTILEKLL are answered with small partial results"),
)


def out_of_memory(message: str, sql: str) -> QueryError:
    """QueryError 245 with a hint that fits the query."""
    for marks, advice in _SKETCHES:
        if any(mark in sql for mark in marks) and "agg_hll" not in sql:
            return QueryError(
                QueryCode.SERVER_RESOURCE_LIMIT, message, hint=f"{advice}; or {_LESS}" if advice else _LESS
            )
    return QueryError(QueryCode.SERVER_RESOURCE_LIMIT, message, hint=_LESS)
