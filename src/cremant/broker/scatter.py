# SPDX-License-Identifier: Apache-2.0
"""Carries out a Gather: sends requests to servers, reads their Arrow answers, keeps time, tells servers to stop what
nobody waits for any more. Decides nothing itself."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import assert_never

import pyarrow as pa

from cremant.broker.peers import Peers
from cremant.broker.room import Room
from cremant.cluster.gather import Gather
from cremant.cluster.gather_messages import (
    Answered,
    Cancel,
    Done,
    Effect,
    Event,
    Failed,
    Probe,
    Refresh,
    Refreshed,
    Send,
    Started,
    Suspected,
    Wake,
    Woke,
)
from cremant.cluster.load import Loads
from cremant.cluster.parts import Ask
from cremant.model.cluster import ClusterView
from cremant.model.errors import CremantError, PeerError, QueryError
from cremant.model.limits import CANCELS_RUNNING_MAX
from cremant.shell.logs import CAUSE_HEADER, current_cause, log_event
from cremant.sql.plan import Plan
from cremant.wire.codec import decode, encode
from cremant.wire.messages import ServerAnswer, ServerQuery

_log = logging.getLogger(__name__)

QUERY_PATH = "/internal/v1/query"
_LENGTH_BYTES = 4
#: A server that does not take a cancel within this time is left to the deadline of the query.
_CANCEL_TIMEOUT_S = 1.0
LIVENESS_PATH = "/health/liveness"
#: A server whose event loop does not answer within this time hangs, or might as well.
_PROBE_TIMEOUT_S = 0.5


@dataclass(frozen=True, slots=True)
class Errand:
    """What every server is asked, but for its parts. `shape` is what queries of similar cost have in common."""

    request_id: str
    plan: Plan
    table: str
    incarnation: str
    shape: Hashable
    room: Room


@dataclass(frozen=True, slots=True)
class Arrival:
    """The payload of an answer."""

    server: str
    rows: pa.Table | None
    round_trip_ms: float


class Network:
    """What all queries of a broker share: connections, what is known of the servers' load, cancels under way."""

    def __init__(self, newest_view: Callable[[], ClusterView | None]) -> None:
        self.newest_view = newest_view
        self.peers = Peers()
        self.loads = Loads()
        self._running: set[Scatter] = set()
        self._cancels: set[asyncio.Task[int]] = set()
        self._probes: dict[str, asyncio.Task[None]] = {}

    def close(self) -> None:
        self.peers.close()

    async def scatter(self, gather: Gather, errand: Errand) -> None:
        """Runs `gather` to its end (at its deadline at the latest). Cancelling it stops what is under way."""
        scatter = Scatter(gather, errand, self)
        self._running.add(scatter)
        try:
            await scatter.run()
        finally:
            self._running.discard(scatter)
            scatter.stop()

    def asked(self, request_id: str) -> frozenset[str]:
        """URLs of the servers that are at work for a query."""
        return frozenset(
            under_way.ask.url
            for scatter in self._running
            if scatter.errand.request_id == request_id
            for under_way in scatter.under_way.values()
        )

    def suspect(self, server: str) -> None:
        """All queries that wait for `server` learn that it does not answer."""
        for scatter in self._running:
            scatter.events.put_nowait(Suspected(server))

    def cancel(self, ask: Ask, wire_id: str) -> None:
        """Tells the server, without waiting for it."""
        if len(self._cancels) >= CANCELS_RUNNING_MAX:
            return
        task = asyncio.get_running_loop().create_task(self._cancel(ask, wire_id))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    async def _cancel(self, ask: Ask, wire_id: str) -> int:
        try:
            path = f"{QUERY_PATH}/{wire_id}"
            return await self.peers.status("DELETE", ask.url, path, timeout_s=_CANCEL_TIMEOUT_S)
        except CremantError as error:
            log_event(
                _log, "cancel not taken", level=logging.DEBUG, server=ask.server, request_id=wire_id, error=str(error)
            )
            return 0

    def probe(self, ask: Ask) -> None:
        """Finds out whether the server is alive: one probe at a time for all who wait for it."""
        if ask.server not in self._probes:
            task = asyncio.get_running_loop().create_task(self._probe(ask))
            self._probes[ask.server] = task
            task.add_done_callback(lambda done: self._probes.pop(ask.server, None))

    async def _probe(self, ask: Ask) -> None:
        try:
            await self.peers.status("GET", ask.url, LIVENESS_PATH, timeout_s=_PROBE_TIMEOUT_S)
        except CremantError as error:
            log_event(_log, "server does not answer", level=logging.WARNING, server=ask.server, error=str(error))
            self.loads.suspect(ask.server, now_ms())
            self.suspect(ask.server)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    ask: Ask
    sent_ms: float
    task: asyncio.Task[None]


