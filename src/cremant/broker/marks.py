# SPDX-License-Identifier: Apache-2.0
"""How far servers are, as this broker knows it: from their answers to queries, and by asking them (POST
/internal/v1/watermarks).

Rules:

- A query that demands freshness waits here, before it takes a turn among those that run. It holds no thread; all live
  replicas are asked at once, and the first that can prove the demand will do.
- Waiting is bounded by the query's time and in number, and one table has half of the places at most: a table that
  stands still leaves room for the queries of others.
- A table of which queries found a replica to be late is looked at now and then, so that the replica is asked again
  once it is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping

from cremant.broker.demand import NOTHING_SETTLED, Demand, OnStale, Settled, settled
from cremant.broker.peers import Peers
from cremant.cluster.routing import Routes
from cremant.cluster.shown import LATE_MS, Shown
from cremant.model.cluster import TableView
from cremant.model.errors import CremantError, QueryError
from cremant.model.limits import BROKER_QUERIES_AWAITING_ROWS_MAX
from cremant.model.query_codes import QueryCode
from cremant.shell.backoff import Backoff
from cremant.wire.codec import decode, encode
from cremant.wire.messages import ServerAnswer
from cremant.wire.watermarks import WantedMark, WatermarksReply, WatermarksRequest

WATERMARKS_PATH = "/internal/v1/watermarks"
#: A server that does not say at once how far it is, is not fresh.
LOOK_TIMEOUT_S = 0.5
#: Between two looks at the replicas of a table of which one is late, or seems to be.
LOOK_EVERY_S = 1.0
#: A server replies once it is as far as is wanted of it; sooner, since another one may have reached the half of it. The
#: time doubles.
WAIT_FIRST_MS, WAIT_MAX_MS = 100, 1_000
#: So much later its reply should be there.
REPLY_GRACE_S = 0.5
#: What is wanted grows with the time: between two replies of a server that is almost there.
ASK_PAUSE_S = 0.01
RETRY_FIRST_MS, RETRY_MAX_MS = 20, 500
#: A new view is looked for this often.
VIEW_EVERY_S = 0.2


class Marks:
    """Used from one event loop. `routes_of` gives the newest routes of a table, None if it is no more."""

    def __init__(self, peers: Peers, routes_of: Callable[[str], Routes | None]) -> None:
        self.waiting: Counter[str] = Counter()
        self._peers = peers
        self._routes_of = routes_of
        #: Incarnation -> what was shown of it.
        self._shown: dict[str, Shown] = {}
        #: Incarnation -> when its servers were last looked at (monotonic).
        self._looked_s: dict[str, float] = {}
        self._looks: set[asyncio.Task[dict[str, WatermarksReply | str]]] = set()

    # --- what is known ---

    def of(self, routes: Routes) -> Shown:
        incarnation = routes.table.record.incarnation
        known = self._shown.get(incarnation)
        if known is None:
            alive = {table.record.incarnation for table in routes.view.tables.values()}
            self._shown = {name: shown for name, shown in self._shown.items() if name in alive}
            self._looked_s = {name: at_s for name, at_s in self._looked_s.items() if name in alive}
            known = self._shown[incarnation] = Shown()
        return known

    def answered(self, routes: Routes, server: str, answer: ServerAnswer, age_ms: float) -> None:
        """What the answer to a query showed; of an epoch that was asked for by its number it is old on purpose."""
        shown = self.of(routes)
        is_upsert, now_ms = routes.table.record.config.upsert is not None, time.monotonic() * 1000
        for tail in answer.partitions:
            offset = tail.watermark.next_offset if is_upsert else tail.covered.next
            shown.note(tail.partition, server, tail.watermark, offset=offset, now_ms=now_ms, age_ms=age_ms)

    def doubt(self, routes: Routes, partitions: Collection[int]) -> None:
        """Nobody shows of them what was said: it was taken back by a rewind, or those who said so are gone."""
        for partition in partitions:
            self.of(routes).marks.pop(partition, None)

    def look_soon(self, routes: Routes, lag_ms: int | None) -> None:
        """After a query whose answer was so old. Costs two comparisons while nobody is late."""
        if (lag_ms is not None and lag_ms <= LATE_MS) and not self.of(routes).late:
            return
        incarnation, now_s = routes.table.record.incarnation, time.monotonic()
        if now_s - self._looked_s.get(incarnation, 0.0) >= LOOK_EVERY_S:
            self._looked_s[incarnation] = now_s
            self.of(routes).keep(routes.urls)
            task = asyncio.get_running_loop().create_task(self.look(routes, timeout_s=LOOK_TIMEOUT_S))
            self._looks.add(task)
            task.add_done_callback(self._looks.discard)

    # --- asking ---

    async def look(
        self,
        routes: Routes,
        partitions: Collection[int] | None = None,
        *,
        timeout_s: float,
        on_reply: Callable[[str, WatermarksReply | str], bool] = lambda server, reply: False,
    ) -> dict[str, WatermarksReply | str]:
        """Live server -> what it says of these partitions (all) now, or why it says nothing. Ends early once `on_reply`
        says that this is enough."""
        asked = {server: _replicated(routes, server, partitions) for server in routes.urls}
        replies: dict[str, WatermarksReply | str] = {}

        async def one(server: str) -> str:
            wanted = tuple(WantedMark(partition=partition) for partition in asked[server])
            try:
                replies[server] = await self._ask(routes, server, wanted, 0, timeout_s)
            except CremantError as error:
                replies[server] = str(error)
            return server

        tasks = [asyncio.ensure_future(one(server)) for server, those in asked.items() if those]
        try:
            for done in asyncio.as_completed(tasks):
                server = await done
                if on_reply(server, replies[server]):
                    break
        finally:
            for task in tasks:
                task.cancel()
        return replies

    async def _ask(
        self, routes: Routes, server: str, wanted: tuple[WantedMark, ...], timeout_ms: int, grace_s: float
    ) -> WatermarksReply:
        """Raises CremantError. What it says is noted."""
        table = routes.table
        request = WatermarksRequest(
            table=table.name, incarnation=table.record.incarnation, wanted=wanted, timeout_ms=timeout_ms
        )
        body = await self._peers.post(
            routes.urls[server], WATERMARKS_PATH, encode(request), headers={}, timeout_s=timeout_ms / 1000 + grace_s
        )
        reply = decode(body, WatermarksReply)
        shown, now_ms = self.of(routes), time.monotonic() * 1000
        for tail in reply.tails:
            shown.note(tail.partition, server, tail.watermark, offset=tail.watermark.next_offset, now_ms=now_ms)
        return reply

    # --- waiting ---

    async def settle(self, table: str, demand: Demand, *, until_s: float, margin_ms: float) -> Settling:
        """What a query that takes `margin_ms` can have of its demand; waits for it until then, if it is to. Raises
        QueryError 429 when too many wait."""
        settling = Settling(self, table, demand, margin_ms)
        settling.look()
        if not settling.had.unmet:
            return settling
        with self._place(table):
            if demand.on_stale is OnStale.WAIT:
                await settling.wait(until_s)
            elif settling.routes is not None:
                await self.look(
                    settling.routes, settling.had.unmet, timeout_s=LOOK_TIMEOUT_S, on_reply=settling.replied
                )
        return settling

    def routes(self, table: str) -> Routes | None:
        return self._routes_of(table)

    async def ask(
        self, routes: Routes, server: str, wanted: tuple[WantedMark, ...], timeout_ms: int
    ) -> WatermarksReply:
        """As soon as all of them are reached, or after the time. Raises CremantError."""
        return await self._ask(routes, server, wanted, timeout_ms, REPLY_GRACE_S)

    @contextlib.contextmanager
    def _place(self, table: str) -> Iterator[None]:
        limit = BROKER_QUERIES_AWAITING_ROWS_MAX
        if self.waiting.total() >= limit or self.waiting[table] >= limit // 2:
            raise QueryError(
                QueryCode.TOO_MANY_REQUESTS,
                f"TooManyRequestsError: {self.waiting.total()} queries wait here for their data to be fresh, "
                f"{self.waiting[table]} of them for table {table}; at most {limit} do, {limit // 2} of a table",
                hint="try again in a moment, demand less, or SET onStale = 'partial'",
            )
        self.waiting[table] += 1
        try:
            yield
        finally:
            self.waiting[table] -= 1
            if not self.waiting[table]:
                del self.waiting[table]


class Settling:
    """One query's demand, until it is met. `had` is what there is of it."""

    def __init__(self, marks: Marks, table: str, demand: Demand, margin_ms: float) -> None:
        self.had: Settled = NOTHING_SETTLED
        self.routes: Routes | None = None
        self.waited_ms = 0.0
        #: Server -> why it does not say how far it is.
        self.causes: dict[str, str] = {}
        self._marks = marks
        self._table = table
        self._demand = demand
        self._margin_ms = margin_ms
        self._news = asyncio.Event()

    def _least_ms(self) -> int:
        return self._demand.least_ms(int(time.time() * 1000 + self._margin_ms) + 1)

    def look(self) -> None:
        routes = self.routes = self._marks.routes(self._table)
        if routes is None:
            return
        rewinds = routes.table.pipeline_record.rewinds if routes.table.record.config.upsert is not None else ()
        self.had = settled(self._demand, self._marks.of(routes), routes.replicas, self._least_ms(), rewinds)

    def replied(self, server: str, reply: WatermarksReply | str) -> bool:
        """Whether no other server need be asked."""
        if isinstance(reply, str):
            self.causes[server] = reply
        self.look()
        return not self.had.unmet

    async def wait(self, until_s: float) -> None:
        """Returns when it is met, or the time is over."""
        began_s = time.monotonic()
        tasks: dict[str, asyncio.Task[None]] = {}
        try:
            while self.had.unmet and (left_s := until_s - time.monotonic()) > 0:
                for server in self._servers() - tasks.keys():
                    tasks[server] = asyncio.get_running_loop().create_task(self._follow(server, until_s))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, VIEW_EVERY_S)):
                        await self._news.wait()
                self._news.clear()
                self.look()
        finally:
            for task in tasks.values():
                task.cancel()
            self.waited_ms += (time.monotonic() - began_s) * 1000

    def _servers(self) -> set[str]:
        routes = self.routes
        return (
            set() if routes is None else {one for number in self.had.unmet for one in routes.replicas.get(number, ())}
        )

    async def _follow(self, server: str, until_s: float) -> None:
        """Asks a server again and again, until cancelled."""
        backoff, wait_ms = Backoff(RETRY_FIRST_MS, RETRY_MAX_MS), WAIT_FIRST_MS
        while True:
            left_ms = int((until_s - time.monotonic()) * 1000)
            routes = self.routes
            if routes is None or server not in self._servers() or left_ms <= 0:
                await asyncio.sleep(VIEW_EVERY_S)
                continue
            least_ms = self._least_ms()
            wanted = tuple(
                WantedMark(partition=number, offset=self._demand.rows.get(number, 0), fresh_ms=least_ms)
                for number in _replicated(routes, server, self.had.unmet)
            )
            try:
                await self._marks.ask(routes, server, wanted, min(left_ms, wait_ms))
            except CremantError as error:
                self.causes[server] = str(error)
                await asyncio.sleep(backoff.next_ms() / 1000)
                continue
            backoff.reset()
            self.causes.pop(server, None)
            wait_ms = min(2 * wait_ms, WAIT_MAX_MS)
            self._news.set()
            await asyncio.sleep(ASK_PAUSE_S)

    def reasons(self) -> Mapping[int, str]:
        """Unmet partition -> why nobody shows more of it, as far as this broker knows."""
        if self.routes is None:
            return {}
        return {number: text for number in self.had.unmet if (text := _reason(self.routes, number, self.causes))}


def _reason(routes: Routes, partition: int, causes: Mapping[str, str]) -> str:
    if partition not in routes.replicas:
        return f"table {routes.table.name} has no such partition"
    servers = routes.replicas[partition]
    if not servers:
        return "no server that has it is alive"
    said = [f"{server}: {causes[server]}" for server in servers if server in causes]
    return "; ".join(said) or _paused(routes.table)


def _paused(table: TableView) -> str:
    return "the table is paused" if table.record.paused else ""


def _replicated(routes: Routes, server: str, partitions: Collection[int] | None) -> list[int]:
    """Those of the partitions that `server` replicates."""
    return [
        partition
        for partition, servers in routes.replicas.items()
        if server in servers and (partitions is None or partition in partitions)
    ]
