# SPDX-License-Identifier: Apache-2.0
"""Sealing many partitions at once: whoever asks or commits waits for no build, no fetch and no other partition."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cremant.completion.replica import Step, StepKind
from cremant.log.memory import MemoryLog
from cremant.model.errors import Corrupt, NoResource
from cremant.model.segments import ReplicaState, SegmentMetadata
from cremant.model.table import IndexConfig
from cremant.segment.build import PARQUET_FILE, build_segment
from cremant.segment.index import build_index
from cremant.segment.reader import ARROW_FILE
from cremant.segment.tail import SpillQuota
from cremant.server import steps
from cremant.server.fetching import SegmentFetcher
from cremant.server.files import ServerFiles
from cremant.server.hosting import Hosting
from cremant.server.metrics import ServerMetrics
from cremant.server.partition import Partition, PartitionId
from cremant.server.peers import PeerService
from cremant.server.sealing import Sealer
from cremant.server.steps import Task
from cremant.server.table import HostedTable
from cremant.server.uploads import Uploads
from cremant.store.deepstore import DirectoryStore
from cremant.wire.messages import (
    CommitEnd,
    CommitEndReply,
    CompletionStatus,
    SegmentConsumed,
    SegmentConsumedReply,
    TailRequest,
)

PARTITIONS = 8


class Controller:
    """Decides every cut at once: whoever is in `commits` commits, the others keep."""

    id = "me"

    def __init__(self) -> None:
        self.commits: set[str] = set()
        self.asked: list[str] = []
        self.committed: list[str] = []

    def call(self, path: str, message: Any, reply_type: type[Any], timeout_ms: int = 0) -> Any:
        match message:
            case SegmentConsumed():
                self.asked.append(message.segment)
                commits = message.segment in self.commits
                status = CompletionStatus.COMMIT if commits else CompletionStatus.HOLD
                return SegmentConsumedReply(status=status, end=message.at, token=1)
            case CommitEnd():
                self.committed.append(message.segment)
                return CommitEndReply(status=CompletionStatus.COMMIT_SUCCESS)
        raise AssertionError(path)

    def poke(self) -> None:
        pass

    def cluster_now_ms(self) -> int:
        return int(time.time() * 1000)


class Builds:
    """Counts builds, and holds each up that begins while `open` is not set."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.running = self.most = 0

    def __call__(self, *args: Any, **more: Any) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            assert self.open.wait(20), "a test forgot to let builds go on"
            return build_segment(*args, **more)
        finally:
            self.running -= 1


class World:
    """Eight partitions, each with a segment's rows."""

    def __init__(self, kit: Any, root: Path) -> None:
        self.log = MemoryLog(lambda: int(time.time() * 1000))
        self.epochs = kit.EpochLog(self.log, partitions=PARTITIONS).create()
        self.epochs.write(100)
        self.files = ServerFiles(root / "server")
        self.table = HostedTable(kit.table_record(100))
        self.opened: list[SegmentMetadata] = []
        for number in range(PARTITIONS):
            own = PartitionId("trips", "00000000000000aa", number)
            partition = Partition(own, kit.START, self.files.tail_directory(own), SpillQuota())
            while partition.turn(self.log, 1):
                pass
            self.table.partitions[number] = partition
            self.table.open[number] = kit.open_segment_metadata(number, 0, kit.START, ("me", "other"))
            self.opened.append(self.table.open[number])
        self.controller = Controller()
        tables, member = {"trips": self.table}, self._member()
        self.store = DirectoryStore(root / "store")
        self.fetcher = SegmentFetcher("me", self.store, lambda: None, fsync=False)
        self.uploads = Uploads(tables, self.files, self.store, member, has_store=True)
        self.sealer = Sealer(tables, self.files, member, self.fetcher, self.uploads, fsync=False)
        self.hosting = Hosting(self.files, self.log)
        self.hosting.tables = tables

    def _member(self) -> Any:
        return self.controller

    def name(self, number: int) -> str:
        return self.opened[number].name

    def commits(self, *numbers: int) -> None:
        self.controller.commits = {self.name(number) for number in numbers}

    def metrics(self) -> str:
        registry = CollectorRegistry()
        peers = PeerService(self.hosting)
        ServerMetrics(registry, self.hosting, self.sealer, self.fetcher, peers, self.uploads)
        peers.close()
        return generate_latest(registry).decode()

    def close(self) -> None:
        self.sealer.stop()
        self.uploads.stop()
        for partition in self.table.partitions.values():
            partition.close()
        self.files.close()


