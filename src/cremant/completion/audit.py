# SPDX-License-Identifier: Apache-2.0
"""Which stored objects to look at next: somebody may have deleted one by hand, or a disk have lost it. Pure.

Rules: an object is looked at soon after it was recorded, then once a day, whatever there is; those that are longest due
come first. One that was not answered for is due again at once. What is gone counts as an upload that failed, so that it
is made up for as one of those. Nothing is scanned: records come as they change.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import msgspec

from cremant.model.limits import STORE_LOOK_EVERY_MS, STORE_LOOK_FIRST_MS
from cremant.model.segments import SegmentMetadata, StoreState


class Stored(NamedTuple):
    table: str
    segment: str
    url: str


def without_object(segment: SegmentMetadata, url: str, error: str, now_ms: int) -> SegmentMetadata | None:
    """The record as it is to be, now that the store has this object no more: as after an upload that failed. None when
    the record names another one meanwhile."""
    if segment.store_url != url:
        return None
    return msgspec.structs.replace(
        segment, store_state=StoreState.FAILED, store_url=None, store_error=error, store_changed_ms=now_ms
    )


class Audit:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._due_ms: dict[Stored, int] = {}
        self._urls: dict[tuple[str, str], str] = {}
        #: Entries that `_due_ms` does not agree with are old.
        self._heap: list[tuple[int, Stored]] = []

    def put(self, table: str, segment: str, url: str | None, now_ms: int) -> None:
        """A record was written; `url`: its object, None = it has none, or is gone."""
        before = self._urls.get((table, segment))
        if before == url:
            return
        if before is not None:
            del self._urls[table, segment], self._due_ms[Stored(table, segment, before)]
        if url is not None:
            self._urls[table, segment] = url
            self._plan(Stored(table, segment, url), now_ms + STORE_LOOK_FIRST_MS)

    def hurry(self, table: str, segment: str, now_ms: int) -> None:
        """Somebody wants to know now."""
        url = self._urls.get((table, segment))
        if url is not None and self._due_ms[stored := Stored(table, segment, url)] > now_ms:
            self._plan(stored, now_ms)

    def take(self, most: int, now_ms: int) -> list[Stored]:
        """The objects to look at. Each ends in `looked`."""
        taken: list[Stored] = []
        while self._heap and len(taken) < most and self._heap[0][0] <= now_ms:
            due_ms, stored = heapq.heappop(self._heap)
            if self._due_ms.get(stored) == due_ms:
                taken.append(stored)
        return taken

    def looked(self, stored: Stored, now_ms: int, *, answered: bool) -> None:
        if stored in self._due_ms:
            self._plan(stored, now_ms + STORE_LOOK_EVERY_MS if answered else now_ms)

    def _plan(self, stored: Stored, due_ms: int) -> None:
        self._due_ms[stored] = due_ms
        heapq.heappush(self._heap, (due_ms, stored))
