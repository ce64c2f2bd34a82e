# SPDX-License-Identifier: Apache-2.0
"""A server's upsert tables without threads: at any closed epoch, from tail or segments, sorted or not, before and after
sealing, restarts and rewinds, exactly the rows of the reference model are there."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from server_kit import START, open_segment_metadata
from versions_kit import INCARNATION, UPSERT, UpsertLog, shown, upsert_log, upsert_record

from cremant.epoch.records import Fence, Reset
from cremant.exec.stop import Stop
from cremant.log.memory import MemoryLog
from cremant.model.cluster import Rewind
from cremant.model.errors import InvariantViolation, QueryError
from cremant.model.offsets import Position
from cremant.model.upsert import Cut, Visibility
from cremant.segment.build import build_segment, spec_of
from cremant.segment.reader import derive, open_segment, read_marker
from cremant.segment.tail import SpillQuota
from cremant.server import updating
from cremant.server.partition import Partition, PartitionId, PartitionState
from cremant.server.partition_id import NO_ROWS
from cremant.server.scan import plan_scan
from cremant.server.snapshots import Snapshots
from cremant.server.steps import as_committed
from cremant.server.table import HostedSegment, HostedTable
from cremant.server.visible import tail_validity
from cremant.wire.messages import ServerQuery, TailRequest


def wall_ms() -> int:
    return int(time.time() * 1000)


def seen(
    table: HostedTable, segments: tuple[str, ...], first: int | None, cut: Cut
) -> dict[int, tuple[int, int]] | str:
    """Offset -> ($validFrom, $validUntil) of what exists, or why there is no answer."""
    tails = (TailRequest(partition=0, from_offset=first),) if first is not None else ()
    found = table.resolve(segments, tails, cut)
    if found.missing or found.behind or found.refused:
        return "missing" if found.missing else "behind" if found.behind else "refused"
    query = ServerQuery(
        request_id="q", table="trips", incarnation=INCARNATION, sql="", columns=("$validFrom", "$validUntil"),
        segments=segments, tails=tails, budget_ms=1, cut=cut,
    )  # fmt: skip
    scan = plan_scan(table, found, query, Stop(time.monotonic() + 60))
    rows: dict[int, tuple[int, int]] = {}
    for piece in scan.pieces:
        assert piece.validity is not None
        assert piece.rows == sum(batch.num_rows for batch in piece.batches)
        for number, batch in enumerate(piece.batches):
            since = piece.made["$validFrom"](number).to_pylist()
            until = piece.made["$validUntil"](number).to_pylist()
            assert len(since) == len(until) == batch.num_rows
            mask = piece.existing(number)
            there = mask.flags.tolist() if mask is not None else [True] * batch.num_rows
            assert mask is None or mask.count == sum(there)
            for row, offset in enumerate(batch.column("$offset").to_pylist()):
                if there[row]:
                    assert offset not in rows, f"row {offset} twice"
                    rows[offset] = (since[row], until[row])
    return rows


class AnyEpochIsExact(RuleBasedStateMachine):
    """`segments`: what a broker knows of; `opened`: the open segment."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.root = Path(self.directory.name)
        self.made = 0

    @initialize(in_order=st.booleans(), seed=st.integers(0, 1000))
    def begin(self, in_order: bool, seed: int) -> None:
        self.log = MemoryLog(wall_ms)
        self.epochs: UpsertLog = upsert_log(self.log, seed=seed, keys=6)
        self.record = upsert_record(sorted_column=None if in_order else "driver")
        self.segments: list[Any] = []
        self.start = START
        self.table = HostedTable(self.record)
        self.tick = Snapshots({"trips": self.table}, _never(), fsync=False)
        self._consume_here()

    def _consume_here(self) -> None:
        own = PartitionId("trips", INCARNATION, 0)
        self.partition = Partition(
            own, self.start, self.root / "tail", SpillQuota(), upsert=UPSERT,
            replay_from=updating.replay_from(self.table, 0, 0),
        )  # fmt: skip
        self.table.partitions[0] = self.partition
        updating.attach(self.table, self.partition)
        self.table.open[0] = open_segment_metadata(0, len(self.segments), self.start, ("me",))
        self._consume()

    def _turns(self) -> None:
        for partition in (*self.table.partitions.values(), *self.table.followers.values()):
            while partition.turn(self.log, wall_ms()):
                pass
            while partition.tail.maintain():
                pass

    def _consume(self) -> None:
        self._turns()
        for partition in (*self.table.partitions.values(), *self.table.followers.values()):
            assert partition.error is None, partition.error

    def _directory_of(self, metadata: Any) -> Path:
        return next(path for path in self.root.glob("s*") if read_marker(path).name == metadata.name)

    @rule(rows=st.integers(0, 8), blocks=st.integers(1, 3))
    def write(self, rows: int, blocks: int) -> None:
        for _ in range(blocks):
            if rows:
                self.epochs.block(0, rows)
        self.epochs.mark()
        self._consume()

    @precondition(lambda self: 0 in self.table.partitions)
    @rule()
    def seal(self) -> None:
        end = self.partition.closings.last
        if end.next_offset == self.start.next_offset:
            return
        self.made += 1
        parts = self.partition.tail.snapshot.between(self.start.next_offset, end.next_offset)
        directory = self.root / f"s{self.made}"
        built = build_segment(directory, [part.batch for part in parts], spec_of(self.record), fsync=False)
        metadata = self.table.open[0]
        sealed = derive(directory, metadata.name, built.checksum, fsync=False)
        done = as_committed(metadata, end, built, None)
        self.table.install(done, sealed, verified=True)
        assert self.table.segments[done.name].versions is not None
        self.segments.append(done)
        self.start = end
        self.table.open[0] = open_segment_metadata(0, len(self.segments), end, ("me",))

    @rule(which=st.integers(0, 10))
    def save(self, which: int) -> None:
        for hosted in list(self.table.segments.values())[which:]:
            self.tick.save(self.table, hosted)

    @rule(consumes=st.booleans())
    def restart(self, consumes: bool) -> None:
        """What is in memory is gone. Versions that are not on disk are for others to bring: such segments stay out."""
        for reader in (*self.table.partitions.values(), *self.table.followers.values()):
            reader.close()
        rewinds, self.table = self.table.rewinds, HostedTable(self.record)
        self.table.rewinds = rewinds
        self.tick = Snapshots({"trips": self.table}, _never(), fsync=False)
        for number, metadata in enumerate(self.segments):
            hosted = HostedSegment(metadata, open_segment(self._directory_of(metadata)))
            updating.open_versions(hosted)
            self.table.segments[metadata.name] = hosted
            assert number == metadata.sequence
        self._begin(consumes)

    @rule(consumes=st.booleans())
    def move(self, consumes: bool) -> None:
        """The partition goes elsewhere, or comes back; its sealed segments stay."""
        for number, partition in list(self.table.partitions.items()):
            del self.table.partitions[number]
            updating.leave(self.table, partition)
            partition.close()
        self._begin(consumes)

    def _begin(self, consumes: bool) -> None:
        if consumes:
            self._consume_here()
            return
        for number in updating.wanted_followers(self.table):
            updating.follow(self.table, number, 0, self._follower)
        self._consume()

    def _follower(self, start: Position) -> Partition:
        return Partition(PartitionId("trips", INCARNATION, 0), start, self.root / "f", SpillQuota(), upsert=UPSERT)

    @precondition(lambda self: self.epochs.epoch > 0)
    @rule(back=st.integers(0, 6), seen_first=st.booleans())
    def rewind(self, back: int, seen_first: bool) -> None:
        """The controller reopens what ends above the epoch; the Reset is read before that is known here, or after."""
        before = self.epochs.epoch
        epoch = rewound(self.epochs, back)
        if seen_first:
            self._turns()
        self.table.rewinds = (*self.table.rewinds, Rewind(to_epoch=epoch, next_epoch=before + 1, generation=1))
        kept = [metadata for metadata in self.segments if metadata.end.epoch <= epoch]
        if len(kept) < len(self.segments):
            self.start = self.segments[len(kept)].start
            for metadata in self.segments[len(kept) :]:
                del self.table.segments[metadata.name]
                shutil.rmtree(self._directory_of(metadata))
            self.segments = kept
            self.move(consumes=0 in self.table.partitions)
        self._turns()
        if self.table.followers and self.table.followers[0].error:
            # It began behind the epoch: what its segments had then, others have to bring.
            assert updating.wanted_followers(self.table) == set()
            assert all(hosted.versions is None for hosted in self.table.segments.values())
        self._consume()

    @precondition(lambda self: self.epochs.epoch > 0)
    @rule(back=st.integers(0, 4), visibility=st.sampled_from(Visibility))
    def ask(self, back: int, visibility: Visibility) -> None:
        closed = self.epochs.history.epochs
        epoch = closed[max(0, len(closed) - 1 - back)]
        names = tuple(
            metadata.name for metadata in self.segments if self.table.segments[metadata.name].versions is not None
        )
        first = self.start.next_offset if 0 in self.table.partitions else None
        found = seen(self.table, names, first, Cut(epoch=epoch, visibility=visibility))
        ranges = [(m.start_offset, m.end_offset) for m in self.segments if m.name in names]
        ranges += [(first, 2**62)] if first is not None else []
        expected: dict[int, tuple[int, int]] = {}
        for low, high in ranges:
            expected |= self.epochs.expected(0, low, high, epoch)
        rows = self.epochs.model.rows
        versions = self.epochs.history.versions
        if visibility is not Visibility.ALL:
            expected = {at: v for at, v in expected.items() if versions[0, at, 0].in_force(epoch)}
        if visibility is Visibility.VISIBLE:
            expected = {at: v for at, v in expected.items() if not rows[0, at, 0].deleted}
        assert found == expected

    @precondition(lambda self: 0 in self.table.partitions)
    @rule()
    def ask_for_everything_as_one_tail(self) -> None:
        if not self.epochs.epoch or any(hosted.versions is None for hosted in self.table.segments.values()):
            return
        cut = Cut(epoch=self.epochs.history.epochs[-1])
        found = seen(self.table, (), 0, cut)
        assert isinstance(found, dict)
        assert set(found) == {row.offset for row in self.epochs.history.at(cut.epoch).values()}

    def teardown(self) -> None:
        for reader in (*self.table.partitions.values(), *self.table.followers.values()):
            reader.close()
        self.directory.cleanup()


