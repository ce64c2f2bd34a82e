# SPDX-License-Identifier: Apache-2.0
"""When a partition that has just started may be asked: once it has caught up, not once a timer ran out.

First it reads its log up to where that ended at the start: what was acknowledged before is visible then. That took
time, so it goes on until it finds the end of the log, or is fresh enough for its table (`fresh_within_ms`). A log that
grows faster than it is read must not keep a partition from answering for ever: `bound_ms` after the first goal it may
be asked all the same, and its watermark says how far it is. A dead pipeline, a paused or an idle table hold up nothing:
their log has an end.
"""

from __future__ import annotations

import time
from enum import StrEnum

#: Of a table that promises nothing.
FRESH_WITHIN_MS = 2_000
BOUND_MS = 60_000


class EndedBy(StrEnum):
    END = "endOfLog"
    FRESH = "fresh"
    BOUND = "bound"


class CatchUp:
    """Offsets are those of the epoch log. `goal`: where it ended at the start, None: not known yet."""

    def __init__(self, first: int, *, fresh_within_ms: int | None = None, bound_ms: int = BOUND_MS) -> None:
        self.first = first
        self.goal: int | None = None
        #: Where the log ended when it was last read to its end, and the wall time at which it last said so.
        self.end: int | None = None
        self.read_at_ms: int | None = None
        self.ended_by: EndedBy | None = None
        self._fresh_within_ms = fresh_within_ms or FRESH_WITHIN_MS
        self._bound_ms = bound_ms
        self._reached_at_ms: int | None = None

    @property
    def done(self) -> bool:
        return self.ended_by is not None

    def found_end(self, end: int, answered_s: float) -> None:
        """Of the log, which said so at `answered_s` of the monotonic clock."""
        self.end = end
        self.read_at_ms = int((time.time() - (time.monotonic() - answered_s)) * 1000)

    def look(self, offset: int, *, at_end: bool, lag_ms: int | None, now_ms: int) -> bool:
        """After each turn: True if it has just caught up. `at_end`: it found the end of the log; `lag_ms`: of its
        freshness, None: unknown; `now_ms`: of a clock that never jumps."""
        if self.done or self.goal is None or offset < self.goal:
            return False
        if self._reached_at_ms is None:
            self._reached_at_ms = now_ms
        if at_end:
            self.ended_by = EndedBy.END
        elif lag_ms is not None and lag_ms <= self._fresh_within_ms:
            self.ended_by = EndedBy.FRESH
        elif now_ms - self._reached_at_ms >= self._bound_ms:
            self.ended_by = EndedBy.BOUND
        return self.done

    def progress(self, offset: int) -> str:
        """How far it is, for people."""
        if self.goal is None:
            return "its log was not read yet"
        if offset < self.goal:
            return f"{offset - self.first:,} of {self.goal - self.first:,} log records"
        return "all read that was there at the start, not fresh yet"
