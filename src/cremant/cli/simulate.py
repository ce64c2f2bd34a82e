# SPDX-License-Identifier: Apache-2.0
"""`cremant sim`: seeds of the simulated world; the exit status is 1 if an invariant did not hold."""

from __future__ import annotations

from cremant.cli.console import write_json
from cremant.model.errors import InvalidConfig
from cremant.sim import run

SEEDS_MAX = 1_000_000


def simulate(first: int, count: int, *, as_json: bool) -> int:
    if not 1 <= count <= SEEDS_MAX:
        raise InvalidConfig(f"--seeds {count}: expected 1 to {SEEDS_MAX}")
    if not as_json:
        return run.main(first, count)
    outcomes = [run.simulate(seed) for seed in range(first, first + count)]
    failed = [
        {"seed": outcome.seed, "rule": outcome.rule, "message": outcome.message}
        for outcome in outcomes
        if outcome.failed
    ]
    totals = {
        "seeds": count,
        "steps": sum(outcome.steps for outcome in outcomes),
        "checks": sum(outcome.checks for outcome in outcomes),
        "violations": len(failed),
    }
    write_json({**totals, "failed": failed})
    return 1 if failed else 0