def _never() -> threading.Event:
    return threading.Event()


def rewound(epochs: UpsertLog, back: int) -> int:
    """Writes the Reset, and takes the model back; to which epoch."""
    history, closed = epochs.history, epochs.history.epochs
    epoch = closed[max(0, len(closed) - 1 - back)]
    epochs.generation += 1
    epochs.append(0, Fence(generation=epochs.generation))
    epochs.append(0, Reset(generation=epochs.generation, epoch=epoch))
    ends = history.ends_at(epoch)
    rows = epochs.model.rows
    for location in [location for location in rows if location[1] >= ends[0]]:
        del rows[location]
        history.versions.pop(location, None)
    for location, version in history.versions.items():
        if version.valid_until is not None and version.valid_until > epoch:
            history.versions[location] = version._replace(valid_until=None)
    kept = closed.index(epoch) + 1
    del closed[kept:], history.ends[kept:]
    history.winners = epochs.model.winners(ends)
    history._last, history._by_offset, history._indexed = tuple(ends), {}, 0
    epochs.ends, epochs.closed = list(ends), list(ends)
    epochs.reset_to = epoch
    return epoch


TestAnyEpochIsExact = AnyEpochIsExact.TestCase
TestAnyEpochIsExact.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


@pytest.fixture
def world(tmp_path: Path) -> tuple[MemoryLog, UpsertLog, HostedTable, Partition]:
    log = MemoryLog(wall_ms)
    epochs = upsert_log(log)
    table = HostedTable(upsert_record())
    partition = Partition(PartitionId("trips", INCARNATION, 0), START, tmp_path / "tail", SpillQuota(), upsert=UPSERT)
    table.partitions[0] = partition
    return log, epochs, table, partition