class Scatter:
    """One run of a Gather."""

    def __init__(self, gather: Gather, errand: Errand, network: Network) -> None:
        self.gather = gather
        self.errand = errand
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.under_way: dict[int, _UnderWay] = {}
        self._network = network
        self._timers: list[asyncio.TimerHandle] = []
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        event: Event = Started()
        while True:
            for effect in self.gather.step(event, now_ms()):
                self._perform(effect)
            if self.gather.done:
                return
            event = await self.events.get()

    def stop(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for ask_id in list(self.under_way):
            self._abandon(ask_id)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send(ask_id, ask):
                self._network.loads.sent(ask.server)
                task = self._loop.create_task(self._send(effect, now_ms()))
                self.under_way[ask_id] = _UnderWay(ask, now_ms(), task)
            case Cancel(ask_id, ask, lost):
                sent_ms = self._abandon(ask_id)
                if lost and sent_ms is not None and self._network.loads.lost(ask.server, sent_ms, now_ms()):
                    self._network.suspect(ask.server)
            case Probe(ask):
                self._network.probe(ask)
            case Wake(at_ms):
                self._wake_at(at_ms)
            case Refresh(at_ms):
                delay_s = max(0.0, (at_ms - now_ms()) / 1000)
                self._timers.append(self._loop.call_later(delay_s, self._refresh))
            case Done():
                pass
            case _:
                assert_never(effect)

    def _wake_at(self, at_ms: float) -> None:
        """Timers of event loops may fire a moment early; a machine that is woken early would sleep on for ever."""
        left_ms = at_ms - now_ms()
        if left_ms <= 0:
            self.events.put_nowait(Woke())
        else:
            self._timers.append(self._loop.call_later(left_ms / 1000, self._wake_at, at_ms))

    def _refresh(self) -> None:
        self.events.put_nowait(Refreshed(self._network.newest_view() or self.gather.routes.view))

    def _abandon(self, ask_id: int) -> float | None:
        """When the request was sent, if it was under way."""
        under_way = self.under_way.pop(ask_id, None)
        if under_way is None:
            return None
        under_way.task.cancel()
        self._network.loads.abandoned(under_way.ask.server, under_way.sent_ms, now_ms())
        self._network.cancel(under_way.ask, self._wire_id(ask_id))
        return under_way.sent_ms

    def _wire_id(self, ask_id: int) -> str:
        return f"{self.errand.request_id}-{ask_id}"

    async def _send(self, effect: Send, sent_ms: float) -> None:
        """Every request ends in exactly one event, unless it is abandoned."""
        ask, ask_id, loads = effect.ask, effect.ask_id, self._network.loads
        query_id = self._wire_id(ask_id)
        event: Event
        try:
            answer, rows = await self._ask(effect)
        except QueryError as error:  # refused for its size: another server's answer would be no smaller
            text = f"{ask.server}: {error}"
            event = Answered(ask_id, ServerAnswer(instance=ask.server, error_code=error.code, error=text), None)
            loads.answered(ask.server, sent_ms, now_ms())
        except CremantError as error:
            event = Failed(ask_id, str(error))
            loads.failed(ask.server, now_ms())
        except Exception as error:
            _log.exception("a request to a server failed on a bug", extra={"fields": {"request_id": query_id}})
            event = Failed(ask_id, f"internal error: {type(error).__name__}")
            loads.abandoned(ask.server, sent_ms, now_ms())
        else:
            took_ms = now_ms() - sent_ms
            event = Answered(ask_id, answer, Arrival(ask.server, rows, took_ms))
            loads.answered(ask.server, sent_ms, now_ms())
            if not answer.error_code:
                loads.took(self.errand.shape, took_ms)
        self.under_way.pop(ask_id, None)
        self.events.put_nowait(event)

    async def _ask(self, effect: Send) -> tuple[ServerAnswer, pa.Table | None]:
        errand, ask = self.errand, effect.ask
        query = ServerQuery(
            request_id=self._wire_id(effect.ask_id),
            cause_id=current_cause(),
            table=errand.table,
            incarnation=errand.incarnation,
            sql=errand.plan.server_sql,
            columns=errand.plan.columns,
            segments=ask.segments,
            tails=ask.tails(self.gather.wishes.floors),
            prune=errand.plan.prune,
            shortcut=errand.plan.shortcut,
            cut=self.gather.cut,
            budget_ms=effect.budget_ms,
        )
        headers = {CAUSE_HEADER: query.cause_id} if query.cause_id else {}
        body = await self._network.peers.post(
            ask.url, QUERY_PATH, encode(query), headers=headers, timeout_s=effect.budget_ms / 1000 + 0.05,
            make_room=errand.room.take,
        )  # fmt: skip
        return unpack(body)


def now_ms() -> float:
    """Monotonic milliseconds, the clock of gathers."""
    return time.monotonic() * 1000


def unpack(body: bytes) -> tuple[ServerAnswer, pa.Table | None]:
    """Header and rows of a server's answer. Raises PeerError if it is none."""
    length = int.from_bytes(body[:_LENGTH_BYTES], "big")
    rest = memoryview(body)[_LENGTH_BYTES:]
    if len(body) < _LENGTH_BYTES or len(rest) < length:
        raise PeerError(f"an answer of {len(body)} bytes is shorter than its header says")
    answer = decode(bytes(rest[:length]), ServerAnswer)
    rows = rest[length:]
    if answer.error_code or not len(rows):
        return answer, None
    try:
        with pa.ipc.open_stream(pa.py_buffer(rows)) as reader:
            return answer, reader.read_all()
    except (pa.ArrowException, OSError) as error:
        raise PeerError(f"the rows of {answer.instance} are not an Arrow stream: {error}") from error
