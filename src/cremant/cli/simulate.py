# SPDX-License-Identifier: Apache-2.0
"""`cremant sim`: seeds of the simulated worlds; the exit status is 1 if an invariant did not hold."""

from __future__ import annotations

import functools
from collections.abc import Callable

from cremant.cli.console import write_json
from cremant.model.errors import InvalidConfig
from cremant.sim import run as epochs
from cremant.sim.completion import run as completion
from cremant.sim.completion.scenarios import scenario_of
from cremant.sim.engine import Outcome, tell
from cremant.sim.upsert import run as upsert

SEEDS_MAX = 1_000_000
#: Name -> what runs a seed of it.
WORLDS: dict[str, Callable[[int], Outcome]] = {
    epochs.WORLD: epochs.simulate,
    completion.WORLD: completion.simulate,
    upsert.WORLD: upsert.simulate,
}


def simulate(first: int, count: int, world: str, scenario: str, *, as_json: bool) -> int:
    """`world`: "" runs all. `scenario`: a named failure case of completion, "" for worlds that seeds draw."""
    if not 1 <= count <= SEEDS_MAX:
        raise InvalidConfig(f"--seeds {count}: expected 1 to {SEEDS_MAX}")
    if world and world not in WORLDS:
        raise InvalidConfig(f"--world {world}: expected one of {', '.join(WORLDS)}")
    runs = {world: WORLDS[world]} if world else WORLDS
    if scenario:
        if world not in ("", completion.WORLD):
            raise InvalidConfig(f"--scenario {scenario}: expected --world {completion.WORLD}, found {world}")
        runs = {completion.WORLD: functools.partial(completion.simulate, scenario=scenario_of(scenario))}
    if not as_json:
        return int(any([o.failed for name, run in runs.items() for o in tell(name, run, first, count)]))
    outcomes = [run(seed) for run in runs.values() for seed in range(first, first + count)]
    failed = [
        {"world": outcome.world, "seed": outcome.seed, "rule": outcome.rule, "message": outcome.message}
        for outcome in outcomes
        if outcome.failed
    ]
    totals = {
        "worlds": list(runs),
        "seeds": len(outcomes),
        "steps": sum(outcome.steps for outcome in outcomes),
        "checks": sum(outcome.checks for outcome in outcomes),
        "violations": len(failed),
    }
    write_json({**totals, "failed": failed})
    return 1 if failed else 0