def test_an_epoch_that_is_not_closed_here_is_behind(world: tuple[MemoryLog, UpsertLog, HostedTable, Partition]) -> None:
    log, epochs, table, partition = world
    epochs.block(0, 5)
    epochs.mark()
    while partition.turn(log, wall_ms()):
        pass
    epochs.block(0, 5)
    assert seen(table, (), 0, Cut(epoch=2)) == "behind"
    assert isinstance(seen(table, (), 0, Cut(epoch=1)), dict)


def test_rows_that_are_not_closed_do_not_exist(world: tuple[MemoryLog, UpsertLog, HostedTable, Partition]) -> None:
    log, epochs, table, partition = world
    epochs.block(0, 5)
    while partition.turn(log, wall_ms()):
        pass
    assert partition.tail.snapshot.rows == 0
    assert seen(table, (), 0, Cut(epoch=0)) == {}


def test_it_tells_of_an_epoch_only_when_it_can_be_asked(
    world: tuple[MemoryLog, UpsertLog, HostedTable, Partition],
) -> None:
    log, epochs, table, partition = world
    told: list[int] = []

    def tell(state: Any) -> None:
        if state is None:
            told.append(-1)
            return
        told.append(state.closed)
        assert state.closed == 0 or isinstance(seen(table, (), 0, Cut(epoch=state.closed)), dict)

    partition.on_epoch = tell
    for _ in range(3):
        epochs.block(0, 5)
        epochs.mark()
        while partition.turn(log, wall_ms()):
            pass
    partition.close()
    assert told[-2:] == [3, -1]


