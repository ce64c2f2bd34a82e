# SPDX-License-Identifier: Apache-2.0
"""POST /internal/v1/watermarks: how far partitions are visible here, now or as soon as they are far enough.

Rules: a demand that waits holds no thread, has a deadline, and ends when whoever asked is gone or the process stops.
Only so many wait. A partition that has not caught up, stopped, or is not here is not in the reply; it is waited for all
the same, since it may come, or come anew after a reset.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from cremant.model.cluster import TailReport
from cremant.model.errors import Unavailable
from cremant.model.limits import MIB
from cremant.server.partition import Partition
from cremant.server.reports import tail_report
from cremant.server.table import HostedTable
from cremant.shell.app import read_body
from cremant.shell.member import Member
from cremant.wire.codec import decode, encode
from cremant.wire.watermarks import WantedMark, WatermarksReply, WatermarksRequest

#: Longer waits are cut to this.
WAIT_S_MAX = 60.0
#: Demands that wait at the same time.
DEMANDS_WAITING_MAX = 1_000
#: How often a partition that is not here (yet) is looked for.
LOOK_EVERY_S = 0.05


class Watermarks:
    """`tables` is shared with the host that reconciles them. Used from one event loop."""

    def __init__(self, tables: Mapping[str, HostedTable]) -> None:
        self._tables = tables
        self._waiting = 0

    async def settle(self, asked: WatermarksRequest) -> tuple[TailReport, ...]:
        """Returns once every wanted partition is as far as is wanted, or the time is over. Raises Unavailable when too
        many wait already."""
        ends_s = time.monotonic() + min(max(0, asked.timeout_ms) / 1000, WAIT_S_MAX)
        if not self._settled(asked) and asked.timeout_ms > 0:
            if self._waiting >= DEMANDS_WAITING_MAX:
                raise Unavailable(
                    f"{DEMANDS_WAITING_MAX} demands for freshness wait on this server already",
                    hint="ask again later, demand less, or let fewer clients wait at once",
                )
            self._waiting += 1
            try:
                await self._wait(asked, ends_s)
            finally:
                self._waiting -= 1
        found = (self._partition(asked, wanted) for wanted in asked.wanted)
        return tuple(tail_report(partition) for partition in found if partition is not None)

    async def _wait(self, asked: WatermarksRequest, ends_s: float) -> None:
        while (left_s := ends_s - time.monotonic()) > 0 and (lacking := self._lacking(asked)) is not None:
            partition = self._known(asked, lacking)
            if partition is not None:
                await partition.progress.wait(lacking.offset, left_s, fresh_ms=lacking.fresh_ms)
            if self._lacking(asked) is lacking:
                # Not here; or it has ended, however far it was, and another may take its place.
                await asyncio.sleep(min(LOOK_EVERY_S, max(0.0, ends_s - time.monotonic())))

    def _settled(self, asked: WatermarksRequest) -> bool:
        return self._lacking(asked) is None

    def _lacking(self, asked: WatermarksRequest) -> WantedMark | None:
        for wanted in asked.wanted:
            partition = self._partition(asked, wanted)
            if partition is None:
                return wanted
            seen = partition.visible
            if seen.next_offset < wanted.offset or (seen.freshness_ms or 0) < wanted.fresh_ms:
                return wanted
        return None

    def _partition(self, asked: WatermarksRequest, wanted: WantedMark) -> Partition | None:
        """One that serves queries."""
        partition = self._known(asked, wanted)
        return partition if partition is not None and not partition.behind else None

    def _known(self, asked: WatermarksRequest, wanted: WantedMark) -> Partition | None:
        table = self._tables.get(asked.table)
        if table is None or table.record.incarnation != asked.incarnation:
            return None
        return table.partitions.get(wanted.partition)


def watermark_routes(tables: Mapping[str, HostedTable], member: Member) -> list[BaseRoute]:
    watermarks = Watermarks(tables)

    async def ask(request: Request) -> Response:
        if member.fenced:
            raise Unavailable(f"{member.id} was taken over by another process")
        asked = decode(await read_body(request, MIB), WatermarksRequest)
        settling = asyncio.ensure_future(watermarks.settle(asked))
        stopping = asyncio.ensure_future(request.app.state.stopping.wait())
        leaving = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({settling, stopping, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done() and not settling.done():
                return Response(status_code=503)  # nobody reads it
            if not settling.done():
                raise Unavailable(f"{member.id} is being stopped")
            tails = settling.result()
        finally:
            for task in (settling, stopping, leaving):
                task.cancel()
        return Response(encode(WatermarksReply(instance=member.id, tails=tails)), media_type="application/json")

    return [Route("/internal/v1/watermarks", ask, methods=["POST"])]


async def _left(request: Request) -> None:
    """Returns when the client is gone: the body has been read, nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
