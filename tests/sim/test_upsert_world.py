# SPDX-License-Identifier: Apache-2.0
"""The world of upsert: clean with all safeguards, failing without any single one, the same every time."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from cremant.epoch import start
from cremant.sim.ablation import Ablation
from cremant.sim.ablations import DOCUMENT
from cremant.sim.engine import Outcome
from cremant.sim.upsert.ablations import ABLATIONS, simulate_without
from cremant.sim.upsert.options import ALL, Safeguards
from cremant.sim.upsert.run import simulate

SEEDS = 120
STRIDE = 10
CAUGHT: dict[str, list[int]] = json.loads((Path(__file__).parent / "ablations.json").read_text())["upsert"]


@cache
def outcome_of(seed: int) -> Outcome:
    return simulate(seed)


@pytest.mark.parametrize("first", range(0, SEEDS, STRIDE))
def test_every_invariant_holds_in_every_world(first: int) -> None:
    for seed in range(first, first + STRIDE):
        outcome = outcome_of(seed)
        assert not outcome.failed, outcome.story()
        assert outcome.checks > 0


@pytest.mark.parametrize("ablation", [a for a in ABLATIONS if not a.behind], ids=lambda a: "+".join(a.off))
def test_a_missing_safeguard_is_noticed(ablation: Ablation) -> None:
    seeds = CAUGHT[ablation.name]
    assert seeds, f"no catching seed is known for {ablation.name!r}"
    outcome = simulate_without(seeds[0], ablation.off)
    assert outcome.failed, f"seed {seeds[0]} misses it: python -m cremant.sim.ablations"
    assert f"cremant sim --seed {seeds[0]} --world upsert" in outcome.story()
    assert not outcome_of(seeds[0]).failed


def test_every_safeguard_is_taken_away_once() -> None:
    assert set(Safeguards.__struct_fields__) <= {name for ablation in ABLATIONS for name in ablation.off}
    assert all(getattr(ALL, name) for name in Safeguards.__struct_fields__)


def test_what_no_seed_notices_is_taken_away_together_with_what_covers_it() -> None:
    for alone in [ablation for ablation in ABLATIONS if ablation.behind]:
        assert any(set(alone.off) < set(ablation.off) for ablation in ABLATIONS if not ablation.behind), alone.name


def test_rewinds_are_carried_out() -> None:
    reached = {row for seed in range(20) for row in outcome_of(seed).transitions}
    resets = {("start", state.value, event.__name__) for state, event in start.TRANSITIONS if "reset" in state.value}
    assert resets <= reached


def test_a_seed_is_the_same_world_every_time() -> None:
    assert simulate(3) == simulate(3)


def test_the_document_names_every_ablation() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for ablation in ABLATIONS:
        assert f"| {ablation.name} |" in text