def test_an_update_of_a_row_that_is_not_here_stops_the_partition(
    world: tuple[MemoryLog, UpsertLog, HostedTable, Partition],
) -> None:
    log, epochs, _, partition = world
    epochs.block(0, 3)
    real = epochs.history.close

    def wrong(epoch: int, ends: Any) -> Any:
        updates = real(epoch, ends)
        updates.setdefault(0, set()).add((99, 0, 0))
        return updates

    epochs.history.close = wrong  # type: ignore[method-assign]
    epochs.mark()
    while partition.turn(log, wall_ms()):
        pass
    assert partition.state is PartitionState.STOPPED
    assert "U-1" in (partition.error or "")
    assert partition.epoch_state is None


def test_epochs_that_were_taken_back_are_refused_once_another_is_closed(
    world: tuple[MemoryLog, UpsertLog, HostedTable, Partition],
) -> None:
    log, epochs, table, partition = world

    def read() -> None:
        while partition.turn(log, wall_ms()):
            pass

    for _ in range(4):
        epochs.block(0, 5)
        epochs.mark()
    read()
    assert isinstance(seen(table, (), 0, Cut(epoch=4)), dict)
    assert rewound(epochs, 2) == 2
    read()
    # The next one may be closed elsewhere already.
    assert seen(table, (), 0, Cut(epoch=5)) == "behind"
    epochs.block(0, 5)
    assert epochs.mark() == 5
    read()
    assert [seen(table, (), 0, Cut(epoch=epoch)) for epoch in (3, 4)] == ["refused", "refused"]
    for epoch in (2, 5):
        assert set(seen(table, (), 0, Cut(epoch=epoch))) == {row.offset for row in epochs.history.at(epoch).values()}


def seal_all(table: HostedTable, partition: Partition, directory: Path, start: Position = START) -> HostedSegment:
    """What is closed becomes a segment."""
    end = partition.closings.last
    parts = partition.tail.snapshot.between(start.next_offset, end.next_offset)
    built = build_segment(directory, [part.batch for part in parts], spec_of(table.record), fsync=False)
    opened = open_segment_metadata(0, 0, start, ("me",))
    sealed = derive(directory, opened.name, built.checksum, fsync=False)
    table.install(as_committed(opened, end, built, None), sealed, verified=True)
    return table.segments[opened.name]


def test_versions_are_written_again_only_where_their_file_is_not(
    world: tuple[MemoryLog, UpsertLog, HostedTable, Partition], tmp_path: Path
) -> None:
    """After a restart it is there; beside rows that were fetched again it is not."""
    log, epochs, table, partition = world
    epochs.write(5)
    while partition.turn(log, wall_ms()):
        pass
    hosted = seal_all(table, partition, tmp_path)
    sealed = hosted.sealed
    assert sealed is not None
    tick, file = Snapshots({"trips": table}, _never(), fsync=False), sealed.directory / "versions.bin"
    assert tick.save(table, hosted)
    written = file.stat().st_ino
    opened = HostedSegment(hosted.metadata, sealed)
    updating.open_versions(opened)
    table.segments[sealed.name] = opened
    updating.attach(table, partition)
    epochs.mark()  # nothing in it
    while partition.turn(log, wall_ms()):
        pass
    assert tick.save(table, opened)
    assert file.stat().st_ino == written
    assert opened.snapshot == partition.position
    file.unlink()
    table.install(opened.metadata, sealed, verified=True)
    assert tick.save(table, opened)
    assert file.exists()


