# SPDX-License-Identifier: Apache-2.0
"""One query from text to BrokerResponse: plan, route, scatter and gather, reduce, encode.

Rules:

- Errors of a query are answers: Pinot's code and a message with what to do, never a stack trace.
- Rows that arrived are given out even if others are missing, with the exceptions that say so (`partialResult`).
- What could take long (large texts, reducing, encoding) runs in a thread; the event loop only waits and forwards.
- The last view serves on while the controller is away.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import pyarrow as pa

from cremant.broker.encode import encode_rows
from cremant.broker.freshness import freshness_of
from cremant.broker.peers import Peers
from cremant.broker.response import BrokerResponse
from cremant.broker.scatter import Errand, scatter
from cremant.cluster.gather import Gather, QueryException
from cremant.cluster.routing import parts_of
from cremant.exec.engine import Engine
from cremant.model.cluster import ClusterView, TableView
from cremant.model.errors import QueryError, UserError
from cremant.model.limits import ANSWER_ROWS_MAX, QUERIES_RUNNING_MAX, QUERY_TIMEOUT_MS
from cremant.model.query_codes import QueryCode
from cremant.segment.layout import scan_schema
from cremant.sql.binder import TableInfo
from cremant.sql.plan import Plan, Shape
from cremant.sql.planner import Planner, find_table, flag

_log = logging.getLogger(__name__)
R = TypeVar("R")

#: Planning a longer text is done in a thread.
_INLINE_TEXT_CHARS_MAX = 4_096
#: Answers up to this many rows are sliced and encoded on the event loop: less than the hop to a thread costs.
_INLINE_ROWS_MAX = 100
#: A server that failed a request is asked last for this long; the view knows better after that.
_SUSPECT_S = 3.0
#: Time to reduce what arrived after the time of the query was spent on waiting for the rest.
_REDUCE_GRACE_S = 1.0
#: Longer waits are cut to an hour: nothing a broker does takes longer, and deadlines stay finite.
_TIMEOUT_MS_MAX = 3_600_000


@dataclass(slots=True)
class Running:
    """A query under way; `task` may be cancelled."""

    sql: str
    task: asyncio.Task[object] | None


class QueryService:
    """Answers SQL. Used from one event loop. `view` gives the newest view; `broker_id` is this instance."""

    def __init__(self, view: Callable[[], ClusterView | None], engine: Engine, broker_id: str) -> None:
        self.broker_id = broker_id
        self.running: dict[str, Running] = {}
        #: Called once per finished query, for metrics.
        self.on_response: Callable[[BrokerResponse], None] = lambda response: None
        self._view = view
        self._engine = engine
        self._peers = Peers()
        self._planner = Planner()
        self._pool = ThreadPoolExecutor(QUERIES_RUNNING_MAX, thread_name_prefix="reduce")
        self._numbers = itertools.count()
        self._id_prefix = str(zlib.crc32(f"{broker_id}{time.time_ns()}".encode()))
        self._suspects: dict[str, float] = {}

    def close(self) -> None:
        self._peers.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def answer(self, sql: str, query_options: str = "") -> BrokerResponse:
        """Raises UserError for a request that is no query at all (bad timeout); everything else is in the answer."""
        began_s = time.monotonic()
        response = BrokerResponse(f"{self._id_prefix}{next(self._numbers):09d}", self.broker_id)
        self.running[response.request_id] = Running(sql, asyncio.current_task())
        try:
            await self._answer(sql, query_options, response, began_s)
        except QueryError as error:
            if error.code == QueryCode.SQL_PARSING:
                response.broker_id = None
            response.exceptions.insert(0, QueryException(error.code, str(error)))
        except UserError:
            raise
        except asyncio.CancelledError:
            if not self._cancelled(response.request_id):
                raise
            response.exceptions.insert(0, QueryException(QueryCode.QUERY_CANCELLED, "QueryCancellationError"))
        except Exception as error:
            _log.exception("a query failed on a bug", extra={"fields": {"request_id": response.request_id}})
            text = f"InternalError: {type(error).__name__}; the log of the broker has the details"
            response.exceptions.insert(0, QueryException(QueryCode.INTERNAL, text))
        finally:
            self.running.pop(response.request_id, None)
        response.now_ms = time.time_ns() // 1_000_000
        response.elapsed_ms = (time.monotonic() - began_s) * 1000
        self.on_response(response)
        return response

    def cancel(self, request_id: str) -> bool:
        """False if there is no such query."""
        query = self.running.pop(request_id, None)
        if query is None or query.task is None:
            return False
        query.task.cancel()
        return True

    def _cancelled(self, request_id: str) -> bool:
        """By `cancel`, not by the end of the connection or of the process."""
        task = asyncio.current_task()
        if request_id in self.running or task is None:
            return False
        task.uncancel()
        return True

    async def _answer(self, sql: str, query_options: str, response: BrokerResponse, began_s: float) -> None:
        view = self._view()
        now = time.time_ns() // 1_000_000
        if len(sql) <= _INLINE_TEXT_CHARS_MAX:
            plan = self._planner.plan(sql, query_options, lambda name: table_info(view, name), now)
        else:
            plan = await self._in_thread(
                self._planner.plan, sql, query_options, lambda name: table_info(view, name), now
            )
        response.client_request_id = plan.options.get("clientqueryid")
        if flag(plan.options, "usemultistageengine"):
            raise QueryError(
                QueryCode.QUERY_VALIDATION, "QueryValidationError: the multi-stage query engine is not supported",
                hint="leave useMultistageEngine away; single-table queries work",
            )  # fmt: skip
        if plan.table is None:
            await self._answer_literals(plan, response, began_s + timeout_ms(plan.options, None) / 1000)
            return
        assert view is not None
        table = view.tables[plan.table]
        deadline_s = began_s + timeout_ms(plan.options, table.record.config.query_timeout_ms) / 1000
        tables = await self._gather(view, table, plan, response, deadline_s)
        if tables is None:
            return
        reduce_s = time.monotonic()
        if response.exceptions:  # what arrived is given out, also when waiting for the rest took all the time
            deadline_s = max(deadline_s, reduce_s + _REDUCE_GRACE_S)
        if plan.reduce_sql is None and sum(part.num_rows for part in tables) <= _INLINE_ROWS_MAX:
            self._finish(plan, page(tables, plan), response)
        else:
            await self._in_thread(self._reduce, plan, tables, response, deadline_s)
        response.reduce_ms = (time.monotonic() - reduce_s) * 1000

    async def _answer_literals(self, plan: Plan, response: BrokerResponse, deadline_s: float) -> None:
        if plan.literals and len(plan.literals) == len(plan.result):
            response.columns, response.row_count = plan.result, 1
            response.rows = msgspec.Raw(msgspec.json.encode([plan.literals]))
            return
        await self._in_thread(self._reduce, plan, [pa.table({"one": [1]})], response, deadline_s)

    async def _gather(
        self, view: ClusterView, table: TableView, plan: Plan, response: BrokerResponse, deadline_s: float
    ) -> list[pa.Table] | None:
        """The servers' tables; None if there is nothing to reduce (all of it failed)."""
        parts = parts_of(table, plan.prune)
        gather = Gather(view, table, parts.needed, deadline_s * 1000, suspects=self._current_suspects())
        response.tables, response.pruned_by_broker = (table.name,), parts.pruned
        if parts.needed:
            errand = Errand(response.request_id, plan, table.name, table.record.incarnation)
            await scatter(gather, errand, self._peers, self._view)
            self._suspects.update(dict.fromkeys(gather.unresponsive, time.monotonic() + _SUSPECT_S))
        response.exceptions += gather.exceptions
        response.servers_queried, response.servers_responded = len(gather.asked), len(gather.responded)
        response.answers = [answer for answer, _ in gather.answers]
        response.freshness = freshness_of(response.answers, table.record, len(table.partitions))
        tables = [rows for _, rows in gather.answers if rows is not None]
        if tables:
            return tables
        if gather.exceptions:
            return None
        return [await self._in_thread(self._empty_partial, plan, table, deadline_s)]

    def _current_suspects(self) -> frozenset[str]:
        if not self._suspects:
            return frozenset()
        now_s = time.monotonic()
        self._suspects = {server: until for server, until in self._suspects.items() if until > now_s}
        return frozenset(self._suspects)

    def _empty_partial(self, plan: Plan, table: TableView, deadline_s: float) -> pa.Table:
        """What a server answers over no rows: names and types of the partial result."""
        schema = scan_schema(table.record.table_schema, null_handling=stores_nulls(table))
        return self._engine.run(
            plan.server_sql, (), plan.columns, schema, deadline_s=deadline_s, constants={"$hostName": ""}
        ).table

    def _reduce(self, plan: Plan, tables: list[pa.Table], response: BrokerResponse, deadline_s: float) -> None:
        if plan.reduce_sql is None:
            result = page(tables, plan)
        else:
            result = self._engine.reduce(plan.reduce_sql, tables, deadline_s=deadline_s)
            if not plan.paged:
                result = result.slice(plan.offset, plan.limit)
        self._finish(plan, result, response)

    def _finish(self, plan: Plan, result: pa.Table, response: BrokerResponse) -> None:
        if result.num_rows > ANSWER_ROWS_MAX:
            raise QueryError(
                QueryCode.SERVER_RESOURCE_LIMIT,
                f"the answer has {result.num_rows} rows, at most {ANSWER_ROWS_MAX} are given out",
                hint="lower LIMIT, or fetch the rows in pages",
            )
        if plan.shape is Shape.LITERAL:
            response.tables = ()
        response.columns, response.row_count = plan.result, result.num_rows
        response.rows = encode_rows(result, plan.result)

    async def _in_thread(self, function: Callable[..., R], *args: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)


