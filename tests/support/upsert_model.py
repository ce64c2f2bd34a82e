# SPDX-License-Identifier: Apache-2.0
"""What an upsert table must show: a plain dictionary and a total order, nothing else. Every test of upsert compares
with it.

    model = UpsertModel()
    model.apply(partition, offset, sub_row, key, comparison, deleted=False, value=...)      # in any order
    model.at(ends)                    # key -> Row: what a query sees when the epoch that ends at `ends` is the last one
    model.updates(before, after)      # partition -> {(offset, sub-row, op)}: the update blocks of the epoch in between
    History(model) ... .close(epoch, ends)      # the same step by step, with validFrom and validUntil of every row

`ends`: per partition the stream offset after the last one that counts. The winner of a key is the greatest row by
(comparison, partition, offset, sub-row), nulls below everything; the order of arrival never matters. A winner whose
delete column is true hides its key. `key` None is a row with a null key under `nullKey: reject`: not a row at all.
Under `append` give it a key of its own: `(partition, offset, sub_row)`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

INSERT, DELETE = 0, 1

#: (offset, sub-row, op) of a row of one partition.
Update = tuple[int, int, int]


class Row(NamedTuple):
    partition: int
    offset: int
    sub_row: int
    key: Hashable
    #: Comparison columns; None = null.
    comparison: tuple[Any, ...]
    deleted: bool
    value: Any

    @property
    def location(self) -> tuple[int, int, int]:
        return (self.partition, self.offset, self.sub_row)

    @property
    def rank(self) -> tuple[Any, ...]:
        """Rows are ordered by it, totally: no two rows have the same location."""
        return (*(_rank_of(value) for value in self.comparison), *self.location)


class UpsertModel:
    """`rows`: every row that was ever applied, by location."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int, int], Row] = {}

    def apply(
        self,
        partition: int,
        offset: int,
        sub_row: int,
        key: Hashable,
        comparison: Any,
        deleted: bool | None = False,
        value: Any = None,
    ) -> None:
        """`comparison`: one value, or a tuple of several. Applied twice is applied once."""
        if key is None:
            return
        if not isinstance(comparison, tuple):
            comparison = (comparison,)
        row = Row(partition, offset, sub_row, canonical(key), comparison, deleted is True, value)
        known = self.rows.setdefault(row.location, row)
        assert known == row, f"two rows at one location: {known} and {row}"

    def winners(self, ends: Sequence[int]) -> dict[Hashable, Row]:
        """Key -> its greatest row below `ends`, tombstones among them (what is in force)."""
        best: dict[Hashable, Row] = {}
        for row in self.rows.values():
            if row.partition < len(ends) and row.offset < ends[row.partition]:
                held = best.get(row.key)
                if held is None or row.rank > held.rank:
                    best[row.key] = row
        return best

    def at(self, ends: Sequence[int]) -> dict[Hashable, Row]:
        """Key -> the row that a query shows."""
        return {key: row for key, row in self.winners(ends).items() if not row.deleted}

    def updates(self, before: Sequence[int], after: Sequence[int]) -> dict[int, set[Update]]:
        """What the epoch from `before` to `after` does to rows, by the partition of the row: INSERT of each new winner,
        DELETE of the row that was in force. Nothing about keys that keep their winner."""
        old, new = self.winners(before), self.winners(after)
        updates: dict[int, set[Update]] = {}
        for key, row in new.items():
            was = old.get(key)
            if was is row:
                continue
            updates.setdefault(row.partition, set()).add((row.offset, row.sub_row, INSERT))
            if was is not None:
                updates.setdefault(was.partition, set()).add((was.offset, was.sub_row, DELETE))
        return updates


class Version(NamedTuple):
    """`valid_from`: the epoch. `valid_until`: the epoch that ended it, None while it is in force."""

    valid_from: int
    valid_until: int | None

    def in_force(self, epoch: int) -> bool:
        return self.valid_from <= epoch and (self.valid_until is None or self.valid_until > epoch)