@pytest.fixture
def world(kit: Any, tmp_path: Path) -> Iterator[World]:
    made = World(kit, tmp_path)
    yield made
    made.close()


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Builds:
    made = Builds()
    monkeypatch.setattr(steps, "build_segment", made)
    return made


def until(kit: Any, world: World, condition: Callable[[], Any]) -> None:
    def look() -> Any:
        world.sealer.look()
        return condition()

    kit.eventually(look)


@pytest.mark.timeout(120)
def test_a_build_that_takes_long_holds_up_nobody_who_asks_or_commits(kit: Any, world: World, builds: Builds) -> None:
    world.commits(0)
    for number in range(1, PARTITIONS):
        del world.table.open[number]
    until(kit, world, lambda: world.table.sealings[world.name(0)].built is not None)  # all but its commit
    builds.open.clear()
    world.table.open.update({number: world.opened[number] for number in range(1, PARTITIONS)})
    world.sealer.start()
    kit.eventually(lambda: builds.running == 1)
    kit.eventually(lambda: world.controller.committed == [world.name(0)])
    kit.eventually(lambda: len(set(world.controller.asked)) == PARTITIONS)
    kit.eventually(lambda: world.name(0) in world.table.segments)  # installed, too
    builds.open.set()
    kit.eventually(lambda: all(world.table.sealings[world.name(n)].built for n in range(1, PARTITIONS)))
    assert builds.most == 1


@pytest.mark.timeout(120)
def test_what_is_committed_here_is_built_before_what_is_only_kept(kit: Any, world: World, builds: Builds) -> None:
    builds.open.clear()
    world.commits(PARTITIONS - 1)
    until(kit, world, lambda: len(world.controller.asked) >= PARTITIONS and builds.running == 1)
    until(kit, world, lambda: world.table.sealings[world.name(PARTITIONS - 1)].commits)
    builds.open.set()
    until(kit, world, lambda: world.name(PARTITIONS - 1) in world.controller.committed)
    kept = [world.table.sealings[world.name(n)].built for n in range(PARTITIONS - 1)]
    assert sum(built is not None for built in kept) < PARTITIONS - 2


@pytest.mark.timeout(120)
def test_metrics_tell_how_long_each_phase_took(kit: Any, world: World) -> None:
    world.commits(*range(PARTITIONS))
    world.sealer.start()
    kit.eventually(lambda: len(world.controller.committed) == PARTITIONS)
    kit.eventually(lambda: all(world.table.segments.get(world.name(n)) for n in range(PARTITIONS)))
    shown = world.metrics()
    for phase in ("decide", "catchUp", "turn", "build", "upload", "commit", "install"):
        series = f'pinot_server_segmentCommitPhaseTimeMs_count{{phase="{phase}",table="trips_REALTIME"}} {PARTITIONS}.0'
        assert series in shown, f"{series} is not in\n{shown}"
    del world.hosting.tables["trips"]
    assert "trips_REALTIME" not in world.metrics()


