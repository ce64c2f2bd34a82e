# SPDX-License-Identifier: Apache-2.0
"""A server's reader of one partition's epoch log: the real closings over the log's closed positions."""

from __future__ import annotations

from cremant.model.offsets import Position
from cremant.segment.cuts import Closings
from cremant.sim.completion.world import EpochLog


class Tail:
    """A reader of one partition's closed positions from `start` on."""

    def __init__(self, log: EpochLog, start: Position) -> None:
        self._log = log
        self.closings = Closings(start)
        self.first_offset = start.next_offset
        self.error: str | None = None
        self._start = start
        self.unwanted_since_ms: int | None = None

    def read(self, epochs: int) -> None:
        for _ in range(epochs):
            last = self.closings.last
            if self.error is not None or last.epoch >= self._log.end.epoch:
                return
            if last.log_offset < self._log.earliest:
                self.error = f"the epoch log begins at {self._log.earliest}, {last.log_offset} is gone"
                return
            position = self._log.positions[last.epoch + 1]
            rows = position.next_offset - self._start.next_offset
            self.closings.add(position, rows, rows)

    def sealed(self, start_offset: int, end: Position) -> None:
        """Rows below a sealed segment's end leave the tail, if they are all before what it keeps."""
        if self.first_offset <= end.next_offset <= self.closings.last.next_offset:
            if self.first_offset >= start_offset:
                self.first_offset = end.next_offset
                self.closings.drop_below(end.next_offset)
        elif self.first_offset < end.next_offset:
            self._start, self.first_offset = end, end.next_offset
            self.closings = Closings(end)
