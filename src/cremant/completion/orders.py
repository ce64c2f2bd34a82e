# SPDX-License-Identifier: Apache-2.0
"""What repair of copies knows of the cluster, and what it orders. The machine: `completion/repair.py`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from cremant.model.cluster import SegmentReport
from cremant.model.completion import StorePolicy
from cremant.model.segments import Loss

# --- what is known ------------------------------------------------------------------------------------------------


class Key(NamedTuple):
    table: str
    segment: str


@dataclass(frozen=True, slots=True)
class Wants:
    """What a table asks of its sealed segments."""

    policy: StorePolicy
    replication: int


@dataclass(frozen=True, slots=True)
class Situation:
    """`live`: servers that live; `leaving`: those of them that get nothing new. `said`: what they report of the
    segments asked for. `log_earliest`: (table, partition) -> first offset of its epoch log; who is not in it was not
    asked, or the log did not answer. `moving`: tables whose replicas somebody else is moving. `homes`: (table,
    partition) -> who consumes it, where segments belong."""

    live: frozenset[str]
    said: Mapping[Key, Mapping[str, SegmentReport]]
    log_earliest: Mapping[tuple[str, int], int] = field(default_factory=dict)
    moving: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()
    homes: Mapping[tuple[str, int], Collection[str]] = field(default_factory=dict)


# --- orders -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Upload:
    """Ask `server` to put its copy into the store. Ends in `CopiesRepair.ended`."""

    key: Key
    server: str


@dataclass(frozen=True, slots=True)
class Assign:
    """The segment's replicas from now on: one more, or without those that are away."""

    key: Key
    replicas: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Prune:
    """Holders that are no replicas any more are no copies."""

    key: Key
    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecordLoss:
    key: Key
    loss: Loss


@dataclass(frozen=True, slots=True)
class TakeBackLoss:
    key: Key


Order = Upload | Assign | Prune | RecordLoss | TakeBackLoss
