# SPDX-License-Identifier: Apache-2.0
"""The metadata store in memory: for tests and the simulated world. Same contract as on disk, lost with the process."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from cremant.store.metadata import (
    HISTORY_MAX,
    Change,
    Changes,
    Entry,
    Expect,
    HistoryLost,
    Put,
    StoreConflict,
    Update,
    check_commit,
)


class MemoryMetadataStore:
    def __init__(self, *, history_max: int = HISTORY_MAX) -> None:
        self._entries: dict[str, Entry] = {}
        self._history: deque[tuple[int, str]] = deque(maxlen=history_max)
        self._forgotten = 0
        self._revision = 0
        self._changed = threading.Condition()

    @property
    def revision(self) -> int:
        return self._revision

    def get(self, key: str) -> Entry | None:
        with self._changed:
            return self._entries.get(key)

    def list(self, prefix: str) -> list[Entry]:
        with self._changed:
            return [self._entries[key] for key in sorted(self._entries) if key.startswith(prefix)]

    def commit(self, requirements: Sequence[Expect], updates: Sequence[Update]) -> int:
        check_commit(requirements, updates)
        with self._changed:
            for key, expected in requirements:
                entry = self._entries.get(key)
                if (found := entry.version if entry else None) != expected:
                    raise StoreConflict(key, expected, found)
            self._revision += 1
            for update in updates:
                if isinstance(update, Put):
                    self._entries[update.key] = Entry(update.key, update.value, self._revision)
                else:
                    self._entries.pop(update.key, None)
                if len(self._history) == self._history.maxlen:
                    self._forgotten = self._history[0][0]
                self._history.append((self._revision, update.key))
            self._changed.notify_all()
            return self._revision

    def watch(self, prefix: str, since: int, timeout_s: float) -> Changes:
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if since < self._forgotten:
                    raise HistoryLost(f"changes since revision {since} are forgotten", hint="list again")
                newest = {
                    key: revision for revision, key in self._history if revision > since and key.startswith(prefix)
                }
                remaining_s = deadline_s - time.monotonic()
                if newest or remaining_s <= 0:
                    changes = (Change(revision, key, self._entries.get(key)) for key, revision in newest.items())
                    return Changes(self._revision, tuple(sorted(changes, key=lambda change: change[:2])))
                self._changed.wait(remaining_s)

    def close(self) -> None:
        pass
