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

from cremant.model.offsets import Watermark

#: Replicas read the same log within tens of ms: who is so much behind another one does not read it.
LATE_MS = 1_000
#: What is said within this time is compared: nobody gets this far meanwhile but who was about to.
TOGETHER_MS = 250

#: (partition, server).
Pair = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Mark:
    """Rows below `offset` are visible (as of closed `epoch`, upsert tables), and with them everything that was in the
    stream before `fresh_ms`; None: nothing is proven."""

    offset: int
    epoch: int
    fresh_ms: int | None


@dataclass(slots=True)
class Shown:
    """Of one table (incarnation). `offsets`: as far as each pair has shown, for routing past a floor."""

    marks: dict[int, dict[str, Mark]] = field(default_factory=dict)
    offsets: dict[Pair, int] = field(default_factory=dict)
    late: frozenset[Pair] = frozenset()
    #: When each pair said so, at the latest (monotonic ms).
    _said_ms: dict[Pair, float] = field(default_factory=dict)

    def note(
        self, partition: int, server: str, watermark: Watermark, *, offset: int, now_ms: float, age_ms: float = 0.0
    ) -> None:
        """`now_ms`: monotonic. `age_ms`: the server said so that long ago at most."""
        fresh_ms = watermark.freshness_ms
        self.offsets[partition, server] = offset
        marks = self.marks.get(partition)
        if marks is None:
            marks = self.marks[partition] = {}
        marks[server] = Mark(offset, watermark.epoch, fresh_ms)
        said = self._said_ms
        said[partition, server] = now_ms - age_ms
        if len(marks) == 1:
            return
        newest_ms = max(mark.fresh_ms or 0 for mark in marks.values())
        for other, mark in marks.items():
            pair = (partition, other)
            behind_ms = newest_ms - (mark.fresh_ms or 0)
            if behind_ms <= LATE_MS:
                if pair in self.late:
                    self.late -= {pair}
            elif behind_ms > LATE_MS + now_ms - said[pair] and now_ms - said[pair] <= TOGETHER_MS + age_ms:
                self.late |= {pair}

    def known(self, partition: int, servers: Collection[str]) -> Iterable[Mark]:
        """What these of its replicas have said."""
        marks: Mapping[str, Mark] = self.marks.get(partition, {})
        return [mark for server, mark in marks.items() if server in servers]
