# SPDX-License-Identifier: Apache-2.0
"""The controller's clock: wall milliseconds at start, monotonic from there, so no lease jumps with the wall clock."""

from __future__ import annotations

import time


class Clock:
    def __init__(self) -> None:
        self._offset_ms = int(time.time() * 1000) - int(time.monotonic() * 1000)

    def now_ms(self) -> int:
        return int(time.monotonic() * 1000) + self._offset_ms

    def wall_ms(self) -> int:
        """What the machine believes to be the time, right or wrong."""
        return int(time.time() * 1000)
