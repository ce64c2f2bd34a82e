# SPDX-License-Identifier: Apache-2.0
"""A bounded map that forgets what was used least recently."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class Recent(Generic[V]):
    """Thread-safe: dict operations are atomic, and a lost update costs what the value cost."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: OrderedDict[Hashable, V] = OrderedDict()

    def get(self, key: Hashable) -> V | None:
        found = self._items.get(key)
        if found is not None:
            self._used(key)
        return found

    def put(self, key: Hashable, value: V) -> None:
        self._items[key] = value
        self._used(key)
        while len(self._items) > self._limit:
            try:
                self._items.popitem(last=False)
            except KeyError:
                return

    def _used(self, key: Hashable) -> None:
        with contextlib.suppress(KeyError):  # another thread has just made room
            self._items.move_to_end(key)
