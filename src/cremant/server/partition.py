# SPDX-License-Identifier: Apache-2.0
"""Consuming one partition of a table: epoch log -> reader (order, fencing) -> tail -> watermark.

Rules (epoch log and freshness designs):

- `turn` is called by one thread at a time: a bounded read, then the reader's effects in order. It reads without the
  partition's lock: a log that does not answer holds up nobody who looks at the partition, moves it or closes it.
- The watermark advances only after the rows are in the tail. Whoever needs both reads the watermark first.
- After a start the partition is *behind* until it has caught up (catching_up.py).
- A rule that does not hold stops the partition for good, with what is visible staying visible and queries on it
  answered `behind`; damaged or unreachable log files are retried with backoff. Nothing is skipped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import assert_never

from cremant.epoch import format as records
from cremant.epoch.coverage import rows_from
from cremant.epoch.reader import (
    CaughtUp,
    Effect,
    EpochClosed,
    Fenced,
    GapTaken,
    PartitionReader,
    RolledBack,
    Stopped,
    TakeRows,
    TakeUpdates,
)
from cremant.log.api import NO_TIMESTAMP, Log, LogReader, MessageBatch, OffsetExpired
from cremant.model.errors import CremantError, InvariantViolation, NotFound, PeerError, WorldError
from cremant.model.limits import MIB
from cremant.model.offsets import Position, Watermark
from cremant.model.table import FreshnessSla
from cremant.model.upsert import UpsertConfig
from cremant.segment.cuts import Closings
from cremant.segment.tail import SpillQuota, Tail
from cremant.segment.tail_versions import PartitionVersions
from cremant.server.catching_up import BOUND_MS, CatchUp
from cremant.server.marks import Marks
from cremant.server.partition_id import NO_ROWS, applied_in_part, check_log
from cremant.server.partition_id import PartitionId as PartitionId
from cremant.server.partition_id import PartitionState as PartitionState
from cremant.server.progress import Progress
from cremant.shell.backoff import Backoff
from cremant.shell.logs import log_event, log_failure
from cremant.wire.messages import EpochState

_log = logging.getLogger(__name__)

#: One turn of one partition: bounded, so that a partition that catches up does not starve the others.
TURN_MESSAGES_MAX = 256
TURN_BYTES_MAX = 8 * MIB


class Partition:
    """One (table, partition) on this server. `start`: where its open segment begins in the epoch log; `known`: how far
    it was visible there. `promise`: of its table; `catch_up_max_ms`: see catching_up.py.

    `upsert`: of an upsert table, whose rows are taken and updated as their epoch closes. `replay_from`: where the
    oldest versions of its sealed segments were saved; what lies between there and `start` updates those.
    """

    def __init__(
        self, own: PartitionId, start: Position, directory: Path, quota: SpillQuota, *,
        known: Watermark | None = None, promise: FreshnessSla = FreshnessSla(), catch_up_max_ms: int = BOUND_MS,
        upsert: UpsertConfig | None = None, replay_from: Position | None = None,
    ) -> None:  # fmt: skip
        first = min(start, replay_from or start, key=lambda position: position.log_offset)
        self.id = own
        self.upsert = upsert
        #: None: an append table.
        self.versions: PartitionVersions | None = None
        if upsert is not None:
            self.versions = PartitionVersions(start.next_offset, first.epoch, upsert.delete_column, first.log_offset)
        #: Told each state that others may rely on, None: there is none now. Called by any thread, must not block.
        self.on_epoch: Callable[[EpochState | None], None] = lambda state: None
        self.state = PartitionState.WAITING
        self.error: str | None = None
        self.marks = Marks(start, known, errors_hold=promise.errors_hold)
        self.tail = Tail(directory, start.next_offset, quota)
        #: Of rows that queries see: not before the partition has caught up once.
        self.progress = Progress(-1)
        self.closings = Closings(start)
        #: Rows ignored, rejected... are the pipeline's to report; these are what this replica took.
        self.rows_taken = 0
        self.bytes_taken = 0
        #: Monotonic seconds since when the view no longer places it here.
        self.unwanted_since_s: float | None = None
        #: Epoch log offset of the next record to read.
        self.log_offset = first.log_offset
        #: Held while a turn applies what it read, and by whoever moves the partition or reads its closings.
        self.lock = threading.RLock()
        #: How often it was moved or closed: a turn's read before that is of no use.
        self._moves = 0
        #: What closes up to there is history: of use to versions only.
        self._start = start
        #: Log offset of the record that is being applied, and when it was appended.
        self._reading_at, self._logged_ms = first.log_offset, 0
        self.catching_up = CatchUp(first.log_offset, fresh_within_ms=promise.max_lag_ms, bound_ms=catch_up_max_ms)
        #: The log no longer has what comes next.
        self._expired = False
        self._machine = PartitionReader(own.partition, first, upsert=upsert is not None)
        #: Of the last epoch that is applied, whole (with the lock held): the machine may be ahead of it.
        self.position = first
        self._partition_count = 0
        self._told: EpochState | None = None
        #: The turn's own while it reads.
        self._source: LogReader | None = None
        self._backoff = Backoff()
        self._retry_at_s = 0.0

    @property
    def behind(self) -> bool:
        """Rows that were acknowledged before this process started may not be visible yet; or it is stopped. One that
        had caught up and has trouble with its log now serves what it has, and its watermark says how far that is."""
        return not self.catching_up.done or self.state is PartitionState.STOPPED

    @property
    def lacks_history(self) -> bool:
        """What its sealed segments lack is no longer in the log: it comes no further as it is."""
        follows = self._start.next_offset >= NO_ROWS
        return self.versions is not None and self._expired and (follows or self.log_offset < self._start.log_offset)

    @property
    def visible(self) -> Watermark:
        """How far a query sees now; of an upsert table as of the last closed epoch that is applied."""
        return self.marks.now if self.versions is None else self.marks.at_epoch(self.versions.epoch)

    @property
    def state_name(self) -> str:
        blocked = self.tail.blocked
        return blocked if blocked is not None and self.state is not PartitionState.STOPPED else self.state.value

    @property
    def waits_for_log(self) -> bool:
        """A turn now would only find what the log may have got meanwhile."""
        return self._source is not None and self.tail.blocked is None and self.state is not PartitionState.STOPPED

    def turn(self, log: Log, now_ms: int) -> bool:
        """Reads and applies what is there, within bounds; True if there may be more at once."""
        if self.tail.blocked or time.monotonic() < self._retry_at_s:
            return False
        with self.lock:
            if self.state is PartitionState.STOPPED:  # also by who held the lock until now
                return False
            moves, source = self._moves, self._source
            self._source = None
        batch: MessageBatch | None = None
        failed: CremantError | None = None
        try:
            source = source or self._open(log)
            batch = source.read(max_messages=TURN_MESSAGES_MAX, max_bytes=TURN_BYTES_MAX)
        except (InvariantViolation, WorldError, PeerError, NotFound) as error:
            failed = error
        with self.lock:
            self._source = source
            if self._moves != moves:
                self._close_source()
                return True
            return self._take_in(batch, failed, now_ms)

    def _take_in(self, batch: MessageBatch | None, failed: CremantError | None, now_ms: int) -> bool:
        """What a turn read, or why it could not."""
        try:
            if failed is not None:
                raise failed
            if batch is not None:
                self._apply_batch(batch, now_ms)
                self.log_offset = batch.next_offset
            elif self._source is not None:
                self.catching_up.found_end(max(self._source.position, self.log_offset), self._source.answered_s)
            self._backoff.reset()
            self._set_state(now_ms, at_end=batch is None)
            more = batch is not None
        except InvariantViolation as error:
            self._stop(str(error))
            return False
        except (WorldError, PeerError, NotFound) as error:
            self._retry(error)
            self._look_caught_up(now_ms, at_end=False)
            more = False  # what was applied before is visible
        self._wake_waiting()
        return more

    def release(self, first: int, end: int) -> None:
        """Rows [first, end) are served from a segment: the tail begins at `end`, if they were its first ones. May be
        called while a turn runs."""
        if first <= self.tail.snapshot.first_offset < end:
            self._drop_below(end)

    def _drop_below(self, offset: int) -> None:
        self.tail.drop_below(offset)
        if self.versions is not None:
            self.versions.drop_below(offset)

    def reposition(self, start: Position, known: Watermark | None) -> None:
        """Goes on at `start`: everything before it is sealed and served from segments, which say how far that is
        visible. Of an upsert table the log up to there is read all the same, for the sake of these."""
        with self.lock:
            self._moves += 1
            self.tail.restart(start.next_offset)
            self.closings = Closings(start)
            self._start = start
            if self.versions is None or self._expired:
                self._machine = PartitionReader(self.id.partition, start, upsert=self.versions is not None)
                self.position, self.log_offset = start, start.log_offset
                self._expired = False
                if self.versions is not None:
                    self.versions.restart(start.next_offset, start.epoch, start.log_offset)
            else:
                self.versions.drop_below(start.next_offset)
            self.rows_taken = self.bytes_taken = 0
            self._close_source()
            self.marks.begin(start, known or self.marks.now)
        self._wake_waiting()
        log_event(_log, "partition goes on after a fetched segment", partition=str(self.id), offset=start.next_offset)

    def go_on_after(self, end: Position, known: Watermark | None) -> None:
        """The tail is within a segment that was fetched: it goes on behind it."""
        with self.lock:
            if self.tail.snapshot.next_offset <= end.next_offset:
                self.reposition(end, known)
            else:
                self._drop_below(end.next_offset)

    def _wake_waiting(self) -> None:
        """Queries that wait for rows which are visible by now."""
        if not self.behind:
            seen = self.visible
            self.progress.reached(seen.next_offset, seen.freshness_ms)
        self._tell_epoch()

    @property
    def epoch_state(self) -> EpochState | None:
        """What may be asked of this partition as of an epoch; None: nothing (now)."""
        if self.versions is None or self.behind:
            return None
        return EpochState(closed=self.versions.epoch, horizon=self.versions.horizon, partitions=self._partition_count)

    def _tell_epoch(self) -> None:
        state = self.epoch_state
        if state != self._told:
            self._told = state
            self.on_epoch(state)

    def promise(self, promise: FreshnessSla) -> None:
        """The table's config may have changed."""
        with self.lock:
            self.marks.errors_hold(promise.errors_hold)

    def close(self) -> None:
        with self.lock:
            self._moves += 1
            self.state = PartitionState.STOPPED
            self._close_source()
            self.tail.close()
            self._tell_epoch()
        self.progress.end()

    # --- reading ---

    def _open(self, log: Log) -> LogReader:
        check_log(log, self.id)
        topic, partition = self.id.topic, self.id.partition
        if self.catching_up.goal is None:
            self.catching_up.goal = log.latest(topic, partition)
            self.catching_up.found_end(self.catching_up.goal, time.monotonic())
        return log.reader(topic, partition, self.log_offset)

    def _apply_batch(self, batch: MessageBatch, now_ms: int) -> None:
        times = batch.timestamps_ms.tolist()
        for index, log_offset in enumerate(batch.offsets.tolist()):
            self._reading_at, self._logged_ms = log_offset, times[index] if times[index] > NO_TIMESTAMP else now_ms
            try:
                record = records.decode(batch.values[index].as_buffer(), self.id.incarnation)
            except CremantError:
                # Nothing of this record was applied: a retry begins with it.
                self.log_offset = log_offset
                raise
            try:
                for effect in self._machine.step(record, log_offset):
                    self._apply(effect, now_ms)
            except Exception as error:
                if self.versions is None or isinstance(error, InvariantViolation):
                    raise
                _log.exception("a record could not be applied", extra={"fields": {"partition": str(self.id)}})
                raise applied_in_part(self.id, log_offset, error) from error
            self.position = self._machine.position

    def _apply(self, effect: Effect, now_ms: int) -> None:
        match effect:
            case TakeRows():
                self._take(effect, now_ms)
            case GapTaken(range=gap):
                self.tail.append_gap(gap.next)
                self.marks.moved(self.tail.snapshot.next_offset)
            case TakeUpdates(epoch=epoch, batch=updates):
                if self.versions is not None:
                    self.versions.apply(epoch, updates, at=self._reading_at)
            case EpochClosed():
                self._epoch_closed(effect)
            case CaughtUp(at_ms=at_ms):
                if self._reading_at >= self._start.log_offset:  # of history: perhaps a rewind took that back
                    self.marks.caught_up(at_ms)
            case RolledBack(next_offset=next_offset, epoch=epoch):
                self._roll_back(next_offset, epoch)
            case Stopped(rule=rule, message=message, hint=hint):
                raise InvariantViolation(rule, message, hint=hint)
            case Fenced():
                pass
            case _:
                assert_never(effect)

    def _epoch_closed(self, closed: EpochClosed) -> None:
        self._partition_count = closed.partitions
        if self.versions is not None:
            self.versions.closed(closed.epoch, at=self._reading_at)
        if self._reading_at < self._start.log_offset:
            return
        self.closings.drop_below(self.tail.snapshot.first_offset)
        self.closings.add(closed.position, self.rows_taken, self.bytes_taken)
        self.marks.closed(closed.epoch, closed.line)

    def _take(self, taken: TakeRows, now_ms: int) -> None:
        first = self.tail.snapshot.next_offset
        if taken.range.first < first and taken.range.next <= first:
            return  # of sealed segments, read again for the sake of their versions
        batch = taken.batch if taken.range.first >= first else rows_from(taken.batch, first)
        if self.versions is not None:
            # Before the rows: whoever sees these finds their versions.
            self.versions.take(batch, taken.epoch)
        self.tail.append(batch, taken.range.next)
        self.rows_taken += batch.num_rows
        self.bytes_taken += int(batch.nbytes)
        self.marks.taken(taken, batch.num_rows, now_ms, self._logged_ms)

    def _roll_back(self, next_offset: int, epoch: int) -> None:
        if self.versions is not None:
            # First: whatever becomes of the tail, the reader is past the Reset, and so are its segments.
            self.versions.roll_back(epoch, next_offset, at=self._reading_at)
            if self._reading_at < self._start.log_offset or self._start.next_offset >= NO_ROWS:
                return  # of sealed segments only: the tail has no rows (yet)
        if next_offset < self.tail.snapshot.first_offset:
            raise InvariantViolation(
                "E-4",
                f"partition {self.id}: rewound to offset {next_offset}, below the sealed rows that end at "
                f"{self.tail.snapshot.first_offset}",
                hint="restart the server after the controller has dropped the segments above that epoch",
            )
        self.tail.truncate(next_offset)
        self.closings.truncate(next_offset, epoch)
        self.marks.rolled_back(next_offset, epoch)
        log_event(_log, "partition was rewound", partition=str(self.id), epoch=epoch, offset=next_offset)

    # --- states ---

    def _set_state(self, now_ms: int, *, at_end: bool) -> None:
        self.error = None
        self._look_caught_up(now_ms, at_end=at_end)
        self.state = PartitionState.CONSUMING if self.catching_up.done else PartitionState.CATCHING_UP

    def _look_caught_up(self, now_ms: int, *, at_end: bool) -> None:
        fresh_ms = self.visible.freshness_ms
        lag_ms = max(0, now_ms - fresh_ms) if fresh_ms is not None else None
        steady_ms = int(time.monotonic() * 1000)
        if self.catching_up.look(self.log_offset, at_end=at_end, lag_ms=lag_ms, now_ms=steady_ms):
            log_event(
                _log, "partition has caught up", partition=str(self.id), rows=self.tail.snapshot.rows,
                ended_by=self.catching_up.ended_by, lag_ms=lag_ms,
            )  # fmt: skip

    def _stop(self, why: str) -> None:
        self.state = PartitionState.STOPPED
        self.progress.end()
        self.error = why
        self._close_source()
        self._tell_epoch()
        log_event(_log, "partition stopped", level=logging.ERROR, partition=str(self.id), error=why)

    def _retry(self, error: CremantError) -> None:
        if self.error is None:
            log_failure(_log, f"partition {self.id} cannot read its log, it is retried", error)
        self.error = str(error)
        self._expired = isinstance(error, OffsetExpired)
        self.state = PartitionState.RETRYING
        self._retry_at_s = time.monotonic() + self._backoff.next_ms() / 1000
        self._close_source()

    def _close_source(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None
