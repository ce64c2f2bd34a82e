# SPDX-License-Identifier: Apache-2.0
"""How far one partition is visible, now and as of its last closed epochs (freshness design).

Rules:

- Never optimistic: what is not known stays None, and where a moment is forgotten an earlier one stands for it.
- The time that counts is the newest of all messages that are visible, and `source` says whose clock gave it.
- What a mark claims of some rows stays true while these rows are there: after a rewind, a restart or a fetch the mark
  of the rows that are left holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from cremant.epoch.effects import TakeRows
from cremant.epoch.records import PartitionMark
from cremant.model.offsets import Position, Watermark, weakest
from cremant.model.segments import SegmentMetadata
from cremant.segment.build import newest

#: Epochs whose freshness is remembered: more than a query lags behind, or a segment's build.
EPOCHS_SEEN = 1024
#: The stream gave no time: that of indexing stands for it.
INDEX = "index"


class Marks:
    """`known`: what was visible where it begins, as the rows' segments say. One thread changes it at a time, any reads.

    Since the process reads the partition: `rows` taken; messages of closed epochs that were `rejected` because of an
    error, or `filtered`; `stream_end`: end of the stream as last told, None: not yet."""

    def __init__(self, start: Position, known: Watermark | None = None, *, errors_hold: bool = False) -> None:
        self._errors_hold = errors_hold
        self.last_indexed_ms: int | None = None
        self.rows = self.rejected = self.filtered = 0
        self.stream_end: int | None = None
        self.begin(start, known)

    def begin(self, start: Position, known: Watermark | None) -> None:
        """At `start`, where everything before is in segments."""
        known = known or Watermark(next_offset=0, epoch=0)
        self.now = self._allowed(_at(known, start.next_offset, start.epoch))
        self._began = self.now
        self._seen: deque[Watermark] = deque((self.now,), maxlen=EPOCHS_SEEN)
        #: The last of them, which nearly all queries ask for.
        self._newest = self.now

    def errors_hold(self, errors_hold: bool) -> None:
        """Switched off, nothing is held any more; switched on, errors count from now on."""
        if errors_hold != self._errors_hold:
            self._errors_hold = errors_hold
            self.now, self._began = self._allowed(self.now), self._allowed(self._began)
            self._seen = deque(map(self._allowed, self._seen), maxlen=EPOCHS_SEEN)
            self._newest = self._allowed(self._newest)

    def _allowed(self, mark: Watermark) -> Watermark:
        return mark if self._errors_hold else msgspec.structs.replace(mark, held_at_ms=None)

    # --- what happens to the partition ---

    def taken(self, taken: TakeRows, rows: int, now_ms: int, logged_ms: int) -> None:
        """Its rows, `rows` of them new, are where queries find them. `logged_ms`: when the epoch log got them. No
        message is newer, whatever a clock that is ahead says of it: else one such message made all that comes after
        it look fresh. And where the stream gives no time, that one does not change when the log is read again."""
        self.last_indexed_ms = now_ms
        self.rows += rows
        time_ms, source = taken.max_ingestion_ms, taken.timestamp_type
        if time_ms is not None:
            time_ms = min(time_ms, logged_ms)
        elif rows or source == "create":
            time_ms, source = min(now_ms, logged_ms), INDEX
        self._advance(next_offset=taken.range.next)
        self._hold(taken.rejected_from_ms)
        if time_ms is None:
            return
        before_ms = self.now.max_ingestion_ms
        if before_ms is None or time_ms > before_ms:
            self._advance(max_ingestion_ms=time_ms, source=source)
        elif time_ms == before_ms:
            self._advance(source=weakest((source, self.now.source)))

    def moved(self, next_offset: int) -> None:
        """There are no rows up to there."""
        self._advance(next_offset=next_offset)

    def closed(self, epoch: int, line: PartitionMark) -> None:
        self.rejected += line.rejected
        self.filtered += line.filtered
        self.stream_end = line.stream_end
        self._advance(epoch=epoch)
        self._see()

    def caught_up(self, at_ms: int) -> None:
        """Nothing in the stream at `at_ms` is not visible."""
        self.stream_end = max(self.stream_end or 0, self.now.next_offset)
        self._advance(caught_up_at_ms=newest(self.now.caught_up_at_ms, at_ms))
        self._see()

    def rolled_back(self, next_offset: int, epoch: int) -> None:
        while self._seen and (self._seen[-1].epoch > epoch or self._seen[-1].next_offset > next_offset):
            self._seen.pop()
        self.now = _at(self._seen[-1] if self._seen else self._began, next_offset, epoch)
        self._see()

    def _hold(self, rejected_from_ms: int | None) -> None:
        if self._errors_hold and rejected_from_ms is not None:
            held_ms = self.now.held_at_ms
            self._advance(held_at_ms=rejected_from_ms if held_ms is None else min(held_ms, rejected_from_ms))

    def _advance(self, **changes: int | str | None) -> None:
        self.now = msgspec.structs.replace(self.now, **changes)

    def _see(self) -> None:
        """As its epoch was closed, or (the same epoch again) as more became known of it."""
        if self._seen and self._seen[-1].epoch == self.now.epoch:
            self._seen[-1] = self.now
        else:
            self._seen.append(self.now)
        self._newest = self.now

    # --- what was visible when ---

    def at_epoch(self, epoch: int) -> Watermark:
        """How far a query at a closed epoch sees; of one long ago, nothing is known."""
        newest_seen = self._newest
        if newest_seen.epoch <= epoch:
            return newest_seen
        for seen in reversed(tuple(self._seen)):
            if seen.epoch <= epoch:
                return seen
        return _at(Watermark(next_offset=0, epoch=0, source=self.now.source), 0, epoch)

    def at_cut(self, end: Position) -> Watermark:
        """What whoever has the rows before a closed position may claim; of one before the beginning, nothing."""
        for seen in (*reversed(tuple(self._seen)), self._began):
            if seen.epoch <= end.epoch and seen.next_offset <= end.next_offset:
                return _at(seen, end.next_offset, end.epoch)
        return _at(Watermark(next_offset=0, epoch=0, source=self.now.source), end.next_offset, end.epoch)


def known_at(sealed: Iterable[SegmentMetadata], start: Position) -> Watermark | None:
    """How far a partition was visible at `start`, as its last segment before says. Those of former versions know the
    times of their rows only, and not whose clock gave them."""
    before = [one for one in sealed if one.end_offset is not None and one.end_offset <= start.next_offset]
    last = max(before, key=lambda one: one.sequence, default=None)
    if last is None or last.mark is not None:
        return last.mark if last is not None else None
    ingested_ms = newest(*(one.max_ingestion_ms for one in before))
    indexed_ms = newest(*(one.last_indexed_ms for one in before))
    if ingested_ms is None and indexed_ms is None:
        return None
    source = "create" if ingested_ms is not None else INDEX
    return Watermark(next_offset=0, epoch=0, max_ingestion_ms=ingested_ms or indexed_ms, source=source)


def _at(mark: Watermark, next_offset: int, epoch: int) -> Watermark:
    return msgspec.structs.replace(mark, next_offset=next_offset, epoch=epoch)
