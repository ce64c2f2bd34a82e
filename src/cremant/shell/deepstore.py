# SPDX-License-Identifier: Apache-2.0
"""The deep store of a process, guarded: whatever it does (a share that hangs, a service that never answers), a caller
waits for its deadline at most, and no more than a few threads are lost to it.

A transfer's deadline follows from its size. A download asks for the size first, so a store that hangs costs a few
seconds. What an abandoned call brings late is thrown away; what it uploads late has a name of its own, by content.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cremant.model.errors import CremantError, InvalidConfig, NotFound
from cremant.model.limits import (
    STORE_BYTES_PER_MS_MIN,
    STORE_CALL_MS,
    STORE_CALLS_MAX,
    STORE_LIST_MS,
)
from cremant.model.settings import Settings
from cremant.shell.bounded import BoundedCalls
from cremant.store.deepstore import DeepStore, StoredObject
from cremant.store.open import open_former, open_unguarded, store_uri

T = TypeVar("T")


def open_store(settings: Settings) -> GuardedStore:
    """The store that the settings name. Asks it nothing. Raises InvalidConfig."""
    return GuardedStore(open_unguarded(settings), store_uri(settings), former=lambda url: open_former(settings, url))


class GuardedStore:
    """A deep store whose calls have deadlines: they raise DeadlineExceeded, or Unavailable when too many hang already,
    beside what the store itself raises. `where` names it in errors; `former` opens the store of a URL that is in none
    of ours."""

    def __init__(
        self, store: DeepStore, where: str, *, call_ms: int = STORE_CALL_MS, calls_max: int = STORE_CALLS_MAX,
        former: Callable[[str], DeepStore] | None = None,
    ) -> None:  # fmt: skip
        self._store = store
        self._where = where
        self._call_ms = call_ms
        self._calls_max = calls_max
        self._calls = BoundedCalls(calls_max, "deep-store")
        self._former = former
        #: URI -> store that was in use before. A handful in the life of a cluster.
        self._formers: dict[str, GuardedStore] = {}

    @property
    def uri(self) -> str:
        return self._store.uri

    def claim(self, known: str) -> str:
        return self._call("claim", "it", lambda: self._store.claim(known), self._call_ms)

    def sweep(self, older_than_ms: int) -> int:
        return self._call("sweep", "it", lambda: self._store.sweep(older_than_ms), STORE_LIST_MS)

    def by_url(self, url: str) -> tuple[DeepStore, str]:
        try:
            return self, self._store.name_of(url)
        except InvalidConfig:
            if self._former is None:
                raise
        uri = url.rsplit("/", 3)[0]
        store = self._formers.get(uri)
        if store is None:
            opened = self._former(url)
            store = GuardedStore(opened, opened.uri, call_ms=self._call_ms, calls_max=self._calls_max)
            self._formers[uri] = store
        return store, store.name_of(url)

    def put(self, name: str, source: Path) -> str:
        return self._call("put", name, lambda: self._store.put(name, source), self._transfer_ms(source.stat().st_size))

    def get(self, name: str, target: Path, *, checksum: str | None) -> None:
        size_bytes = self.size(name)
        # Beside the caller's directory, which may be moved and used while an abandoned call still writes.
        landing = target.parent.with_name(f"{target.parent.name}.{secrets.token_hex(4)}")
        abandoned = threading.Event()

        def run() -> None:
            try:
                landing.mkdir(parents=True, exist_ok=True)
                self._store.get(name, landing / target.name, checksum=checksum)
            finally:
                if abandoned.is_set():
                    shutil.rmtree(landing, ignore_errors=True)

        try:
            self._call("get", name, run, self._transfer_ms(size_bytes))
            (landing / target.name).replace(target)
        except BaseException:
            abandoned.set()
            raise
        finally:
            shutil.rmtree(landing, ignore_errors=True)

    def size(self, name: str) -> int:
        return self._call("size", name, lambda: self._store.size(name), self._call_ms)

    def delete(self, name: str) -> None:
        self._call("delete", name, lambda: self._store.delete(name), self._call_ms)

    def list(self, prefix: str) -> list[StoredObject]:
        return self._call("list", prefix, lambda: self._store.list(prefix), STORE_LIST_MS)

    def name_of(self, url: str) -> str:
        return self._store.name_of(url)

    def _transfer_ms(self, size_bytes: int) -> int:
        return self._call_ms + size_bytes // STORE_BYTES_PER_MS_MIN

    def _call(self, verb: str, name: str, run: Callable[[], T], timeout_ms: int) -> T:
        return self._calls.call(f"deep store {self._where}: {verb} {name}", run, timeout_ms)


def probe(store: DeepStore, scratch: Path) -> str | None:
    """Writes, reads and deletes a small object. None, or what went wrong (with where), within a few deadlines."""
    name, word = f"probe/{secrets.token_hex(8)}", secrets.token_bytes(64)
    source, back = scratch / f"{name.replace('/', '-')}", scratch / f"{name.replace('/', '-')}.back"
    try:
        source.write_bytes(word)
        store.put(name, source)
        store.get(name, back, checksum=None)
        same = back.read_bytes() == word
        store.delete(name)
        with contextlib.suppress(NotFound):
            store.size(name)
            return f"object {name} is still there after its deletion"
        return None if same else f"object {name} came back with other bytes"
    except (CremantError, OSError) as error:
        return str(error)
    finally:
        source.unlink(missing_ok=True)
        back.unlink(missing_ok=True)
