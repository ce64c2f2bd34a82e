# SPDX-License-Identifier: Apache-2.0
"""What a Gather is told and what it wants done (gather.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from cremant.cluster.parts import Ask
from cremant.model.cluster import ClusterView
from cremant.wire.messages import ServerAnswer

# --- events ---


@dataclass(frozen=True, slots=True)
class Started:
    pass


@dataclass(frozen=True, slots=True)
class Answered:
    """`payload` is the driver's: the rows that go with `answer`."""

    ask_id: int
    answer: ServerAnswer
    payload: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed: no connection, or nonsense came back."""

    ask_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Woke:
    pass


@dataclass(frozen=True, slots=True)
class Refreshed:
    """The newest view there is (maybe the same)."""

    view: ClusterView


@dataclass(frozen=True, slots=True)
class Suspected:
    """`server` has stopped answering, as another query found out."""

    server: str


Event: TypeAlias = Started | Answered | Failed | Woke | Refreshed | Suspected


# --- effects ---


@dataclass(frozen=True, slots=True)
class Send:
    """Answered or Failed with `ask_id` follows, unless it is cancelled or the gather is done before."""

    ask_id: int
    ask: Ask
    budget_ms: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """The answer will not be used: the server may stop. `lost`: another replica, asked later, was faster."""

    ask_id: int
    ask: Ask
    lost: bool


@dataclass(frozen=True, slots=True)
class Probe:
    """Is the server of this request alive? Suspected follows if it is not."""

    ask: Ask


@dataclass(frozen=True, slots=True)
class Wake:
    """Woke at `at_ms`."""

    at_ms: float


@dataclass(frozen=True, slots=True)
class Refresh:
    """Refreshed with the newest view, at `at_ms` or later."""

    at_ms: float


@dataclass(frozen=True, slots=True)
class Done:
    pass


Effect: TypeAlias = Send | Cancel | Probe | Wake | Refresh | Done


@dataclass(frozen=True, slots=True)
class QueryException:
    code: int
    message: str
