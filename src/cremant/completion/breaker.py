# SPDX-License-Identifier: Apache-2.0
"""A circuit breaker: whether it makes sense to try something that has failed again and again. Pure.

Rules
- *closed*: everything is tried. `BREAKER_FAILURES` failures in a row, with no success in between, open it.
- *open*: nothing is tried until its time has passed, which doubles with each opening up to a bound; then
- *half open*: one attempt is admitted, alone. It succeeds: closed. It fails: open again, for longer. It does not say
  anything for `BREAKER_PROBE_MS`: another one is admitted.
- A success closes it whenever it comes, also of an attempt from before; a failure while it is open changes nothing.

Table (state, event, guard -> next state): see TRANSITIONS.
"""

from __future__ import annotations

from enum import StrEnum

from cremant.model.limits import BREAKER_FAILURES, BREAKER_OPEN_FIRST_MS, BREAKER_OPEN_MAX_MS, BREAKER_PROBE_MS

TRANSITIONS: tuple[tuple[str, str, str, str], ...] = (
    ("closed", "succeeded", "-", "closed, no failures"),
    ("closed", "failed", "fewer than the limit in a row", "closed, one more"),
    ("closed", "failed", "the limit in a row", "open"),
    ("open", "admit", "its time has passed", "half open, admitted"),
    ("open", "admit", "before", "open, refused"),
    ("open", "succeeded", "-", "closed"),
    ("open", "failed", "-", "open"),
    ("half open", "admit", "the attempt says nothing for long", "half open, admitted"),
    ("half open", "admit", "the attempt runs", "half open, refused"),
    ("half open", "succeeded", "-", "closed"),
    ("half open", "failed", "-", "open, for twice as long"),
)


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


class Breaker:
    """`now_ms` never goes back."""

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        #: Why it opened.
        self.cause = ""
        self._failures = 0
        self._openings = 0
        self._until_ms = 0

    def admit(self, now_ms: int) -> bool:
        """Whether to try now. True while it is not closed makes the caller's attempt the one that decides."""
        if self.state is BreakerState.CLOSED:
            return True
        if now_ms < self._until_ms:
            return False
        self.state, self._until_ms = BreakerState.HALF_OPEN, now_ms + BREAKER_PROBE_MS
        return True

    def succeeded(self) -> None:
        self.state, self.cause, self._failures, self._openings = BreakerState.CLOSED, "", 0, 0

    def failed(self, now_ms: int, cause: str) -> None:
        match self.state:
            case BreakerState.CLOSED:
                self._failures += 1
                if self._failures >= BREAKER_FAILURES:
                    self._open(now_ms, cause)
            case BreakerState.HALF_OPEN:
                self._open(now_ms, cause)
            case BreakerState.OPEN:
                pass

    def _open(self, now_ms: int, cause: str) -> None:
        wait_ms = min(BREAKER_OPEN_MAX_MS, BREAKER_OPEN_FIRST_MS << min(self._openings, 16))
        self._openings += 1
        self.state, self.cause, self._until_ms = BreakerState.OPEN, cause, now_ms + wait_ms


def transition_table() -> str:
    """The table as Markdown, for the documentation."""
    head = ("state", "event", "guard", "next state")
    lines = [head, ("---",) * len(head), *TRANSITIONS]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
