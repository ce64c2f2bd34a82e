# SPDX-License-Identifier: Apache-2.0
"""A query that demands freshness (demand.py): its demand is settled, then it runs as any other, and its answer is
measured as it is about to be delivered. One that waits goes round again while there is time.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable

from cremant.broker.demand import Demand, OnStale, Settled, shortfall, stale_error, wanted
from cremant.broker.marks import Marks, Settling
from cremant.broker.response import BrokerResponse, Freshness
from cremant.cluster.gather_messages import QueryException
from cremant.model.query_codes import QueryCode

#: Of a query's time, what waiting leaves for the answer: a fifth, half a second at most.
ANSWER_RESERVE_SHARE, ANSWER_RESERVE_S = 0.2, 0.5
#: How long a query takes is known once it has been tried; what is allowed for it is this share of its bound at most.
MARGIN_FIRST_MS, MARGIN_SHARE_MAX = 10.0, 0.9
TRIES_MAX = 5
#: Errors that mean that rows are missing, which may come.
_MISSING = frozenset({QueryCode.BROKER_SEGMENT_UNAVAILABLE, QueryCode.SERVER_NOT_RESPONDING})
_HINT = (
    "raise timeoutMs or the bound, or SET onStale = 'partial'; EXPLAIN FRESHNESS FOR <query> says what holds it back"
)


async def answer_fresh(
    marks: Marks, demand: Demand, table: str, response: BrokerResponse, deadline_s: float,
    run: Callable[[Settled], Awaitable[float]],
) -> None:  # fmt: skip
    """`run` fills in the response, and says how many ms that took without waiting for a turn. Raises QueryError 305 for
    a demand that is not met and not to be answered without."""
    until_s = _latest_s(deadline_s)
    margin_ms = MARGIN_FIRST_MS
    for tries_left in reversed(range(TRIES_MAX)):
        settling = await marks.settle(table, demand, until_s=until_s, margin_ms=_capped(demand, margin_ms))
        response.waited_ms += settling.waited_ms
        if settling.had.unmet and demand.on_stale is not OnStale.PARTIAL:
            _refuse(demand, settling, response)
        ran_ms = await run(settling.had)
        response.now_ms = time.time_ns() // 1_000_000
        if any(error.code not in _MISSING for error in response.exceptions):
            return  # it failed for reasons of its own
        lacking = _unmet(demand, settling, response)
        if not lacking:
            response.stale = "waited" if response.waited_ms else None
            return
        margin_ms = max(margin_ms, 1.5 * ran_ms)
        too_slow = demand.max_lag_ms is not None and ran_ms > demand.max_lag_ms
        if demand.on_stale is not OnStale.WAIT or too_slow or not tries_left or time.monotonic() >= until_s:
            break
        if response.exceptions and settling.routes is not None:
            marks.doubt(settling.routes, lacking)
        response.begin_again()
    _end(demand, settling, response, lacking, ran_ms if too_slow else None)


async def await_seen(marks: Marks, seen: Demand, table: str, response: BrokerResponse, deadline_s: float) -> None:
    """What the client has seen before is visible somewhere, or cannot be in time: the gather says so."""
    settling = await marks.settle(table, seen, until_s=_latest_s(deadline_s), margin_ms=0.0)
    response.waited_ms += settling.waited_ms


def _latest_s(deadline_s: float) -> float:
    """Until when a query may wait for what is to arrive."""
    return deadline_s - min(ANSWER_RESERVE_S, (deadline_s - time.monotonic()) * ANSWER_RESERVE_SHARE)


def _capped(demand: Demand, margin_ms: float) -> float:
    return margin_ms if demand.max_lag_ms is None else min(margin_ms, demand.max_lag_ms * MARGIN_SHARE_MAX)


def _unmet(demand: Demand, settling: Settling, response: BrokerResponse) -> tuple[int, ...]:
    """Partitions by which the answer, delivered now, is not what was demanded."""
    shown, least_ms = response.freshness.partitions, demand.least_ms(response.now_ms)
    expected = settling.routes.replicas if settling.routes is not None else {}
    missing = set(demand.rows) - shown.keys()
    if least_ms and (response.freshness.fresh_ms or 0) < least_ms:  # also of what came while it ran, or after its epoch
        missing |= {*expected, *range(max(1, response.freshness.partitions_expected))} - shown.keys()
    missing.update(number for number, mark in shown.items() if not demand.is_met(number, mark, least_ms))
    return tuple(sorted(missing))


def _refuse(demand: Demand, settling: Settling, response: BrokerResponse) -> None:
    """Nobody can show what is demanded; what the best replicas show is in the response."""
    had, routes = settling.had, settling.routes
    response.now_ms, response.stale = time.time_ns() // 1_000_000, "refused"
    expected = len(routes.replicas) if routes is not None else 0
    fresh_ms = had.fresh_ms if len(had.marks) == expected else None
    response.freshness = Freshness(
        fresh_ms, partitions_expected=expected, partitions_reporting=len(had.marks), partitions=had.marks
    )
    if routes is not None:
        response.tables = (routes.table.name,)
    raise stale_error(_text(demand, settling, had, response), _HINT)


def _end(
    demand: Demand, settling: Settling, response: BrokerResponse, lacking: Iterable[int], ran_ms: float | None
) -> None:
    """What was answered is older than was demanded."""
    had = Settled(response.freshness.partitions, tuple(lacking))
    text = _text(demand, settling, had, response)
    if ran_ms is not None:
        text += f"; the query itself took {ran_ms:.0f} ms"
    if demand.on_stale is OnStale.PARTIAL:
        response.stale = "partial"
        response.exceptions.append(QueryException(QueryCode.BROKER_SEGMENT_UNAVAILABLE, str(stale_error(text))))
        return
    response.stale, response.result = "refused", None
    raise stale_error(text, _HINT)


def _text(demand: Demand, settling: Settling, had: Settled, response: BrokerResponse) -> str:
    waited = f", after waiting {response.waited_ms:.0f} ms" if response.waited_ms else ""
    told = shortfall(demand, had, response.now_ms, why=settling.reasons())
    return f"the answer is not as fresh as demanded ({wanted(demand)}){waited}: {told}"