class History:
    """The model epoch by epoch, at a cost of what changed: for long runs, and for validFrom and validUntil of rows.

    Rows must have been applied before the epoch that takes them is closed."""

    def __init__(self, model: UpsertModel, partitions: int = 0) -> None:
        self.model = model
        #: Closed epochs, ascending, and where they end.
        self.epochs: list[int] = []
        self.ends: list[tuple[int, ...]] = []
        #: Key -> row in force at the last closed epoch.
        self.winners: dict[Hashable, Row] = {}
        #: Every row that an epoch took. A row that never won is superseded at once: [e, e).
        self.versions: dict[tuple[int, int, int], Version] = {}
        self._last: tuple[int, ...] = (0,) * partitions
        self._by_offset: dict[int, dict[int, list[Row]]] = {}
        self._indexed = 0

    def close(self, epoch: int, ends: Sequence[int]) -> dict[int, set[Update]]:
        """Answers the updates of the epoch, by partition."""
        assert not self.epochs or epoch > self.epochs[-1], f"epoch {epoch} is not behind {self.epochs[-1]}"
        self._index()
        touched: dict[Hashable, Row] = {}
        for partition, end in enumerate(ends):
            first = self._last[partition] if partition < len(self._last) else 0
            offsets = self._by_offset.get(partition, {})
            for offset in range(first, end):
                for row in offsets.get(offset, ()):
                    self.versions[row.location] = Version(epoch, epoch)
                    best = touched.get(row.key, self.winners.get(row.key))
                    if best is None or row.rank > best.rank:
                        touched[row.key] = row
        updates: dict[int, set[Update]] = {}
        for key, row in touched.items():
            was = self.winners.get(key)
            self.versions[row.location] = Version(epoch, None)
            updates.setdefault(row.partition, set()).add((row.offset, row.sub_row, INSERT))
            if was is not None:
                self.versions[was.location] = self.versions[was.location]._replace(valid_until=epoch)
                updates.setdefault(was.partition, set()).add((was.offset, was.sub_row, DELETE))
            self.winners[key] = row
        self.epochs.append(epoch)
        self.ends.append(tuple(ends))
        self._last = tuple(ends)
        return updates

    def expire(self, epoch: int, below: float) -> dict[int, set[Update]]:
        """A seed as of the last epoch, which leaves out keys whose row in force compares below that; its updates."""
        updates: dict[int, set[Update]] = {}
        for key, row in list(self.winners.items()):
            if row.comparison[0] < below:
                del self.winners[key]
                self.versions[row.location] = self.versions[row.location]._replace(valid_until=epoch)
                updates.setdefault(row.partition, set()).add((row.offset, row.sub_row, DELETE))
        self.epochs.append(epoch)
        self.ends.append(self._last)
        return updates

    def ends_at(self, epoch: int) -> tuple[int, ...]:
        """Where the newest closed epoch that is not above `epoch` ends; () before the first."""
        at = bisect_left(self.epochs, epoch + 1)
        return self.ends[at - 1] if at else ()

    def at(self, epoch: int) -> dict[Hashable, Row]:
        """What a query at L = `epoch` shows, out of validFrom and validUntil."""
        shown: dict[Hashable, Row] = {}
        for location, version in self.versions.items():
            row = self.model.rows[location]
            if version.in_force(epoch) and not row.deleted:
                assert row.key not in shown, f"two visible rows of key {row.key!r} at {epoch}"
                shown[row.key] = row
        return shown

    def _index(self) -> None:
        rows = list(self.model.rows.values())
        for row in rows[self._indexed :]:
            self._by_offset.setdefault(row.partition, {}).setdefault(row.offset, []).append(row)
        self._indexed = len(rows)


def canonical(key: Hashable) -> Hashable:
    """Keys that the product holds for equal are equal here: -0.0 is 0.0, there is one NaN, 1 is not True nor 1.0."""
    if isinstance(key, tuple):
        return tuple(canonical(part) for part in key)
    if isinstance(key, float):
        return ("float", "nan" if math.isnan(key) else key + 0.0)
    if isinstance(key, bool):
        return ("bool", key)
    return key


def _rank_of(value: Any) -> tuple[Any, ...]:
    """Null below everything; NaN above every number; -0.0 equal to 0.0."""
    if value is None:
        return (0,)
    if isinstance(value, float) and math.isnan(value):
        return (2,)
    return (1, value)
