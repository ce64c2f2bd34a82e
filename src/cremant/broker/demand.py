# SPDX-License-Identifier: Apache-2.0
"""What a query demands of the freshness of its answer, and whether that is had (design: freshness.md). Pure.

maxFreshnessLagMs = N       as it is delivered, everything that came to the stream before N ms ago is in the answer
minFreshnessTimeMs = T      ... everything that came to the stream before T (wall clock)
readYourWrites = '{"p": o}' ... the rows up to offset o of partition p
onStale                     wait (the default; until the query's time is over), error (refuse), partial (answer, flag)

What is not known counts as stale. A demand is met by marks of replicas (shown.py): facts about the stream, so an answer
that shows as much as a mark is as fresh as the mark says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from cremant.broker.tokens import epoch_of, floors_of
from cremant.cluster.lowwater import is_void
from cremant.cluster.shown import Mark, Shown
from cremant.model.cluster import Rewind, TableView
from cremant.model.errors import QueryError, UserError
from cremant.model.query_codes import QueryCode
from cremant.model.written import parse_write_token

#: Nothing is stored for longer; larger numbers are mistakes.
_MS_END = 2**53
#: Partitions that a message lists.
_LISTED_MAX = 5
NO_MARKS: Mapping[int, Mark] = MappingProxyType({})


class OnStale(StrEnum):
    WAIT = "wait"
    ERROR = "error"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True)
class Demand:
    """`rows`: partition -> offset below which every row must be in the answer. `epoch`: of an upsert table, the least
    that it may be of. `seen`: a client has seen that before; so nobody waits for a partition without a live replica.
    Times are wall clock."""

    max_lag_ms: int | None = None
    min_fresh_ms: int | None = None
    rows: Mapping[int, int] = field(default_factory=dict)
    on_stale: OnStale = OnStale.WAIT
    epoch: int = 0
    seen: bool = False

    def least_ms(self, now_ms: int) -> int:
        """What must be in an answer that is delivered at `now_ms`: everything of before that time; 0: whatever."""
        least = now_ms - self.max_lag_ms if self.max_lag_ms is not None else 0
        return max(least, self.min_fresh_ms or 0, 0)

    def is_met(self, partition: int, mark: Mark, least_ms: int) -> bool:
        return (
            mark.offset >= self.rows.get(partition, 0)
            and (mark.epoch >= self.epoch or not mark.epoch)  # has closed nothing: it came after that epoch
            and (least_ms == 0 or (mark.fresh_ms or 0) >= least_ms)
        )

    def wants(self, partition: int, least_ms: int, servers: Collection[str]) -> bool:
        """Anything of this partition, which `servers` have."""
        return bool(least_ms or self.epoch or self.rows.get(partition)) and not (self.seen and not servers)


def demand_of(options: Mapping[str, str]) -> Demand | None:
    """None: whatever is there will do. Raises QueryError 700 for what is no demand."""
    on_stale = options.get("onstale")
    if on_stale is not None and on_stale.lower() not in tuple(OnStale):
        raise _refused("onStale", "'wait', 'error' or 'partial'", on_stale)
    max_lag_ms = _ms(options, "maxFreshnessLagMs", least=0)
    min_fresh_ms = _ms(options, "minFreshnessTimeMs", least=1)
    rows = _rows(options.get("readyourwrites"))
    if max_lag_ms is None and min_fresh_ms is None and not rows:
        return None
    if "asofepoch" in options:
        raise QueryError(
            QueryCode.QUERY_VALIDATION,
            "QueryValidationError: asOfEpoch asks for the past, and maxFreshnessLagMs, minFreshnessTimeMs or "
            "readYourWrites for what is new",
            hint="leave one of them away",
        )
    return Demand(max_lag_ms, min_fresh_ms, rows, OnStale(on_stale.lower()) if on_stale else OnStale.WAIT)


def seen_of(options: Mapping[str, str], table: TableView) -> Demand | None:
    """What the client of a `notBefore` has seen. Raises QueryError 700 for what is no token of this table."""
    token = options.get("notbefore")
    if token is None:
        return None
    if table.record.config.upsert is not None:
        return Demand(epoch=epoch_of(token, table), seen=True)
    return Demand(rows=floors_of(token, table), seen=True)


def _ms(options: Mapping[str, str], name: str, *, least: int) -> int | None:
    text = options.get(name.lower())
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) < _MS_END):
        raise _refused(name, f"a whole number of ms of {least} or more", text)
    return int(text)


def _rows(token: str | None) -> dict[int, int]:
    if token is None:
        return {}
    try:
        return {partition: offset + 1 for partition, offset in parse_write_token(token).items()}
    except UserError as error:
        raise QueryError(QueryCode.QUERY_VALIDATION, f"QueryValidationError: readYourWrites: {error}") from error


def _refused(option: str, expected: str, found: str) -> QueryError:
    text = f"QueryValidationError: {option}: expected {expected}, found '{found[:40]}'"
    return QueryError(QueryCode.QUERY_VALIDATION, text, hint=f"for example: SET {option} = {_EXAMPLES[option]};")


_EXAMPLES = {"onStale": "'wait'", "maxFreshnessLagMs": "2000", "minFreshnessTimeMs": "1760000000000"}


# --- what is had of it ---


@dataclass(frozen=True, slots=True)
class Settled:
    """`marks`: of each partition the least that meets the demand, or, if none does, the freshest. `unmet`: which."""

    marks: Mapping[int, Mark] = field(default_factory=dict)
    unmet: tuple[int, ...] = ()

    @property
    def floors(self) -> dict[int, int]:
        """An answer of an append table that shows this much is as fresh as the marks are."""
        return {partition: mark.offset for partition, mark in self.marks.items()}

    @property
    def epoch(self) -> int:
        """... and of an upsert table one of this epoch."""
        return max((mark.epoch for mark in self.marks.values()), default=0)

    @property
    def fresh_ms(self) -> int | None:
        known = [mark.fresh_ms for mark in self.marks.values()]
        return None if None in known or not known else min(value for value in known if value is not None)


NOTHING_SETTLED = Settled()


def settled(
    demand: Demand, shown: Shown, replicas: Mapping[int, Collection[str]], least_ms: int, rewinds: Iterable[Rewind] = ()
) -> Settled:
    """`replicas`: of each partition of the table, those that are alive. `rewinds`: of an upsert table; marks of epochs
    that they took back count for nothing."""
    void = tuple(rewinds)
    marks: dict[int, Mark] = {}
    unmet = [partition for partition in demand.rows if partition not in replicas]
    if least_ms and not replicas:
        unmet.append(0)  # a table that has no partition yet: nobody knows what is in its stream
    for partition, servers in replicas.items():
        known = [mark for mark in shown.known(partition, servers) if not void or is_void(mark.epoch, void) is None]
        enough = [mark for mark in known if demand.is_met(partition, mark, least_ms)]
        if enough:
            marks[partition] = min(enough, key=lambda mark: (mark.epoch, mark.offset))
            continue
        if demand.wants(partition, least_ms, servers):
            unmet.append(partition)
        if known:
            marks[partition] = max(known, key=lambda mark: (mark.fresh_ms or 0, mark.offset))
    return Settled(marks, tuple(sorted(unmet)))


# --- words ---


def shortfall(
    demand: Demand, had: Settled, now_ms: int, name_of: Callable[[int], str] = str, why: Mapping[int, str] | None = None
) -> str:
    """Which partition is how old, or shows how much; and why, if that is known."""
    said = []
    for partition in had.unmet[:_LISTED_MAX]:
        mark = had.marks.get(partition)
        cause = f" ({why[partition]})" if why and partition in why else ""
        said.append(f"partition {name_of(partition)} {_state(demand, partition, mark, now_ms)}{cause}")
    more = len(had.unmet) - _LISTED_MAX
    return "; ".join(said) + (f"; and {more} more" if more > 0 else "")


def _state(demand: Demand, partition: int, mark: Mark | None, now_ms: int) -> str:
    if mark is None:
        return "is not known to be visible anywhere"
    wanted = demand.rows.get(partition, 0)
    if mark.offset < wanted:
        return f"is visible up to offset {mark.offset - 1}, the row at {wanted - 1} is missing"
    if mark.fresh_ms is None:
        return "is of unknown freshness"
    return f"is {max(0, now_ms - mark.fresh_ms)} ms old"


def wanted(demand: Demand) -> str:
    """As the query said it."""
    said = []
    if demand.max_lag_ms is not None:
        said.append(f"maxFreshnessLagMs = {demand.max_lag_ms}")
    if demand.min_fresh_ms is not None:
        said.append(f"minFreshnessTimeMs = {demand.min_fresh_ms}")
    if demand.rows:
        said.append("readYourWrites")
    return ", ".join(said)


def stale_error(text: str, hint: str = "") -> QueryError:
    return QueryError(QueryCode.BROKER_SEGMENT_UNAVAILABLE, f"DataFreshnessError: {text}", hint=hint)
