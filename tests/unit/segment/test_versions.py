# SPDX-License-Identifier: Apache-2.0
"""Versions against a plain table of (validFrom, validUntil): whatever is applied, asked, taken back and asked again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cremant.model.errors import InvariantViolation
from cremant.model.upsert import DELETE, INSERT, Cut, Visibility
from cremant.segment.locations import Locations, locations_of
from cremant.segment.tail_versions import PartitionVersions
from cremant.segment.versions import NEVER_EPOCH, UNSET_EPOCH, Versions

#: Offset and sub-row of rows in a range with holes, and messages that gave several rows.
LOCATIONS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 3)), min_size=1, max_size=40, unique=True
).map(sorted)  # fmt: skip


def batch_of(locations: list[tuple[int, int]]) -> pa.RecordBatch:
    offsets, sub_rows = zip(*locations, strict=True)
    columns = [pa.array(offsets, pa.int64()), pa.array(sub_rows, pa.int32())]
    return pa.RecordBatch.from_arrays(columns, names=["$offset", "$subRow"])


LOCATED = st.one_of(
    LOCATIONS,
    # Each offset once, most of them there: what a segment has that is sorted by a column.
    st.integers(1, 60).map(lambda rows: [(7 + row, 0) for row in range(rows)]),
    st.sets(st.integers(0, 40), min_size=1).map(lambda offsets: [(offset, 0) for offset in sorted(offsets)]),
    # Few and far between.
    st.sets(st.integers(0, 2**40), min_size=1).map(lambda offsets: [(offset, 0) for offset in sorted(offsets)]),
    # Messages of several rows; of some, not all were kept.
    st.lists(st.integers(0, 3)).map(lambda rows: [(9 + at, sub) for at, n in enumerate(rows) for sub in range(n + 1)]),
)


@settings(deadline=None)
@given(LOCATED.filter(bool), st.data())
def test_rows_in_any_order_are_numbered_by_where_they_stand(locations: list[tuple[int, int]], data: Any) -> None:
    order = data.draw(st.permutations(range(len(locations))))
    found, numbers = locations_of([batch_of([locations[row] for row in order])])
    assert (numbers if numbers is not None else np.arange(len(order))).tolist() == order
    assert list(zip(found.all_offsets().tolist(), found.all_sub_rows().tolist(), strict=True)) == locations


class Plain:
    """Row number -> [validFrom, validUntil or None]."""

    def __init__(self, rows: int, epoch: int, deleted: list[bool]) -> None:
        self.ends: list[list[Any]] = [[epoch, epoch] for _ in range(rows)]
        self.deleted = deleted

    def apply(self, epoch: int, inserted: list[int], deleted: list[int]) -> None:
        for row in inserted:
            self.ends[row] = [epoch, None]
        for row in deleted:
            self.ends[row][1] = epoch

    def mask(self, cut: Cut) -> list[bool]:
        found = []
        for (since, until), deleted in zip(self.ends, self.deleted, strict=True):
            there = since <= cut.epoch
            if cut.visibility is not Visibility.ALL:
                there &= until is None or until > cut.epoch
            if cut.visibility is Visibility.VISIBLE:
                there &= not deleted
            found.append(there)
        return found


@settings(max_examples=40, deadline=None)
@given(LOCATIONS, st.data(), st.integers(-5, 2**40))
def test_any_epoch_shows_what_a_plain_table_shows(locations: list[tuple[int, int]], data: Any, base: int) -> None:
    rows = len(locations)
    order = data.draw(st.permutations(range(rows)))
    shuffled = [locations[row] for row in order]
    deleted = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    found, numbers = locations_of([batch_of(shuffled)])
    versions = Versions.superseded(found, base, deleted=np.array(deleted) if any(deleted) else None)
    versions.order = numbers
    plain = Plain(rows, base, deleted)
    lengths = [rows // 3, rows - rows // 3]
    epoch, closed = base - 1, [base - 1]
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.integers(0, 9)) == 0 and len(closed) > 1:
            back = data.draw(st.sampled_from(closed[1:]))
            versions.roll_back(back)
            for ends in plain.ends:
                if ends[0] > back:
                    ends[:] = [back, back]
                elif ends[1] is not None and ends[1] > back:
                    ends[1] = None
            closed = [at for at in closed if at <= back]
        epoch += data.draw(st.integers(1, 3))
        in_force = [row for row in range(rows) if plain.ends[row][1] is None]
        free = [row for row in range(rows) if plain.ends[row][0] == plain.ends[row][1]]
        inserted = data.draw(st.lists(st.sampled_from(free), unique=True)) if free else []
        gone = data.draw(st.lists(st.sampled_from(in_force), unique=True)) if in_force else []
        lines = sorted([(*locations[row], INSERT) for row in inserted] + [(*locations[row], DELETE) for row in gone])
        columns = list(zip(*lines, strict=True)) if lines else [(), (), ()]
        versions.apply(
            epoch, np.array(columns[0], np.int64), np.array(columns[1], np.int32), np.array(columns[2], np.int8)
        )
        versions.closed(epoch)
        plain.apply(epoch, inserted, gone)
        closed.append(epoch)
        for _ in range(2):
            # Not ALL: here rows are inserted long after they were taken, which then is when they came.
            visibility = data.draw(st.sampled_from([Visibility.VISIBLE, Visibility.IN_FORCE]))
            cut = Cut(epoch=data.draw(st.sampled_from(closed)), visibility=visibility)
            expected = [plain.mask(cut)[row] for row in order]
            masks = versions.masks(cut, lengths)
            pairs = zip(masks, lengths, strict=True)
            flags = [mask.flags if mask is not None else np.ones(length, bool) for mask, length in pairs]
            assert np.concatenate(flags).tolist() == expected
            assert [mask.count for mask in masks if mask is not None] == [
                int(part.sum()) for mask, part in zip(masks, flags, strict=True) if mask is not None
            ]
    superseded, tombstones, in_force_rows = versions.counts()
    assert in_force_rows == sum(until is None for _, until in plain.ends) == rows - superseded
    assert tombstones == sum(until is None and gone for (_, until), gone in zip(plain.ends, deleted, strict=True))


@given(LOCATIONS, st.data())
def test_updates_since_an_epoch_bring_older_versions_to_the_same(locations: list[tuple[int, int]], data: Any) -> None:
    found, _ = locations_of([batch_of(locations)])
    ahead, behind = Versions.superseded(found, 10), Versions.superseded(found, 10)
    state = dict.fromkeys(range(len(locations)), 0)  # 0 free, 1 in force, 2 gone
    stop = data.draw(st.integers(10, 15))
    for epoch in range(10, 16):
        lines = []
        for row, at in list(state.items()):
            if at < 2 and data.draw(st.booleans()):
                lines.append((*locations[row], INSERT if at == 0 else DELETE))
                state[row] += 1
        columns = list(zip(*lines, strict=True)) if lines else [(), (), ()]
        arrays = np.array(columns[0], np.int64), np.array(columns[1], np.int32), np.array(columns[2], np.int8)
        ahead.apply(epoch, *arrays)
        if epoch <= stop:
            behind.apply(epoch, *arrays)
    updates = ahead.updates_since(stop)
    for epoch in sorted(set(updates.column("$epoch").to_pylist())):
        part = updates.filter(pa.array([own == epoch for own in updates.column("$epoch").to_pylist()]))
        behind.apply(epoch, *(part.column(name).to_numpy() for name in ("$offset", "$subRow", "op")))
    assert np.array_equal(ahead.valid_from, behind.valid_from)
    assert np.array_equal(ahead.valid_until, behind.valid_until)


def one(epoch: int, offset: int, op: int) -> tuple[Any, ...]:
    return epoch, np.array([offset]), np.array([0], np.int32), np.array([op], np.int8)


def test_an_epoch_that_is_in_already_is_skipped() -> None:
    versions = Versions.superseded(Locations(3, 0), 5)
    assert versions.apply(*one(5, 1, INSERT)) == 1
    assert versions.apply(*one(5, 1, INSERT)) == 0
    assert versions.apply(*one(4, 1, DELETE)) == 0


@pytest.mark.parametrize(
    ("update", "said"),
    [
        (one(7, 9, INSERT), "not among the rows here"),
        (one(7, 1, INSERT), "in force already"),
        (one(7, 2, DELETE), "not in force"),
    ],
)
def test_an_update_that_does_not_fit_changes_nothing(update: tuple[Any, ...], said: str) -> None:
    versions = Versions.superseded(Locations(3, 0), 5)
    versions.apply(*one(5, 1, INSERT))
    before = versions.valid_from.copy(), versions.valid_until.copy()
    with pytest.raises(InvariantViolation, match=said):
        versions.apply(*update)
    assert (versions.valid_from == before[0]).all()
    assert (versions.valid_until == before[1]).all()
    assert versions.epoch == 5


def test_rows_from_before_the_table_had_keys_are_not_there_until_they_are_inserted() -> None:
    versions = Versions.unknown(Locations(3, 0), epoch=5)
    versions.apply(*one(6, 1, INSERT))
    assert versions.mask(Cut(epoch=6)).tolist() == [False, True, False]
    since, until = versions.epochs_of(Cut(epoch=6))
    assert since.tolist() == [NEVER_EPOCH, 6, NEVER_EPOCH]
    assert until.tolist() == [NEVER_EPOCH, UNSET_EPOCH, NEVER_EPOCH]


def test_masks_of_an_older_epoch_stay_right_while_newer_ones_are_applied() -> None:
    versions = Versions.superseded(Locations(100, 0), 1)
    everything = np.arange(100), np.zeros(100, np.int32)
    versions.apply(1, *everything, np.full(100, INSERT, np.int8))
    before = versions.masks(Cut(epoch=1), [50, 50])
    assert before == (None, None)
    for epoch in range(2, 12):
        versions.apply(*one(epoch, epoch, DELETE))
        shown = versions.masks(Cut(epoch=epoch), [50, 50])
        assert shown[0] is not None
        assert shown[0].count == 50 - (epoch - 1)
        assert shown[1] is None
    assert versions.masks(Cut(epoch=1), [50, 50]) == (None, None)
    middle = versions.masks(Cut(epoch=5), [50, 50])[0]
    assert middle is not None
    assert middle.count == 46


def test_versions_that_lack_what_was_applied_are_not_attached() -> None:
    rows = PartitionVersions(10, 3, None)
    empty = pa.RecordBatch.from_arrays(
        [pa.array([], pa.int64()), pa.array([], pa.int32()), pa.array([], pa.int8())],
        names=["$offset", "$subRow", "op"],
    )
    rows.apply(4, empty)  # not closed yet
    assert not rows.attach("s", 0, 10, Versions.superseded(Locations(10, 0), 4))
    fits = Versions.superseded(Locations(10, 0), 4)
    fits.closed(4)
    assert rows.attach("s", 0, 10, fits)


def test_updates_of_rows_that_others_host_are_ignored() -> None:
    versions = PartitionVersions(10, 0, None)
    updates = pa.RecordBatch.from_arrays(
        [pa.array([3], pa.int64()), pa.array([0], pa.int32()), pa.array([DELETE], pa.int8())],
        names=["$offset", "$subRow", "op"],
    )
    versions.apply(1, updates)
    assert (versions.updates_applied, versions.updates_ignored) == (0, 1)


def test_versions_from_before_a_hole_in_what_was_read_are_not_attached() -> None:
    rows = PartitionVersions(10, 3, None, log_offset=20)
    rows.restart(50, 9, log_offset=80)
    lacking, whole = Versions.superseded(Locations(10, 0), 4), Versions.superseded(Locations(10, 0), 10)
    assert not rows.attach("s", 0, 10, lacking, since=40)
    assert rows.attach("s", 0, 10, whole, since=80)


def test_versions_of_epochs_that_a_reset_took_back_are_not_attached() -> None:
    """A server that has not read the Reset yet sent them."""
    rows = PartitionVersions(10, 3, None, log_offset=20)
    rows.roll_back(2, 10, at=50)
    for log_offset, epoch in ((50, 3), (51, 2)):
        versions = Versions.superseded(Locations(10, 0), epoch + 1)
        assert rows.attach("s", 0, 10, versions, since=log_offset) == (epoch == 2)


class _Interrupted(np.ndarray):
    """Between looking at this column and the other one, an update is applied."""

    versions: Versions

    def __gt__(self, other: Any) -> Any:
        self.versions.apply(9, np.array([3]), np.array([0], np.int32), np.array([INSERT], np.int8))
        return np.asarray(self) > other


@pytest.mark.parametrize("rows", [None, np.array([3])])
def test_an_insert_of_a_later_epoch_is_not_seen_whenever_it_is_applied(rows: Any) -> None:
    versions = Versions.superseded(Locations(10, 0), 1)
    found = versions.valid_until.view(_Interrupted)
    _Interrupted.versions = versions
    versions.valid_until = found
    cut = Cut(epoch=5)
    assert not (versions.mask(cut) if rows is None else versions._flags(cut, rows)).any()
    assert versions.mask(Cut(epoch=9)).sum() == 1


def test_no_two_states_have_one_number() -> None:
    """Versions that replaced others are not taken for those that were saved."""
    seen = set()
    for _ in range(2):
        versions = Versions.superseded(Locations(10, 0), 1)
        seen.add(versions.changes)
        versions.apply(1, np.array([3]), np.array([0], np.int32), np.array([INSERT], np.int8))
        seen.add(versions.changes)
    assert len(seen) == 4