@pytest.mark.parametrize("error", [InvariantViolation("U-1", "it does not fit"), ValueError("a bug")])
def test_an_epoch_that_was_applied_in_part_is_no_position(
    world: tuple[MemoryLog, UpsertLog, HostedTable, Partition], tmp_path: Path, error: Exception
) -> None:
    log, epochs, table, partition = world
    epochs.block(0, 9)
    epochs.mark()
    while partition.turn(log, wall_ms()):
        pass
    hosted = seal_all(table, partition, tmp_path / "s")
    assert partition.versions is not None

    def failing(*_: Any, **__: Any) -> None:
        raise error

    partition.versions.apply = failing  # type: ignore[method-assign]
    epochs.block(0, 9)
    epochs.mark()
    while partition.turn(log, wall_ms()):
        pass
    assert partition.state is PartitionState.STOPPED
    assert partition.position == epochs.positions[0][1]
    updating.leave(table, partition)
    assert hosted.follow_from == epochs.positions[0][1]
    # Read again it shows what it should.
    again = Partition(
        partition.id, START, tmp_path / "again", SpillQuota(), upsert=UPSERT,
        replay_from=updating.replay_from(table, 0, 0),
    )  # fmt: skip
    updating.attach(table, again)
    while again.turn(log, wall_ms()):
        pass
    assert hosted.versions is not None
    assert shown(hosted.versions, 2) == epochs.expected(0, 0, 9, 2)


@pytest.mark.parametrize("consumes", [True, False])
def test_what_the_log_lost_before_it_was_read_is_given_up(
    world: tuple[MemoryLog, UpsertLog, HostedTable, Partition], tmp_path: Path, consumes: bool
) -> None:
    log, epochs, table, partition = world
    epochs.block(0, 9)
    epochs.mark()
    while partition.turn(log, wall_ms()):
        pass
    hosted = seal_all(table, partition, tmp_path / "s")
    updating.leave(table, partition)
    for _ in range(4):
        epochs.block(0, 9)
        epochs.mark()
    start = epochs.positions[0][4]
    late = Partition(
        partition.id, start, tmp_path / "late", SpillQuota(), upsert=UPSERT,
        replay_from=updating.replay_from(table, 0, 0),
    )  # fmt: skip
    if not consumes:
        begin = msgspec.structs.replace(epochs.positions[0][1], next_offset=NO_ROWS)
        late = Partition(partition.id, begin, tmp_path / "late", SpillQuota(), upsert=UPSERT)
        del table.partitions[0]
    (table.partitions if consumes else table.followers)[0] = late
    updating.attach(table, late)
    assert not late.lacks_history
    log.trim(late.id.topic, 0, start.log_offset)
    late.turn(log, wall_ms())
    assert late.lacks_history
    if not consumes:
        assert updating.wanted_followers(table) == set()
        assert hosted.versions is None
        return
    assert updating.to_read_again(table) == {0}
    table.resets.add(0)
    for gone in table.take_resets():
        updating.leave(table, gone)
        gone.close()
    assert updating.replay_from(table, 0, log.earliest(late.id.topic, 0)) is None
    assert hosted.versions is None


def test_a_follower_goes_on_after_a_reset_that_it_knows(
    world: tuple[MemoryLog, UpsertLog, HostedTable, Partition], tmp_path: Path
) -> None:
    log, epochs, table, partition = world
    epochs.block(0, 9)
    epochs.mark()
    while partition.turn(log, wall_ms()):
        pass
    hosted = seal_all(table, partition, tmp_path / "s")
    updating.leave(table, partition)
    del table.partitions[0]
    updating.follow(
        table, 0, 0, lambda at: Partition(partition.id, at, tmp_path / "f", SpillQuota(), upsert=UPSERT)
    )  # fmt: skip
    follower = table.followers[0]
    for _ in range(3):
        epochs.block(0, 9)
        epochs.mark()
    assert rewound(epochs, 1) == 3
    epochs.block(0, 9)
    epochs.mark()
    while follower.turn(log, wall_ms()):
        pass
    assert (follower.error, follower.position.epoch) == (None, 5)
    assert hosted.versions is not None
    assert shown(hosted.versions, 5) == epochs.expected(0, 0, 9, 5)


def test_rows_that_are_not_where_their_versions_are_give_no_answer(
    world: tuple[MemoryLog, UpsertLog, HostedTable, Partition],
) -> None:
    """A tail that was cut between two looks at it."""
    log, epochs, table, partition = world
    for _ in range(2):
        epochs.block(0, 9)
        epochs.mark()
    while partition.turn(log, wall_ms()):
        pass
    found = table.resolve((), (TailRequest(partition=0, from_offset=0),), Cut(epoch=2))
    rows = found.tails[0].rows
    assert tail_validity(rows, found.cut) is not None
    assert rows.versions is not None
    other = dataclasses.replace(rows, parts=rows.parts[:1], versions=rows.versions.between(5, 18))
    with pytest.raises(QueryError, match="taken back"):
        tail_validity(other, found.cut)
