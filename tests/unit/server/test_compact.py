# SPDX-License-Identifier: Apache-2.0
"""Compaction of one sealed segment against the reference model: from its epoch on nothing of it looks different, in
files and versions, whoever does it and whatever the log says afterwards."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from versions_kit import UPSERT, UpsertLog, shown, upsert_log, upsert_record

from cremant.log.memory import MemoryLog
from cremant.model.errors import Corrupt
from cremant.model.segments import SegmentMetadata
from cremant.model.upsert import Cut, Visibility
from cremant.segment.compact import Compacted, compact_segment
from cremant.segment.locations import locations_of
from cremant.segment.reader import SealedSegment, derive, open_segment
from cremant.segment.snapshot import Snapshot, pack, unpack
from cremant.segment.versions import Versions
from cremant.server.partition_id import PartitionId
from cremant.server.reconsume import Reconsumer
from cremant.server.replay import Replay

_NUMBERS = itertools.count()
NEWEST = 14


class World:
    """Two partitions, NEWEST epochs; the segment is the rows of epochs 3 to 6 of partition 1."""

    def __init__(self, root: Path, *, keys: int, seed: int, sorted_column: str | None = None) -> None:
        self.root = root / str(next(_NUMBERS))
        self.log = MemoryLog(lambda: 0)
        self.epochs: UpsertLog = upsert_log(self.log, partitions=2, keys=keys, seed=seed)
        self.own = PartitionId("trips", self.epochs.incarnation, 1)
        for _ in range(NEWEST):
            self.epochs.write(9)
        self.record = upsert_record(sorted_column=sorted_column)
        self.metadata: SegmentMetadata
        self.sealed: SealedSegment
        self.metadata, self.sealed = self.epochs.sealed(self.root, 1, 2, 6, record=self.record)

    def snapshot(self, epoch: int, sealed: SealedSegment | None = None, metadata: SegmentMetadata | None = None) -> Any:
        """Out of the rows' own range, as of an epoch."""
        batches = (sealed or self.sealed).batches
        return self.forward(
            Replay.from_rows(self.log, self.own, metadata or self.metadata, UPSERT.delete_column), epoch, batches
        )

    def forward(self, replay: Replay, epoch: int, batches: Any) -> Snapshot:
        while replay.position.epoch < epoch and replay.turn():
            pass
        replay.close()
        return replay.result(lambda: locations_of(batches))

    def compact(self, versions: Versions, epoch: int, source: SealedSegment | None = None) -> tuple[Compacted, Any]:
        source = source or self.sealed
        directory = self.root / f"compacted-{next(_NUMBERS)}"
        directory.mkdir()
        kept = versions.kept(epoch)
        in_order = kept if versions.order is None else kept[versions.order]
        made = compact_segment(directory, source, in_order, fsync=False)
        sealed = derive(directory, self.metadata.name, made.checksum, fsync=False)
        assert sealed.rows == made.rows == int(np.count_nonzero(kept))
        return made, sealed

    def as_compacted(self, made: Compacted, epoch: int) -> SegmentMetadata:
        return msgspec.structs.replace(
            self.metadata, checksum=made.checksum, file_checksum=made.file_checksum, rows=made.rows,
            size_bytes=made.size_bytes, compacted_at=epoch,
        )  # fmt: skip

    def rows(self, sealed: SealedSegment, versions: Versions, cut: Cut) -> list[tuple[Any, ...]]:
        """What a query at the cut sees, in the segment's order, with the versions of each row."""
        lengths = [batch.num_rows for batch in sealed.batches]
        masks = versions.masks(cut, lengths)
        since, until = versions.epochs_of(cut)
        found, first = [], 0
        for batch, mask in zip(sealed.batches, masks, strict=True):
            values = zip(*(batch.column(name).to_pylist() for name in ("$offset", "driver", "gone", "ts")), strict=True)
            for row, value in enumerate(values):
                if mask is None or mask.flags[row]:
                    found.append((*value, int(since[first + row]), int(until[first + row])))
            first += batch.num_rows
        return found

    def check(self, sealed: SealedSegment, versions: Versions, compacted_at: int) -> None:
        """As the segment that was never compacted, at every epoch from `compacted_at` to where the versions are."""
        before = self.snapshot(versions.epoch).versions
        assert versions.horizon == compacted_at
        for epoch in range(compacted_at, versions.epoch + 1):
            for visibility in (Visibility.VISIBLE, Visibility.IN_FORCE):
                cut = Cut(epoch=epoch, visibility=visibility)
                assert self.rows(sealed, versions, cut) == self.rows(self.sealed, before, cut), (epoch, visibility)
            first, end = self.metadata.start_offset, self.metadata.end_offset or 0
            expected = self.epochs.expected(1, first, end, epoch)
            still = {offset: ends for offset, ends in expected.items() if ends[1] > compacted_at}
            assert shown(versions, epoch) == still


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compact")


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_nothing_looks_different_from_its_epoch_on(root: Path, data: Any) -> None:
    sorted_column = data.draw(st.sampled_from([None, "driver"]))
    world = World(root, keys=data.draw(st.sampled_from([1, 8, 60, 2_000])), seed=data.draw(st.integers(0, 99)),
                  sorted_column=sorted_column)  # fmt: skip
    compacted_at = data.draw(st.integers(6, NEWEST))
    done_at = data.draw(st.integers(compacted_at, NEWEST))
    known = world.snapshot(done_at)
    made, sealed = world.compact(known.versions, compacted_at)
    assert open_segment(sealed.directory).marker == sealed.marker
    # Whoever does it, and when: the same content.
    other, _ = world.compact(world.snapshot(data.draw(st.integers(compacted_at, NEWEST))).versions, compacted_at)
    assert (other.checksum, other.rows) == (made.checksum, made.rows)

    kept = known.versions.kept(compacted_at)
    compacted = known.versions.compacted(kept, compacted_at)
    world.check(sealed, compacted, compacted_at)
    # On disk and back, then what the log says afterwards.
    packed = pack(Snapshot(compacted, known.position), segment="s", checksum=made.checksum)
    locate = lambda: locations_of(sealed.batches)  # noqa: E731
    read = unpack(packed, segment="s", checksum=made.checksum, rows=made.rows, locate=locate)
    metadata = world.as_compacted(made, compacted_at)
    later = world.forward(Replay.from_snapshot(world.log, world.own, metadata, read), NEWEST, sealed.batches)
    world.check(sealed, later.versions, compacted_at)
    # Out of the log alone; and what it says of epochs that are in already is skipped.
    world.check(sealed, world.snapshot(NEWEST, sealed, metadata).versions, compacted_at)
    ahead = Snapshot(compacted, world.epochs.positions[1][6])
    again = world.forward(Replay.from_snapshot(world.log, world.own, metadata, ahead), NEWEST, sealed.batches)
    world.check(sealed, again.versions, compacted_at)

    # Once more, from the whole and from what was left: the same.
    next_at = data.draw(st.integers(compacted_at, NEWEST))
    newest = world.snapshot(NEWEST).versions
    twice, _ = world.compact(later.versions, next_at, sealed)
    once, _ = world.compact(newest, next_at)
    assert twice.checksum == once.checksum


