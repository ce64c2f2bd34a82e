# SPDX-License-Identifier: Apache-2.0
"""A log that does not answer: whoever looks at the partition, moves it or closes it need not wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cremant.log.memory import MemoryLog
from cremant.model.offsets import Position
from cremant.segment.tail import SpillQuota
from cremant.server.partition import Partition, PartitionId, PartitionState

START = Position(log_offset=0, epoch=0, generation=0, next_offset=0)


class StuckReader:
    """Reads when it may."""

    def __init__(self, log: StuckLog, reader: Any) -> None:
        self._log, self._reader = log, reader

    def read(self, **bounds: int) -> Any:
        if self._log.sticks:
            self._log.entered.set()
            assert self._log.released.wait(20)
        return self._reader.read(**bounds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def close(self) -> None:
        self._log.closed += 1
        self._reader.close()


class StuckLog:
    """A log whose reads hang from `sticks` on until they are released."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self.sticks = False
        self.entered, self.released = threading.Event(), threading.Event()
        self.closed = 0

    def reader(self, topic: str, partition: int, offset: int) -> Any:
        return StuckReader(self, self._log.reader(topic, partition, offset))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


class World:
    """One partition, in a turn that waits for its log."""

    def __init__(self, kit: Any, root: Path) -> None:
        memory = MemoryLog(lambda: int(time.time() * 1000))
        self.epochs = kit.EpochLog(memory).create()
        self.epochs.write(100)
        self.log: Any = StuckLog(memory)
        self.partition = Partition(PartitionId("trips", "00000000000000aa", 0), START, root / "tail", SpillQuota())
        self.consume()
        self.epochs.write(50)
        self.log.sticks = True
        self.thread = threading.Thread(target=self.consume, daemon=True)
        self.thread.start()
        assert self.log.entered.wait(10)

    def consume(self) -> None:
        while self.partition.turn(self.log, 1):
            pass

    def release(self) -> None:
        self.log.sticks = False
        self.log.released.set()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def world(kit: Any, tmp_path: Path) -> Iterator[World]:
    made = World(kit, tmp_path)
    yield made
    made.log.released.set()
    made.partition.close()


def looks(partition: Partition) -> bool:
    """From another thread, as the sealer does."""
    seen: list[int] = []

    def look() -> None:
        with partition.lock:
            seen.append(partition.closings.last.next_offset)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(5)
    return bool(seen)


@pytest.mark.timeout(60)
def test_closed_positions_can_be_read_and_the_turn_goes_on_where_it_was(world: World) -> None:
    assert looks(world.partition)
    world.release()
    assert world.partition.tail.snapshot.next_offset == 150
    assert world.log.closed == 0


@pytest.mark.timeout(60)
def test_what_was_read_before_the_partition_was_moved_is_not_taken(world: World) -> None:
    moved: list[bool] = []
    end = world.partition.closings.last  # behind the first epoch, at offset 100

    def move() -> None:
        world.partition.reposition(end, None)
        moved.append(True)

    thread = threading.Thread(target=move, daemon=True)
    thread.start()
    thread.join(5)
    assert moved
    world.release()
    world.consume()
    snapshot = world.partition.tail.snapshot
    assert (snapshot.first_offset, snapshot.next_offset, snapshot.rows) == (100, 150, 50)
    assert world.log.closed == 1


@pytest.mark.timeout(60)
def test_a_partition_is_closed_without_waiting(world: World) -> None:
    thread = threading.Thread(target=world.partition.close, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    world.release()
    assert world.partition.state is PartitionState.STOPPED
    assert world.partition.tail.snapshot.rows == 0
    assert world.log.closed == 1


@pytest.mark.timeout(60)
def test_a_turn_that_begins_while_the_partition_is_closed_takes_nothing(kit: Any, tmp_path: Path) -> None:
    memory = MemoryLog(lambda: int(time.time() * 1000))
    kit.EpochLog(memory).create().write(100)
    quota = SpillQuota()
    partition = Partition(PartitionId("trips", "00000000000000aa", 0), START, tmp_path / "tail", quota)
    with partition.lock:
        thread = threading.Thread(target=partition.turn, args=(memory, 1), daemon=True)
        thread.start()
        thread.join(0.2)  # it waits for the lock
        partition.close()
    thread.join(10)
    assert (partition.tail.snapshot.rows, quota.heap_bytes) == (0, 0)
    assert partition.state is PartitionState.STOPPED
