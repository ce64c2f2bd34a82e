# SPDX-License-Identifier: Apache-2.0
"""Which epochs a table's epoch log closes, where they end, and when: partition 0 read as it grows (it decides), and
nothing else believed."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cremant.epoch.format import Head, peek
from cremant.epoch.records import EpochMark, Fence, Reset
from cremant.log.api import Log
from cremant.model.errors import PeerError

Staleness = Callable[[Sequence[int], float], float]


class Mark(NamedTuple):
    epoch: int
    #: Per partition, the offset after the epoch.
    ends: tuple[int, ...]
    updates: int
    generation: int
    #: When the log took it, and for how long the oldest row that it misses had been there.
    at_ms: float
    behind_ms: float = 0.0


class Marks:
    """A thread that follows partition 0, from where the log begins; `stop` ends it and closes the log. `staleness_ms`:
    how far behind the stream a vector of ends is at a time."""

    def __init__(
        self,
        log: Log,
        topic: str,
        incarnation: str,
        staleness_ms: Callable[[Sequence[int], float], float] | None = None,
    ) -> None:
        self.failed: BaseException | None = None
        self._log = log
        self._topic = topic
        self._incarnation = incarnation
        self._staleness_ms = staleness_ms or (lambda ends, at_ms: 0.0)
        self._marks: list[Mark] = []
        self._epochs: list[int] = []
        self._generation = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def start(self) -> Marks:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)
        self._log.close()

    def add(self, head: Head, at_ms: float) -> None:
        """One record, in log order (E-1: after a Fence lower generations are not believed; E-3: closed once)."""
        with self._lock:
            if isinstance(head, Fence):
                self._generation = max(self._generation, head.generation)
            elif head.generation < self._generation:
                return
            elif isinstance(head, Reset):
                kept = bisect_right(self._epochs, head.epoch)
                del self._marks[kept:], self._epochs[kept:]
            elif isinstance(head, EpochMark) and not (self._epochs and head.epoch <= self._epochs[-1]):
                ends = tuple(line.end for line in head.partitions)
                updates = sum(line.updates for line in head.partitions)
                self._epochs.append(head.epoch)
                behind_ms = self._staleness_ms(ends, at_ms)
                self._marks.append(Mark(head.epoch, ends, updates, head.generation, at_ms, behind_ms))

    def between(self, after: int, last: int) -> list[Mark]:
        """Of epochs in (after, last]."""
        with self._lock:
            return self._marks[bisect_right(self._epochs, after) : bisect_right(self._epochs, last)]

    def newest(self) -> Mark | None:
        with self._lock:
            return self._marks[-1] if self._marks else None

    def at(self, epoch: int) -> Mark | None:
        """The newest mark that is not above `epoch`; None before the first."""
        with self._lock:
            found = bisect_right(self._epochs, epoch)
            return self._marks[found - 1] if found else None

    def wait_for(self, ends: tuple[int, ...], deadline_s: float) -> Mark:
        """Until an epoch ends at or past `ends` everywhere."""
        until = time.monotonic() + deadline_s
        while True:
            mark = self.newest()
            if mark is not None and all(end >= wanted for end, wanted in zip(mark.ends, ends, strict=True)):
                return mark
            assert self.failed is None, self.failed
            assert time.monotonic() < until, f"no epoch reached {ends} within {deadline_s} s, the newest is {mark}"
            time.sleep(0.1)

    def _follow(self) -> None:
        position = 0
        while not self._stop.is_set():
            try:
                position = self._read(position)
            except PeerError:
                self._stop.wait(0.5)  # brokers are away
            except BaseException as error:
                self.failed = error
                raise

    def _read(self, position: int) -> int:
        """Everything from `position` on that is there. Answers where to go on."""
        reader = self._log.reader(self._topic, 0, position or self._log.earliest(self._topic, 0))
        try:
            while not self._stop.is_set():
                batch = reader.read(max_messages=500, max_bytes=16 * 1024 * 1024)
                if batch is None:
                    position = reader.position
                    self._log.wait({(self._topic, 0): position}, 0.2)
                    continue
                for value, at_ms in zip(batch.values, batch.timestamps_ms.tolist(), strict=True):
                    self.add(peek(value.as_buffer(), self._incarnation), at_ms)
                position = batch.next_offset
        finally:
            reader.close()
        return position
