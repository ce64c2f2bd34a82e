# SPDX-License-Identifier: Apache-2.0
"""Offsets, ranges of them, and positions in the epoch log.

Offsets are non-negative integers; a range is half-open, [first, next). A *position* is where a reader of a
partition's epoch log may start again (rule E-1): always just after a mark.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class OffsetRange(msgspec.Struct, frozen=True, array_like=True):
    first: int
    next: int

    @property
    def length(self) -> int:
        return self.next - self.first

    def overlaps(self, other: OffsetRange) -> bool:
        return self.first < other.next and other.first < self.next


class Position(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Where to read on in one partition of an epoch log: just after mark(`epoch`), rows continue at `next_offset`.

    `generation` is the one in force there: without it, records of an orphaned lower generation that follow would
    be believed (8 of 500 model runs wrong).
    """

    log_offset: int
    epoch: int
    generation: int
    next_offset: int


#: Whose clock gave a time, the weakest claim first: ours at indexing, the producer's, the log's at append.
_SOURCES = ("index", "create", "logAppend")


def weakest(sources: Iterable[str | None]) -> str | None:
    """Of the sources that are known, the one that proves least; None: none is."""
    return min((source for source in sources if source is not None), key=_SOURCES.index, default=None)


class Watermark(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How far one replica of a partition is visible to queries (freshness design).

    `next_offset`: the next row not yet visible. `epoch`: last one closed and applied. `max_ingestion_ms`: newest
    ingestion time among visible rows, None if unknown. `caught_up_at_ms`: wall time at which this position was
    proven to be the end of the stream, None if never. `source`: logAppend, create or index. `held_at_ms`: ingestion
    time of the oldest rejected message, of a table whose errors hold the mark; None otherwise.
    """

    next_offset: int
    epoch: int
    max_ingestion_ms: int | None = None
    caught_up_at_ms: int | None = None
    source: str = "create"
    held_at_ms: int | None = None

    @property
    def stamped_by(self) -> str | None:
        """`source`, where a message was ever seen."""
        return self.source if self.max_ingestion_ms is not None else None

    @property
    def freshness_ms(self) -> int | None:
        """Wall time up to which everything in the stream is visible, as far as it can be proven."""
        newest, caught_up = self.max_ingestion_ms, self.caught_up_at_ms
        if newest is None or (caught_up is not None and caught_up > newest):
            newest = caught_up
        if newest is None or self.held_at_ms is None:
            return newest
        return min(newest, self.held_at_ms)
