# SPDX-License-Identifier: Apache-2.0
"""The failure cases of segment completion by name: those that the design numbers, and the further ones.

`cremant sim --world completion --scenario NAME` runs one. Each is a world in which nothing goes wrong but what its
script does, exactly when it does it; it fails if the fault did not happen, too.
"""

from __future__ import annotations

from cremant.model.errors import InvalidConfig
from cremant.sim.completion import scenarios_of_commits, scenarios_of_copies
from cremant.sim.completion.stage import Scenario

SCENARIOS: tuple[Scenario, ...] = (*scenarios_of_commits.SCENARIOS, *scenarios_of_copies.SCENARIOS)


def scenario_of(name: str) -> Scenario:
    """Raises InvalidConfig."""
    for scenario in SCENARIOS:
        if scenario.name == name:
            return scenario
    raise InvalidConfig(f"--scenario {name}: expected one of {', '.join(one.name for one in SCENARIOS)}")


def scenario_table() -> str:
    """For the documentation."""
    rows = [f"| `{one.name}` | {one.case} | {one.what} | {', '.join(one.reached)} |" for one in SCENARIOS]
    return "\n".join(["| scenario | case | what | must have happened |", "|---|---|---|---|", *rows])
