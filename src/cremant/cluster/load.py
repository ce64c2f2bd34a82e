# SPDX-License-Identifier: Apache-2.0
"""What a broker knows of its servers' load: requests in flight, recent latency, who does not answer; and when a second
replica may be asked for the sake of speed. A machine: times come as arguments, nothing is drawn by chance.

Rules:

- Load of a server: `(in flight + 1) x latency`, the latency a mean that forgets within seconds. So a slow server is
  asked less, and is tried again later.
- Of two equally good replicas the first in a fixed order is asked unless the other is clearly less loaded: on a calm
  cluster the same replica answers the same client, and under load the replicas stay within two requests of each other.
- A server that failed, or lost a race without having answered anybody meanwhile, or did not say that it is alive, is a
  *suspect* for SUSPECT_MS: asked only for want of others. The controller's view knows better after that.
- Hedges (asking a second replica early) are a budget: HEDGE_SHARE of all requests, with a small burst; none while the
  servers' query slots are taken, for then slowness is load, and more requests make it worse.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from cremant.model.limits import QUERIES_RUNNING_MAX

#: A server that failed a request is asked last for this long; the view knows better after that.
SUSPECT_MS = 3_000.0
#: Latencies are forgotten by a factor e in this time.
LATENCY_MEMORY_MS = 5_000.0
#: Differences below this are noise of the machine.
LATENCY_NOISE_MS = 5.0
#: How much less loaded another replica must be, in requests: two in flight more make the difference.
PREFERENCE = 1.5

#: No second replica is asked before this time: below it, the hedge costs more than it can save.
HEDGE_FLOOR_MS = 30.0
#: A hedge comes when this multiple of the 95th percentile of recent latencies has passed.
HEDGE_FACTOR = 1.5
#: For query shapes seen less often than this many times, nothing is known.
HEDGE_SAMPLES_MIN = 8
HEDGE_UNKNOWN_MS = 500.0
#: Requests that hedging may add, as a share of all requests; and how many of them may come at once.
HEDGE_SHARE = 0.05
HEDGE_BURST = 8.0
#: Latencies kept per query shape (the 95th percentile is the fourth largest of 64), and shapes kept: ~1 MB.
_SAMPLES = 64
_SHAPES_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Load:
    """One server's, as routing sees it."""

    in_flight: int = 0
    latency_ms: float = LATENCY_NOISE_MS


_IDLE = Load()


def lighter(first: str, second: str, loads: Mapping[str, Load]) -> str:
    """`first`, unless `second` is clearly less loaded."""
    one, two = loads.get(first, _IDLE), loads.get(second, _IDLE)
    margin = PREFERENCE * min(one.latency_ms, two.latency_ms)
    if (one.in_flight + 1) * one.latency_ms > (two.in_flight + 1) * two.latency_ms + margin:
        return second
    return first


@dataclass(slots=True)
class _Server:
    in_flight: int = 0
    latency_ms: float = LATENCY_NOISE_MS
    observed_ms: float = -math.inf
    answered_ms: float = -math.inf
    suspect_until_ms: float = -math.inf


@dataclass(slots=True)
class _Shape:
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    hedge_after_ms: float | None = None


class Loads:
    """All servers that one broker talks to. Used from one event loop."""

    def __init__(self) -> None:
        self._servers: dict[str, _Server] = {}
        self._shapes: OrderedDict[Hashable, _Shape] = OrderedDict()
        self._in_flight = 0
        self._tokens = HEDGE_BURST
        #: For metrics.
        self.asks_total = 0
        self.hedges_total = 0

    # --- what happened ---

    def sent(self, server: str) -> None:
        self._server(server).in_flight += 1
        self._in_flight += 1
        self.asks_total += 1
        self._tokens = min(HEDGE_BURST, self._tokens + HEDGE_SHARE)

    def answered(self, server: str, sent_ms: float, now_ms: float) -> None:
        known = self._end(server)
        known.answered_ms = now_ms
        known.suspect_until_ms = -math.inf
        self._observe(known, now_ms - sent_ms, now_ms)

    def failed(self, server: str, now_ms: float) -> None:
        self._end(server).suspect_until_ms = now_ms + SUSPECT_MS

    def abandoned(self, server: str, sent_ms: float, now_ms: float) -> None:
        """The answer is not waited for any more. How long it took is not known, but it took that long at least."""
        known = self._end(server)
        self._observe(known, max(now_ms - sent_ms, known.latency_ms), now_ms)

    def lost(self, server: str, sent_ms: float, now_ms: float) -> bool:
        """A replica that was asked later answered first. True: `server` answered nobody since, and is a suspect."""
        known = self._server(server)
        if known.answered_ms >= sent_ms:
            return False
        known.suspect_until_ms = now_ms + SUSPECT_MS
        return True

    def suspect(self, server: str, now_ms: float) -> None:
        """It was asked whether it is alive, and did not say so."""
        self._server(server).suspect_until_ms = now_ms + SUSPECT_MS

    def took(self, shape: Hashable, latency_ms: float) -> None:
        """A request of a query of this shape was answered."""
        known = self._shapes.get(shape)
        if known is None:
            known = self._shapes[shape] = _Shape()
            while len(self._shapes) > _SHAPES_MAX:
                self._shapes.popitem(last=False)
        else:
            self._shapes.move_to_end(shape)
        known.samples.append(latency_ms)
        known.hedge_after_ms = None

    # --- what follows ---

    def of(self, servers: Iterable[str], now_ms: float) -> dict[str, Load]:
        return {name: self._load(self._servers[name], now_ms) for name in servers if name in self._servers}

    def suspects(self, now_ms: float) -> frozenset[str]:
        return frozenset(name for name, known in self._servers.items() if known.suspect_until_ms > now_ms)

    def hedge_after_ms(self, shape: Hashable) -> float:
        """How long to wait for an answer before another replica is asked, too."""
        known = self._shapes.get(shape)
        if known is None or len(known.samples) < HEDGE_SAMPLES_MIN:
            return HEDGE_UNKNOWN_MS
        if known.hedge_after_ms is None:
            ordered = sorted(known.samples)
            high = ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]
            known.hedge_after_ms = max(HEDGE_FLOOR_MS, HEDGE_FACTOR * high)
        return known.hedge_after_ms

    def may_hedge(self, servers: int) -> bool:
        """Takes one hedge out of the budget. `servers`: how many are alive."""
        if self._tokens < 1 or self._in_flight >= QUERIES_RUNNING_MAX * max(1, servers):
            return False
        self._tokens -= 1
        self.hedges_total += 1
        return True

    def _server(self, server: str) -> _Server:
        known = self._servers.get(server)
        if known is None:
            known = self._servers[server] = _Server()
        return known

    def _end(self, server: str) -> _Server:
        known = self._server(server)
        known.in_flight -= 1
        self._in_flight -= 1
        return known

    def _observe(self, known: _Server, latency_ms: float, now_ms: float) -> None:
        age_ms = now_ms - known.observed_ms
        # At most a quarter: the first after a while is often odd.
        weight = min(0.25, max(0.1, 1.0 - math.exp(-age_ms / LATENCY_MEMORY_MS)))
        known.latency_ms += weight * (latency_ms - known.latency_ms)
        known.observed_ms = now_ms

    def _load(self, known: _Server, now_ms: float) -> Load:
        """Without news a latency fades to nothing, so that whoever was slow once is tried again."""
        faded = known.latency_ms * math.exp(-max(0.0, now_ms - known.observed_ms) / LATENCY_MEMORY_MS)
        return Load(known.in_flight, max(LATENCY_NOISE_MS, faded))
