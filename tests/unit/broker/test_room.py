# SPDX-License-Identifier: Apache-2.0
"""Bounds of a broker, and read tokens that are handed back."""

from __future__ import annotations

import asyncio
import base64
import time

import msgspec
import pytest
from small_tables import opened, table

from cremant.broker.room import Admission, Room
from cremant.broker.tokens import floors_of, read_token
from cremant.model.errors import QueryError
from cremant.model.offsets import OffsetRange, Watermark
from cremant.model.query_codes import QueryCode
from cremant.wire.messages import PartitionAnswer


def in_s(seconds: float) -> float:
    return time.monotonic() + seconds


def test_turns_are_given_in_order_of_arrival_up_to_the_bound() -> None:
    async def run() -> list[int]:
        admission = Admission(1, 10)
        order: list[int] = []

        async def query(number: int) -> None:
            async with admission.turn(in_s(10)):
                order.append(number)
                await asyncio.sleep(0.001)

        await asyncio.gather(*(query(number) for number in range(5)))
        return order

    assert asyncio.run(run()) == [0, 1, 2, 3, 4]


def test_too_many_are_refused_and_who_waits_too_long_is_told() -> None:
    async def run() -> list[int]:
        admission = Admission(1, 1)
        codes: list[int] = []

        async def query() -> None:
            try:
                async with admission.turn(in_s(0.05)):
                    await asyncio.sleep(0.2)
            except QueryError as error:
                codes.append(error.code)

        await asyncio.gather(*(query() for _ in range(3)))
        async with admission.turn(in_s(1)) as waited_s:  # everything was given back
            assert waited_s == 0.0
        return codes

    assert asyncio.run(run()) == [QueryCode.TOO_MANY_REQUESTS, QueryCode.BROKER_TIMEOUT]


def test_bytes_are_bounded_per_answer_per_query_and_in_all() -> None:
    whole = Room(100)
    first, second = Room(80, whole, each_bytes=60), Room(80, whole)
    with pytest.raises(QueryError, match="at most 60 are read from one server"):
        first.take(61)
    first.take(50)
    with pytest.raises(QueryError, match="a query may hold 80"):
        first.take(31)
    with pytest.raises(QueryError, match="all queries of a broker may hold 100"):
        second.take(51)
    assert second.held_bytes == 0
    first.give_back()
    second.take(80)
    second.give_back()
    assert whole.held_bytes == 0


def tail(partition: int, until: int) -> PartitionAnswer:
    return PartitionAnswer(
        partition=partition, covered=OffsetRange(0, until), watermark=Watermark(next_offset=until, epoch=3)
    )


def encoded(content: object) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(content)).decode()


def test_a_token_that_comes_back_names_the_rows_of_its_answer() -> None:
    of = table((opened(0, 0, 0), opened(1, 0, 0)))
    token = read_token(of.record, 3, [tail(1, 7), tail(0, 5)])
    assert floors_of(token, of) == {0: 5, 1: 7}
    assert floors_of(token + "==", of) == {0: 5, 1: 7}


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ("", "is no token"),
        ("é", "is no token"),
        ("%%%", "is no token"),
        ("bm9uc2Vuc2U", "is no token"),
        (encoded([1]), "is no token"),
        (encoded({"t": "t", "i": "1", "e": 1, "o": {"0": "x"}}), "is no token"),
        ("A" * 100_000, "no token"),
        (encoded({"t": "other", "i": "1", "e": 1, "o": {}}), "of table other"),
        (encoded({"t": "t", "i": "0", "e": 1, "o": {}}), "was dropped"),
        (encoded({"t": "t", "i": "1", "e": 1, "o": {"9": 1}}), "partition 9"),
        (encoded({"t": "t", "i": "1", "e": 1, "o": {"x": 1}}), "partition x"),
        (encoded({"t": "t", "i": "1", "e": 1, "o": {"9" * 5_000: 1}}), "partition 9"),
        (encoded({"t": "t", "i": "1", "e": 1, "o": {"0": -1}}), "an offset of partition 0"),
        (encoded({"t": "t", "i": "1", "e": 1, "o": {"0": 2**63}}), "an offset of partition 0"),
        (base64.urlsafe_b64encode(b'{"x":' + b"[" * 40_000).decode(), "is no token"),
    ],
)
def test_what_is_no_token_of_this_table_is_refused(token: str, said: str) -> None:
    with pytest.raises(QueryError, match=said) as caught:
        floors_of(token, table((opened(0, 0, 0),)))
    assert caught.value.code == QueryCode.QUERY_VALIDATION
