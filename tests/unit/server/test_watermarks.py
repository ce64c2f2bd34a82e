# SPDX-License-Identifier: Apache-2.0
"""POST /internal/v1/watermarks: what is visible here, at once or as soon as it is as far as is wanted."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse

from cremant.epoch.records import Heartbeat
from cremant.log.memory import MemoryLog
from cremant.model.errors import Unavailable
from cremant.segment.tail import SpillQuota
from cremant.server import rest_watermarks
from cremant.server.partition import Partition, PartitionId
from cremant.server.rest_watermarks import Watermarks, watermark_routes
from cremant.server.table import HostedTable
from cremant.wire.codec import decode, encode
from cremant.wire.watermarks import WantedMark, WatermarksReply, WatermarksRequest

INCARNATION = "00000000000000aa"


class World:
    """Two partitions of one table, read by hand."""

    def __init__(self, kit: Any, root: Path) -> None:
        self.kit, self.root = kit, root
        self.log = MemoryLog(lambda: int(time.time() * 1000))
        self.epochs = kit.EpochLog(self.log, partitions=2).create()
        self.table = HostedTable(kit.table_record())
        self.tables = {"trips": self.table}
        self.partitions = [self.add(number) for number in (0, 1)]
        self.watermarks = Watermarks(self.tables)

    def add(self, number: int) -> Partition:
        directory = self.root / f"tail-{number}-{time.monotonic_ns()}"
        partition = Partition(PartitionId("trips", INCARNATION, number), self.kit.START, directory, SpillQuota())
        self.table.partitions[number] = partition
        return partition

    def consume(self) -> None:
        for partition in self.table.partitions.values():
            while partition.turn(self.log, int(time.time() * 1000)):
                pass

    def beat(self, at_ms: int) -> None:
        for partition in (0, 1):
            beat = Heartbeat(generation=1, last_closed=self.epochs.epoch, ends=tuple(self.epochs.ends), at_ms=at_ms)
            self.epochs.append(partition, beat)
        self.consume()

    def ask(self, *wanted: WantedMark, timeout_ms: int = 0) -> Any:
        return self.watermarks.settle(
            WatermarksRequest(table="trips", incarnation=INCARNATION, wanted=wanted, timeout_ms=timeout_ms)
        )


@pytest.fixture
def world(kit: Any, tmp_path: Path) -> Any:
    made = World(kit, tmp_path)
    yield made
    for partition in made.table.partitions.values():
        partition.close()


BOTH = WantedMark(partition=0), WantedMark(partition=1)


def test_who_asks_for_nothing_special_is_answered_at_once(world: World) -> None:
    world.epochs.write(10, reached_at_ms=5_000)
    assert asyncio.run(world.ask(*BOTH)) == ()  # neither has caught up
    world.consume()
    tails = asyncio.run(world.ask(*BOTH))
    assert [(tail.partition, tail.watermark.next_offset) for tail in tails] == [(0, 10), (1, 10)]
    assert tails[0].watermark.freshness_ms == 1_700_000_000_009
    assert tails[0].rows == 10


def test_a_demand_waits_for_rows_of_all_its_partitions(world: World) -> None:
    world.epochs.write(10)
    world.consume()

    async def run() -> Any:
        asked = world.ask(WantedMark(partition=0, offset=30), WantedMark(partition=1, offset=20), timeout_ms=30_000)
        waiting = asyncio.create_task(asked)
        await asyncio.sleep(0)
        world.epochs.write(10)
        world.consume()
        await asyncio.sleep(0.02)
        assert not waiting.done()
        world.epochs.write(10)
        world.consume()
        return await waiting

    assert [tail.watermark.next_offset for tail in asyncio.run(run())] == [30, 30]


def test_a_demand_for_freshness_is_met_by_rows_or_by_the_proof_that_there_are_no_more(world: World) -> None:
    world.epochs.write(10)
    world.consume()
    newest_ms = 1_700_000_000_009

    async def run() -> Any:
        fresh = [WantedMark(partition=number, fresh_ms=newest_ms + 500) for number in (0, 1)]
        waiting = asyncio.create_task(world.ask(*fresh, timeout_ms=30_000))
        world.beat(newest_ms + 499)
        await asyncio.sleep(0.02)
        assert not waiting.done()
        world.beat(newest_ms + 500)
        return await waiting

    assert [tail.watermark.freshness_ms for tail in asyncio.run(run())] == [newest_ms + 500] * 2


def test_a_demand_that_cannot_be_met_is_answered_with_what_is_when_its_time_is_over(world: World) -> None:
    world.epochs.write(10)
    world.consume()
    began_s = time.monotonic()
    (tail,) = asyncio.run(world.ask(WantedMark(partition=0, offset=11), timeout_ms=50))
    assert tail.watermark.next_offset == 10
    assert time.monotonic() - began_s >= 0.05
    # Of another incarnation, or of a partition that is elsewhere, nothing is said.
    assert asyncio.run(world.ask(WantedMark(partition=7), timeout_ms=20)) == ()
    other = WatermarksRequest(table="trips", incarnation="00000000000000bb", wanted=BOTH)
    assert asyncio.run(world.watermarks.settle(other)) == ()


def test_a_partition_that_comes_or_begins_anew_meanwhile_is_waited_for(world: World) -> None:
    world.epochs.write(10)
    world.consume()

    async def run() -> Any:
        waiting = asyncio.create_task(world.ask(WantedMark(partition=0, offset=20), timeout_ms=30_000))
        await asyncio.sleep(0)
        world.table.partitions.pop(0).close()
        await asyncio.sleep(0.01)
        world.add(0)
        world.epochs.write(10)
        world.consume()
        return await waiting

    (tail,) = asyncio.run(run())
    assert tail.watermark.next_offset == 20


def test_only_so_many_demands_wait(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest_watermarks, "DEMANDS_WAITING_MAX", 3)
    world.epochs.write(10)
    world.consume()

    async def run() -> None:
        late = WantedMark(partition=0, offset=99)
        waiting = [asyncio.create_task(world.ask(late, timeout_ms=30_000)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="3 demands for freshness wait"):
            await world.ask(late, timeout_ms=30_000)
        assert await world.ask(BOTH[0], timeout_ms=30_000)  # who need not wait is not refused
        waiting[0].cancel()
        await asyncio.sleep(0)
        await world.ask(late, timeout_ms=1)
        for task in waiting:
            task.cancel()

    asyncio.run(run())


def test_who_hangs_up_is_not_waited_for_any_longer(world: World) -> None:
    world.epochs.write(10)
    world.consume()
    member: Any = SimpleNamespace(fenced=False, id="Server_1")
    app = Starlette(routes=watermark_routes(world.tables, member))
    late = WantedMark(partition=0, offset=99)
    asked = WatermarksRequest(table="trips", incarnation=INCARNATION, wanted=(late,), timeout_ms=30_000)

    async def run() -> None:
        app.state.stopping = asyncio.Event()
        messages = iter([{"type": "http.request", "body": encode(asked)}])
        hung_up = asyncio.Event()

        async def receive() -> Any:
            if (message := next(messages, None)) is not None:
                return message
            await hung_up.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        scope = {
            "type": "http", "method": "POST", "path": "/internal/v1/watermarks", "headers": [], "query_string": b"",
            "app": app,
        }  # fmt: skip
        serving = asyncio.create_task(app(scope, receive, send))
        waiting = world.partitions[0].progress
        while not waiting.waiting:  # noqa: ASYNC110 (as a thread would see it)
            await asyncio.sleep(0.001)
        assert not serving.done()
        hung_up.set()
        await asyncio.wait_for(serving, 20)
        await asyncio.sleep(0)
        assert waiting.waiting == 0

    asyncio.run(run())


def test_over_http_a_demand_ends_with_the_process(world: World) -> None:
    world.epochs.write(10)
    world.consume()
    member: Any = SimpleNamespace(fenced=False, id="Server_1")
    app = Starlette(
        routes=watermark_routes(world.tables, member),
        exception_handlers={Unavailable: lambda request, error: PlainTextResponse(str(error), 503)},
    )

    async def run() -> None:
        app.state.stopping = asyncio.Event()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:

            def ask(timeout_ms: int, **wanted: int) -> Any:
                body = WatermarksRequest(
                    table="trips", incarnation=INCARNATION, wanted=(WantedMark(partition=0, **wanted),),
                    timeout_ms=timeout_ms,
                )  # fmt: skip
                return client.post("/internal/v1/watermarks", content=encode(body))

            reply = decode((await ask(0)).content, WatermarksReply)
            assert (reply.instance, reply.tails[0].watermark.next_offset) == ("Server_1", 10)
            waiting = asyncio.create_task(ask(30_000, offset=99))
            await asyncio.sleep(0.02)
            app.state.stopping.set()
            answer = await waiting
            assert (answer.status_code, answer.text) == (503, "Server_1 is being stopped")

    asyncio.run(run())


def test_who_waits_for_a_stopped_partition_holds_up_nobody(world: World) -> None:
    """It had reached what is wanted, but is not asked any more: perhaps another takes its place."""
    world.epochs.write(10)
    world.consume()
    world.partitions[0].close()

    async def run() -> None:
        waiting = asyncio.create_task(world.ask(WantedMark(partition=0, offset=5), timeout_ms=30_000))
        for _ in range(3):
            await asyncio.sleep(0.01)  # others get their turns
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(run())
    assert asyncio.run(world.ask(WantedMark(partition=0, offset=5), timeout_ms=1)) == ()
