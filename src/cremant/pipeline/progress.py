# SPDX-License-Identifier: Apache-2.0
"""How far a table's pipeline is with its stream, as its heartbeats tell the cluster (`StreamProgress`).

Nothing is asked of the stream for this: the table's thread notes what it reads anyway, Spark's thread what it plans
and closes. A question that stays without an answer shows at once, not when its deadline has passed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from msgspec.structs import replace

from cremant.epoch.records import PartitionMark
from cremant.model.cluster import StreamProgress
from cremant.model.errors import CremantError
from cremant.pipeline.plan import EpochPlan

#: A stream that has not answered for this long is said not to answer. Brokers answer within milliseconds.
SLOW_S = 1.0


class Progress:
    """Thread-safe. Outlives runs: a table that is started again goes on where it was."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._partitions: tuple[StreamProgress, ...] = ()
        self._error: str | None = None
        #: What was asked, and when (monotonic); None while nothing is.
        self._asked: tuple[str, float] | None = None

    @property
    def partitions(self) -> tuple[StreamProgress, ...]:
        """Empty before the first run."""
        return self._partitions

    @property
    def error(self) -> str | None:
        """Why the stream could not be read when last tried; None: it answered, or was not asked."""
        with self._lock:
            if self._asked is None:
                return self._error
            what, asked_s = self._asked
        waited_s = time.monotonic() - asked_s
        if waited_s < SLOW_S:
            return self._error
        return self._error or f"{what}: no answer for {waited_s:.0f} s"

    @contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """Around whatever asks the stream; `what` in words. An error is kept until the stream answers."""
        with self._lock:
            self._asked = what, time.monotonic()
        error: str | None = None
        try:
            yield
        except CremantError as failed:
            error = str(failed)
            raise
        finally:
            with self._lock:
                self._asked, self._error = None, error

    def begin(self, closed: Sequence[int]) -> None:
        """A run starts at these offsets. Of a partition that goes back, what was closed behind them is forgotten."""
        with self._lock:
            known = {one.partition: one for one in self._partitions}
            self._partitions = tuple(
                replace(before, closed=end, planned=end)
                if (before := known.get(partition)) is not None and before.closed is not None and before.closed <= end
                else StreamProgress(partition=partition, closed=end, planned=end)
                for partition, end in enumerate(closed)
            )

    def rest(self) -> None:
        """Nobody asks the stream any more, so nobody knows whether it answers."""
        with self._lock:
            self._error = None

    def forget(self) -> None:
        """Another process is in charge now, or nobody."""
        with self._lock:
            self._partitions, self._error = (), None

    def read(self, ends: Sequence[int], at_ms: int) -> None:
        """The stream ended at `ends` at `at_ms` (taken before it was asked)."""
        with self._lock:
            self._partitions = tuple(
                replace(one, stream_end=ends[one.partition], read_at_ms=at_ms)
                if one.partition < len(ends) and (one.read_at_ms or 0) <= at_ms
                else one
                for one in self._partitions
            )

    def planned(self, plan: EpochPlan) -> None:
        """An epoch is being made."""
        if plan.at_ms and plan.seed is None:
            self.read([planned.stream_end for planned in plan.partitions], plan.at_ms)
        with self._lock:
            self._partitions = tuple(
                replace(one, planned=plan.partitions[one.partition].next)
                if one.partition < len(plan.partitions)
                else one
                for one in self._partitions
            )

    def closed(self, lines: Sequence[PartitionMark]) -> None:
        """An epoch is closed; `lines` of its mark."""
        with self._lock:
            self._partitions = tuple(
                _closed(one, lines[one.partition]) if one.partition < len(lines) else one for one in self._partitions
            )

    def caught_up(self, partitions: Sequence[int], at_ms: int) -> None:
        """A heartbeat says of these partitions that everything up to `at_ms` is closed."""
        with self._lock:
            self._partitions = tuple(
                replace(one, caught_up_at_ms=at_ms) if one.partition in partitions else one for one in self._partitions
            )


def _closed(before: StreamProgress, line: PartitionMark) -> StreamProgress:
    newest = [at_ms for at_ms in (before.max_ingestion_ms, line.max_ingestion_ms) if at_ms is not None]
    reached = line.reached_at_ms if line.reached_at_ms is not None else before.caught_up_at_ms
    return replace(
        before, closed=line.end, planned=max(line.end, before.planned or 0),
        max_ingestion_ms=max(newest, default=None), caught_up_at_ms=reached,
    )  # fmt: skip
