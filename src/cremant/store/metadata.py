# SPDX-License-Identifier: Apache-2.0
"""The metadata store: small records under keys, changed by compare-and-set over several keys at once.

Rules, the same for every implementation (tests/contract/store):
- a commit is (requirements, updates): all requirements hold and all updates happen, or nothing does (StoreConflict);
- every commit gets the next *revision*; the *version* of an entry is the revision that wrote it, so a key deleted and
  written again never repeats a version;
- a commit that returned has happened, also after kill -9 of the process; one that raised StoreConflict has not;
- a watch sees every change once it is committed, in order, or says that its history is gone (HistoryLost: list again).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from cremant.model.errors import Conflict, InvariantViolation, PeerError

#: Changes a store remembers for watchers; past that they list again. 100 k rows of ~100 bytes are 10 MB.
HISTORY_MAX = 100_000
#: Updates of one commit: dropping a table removes all its records at once, 1,024 partitions of 100 segments.
UPDATES_MAX = 128 * 1024


class Entry(NamedTuple):
    key: str
    value: bytes
    version: int


class Expect(NamedTuple):
    """Requirement: `key` is at `version`; None = the key is absent."""

    key: str
    version: int | None


class Put(NamedTuple):
    key: str
    value: bytes


class Delete(NamedTuple):
    """The key is gone afterwards; deleting an absent key is no error."""

    key: str


Update = Put | Delete


class Change(NamedTuple):
    """What a key became at `revision`: its entry, or None when it was deleted."""

    revision: int
    key: str
    entry: Entry | None


class Changes(NamedTuple):
    """Changes after the revision asked for, oldest first; ask again from `revision`."""

    revision: int
    changes: tuple[Change, ...]


def _spoken(version: int | None) -> str:
    return "absent" if version is None else f"version {version}"


class StoreConflict(Conflict):
    """A requirement did not hold: expected and found version of the first such key."""

    def __init__(self, key: str, expected: int | None, found: int | None) -> None:
        super().__init__(f"{key}: expected {_spoken(expected)}, found {_spoken(found)}")
        self.key = key
        self.expected = expected
        self.found = found


class HistoryLost(PeerError):
    """The store no longer knows the changes since that revision: list, then watch from the listed revision."""


class MetadataStore(Protocol):
    """Thread-safe."""

    @property
    def revision(self) -> int:
        """Revision of the last commit; 0 when nothing was ever written."""

    def get(self, key: str) -> Entry | None: ...

    def list(self, prefix: str) -> list[Entry]:
        """Entries whose key begins with `prefix`, by key. One consistent state."""

    def commit(self, requirements: Sequence[Expect], updates: Sequence[Update]) -> int:
        """Returns the new revision = the version of every entry put. Raises StoreConflict; NoResource (disk full)."""

    def watch(self, prefix: str, since: int, timeout_s: float) -> Changes:
        """Waits until something under `prefix` changed after revision `since`, or the timeout (no changes). Changes of
        one key may be merged into the newest. Raises HistoryLost."""

    def close(self) -> None: ...


def check_commit(requirements: Sequence[Expect], updates: Sequence[Update]) -> None:
    """What every implementation refuses: it would not be clear what is meant."""
    keys = [update.key for update in updates]
    if len(set(keys)) != len(keys):
        raise InvariantViolation("M-1", "a commit writes a key twice")
    if len({requirement.key for requirement in requirements}) != len(requirements):
        raise InvariantViolation("M-1", "a commit requires a key twice")
    if len(updates) > UPDATES_MAX:
        raise InvariantViolation("M-2", f"a commit has {len(updates)} updates, at most {UPDATES_MAX} are allowed")
