# SPDX-License-Identifier: Apache-2.0
"""Fetching one segment: whom to ask next, when to wait, when to give up (segment completion design, "Fetching"). Pure.

Rules:

- A round asks every source once, in the configured order: the store if it has the segment, then all holders, shuffled,
  never ourselves. What there is to ask is looked up anew for each round.
- A holder that does not have it or does not answer may be about to: it installs what it committed, or starts. Rounds
  in which no holder said so count twice.
- Who is busy has the segment: a round in which somebody was does not count. Only the deadline ends the waiting.
- Between rounds it waits, exponentially longer, spread so that replicas do not come back together.
- Every failure is kept with its cause and its source, and told when it gives up: nobody has to guess which peer said
  what.

    Begin --> Look --Looked--> FromStore | FromPeer --Failed--> next source
                                                     | round over --> Wait --Waited--> Look
                                                     | last round over, or out of time --> GiveUp
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from cremant.model.errors import InvalidConfig
from cremant.model.limits import FETCH_DEADLINE_MS, FETCH_ROUNDS_MAX, FETCH_WAIT_FIRST_MS, FETCH_WAIT_MAX_MS

#: URL of a segment that only servers have: `peer:///name`, Pinot's spelling.
PEER_SCHEME = "peer"


class Source(StrEnum):
    STORE = "store"
    PEER = "peer"


class Cause(StrEnum):
    """Why a source did not give the segment."""

    NO_SOURCE = "noSource"
    NOT_HELD = "notHeld"
    OTHER_CONTENT = "otherContent"
    BUSY = "busy"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    TLS = "tls"
    TRUNCATED = "truncated"
    CHECKSUM = "checksum"
    REFUSED = "refused"


#: Of a holder: in a moment it may be otherwise.
_MAY_COME = frozenset({Cause.NOT_HELD, Cause.UNREACHABLE, Cause.TIMEOUT})


@dataclass(frozen=True, slots=True)
class Holder:
    """A live server that may have the segment. `url`: by the table's scheme; empty = it does not offer that."""

    instance: str
    url: str


# --- events ---


@dataclass(frozen=True, slots=True)
class Begin:
    pass


@dataclass(frozen=True, slots=True)
class Looked:
    """What there is to ask now. `store_url`: None when the store does not have it."""

    store_url: str | None
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The source asked last did not give it. `retry_after_ms`: it asked to be left alone for so long."""

    cause: Cause
    detail: str
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class Waited:
    pass


# --- effects ---


@dataclass(frozen=True, slots=True)
class Look:
    pass


@dataclass(frozen=True, slots=True)
class FromStore:
    url: str


@dataclass(frozen=True, slots=True)
class FromPeer:
    holder: Holder


@dataclass(frozen=True, slots=True)
class Wait:
    ms: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """`why`: the last failure of each source, in the order they were asked."""

    why: str


Event = Begin | Looked | Failed | Waited
Effect = Look | FromStore | FromPeer | Wait | GiveUp


class Fetch:
    """One fetch of one segment by `instance`. `seed` decides the shuffling and the spread of waits."""

    def __init__(
        self,
        instance: str,
        *,
        seed: int,
        order: tuple[Source, ...] = (Source.STORE, Source.PEER),
        rounds_max: int = FETCH_ROUNDS_MAX,
        deadline_ms: int = FETCH_DEADLINE_MS,
    ) -> None:
        self._instance = instance
        self._seed = seed
        self._order = order
        self._rounds_max = rounds_max
        self._deadline_ms = deadline_ms
        self._ends_ms = 0
        self._round = 0
        #: Rounds in which nobody was busy; whether somebody was in this one, and whether a peer may have it soon.
        self._rounds_in_vain = 0
        self._busy = self._may_come = False
        self._queue: list[FromStore | FromPeer] = []
        self._asked: FromStore | FromPeer | None = None
        self._retry_after_ms = 0
        #: Source -> its last failure.
        self._failures: dict[str, str] = {}

    def step(self, event: Event, now_ms: int) -> Effect:
        match event:
            case Begin():
                self._ends_ms = now_ms + self._deadline_ms
                return Look()
            case Waited():
                return Look()
            case Looked():
                self._queue = self._sources(event)
                if not self._queue:
                    self._failures[""] = "no live server and no store has it"
                return self._next(now_ms)
            case Failed():
                self._note(event)
                return self._next(now_ms)
            case _:
                assert_never(event)

    def _next(self, now_ms: int) -> Effect:
        if now_ms < self._ends_ms and self._queue:
            self._asked = self._queue.pop(0)
            return self._asked
        self._round += 1
        self._rounds_in_vain += 0 if self._busy else 1 if self._may_come else 2
        self._busy = self._may_come = False
        if self._rounds_in_vain >= self._rounds_max or now_ms >= self._ends_ms:
            return GiveUp("; ".join(self._failures.values()))
        wait_ms = min(FETCH_WAIT_MAX_MS, FETCH_WAIT_FIRST_MS * 2 ** (self._round - 1))
        spread_ms = wait_ms // 2 + self._number(f"wait {self._round}") % (wait_ms // 2 + 1)
        wait_ms, self._retry_after_ms = max(spread_ms, min(self._retry_after_ms, FETCH_WAIT_MAX_MS)), 0
        return Wait(max(1, min(wait_ms, self._ends_ms - now_ms)))

    def _sources(self, looked: Looked) -> list[FromStore | FromPeer]:
        stored = looked.store_url if looked.store_url and not is_peer_url(looked.store_url) else None
        others = {holder.instance: holder for holder in looked.holders if holder.instance != self._instance}
        shuffled = sorted(others.values(), key=lambda holder: self._number(f"{self._round} {holder.instance}"))
        queue: list[FromStore | FromPeer] = []
        for source in self._order:
            if source is Source.PEER:
                queue += [FromPeer(holder) for holder in shuffled]
            elif stored is not None:
                queue.append(FromStore(stored))
        return queue

    def _note(self, failure: Failed) -> None:
        self._failures.pop("", None)
        self._busy |= failure.cause is Cause.BUSY
        self._retry_after_ms = max(self._retry_after_ms, failure.retry_after_ms)
        asked = self._asked
        self._may_come |= isinstance(asked, FromPeer) and failure.cause in _MAY_COME
        name = asked.holder.instance if isinstance(asked, FromPeer) else "store"
        self._failures[name] = f"{name}: {failure.detail} ({failure.cause})"

    def _number(self, salt: str) -> int:
        """Dice of the seed: the same for the same question."""
        return int.from_bytes(hashlib.blake2b(f"{self._seed} {salt}".encode(), digest_size=8).digest(), "big")


def is_peer_url(url: str) -> bool:
    return url.lower().startswith(f"{PEER_SCHEME}://")


def fetch_order(words: Iterable[str]) -> tuple[Source, ...]:
    """The order that a setting names. Raises InvalidConfig."""
    order = [word.strip() for word in words if word.strip()]
    if not order or len(set(order)) != len(order) or not set(order) <= set(Source):
        raise InvalidConfig(
            f"fetch_order: expected a list of {' and '.join(Source)}, found {','.join(order)!r}",
            hint='"store,peer" asks the store first, "peer,store" other servers first',
        )
    return tuple(Source(word) for word in order)
