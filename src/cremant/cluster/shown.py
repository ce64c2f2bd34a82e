# SPDX-License-Identifier: Apache-2.0
"""What a broker has been shown of a table: how far each replica of each partition was when it last said so. Pure.

Rules:

- A mark is a fact about the stream and stays true: all that was in it before `fresh_ms` lies below `offset` (of an
  upsert table: is applied at `epoch`). So whoever shows as much is as fresh, whether it knows it or not.
- A replica is *late* if another one of its partition was further, by more than LATE_MS, when it said how far it is.
  It is left for the others until it says something better; if all are late (or alone), none is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from cremant.model.offsets import Watermark

#: Replicas read the same log within tens of ms: who is so much behind another one does not read it.
LATE_MS = 1_000
#: What is said within this time is compared: nobody gets this far meanwhile but who was about to.
TOGETHER_MS = 250

#: (partition, server).
Pair = tuple[int, str]


class Mark(NamedTuple):
    """Rows below `offset` are visible (as of closed `epoch`, upsert tables), and with them everything that was in the
    stream before `fresh_ms`; None: nothing is proven. `said_ms`: when it was said, at the earliest (monotonic)."""

    offset: int
    epoch: int
    fresh_ms: int | None
    said_ms: float = 0.0


@dataclass(slots=True)
class Shown:
    """Of one table (incarnation). `offsets`: as far as each pair has shown, for routing past a floor."""

    marks: dict[int, dict[str, Mark]] = field(default_factory=dict)
    offsets: dict[Pair, int] = field(default_factory=dict)
    late: frozenset[Pair] = frozenset()

    def note(
        self, partition: int, server: str, watermark: Watermark, *, offset: int, now_ms: float, age_ms: float = 0.0
    ) -> None:
        """`now_ms`: monotonic. `age_ms`: the server said so that long ago at most."""
        fresh_ms, said_ms = watermark.freshness_ms, now_ms - age_ms
        pair = (partition, server)
        self.offsets[pair] = offset
        marks = self.marks.get(partition)
        if marks is None:
            marks = self.marks[partition] = {}
        marks[server] = Mark(offset, watermark.epoch, fresh_ms, said_ms)
        is_late = False
        for other, mark in marks.items():
            ahead_ms = (fresh_ms or 0) - (mark.fresh_ms or 0)
            if ahead_ms > LATE_MS + max(0.0, said_ms - mark.said_ms) and mark.said_ms >= said_ms - TOGETHER_MS:
                self.late |= {(partition, other)}
            elif -ahead_ms > LATE_MS + age_ms:
                is_late = True
        if is_late:
            self.late |= {pair}
        elif pair in self.late:
            self.late -= {pair}

    def keep(self, servers: Collection[str]) -> None:
        """Nobody is late because of a server that is gone, whose clock may have been ahead."""
        for marks in self.marks.values():
            for gone in marks.keys() - set(servers):
                del marks[gone]
        self.late = frozenset(pair for pair in self.late if pair[1] in servers)

    def known(self, partition: int, servers: Collection[str]) -> Iterable[Mark]:
        """What these of its replicas have said."""
        marks: Mapping[str, Mark] = self.marks.get(partition, {})
        return [mark for server, mark in marks.items() if server in servers]
