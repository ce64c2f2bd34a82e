# SPDX-License-Identifier: Apache-2.0
"""Queries of an upsert table on a server: as of their cut, after waiting for it, and never without one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from server_kit import START, open_segment_metadata, table_record
from versions_kit import INCARNATION, UPSERT, UpsertLog, upsert_log, upsert_record

from cremant.exec.engine import Engine
from cremant.log.memory import MemoryLog
from cremant.model.query_codes import QueryCode
from cremant.model.upsert import Cut, Visibility
from cremant.segment.tail import SpillQuota
from cremant.server.epochs import EpochBoard
from cremant.server.partition import Partition, PartitionId
from cremant.server.query import QueryService
from cremant.server.table import HostedTable
from cremant.wire.codec import decode
from cremant.wire.messages import ServerAnswer, ServerQuery, TailRequest


class World:
    """One partition of an upsert table, and the log that the test writes."""

    def __init__(self, directory: Path, engine: Engine) -> None:
        self.log = MemoryLog(lambda: int(time.time() * 1000))
        self.epochs: UpsertLog = upsert_log(self.log, seed=3, keys=9)
        self.table = HostedTable(upsert_record())
        own = PartitionId("trips", INCARNATION, 0)
        self.partition = Partition(own, START, directory / "tail", SpillQuota(), upsert=UPSERT)
        self.table.partitions[0] = self.partition
        self.table.open[0] = open_segment_metadata(0, 0, START, ("me",))
        self.board = EpochBoard()
        self.partition.on_epoch = partial(self.board.tell, INCARNATION, 0)
        self.service = QueryService({"trips": self.table}, engine, self.board)

    def take(self) -> None:
        while self.partition.turn(self.log, 1):
            pass

    def close_epoch(self, rows: int = 40) -> int:
        self.epochs.block(0, rows)
        epoch = self.epochs.mark()
        self.take()
        return epoch

    def expected(self, epoch: int) -> int:
        """Rows in force at `epoch`, tombstones too."""
        versions = self.epochs.expected(0, 0, 10**9, epoch)
        return sum(since <= epoch < until for since, until in versions.values())


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    engine = Engine(threads=2, memory_bytes=256 * 1024 * 1024)
    made = World(tmp_path, engine)
    made.take()
    yield made
    made.service.close()
    made.partition.close()
    engine.close()


def query(cut: Cut | None, **changes: Any) -> ServerQuery:
    known: dict[str, Any] = {
        "request_id": "q", "table": "trips", "incarnation": INCARNATION, "sql": "SELECT count(*) AS n FROM t",
        "columns": (), "segments": (), "tails": (TailRequest(partition=0, from_offset=0),), "budget_ms": 5_000,
    }  # fmt: skip
    return ServerQuery(**(known | changes), cut=cut)


def ask(service: QueryService, asked: ServerQuery) -> tuple[ServerAnswer, int | None]:
    return unpack(asyncio.run(service.answer(asked)))


def unpack(body: bytes) -> tuple[ServerAnswer, int | None]:
    length = int.from_bytes(body[:4], "big")
    header, rows = decode(body[4 : 4 + length], ServerAnswer), body[4 + length :]
    if not rows:
        return header, None
    with pa.ipc.open_stream(rows) as reader:
        return header, reader.read_all().column("n")[0].as_py()


def at(epoch: int, visibility: Visibility = Visibility.IN_FORCE) -> Cut:
    return Cut(epoch=epoch, visibility=visibility)


def test_any_epoch_that_was_closed_is_answered_as_it_was(world: World) -> None:
    for _ in range(5):
        world.close_epoch()
    for epoch in range(6):
        header, count = ask(world.service, query(at(epoch)))
        assert (header.error_code, header.behind_partitions, header.refused_partitions) == (0, (), ())
        assert count == world.expected(epoch)
    assert ask(world.service, query(at(5, Visibility.ALL)))[1] == 200
    assert ask(world.service, query(at(5, Visibility.VISIBLE)))[1] < world.expected(5)


def test_a_cut_that_is_not_closed_yet_is_waited_for_without_a_slot(world: World) -> None:
    world.close_epoch()

    async def run() -> list[bytes]:
        early = [asyncio.create_task(world.service.answer(query(at(2), request_id=f"q{n}"))) for n in range(30)]
        await asyncio.sleep(0.05)
        now = await world.service.answer(query(at(1), request_id="now"))
        assert unpack(now)[1] == world.expected(1)
        assert not any(task.done() for task in early)
        thread = threading.Thread(target=world.close_epoch)
        thread.start()
        bodies = await asyncio.gather(*early)
        thread.join()
        return list(bodies)

    for body in asyncio.run(run()):
        assert unpack(body)[1] == world.expected(2)


def test_without_the_cut_in_time_the_partition_is_behind_and_nothing_of_it_is_sent(world: World) -> None:
    world.close_epoch()
    began_s = time.monotonic()
    header, count = ask(world.service, query(at(9), budget_ms=500))
    assert 0.3 < time.monotonic() - began_s < 0.5
    assert header.behind_partitions == (0,)
    assert header.partitions == ()
    assert count == 0


def test_of_an_epoch_that_is_under_way_nothing_is_seen(world: World) -> None:
    world.close_epoch()
    world.epochs.block(0, 40)
    world.take()
    assert ask(world.service, query(at(1, Visibility.ALL)))[1] == 40
    assert ask(world.service, query(at(2), budget_ms=200))[0].behind_partitions == (0,)


def test_an_upsert_table_gives_no_answer_without_a_cut(world: World) -> None:
    world.close_epoch()
    header, count = ask(world.service, query(None))
    assert header.error_code == QueryCode.SERVER_TABLE_MISSING
    assert "is an upsert table here" in header.error
    assert header.behind_partitions == (0,)
    assert count is None


def test_a_table_with_keys_is_not_shown_as_if_it_had_none(world: World) -> None:
    """A broker that has not heard of the keys yet would show every version."""
    unkeyed = Visibility.ALL
    assert ask(world.service, query(Cut(epoch=0, visibility=unkeyed, unkeyed=True)))[0].error_code == 0
    world.close_epoch()
    header, count = ask(world.service, query(Cut(epoch=1, visibility=unkeyed, unkeyed=True)))
    assert header.error_code == QueryCode.SERVER_TABLE_MISSING
    assert count is None
    assert ask(world.service, query(at(1, Visibility.ALL)))[1] == 40


def test_a_cut_from_before_the_keys_is_refused_once_they_came(world: World) -> None:
    """Rows say since when they are in force, no longer since when they are there."""
    world.close_epoch()
    header, count = ask(world.service, query(Cut(epoch=0, visibility=Visibility.ALL, unkeyed=True)))
    assert (header.error_code, header.refused_partitions, header.horizon) == (0, (0,), 1)
    assert header.partitions == ()
    assert not count


def test_an_append_table_gives_none_at_a_cut(world: World) -> None:
    world.table.update(table_record())
    header, _ = ask(world.service, query(at(1)))
    assert header.error_code == QueryCode.SERVER_TABLE_MISSING
    assert "is an append table here" in header.error


def test_who_waits_for_a_partition_that_stops_is_not_kept_waiting(world: World) -> None:
    world.close_epoch()

    async def run() -> ServerAnswer:
        waiting = asyncio.create_task(world.service.answer(query(at(2))))
        await asyncio.sleep(0.05)
        world.partition.close()
        began_s = time.monotonic()
        header, _ = unpack(await waiting)
        assert time.monotonic() - began_s < 2.0
        return header

    assert asyncio.run(run()).behind_partitions == (0,)
