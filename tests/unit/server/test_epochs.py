# SPDX-License-Identifier: Apache-2.0
"""Waiting for epochs: nobody is woken early, nobody sleeps through, brokers hear of each change."""

from __future__ import annotations

import asyncio
import threading
import time

from cremant.server.epochs import EpochBoard
from cremant.wire.messages import EpochState


def closed(epoch: int) -> EpochState:
    return EpochState(closed=epoch, horizon=1, partitions=2)


def test_an_epoch_that_is_closed_is_not_waited_for() -> None:
    board = EpochBoard()
    board.tell("i", 0, closed(7))
    assert asyncio.run(board.wait("i", 0, 7, 0.0))
    assert not asyncio.run(board.wait("i", 0, 8, 0.0))
    assert not asyncio.run(board.wait("i", 1, 1, 0.01))
    assert not asyncio.run(board.wait("j", 0, 1, 0.01))


def test_who_waits_is_woken_by_its_own_epoch_only() -> None:
    board = EpochBoard()

    async def run() -> list[int]:
        order: list[int] = []

        async def one(partition: int, epoch: int) -> None:
            assert await board.wait("i", partition, epoch, 5.0)
            order.append(epoch)

        tasks = [asyncio.create_task(one(0, 9)), asyncio.create_task(one(0, 8)), asyncio.create_task(one(1, 5))]
        await asyncio.sleep(0.01)
        for epoch in (5, 8, 9):
            board.tell("i", 0, closed(epoch))
            await asyncio.sleep(0.01)
        assert order == [8, 9]
        board.tell("i", 1, closed(6))
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(run()) == [8, 9, 5]


def test_nothing_is_lost_between_looking_and_waiting() -> None:
    """A thread closes epochs as fast as it can while a loop waits for each of them in turn."""
    board, last = EpochBoard(), 3_000

    def close_all() -> None:
        for epoch in range(1, last + 1):
            board.tell("i", 0, closed(epoch))

    async def run() -> None:
        for epoch in range(1, last + 1, 7):
            assert await board.wait("i", 0, epoch, 5.0)

    thread = threading.Thread(target=close_all)
    thread.start()
    asyncio.run(run())
    thread.join()
    assert not board._waiters


def test_a_poll_is_answered_by_a_change_and_by_a_restart() -> None:
    board = EpochBoard()

    async def run() -> None:
        first = await board.poll(0, "", 5.0)
        assert first.epochs == {}
        assert await board.poll(first.version, first.nonce, 0.01) == first
        asyncio.get_running_loop().call_later(0.02, board.tell, "i", 0, closed(3))
        asyncio.get_running_loop().call_later(0.021, board.tell, "i", 1, closed(3))
        began_s = time.monotonic()
        second = await board.poll(first.version, first.nonce, 5.0)
        assert time.monotonic() - began_s < 1.0
        assert second.epochs == {"i": {"0": closed(3), "1": closed(3)}}
        assert await board.poll(second.version, "of an earlier process", 5.0) == second

    asyncio.run(run())


def test_nobody_waits_for_a_partition_that_is_not_served_any_more() -> None:
    board = EpochBoard()
    board.tell("i", 0, closed(3))

    async def run() -> None:
        asyncio.get_running_loop().call_later(0.02, board.tell, "i", 0, None)
        began_s = time.monotonic()
        assert not await board.wait("i", 0, 4, 30.0)
        assert time.monotonic() - began_s < 5.0

    asyncio.run(run())


def test_what_is_told_twice_is_no_news_and_what_is_gone_is_news() -> None:
    board = EpochBoard()
    board.tell("i", 0, closed(3))
    version = board._version
    board.tell("i", 0, closed(3))
    board.tell("i", 1, None)
    assert board._version == version
    board.tell("i", 0, None)
    assert board._version == version + 1
    assert board.states("i") == {}
