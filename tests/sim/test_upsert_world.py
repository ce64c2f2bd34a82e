# SPDX-License-Identifier: Apache-2.0
"""The world of upsert: clean with all safeguards, failing without any single one, the same every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cremant.sim.ablation import Ablation
from cremant.sim.ablations import DOCUMENT
from cremant.sim.upsert.ablations import ABLATIONS, simulate_without
from cremant.sim.upsert.options import ALL, Safeguards
from cremant.sim.upsert.run import simulate

SEEDS = 20
STRIDE = 5
CAUGHT: dict[str, list[int]] = json.loads((Path(__file__).parent / "ablations.json").read_text())["upsert"]


@pytest.mark.parametrize("first", range(0, SEEDS, STRIDE))
def test_every_invariant_holds_in_every_world(first: int) -> None:
    answers = 0
    for seed in range(first, first + STRIDE):
        outcome = simulate(seed)
        assert not outcome.failed, outcome.story()
        answers += outcome.checks
    assert answers > 0


@pytest.mark.parametrize("ablation", [a for a in ABLATIONS if not a.behind], ids=lambda a: "+".join(a.off))
def test_a_missing_safeguard_is_noticed(ablation: Ablation) -> None:
    seeds = CAUGHT[ablation.name]
    assert seeds, f"no catching seed is known for {ablation.name!r}"
    outcome = simulate_without(seeds[0], ablation.off)
    assert outcome.failed, f"seed {seeds[0]} misses it: python -m cremant.sim.ablations"
    assert f"cremant sim --seed {seeds[0]} --world upsert" in outcome.story()
    assert not simulate(seeds[0]).failed


def test_every_safeguard_is_taken_away_once() -> None:
    assert set(Safeguards.__struct_fields__) <= {name for ablation in ABLATIONS for name in ablation.off}
    assert all(getattr(ALL, name) for name in Safeguards.__struct_fields__)


def test_a_seed_is_the_same_world_every_time() -> None:
    assert simulate(3) == simulate(3)


def test_the_document_names_every_ablation() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for ablation in ABLATIONS:
        assert f"| {ablation.name} |" in text
