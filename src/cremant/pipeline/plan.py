# SPDX-License-Identifier: Apache-2.0
"""What one epoch covers, decided before it runs: the offset of our Spark source (design: epoch-log.md, The pipeline).

Spark writes the plan of a batch to its checkpoint before the batch runs, and hands out the same plan after a crash. So
whatever must be the same in a replay stands in it: offsets, the config version, and the one wall-clock reading (taken
before the ends of the stream were read) that marks carry. Pure: ends and time are arguments.

Rules: a plan that covers nothing new is *equal* to the one before it (Spark then runs no batch, but for the very first,
which it runs in any case: an epoch without rows, of no config); ranges of a partition follow each other without a hole
other than a declared gap; no plan holds more than the limit of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from cremant.model.errors import InvariantViolation
from cremant.model.offsets import OffsetRange

#: Up to this many rows one task is quicker than two: a task costs about 25 ms before its first row.
ROWS_PER_TASK = 20_000
#: Nobody knows as of when the ends of a plan are all there was.
UNPROVEN = 0


class PlannedRange(msgspec.Struct, frozen=True, array_like=True):
    """One partition's share: rows of [first, next); `stream_end` is the end of the stream that the planner saw."""

    first: int
    next: int
    stream_end: int

    @property
    def rows(self) -> int:
        return self.next - self.first


class PlannedGap(msgspec.Struct, frozen=True, array_like=True):
    """Offsets that the stream no longer has; they come before the partition's range."""

    partition: int
    first: int
    next: int


