# SPDX-License-Identifier: Apache-2.0
"""A safeguard taken away, and the seeds that notice: what both worlds' ablations are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from cremant.sim.engine import Outcome


class Ablation(msgspec.Struct, frozen=True):
    """`off`: names of safeguards. `behind`: what catches it alone, if no seed does (a second line of defence)."""

    name: str
    off: tuple[str, ...]
    behind: str = ""


#: Runs a seed without some safeguards.
Without = Callable[[int, tuple[str, ...]], Outcome]


class Caught(msgspec.Struct, frozen=True):
    ablation: Ablation
    seeds: tuple[int, ...]
    rules: dict[str, int]


def search(ablation: Ablation, simulate: Without, seeds: int) -> Caught:
    """Which of the seeds notice, and by which rule."""
    caught = []
    rules: Counter[str] = Counter()
    for seed in range(seeds):
        outcome = simulate(seed, ablation.off)
        if outcome.failed:
            caught.append(seed)
            rules[outcome.rule] += 1
    return Caught(ablation, tuple(caught), dict(rules.most_common()))


def table(found: list[Caught], seeds: int) -> str:
    lines = [f"| taken away | first seed that notices | of {seeds} seeds | by |", "|---|---|---|---|"]
    for caught in found:
        first = str(caught.seeds[0]) if caught.seeds else f"none: {caught.ablation.behind}"
        rules = ", ".join(f"{rule} {count}" for rule, count in caught.rules.items())
        lines.append(f"| {caught.ablation.name} | {first} | {len(caught.seeds)} | {rules} |")
    return "\n".join(lines)
