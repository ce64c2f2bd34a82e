# SPDX-License-Identifier: Apache-2.0
"""Carries out a Gather: sends requests to servers, reads their Arrow answers, keeps time. Decides nothing itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import pyarrow as pa

from cremant.broker.peers import Peers
from cremant.cluster.gather import (
    Answered,
    Done,
    Effect,
    Event,
    Failed,
    Gather,
    Refresh,
    Refreshed,
    Send,
    Started,
    Wake,
    Woke,
)
from cremant.model.cluster import ClusterView
from cremant.model.errors import CremantError, PeerError
from cremant.shell.logs import CAUSE_HEADER, current_cause
from cremant.sql.plan import Plan
from cremant.wire.codec import decode, encode
from cremant.wire.messages import ServerAnswer, ServerQuery

QUERY_PATH = "/internal/v1/query"
_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class Errand:
    """What every server is asked, but for its parts."""

    request_id: str
    plan: Plan
    table: str
    incarnation: str


async def scatter(gather: Gather, errand: Errand, peers: Peers, newest_view: Callable[[], ClusterView | None]) -> None:
    """Runs `gather` to its end (at its deadline at the latest). Cancelling it closes what is under way."""
    events: asyncio.Queue[Event] = asyncio.Queue()
    tasks: set[asyncio.Task[None]] = set()
    timers: list[asyncio.TimerHandle] = []
    loop = asyncio.get_running_loop()

    def wake_at(at_ms: float) -> None:
        """Timers of event loops may fire a moment early; a machine that is woken early would sleep on for ever."""
        left_ms = at_ms - now_ms()
        if left_ms <= 0:
            events.put_nowait(Woke())
        else:
            timers.append(loop.call_later(left_ms / 1000, wake_at, at_ms))

    def perform(effect: Effect) -> None:
        match effect:
            case Send():
                task = loop.create_task(_send(effect, errand, peers, events))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            case Wake(at_ms):
                wake_at(at_ms)
            case Refresh(at_ms):
                delay_s = max(0.0, (at_ms - now_ms()) / 1000)
                timers.append(loop.call_later(delay_s, _refresh, gather, newest_view, events))
            case Done():
                pass
            case _:
                assert_never(effect)

    try:
        event: Event = Started()
        while True:
            for effect in gather.step(event, now_ms()):
                perform(effect)
            if gather.done:
                return
            event = await events.get()
    finally:
        for timer in timers:
            timer.cancel()
        for task in tasks:
            task.cancel()


def now_ms() -> float:
    """Monotonic milliseconds, the clock of gathers."""
    return time.monotonic() * 1000


def _refresh(gather: Gather, newest_view: Callable[[], ClusterView | None], events: asyncio.Queue[Event]) -> None:
    events.put_nowait(Refreshed(newest_view() or gather.view))


async def _send(effect: Send, errand: Errand, peers: Peers, events: asyncio.Queue[Event]) -> None:
    """Every request ends in exactly one event."""
    query = ServerQuery(
        request_id=errand.request_id,
        cause_id=current_cause(),
        table=errand.table,
        incarnation=errand.incarnation,
        sql=errand.plan.server_sql,
        columns=errand.plan.columns,
        segments=effect.ask.segments,
        tails=effect.ask.tails,
        prune=errand.plan.prune,
        budget_ms=effect.budget_ms,
    )
    headers = {CAUSE_HEADER: query.cause_id} if query.cause_id else {}
    try:
        body = await peers.post(
            effect.ask.url, QUERY_PATH, encode(query), headers=headers, timeout_s=effect.budget_ms / 1000 + 0.05
        )
        answer, table = unpack(body)
    except CremantError as error:
        events.put_nowait(Failed(effect.ask_id, str(error)))
        return
    events.put_nowait(Answered(effect.ask_id, answer, table))


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
    except pa.ArrowException as error:
        raise PeerError(f"the rows of {answer.instance} are not an Arrow stream: {error}") from error
