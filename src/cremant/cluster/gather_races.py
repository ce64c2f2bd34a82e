# SPDX-License-Identifier: Apache-2.0
"""Requests of a Gather that are under way, and the answers of rivals that it holds back (gather.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from cremant.cluster.parts import Ask, Part
from cremant.model.query_codes import QueryCode
from cremant.wire.messages import ServerAnswer

#: Errors of a server that another server need not have.
RETRIED = frozenset(
    {
        QueryCode.SERVER_TABLE_MISSING, QueryCode.SERVER_SEGMENT_MISSING, QueryCode.SERVER_SHUTTING_DOWN,
        QueryCode.SERVER_OUT_OF_CAPACITY, QueryCode.QUERY_SCHEDULING_TIMEOUT,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Held:
    """An answer of a rival that waits for the end of the race."""

    server: str
    answer: ServerAnswer
    payload: Any
    parts: frozenset[Part]


@dataclass(slots=True)
class Pending:
    ask: Ask
    #: The request this one runs against; None: it runs for itself, and the rest is about its own rivals.
    rival_of: int | None = None
    hedge_at_ms: float = math.inf
    patience_until_ms: float = math.inf
    rivals: set[int] = field(default_factory=set)
    held: list[Held] = field(default_factory=list)