def test_a_segment_of_which_nothing_is_left_is_a_segment(root: Path) -> None:
    world = World(root, keys=1, seed=3)
    versions = world.snapshot(NEWEST).versions
    made, sealed = world.compact(versions, NEWEST)
    assert made.rows == 0
    compacted = versions.compacted(versions.kept(NEWEST), NEWEST)
    world.check(sealed, compacted, NEWEST)
    assert open_segment(sealed.directory).rows == 0


@pytest.mark.parametrize("sorted_column", [None, "driver"])
def test_rows_that_are_read_again_from_the_log_are_those_that_were_left(root: Path, sorted_column: str | None) -> None:
    world = World(root, keys=30, seed=5, sorted_column=sorted_column)
    made, _ = world.compact(world.snapshot(10).versions, 9)
    metadata = world.as_compacted(made, 9)
    scratch = world.root / "again"
    scratch.mkdir()
    again = Reconsumer(world.log, fsync=False).rebuild(world.record, metadata, scratch)
    assert again.marker.checksum == made.checksum
    assert 0 < again.rows < world.sealed.rows


def test_rows_that_nothing_replaces_stay(root: Path) -> None:
    """A key of its own for each, as rows of null keys have them."""
    world = World(root, keys=10**9, seed=7)
    versions = world.snapshot(NEWEST).versions
    late = int(np.count_nonzero(versions.valid_from == versions.valid_until))
    assert int(np.count_nonzero(versions.kept(NEWEST))) == versions.rows - late


def test_nothing_is_made_of_a_damaged_file(root: Path) -> None:
    """What came out would be the committed content, which the others then fetch."""
    world = World(root, keys=30, seed=5)
    versions, source = world.snapshot(NEWEST).versions, world.sealed.directory / "rows.parquet"
    data = bytearray(source.read_bytes())
    data[len(data) // 4] ^= 1
    source.write_bytes(data)
    with pytest.raises(Corrupt, match="file checksum"):
        world.compact(versions, NEWEST)
