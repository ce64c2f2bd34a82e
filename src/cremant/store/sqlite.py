# SPDX-License-Identifier: Apache-2.0
"""The metadata store in one SQLite file.

Journal mode WAL with synchronous=FULL: a commit that returned survives kill -9 *and* a power cut. That matters more
here than anywhere: a generation or commit token that is handed out twice would break every fence built on it. Its price
is one fsync per commit, and commits are rare (cuts, leases that change hands, REST changes; never a heartbeat).
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cremant.model.errors import Corrupt, CremantError, NoResource, Unavailable, WorldError
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

#: Version of the tables below, kept in `PRAGMA user_version`.
FORMAT = 1

_TABLES = """
CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value BLOB NOT NULL, version INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS history (
  revision INTEGER NOT NULL, key TEXT NOT NULL, PRIMARY KEY (revision, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT OR IGNORE INTO state VALUES ('revision', 0), ('forgotten', 0);
"""
#: How often a watch looks for commits of other processes; commits of this one wake it at once.
_WATCH_POLL_S = 0.05
_BUSY_TIMEOUT_S = 5.0
#: SQLite's names of errors, by their beginnings: another process holds the file; there is no room (disk full, quota,
#: read-only, write failed); its bytes, or the tables in it (our statements are constant), are not ours.
_LOCKED = ("SQLITE_BUSY", "SQLITE_LOCKED")
_UNWRITABLE = ("SQLITE_FULL", "SQLITE_READONLY", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_FSYNC", "SQLITE_CANTOPEN")
_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR")


class SqliteMetadataStore:
    """Thread-safe; several processes may open the same file. Everything raises Unavailable where another process keeps
    it locked (try again), NoResource where it cannot be written, Corrupt where the file is not such a store."""

    def __init__(self, path: str | Path, *, history_max: int = HISTORY_MAX) -> None:
        self._path = Path(path)
        self._history_max = history_max
        self._changed = threading.Condition()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Configs may hold secrets: for this user only. SQLite gives the files beside it the same rights.
            self._path.touch(mode=0o600)
            self._db = sqlite3.connect(
                self._path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._create()
        except OSError as error:
            raise NoResource(f"metadata store {self._path} cannot be opened: {error.strerror or error}") from error
        except sqlite3.Error as error:
            raise self._said(error) from error

    def _said(self, error: sqlite3.Error) -> CremantError:
        """SQLite's error in our words."""
        name = getattr(error, "sqlite_errorname", "")  # Python's own have none
        where = f"metadata store {self._path}"
        if name.startswith(_LOCKED):
            return Unavailable(
                f"{where} is locked by another process ({error}); nothing was changed",
                hint="try again; only the controller has it open, so end what else reads or copies it",
            )
        if name.startswith(_UNWRITABLE):
            return NoResource(
                f"{where} cannot be written: {error}; nothing was changed",
                hint="free some space, then try again; does this user own it?",
            )
        if name.startswith(_DAMAGED):
            return Corrupt(
                f"{self._path} is not a metadata store, or a damaged one: {error}",
                hint="restore it from a copy, or point data_dir elsewhere",
            )
        return WorldError(f"{where}: {error}")

    def _create(self) -> None:
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, FORMAT):
            raise Corrupt(f"{self._path} has format {found}, this version reads {FORMAT}", hint="use a newer Cremant")
        if found == 0 and self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise Corrupt(
                f"{self._path} is a database of another program, not a metadata store", hint="point data_dir elsewhere"
            )
        self._db.execute("BEGIN IMMEDIATE")
        for statement in _TABLES.strip().split(";\n"):
            self._db.execute(statement)
        self._db.execute(f"PRAGMA user_version={FORMAT}")
        self._db.execute("COMMIT")

    @property
    def revision(self) -> int:
        with self._changed, self._reading():
            return self._state("revision")

    def _state(self, name: str) -> int:
        return int(self._db.execute("SELECT value FROM state WHERE name = ?", (name,)).fetchone()[0])

    def get(self, key: str) -> Entry | None:
        with self._changed, self._reading():
            row = self._db.execute("SELECT key, value, version FROM entries WHERE key = ?", (key,)).fetchone()
        return Entry(*row) if row else None

    def list(self, prefix: str) -> list[Entry]:
        with self._changed, self._reading():
            rows = self._db.execute(
                "SELECT key, value, version FROM entries WHERE key >= ? AND substr(key, 1, ?) = ? ORDER BY key",
                (prefix, len(prefix), prefix),
            ).fetchall()
        return [Entry(*row) for row in rows]

    def commit(self, requirements: Sequence[Expect], updates: Sequence[Update]) -> int:
        check_commit(requirements, updates)
        with self._changed, self._transaction():
            for key, expected in requirements:
                row = self._db.execute("SELECT version FROM entries WHERE key = ?", (key,)).fetchone()
                if (found := row[0] if row else None) != expected:
                    raise StoreConflict(key, expected, found)
            revision = self._state("revision") + 1
            for update in updates:
                if isinstance(update, Put):
                    self._db.execute(
                        "INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", (update.key, update.value, revision)
                    )
                else:
                    self._db.execute("DELETE FROM entries WHERE key = ?", (update.key,))
                self._db.execute("INSERT INTO history VALUES (?, ?)", (revision, update.key))
            self._db.execute("UPDATE state SET value = ? WHERE name = 'revision'", (revision,))
            self._forget()
            self._changed.notify_all()
        return revision

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._said(error) from error

    def _forget(self) -> None:
        """Drops the oldest half of the history once it is twice its bound: amortised, one range delete."""
        count = self._db.execute("SELECT count(*) FROM history").fetchone()[0] if self._due_to_forget() else 0
        if count <= 2 * self._history_max:
            return
        row = self._db.execute(
            "SELECT revision FROM history ORDER BY revision DESC LIMIT 1 OFFSET ?", (self._history_max,)
        ).fetchone()
        self._db.execute("DELETE FROM history WHERE revision <= ?", (row[0],))
        self._db.execute("UPDATE state SET value = ? WHERE name = 'forgotten'", (row[0],))

    def _due_to_forget(self) -> bool:
        """Counting is O(history): only every now and then."""
        every = max(1, self._history_max // 100)
        return self._state("revision") % every == 0

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise self._said(error) from error

    def watch(self, prefix: str, since: int, timeout_s: float) -> Changes:
        deadline_s = time.monotonic() + timeout_s
        with self._changed, self._reading():
            while True:
                found = self._changes(prefix, since)
                remaining_s = deadline_s - time.monotonic()
                if found.changes or remaining_s <= 0:
                    return found
                self._changed.wait(min(remaining_s, _WATCH_POLL_S))

    def _changes(self, prefix: str, since: int) -> Changes:
        self._db.execute("BEGIN")  # one consistent state for the three reads
        try:
            if since < self._state("forgotten"):
                raise HistoryLost(f"changes since revision {since} are forgotten", hint="list again")
            rows = self._db.execute(
                "SELECT max(h.revision), h.key, e.value, e.version FROM history h LEFT JOIN entries e ON e.key = h.key "
                "WHERE h.revision > ? AND substr(h.key, 1, ?) = ? GROUP BY h.key ORDER BY 1, 2",
                (since, len(prefix), prefix),
            ).fetchall()
            revision = self._state("revision")
        finally:
            self._db.execute("COMMIT")
        changes = (
            Change(at, key, None if version is None else Entry(key, value, version)) for at, key, value, version in rows
        )
        return Changes(revision, tuple(changes))

    def close(self) -> None:
        with self._changed:
            self._db.close()
