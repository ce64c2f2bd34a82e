# SPDX-License-Identifier: Apache-2.0
"""Versions: from which epoch on and until which each row of a range is in force (upsert design, "Version = epoch").

Two columns of int32, differences to a base epoch, in (offset, sub-row) order; the rows themselves never change. A row
taken in epoch e begins superseded, [e, e), until its INSERT says otherwise; INSERT sets validFrom, DELETE validUntil:

    in force at L    validFrom <= L < validUntil
    visible at L     in force, and its delete column is not true
    known at L       validFrom <= L

Rules:

- One writer at a time; any number of readers, without a lock: what the updates of epoch e set in place changes nothing
  for an epoch below e, so a reader that asks for an epoch that was applied before gets the same rows at any moment.
- A row is inserted once and deleted once, so the columns are its whole history: any epoch from the first on can be
  asked. An INSERT of a row in force, or a DELETE of one that is not, is an error: the two would show a wrong past.
- Updates of epochs up to `epoch` are in already and are skipped: replaying a log twice changes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cremant.model.errors import InvariantViolation
from cremant.model.names import OFFSET, SUB_ROW
from cremant.model.upsert import DELETE, INSERT, UPDATE_SCHEMA, Cut, Visibility
from cremant.segment.locations import Int32s, Int64s, Locations
from cremant.segment.masks import Flags as Flags
from cremant.segment.masks import MaskCache, Masks

#: `validUntil` of a row in force.
UNSET = np.iinfo(np.int32).max
#: Both ends of a row that no epoch here took: rows of an append table that became an upsert table.
NEVER = np.iinfo(np.int32).min + 1
#: What an unset `$validUntil` (and both of a row of NEVER) reads as where nulls are not shown.
UNSET_EPOCH = np.iinfo(np.int64).max
NEVER_EPOCH = np.iinfo(np.int64).min

_STATES = itertools.count()


class Versions:
    """Of the rows at `locations`. `deleted`: rows whose delete column is true (None: none). `order`: per row of the
    segment its number here, None if rows stand in (offset, sub-row) order there, too."""

    def __init__(
        self, locations: Locations, valid_from: Int32s, valid_until: Int32s, *, base: int, epoch: int,
        deleted: Flags | None = None, order: Int32s | None = None, horizon: int = 0,
    ) -> None:  # fmt: skip
        self.locations = locations
        self.valid_from = valid_from
        self.valid_until = valid_until
        self.base = base
        #: Updates up to this epoch are in.
        self.epoch = epoch
        #: What was visible below this epoch is no longer known.
        self.horizon = horizon
        self.deleted = deleted
        self.order = order
        #: Grows when a past changes (a rewind): masks made before are of no use.
        self.rewinds = 0
        #: No other state of any versions has this number: says whether a snapshot is still the newest.
        self.changes = next(_STATES)
        self._masks = MaskCache(locations.rows, epoch)
        #: The inverse of `order`, once it was needed.
        self._place: Int32s | None = None

    @classmethod
    def superseded(
        cls, locations: Locations, epoch: int, *, deleted: Flags | None = None, base: int | None = None
    ) -> Versions:
        """Rows that epoch `epoch` has just taken; its updates are still to come."""
        base = epoch if base is None else base
        ends = np.full(locations.rows, delta(epoch, base), np.int32)
        return cls(locations, ends, ends.copy(), base=base, epoch=epoch - 1, deleted=deleted)

    @classmethod
    def unknown(cls, locations: Locations, *, epoch: int, deleted: Flags | None = None) -> Versions:
        """Rows that were there before the table had keys: none is in force before an INSERT names it."""
        ends = np.full(locations.rows, NEVER, np.int32)
        return cls(locations, ends, ends.copy(), base=epoch, epoch=epoch, deleted=deleted)

    @property
    def rows(self) -> int:
        return self.locations.rows

    @property
    def nbytes(self) -> int:
        arrays = (self.valid_from, self.valid_until, self.deleted, self.order)
        return self.locations.nbytes + sum(array.nbytes for array in arrays if array is not None)

    # --- what the log says ---

    def apply(self, epoch: int, offsets: Int64s, sub_rows: Int32s, ops: npt.NDArray[np.int8]) -> int:
        """The updates of one epoch to these rows; how many were applied (0 if the epoch is in already). Raises
        InvariantViolation, and changes nothing, when one does not fit."""
        if epoch <= self.epoch:
            return 0
        rows = self.locations.find(offsets, sub_rows)
        if (rows < 0).any():
            at = int(np.flatnonzero(rows < 0)[0])
            raise InvariantViolation(
                "U-1", f"epoch {epoch} updates row ({offsets[at]}, {sub_rows[at]}), which is not among the rows here"
            )
        inserted, deleted = rows[ops == INSERT], rows[ops == DELETE]
        self._check(epoch, inserted, in_force=False)
        self._check(epoch, deleted, in_force=True)
        now = delta(epoch, self.base)
        self.valid_from[inserted] = now
        self.valid_until[inserted] = UNSET
        self.valid_until[deleted] = now
        self._masks.changed(epoch, rows)
        self.changes = next(_STATES)
        self.epoch = epoch  # at last: from here on it may be asked for
        return len(rows)

    def _check(self, epoch: int, rows: Int64s, *, in_force: bool) -> None:
        wrong = (self.valid_until[rows] == UNSET) != in_force
        if wrong.any():
            offset, sub_row = self.location(int(rows[wrong][0]))
            op, what = ("deletes", "is not in force") if in_force else ("inserts", "is in force already")
            raise InvariantViolation("U-1", f"epoch {epoch} {op} row ({offset}, {sub_row}), which {what}")

    def closed(self, epoch: int) -> None:
        """Everything up to this epoch is in: it had nothing (more) for these rows."""
        self.epoch = max(self.epoch, epoch)

    def roll_back(self, epoch: int) -> None:
        """As it was when `epoch` was closed. Rows that were taken later are superseded rows of `epoch` then: whoever
        drops them does so by their offsets."""
        now = delta(epoch, self.base)
        self.rewinds += 1
        self.valid_until[(self.valid_until > now) & (self.valid_until != UNSET) & (self.valid_from <= now)] = UNSET
        later = self.valid_from > now
        self.valid_from[later] = self.valid_until[later] = now
        self.epoch = min(self.epoch, epoch)
        self.changes = next(_STATES)
        self._masks.clear(epoch)

    # --- what queries ask ---

    def mask(self, cut: Cut) -> Flags:
        """One flag per row, in (offset, sub-row) order: those that exist for a query at the cut."""
        now = delta(cut.epoch, self.base)
        if cut.visibility is Visibility.ALL:
            return self.valid_from <= now
        # In this order: an INSERT sets validFrom first, so a row that is read as in force is read with its new one.
        flags: Flags = self.valid_until > now
        flags &= self.valid_from <= now
        if cut.visibility is Visibility.VISIBLE and self.deleted is not None:
            flags &= ~self.deleted
        return flags

    def masks(self, cut: Cut, lengths: Sequence[int]) -> Masks:
        """The same in the order of the segment's rows, for batches of these lengths; None where all rows exist."""
        return self._masks.get(cut, lengths, lambda rows: self._flags(cut, rows), self._places)

    def _flags(self, cut: Cut, rows: npt.NDArray[np.int64] | None) -> Flags:
        """Of some rows (of all: in the order of the segment)."""
        if rows is None:
            flags = self.mask(cut)
            return flags if self.order is None else flags[self.order]
        now = delta(cut.epoch, self.base)
        some: Flags = self.valid_until[rows] > now
        some &= self.valid_from[rows] <= now
        if cut.visibility is Visibility.VISIBLE and self.deleted is not None:
            some &= ~self.deleted[rows]
        return some

    def _places(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where rows are in the segment."""
        if self.order is None:
            return rows
        if self._place is None:
            place = np.empty(self.rows, np.int32)
            place[self.order] = np.arange(self.rows, dtype=np.int32)
            self._place = place
        return self._place[rows].astype(np.int64)

    def epochs_of(self, cut: Cut) -> tuple[Int64s, Int64s]:
        """`$validFrom` and `$validUntil` per row of the segment as seen at the cut: what comes later is unset
        (UNSET_EPOCH). A row that was never in force has both equal."""
        now = delta(cut.epoch, self.base)
        since = _absolute(self.valid_from, self.base)
        until = _absolute(self.valid_until, self.base)
        until[self.valid_until > now] = UNSET_EPOCH
        if self.order is not None:
            since, until = since[self.order], until[self.order]
        return since, until

    def location(self, row: int) -> tuple[int, int]:
        """(offset, sub-row) of a row."""
        part = self.locations.between(row, row + 1)
        return int(part.all_offsets()[0]), int(part.all_sub_rows()[0])

    def updates_since(self, epoch: int) -> pa.RecordBatch:
        """What changed after `epoch`, as updates: UPDATES_SCHEMA, by (epoch, offset, sub-row)."""
        now = delta(epoch, self.base)
        was_inserted = (self.valid_from > now) & (self.valid_until != self.valid_from)
        inserted = np.flatnonzero(was_inserted)
        deleted = np.flatnonzero(
            (self.valid_until > now) & (self.valid_until != UNSET) & (self.valid_until != self.valid_from)
        )
        rows = np.concatenate([inserted, deleted])
        epochs = np.concatenate([self.valid_from[inserted], self.valid_until[deleted]]).astype(np.int64) + self.base
        ops = np.repeat(np.array([INSERT, DELETE], np.int8), [len(inserted), len(deleted)])
        order = np.lexsort((rows, epochs))
        rows, offsets, sub_rows = rows[order], self.locations.all_offsets(), self.locations.all_sub_rows()
        columns = [epochs[order], offsets[rows], sub_rows[rows], ops[order]]
        return pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=UPDATES_SCHEMA)

    def counts(self) -> tuple[int, int, int]:
        """Now: rows superseded, tombstones (in force, deleted), rows in force."""
        force = self.valid_until == UNSET
        in_force = int(np.count_nonzero(force))
        tombstones = int(np.count_nonzero(force & self.deleted)) if self.deleted is not None else 0
        return self.rows - in_force, tombstones, in_force

    # --- parts ---

    def kept(self, epoch: int) -> Flags:
        """Rows that some epoch from `epoch` on may see: not those that were replaced, or never in force, up to it. The
        same at any later moment, and wherever all updates up to `epoch` are in (U-1)."""
        assert self.epoch >= epoch
        return self.valid_until > delta(epoch, self.base)

    def compacted(self, kept: Flags, epoch: int, like: Versions | None = None) -> Versions:
        """Of the `kept(epoch)` rows alone, which stand in the segment as they stood before; nobody writes meanwhile. It
        can be asked from `epoch` on. `like`: made so before; where rows are is not found out again."""
        if like is not None:
            locations, order = like.locations, like.order
        else:
            locations, order = self.locations.only(kept), None
            if self.order is not None:
                numbers = np.cumsum(kept, dtype=np.int32) - 1
                order = numbers[self.order[kept[self.order]]]
        deleted = self.deleted[kept] if self.deleted is not None else None
        made = Versions(
            locations, self.valid_from[kept], self.valid_until[kept], base=self.base, epoch=self.epoch,
            deleted=deleted if deleted is not None and deleted.any() else None, order=order,
            horizon=max(self.horizon, epoch),
        )  # fmt: skip
        made.rewinds = self.rewinds
        return made

    def between(self, first: int, last: int) -> Versions:
        """Rows [first, last), without a copy; not of a segment whose rows stand in another order."""
        assert self.order is None
        deleted = self.deleted[first:last] if self.deleted is not None else None
        return Versions(
            self.locations.between(first, last), self.valid_from[first:last], self.valid_until[first:last],
            base=self.base, epoch=self.epoch, deleted=deleted if deleted is not None and deleted.any() else None,
            horizon=self.horizon,
        )  # fmt: skip

    def copied(self) -> Versions:
        """One that nobody else writes to; made while nobody does."""
        locations = self.locations
        if locations.offsets is not None:
            sub_rows = locations.sub_rows.copy() if locations.sub_rows is not None else None
            locations = Locations.of(locations.offsets.copy(), sub_rows)
        made = Versions(
            locations, np.array(self.valid_from), np.array(self.valid_until), base=self.base, epoch=self.epoch,
            deleted=np.array(self.deleted) if self.deleted is not None else None, order=self.order,
            horizon=self.horizon,
        )  # fmt: skip
        made.rewinds = self.rewinds
        return made


#: Updates of several epochs together.
UPDATES_SCHEMA = pa.schema([pa.field("$epoch", pa.int64(), nullable=False), *UPDATE_SCHEMA])


def delta(epoch: int, base: int) -> int:
    """An epoch as it is kept. Beyond what 31 bits reach, whatever is asked of is before or after everything kept."""
    return min(max(epoch - base, NEVER + 1), UNSET - 1)


def deleted_rows(batch: pa.RecordBatch, column: str | None) -> Flags | None:
    """Rows of a batch whose delete column is true; None: none is. As Pinot reads other types than BOOLEAN: the texts
    `true`, in any case, and `1`, and numbers whose whole part is 1."""
    index = batch.schema.get_field_index(column) if column is not None else -1
    if index < 0:
        return None
    values = batch.column(index)
    if pa.types.is_string(values.type) or pa.types.is_string_view(values.type):
        values = pc.is_in(pc.utf8_lower(values.cast(pa.string())), pa.array(["true", "1"]))
    elif not pa.types.is_boolean(values.type):
        values = pc.equal(pc.trunc(values) if pa.types.is_floating(values.type) else values, 1)
    flags: Flags = values.fill_null(False).to_numpy(zero_copy_only=False)
    return flags if flags.any() else None


def by_location(updates: pa.RecordBatch) -> tuple[Int64s, Int32s, npt.NDArray[np.int8]]:
    """Columns of an update batch."""
    return updates.column(OFFSET).to_numpy(), updates.column(SUB_ROW).to_numpy(), updates.column("op").to_numpy()


def _absolute(deltas: Int32s, base: int) -> Int64s:
    epochs = deltas.astype(np.int64) + base
    epochs[deltas == UNSET] = UNSET_EPOCH
    epochs[deltas == NEVER] = NEVER_EPOCH
    return epochs
