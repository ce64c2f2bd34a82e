# SPDX-License-Identifier: Apache-2.0
"""When the replicas of tables last went on, as an observer who looks now and then sees it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cremant.model.cluster import TailReport


class Moves:
    """Not thread-safe."""

    def __init__(self) -> None:
        #: (incarnation, partition, server) -> visible offset, and when it was first seen; 0: at the first look.
        self._seen: dict[tuple[str, int, str], tuple[int, int]] = {}

    def look(
        self, incarnation: str, tails: Mapping[int, Mapping[str, TailReport]], now_ms: int
    ) -> dict[tuple[int, str], int]:
        """(partition, server) -> when it was last found elsewhere than before; without those that never were."""
        moved: dict[tuple[int, str], int] = {}
        for partition, said in tails.items():
            for server, tail in said.items():
                key, offset = (incarnation, partition, server), tail.watermark.next_offset
                before, since_ms = self._seen.get(key, (offset, 0))
                if offset != before:
                    since_ms = now_ms
                self._seen[key] = (offset, since_ms)
                if since_ms:
                    moved[partition, server] = since_ms
        return moved

    def keep(self, incarnations: Collection[str]) -> None:
        """Forgets tables that are gone."""
        self._seen = {key: value for key, value in self._seen.items() if key[0] in incarnations}