def page(tables: list[pa.Table], plan: Plan) -> pa.Table:
    """Rows [offset, offset + limit) of the concatenation."""
    whole = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
    return whole.slice(plan.offset, plan.limit)


def stores_nulls(table: TableView) -> bool:
    return table.record.config.null_handling or table.record.table_schema.enable_column_based_null_handling


def table_info(view: ClusterView | None, name: str) -> TableInfo:
    """What the planner needs of the table that `name` means. Raises QueryError 190, 191, 410."""
    if view is None:
        raise QueryError(
            QueryCode.UNKNOWN, "this broker has not heard from the controller yet", hint="try again in a moment"
        )
    table = view.tables[find_table(name, list(view.tables))]
    record = table.record
    if not record.enabled:
        raise QueryError(QueryCode.TABLE_IS_DISABLED, "TableIsDisabledError")
    return TableInfo(table.name, record.table_schema, stores_nulls(table), record.incarnation, record.config_version)


def timeout_ms(options: dict[str, str], of_table: int | None) -> int:
    """Milliseconds that a query may take. Raises UserError for an option that is no such number."""
    given = options.get("timeoutms")
    if given is None:
        return of_table or QUERY_TIMEOUT_MS
    if not given.isdigit() or not 0 < int(given) < 2**63:
        raise UserError(f"timeoutMs must be a number between 1 and 2^63-1, got: {given}")
    return min(int(given), _TIMEOUT_MS_MAX)
