# SPDX-License-Identifier: Apache-2.0
"""The deep store, as the controller's real `Objects` asks it."""

from __future__ import annotations

from pathlib import Path

from cremant.model.errors import NotFound, Unavailable
from cremant.sim.completion.world import World
from cremant.store.deepstore import DeepStore, StoredObject

SCHEME = "s3://"


class SimulatedStore:
    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def uri(self) -> str:
        return SCHEME

    def claim(self, known: str) -> str:
        return known

    def put(self, name: str, source: Path) -> str:
        raise NotImplementedError("servers upload (cremant.sim.completion.uploads)")

    def get(self, name: str, target: Path, *, checksum: str | None) -> None:
        raise NotImplementedError("servers fetch (cremant.sim.completion.fetching)")

    def size(self, name: str) -> int:
        self._answers()
        found = self._world.store.objects.get(SCHEME + name)
        if found is None:
            raise NotFound(f"{name} is not in the store")
        return len(found)

    def delete(self, name: str) -> None:
        self._answers()
        self._world.store.objects.remove(SCHEME + name)

    def list(self, prefix: str) -> list[StoredObject]:
        self._answers()
        store, now_ms = self._world.store, self._world.now_ms
        return [
            StoredObject(url.removeprefix(SCHEME), len(content), now_ms - store.written_ms[url])
            for url, content in sorted(store.objects.items())
            if url.startswith(SCHEME + prefix)
        ]

    def sweep(self, older_than_ms: int) -> int:
        return 0  # uploads leave nothing unfinished

    def name_of(self, url: str) -> str:
        return url.removeprefix(SCHEME)

    def by_url(self, url: str) -> tuple[DeepStore, str]:
        return self, self.name_of(url)

    def _answers(self) -> None:
        if self._world.store.mode not in ("up", "slow"):
            raise Unavailable(f"the deep store is {self._world.store.mode}")
