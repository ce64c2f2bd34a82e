# SPDX-License-Identifier: Apache-2.0
"""The simulated world: clean with all safeguards, failing without any single one, the same every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cremant.epoch import close, start
from cremant.sim.ablation import Ablation
from cremant.sim.ablations import ABLATIONS, DOCUMENT, simulate_without, tables_of_code
from cremant.sim.engine import tell
from cremant.sim.run import simulate

SEEDS = 320
#: Seeds per test, so that a failure is found soon and several can run beside each other.
STRIDE = 40
CAUGHT: dict[str, list[int]] = json.loads((Path(__file__).parent / "ablations.json").read_text())["epochs"]
#: Seeds that once failed.
REGRESSIONS = [
    int(line.split()[0])
    for line in (Path(__file__).parent / "seeds.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
_reached: set[tuple[str, str, str]] = set()


@pytest.mark.parametrize("first", range(0, SEEDS, STRIDE))
def test_every_invariant_holds_in_every_world(first: int) -> None:
    for seed in range(first, first + STRIDE):
        outcome = simulate(seed)
        _reached.update(outcome.transitions)
        assert not outcome.failed, outcome.story()


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_a_seed_that_once_failed_passes(seed: int) -> None:
    outcome = simulate(seed)
    assert not outcome.failed, outcome.story()


@pytest.mark.parametrize("ablation", [a for a in ABLATIONS if not a.behind], ids=lambda a: "+".join(a.off))
def test_a_missing_safeguard_is_noticed(ablation: Ablation) -> None:
    seeds = CAUGHT[ablation.name]
    assert seeds, f"no catching seed is known for {ablation.name!r}"
    for seed in seeds:
        outcome = simulate_without(seed, ablation.off)
        assert outcome.failed, f"seed {seed} misses it: python -m cremant.sim.ablations"
        assert f"cremant sim --seed {seed}" in outcome.story()


def test_a_seed_is_the_same_world_every_time() -> None:
    for seed in (3, 4):
        assert simulate(seed) == simulate(seed)
    ablation = ABLATIONS[0]
    seed = CAUGHT[ablation.name][0]
    assert simulate_without(seed, ablation.off).trace == simulate_without(seed, ablation.off).trace


def test_every_transition_but_those_of_a_reset_is_reached() -> None:
    for seed in range(40):
        _reached.update(simulate(seed).transitions)
    expected = {("start", s.value, e.__name__) for s, e in start.TRANSITIONS}
    expected |= {("close", s.value, e.__name__) for s, e in close.TRANSITIONS}
    expected = {row for row in expected if "reset" not in row[1] and "ablated" not in row[1]}
    assert expected - _reached == set()


def test_the_document_shows_the_tables_of_the_code() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert tables_of_code(text) == text
    for ablation in ABLATIONS:
        assert f"| {ablation.name} |" in text


def test_a_run_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert not any(outcome.failed for outcome in tell("epochs", simulate, 0, 2))
    assert "2 seeds" in capsys.readouterr().out
    ablation = ABLATIONS[0]
    seed = CAUGHT[ablation.name][0]
    (failed,) = tell("epochs", lambda seed: simulate_without(seed, ablation.off), seed, 1)
    assert failed.failed
    assert f"replay: cremant sim --seed {seed} --world epochs" in capsys.readouterr().out
