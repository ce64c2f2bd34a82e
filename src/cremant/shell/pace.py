# SPDX-License-Identifier: Apache-2.0
"""Long work that nobody waits for leaves the machine to others: it rests after each piece, if there is time for it."""

from __future__ import annotations

import time
from collections.abc import Callable

#: A piece that took long because the machine is busy is not followed by a rest without end.
REST_MAX_S = 2.0


class Pace:
    """Of one thread. Work of `pieces` equal pieces takes a `share` of the time (0 < share <= 1), or more if it would
    not be done within `within_s` of its begin otherwise."""

    def __init__(
        self, share: float, pieces: int, within_s: float, *,
        clock_s: Callable[[], float] = time.monotonic, sleep_s: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._rest_per_work = 1.0 / share - 1.0
        self._piece_s = within_s / pieces
        self._clock_s = clock_s
        self._sleep_s = sleep_s
        self._began_s = self._rested_s = clock_s()
        self._done = 0

    def rest(self) -> None:
        """After a piece of work, which began when the last rest ended."""
        self._done += 1
        now_s = self._clock_s()
        wanted_s = (now_s - self._rested_s) * self._rest_per_work
        ahead_s = self._began_s + self._done * self._piece_s - now_s
        rest_s = min(wanted_s, ahead_s, REST_MAX_S)
        if rest_s > 0:
            self._sleep_s(rest_s)
        self._rested_s = self._clock_s()
