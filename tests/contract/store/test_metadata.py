# SPDX-License-Identifier: Apache-2.0
"""The contract of metadata stores, for every implementation."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cremant.model.errors import Corrupt, InvariantViolation, Unavailable
from cremant.store.lease import lead
from cremant.store.memory import MemoryMetadataStore
from cremant.store.metadata import Delete, Expect, HistoryLost, MetadataStore, Put, StoreConflict, Update
from cremant.store.sqlite import SqliteMetadataStore

Maker = Callable[..., MetadataStore]


@pytest.fixture(params=["memory", "sqlite"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Maker]:
    made: list[MetadataStore] = []

    def maker(**options: Any) -> MetadataStore:
        memory = request.param == "memory"
        store = MemoryMetadataStore(**options) if memory else SqliteMetadataStore(tmp_path / "m.db", **options)
        made.append(store)
        return store

    yield maker
    for store in made:
        store.close()


@pytest.fixture
def store(make: Maker) -> MetadataStore:
    return make()


def test_a_fresh_store_is_empty(store: MetadataStore) -> None:
    assert store.revision == 0
    assert store.get("/a") is None
    assert store.list("/") == []


def test_the_version_of_an_entry_is_the_revision_that_wrote_it(store: MetadataStore) -> None:
    assert store.commit([Expect("/a", None)], [Put("/a", b"1"), Put("/b", b"2")]) == 1
    assert store.commit([Expect("/a", 1)], [Put("/a", b"3")]) == 2
    assert [(e.key, e.value, e.version) for e in store.list("/")] == [("/a", b"3", 2), ("/b", b"2", 1)]


def test_a_commit_whose_requirement_fails_changes_nothing(store: MetadataStore) -> None:
    store.commit([], [Put("/a", b"1")])
    with pytest.raises(StoreConflict, match=r"/a: expected absent, found version 1"):
        store.commit([Expect("/b", None), Expect("/a", None)], [Put("/b", b"2"), Delete("/a")])
    assert store.revision == 1
    assert store.get("/b") is None
    assert store.get("/a") is not None


def test_a_key_deleted_and_written_again_has_a_new_version(store: MetadataStore) -> None:
    first = store.commit([], [Put("/a", b"1")])
    store.commit([Expect("/a", first)], [Delete("/a")])
    store.commit([Expect("/a", None)], [Put("/a", b"1")])
    with pytest.raises(StoreConflict, match=r"expected version 1, found version 3"):
        store.commit([Expect("/a", first)], [Put("/a", b"2")])


def test_deleting_an_absent_key_is_no_error(store: MetadataStore) -> None:
    assert store.commit([], [Delete("/a")]) == 1


def test_a_commit_may_not_write_or_require_a_key_twice(store: MetadataStore) -> None:
    with pytest.raises(InvariantViolation):
        store.commit([], [Put("/a", b"1"), Delete("/a")])
    with pytest.raises(InvariantViolation):
        store.commit([Expect("/a", None), Expect("/a", 1)], [])


def test_list_is_by_prefix_and_knows_no_wildcards(store: MetadataStore) -> None:
    store.commit([], [Put(key, b"") for key in ("/t/a", "/t/a_b", "/t/axb", "/t/a%", "/u/a", "/t")])
    assert [e.key for e in store.list("/t/a")] == ["/t/a", "/t/a%", "/t/a_b", "/t/axb"]
    assert [e.key for e in store.list("/t/a_")] == ["/t/a_b"]
    assert len(store.list("/")) == 6


def test_values_are_bytes_as_they_are(store: MetadataStore) -> None:
    value = bytes(range(256)) * 300
    store.commit([], [Put("/ä/€", value)])
    assert store.list("/ä")[0].value == value


def test_a_watch_sees_puts_and_deletes_of_its_prefix_in_order(store: MetadataStore) -> None:
    store.commit([], [Put("/t/a", b"1"), Put("/u", b"x")])
    store.commit([], [Put("/t/b", b"2")])
    store.commit([], [Delete("/t/a")])
    seen = store.watch("/t/", 0, 0)
    assert seen.revision == 3
    assert [(c.revision, c.key, c.entry and c.entry.value) for c in seen.changes] == [
        (2, "/t/b", b"2"),
        (3, "/t/a", None),
    ]
    assert store.watch("/t/", seen.revision, 0).changes == ()


def test_a_watch_wakes_when_something_is_committed(store: MetadataStore) -> None:
    timer = threading.Timer(0.1, lambda: store.commit([], [Put("/t/a", b"1")]))
    timer.start()
    began = time.monotonic()
    seen = store.watch("/t/", 0, 10)
    assert [c.key for c in seen.changes] == ["/t/a"]
    assert time.monotonic() - began < 5
    timer.join()


def test_a_watch_without_changes_ends_at_its_timeout(store: MetadataStore) -> None:
    store.commit([], [Put("/u", b"1")])
    assert store.watch("/t/", 0, 0.05) == (1, ())


def test_a_watch_from_before_the_history_says_so(make: Maker) -> None:
    store = make(history_max=10)
    for number in range(100):
        store.commit([], [Put(f"/t/{number}", b"")])
    with pytest.raises(HistoryLost):
        store.watch("/t/", 0, 0)
    assert [c.key for c in store.watch("/t/", 99, 0).changes] == ["/t/99"]


def test_of_many_writers_on_one_version_exactly_one_wins(store: MetadataStore) -> None:
    store.commit([], [Put("/a", b"0")])
    wins, start = [], threading.Barrier(4)

    def race(name: int) -> None:
        start.wait()
        for _ in range(50):
            entry = store.get("/a")
            assert entry is not None
            try:
                store.commit([Expect("/a", entry.version)], [Put("/a", str(int(entry.value) + 1).encode())])
                wins.append(name)
            except StoreConflict:
                pass

    threads = [threading.Thread(target=race, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entry = store.get("/a")
    assert entry is not None
    assert int(entry.value) == len(wins)
    assert store.revision == len(wins) + 1


# --- leader lease -------------------------------------------------------------------------------------------------


def test_only_one_holder_leads_until_its_lease_lapses(store: MetadataStore) -> None:
    first = lead(store, "controller", "a", now_ms=0, lease_ms=100)
    assert first is not None
    assert lead(store, "controller", "b", now_ms=99, lease_ms=100) is None
    second = lead(store, "controller", "b", now_ms=100, lease_ms=100)
    assert second is not None
    assert (first.term, second.term) == (1, 2)


def test_a_renewal_keeps_the_term_and_its_fence(store: MetadataStore) -> None:
    first = lead(store, "controller", "a", now_ms=0, lease_ms=100)
    again = lead(store, "controller", "a", now_ms=50, lease_ms=100)
    assert first is not None
    assert again is not None
    assert (again.term, again.fence) == (first.term, first.fence)
    assert again.until_ms == 150


def test_a_deposed_leaders_commits_fail_as_a_whole(store: MetadataStore) -> None:
    old = lead(store, "controller", "a", now_ms=0, lease_ms=100)
    assert old is not None
    store.commit([old.fence], [Put("/x", b"1")])
    assert lead(store, "controller", "b", now_ms=0, lease_ms=100, take_over=True) is not None
    with pytest.raises(StoreConflict):
        store.commit([old.fence], [Put("/x", b"2")])
    entry = store.get("/x")
    assert entry is not None
    assert entry.value == b"1"


# --- against a model ----------------------------------------------------------------------------------------------

_keys = st.sampled_from(["/a", "/a/b", "/a/c", "/b", "/c/d"])
_updates = st.lists(
    st.one_of(st.builds(Put, _keys, st.binary(max_size=8)), st.builds(Delete, _keys)),
    max_size=4,
    unique_by=lambda u: u.key,
)
_guesses = st.dictionaries(_keys, st.one_of(st.none(), st.integers(1, 6), st.just("right")), max_size=3)


def _play(store: MetadataStore, steps: list[tuple[dict[str, Any], list[Update]]]) -> None:
    model: dict[str, tuple[bytes, int]] = {}
    revision = 0
    for guesses, updates in steps:
        versions = {key: model[key][1] if key in model else None for key in guesses}
        expects = {key: versions[key] if guess == "right" else guess for key, guess in guesses.items()}
        holds = all(versions[key] == expected for key, expected in expects.items())
        before = revision
        try:
            revision = store.commit([Expect(key, version) for key, version in expects.items()], updates)
            assert holds
            assert revision == before + 1
            for update in updates:
                if isinstance(update, Put):
                    model[update.key] = (update.value, revision)
                else:
                    model.pop(update.key, None)
        except StoreConflict:
            assert not holds
        assert store.revision == revision
        assert {e.key: (e.value, e.version) for e in store.list("/")} == model
        changed = {c.key for c in store.watch("/", before, 0).changes}
        assert changed == ({u.key for u in updates} if holds else set())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(_guesses, _updates), max_size=12))
def test_memory_behaves_like_a_dictionary_with_versions(steps: list[tuple[dict[str, Any], list[Update]]]) -> None:
    _play(MemoryMetadataStore(), steps)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(_guesses, _updates), max_size=8))
def test_sqlite_behaves_like_a_dictionary_with_versions(steps: list[tuple[dict[str, Any], list[Update]]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = SqliteMetadataStore(Path(directory) / "m.db")
        _play(store, steps)
        store.close()


# --- what only a file has -----------------------------------------------------------------------------------------


def test_a_store_opened_again_has_everything(tmp_path: Path) -> None:
    store = SqliteMetadataStore(tmp_path / "m.db")
    store.commit([], [Put("/a", b"1")])
    store.close()
    again = SqliteMetadataStore(tmp_path / "m.db")
    assert again.revision == 1
    assert [c.key for c in again.watch("/", 0, 0).changes] == ["/a"]
    again.close()


def test_a_watch_sees_commits_of_another_process(tmp_path: Path) -> None:
    ours, theirs = SqliteMetadataStore(tmp_path / "m.db"), SqliteMetadataStore(tmp_path / "m.db")
    timer = threading.Timer(0.05, lambda: theirs.commit([], [Put("/a", b"1")]))
    timer.start()
    assert [c.key for c in ours.watch("/", 0, 10).changes] == ["/a"]
    timer.join()
    ours.close()
    theirs.close()


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.db").write_bytes(b"this is not a database, not at all" * 100)
    with pytest.raises(Corrupt, match=r"m\.db"):
        SqliteMetadataStore(tmp_path / "m.db")


def test_a_store_that_another_process_locks_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup tool that keeps the file for itself: every call says so, and works again once it lets go."""
    monkeypatch.setattr("cremant.store.sqlite._BUSY_TIMEOUT_S", 0.05)
    path = tmp_path / "m.db"
    store = SqliteMetadataStore(path)
    store.commit([], [Put("/a", b"1")])
    theirs = sqlite3.connect(path, isolation_level=None)
    theirs.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match=r"m\.db is locked by another process .*nothing was changed") as caught:
        store.commit([], [Put("/a", b"2")])
    assert "try again" in caught.value.hint
    with pytest.raises(Unavailable, match="locked"):
        SqliteMetadataStore(path)
    theirs.execute("ROLLBACK")
    theirs.close()
    assert store.commit([], [Put("/a", b"2")]) == 2
    store.close()


