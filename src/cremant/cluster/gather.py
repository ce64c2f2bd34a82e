# SPDX-License-Identifier: Apache-2.0
"""Gather: asks servers for all parts of a query, asks others where that fails or takes long, and ends with a truthful
answer. Pure.

Rules:

- A part is *settled* by exactly one answer. What a server says it could not serve is not settled by it; an answer that
  comes after its request was given up is dropped. So no row is counted twice, and a complete answer misses none.
- A part that failed is asked of another replica. If there is none, the newest view is looked at, once per query, and
  servers that were merely behind may be asked again after RETRY_PAUSE_MS.
- A request that takes long gets *rivals*: the same parts, asked of other replicas. An answer cannot be cut to size, so
  the race is won by the request itself, or by its rivals once they have all of its parts between them; what rivals
  answered until then is held back. The loser is cancelled. Early rivals come out of a budget; without it the server is
  asked whether it is alive. Once it is suspected not to be, and after PATIENCE of the time left, they come in any case.
- An error of the query itself (too little memory, cannot be computed) is not retried: it would fail again.
- An answer whose rows end before a floor of the query (`notBefore`) settles nothing.
- All parts of an upsert table are asked at one cut, which is chosen with the first requests (lowwater.py) and never
  changes: a retry asks at the same epoch. If nobody knows that epoch any more the gather is *stale*: the whole query
  begins anew, with a new one.
- At the deadline whatever is missing is named: 427 for silent servers, 305 for parts nobody could serve.

    step(event, now_ms) -> effects      events: Started Answered Failed Woke Refreshed Suspected
                                        effects: Send Cancel Probe Wake Refresh Done
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, assert_never

from cremant.cluster.gather_messages import (
    Answered,
    Cancel,
    Done,
    Effect,
    Event,
    Failed,
    Probe,
    QueryException,
    Refresh,
    Refreshed,
    Send,
    Started,
    Suspected,
    Wake,
    Woke,
)
from cremant.cluster.gather_races import RETRIED, Held, Pending
from cremant.cluster.gather_words import lateness, silence, too_old, unavailable
from cremant.cluster.load import Load
from cremant.cluster.lowwater import Chosen, Marks
from cremant.cluster.parts import Ask, Part, renewed
from cremant.cluster.routing import NO_WISHES, Assignment, Routes, Wishes, assign
from cremant.model.cluster import ClusterView
from cremant.model.query_codes import QueryCode
from cremant.model.upsert import Cut
from cremant.wire.messages import ServerAnswer

#: Share of the time left after which another replica is asked in any case.
PATIENCE = 0.5
#: Without a rival, the next look at a request that takes long.
LOOK_AGAIN_MS = 1_000
#: A server that is behind is usually a block away from the requested offset.
RETRY_PAUSE_MS = 50
#: Servers stop themselves this long before the broker gives up, so that their own error arrives.
MARGIN_MS = 10


@dataclass(slots=True)
class Gather:
    """One query's. `parts` are of the table of `routes`. Fields from `answers` on are results, read after Done."""

    routes: Routes
    parts: tuple[Part, ...]
    deadline_ms: float
    suspects: frozenset[str] = frozenset()
    loads: Mapping[str, Load] = field(default_factory=dict)
    wishes: Wishes = NO_WISHES
    #: How long an answer usually takes at most; and whether the budget has room for one more request.
    hedge_after_ms: float = math.inf
    may_hedge: Callable[[], bool] = lambda: False
    #: Upsert tables: what is closed where, as known now. And whether the query may begin anew.
    marks: Callable[[], Marks] | None = None
    may_restart: bool = False

    answers: list[tuple[ServerAnswer, Any]] = field(default_factory=list)
    exceptions: list[QueryException] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    responded: set[str] = field(default_factory=set)
    done: bool = False
    #: The epoch of all requests, once the first was sent; None for ever on append tables.
    chosen: Chosen | None = None
    cut: Cut | None = None
    stale: bool = False
    #: Who answered what; and what nobody did.
    settled: list[tuple[str, frozenset[Part]]] = field(default_factory=list)
    unsettled: set[Part] = field(default_factory=set)

    _open: set[Part] = field(default_factory=set)
    _pending: dict[int, Pending] = field(default_factory=dict)
    _avoid: dict[Part, set[str]] = field(default_factory=dict)
    #: Servers that failed a request (not merely behind), and what was wrong with each server last.
    _unresponsive: set[str] = field(default_factory=set)
    _causes: dict[str, str] = field(default_factory=dict)
    _next_id: int = 0
    _refreshed: bool = False
    _refreshing: bool = False
    _stuck: set[Part] = field(default_factory=set)
    #: Parts of which a server does not know the cut any more, and the oldest epoch that may be asked of them.
    _refused: set[Part] = field(default_factory=set)
    _horizon: int = 0

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
            case Suspected(server):
                effects = self._on_suspect(server, now_ms)
            case _:
                assert_never(event)
        return [*effects, *self._finish(now_ms)]

    # --- asking ---

    def _send(self, parts: Iterable[Part], now_ms: float) -> list[Effect]:
        assignment = self._assign(sorted(parts), self._avoid)
        if self.marks is not None:
            assignment = self._at_cut(assignment, self.marks)
        effects: list[Effect] = []
        left_ms = self.deadline_ms - now_ms
        for ask in assignment.asks:
            pending = Pending(ask, patience_until_ms=now_ms + left_ms * PATIENCE)
            pending.hedge_at_ms = min(now_ms + self.hedge_after_ms, pending.patience_until_ms)
            effects += [self._start(pending, now_ms), Wake(pending.hedge_at_ms)]
        return [*effects, *self._on_unassigned(assignment.unassigned, now_ms)]

    def _at_cut(self, assignment: Assignment, known: Callable[[], Marks]) -> Assignment:
        """Without the partitions that the table did not have at the cut. Nothing can be asked before there is one."""
        if self.chosen is None and assignment.asks:
            marks = known()
            self.chosen = marks.choose((part.partition, ask.server) for ask in assignment.asks for part in ask.parts)
            if self.chosen is not None:
                self.cut = marks.cut(self.chosen)
        chosen = self.chosen
        if chosen is None:
            for ask in assignment.asks:
                self._causes[ask.server] = "has not said which epochs are closed"
                self._shun(ask.parts, ask.server)
            lost = [part for ask in assignment.asks for part in ask.parts]
            return Assignment((), (*assignment.unassigned, *lost))
        self._open = {part for part in self._open if not chosen.ignores(part.partition)}
        return assignment.without(chosen.ignores)

    def _assign(
        self, parts: Iterable[Part], avoid: Mapping[Part, Collection[str]], like: str | None = None
    ) -> Assignment:
        return assign(
            self.routes, parts, avoid=avoid, suspects=self.suspects, loads=self.loads, wishes=self.wishes, like=like
        )

    def _start(self, pending: Pending, now_ms: float) -> Send:
        ask_id = self._next_id
        self._next_id += 1
        self._pending[ask_id] = pending
        if pending.rival_of is not None:
            self._pending[pending.rival_of].rivals.add(ask_id)
        return Send(ask_id, pending.ask, max(1, int(self.deadline_ms - now_ms) - MARGIN_MS))

    def _on_unassigned(self, parts: Iterable[Part], now_ms: float) -> list[Effect]:
        """Nobody left to ask on this view: look at the newest one, once. For what is lost nobody need be waited for."""
        parts = list(parts)
        if self.may_restart and not self._refused.isdisjoint(parts):
            self.stale = True
            return []
        self._stuck.update(part for part in parts if self.routes.loss(part) is None)
        if not self._stuck or self._refreshed or self._refreshing:
            return []
        self._refreshing = True
        return [Refresh(now_ms + RETRY_PAUSE_MS)]

    def _on_view(self, view: ClusterView, now_ms: float) -> list[Effect]:
        self._refreshing, self._refreshed = False, True
        stuck, self._stuck = self._stuck, set()
        known = self.routes.table
        table = view.tables.get(known.name)
        if table is None or table.record.incarnation != known.record.incarnation:
            self._stuck = stuck
            return []
        self.routes = Routes(view, table)
        parts = renewed(stuck, table)
        self._open = (self._open - stuck) | set(parts)
        for part in stuck:
            self._avoid.pop(part, None)
        for part in parts:
            self._avoid[part] = set(self._unresponsive)
        return self._send(parts, now_ms)

    def _shun(self, parts: Iterable[Part], server: str) -> None:
        for part in parts:
            self._avoid.setdefault(part, set()).add(server)

    # --- races ---

    def _on_time(self, now_ms: float) -> list[Effect]:
        if now_ms >= self.deadline_ms:
            return []  # _finish says what is missing
        effects: list[Effect] = []
        for ask_id, pending in list(self._pending.items()):
            if pending.rival_of is None and now_ms >= pending.hedge_at_ms:
                effects += self._hedge(ask_id, pending, now_ms, forced=now_ms >= pending.patience_until_ms)
        return effects

    def _on_suspect(self, server: str, now_ms: float) -> list[Effect]:
        self.suspects |= {server}
        effects: list[Effect] = []
        for ask_id, pending in list(self._pending.items()):
            if pending.rival_of is None and pending.ask.server == server:
                effects += self._hedge(ask_id, pending, now_ms, forced=True)
        return effects

    def _hedge(self, ask_id: int, pending: Pending, now_ms: float, *, forced: bool) -> list[Effect]:
        """Early rivals must be able to win, and be as good; forced ones take over what they can."""
        server = pending.ask.server
        taken = {part for held in pending.held for part in held.parts}
        taken.update(part for rival in pending.rivals for part in self._pending[rival].ask.parts)
        parts = [part for part in pending.ask.parts if part not in taken]
        assignment = self._rivals_for(parts, server, like=None if forced else server)
        whole = bool(assignment.asks) and not assignment.unassigned
        if forced or (whole and self.may_hedge()):
            pending.hedge_at_ms = math.inf if forced else pending.patience_until_ms
            effects: list[Effect] = [self._start(Pending(ask, ask_id), now_ms) for ask in assignment.asks]
        else:
            pending.hedge_at_ms = min(now_ms + LOOK_AGAIN_MS, pending.patience_until_ms)
            effects = [Probe(pending.ask)]
        return effects if math.isinf(pending.hedge_at_ms) else [*effects, Wake(pending.hedge_at_ms)]

    def _rivals_for(self, parts: Iterable[Part], server: str, like: str | None = None) -> Assignment:
        return self._assign(parts, {part: self._avoided(part) | {server} for part in parts}, like)

    def _avoided(self, part: Part) -> set[str]:
        return self._avoid.get(part, set())

    def _on_rival(self, rival: Pending, held: Held | None, failed: Iterable[Part], now_ms: float) -> list[Effect]:
        """A rival has ended: `held` is what it answered, `failed` is to be asked of yet another replica."""
        owner_id = rival.rival_of
        assert owner_id is not None
        owner = self._pending[owner_id]
        if held is not None:
            owner.held.append(held)
        if not set(owner.ask.parts).difference(*(one.parts for one in owner.held)):
            del self._pending[owner_id]
            self._accept(owner.held)
            return [Cancel(owner_id, owner.ask, lost=True), *self._cancel(owner.rivals)]
        self._shun(failed, rival.ask.server)
        again = self._rivals_for(failed, owner.ask.server).asks
        return [self._start(Pending(ask, owner_id), now_ms) for ask in again]

    def _accept(self, held: Iterable[Held]) -> None:
        for one in held:
            self._open -= one.parts
            self.settled.append((one.server, one.parts))
            self.responded.add(one.server)
            self.answers.append((one.answer, one.payload))

    def _cancel(self, ask_ids: Iterable[int]) -> list[Effect]:
        return [Cancel(ask_id, self._pending.pop(ask_id).ask, lost=False) for ask_id in sorted(ask_ids)]

    def _fall_back(self, ended: Pending, missing: Collection[Part], now_ms: float) -> list[Effect]:
        """`ended` leaves `missing` open: what its rivals have or are at counts now, the rest is asked anew."""
        wanted = set(missing)
        self._shun(wanted, ended.ask.server)
        kept = [held for held in ended.held if held.parts <= wanted]
        self._accept(kept)
        wanted.difference_update(*(held.parts for held in kept))
        effects: list[Effect] = []
        for ask_id in sorted(ended.rivals):
            rival = self._pending[ask_id]
            if wanted.issuperset(rival.ask.parts):
                rival.rival_of = None
                rival.patience_until_ms = now_ms + (self.deadline_ms - now_ms) * PATIENCE
                rival.hedge_at_ms = rival.patience_until_ms
                effects.append(Wake(rival.hedge_at_ms))
                wanted.difference_update(rival.ask.parts)
            else:
                effects += self._cancel([ask_id])
        return [*effects, *(self._send(wanted, now_ms) if wanted else [])]

    # --- answers ---

    def _on_answer(self, ask_id: int, answer: ServerAnswer, payload: Any, now_ms: float) -> list[Effect]:
        pending = self._pop(ask_id)
        if pending is None:
            return []  # given up before, or a duplicate
        ask = pending.ask
        if answer.error_code and answer.error_code not in RETRIED and not self._waited_in_vain(ask, answer):
            if pending.rival_of is not None:
                return self._on_rival(pending, None, (), now_ms)
            self.responded.add(ask.server)
            self.exceptions.append(QueryException(answer.error_code, answer.error))
            self._open -= set(ask.parts)
            self.unsettled.update(ask.parts)
            return self._cancel(pending.rivals)
        failed = self._failed_parts(ask, answer)
        settled = frozenset(ask.parts).difference(failed)
        if pending.rival_of is not None:
            held = Held(ask.server, answer, payload, settled) if settled else None
            return self._on_rival(pending, held, failed, now_ms)
        if not answer.error_code:
            self.responded.add(ask.server)
        if settled:
            self._accept([Held(ask.server, answer, payload, settled)])
        return self._fall_back(pending, failed, now_ms)

    def _waited_in_vain(self, ask: Ask, answer: ServerAnswer) -> bool:
        """Its time went by while it waited for rows that it should have had: it is behind."""
        floors = self.wishes.floors
        awaited = any(not part.segment and floors.get(part.partition, 0) > part.from_offset for part in ask.parts)
        return awaited and answer.error_code == QueryCode.EXECUTION_TIMEOUT

    def _failed_parts(self, ask: Ask, answer: ServerAnswer) -> list[Part]:
        if answer.error_code:
            self._causes[ask.server] = answer.error
            return list(ask.parts)
        missing, behind = set(answer.missing_segments), set(answer.behind_partitions)
        refused = answer.refused_partitions
        if missing or behind or refused:
            self._causes[ask.server] = lateness(answer, self.cut)
        if self.cut is not None:  # a partition that is not at the cut answers none of its parts
            self._horizon = max(self._horizon, answer.horizon if refused else 0)
            self._refused.update(part for part in ask.parts if part.partition in refused)
            late = behind.union(refused)
            return [part for part in ask.parts if part.partition in late or part.segment in missing]
        reached = {tail.partition: tail.covered.next for tail in answer.partitions}
        for part in ask.parts:
            floor = 0 if part.segment or part.partition in behind else self.wishes.floors.get(part.partition, 0)
            if floor > part.from_offset and reached.get(part.partition, 0) < floor:
                self._causes[ask.server] = f"shows partition {part.partition} up to {reached.get(part.partition)} only"
                return list(ask.parts)  # its rows are in there with all others
        return [part for part in ask.parts if (part.segment in missing if part.segment else part.partition in behind)]

    def _on_failure(self, ask_id: int, reason: str, now_ms: float) -> list[Effect]:
        if (pending := self._pop(ask_id)) is None:
            return []
        self._unresponsive.add(pending.ask.server)
        self._causes[pending.ask.server] = reason
        if pending.rival_of is not None:
            return self._on_rival(pending, None, pending.ask.parts, now_ms)
        return self._fall_back(pending, pending.ask.parts, now_ms)

    def _pop(self, ask_id: int) -> Pending | None:
        pending = self._pending.pop(ask_id, None)
        if pending is not None and pending.rival_of is not None:
            self._pending[pending.rival_of].rivals.discard(ask_id)
        return pending

    # --- the end ---

    def _finish(self, now_ms: float) -> list[Effect]:
        waiting = bool(self._pending) or self._refreshing
        if waiting and now_ms < self.deadline_ms and not self.stale:
            return []
        self.done = True
        owners = [pending for pending in self._pending.values() if pending.rival_of is None]
        for pending in owners:
            self._accept(pending.held)
        left = {part for pending in owners for part in pending.ask.parts} & self._open
        silent = {pending.ask.server for pending in owners if left.intersection(pending.ask.parts)}
        self._causes |= dict.fromkeys(silent, "no answer in time")
        silent |= {server for part in self._open for server in self._avoided(part) & self._unresponsive}
        if silent:
            message = silence(silent, self._causes, sorted(left), self.wishes.floors)
            self.exceptions.append(QueryException(QueryCode.SERVER_NOT_RESPONDING, message))
        self.unsettled |= self._open
        if unserved := sorted(self._open - left):
            self.exceptions.append(self._unserved(unserved))
        # A server that failed, but whose parts others served, is not part of this answer.
        self.asked = self.responded | silent
        self.responded -= silent
        return [*self._cancel(list(self._pending)), Done()]

    def _unserved(self, parts: list[Part]) -> QueryException:
        if self.chosen is not None and not self.may_restart and not self._refused.isdisjoint(parts):
            return QueryException(QueryCode.QUERY_VALIDATION, too_old(self.chosen.epoch, self._horizon))
        tried = {server for part in parts for server in self._avoided(part)}
        text = unavailable(parts, self.routes, self.wishes.floors, tried, self._causes)
        return QueryException(QueryCode.BROKER_SEGMENT_UNAVAILABLE, text)