class SeedPlan(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The first batch of a key coordinator without state brings the table's rows in force at closed epoch `epoch`,
    tombstones too, under the epochs in which they came into force. `all_rows`: the table had no keys before; all of its
    rows come, under the seed's own epoch, so that the winners are INSERTed. Rows whose comparison value is below
    `expired_below` (tombstones: `deleted_below`) are left out and DELETEd."""

    epoch: int
    all_rows: bool = False
    expired_below: float | None = None
    deleted_below: float | None = None


class EpochPlan(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Index of `partitions` is the partition. `at_ms`: wall time, taken before the stream ends were read; UNPROVEN if
    messages with earlier timestamps may come behind these ends."""

    version: int = 1
    config_version: int
    topic_incarnation: str
    at_ms: int
    partitions: tuple[PlannedRange, ...]
    gaps: tuple[PlannedGap, ...] = ()
    seed: SeedPlan | None = None

    @property
    def rows(self) -> int:
        return sum(planned.rows for planned in self.partitions)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(planned.next for planned in self.partitions)

    def gap_of(self, partition: int) -> OffsetRange | None:
        for gap in self.gaps:
            if gap.partition == partition:
                return OffsetRange(gap.first, gap.next)
        return None

    @property
    def starts(self) -> tuple[int, ...]:
        """Where the epoch before ended (for a new partition: its first offset), so gaps are inside."""
        gaps = {gap.partition: gap.first for gap in self.gaps}
        return tuple(gaps.get(p, planned.first) for p, planned in enumerate(self.partitions))

    def to_offset(self) -> dict[str, Any]:
        """As Spark keeps it."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built

    @classmethod
    def from_offset(cls, offset: dict[str, Any]) -> EpochPlan:
        plan = msgspec.convert(offset, cls)
        if plan.version != 1:
            raise InvariantViolation("plan version", f"expected 1, found {plan.version}")
        return plan


class Wanted(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What the driver wants of the next plan; it writes this to a file that the planner reads each time.

    `starts`: where each partition of the table begins; its length is the number of partitions.
    """

    config_version: int
    starts: tuple[int, ...]
    max_rows: int
    stop_on_expired: bool = False
    hold: bool = False


def initial_plan(topic_incarnation: str, starts: Sequence[int]) -> EpochPlan:
    """The plan before the first epoch: nothing covered, every partition at its start."""
    return EpochPlan(
        config_version=0,
        topic_incarnation=topic_incarnation,
        at_ms=UNPROVEN,
        partitions=tuple(PlannedRange(start, start, start) for start in starts),
    )


def seed_plan(before: EpochPlan, wanted: Wanted, seed: SeedPlan) -> EpochPlan:
    """The plan of a seed: the epoch after the initial plan, without a row of the stream; how far that goes is not
    asked."""
    return msgspec.structs.replace(before, config_version=wanted.config_version, seed=seed)


def is_initial(plan: EpochPlan) -> bool:
    return plan.config_version == 0 and plan.seed is None


def next_plan(
    before: EpochPlan, wanted: Wanted, *, earliest: Sequence[int], ends: Sequence[int], at_ms: int, max_rows: int
) -> EpochPlan:
    """The plan after `before`, or `before` itself if the stream has nothing new (or the driver holds).

    `earliest` and `ends` are per partition of the table. Offsets below `earliest` become gaps.
    """
    if wanted.hold:
        return before
    firsts = [
        before.partitions[p].next if p < len(before.partitions) else start for p, start in enumerate(wanted.starts)
    ]
    gaps = tuple(PlannedGap(p, first, earliest[p]) for p, first in enumerate(firsts) if first < earliest[p])
    firsts = [max(first, earliest[p]) for p, first in enumerate(firsts)]
    for p, first in enumerate(firsts):
        if first > ends[p]:
            raise InvariantViolation(
                "E-8",
                f"partition {p} was read to offset {first}, but the stream ends at {ends[p]}",
                hint="the topic lost messages or was replaced; re-create the table",
            )
    nexts = _share(firsts, ends, min(max_rows, wanted.max_rows))
    if not gaps and all(first == following for first, following in zip(firsts, nexts, strict=True)):
        return before
    return EpochPlan(
        config_version=wanted.config_version,
        topic_incarnation=before.topic_incarnation,
        at_ms=at_ms,
        partitions=tuple(
            PlannedRange(first, following, end) for first, following, end in zip(firsts, nexts, ends, strict=True)
        ),
        gaps=gaps,
    )


def _share(firsts: Sequence[int], ends: Sequence[int], max_rows: int) -> list[int]:
    """Fills the partitions evenly, small backlogs first, until `max_rows` are given away."""
    nexts = list(firsts)
    left = max_rows
    waiting = sorted(range(len(firsts)), key=lambda p: (ends[p] - firsts[p], p))
    for index, p in enumerate(waiting):
        given = min(ends[p] - firsts[p], left // (len(waiting) - index))
        nexts[p] = firsts[p] + given
        left -= given
    return nexts


class Share(msgspec.Struct, frozen=True, array_like=True):
    """What one task does of one partition: offsets of [gap_first, first) are a gap, those of [first, next) are read."""

    partition: int
    gap_first: int
    first: int
    next: int

    @property
    def gap(self) -> OffsetRange:
        return OffsetRange(self.gap_first, self.first)

    @property
    def range(self) -> OffsetRange:
        return OffsetRange(self.first, self.next)


def shares_of(plan: EpochPlan, earliest: Sequence[int]) -> tuple[Share, ...]:
    """What is to do per partition when the plan runs. What expired between planning and now widens the gap: decided
    once, just before the tasks of a run start."""
    shares = []
    for p, planned in enumerate(plan.partitions):
        gap = plan.gap_of(p)
        first = min(max(planned.first, earliest[p]), planned.next)
        share = Share(p, gap.first if gap else planned.first, first, planned.next)
        if share.gap_first < share.next:
            shares.append(share)
    return tuple(shares)


class SeedShare(msgspec.Struct, frozen=True, array_like=True):
    """What a task reads of the table itself: rows of a partition with offsets in [first, next)."""

    partition: int
    first: int
    next: int


def seed_shares(
    firsts: Sequence[int], ends: Sequence[int], tasks_max: int, page_offsets: int
) -> tuple[tuple[SeedShare, ...], ...]:
    """The table in pages, in as many groups as tasks may run, of about equal size; at least one group, maybe empty."""
    pages = [
        SeedShare(partition, first, min(end, first + page_offsets))
        for partition, (start, end) in enumerate(zip(firsts, ends, strict=True))
        for first in range(start, end, page_offsets)
    ]
    count = max(1, min(tasks_max, len(pages)))
    return tuple(tuple(pages[index::count]) for index in range(count))


def tasks_of(shares: Sequence[Share], tasks_max: int) -> tuple[tuple[Share, ...], ...]:
    """Shares in as many groups as their rows are worth, of about equal size; at least one group, maybe empty.
    Partitions stay whole: blocks of a partition are appended in offset order."""
    rows = sum(share.range.length for share in shares)
    count = max(1, min(tasks_max, len(shares), -(-rows // ROWS_PER_TASK)))
    groups: list[list[Share]] = [[] for _ in range(count)]
    sizes = [0] * count
    for share in sorted(shares, key=lambda share: (-share.range.length, share.partition)):
        smallest = sizes.index(min(sizes))
        groups[smallest].append(share)
        sizes[smallest] += share.range.length
    return tuple(tuple(sorted(group, key=lambda share: share.partition)) for group in groups)