@pytest.mark.timeout(120)
def test_queries_do_not_wait_for_an_index_that_is_built_while_a_segment_is_installed(
    kit: Any, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table wants another index since the segment was built."""
    until(kit, world, lambda: world.table.sealings[world.name(0)].built is not None)
    sealing = world.table.sealings[world.name(0)]
    entered, released = threading.Event(), threading.Event()

    def slow(*args: Any, **more: Any) -> Any:
        entered.set()
        assert released.wait(20)
        return build_index(*args, **more)

    monkeypatch.setattr("cremant.segment.index.build_index", slow)
    config = msgspec.structs.replace(world.table.record.config, indexes=IndexConfig(range=("fare",)))
    world.table.update(msgspec.structs.replace(world.table.record, config=config))
    task = Task(world.table, world.opened[0], sealing, Step(StepKind.INSTALL, "committed"))
    thread = threading.Thread(target=world.sealer.run, args=(task,), daemon=True)
    thread.start()
    assert entered.wait(10)
    assert world.table.lock.acquire(timeout=5)
    world.table.lock.release()
    released.set()
    thread.join(10)
    sealed = world.table.segments[world.name(0)].sealed
    assert sealed is not None
    assert sealed.index is not None
    assert sealed.index.wanted == config.indexes
    assert (sealed.directory / PARQUET_FILE).exists()


@contextlib.contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """What this process writes beyond it fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("file", [PARQUET_FILE, ARROW_FILE])
def test_a_disk_that_fills_while_building_is_told_leaves_no_files_and_is_waited_for(
    kit: Any, world: World, tmp_path: Path, file: str
) -> None:
    for number in range(1, PARTITIONS):  # its size, from another partition
        del world.table.open[number]
    until(kit, world, lambda: world.table.sealings[world.name(0)].built is not None)
    room = (world.table.sealings[world.name(0)].built.path.parent / file).stat().st_size - 1
    world.table.open = {1: world.opened[1]}
    del world.table.sealings[world.name(0)]
    world.commits(1)
    scratch = tmp_path / "server" / "scratch"
    with files_of_at_most(room):
        until(kit, world, lambda: world.name(1) in world.table.problems and not world.sealer._busy)
        assert file in world.table.problems[world.name(1)] or "scratch" in world.table.problems[world.name(1)]
        assert "File too large" in world.table.problems[world.name(1)]
        assert world.table.sealings[world.name(1)].build_after_ms > 0
        world.sealer.steps.release(())
        assert not list(scratch.iterdir())
        [tail] = world.table.resolve((), (TailRequest(partition=1, from_offset=0),)).tails
        assert sum(part.rows for part in tail.rows.parts) == 100
    until(kit, world, lambda: world.name(1) in world.table.segments)
    assert world.table.problems == {}
    assert world.controller.committed == [world.name(1)]


def test_a_replica_whose_rows_cannot_be_built_is_in_error_and_well_again_once_they_can(
    kit: Any, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds that fail for the state of the world are no error of the replica, however often."""
    opened = world.opened[0]
    [(_, sealing)] = [pair for pair in world.table.unsealed() if pair[0] is opened]
    task = Task(
        world.table, opened, sealing, Step(StepKind.BUILD, "build", end=world.table.partitions[0].closings.last)
    )

    def said() -> tuple[ReplicaState, bool]:
        [report] = [report for report in world.hosting.report().segments if report.segment == opened.name]
        return report.state, bool(report.error)

    trouble: list[Exception] = [NoResource("full")] * 5 + [Corrupt("a spilled file is damaged")] * 3

    def fails(*args: Any, **more: Any) -> Any:
        raise trouble.pop(0)

    with monkeypatch.context() as patch:
        patch.setattr(steps, "build_segment", fails)
        for _ in range(7):
            world.sealer.run(task)
            assert said() == (ReplicaState.CONSUMING, True)
        world.sealer.run(task)
        assert said() == (ReplicaState.ERROR, True)
    assert not world.table.resolve((), (TailRequest(partition=0, from_offset=0),)).behind
    world.sealer.run(task)
    assert said() == (ReplicaState.CONSUMING, False)
