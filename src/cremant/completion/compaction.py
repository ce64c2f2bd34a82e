# SPDX-License-Identifier: Apache-2.0
"""Which sealed segments of upsert tables let go of their replaced rows, and as of which epoch. Pure.

Rules

- The epoch X of an order is closed and applied on every replica of every partition for `historyMs`: whoever asks for an
  epoch of that time is answered as before. What was seen counts, so a controller that starts waits that long first.
- X is written down with the order: whoever carries it out, and however often, lets go of the same rows.
- A segment is looked at while every one of its replicas serves the committed content and nothing of it is missing; one
  that has been past the thresholds for `historyMs`, so that most of what is superseded now is so at X.
- Few at a time; who has most to let go of comes first.
- An order that is not carried out in time is withdrawn, so that it does not hold up others for ever, and given to the
  next replica when it is its turn again, after those that nobody has failed at. So are all of them once the table is
  not to be compacted any more.
- What a rewind takes back is no epoch to compact at, and while one is pending no order is given.

    step(sights, now_ms) -> orders and withdrawals
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from cremant.completion.copies import holders_of, is_safe
from cremant.model.cluster import PipelineRecord
from cremant.model.segments import Copy, SegmentMetadata, StoreState
from cremant.model.upsert import CompactionConfig, UpsertConfig
from cremant.wire.messages import SegmentCompacted

#: Segments of a table that are compacted at once.
ORDERS_MAX = 2
#: The largest segments take two minutes; after so long its server cannot do it: its disk is full, or worse.
ORDER_MS = 10 * 60_000
#: How finely the last `historyMs` are remembered.
_MARKS_MAX = 64


@dataclass(frozen=True, slots=True)
class Sight:
    """One table that compacts. `low_water_mark`: None while a replica says nothing, or has not heard of a rewind.
    `superseded`: of segments that all replicas serve in their committed content, the least that one of them reports."""

    table: str
    incarnation: str
    upsert: UpsertConfig
    pipeline: PipelineRecord
    low_water_mark: int | None
    segments: Sequence[SegmentMetadata]
    superseded: Mapping[str, int]


class Compact(NamedTuple):
    """Rows of the segment that were replaced up to `epoch` are to go; `server` makes what is left."""

    table: str
    segment: str
    epoch: int
    server: str


class Withdraw(NamedTuple):
    """The segment is not to be compacted at `epoch` after all."""

    table: str
    segment: str
    epoch: int
    why: str


Order = Compact | Withdraw


@dataclass(slots=True)
class _Known:
    incarnation: str
    rewinds: int
    #: (when it was seen, low-water mark), oldest first.
    marks: deque[tuple[int, int]] = field(default_factory=deque)
    #: Segments past the thresholds, since when.
    since_ms: dict[str, int] = field(default_factory=dict)
    #: Orders that are out, by segment and epoch: since when they were seen.
    out_ms: dict[tuple[str, int], int] = field(default_factory=dict)
    #: How often an order for the segment was withdrawn for taking too long.
    failed: dict[str, int] = field(default_factory=dict)


class Compactions:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._tables: dict[str, _Known] = {}

    def step(self, sights: Iterable[Sight], now_ms: int) -> tuple[Order, ...]:
        orders: list[Order] = []
        seen: dict[str, _Known] = {}
        for sight in sights:
            known = self._tables.get(sight.table)
            rewinds = len(sight.pipeline.rewinds) and sight.pipeline.rewinds[-1].asked_ms
            if known is None or known.incarnation != sight.incarnation or known.rewinds != rewinds:
                known = _Known(sight.incarnation, rewinds)
            seen[sight.table] = known
            orders += self._orders(known, sight, now_ms)
        self._tables = seen
        return tuple(orders)

    def _orders(self, known: _Known, sight: Sight, now_ms: int) -> list[Order]:
        running = {segment.name: segment.compacting for segment in sight.segments if segment.compacting is not None}
        out = running.items()
        known.out_ms = {order: known.out_ms.get(order, now_ms) for order in out}
        config = sight.upsert.compaction
        if config is None:
            known.marks.clear()
            return [Withdraw(sight.table, name, at, "the table is not compacted any more") for name, at in out]
        if sight.pipeline.rewind is not None:
            known.marks.clear()
            return []
        late = [order for order, since_ms in known.out_ms.items() if now_ms - since_ms >= ORDER_MS]
        for name, _ in late:
            known.failed[name] = known.failed.get(name, 0) + 1
        withdrawn = [Withdraw(sight.table, name, at, f"not done within {ORDER_MS} ms") for name, at in late]
        return [*withdrawn, *self._due(known, sight, config, running, now_ms)]

    def _due(
        self, known: _Known, sight: Sight, config: CompactionConfig, running: Mapping[str, int], now_ms: int
    ) -> list[Compact]:
        epoch = self._epoch(known, sight, now_ms)
        past = {
            segment.name: segment for segment in sight.segments
            if segment.name not in running and _is_past(segment, sight.superseded.get(segment.name), config, now_ms)
        }  # fmt: skip
        known.since_ms = {name: known.since_ms.get(name, now_ms) for name in past}
        known.failed = {name: count for name, count in known.failed.items() if name in past or name in running}
        keyed_from = sight.pipeline.keyed_from
        if epoch is None or keyed_from is None or epoch < keyed_from:
            return []
        due = [
            segment for name, segment in past.items()
            if now_ms - known.since_ms[name] >= sight.upsert.history_ms and _may_be(segment, epoch)
        ]  # fmt: skip
        failed = known.failed
        due.sort(key=lambda one: (failed.get(one.name, 0), -sight.superseded[one.name], one.name))
        return [
            Compact(sight.table, one.name, epoch, sorted(one.replicas)[failed.get(one.name, 0) % len(one.replicas)])
            for one in due[: max(0, ORDERS_MAX - len(running))]
        ]

    def _epoch(self, known: _Known, sight: Sight, now_ms: int) -> int | None:
        """The newest low-water mark that was seen at least `historyMs` ago."""
        marks, history_ms, mark = known.marks, sight.upsert.history_ms, sight.low_water_mark
        if mark is not None and mark > 0:
            if marks and mark < marks[-1][1]:  # a replica began anew: what was applied everywhere once is so again
                mark = marks[-1][1]
            if not marks or now_ms - marks[-1][0] >= history_ms // _MARKS_MAX:
                marks.append((now_ms, mark))
        while len(marks) > 1 and now_ms - marks[1][0] >= history_ms:
            marks.popleft()
        return marks[0][1] if marks and now_ms - marks[0][0] >= history_ms else None


def _is_past(segment: SegmentMetadata, superseded: int | None, config: CompactionConfig, now_ms: int) -> bool:
    if superseded is None or not segment.rows:
        return False
    ended_ms = segment.max_ingestion_ms or segment.created_ms
    many = superseded >= config.count and superseded * 100 >= config.percent * segment.rows
    return many and now_ms - ended_ms >= config.buffer_ms


def _may_be(segment: SegmentMetadata, epoch: int) -> bool:
    """All its rows were closed by then, and its bytes are where they should be."""
    closed = segment.end is not None and segment.end.epoch <= epoch and segment.compacted_at < epoch
    stored = segment.store_state not in (StoreState.PENDING, StoreState.FAILED)
    return closed and stored and is_safe(segment) and set(segment.replicas) <= set(holders_of(segment))


def after_compaction(segment: SegmentMetadata, said: SegmentCompacted, now_ms: int) -> SegmentMetadata | None:
    """The record as it is to be once an order was carried out; None when what was done is not what was ordered.

    Whoever had the content before makes the same of it, at any time: it stays a holder."""
    if segment.compacting is None or (segment.compacting, segment.checksum) != (said.epoch, said.before):
        return None
    if said.checksum == said.before:
        return msgspec.structs.replace(segment, compacting=None, compactor=None)
    if said.url is None and segment.store_state is StoreState.STORED:
        return None
    copies = {holder: Copy(checksum=said.checksum, verified_at_ms=now_ms) for holder in holders_of(segment)}
    return msgspec.structs.replace(
        segment, compacting=None, compactor=None, compacted_at=said.epoch,
        rows_removed=segment.rows_removed + segment.rows - said.rows, rows=said.rows, size_bytes=said.size_bytes,
        checksum=said.checksum, file_checksum=said.file_checksum, copies=copies, versions=said.versions,
        store_url=said.url,
        store_state=StoreState.STORED if said.url is not None else segment.store_state,
    )  # fmt: skip
