# SPDX-License-Identifier: Apache-2.0
"""The rows of an answer in the form its client wants."""

from __future__ import annotations

import pyarrow as pa

from cremant.broker.arrow import arrow_table
from cremant.broker.encode import encode_rows
from cremant.broker.response import BrokerResponse, Result
from cremant.cluster.routing import Routes
from cremant.model.errors import QueryError
from cremant.model.limits import ANSWER_ROWS_MAX
from cremant.model.query_codes import QueryCode
from cremant.sql.plan import Plan


def encoded(plan: Plan, result: pa.Table, *, arrow: bool) -> Result:
    """As JSON, or as the client wants it. Raises QueryError 245 for too many rows."""
    if result.num_rows > ANSWER_ROWS_MAX:
        raise QueryError(
            QueryCode.SERVER_RESOURCE_LIMIT,
            f"the answer has {result.num_rows} rows, at most {ANSWER_ROWS_MAX} are given out",
            hint="lower LIMIT, or fetch the rows in pages",
        )
    if arrow:
        return Result(result.num_rows, table=arrow_table(result, plan.result))
    return Result(result.num_rows, rows=encode_rows(result, plan.result))


def explain(plan: Plan, routes: Routes | None, response: BrokerResponse, *, arrow: bool) -> None:
    """The answer to EXPLAIN PLAN FOR: nobody is asked. `{segments}` stands for how many segments would be."""
    assert plan.explain is not None
    segments = 0
    if routes is not None:
        parts = routes.parts(plan.prune)
        segments = len(parts.needed)
        response.tables, response.pruned_by_broker = (routes.table.name,), parts.pruned
    operators, ids, parents = zip(*plan.explain, strict=True)
    shown = [operator.replace("{segments}", str(segments)) for operator in operators]
    rows = pa.table({"operator": shown, "id": ids, "parent": parents})
    response.put(plan, encoded(plan, rows, arrow=arrow))


def page(tables: list[pa.Table], plan: Plan) -> pa.Table:
    """Rows [offset, offset + limit) of the concatenation."""
    whole = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
    return whole.slice(plan.offset, plan.limit)
