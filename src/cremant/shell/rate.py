# SPDX-License-Identifier: Apache-2.0
"""A rate limit as arithmetic: how long to wait before so much more may pass. Time is the caller's argument."""

from __future__ import annotations

import threading


class Rate:
    """At most `per_s` units a second on average, a second's worth at once; 0 = no limit. Thread-safe."""

    def __init__(self, per_s: int) -> None:
        self._per_s = per_s
        self._free_at_s: float | None = None
        self._lock = threading.Lock()

    def take(self, units: int, now_s: float) -> float:
        """Seconds to wait before using `units`, which are spoken for from now on."""
        if self._per_s <= 0:
            return 0.0
        with self._lock:
            # Unused time is not saved up beyond a second.
            begins_s = max(self._free_at_s if self._free_at_s is not None else now_s - 1.0, now_s - 1.0)
            self._free_at_s = begins_s + units / self._per_s
            return max(0.0, self._free_at_s - now_s)
