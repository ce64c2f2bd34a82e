# SPDX-License-Identifier: Apache-2.0
"""How much history does the simulated world live through per second, and does it find anything?"""

from __future__ import annotations

import time
from typing import Any

from bench.context import Context
from cremant.sim.run import simulate


def run(context: Context) -> tuple[dict[str, Any], dict[str, Any]]:
    limit_s = 20.0 if context.quick else 120.0
    started = time.monotonic()
    outcomes = []
    while time.monotonic() - started < limit_s:
        outcomes.append(simulate(len(outcomes)))
    took = time.monotonic() - started
    return {"seeds": len(outcomes)}, {
        "seeds_per_s": len(outcomes) / took,
        "steps_per_s": sum(outcome.steps for outcome in outcomes) / took,
        "violations": sum(outcome.failed for outcome in outcomes),
    }
