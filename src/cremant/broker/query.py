# SPDX-License-Identifier: Apache-2.0
"""One query from text to BrokerResponse: plan, wait for a turn, route, scatter and gather, reduce, encode.

Rules:

- Errors of a query are answers: Pinot's code and a message with what to do, never a stack trace.
- Rows that arrived are given out even if others are missing, with the exceptions that say so (`partialResult`).
- What could take long (large texts, reducing, encoding) runs in a thread; the event loop only waits and forwards.
- A query that is cancelled, whose client hung up or whose time is over, is stopped on every server that works for it.
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
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import pyarrow as pa

from cremant.broker.asking import Asking, Errands
from cremant.broker.demand import NOTHING_SETTLED, Settled, demand_of, seen_of
from cremant.broker.fresh import answer_fresh, await_seen
from cremant.broker.freshness import provenance_of
from cremant.broker.options import answer_bytes_max, server_answer_bytes_max, timeout_ms
from cremant.broker.response import BrokerResponse, Result
from cremant.broker.results import encoded, explain, page
from cremant.broker.room import Admission, Room
from cremant.broker.tables import stores_nulls, table_info
from cremant.broker.trace import trace_info
from cremant.broker.watch import Watch, explained, needed_partitions
from cremant.cluster.gather_messages import QueryException
from cremant.cluster.routing import Routes
from cremant.exec.engine import Engine
from cremant.exec.stop import Stop
from cremant.model.cluster import ClusterView, TableView
from cremant.model.errors import QueryError, UserError
from cremant.model.limits import (
    BROKER_ANSWER_BYTES_MAX,
    BROKER_QUERIES_RUNNING_MAX,
    BROKER_QUERIES_WAITING_MAX,
    LONG_TEXTS_PLANNED_MAX,
    QUERIES_RUNNING_MAX,
    QUERY_TIMEOUT_MS,
)
from cremant.model.query_codes import QueryCode
from cremant.segment.layout import scan_schema
from cremant.sql.plan import Plan
from cremant.sql.planner import Planner, flag
from cremant.wire.messages import ServerAnswer

_log = logging.getLogger(__name__)
R = TypeVar("R")

#: Planning a longer text is done in a thread.
_INLINE_TEXT_CHARS_MAX = 4_096
#: Answers up to this many rows are sliced and encoded on the event loop: less than the hop to a thread costs.
_INLINE_ROWS_MAX = 100
#: Time to reduce what arrived after the time of the query was spent on waiting for the rest; and, for what cannot be
#: stopped by a deadline of its own (planning, encoding), before it is given up.
_GRACE_S = 1.0


@dataclass(slots=True)
class Running:
    """A query under way; `task` may be cancelled."""

    sql: str
    task: asyncio.Task[object] | None
    client_id: str | None = None


@dataclass(slots=True)
class _Asked:
    """A request, and where its time went."""

    sql: str
    options: str
    began_s: float
    trace: bool
    arrow: bool
    stages_ms: dict[str, float] = field(default_factory=dict)
    arrivals: list[tuple[ServerAnswer, Any]] = field(default_factory=list)


class QueryService:
    """Answers SQL. Used from one event loop. `view` gives the newest view; `broker_id` is this instance;
    `controller_url`: whom to ask what pipelines last said, None = nobody."""

    def __init__(
        self, view: Callable[[], ClusterView | None], engine: Engine, broker_id: str, controller_url: str | None = None
    ) -> None:
        self.broker_id = broker_id
        self.running: dict[str, Running] = {}
        self.asking = Asking(view)
        self.network, self.epochs, self.marks = self.asking.network, self.asking.epochs, self.asking.marks
        self.watch = Watch(self.marks, self.network.peers, broker_id, controller_url)
        self.admission = Admission(BROKER_QUERIES_RUNNING_MAX, BROKER_QUERIES_WAITING_MAX)
        #: Called once per finished query, for metrics.
        self.on_response: Callable[[BrokerResponse], None] = lambda response: None
        self.view = view
        self._engine = engine
        self._planner = Planner()
        self._pool = ThreadPoolExecutor(QUERIES_RUNNING_MAX, thread_name_prefix="reduce")
        self._long_texts = Admission(LONG_TEXTS_PLANNED_MAX, BROKER_QUERIES_WAITING_MAX)
        self._room = Room(BROKER_ANSWER_BYTES_MAX)
        self._numbers = itertools.count()
        self._id_prefix = str(zlib.crc32(f"{broker_id}{time.time_ns()}".encode()))

    def close(self) -> None:
        self.asking.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def answer(
        self,
        sql: str,
        query_options: str = "",
        *,
        trace: bool = False,
        arrow: bool = False,
        on_request_id: Callable[[str], None] = lambda request_id: None,
    ) -> BrokerResponse:
        """Raises UserError for a request that is no query at all (bad timeout); everything else is in the answer.

        `on_request_id` is called at once with the id that `cancel` takes."""
        asked = _Asked(sql, query_options, time.monotonic(), trace, arrow)
        response = BrokerResponse(f"{self._id_prefix}{next(self._numbers):09d}", self.broker_id)
        self.running[response.request_id] = Running(sql, asyncio.current_task())
        on_request_id(response.request_id)
        try:
            await self._answer(asked, response)
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
        response.now_ms = response.now_ms or time.time_ns() // 1_000_000
        response.elapsed_ms = (time.monotonic() - asked.began_s) * 1000
        self.on_response(response)
        return response

    def cancel(self, request_id: str) -> frozenset[str] | None:
        """URLs of the servers that were at work for it and are told to stop; None if there is no such query."""
        query = self.running.pop(request_id, None)
        if query is None or query.task is None:
            return None
        asked = self.network.asked(request_id)
        query.task.cancel()
        return asked

    def request_id_of(self, client_id: str) -> str | None:
        """Of the running query that has this `clientQueryId`."""
        return next((found for found, query in self.running.items() if query.client_id == client_id), None)

    def _cancelled(self, request_id: str) -> bool:
        """By `cancel`, not by the end of the process."""
        task = asyncio.current_task()
        if request_id in self.running or task is None:
            return False
        task.uncancel()
        return True

    async def plan(self, sql: str, query_options: str = "") -> Plan:
        """Raises QueryError."""
        view, now = self.view(), time.time_ns() // 1_000_000
        if len(sql) <= _INLINE_TEXT_CHARS_MAX:
            return self._planner.plan(sql, query_options, lambda name: table_info(view, name), now)
        deadline_s = time.monotonic() + QUERY_TIMEOUT_MS / 1000
        async with self._long_texts.turn(deadline_s):
            return await self._in_thread(
                Stop(deadline_s), self._planner.plan, sql, query_options, lambda name: table_info(view, name), now
            )

    async def _answer(self, asked: _Asked, response: BrokerResponse) -> None:
        plan = await self.plan(asked.sql, asked.options)
        asked.stages_ms["planMs"] = (time.monotonic() - asked.began_s) * 1000
        response.client_request_id = plan.options.get("clientqueryid")
        if response.client_request_id is not None and response.request_id in self.running:
            self.running[response.request_id].client_id = response.client_request_id
        if flag(plan.options, "usemultistageengine"):
            raise QueryError(
                QueryCode.QUERY_VALIDATION, "QueryValidationError: the multi-stage query engine is not supported",
                hint="leave useMultistageEngine away; single-table queries work",
            )  # fmt: skip
        routes = self.routes(plan.table) if plan.table is not None else None
        if plan.explain is not None:
            explain(plan, routes, response, arrow=asked.arrow)
            return
        if plan.explains_freshness and routes is not None:
            found = await self.watch.look(routes)
            rows = explained(found, needed_partitions(routes, plan))
            response.tables = (routes.table.name,)
            response.put(plan, encoded(plan, rows, arrow=asked.arrow))
            return
        if routes is None:
            await self._answer_literals(plan, asked, response)
            return
        config = routes.table.record.config
        response.sla = config.freshness_sla
        deadline_s = asked.began_s + timeout_ms(plan.options, config.query_timeout_ms) / 1000

        room = Room(answer_bytes_max(plan.options), self._room, each_bytes=server_answer_bytes_max(plan.options))

        async def run(settled: Settled) -> float:
            newest = self.asking.newest_routes(routes.table.name) or routes
            return await self._in_turn(newest, asked, response, Errands(plan, deadline_s, room, settled))

        demand, seen = demand_of(plan.options), seen_of(plan.options, routes.table)
        if seen is not None:
            await await_seen(self.marks, seen, routes.table.name, response, deadline_s)
        if demand is None:
            await run(NOTHING_SETTLED)
        else:
            await answer_fresh(self.marks, demand, routes.table.name, response, deadline_s, run)
        if asked.trace or flag(plan.options, "trace"):
            response.trace = trace_info(self.broker_id, asked.stages_ms, asked.arrivals)
        if flag(plan.options, "dropresults"):
            response.result = None

    async def _in_turn(self, routes: Routes, asked: _Asked, response: BrokerResponse, errands: Errands) -> float:
        """Milliseconds that it took once its turn had come."""
        try:
            async with self.admission.turn(errands.deadline_s) as waited_s:
                asked.stages_ms["waitMs"] = response.waited_ms + waited_s * 1000
                began_s = time.monotonic()
                await self._answer_table(routes, asked, response, errands)
                return (time.monotonic() - began_s) * 1000
        finally:
            errands.room.give_back()

    async def _answer_table(self, routes: Routes, asked: _Asked, response: BrokerResponse, errands: Errands) -> None:
        plan, deadline_s = errands.plan, errands.deadline_s
        tables = await self._gather(routes, asked, response, errands)
        if tables is not None:
            reduce_s = time.monotonic()
            if response.exceptions:  # what arrived is given out, also when waiting for the rest took all the time
                deadline_s = max(deadline_s, reduce_s + _GRACE_S)
            if plan.reduce_sql is None and sum(part.num_rows for part in tables) <= _INLINE_ROWS_MAX:
                response.put(plan, encoded(plan, page(tables, plan), arrow=asked.arrow))
            else:
                stop = Stop(deadline_s)
                response.put(plan, await self._in_thread(stop, self._reduce, plan, tables, stop, asked.arrow))
            response.reduce_ms = asked.stages_ms["reduceMs"] = (time.monotonic() - reduce_s) * 1000

    async def _answer_literals(self, plan: Plan, asked: _Asked, response: BrokerResponse) -> None:
        deadline_s = asked.began_s + timeout_ms(plan.options, None) / 1000
        if plan.literals and len(plan.literals) == len(plan.result) and not asked.arrow:
            response.put(plan, Result(1, rows=msgspec.Raw(msgspec.json.encode([plan.literals]))))
            return
        async with self.admission.turn(deadline_s):
            one, stop = [pa.table({"one": [1]})], Stop(deadline_s)
            response.put(plan, await self._in_thread(stop, self._reduce, plan, one, stop, asked.arrow))

    def routes(self, table: str) -> Routes:
        """Of the newest view, made once per view."""
        return self.asking.routes(table)

    async def _gather(
        self, routes: Routes, asked: _Asked, response: BrokerResponse, errands: Errands
    ) -> list[pa.Table] | None:
        """The servers' tables; None if there is nothing to reduce (all of it failed)."""
        began_s = time.monotonic()
        gather = await self.asking.ask(routes, errands, response)
        asked.stages_ms["gatherMs"] = (time.monotonic() - began_s) * 1000
        asked.arrivals = gather.answers
        if flag(errands.plan.options, "includeprovenance"):
            response.provenance = provenance_of(gather)
        tables = [arrival.rows for _, arrival in gather.answers if arrival.rows is not None]
        if tables:
            return tables
        if gather.exceptions:
            return None
        stop = Stop(errands.deadline_s)
        return [await self._in_thread(stop, self._empty_partial, errands.plan, routes.table, stop)]

    def _empty_partial(self, plan: Plan, table: TableView, stop: Stop) -> pa.Table:
        """What a server answers over no rows: names and types of the partial result."""
        schema = scan_schema(table.record.table_schema, null_handling=stores_nulls(table))
        return self._engine.run(
            plan.server_sql,
            (),
            plan.columns,
            schema,
            deadline_s=stop.deadline_s,
            constants={"$hostName": ""},
            stop=stop,
        ).table

    def _reduce(self, plan: Plan, tables: list[pa.Table], stop: Stop, arrow: bool) -> Result:
        if plan.reduce_sql is None:
            result = page(tables, plan)
        else:
            result = self._engine.reduce(plan.reduce_sql, tables, deadline_s=stop.deadline_s, stop=stop)
            if not plan.paged:
                result = result.slice(plan.offset, plan.limit)
        return encoded(plan, result, arrow=arrow)

    async def _in_thread(self, stop: Stop, function: Callable[..., R], *args: Any) -> R:
        """Raises QueryError 400 some time after the deadline: what looks at `stop` ends by itself, other work does not.

        A thread that nobody waits for any more is told to stop."""
        try:
            async with asyncio.timeout(max(0.0, stop.deadline_s - time.monotonic()) + _GRACE_S):
                return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)
        except asyncio.CancelledError:
            stop.cancel()
            raise
        except TimeoutError as error:
            stop.cancel()
            raise QueryError(
                QueryCode.BROKER_TIMEOUT, "BrokerTimeoutError: the broker did not finish its part of the query in time",
                hint="raise timeoutMs, or ask for fewer rows",
            ) from error  # fmt: skip
