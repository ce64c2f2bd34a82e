# SPDX-License-Identifier: Apache-2.0
"""Waiting times of retries: exponential with full-range jitter, bounded, reset by success."""

from __future__ import annotations

import random

from cremant.model.limits import BACKOFF_FIRST_MS, BACKOFF_MAX_MS


class Backoff:
    """`next_ms()` = how long to wait before the next try; `reset()` after a success. Not thread-safe."""

    def __init__(
        self, first_ms: int = BACKOFF_FIRST_MS, max_ms: int = BACKOFF_MAX_MS, *, dice: random.Random | None = None
    ) -> None:
        self._first_ms = first_ms
        self._max_ms = max_ms
        self._dice = dice or random.Random()
        self.attempts = 0

    def next_ms(self) -> int:
        """Between half and all of first * 2^attempts, at most `max_ms`: herds spread, nobody retries at once."""
        ceiling = min(self._max_ms, self._first_ms * 2 ** min(self.attempts, 30))
        self.attempts += 1
        return self._dice.randint(ceiling // 2, ceiling)

    def reset(self) -> None:
        self.attempts = 0
