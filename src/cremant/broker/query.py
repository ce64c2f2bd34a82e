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
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
import pyarrow as pa

from cremant.broker.epochs import Epochs
from cremant.broker.freshness import freshness_of
from cremant.broker.options import (
    answer_bytes_max,
    as_of_epoch,
    server_answer_bytes_max,
    timeout_ms,
    wishes_of,
)
from cremant.broker.response import BrokerResponse, Result
from cremant.broker.results import encoded, explain, page
from cremant.broker.room import Admission, Room
from cremant.broker.scatter import Errand, Network
from cremant.broker.tables import stores_nulls, table_info
from cremant.broker.trace import trace_info
from cremant.cluster.gather import Gather
from cremant.cluster.gather_messages import QueryException
from cremant.cluster.routing import Routes, Wishes
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
from cremant.shell.backoff import Backoff
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
#: Cuts that a query of an upsert table tries, another one if servers have let go of the one before meanwhile; and the
#: pause between two, which grows: after a rewind servers and brokers hear of it within some tens of ms.
_CUTS_MAX = 6
_CUT_PAUSE_MS, _CUT_PAUSE_MAX_MS = 20, 200


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
    """Answers SQL. Used from one event loop. `view` gives the newest view; `broker_id` is this instance."""

    def __init__(self, view: Callable[[], ClusterView | None], engine: Engine, broker_id: str) -> None:
        self.broker_id = broker_id
        self.running: dict[str, Running] = {}
        self.network = Network(view)
        self.admission = Admission(BROKER_QUERIES_RUNNING_MAX, BROKER_QUERIES_WAITING_MAX)
        #: Called once per finished query, for metrics.
        self.on_response: Callable[[BrokerResponse], None] = lambda response: None
        self.view = view
        self.epochs = Epochs(self.network.peers)
        self._engine = engine
        self._planner = Planner()
        self._pool = ThreadPoolExecutor(QUERIES_RUNNING_MAX, thread_name_prefix="reduce")
        self._long_texts = Admission(LONG_TEXTS_PLANNED_MAX, BROKER_QUERIES_WAITING_MAX)
        self._room = Room(BROKER_ANSWER_BYTES_MAX)
        self._numbers = itertools.count()
        self._id_prefix = str(zlib.crc32(f"{broker_id}{time.time_ns()}".encode()))
        self._routes: dict[str, Routes] = {}
        #: Incarnation -> (partition, server) -> offset that an answer of it has shown.
        self._shown: dict[str, dict[tuple[int, str], int]] = {}

    def close(self) -> None:
        self.epochs.close()
        self.network.close()
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
        response.now_ms = time.time_ns() // 1_000_000
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
        if routes is None:
            await self._answer_literals(plan, asked, response)
            return
        deadline_s = asked.began_s + timeout_ms(plan.options, routes.table.record.config.query_timeout_ms) / 1000
        room = Room(answer_bytes_max(plan.options), self._room, each_bytes=server_answer_bytes_max(plan.options))
        try:
            async with self.admission.turn(deadline_s) as waited_s:
                asked.stages_ms["waitMs"] = waited_s * 1000
                await self._answer_table(routes, plan, asked, response, deadline_s, room)
        finally:
            room.give_back()
        if asked.trace or flag(plan.options, "trace"):
            response.trace = trace_info(self.broker_id, asked.stages_ms, asked.arrivals)
        if flag(plan.options, "dropresults"):
            response.result = None

    async def _answer_table(
        self, routes: Routes, plan: Plan, asked: _Asked, response: BrokerResponse, deadline_s: float, room: Room
    ) -> None:
        tables = await self._gather(routes, plan, asked, response, deadline_s, room)
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
        view = self.view()
        assert view is not None
        known = self._routes.get(table)
        if known is None or known.view is not view:
            self._routes = {name: routes for name, routes in self._routes.items() if routes.view is view}
            known = self._routes[table] = Routes(view, view.tables[table])
        return known

    async def _gather(
        self, routes: Routes, plan: Plan, asked: _Asked, response: BrokerResponse, deadline_s: float, room: Room
    ) -> list[pa.Table] | None:
        """The servers' tables; None if there is nothing to reduce (all of it failed)."""
        table, record = routes.table, routes.table.record
        shown = self._shown_of(record.incarnation)
        began_s = time.monotonic()
        gather = await self._scatter(routes, plan, response, deadline_s, room)
        asked.stages_ms["gatherMs"] = (time.monotonic() - began_s) * 1000
        response.exceptions += gather.exceptions
        response.servers_queried, response.servers_responded = len(gather.asked), len(gather.responded)
        response.answers = [answer for answer, _ in gather.answers]
        epoch = None if gather.chosen is None else gather.chosen.epoch
        expected = len(table.partitions) if gather.chosen is None else gather.chosen.count(len(table.partitions))
        response.freshness = freshness_of(response.answers, record, expected, gather.wishes.floors, epoch)
        for answer, arrival in gather.answers:
            shown.update(((tail.partition, arrival.server), tail.covered.next) for tail in answer.partitions)
        asked.arrivals = gather.answers
        tables = [arrival.rows for _, arrival in gather.answers if arrival.rows is not None]
        if tables:
            return tables
        if gather.exceptions:
            return None
        stop = Stop(deadline_s)
        return [await self._in_thread(stop, self._empty_partial, plan, table, stop)]

    async def _scatter(
        self, routes: Routes, plan: Plan, response: BrokerResponse, deadline_s: float, room: Room
    ) -> Gather:
        """Asks the servers; of an upsert table anew, with a new cut and the newest view, if nobody knows the first cut
        any more, or if the view lacks partitions that the table had there (E-7)."""
        record = routes.table.record
        is_upsert = record.config.upsert is not None
        if is_upsert:
            await self.epochs.begin(routes, deadline_s)
        pauses = Backoff(_CUT_PAUSE_MS, _CUT_PAUSE_MAX_MS)
        for left in reversed(range(_CUTS_MAX)):
            pause_s = pauses.next_ms() / 1000
            wishes = wishes_of(plan.options, routes.table, self._shown_of(record.incarnation))
            marks = self.epochs.marks(routes.table, plan.options) if is_upsert else None
            if is_upsert:
                wishes = replace(wishes, timely=self.epochs.low.timely(record.incarnation))
            parts = routes.parts(plan.prune)
            response.tables, response.pruned_by_broker = (routes.table.name,), parts.pruned
            shape = _shape(plan)
            gather = self._new_gather(routes, parts.needed, deadline_s, wishes, shape)
            gather.marks = marks
            gather.may_restart = is_upsert and left > 0 and as_of_epoch(plan.options) is None
            if parts.needed:
                errand = Errand(response.request_id, plan, routes.table.name, record.incarnation, shape, room)
                await self.network.scatter(gather, errand)
            lacks = gather.chosen is not None and self.epochs.low.lacks(
                record.incarnation, gather.chosen, len(routes.table.partitions)
            )
            if not (gather.stale or lacks) or time.monotonic() + pause_s >= deadline_s:
                break
            room.give_back()  # what came is not used
            await asyncio.sleep(pause_s)
            if (view := self.view()) is None or routes.table.name not in view.tables:
                break
            routes = self.routes(routes.table.name)
        if lacks:
            text = f"this broker has not heard yet of all partitions that table {record.config.name} has by now"
            gather.exceptions.append(QueryException(QueryCode.BROKER_SEGMENT_UNAVAILABLE, text))
        elif gather.chosen is not None and gather.answers and as_of_epoch(plan.options) is None:
            self.epochs.low.answered(record.incarnation, gather.chosen)
        return gather

    def _new_gather(
        self, routes: Routes, parts: tuple[Any, ...], deadline_s: float, wishes: Wishes, shape: Hashable
    ) -> Gather:
        now_ms, loads = time.monotonic() * 1000, self.network.loads
        return Gather(
            routes, parts, deadline_s * 1000, suspects=loads.suspects(now_ms), loads=loads.of(routes.urls, now_ms),
            wishes=wishes, hedge_after_ms=loads.hedge_after_ms(shape),
            may_hedge=lambda: loads.may_hedge(len(routes.urls)),
        )  # fmt: skip

    def _shown_of(self, incarnation: str) -> dict[tuple[int, str], int]:
        known = self._shown.get(incarnation)
        if known is None:
            view = self.view()
            alive = {table.record.incarnation for table in view.tables.values()} if view is not None else set()
            self._shown = {name: shown for name, shown in self._shown.items() if name in alive}
            known = self._shown[incarnation] = {}
        return known

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


def _shape(plan: Plan) -> Hashable:
    """What queries of similar cost have in common: literals differ."""
    terms = tuple((term.column, term.op) for term in plan.prune)
    return (plan.table, plan.shape, plan.columns, len(plan.result), terms)
