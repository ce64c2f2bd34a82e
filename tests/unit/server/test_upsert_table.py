# SPDX-License-Identifier: Apache-2.0
"""A server's upsert tables without threads: at any closed epoch, from tail or segments, sorted or not, before and after
sealing, restarts and rewinds, exactly the rows of the reference model are there."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from server_kit import START, open_segment_metadata
from versions_kit import INCARNATION, UPSERT, UpsertLog, upsert_log, upsert_record

from cremant.exec.stop import Stop
from cremant.log.memory import MemoryLog
from cremant.model.offsets import Position
from cremant.model.upsert import Cut, Visibility
from cremant.segment.build import build_segment, spec_of
from cremant.segment.reader import derive, open_segment
from cremant.segment.tail import SpillQuota
from cremant.server import updating
from cremant.server.partition import Partition, PartitionId, PartitionState
from cremant.server.scan import plan_scan
from cremant.server.snapshots import Snapshots
from cremant.server.steps import as_committed
from cremant.server.table import HostedSegment, HostedTable
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
        request_id="q", table="trips", incarnation=INCARNATION, sql="", columns=(), segments=segments, tails=tails,
        budget_ms=1, cut=cut,
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

    def _consume(self) -> None:
        for partition in (*self.table.partitions.values(), *self.table.followers.values()):
            while partition.turn(self.log, wall_ms()):
                pass
            while partition.tail.maintain():
                pass
            assert partition.error is None

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
        self.table = HostedTable(self.record)
        self.tick = Snapshots({"trips": self.table}, _never(), fsync=False)
        for number, metadata in enumerate(self.segments):
            directory = next(path for path in self.root.glob("s*") if _name(path) == metadata.name)
            hosted = HostedSegment(metadata, open_segment(directory))
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
    @rule(back=st.integers(0, 4), visibility=st.sampled_from(Visibility))
    def ask(self, back: int, visibility: Visibility) -> None:
        epoch = max(1, self.epochs.epoch - back)
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
        cut = Cut(epoch=self.epochs.epoch)
        found = seen(self.table, (), 0, cut)
        assert isinstance(found, dict)
        assert set(found) == {row.offset for row in self.epochs.history.at(cut.epoch).values()}

    def teardown(self) -> None:
        for reader in (*self.table.partitions.values(), *self.table.followers.values()):
            reader.close()
        self.directory.cleanup()


def _never() -> Any:
    import threading

    return threading.Event()


def _name(path: Path) -> str:
    from cremant.segment.reader import read_marker

    return read_marker(path).name


TestAnyEpochIsExact = AnyEpochIsExact.TestCase
TestAnyEpochIsExact.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


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
