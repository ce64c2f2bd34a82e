# SPDX-License-Identifier: Apache-2.0
"""The slots of a Fetcher whose brokers are away: who leaves, who waits, who comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from cremant.log.kafka_config import connection, consumer_config
from cremant.log.kafka_errors import Faults
from cremant.log.kafka_fetch import Fetcher, Where
from cremant.log.kafka_wait import Waiter

WHERE = ("t", 0)
NOBODY = "127.0.0.1:1"
PATIENCE_S = 30.0


@pytest.fixture
def fetcher() -> Iterator[Fetcher]:
    fetcher = Fetcher(consumer_config(connection(NOBODY, {})), NOBODY, Faults(), keep=True)
    yield fetcher
    fetcher.stop()


def _wait_until_gone(fetcher: Fetcher) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while fetcher.find(WHERE) is not None and time.monotonic() < until_s:
        time.sleep(0.02)
    assert fetcher.find(WHERE) is None


def test_a_slot_that_was_never_fetched_is_removed_after_its_reader(fetcher: Fetcher) -> None:
    with fetcher:
        slot = fetcher.slot(WHERE)
    fetcher.drop(slot)
    _wait_until_gone(fetcher)


def test_who_waits_with_the_slot_of_a_closed_reader_does_not_keep_the_next_one_out(fetcher: Fetcher) -> None:
    """reader closes -> its slot is removed -> a wait under way places it again -> a new reader of the partition."""
    with fetcher:
        closed = fetcher.slot(WHERE)
        fetcher.place(closed, 0)
    fetcher.drop(closed)
    _wait_until_gone(fetcher)
    with fetcher:
        fetcher.place(closed, 0)
        assert not closed.assigned
        fresh = fetcher.slot(WHERE)
        fetcher.place(fresh, 0)
        assert fresh.assigned


class _AnyTopic:
    """What a wait asks about topics, where all are known and stay."""

    def require(self, positions: Iterable[Where]) -> None: ...

    def glance(self, topic: str, incarnation: str | None = None) -> None: ...


def _no_ends(where: list[Where]) -> dict[Where, int]:
    raise AssertionError(f"asked for the ends of {where}")


def test_a_wait_ends_when_the_reader_it_looks_at_is_closed(fetcher: Fetcher) -> None:
    with fetcher:
        slot = fetcher.slot(WHERE)
        fetcher.place(slot, 0)
    timer = threading.Timer(0.1, fetcher.drop, (slot,))
    timer.start()
    topics: Any = _AnyTopic()
    assert Waiter(fetcher, lambda: fetcher, topics, _no_ends).wait({WHERE: 0}, PATIENCE_S)
    timer.join()
