# SPDX-License-Identifier: Apache-2.0
"""The world of segment completion: clean with all safeguards, failing without any single one, the same every time."""

from __future__ import annotations

import json
import typing
from pathlib import Path

import msgspec
import pytest

from cremant.cli.simulate import simulate as command
from cremant.completion import breaker, replica, segment
from cremant.completion.liveness import Place, Reset
from cremant.completion.orders import Order
from cremant.model.completion import StorePolicy
from cremant.model.errors import InvalidConfig
from cremant.sim.ablation import Ablation
from cremant.sim.ablations import DOCUMENT
from cremant.sim.completion.ablations import ABLATIONS, simulate_with_all, simulate_without
from cremant.sim.completion.run import simulate
from cremant.sim.completion.scenarios import SCENARIOS, scenario_of
from cremant.sim.completion.stage import Scenario
from cremant.sim.engine import Outcome

SEEDS = 200
STRIDE = 50
CAUGHT: dict[str, list[int]] = json.loads((Path(__file__).parent / "ablations.json").read_text())["completion"]
#: What no seed and no scenario reaches, and why; unit tests walk it.
UNREACHED = {
    ("controller", "empty"): "a replica asks with a cut past the start only",
    ("controller", "not-mine"): "only the progress of the committer is passed on",
    ("replica", "no-part"): "a tail that lost its start stops, and is reset",
    ("replica", "compacted"): "its table has no keys: nothing is compacted",
    ("breaker", "half open admit: half open admitted"): "every call of the store has a deadline",
    ("fetch", "Failed: FromStore"): "the store is asked first",
}
_known: dict[int, Outcome] = {}
_of_scenarios: dict[str, Outcome] = {}


def outcome_of(seed: int) -> Outcome:
    if seed not in _known:
        _known[seed] = simulate(seed)
    return _known[seed]


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
    assert outcome.rule not in ("reached", "scenario"), outcome.message
    assert f"cremant sim --seed {seeds[0]} --world completion" in outcome.story()
    whole = simulate_with_all(seeds[0], ablation.off)
    assert not whole.failed, f"fails with all safeguards, too: {whole.story()}"


def test_a_seed_is_the_same_world_every_time() -> None:
    assert simulate(3) == simulate(3)
    ablation = ABLATIONS[0]
    seed = CAUGHT[ablation.name][0]
    assert simulate_without(seed, ablation.off).trace == simulate_without(seed, ablation.off).trace


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_failure_case_happens_and_everything_settles(scenario: Scenario) -> None:
    outcome = simulate(0, scenario=scenario)
    _of_scenarios[scenario.name] = outcome
    assert not outcome.failed, outcome.story()


def test_a_scenario_whose_fault_does_not_happen_fails() -> None:
    upload_fails = scenario_of("upload-fails")
    without = msgspec.structs.replace(upload_fails, options={"policy": StorePolicy.STORE_REQUIRED})
    outcome = simulate(0, scenario=without)
    assert outcome.rule == "reached"
    assert "cremant sim --seed 0 --world completion --scenario upload-fails" in outcome.story()


def test_every_transition_of_the_machines_is_reached() -> None:
    reached = set()
    outcomes = [outcome_of(seed) for seed in range(SEEDS)]
    outcomes += [_of_scenarios.get(one.name) or simulate(0, scenario=one) for one in SCENARIOS]
    for outcome in outcomes:
        for machine, event, row in outcome.transitions:
            reached.add((machine, f"{event}: {row}" if machine in ("breaker", "fetch") else row))
    assert _rows() - reached - UNREACHED.keys() == set()
    assert UNREACHED.keys() & reached == set()
    assert _rows() >= UNREACHED.keys()


def _rows() -> set[tuple[str, str]]:
    rows = {("controller", row[0]) for row in segment.TRANSITIONS}
    rows |= {("replica", row[0]) for row in replica.TRANSITIONS}
    for state, event, _, following in breaker.TRANSITIONS:
        name, _, rest = following.partition(", ")
        said = f"{name} {rest}" if rest in ("admitted", "refused") else name
        rows.add(("breaker", f"{state} {event}: {said}"))
    rows |= {("fetch", row) for row in ("Begin: Look", "Waited: Look")}
    asks = ("FromStore", "FromPeer", "Wait", "GiveUp")
    rows |= {("fetch", f"{event}: {effect}") for event in ("Looked", "Failed") for effect in asks}
    rows |= {("repair", order.__name__) for order in typing.get_args(Order)}
    return rows | {("liveness", order.__name__) for order in (Place, Reset)}


def test_the_document_names_every_ablation() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for ablation in ABLATIONS:
        assert f"| {ablation.name} |" in text


def test_the_command_runs_one_world_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(0, 1, "", "", as_json=False) == 0
    told = capsys.readouterr().out
    assert "world epochs: 1 seeds" in told
    assert "world completion: 1 seeds" in told
    assert "world upsert: 1 seeds" in told
    assert command(0, 2, "completion", "", as_json=True) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["worlds"], said["seeds"], said["violations"]) == (["completion"], 2, 0)
    with pytest.raises(InvalidConfig, match="expected one of epochs, completion, upsert"):
        command(0, 1, "moon", "", as_json=False)
    assert command(0, 1, "", "peer-says-404", as_json=False) == 0
    assert "world completion: 1 seeds" in capsys.readouterr().out
    with pytest.raises(InvalidConfig, match="expected one of upload-fails, "):
        command(0, 1, "", "nothing", as_json=False)
    with pytest.raises(InvalidConfig, match="expected --world completion, found epochs"):
        command(0, 1, "epochs", "upload-fails", as_json=False)
