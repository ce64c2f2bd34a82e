# SPDX-License-Identifier: Apache-2.0
"""Snapshots of versions: what was packed comes back, on the wire and mapped, and nothing that is damaged or of other
rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cremant.model.errors import Corrupt, NotFound
from cremant.model.offsets import Position
from cremant.model.upsert import Cut
from cremant.segment import snapshot as snapshots
from cremant.segment.locations import Locations
from cremant.segment.snapshot import Locate, Snapshot, pack, unpack
from cremant.segment.versions import UNSET, Versions

AT = Position(log_offset=70, epoch=7, generation=2, next_offset=100)
NAME, CHECKSUM = "t__0__1__x", "c1"


def _versions(rows: int, *, first: int = 50, sparse: bool = False, deleted: bool = False, base: int = 5) -> Versions:
    offsets = np.arange(first, first + rows, dtype=np.int64) * (3 if sparse else 1)
    made = Versions.superseded(Locations.of(offsets, None), base)
    made.horizon = base - 1
    if deleted:
        made.deleted = np.arange(rows) % 3 == 0
    made.valid_until[::2] = UNSET
    made.closed(AT.epoch)
    return made


def _locate(versions: Versions) -> Locate:
    return lambda: (versions.locations, versions.order)


def _unpacked(data: bytes, versions: Versions, *, checksum: str = CHECKSUM, rows: int | None = None) -> Snapshot:
    rows = versions.rows if rows is None else rows
    return unpack(data, segment=NAME, checksum=checksum, rows=rows, locate=_locate(versions))


def _same(one: Versions, other: Versions) -> None:
    assert (one.rows, one.base, one.epoch, one.horizon) == (other.rows, other.base, other.epoch, other.horizon)
    assert np.array_equal(one.valid_from, other.valid_from)
    assert np.array_equal(one.valid_until, other.valid_until)
    assert np.array_equal(one.locations.all_offsets(), other.locations.all_offsets())
    if one.deleted is None or other.deleted is None:
        assert one.deleted is other.deleted
    else:
        assert np.array_equal(one.deleted, other.deleted)


@given(
    rows=st.integers(0, 40), sparse=st.booleans(), deleted=st.booleans(), compressed=st.booleans(),
    base=st.integers(0, 2**40),
)  # fmt: skip
def test_what_was_packed_comes_back(*, rows: int, sparse: bool, deleted: bool, compressed: bool, base: int) -> None:
    versions = _versions(rows, sparse=sparse, deleted=deleted, base=base)
    data = pack(Snapshot(versions, AT), segment=NAME, checksum=CHECKSUM, compressed=compressed)
    found = _unpacked(data, versions)
    assert found.position == AT
    _same(found.versions, versions)


def test_dense_rows_say_where_they_are_without_being_read() -> None:
    versions = _versions(10)
    data = pack(Snapshot(versions, AT), segment=NAME, checksum=CHECKSUM)

    def never() -> tuple[Locations, None]:
        raise AssertionError

    found = unpack(data, segment=NAME, checksum=CHECKSUM, rows=10, locate=never).versions
    assert (found.locations.first, found.locations.rows) == (50, 10)


@pytest.mark.parametrize("compressed", [True, False])
def test_no_byte_can_be_another_one(*, compressed: bool) -> None:
    versions = _versions(9, deleted=True)
    data = pack(Snapshot(versions, AT), segment=NAME, checksum=CHECKSUM, compressed=compressed)
    quiet = set()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        try:
            _unpacked(bytes(damaged), versions)
        except Corrupt:
            continue
        quiet.add(data[at])
    assert quiet <= {0}, "only padding may differ"
    for length in range(len(data)):
        with pytest.raises(Corrupt):
            _unpacked(data[:length], versions)


def test_versions_of_other_rows_are_refused() -> None:
    versions = _versions(9)
    data = pack(Snapshot(versions, AT), segment=NAME, checksum=CHECKSUM)
    with pytest.raises(Corrupt, match=r"content c1\), expected t__0__1__x \(9 rows, content c2\)"):
        _unpacked(data, versions, checksum="c2")
    with pytest.raises(Corrupt, match=r"expected .* \(8 rows"):
        _unpacked(data, versions, rows=8)


class Disk:
    def __init__(self, directory: Path, versions: Versions) -> None:
        self.directory, self.versions = directory, versions

    def write(self, position: Position = AT) -> None:
        made = Snapshot(self.versions, position)
        snapshots.write(self.directory, made, segment=NAME, checksum=CHECKSUM, fsync=False)

    def unchanged(self, position: Position, since: Position = AT) -> None:
        snapshots.unchanged(self.directory, since, position, fsync=False)

    def read(self) -> Snapshot:
        return snapshots.read(
            self.directory, segment=NAME, checksum=CHECKSUM, rows=self.versions.rows, locate=_locate(self.versions)
        )


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path, _versions(20, sparse=True, deleted=True))


def _later(epoch: int) -> Position:
    return Position(log_offset=epoch * 10, epoch=epoch, generation=2, next_offset=100)


def test_a_file_is_mapped_and_what_is_written_into_it_stays_in_memory(disk: Disk) -> None:
    disk.write()
    found = disk.read()
    _same(found.versions, disk.versions)
    offsets = found.versions.locations.all_offsets()[:1]
    ops = np.array([1], np.int8)
    found.versions.apply(8, offsets, np.zeros(1, np.int32), ops)
    assert not found.versions.mask(Cut(epoch=8))[0]
    _same(disk.read().versions, disk.versions)


def test_a_snapshot_that_did_not_change_is_continued_from_a_later_position(disk: Disk) -> None:
    disk.write()
    disk.unchanged(_later(9))
    found = disk.read()
    assert found.position == _later(9)
    assert found.versions.epoch == 9


def test_what_is_said_of_an_older_snapshot_does_not_count(disk: Disk) -> None:
    disk.write()
    disk.unchanged(_later(9))
    disk.write(_later(8))
    assert disk.read().position == _later(8)
    disk.unchanged(_later(12), since=_later(8))
    assert disk.read().position == _later(12)
    (disk.directory / snapshots.POSITION_FILE).write_bytes(b"{")
    assert disk.read().position == _later(8), "torn: the log is read from further back"


def test_a_file_that_is_missing_or_damaged_is_named(disk: Disk) -> None:
    path = disk.directory / snapshots.VERSIONS_FILE
    with pytest.raises(NotFound, match=str(path)):
        disk.read()
    path.write_bytes(b"")
    with pytest.raises(Corrupt, match=str(path)):
        disk.read()
    disk.write()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Corrupt, match=str(path)):
        disk.read()
    assert not list(disk.directory.glob("*.tmp"))


def test_a_snapshot_and_its_name_are_on_the_disk_before_anybody_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log behind it may be trimmed then."""
    synced: list[Path] = []
    monkeypatch.setattr(snapshots, "sync", lambda path: synced.append(path))
    made = Snapshot(_versions(10), AT)
    snapshots.write(tmp_path, made, segment=NAME, checksum=CHECKSUM, fsync=True)
    snapshots.unchanged(tmp_path, AT, AT, fsync=True)
    assert [path.name for path in synced] == ["versions.bin.tmp", tmp_path.name, "versions.json.tmp", tmp_path.name]
    synced.clear()
    snapshots.write(tmp_path, made, segment=NAME, checksum=CHECKSUM, fsync=False)
    assert not synced
