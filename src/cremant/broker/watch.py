# SPDX-License-Identifier: Apache-2.0
"""How fresh a table is, as a broker sees it: its servers are asked just now, and the controller for what the pipeline
last said and where the stream ends. Also the answer to EXPLAIN FRESHNESS FOR.

Rule: who does not answer in time is named; nothing is guessed in its place.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from urllib.parse import quote

import msgspec
import pyarrow as pa

from cremant.broker.marks import Marks
from cremant.broker.peers import Peers
from cremant.cluster.freshness import Observed, badness, freshness_of_table
from cremant.cluster.moves import Moves
from cremant.cluster.routing import Routes
from cremant.model.cluster import TailReport
from cremant.model.errors import CremantError
from cremant.sql.plan import Plan
from cremant.wire.codec import decode
from cremant.wire.freshness import PartitionFreshness, TableFreshness, Upstream
from cremant.wire.watermarks import WatermarksReply

#: Whoever asks wants to know within two seconds.
SERVERS_TIMEOUT_S = 1.5
#: The controller asks the stream where it ends, for one second.
CONTROLLER_TIMEOUT_S = 1.8


class Watch:
    """Used from one event loop. `controller_url`: None = there is no controller to ask."""

    def __init__(self, marks: Marks, peers: Peers, broker_id: str, controller_url: str | None) -> None:
        self._marks, self._peers, self._broker_id = marks, peers, broker_id
        self._controller_url = controller_url.rstrip("/") if controller_url is not None else None
        self._moves = Moves()
        #: Incarnation -> what is being found out now.
        self._looks: dict[str, asyncio.Future[TableFreshness]] = {}

    async def look(self, routes: Routes) -> TableFreshness:
        """Whoever asks while it is being found out for somebody else gets the same: dashboards that ask all the time
        cost servers one request at a time."""
        key = routes.table.record.incarnation
        if (found := self._looks.get(key)) is None:
            found = self._looks[key] = asyncio.ensure_future(self._look(routes))
            found.add_done_callback(lambda _: self._looks.pop(key))
        return await asyncio.shield(found)

    async def _look(self, routes: Routes) -> TableFreshness:
        table = routes.table
        incarnation = table.record.incarnation
        said, upstream = await asyncio.gather(
            self._marks.look(routes, timeout_s=SERVERS_TIMEOUT_S), self._upstream(routes)
        )
        now_ms = time.time_ns() // 1_000_000
        tails: dict[int, dict[str, TailReport]] = {int(p): dict(known) for p, known in table.tails.items()}
        replies = {server: reply for server, reply in said.items() if isinstance(reply, WatermarksReply)}
        serving = set()
        for server, reply in replies.items():
            for tail in reply.tails:
                tails.setdefault(tail.partition, {})[server] = tail
                serving.add((tail.partition, server))
        self._moves.keep({one.record.incarnation for one in routes.view.tables.values()})
        return freshness_of_table(
            Observed(
                table=table,
                now_ms=now_ms,
                tails=tails,
                responding=frozenset(replies),
                serving=serving,
                live=frozenset(routes.urls),
                upstream=upstream,
                ends_read_ms=now_ms,
                moved_ms=self._moves.look(incarnation, tails, now_ms),
                observer=self._broker_id,
            )
        )

    async def _upstream(self, routes: Routes) -> Upstream | None:
        """None: nobody could say."""
        if self._controller_url is None:
            return None
        path = f"/internal/v1/freshness/{quote(routes.table.name, safe='')}"
        try:
            body = await self._peers.get(self._controller_url, path, timeout_s=CONTROLLER_TIMEOUT_S)
            found = decode(body, Upstream)
        except CremantError:
            return None
        return found if found.incarnation == routes.table.record.incarnation else None


def explained(found: TableFreshness, needed: Collection[int]) -> pa.Table:
    """Rows of EXPLAIN FRESHNESS (columns: sql/explain.py): one for the whole, then per partition that the query needs
    one for each stage its lag is spent in; what holds back most comes first. LagMs null: not known."""
    partitions = sorted((one for one in found.partitions if one.partition in needed), key=badness, reverse=True)
    rows: list[tuple[int, str | None, str, int | None, str, str | None]] = []
    if partitions:
        worst = partitions[0]
        rows.append((worst.partition, worst.replica, "TOTAL", worst.freshness_lag_ms, worst.state, _whole(worst)))
    for one in partitions:
        rows += _stages(one)
    names = ("partition", "replica", "stage", "lag", "state", "reason")
    kinds = (pa.int32(), pa.string(), pa.string(), pa.int64(), pa.string(), pa.string())
    columns = zip(*rows, strict=True) if rows else ((),) * len(names)
    return pa.table({n: pa.array(list(c), kind) for n, c, kind in zip(names, columns, kinds, strict=True)})


def _whole(worst: PartitionFreshness) -> str:
    if worst.freshness_lag_ms is None:
        return f"unknown how fresh: {worst.reason}"
    held = f"mostly {worst.held_back_by}: {worst.reason}" if worst.held_back_by is not None else "nothing holds it back"
    return f"fresh as of {worst.freshness_lag_ms} ms ago; {held}"


def _stages(one: PartitionFreshness) -> list[tuple[int, str | None, str, int | None, str, str | None]]:
    if one.stages_ms is None:
        return [(one.partition, one.replica, one.held_back_by or "unknown", None, one.state, one.reason)]
    shares: dict[str, int] = msgspec.structs.asdict(one.stages_ms)
    spent = sorted(((ms, stage) for stage, ms in shares.items() if ms > 0), reverse=True)
    return [
        (one.partition, one.replica, stage, ms, one.state, one.reason if stage == one.held_back_by else None)
        for ms, stage in spent
    ]


def needed_partitions(routes: Routes, plan: Plan) -> set[int]:
    """Whose consuming rows the query reads."""
    return {part.partition for part in routes.parts(plan.prune).needed if not part.segment}
