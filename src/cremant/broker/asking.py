# SPDX-License-Identifier: Apache-2.0
"""What of a query goes to servers: by routes of the newest view, at one cut for all servers of an upsert table, by one
Gather at a time. What comes back is remembered: how far replicas have shown their partitions (marks.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

from cremant.broker.demand import NOTHING_SETTLED, Settled
from cremant.broker.epochs import Epochs
from cremant.broker.freshness import empty_until, freshness_of
from cremant.broker.marks import Marks
from cremant.broker.options import as_of_epoch, wishes_of
from cremant.broker.response import BrokerResponse
from cremant.broker.room import Room
from cremant.broker.scatter import Errand, Network
from cremant.cluster.gather import Gather
from cremant.cluster.gather_messages import QueryException
from cremant.cluster.routing import Routes, Wishes
from cremant.model.cluster import ClusterView
from cremant.model.query_codes import QueryCode
from cremant.shell.backoff import Backoff
from cremant.sql.plan import Plan

#: Cuts that a query of an upsert table tries, another one if servers have let go of the one before meanwhile; and the
#: pause between two, which grows: after a rewind servers and brokers hear of it within some tens of ms.
_CUTS_MAX = 6
_CUT_PAUSE_MS, _CUT_PAUSE_MAX_MS = 20, 200


@dataclass(frozen=True, slots=True)
class Errands:
    """One try of a query: until when, in how much room, and what was settled of its demand before."""

    plan: Plan
    deadline_s: float
    room: Room
    settled: Settled = NOTHING_SETTLED


class Asking:
    """Used from one event loop. `view` gives the newest view."""

    def __init__(self, view: Callable[[], ClusterView | None]) -> None:
        self.view = view
        self.network = Network(view)
        self.epochs = Epochs(self.network.peers)
        self.marks = Marks(self.network.peers, self.newest_routes)
        self._routes: dict[str, Routes] = {}

    def close(self) -> None:
        self.epochs.close()
        self.network.close()

    def routes(self, table: str) -> Routes:
        """Of the newest view, made once per view."""
        view = self.view()
        assert view is not None
        known = self._routes.get(table)
        if known is None or known.view is not view:
            self._routes = {name: routes for name, routes in self._routes.items() if routes.view is view}
            known = self._routes[table] = Routes(view, view.tables[table])
        return known

    def newest_routes(self, table: str) -> Routes | None:
        view = self.view()
        return self.routes(table) if view is not None and table in view.tables else None

    async def ask(self, routes: Routes, errands: Errands, response: BrokerResponse) -> Gather:
        """Fills in what the response says of servers and freshness; its rows are in the gather's answers."""
        gather = await self._scatter(routes, errands, response)
        response.exceptions += gather.exceptions
        response.servers_queried, response.servers_responded = len(gather.asked), len(gather.responded)
        response.answers = [answer for answer, _ in gather.answers]
        table = routes.table
        is_old = as_of_epoch(errands.plan.options) is not None
        cut = None if gather.chosen is None else gather.chosen.epoch
        chosen, views = gather.chosen, table.partitions
        expected = len(views) if chosen is None else chosen.count(len(views))
        later = [view for view in views if chosen is not None and chosen.ignores(view.record.partition)]
        response.freshness = freshness_of(
            response.answers, table.record, expected, gather.wishes.floors, cut, errands.settled.marks,
            {part.partition for part in gather.unsettled}, empty_until(later, self.marks.of(routes)),
        )  # fmt: skip
        for answer, arrival in gather.answers:
            if not is_old:
                self.marks.answered(routes, arrival.server, answer, arrival.round_trip_ms)
        if not is_old:
            fresh_ms = response.freshness.fresh_ms
            self.marks.look_soon(routes, None if fresh_ms is None else int(time.time() * 1000) - fresh_ms)
        return gather

    async def _scatter(self, routes: Routes, errands: Errands, response: BrokerResponse) -> Gather:
        """Of an upsert table anew, with a new cut and the newest view, if nobody knows the first cut any more, or if
        the view lacks partitions that the table had there (E-7)."""
        plan, deadline_s = errands.plan, errands.deadline_s
        record = routes.table.record
        is_upsert = record.config.upsert is not None
        if is_upsert:
            await self.epochs.begin(routes, deadline_s)
        pauses = Backoff(_CUT_PAUSE_MS, _CUT_PAUSE_MAX_MS)
        for left in reversed(range(_CUTS_MAX)):
            pause_s = pauses.next_ms() / 1000
            wishes = self._wishes(routes, errands)
            parts = routes.parts(plan.prune)
            response.tables, response.pruned_by_broker = (routes.table.name,), parts.pruned
            shape = shape_of(plan)
            gather = self._new_gather(routes, parts.needed, deadline_s, wishes, shape)
            if is_upsert:
                gather.marks = self.epochs.marks(routes.table, plan.options, errands.settled.epoch)
            gather.may_restart = is_upsert and left > 0 and as_of_epoch(plan.options) is None
            if parts.needed:
                errand = Errand(response.request_id, plan, routes.table.name, record.incarnation, shape, errands.room)
                await self.network.scatter(gather, errand)
            lacks = gather.chosen is not None and self.epochs.low.lacks(
                record.incarnation, gather.chosen, len(routes.table.partitions)
            )
            if not (gather.stale or lacks) or time.monotonic() + pause_s >= deadline_s:
                break
            errands.room.give_back()  # what came is not used
            await asyncio.sleep(pause_s)
            if (newest := self.newest_routes(routes.table.name)) is None:
                break
            routes = newest
        if lacks:
            text = f"this broker has not heard yet of all partitions that table {record.config.name} has by now"
            gather.exceptions.append(QueryException(QueryCode.BROKER_SEGMENT_UNAVAILABLE, text))
        elif gather.chosen is not None and gather.answers and as_of_epoch(plan.options) is None:
            self.epochs.low.answered(record.incarnation, gather.chosen)
        return gather

    def _wishes(self, routes: Routes, errands: Errands) -> Wishes:
        shown = self.marks.of(routes)
        wishes = wishes_of(errands.plan.options, routes.table, shown.offsets)
        if routes.table.record.config.upsert is not None:
            timely = self.epochs.low.timely(routes.table.record.incarnation)
            return replace(wishes, timely=timely, late=shown.late)
        if not errands.settled.marks:
            return replace(wishes, late=shown.late) if shown.late else wishes
        floors = errands.settled.floors
        for partition, floor in wishes.floors.items():
            floors[partition] = max(floor, floors.get(partition, 0))
        return replace(wishes, floors=floors, known=shown.offsets, late=shown.late)

    def _new_gather(
        self, routes: Routes, parts: tuple[Any, ...], deadline_s: float, wishes: Wishes, shape: Hashable
    ) -> Gather:
        now_ms, loads = time.monotonic() * 1000, self.network.loads
        return Gather(
            routes, parts, deadline_s * 1000, suspects=loads.suspects(now_ms), loads=loads.of(routes.urls, now_ms),
            wishes=wishes, hedge_after_ms=loads.hedge_after_ms(shape),
            may_hedge=lambda: loads.may_hedge(len(routes.urls)),
        )  # fmt: skip


def shape_of(plan: Plan) -> Hashable:
    """What queries of similar cost have in common: literals differ."""
    terms = tuple((term.column, term.op) for term in plan.prune)
    return (plan.table, plan.shape, plan.columns, len(plan.result), terms)