def test_reads_of_a_store_that_became_locked_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite locks readers out while it recovers a write-ahead log; a lock of the same kind is held from outside."""
    monkeypatch.setattr("cremant.store.sqlite._BUSY_TIMEOUT_S", 0.05)
    path = tmp_path / "m.db"
    store = SqliteMetadataStore(path)
    store.commit([], [Put("/a", b"1")])
    store._db.execute("PRAGMA journal_mode=DELETE")
    theirs = sqlite3.connect(path, isolation_level=None)
    theirs.execute("BEGIN EXCLUSIVE")
    reads: tuple[Callable[[], object], ...] = (
        lambda: store.get("/a"), lambda: store.list("/"), lambda: store.revision, lambda: store.watch("/", 0, 0),
    )  # fmt: skip
    for read in reads:
        with pytest.raises(Unavailable, match="locked"):
            read()
    theirs.execute("ROLLBACK")
    assert [bool(read()) for read in reads] == [True] * len(reads)
    theirs.close()
    store.close()


_WRITER = """
import sys
from cremant.store.metadata import Expect, Put
from cremant.store.sqlite import SqliteMetadataStore
store = SqliteMetadataStore(sys.argv[1])
entry = store.get("/count/0")
at, number = (entry.version, int(entry.value)) if entry else (None, 0)
while True:
    number += 1
    value = str(number).encode()
    requirements = [Expect("/count/0", at)]
    at = store.commit(requirements, [Put(f"/count/{k}", value) for k in range(5)])
    print(number, flush=True)
"""


def test_kill_9_loses_no_acknowledged_commit_and_leaves_no_half_of_one(tmp_path: Path) -> None:
    """A writer puts the same number under five keys, over and over; it is killed at a random moment, ten times."""
    path, last = tmp_path / "m.db", 0
    for attempt in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.003 * attempt)
        process.send_signal(signal.SIGKILL)
        acknowledged = [int(line) for line in process.stdout.read().splitlines() if line.strip()]
        process.wait()
        last = max([last, *acknowledged])
        store = SqliteMetadataStore(path)
        values = {int(e.value) for e in store.list("/count/")}
        store.close()
        assert len(values) == 1
        assert values.pop() >= last


def test_the_files_are_for_this_user_alone(tmp_path: Path) -> None:
    """Configs may hold secrets."""
    store = SqliteMetadataStore(tmp_path / "m.db")
    modes = {path.name: path.stat().st_mode & 0o077 for path in tmp_path.iterdir()}
    store.close()
    assert "m.db" in modes
    assert not any(modes.values())
