# SPDX-License-Identifier: Apache-2.0
"""Waiting for messages past given positions, woken by the brokers, not by asking again and again.

Where a reader stands at the position, its own buffer tells. Other partitions are *watched*: a second consumer, made
when first needed, fetches from the end on and only notes how far messages go, so that who merely wants to know does
not transfer a stream. Watching begins with one question for the ends. Brokers that are away are no news: then the time
passes, and what is wrong is told by the next read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from cremant.log.kafka_admin import Where
from cremant.log.kafka_fetch import Fetcher, Slot
from cremant.log.kafka_topics import Topics
from cremant.model.errors import PeerError

logger = logging.getLogger(__name__)

_PAUSE_S = 0.05

#: A slot, and the position that something is waited for at.
Placed = tuple[Slot, int]


class Waiter:
    """One `wait`. `ends` asks for the present ends of partitions, `watcher` is the watching consumer."""

    def __init__(
        self,
        reading: Fetcher | None,
        watcher: Callable[[], Fetcher],
        topics: Topics,
        ends: Callable[[list[Where]], dict[Where, int]],
    ) -> None:
        self._reading = reading
        self._watcher = watcher
        self._topics = topics
        self._ends = ends

    def wait(self, positions: Mapping[Where, int], timeout_s: float) -> bool:
        """Raises NotFound."""
        self._topics.require(positions)
        until_s = time.monotonic() + timeout_s
        read, others = self._readers(positions)
        watched: list[Placed] = []
        if others:
            with self._watcher() as watcher:
                watched = [(watcher.slot(where), position) for where, position in others]
        try:
            while True:
                news = self._look(read, watched, until_s - time.monotonic())
                if news or time.monotonic() >= until_s:
                    return news
                for where in positions:
                    self._topics.glance(where[0])
        finally:
            for slot, _ in watched:
                self._watcher().drop(slot)

    def _readers(self, positions: Mapping[Where, int]) -> tuple[list[Placed], list[tuple[Where, int]]]:
        """Slots whose reader stands at the position, and the other partitions."""
        found: list[Placed] = []
        others: list[tuple[Where, int]] = []
        for where, position in positions.items():
            slot = self._reading.find(where) if self._reading is not None else None
            if slot is not None and slot.readers and slot.position == position:
                found.append((slot, position))
            else:
                others.append((where, position))
        return found, others

    def _look(self, read: list[Placed], watched: list[Placed], left_s: float) -> bool:
        """Whether there is something, after a little while at most."""
        return bool((read and self._look_read(read, left_s)) or (watched and self._look_watched(watched, left_s)))

    def _look_read(self, read: list[Placed], left_s: float) -> bool:
        assert self._reading is not None
        with self._reading as fetcher:
            if any(_is_news(slot, position) for slot, position in read):
                return True
            for slot, position in read:
                fetcher.place(slot, position)
            fetcher.poll(left_s)
            return any(_is_news(slot, position) for slot, position in read)

    def _look_watched(self, watched: list[Placed], left_s: float) -> bool:
        with self._watcher() as watcher:
            doubtful = [(slot, position) for slot, position in watched if not _is_watched(slot, position)]
            if not doubtful:
                if all(slot.seen <= position for slot, position in watched):
                    watcher.poll(left_s)
                return any(slot.seen > position for slot, position in watched)
        try:
            ends = self._ends([slot.where for slot, _ in doubtful])
        except PeerError as error:
            logger.info("waiting for messages: %s", error)
            time.sleep(max(0.0, min(_PAUSE_S, left_s)))
            return False
        if any(ends[slot.where] > position for slot, position in doubtful):
            return True
        with self._watcher() as watcher:
            troubled = any(slot.error is not None for slot, _ in doubtful)
            for slot, position in doubtful:
                watcher.watch(slot, min(position, ends[slot.where]))
        if troubled:
            time.sleep(max(0.0, min(_PAUSE_S, left_s)))
        return False


def _is_news(slot: Slot, position: int) -> bool:
    """An error is news for the reader, who can say what it is; so is that somebody moved it, or that it is closed."""
    return bool(slot.chunks) or slot.error is not None or slot.position != position or slot.readers <= 0


def _is_watched(slot: Slot, position: int) -> bool:
    """Caught up, it may go as far again."""
    if not slot.assigned or slot.error is not None or position < slot.start:
        return False
    slot.used_s = time.monotonic()
    if slot.seen <= position:
        slot.start = position
    return True
