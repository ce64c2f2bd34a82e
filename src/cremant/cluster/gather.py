# SPDX-License-Identifier: Apache-2.0
"""Gather: asks servers for all parts of a query, asks others where that fails, and ends with a truthful answer. Pure.

Rules:

- A part is *settled* by exactly one answer. What a server says it could not serve is not settled by it; an answer that
  comes after its request was given up is dropped. So no row is counted twice, and a complete answer misses none.
- A part that failed is asked of another replica. If there is none, the newest view is looked at, once per query, and
  servers that were merely behind may be asked again after RETRY_PAUSE_MS.
- A server that does not answer within PATIENCE of the time left is given up if another replica could answer.
- An error of the query itself (too little memory, cannot be computed) is not retried: it would fail again.
- At the deadline whatever is missing is named: 427 for silent servers, 305 for parts nobody could serve.

    step(event, now_ms) -> effects      events: Started Answered Failed Woke Refreshed
                                        effects: Send Wake Refresh Done
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, assert_never

from cremant.cluster.routing import Ask, Part, assign, renewed
from cremant.model.cluster import ClusterView, TableView
from cremant.model.query_codes import QueryCode
from cremant.wire.messages import ServerAnswer

#: Share of the time left that a server gets while another replica could answer instead.
PATIENCE = 0.5
#: A server that is behind is usually a block away from the requested offset.
RETRY_PAUSE_MS = 50
#: Servers stop themselves this long before the broker gives up, so that their own error arrives.
MARGIN_MS = 10

#: Errors of a server that another server need not have.
_RETRIED = frozenset(
    {
        QueryCode.SERVER_TABLE_MISSING, QueryCode.SERVER_SEGMENT_MISSING, QueryCode.SERVER_SHUTTING_DOWN,
        QueryCode.SERVER_OUT_OF_CAPACITY, QueryCode.QUERY_SCHEDULING_TIMEOUT,
    }
)  # fmt: skip


# --- events ---


@dataclass(frozen=True, slots=True)
class Started:
    pass


@dataclass(frozen=True, slots=True)
class Answered:
    """`payload` is the driver's: the rows that go with `answer`."""

    ask_id: int
    answer: ServerAnswer
    payload: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed: no connection, or nonsense came back."""

    ask_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Woke:
    pass


@dataclass(frozen=True, slots=True)
class Refreshed:
    """The newest view there is (maybe the same)."""

    view: ClusterView


Event: TypeAlias = Started | Answered | Failed | Woke | Refreshed


# --- effects ---


@dataclass(frozen=True, slots=True)
class Send:
    """Answered or Failed with `ask_id` follows, unless the gather is done before."""

    ask_id: int
    ask: Ask
    budget_ms: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Woke at `at_ms`."""

    at_ms: float


@dataclass(frozen=True, slots=True)
class Refresh:
    """Refreshed with the newest view, at `at_ms` or later."""

    at_ms: float


@dataclass(frozen=True, slots=True)
class Done:
    pass


Effect: TypeAlias = Send | Wake | Refresh | Done


@dataclass(frozen=True, slots=True)
class QueryException:
    code: int
    message: str


@dataclass(slots=True)
class _Pending:
    ask: Ask
    #: When it is given up for the sake of another replica; None: never before the deadline.
    patience_until_ms: float | None


