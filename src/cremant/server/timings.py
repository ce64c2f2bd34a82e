# SPDX-License-Identifier: Apache-2.0
"""How long the phases of completing a table's segments take on this server, as histograms for metrics."""

from __future__ import annotations

import threading
from bisect import bisect_left
from enum import StrEnum
from itertools import accumulate

_BUCKETS_MS = (5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000)


class Phase(StrEnum):
    """DECIDE: from the first report to the cut. CATCH_UP: until own rows reach it. TURN: until a build begins that
    works. UPLOAD: what the commit waited for the store. COMMIT: the controller's transaction."""

    DECIDE = "decide"
    CATCH_UP = "catchUp"
    TURN = "turn"
    BUILD = "build"
    UPLOAD = "upload"
    COMMIT = "commit"
    INSTALL = "install"


class PhaseTimes:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {phase: [0] * (len(_BUCKETS_MS) + 1) for phase in Phase}
        self._sums_ms = dict.fromkeys(Phase, 0.0)

    def add(self, phase: Phase, elapsed_ms: float) -> None:
        with self._lock:
            self._counts[phase][bisect_left(_BUCKETS_MS, elapsed_ms)] += 1
            self._sums_ms[phase] += elapsed_ms

    def histogram(self, phase: Phase) -> tuple[list[tuple[str, float]], float]:
        """(upper bound, how many took at most that long) of each bucket, and the sum of all."""
        with self._lock:
            counts, sum_ms = list(self._counts[phase]), self._sums_ms[phase]
        bounds = (*(str(float(bound)) for bound in _BUCKETS_MS), "+Inf")
        return list(zip(bounds, accumulate(map(float, counts)), strict=True)), sum_ms
