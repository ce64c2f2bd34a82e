# SPDX-License-Identifier: Apache-2.0
"""Versions of the rows that one partition serves on a server: of its tail, which grows, and of its sealed segments.

    take(batch, epoch) ... apply(epoch, updates), closed(epoch)        as the reader of the epoch log says
    hand_over / attach / detach                                        as segments are installed, fetched, let go

Rules:

- Every update goes to the tail or to one segment, by its offset; what lies outside of all of them is somebody else's
  and ignored; inside, a row that is not there stops the partition (U-1).
- One lock for whoever changes anything; readers take `tail`, or a segment's versions, as they are (versions.py).
- A segment that is attached has the updates of everything that is closed here, or is ahead of it: then what the reader
  meets before the position of its versions is history to it, Resets, too.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from cremant.model.names import OFFSET, SUB_ROW
from cremant.segment.locations import Int32s, Int64s, Locations
from cremant.segment.versions import Flags, Versions, by_location, deleted_rows, delta

_GROWTH_ROWS_MIN = 4096
#: Behind every record of a log.
_NOW = 2**62


class TailVersions:
    """Versions of a tail's rows, in arrays that grow by doubling. Whoever writes holds a lock; readers take `view`."""

    def __init__(self, epoch: int) -> None:
        self.base = self.epoch = epoch
        #: Rows [first, last) of the arrays are in use.
        self._first = self._last = 0
        self._arrays = _Arrays.of(0)
        #: Some row has a sub-row, or is deleted.
        self._sub_rows = self._deletes = False
        self._view = self._made_view()

    @property
    def view(self) -> Versions:
        """All rows as they are now; rows that are taken later are not in it, updates are."""
        return self._view

    def take(self, batch: pa.RecordBatch, epoch: int, delete_column: str | None) -> None:
        rows = batch.num_rows
        if not rows:
            return
        self._reserve(rows)
        now, first, last = self._arrays, self._last, self._last + rows
        now.offsets[first:last] = batch.column(OFFSET).to_numpy()
        now.sub_rows[first:last] = sub_rows = batch.column(SUB_ROW).to_numpy()
        now.valid_from[first:last] = now.valid_until[first:last] = delta(epoch, self.base)
        deleted = deleted_rows(batch, delete_column)
        now.deleted[first:last] = deleted if deleted is not None else False
        self._sub_rows |= bool(sub_rows.any())
        self._deletes |= deleted is not None
        self._last = last
        self._view = self._made_view()

    def drop_below(self, offset: int) -> None:
        self._first += self._view.locations.first_at(offset)
        self._view = self._made_view()

    def truncate(self, offset: int) -> None:
        self._last = self._first + self._view.locations.first_at(offset)
        self._view = self._made_view()

    def closed(self, epoch: int) -> None:
        self.epoch = epoch
        self._view.epoch = epoch

    def roll_back(self, epoch: int) -> None:
        self.epoch = epoch
        self._view.roll_back(epoch)
        self._view.epoch = epoch

    def _reserve(self, rows: int) -> None:
        """Arrays in use are never moved: a reader may hold them, and misses only what comes later."""
        if self._last + rows <= len(self._arrays.offsets):
            return
        used = self._last - self._first
        grown = _Arrays.of(max(_GROWTH_ROWS_MIN, 2 * (used + rows)))
        for new, old in zip(grown.all, self._arrays.all, strict=True):
            new[:used] = old[self._first : self._last]
        self._arrays, self._first, self._last = grown, 0, used

    def _made_view(self) -> Versions:
        now, used = self._arrays, slice(self._first, self._last)
        locations = Locations.of(now.offsets[used], now.sub_rows[used] if self._sub_rows else None)
        return Versions(
            locations, now.valid_from[used], now.valid_until[used], base=self.base, epoch=self.epoch,
            deleted=now.deleted[used] if self._deletes else None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Arrays:
    offsets: Int64s
    sub_rows: Int32s
    valid_from: Int32s
    valid_until: Int32s
    deleted: Flags

    @classmethod
    def of(cls, rows: int) -> _Arrays:
        return cls(
            np.zeros(rows, np.int64), np.zeros(rows, np.int32), np.zeros(rows, np.int32), np.zeros(rows, np.int32),
            np.zeros(rows, np.bool_),
        )  # fmt: skip

    @property
    def all(self) -> tuple[np.ndarray, ...]:
        return self.offsets, self.sub_rows, self.valid_from, self.valid_until, self.deleted


@dataclass(frozen=True, slots=True)
class _Attached:
    """A segment's versions, and which offsets of the partition are its. They were as of log offset `since`."""

    first: int
    end: int
    versions: Versions
    since: int = 0


class PartitionVersions:
    """Versions of one partition on this server. `epoch`: last closed one; `delete_column`: as the table names it.
    `log_offset`: of the next record. Methods that carry out a record say by `at` where it is in the log."""

    def __init__(self, start_offset: int, epoch: int, delete_column: str | None, log_offset: int = _NOW) -> None:
        self._at = log_offset - 1
        self.lock = threading.RLock()
        self.delete_column = delete_column
        #: Last closed epoch; last one whose updates are in: a moment ahead of it while an epoch is being closed.
        self.epoch = self.applied = epoch
        #: Rows below belong to segments, whether these are here or not.
        self.rows_from = start_offset
        self._tail = TailVersions(epoch)
        self._segments: dict[str, _Attached] = {}
        #: Epochs between (both exclusive) were taken back: by the last Reset that was read, to what was closed next.
        self._void: tuple[int, int] | None = None
        #: Where in the log that Reset is.
        self._reset_at = -1
        #: Of hosted rows, and of rows that others have.
        self.updates_applied = 0
        self.updates_ignored = 0

    @property
    def tail(self) -> Versions:
        return self._tail.view

    @property
    def horizon(self) -> int:
        """Oldest epoch that all rows here can be asked of."""
        with self.lock:
            return max((held.versions.horizon for held in self._segments.values()), default=0)

    def take(self, batch: pa.RecordBatch, epoch: int) -> None:
        """Rows of the tail; those below `rows_from` are not."""
        with self.lock:
            self._tail.take(batch, epoch, self.delete_column)

    def apply(self, epoch: int, updates: pa.RecordBatch, *, at: int = _NOW) -> None:
        """Raises InvariantViolation when an update of hosted rows does not fit."""
        offsets, sub_rows, ops = by_location(updates)
        with self.lock:
            done, self._at = 0, at
            for hosted in (*self._current(), _Attached(self.rows_from, 2**62, self._tail.view)):
                first, end = np.searchsorted(offsets, (hosted.first, hosted.end)).tolist()
                if first < end:
                    hosted.versions.apply(epoch, offsets[first:end], sub_rows[first:end], ops[first:end])
                    done += end - first
                hosted.versions.closed(epoch)
            self.applied = epoch
            self.updates_applied += done
            self.updates_ignored += len(offsets) - done

    def closed(self, epoch: int, *, at: int = _NOW) -> None:
        with self.lock:
            self._at = at
            if self._void is not None and self._void[1] == _NOW:
                self._void = (self._void[0], epoch)
            for hosted in self._current():
                hosted.versions.closed(epoch)
            self._tail.closed(epoch)
            self.epoch = self.applied = epoch

    def roll_back(self, epoch: int, next_offset: int, *, at: int = _NOW) -> None:
        with self.lock:
            self._at = self._reset_at = at
            self._void = (epoch, _NOW)
            self._tail.truncate(next_offset)
            self._tail.roll_back(epoch)
            for hosted in self._current():
                hosted.versions.roll_back(epoch)
            self.epoch = self.applied = epoch

    def restart(self, offset: int, epoch: int, log_offset: int) -> None:
        """The tail is empty and goes on at `offset` after a hole in what was read, which ends before `log_offset`:
        segments that lack updates of it are nobody's."""
        with self.lock:
            self._at = log_offset - 1
            self._segments = {name: held for name, held in self._segments.items() if held.versions.epoch >= epoch}
            self._tail = TailVersions(epoch)
            self.rows_from, self.epoch, self.applied = offset, epoch, epoch

    def tail_versions(self, first: int, end: int) -> Versions | None:
        """Of the tail's rows with offsets [first, end), for whoever is to own them; None unless all of them are here.
        The tail keeps its own."""
        with self.lock:
            if first < self.rows_from:
                return None
            view = self._tail.view
            return view.between(view.locations.first_at(first), view.locations.first_at(end)).copied()

    def hand_over(self, segment: str, first: int, end: int, rows: int, order: Int32s | None) -> Versions | None:
        """The segment has the tail's rows of these offsets from now on; its versions, None if they were not all here.
        `order`: see Versions."""
        with self.lock:
            versions = self.tail_versions(first, end)
            if versions is None or versions.rows != rows:
                return None
            versions.order = order
            self._segments[segment] = _Attached(first, end, versions)
            self._tail.drop_below(end)
            self.rows_from = max(self.rows_from, end)
            return versions

    def drop_below(self, offset: int) -> None:
        """Rows below are of segments now."""
        with self.lock:
            self._tail.drop_below(offset)
            self.rows_from = max(self.rows_from, offset)

    def attach(self, segment: str, first: int, end: int, versions: Versions, *, since: int = 0) -> bool:
        """From now on updates of offsets [first, end) go to `versions`, which are as of log offset `since`. False, and
        nothing has changed, if they lack updates that were applied here, or a Reset that was read here took some of
        theirs back: the log is to be replayed into them first."""
        with self.lock:
            if since <= self._at and versions.epoch < self.applied:
                return False
            if self._void is not None and since <= self._reset_at and versions.epoch > self._void[0]:
                return False
            self._segments[segment] = _Attached(first, end, versions, since)
            return True

    def exchange(self, segment: str, before: Versions, after: Versions) -> bool:
        """Updates go to `after` from now on, which is made of `before` as it is now. False, and nothing has changed, if
        they do not go to that."""
        with self.lock:
            held = self._segments.get(segment)
            if held is None or held.versions is not before:
                return False
            self._segments[segment] = replace(held, versions=after)
            return True

    def detach(self, segment: str) -> None:
        with self.lock:
            self._segments.pop(segment, None)

    def is_void(self, epoch: int) -> bool:
        """It was closed once, and taken back: who asks for it has not heard of that. Known from the next epoch on."""
        void = self._void
        return void is not None and void[1] < _NOW and void[0] < epoch < void[1]

    def has_read(self, log_offset: int) -> bool:
        with self.lock:
            return log_offset <= self._at

    def is_current(self, segment: str) -> bool:
        """Its versions are as of where the reader is."""
        with self.lock:
            held = self._segments.get(segment)
            return held is not None and held.since <= self._at + 1

    def _current(self) -> list[_Attached]:
        """Segments that the record at hand concerns."""
        return [hosted for hosted in self._segments.values() if hosted.since <= self._at]

    def attached(self) -> dict[str, Versions]:
        with self.lock:
            return {name: hosted.versions for name, hosted in self._segments.items()}