@dataclass(slots=True)
class Gather:
    """One query's. `parts` are those of `table` in `view`. Fields below `settled` are results, read after Done."""

    view: ClusterView
    table: TableView
    parts: tuple[Part, ...]
    deadline_ms: float
    suspects: Collection[str] = ()

    answers: list[tuple[ServerAnswer, Any]] = field(default_factory=list)
    exceptions: list[QueryException] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    responded: set[str] = field(default_factory=set)
    #: Servers that failed a request (not merely behind): the next query should rather ask others.
    unresponsive: set[str] = field(default_factory=set)
    done: bool = False

    _open: set[Part] = field(default_factory=set)
    _pending: dict[int, _Pending] = field(default_factory=dict)
    _avoid: dict[Part, set[str]] = field(default_factory=dict)
    _next_id: int = 0
    _refreshed: bool = False
    _refreshing: bool = False
    _stuck: set[Part] = field(default_factory=set)

    def step(self, event: Event, now_ms: float) -> list[Effect]:
        if self.done:
            return []
        match event:
            case Started():
                self._open = set(self.parts)
                effects = [Wake(self.deadline_ms), *self._send(self.parts, now_ms)]
            case Answered(ask_id, answer, payload):
                effects = self._on_answer(ask_id, answer, payload, now_ms)
            case Failed(ask_id, reason):
                effects = self._on_failure(ask_id, reason, now_ms)
            case Woke():
                effects = self._on_time(now_ms)
            case Refreshed(view):
                effects = self._on_view(view, now_ms)
            case _:
                assert_never(event)
        return [*effects, *self._finish(now_ms)]

    def _send(self, parts: Iterable[Part], now_ms: float) -> list[Effect]:
        assignment = assign(self.view, self.table, sorted(parts), avoid=self._avoid, suspects=self.suspects)
        effects: list[Effect] = []
        left_ms = self.deadline_ms - now_ms
        for ask in assignment.asks:
            elsewhere = assign(
                self.view, self.table, ask.parts, avoid={part: self._avoided(part) | {ask.server} for part in ask.parts}
            )
            patience_until_ms = None if elsewhere.unassigned else now_ms + left_ms * PATIENCE
            self._pending[self._next_id] = _Pending(ask, patience_until_ms)
            self.asked.add(ask.server)
            effects.append(Send(self._next_id, ask, max(1, int(left_ms) - MARGIN_MS)))
            if patience_until_ms is not None:
                effects.append(Wake(patience_until_ms))
            self._next_id += 1
        return [*effects, *self._on_unassigned(assignment.unassigned, now_ms)]

    def _avoided(self, part: Part) -> set[str]:
        return self._avoid.get(part, set())

    def _on_unassigned(self, parts: Iterable[Part], now_ms: float) -> list[Effect]:
        """Nobody left to ask on this view: look at the newest one, once."""
        self._stuck.update(parts)
        if not self._stuck or self._refreshed or self._refreshing:
            return []
        self._refreshing = True
        return [Refresh(now_ms + RETRY_PAUSE_MS)]

    def _on_view(self, view: ClusterView, now_ms: float) -> list[Effect]:
        self._refreshing, self._refreshed = False, True
        stuck, self._stuck = self._stuck, set()
        self.view = view
        table = view.tables.get(self.table.name)
        if table is None or table.record.incarnation != self.table.record.incarnation:
            self._stuck = stuck
            return []
        self.table = table
        parts = renewed(stuck, table)
        self._open = (self._open - stuck) | set(parts)
        for part in stuck:
            self._avoid.pop(part, None)
        for part in parts:
            self._avoid[part] = set(self.unresponsive)
        return self._send(parts, now_ms)

    def _on_answer(self, ask_id: int, answer: ServerAnswer, payload: Any, now_ms: float) -> list[Effect]:
        pending = self._pending.pop(ask_id, None)
        if pending is None:
            return []  # given up before
        ask = pending.ask
        self.responded.add(ask.server)
        if answer.error_code:
            if answer.error_code in _RETRIED:
                return self._retry(ask.parts, ask.server, now_ms)
            self.exceptions.append(QueryException(answer.error_code, answer.error))
            self._open -= set(ask.parts)
            return []
        missing, behind = set(answer.missing_segments), set(answer.behind_partitions)
        failed = [part for part in ask.parts if (part.segment in missing if part.segment else part.partition in behind)]
        self._open -= set(ask.parts) - set(failed)
        self.answers.append((answer, payload))
        return self._retry(failed, ask.server, now_ms)

    def _on_failure(self, ask_id: int, reason: str, now_ms: float) -> list[Effect]:
        pending = self._pending.pop(ask_id, None)
        if pending is None:
            return []
        self.unresponsive.add(pending.ask.server)
        return self._retry(pending.ask.parts, pending.ask.server, now_ms)

    def _retry(self, parts: Iterable[Part], server: str, now_ms: float) -> list[Effect]:
        again = list(parts)
        for part in again:
            self._avoid.setdefault(part, set()).add(server)
        return self._send(again, now_ms) if again else []

    def _on_time(self, now_ms: float) -> list[Effect]:
        if now_ms >= self.deadline_ms:
            return []  # _finish says what is missing
        effects: list[Effect] = []
        for ask_id, pending in list(self._pending.items()):
            if pending.patience_until_ms is not None and now_ms >= pending.patience_until_ms:
                effects += self._on_failure(ask_id, "no answer in time", now_ms)
        return effects

    def _finish(self, now_ms: float) -> list[Effect]:
        waiting = bool(self._pending) or self._refreshing
        if waiting and now_ms < self.deadline_ms:
            return []
        self.done = True
        silent = {pending.ask.server for pending in self._pending.values()}
        silent |= {server for part in self._open for server in self._avoided(part) & self.unresponsive}
        if silent:
            names = ", ".join(sorted(silent))
            message = f"{len(silent)} servers [{names}] not responded"
            self.exceptions.append(QueryException(QueryCode.SERVER_NOT_RESPONDING, message))
        pending_parts = {part for pending in self._pending.values() for part in pending.ask.parts}
        unserved = sorted(self._open - pending_parts)
        if unserved:
            self.exceptions.append(QueryException(QueryCode.BROKER_SEGMENT_UNAVAILABLE, self._unavailable(unserved)))
        # A server that failed, but whose parts others served, is not part of this answer.
        self.asked = self.responded | silent
        self.responded -= silent
        return [Done()]

    def _unavailable(self, parts: list[Part]) -> str:
        names = {view.record.partition: view.consuming.name for view in self.table.partitions}
        listed = [part.segment or names.get(part.partition, f"partition {part.partition}") for part in parts]
        shown = ", ".join(listed[:10]) + (", ..." if len(listed) > 10 else "")
        return f"{len(listed)} segments unavailable: [{shown}]"
