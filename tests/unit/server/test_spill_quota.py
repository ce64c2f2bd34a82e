# SPDX-License-Identifier: Apache-2.0
"""A store that is away for long under STORE_REQUIRED: rows go to disk up to the quota, then the partition waits and
says so; queries go on, and everything goes on by itself once the store is back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cremant.completion import replica
from cremant.log.memory import MemoryLog
from cremant.model.cluster import TAIL_QUOTA
from cremant.model.completion import CompletionConfig, StorePolicy
from cremant.model.errors import Unavailable
from cremant.segment import blocks, tail
from cremant.segment.tail import SpillQuota
from cremant.server.fetching import SegmentFetcher
from cremant.server.files import ServerFiles
from cremant.server.hosting import Hosting
from cremant.server.metrics import ServerMetrics
from cremant.server.partition import Partition, PartitionId
from cremant.server.peers import PeerService
from cremant.server.sealing import Sealer
from cremant.server.table import HostedTable
from cremant.server.uploads import Uploads
from cremant.store.deepstore import DirectoryStore
from cremant.wire.messages import CommitEnd, CommitEndReply, CompletionStatus, SegmentConsumedReply, TailRequest

QUOTA_BYTES = 600_000
EPOCH_ROWS = 2_000


class Store(DirectoryStore):
    away = True

    def put(self, name: str, source: Path) -> str:
        if self.away:
            raise Unavailable("the store is away")
        return super().put(name, source)


class Controller:
    """Every cut is the caller's to commit."""

    id = "me"

    def __init__(self) -> None:
        self.committed: list[CommitEnd] = []

    def call(self, path: str, message: Any, reply_type: type[Any], timeout_ms: int = 0) -> Any:
        if isinstance(message, CommitEnd):
            self.committed.append(message)
            return CommitEndReply(status=CompletionStatus.COMMIT_SUCCESS)
        return SegmentConsumedReply(status=CompletionStatus.COMMIT, end=message.at, token=1)

    def poke(self) -> None:
        pass

    def cluster_now_ms(self) -> int:
        return int(time.time() * 1000)


class World:
    def __init__(self, kit: Any, root: Path) -> None:
        self.kit = kit
        self.log = MemoryLog(lambda: int(time.time() * 1000))
        self.epochs = kit.EpochLog(self.log).create()
        self.files = ServerFiles(root / "server")
        self.store, self.controller = Store(root / "store"), Controller()
        completion = CompletionConfig(store_policy=StorePolicy.STORE_REQUIRED)
        self.table = HostedTable(kit.table_record(EPOCH_ROWS, completion=completion))
        own = PartitionId("trips", "00000000000000aa", 0)
        self.quota = SpillQuota(QUOTA_BYTES)
        self.partition = Partition(own, kit.START, self.files.tail_directory(own), self.quota)
        self.table.partitions[0] = self.partition
        self.table.open[0] = kit.open_segment_metadata(0, 0, kit.START, ("me",))
        tables, member = {"trips": self.table}, self._member()
        self.uploads = Uploads(tables, self.files, self.store, member, has_store=True)
        self.fetcher = SegmentFetcher("me", self.store, lambda: None, fsync=False)
        self.sealer = Sealer(tables, self.files, member, self.fetcher, self.uploads, fsync=False)
        self.hosting = Hosting(self.files, self.log)
        self.hosting.tables = tables

    def _member(self) -> Any:
        return self.controller

    def turn(self) -> None:
        """Of all threads of a server, the view included."""
        while self.partition.turn(self.log, int(time.time() * 1000)):
            self.maintain()
        self.maintain()
        self.sealer.look()
        done = self.controller.committed
        if done and done[-1].segment == self.table.open[0].name and done[-1].segment in self.table.segments:
            self.table.open[0] = self.kit.open_segment_metadata(0, len(done), done[-1].end, ("me",))

    def maintain(self) -> None:
        while self.partition.tail.maintain():
            pass

    def rows(self) -> int:
        """That a query sees."""
        found = self.table.resolve((), (TailRequest(partition=0, from_offset=0),))
        assert not found.behind
        [answer] = found.tails
        offsets = [n for part in answer.sealed for batch in part.batches(found.alignment) for n in batch[0].to_pylist()]
        offsets += [n for batch in answer.rows.batches(found.alignment) for n in batch[0].to_pylist()]
        assert sorted(offsets) == list(range(len(offsets)))
        return len(offsets)

    def state(self) -> str:
        [said] = self.hosting.report().tails
        return said.state

    def metrics(self) -> str:
        registry = CollectorRegistry()
        peers = PeerService(self.hosting)
        ServerMetrics(registry, self.hosting, self.sealer, self.fetcher, peers, self.uploads)
        peers.close()
        return generate_latest(registry).decode()

    def close(self) -> None:
        self.sealer.stop()
        self.uploads.stop()
        self.partition.close()
        self.files.close()


@pytest.fixture
def world(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(tail, "TAIL_SPILL_BYTES", 100_000)
    monkeypatch.setattr(tail, "HEAP_BYTES_MAX", 200_000)
    for module in (tail, blocks):
        monkeypatch.setattr(module, "TAIL_MERGE_ROWS", 1_000)
    monkeypatch.setattr(replica, "BACKOFF_MAX_MS", 200)
    made = World(kit, tmp_path)
    yield made
    made.close()


@pytest.mark.timeout(120)
def test_rows_wait_on_disk_up_to_the_quota_then_the_partition_waits_and_says_so(kit: Any, world: World) -> None:
    written = 0
    while world.state() != TAIL_QUOTA:
        world.epochs.write(EPOCH_ROWS)
        written += EPOCH_ROWS
        world.turn()
        assert written < 1_000_000, "rows without end, and no quota"
    seen = world.rows()
    assert 0 < seen <= written
    for _ in range(5):  # more comes, and waits in the log
        world.epochs.write(EPOCH_ROWS)
        world.turn()
    written += 5 * EPOCH_ROWS
    assert world.rows() == seen
    assert world.quota.used_bytes <= QUOTA_BYTES
    assert world.partition.tail.heap_bytes < 2 * 200_000
    label = 'partition="0",state="tailQuota",table="trips_REALTIME"'
    assert f"pinot_server_realtimePartitionBlocked{{{label}}} 1.0" in world.metrics()
    kit.eventually(lambda: (world.turn(), "the store is away" in str(world.table.problems))[1])
    assert world.controller.committed == []

    world.store.away = False
    kit.eventually(lambda: (world.turn(), world.rows() == written)[1])
    kit.eventually(lambda: (world.turn(), world.state() == "consuming")[1])
    assert world.rows() == written
    assert world.controller.committed
    assert f"pinot_server_realtimePartitionBlocked{{{label}}} 0.0" in world.metrics()
