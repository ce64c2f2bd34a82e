# SPDX-License-Identifier: Apache-2.0
"""Each safeguard of segment completion taken away (run by `cremant.sim.ablations`)."""

from __future__ import annotations

from cremant.completion.safeguards import Safeguards
from cremant.sim.ablation import Ablation
from cremant.sim.completion.run import simulate
from cremant.sim.completion.safeguards import ALL, WorldSafeguards
from cremant.sim.completion.scenarios import scenario_of
from cremant.sim.engine import Outcome

ABLATIONS = (
    Ablation("a commit counts with any token", ("token_checked",)),
    Ablation("who takes over decides the end anew (I-1)", ("cut_fixed",)),
    Ablation("any upload is recorded", ("upload_checked",)),
    Ablation("what was built is installed unseen (I-3)", ("content_compared",)),
    Ablation("a commit does not wait for the store that is required", ("upload_awaited",)),
    Ablation("the epoch log is trimmed below segments that are not safe (I-6)", ("unsafe_kept",)),
    Ablation("answers are given before they are durable", ("persisted_first",)),
    Ablation("the metadata store writes without comparing", ("compared_and_set",)),
    Ablation("names of objects do not say attempt and content", ("names_say_content",)),
    Ablation("what was fetched is installed unseen (I-3)", ("fetch_verified",)),
    Ablation("the epoch log is trimmed below single copies (I-6)", ("two_copies",)),
    Ablation("a replica that is away is given up before others have copies (I-6)", ("others_verified",)),
    Ablation(
        "a copy that is about to be deleted is counted (I-6)",
        ("leaving_uncounted",),
        behind="replicas fetch from whoever serves the segment, before it is deleted",
    ),
    Ablation("a holder counts before it serves the segment again (I-6)", ("serving_counted",)),
    Ablation("a move at once gives up the only copy (I-6)", ("last_copy_kept",)),
    Ablation("a move gives old replicas up before the new ones are able", ("break_waits",)),
    Ablation("repair of consumption does not run", ("consumption_repaired",)),
    Ablation("repair of copies does not run", ("copies_repaired",)),
)


#: Safeguards whose harm needs several rare things at once, and the scenario in which it is looked for.
LOOKED_FOR_IN = {
    "unsafe_kept": "single-copies-lost",
    "two_copies": "single-copies-lost",
    "upload_checked": "upload-of-other-rows",
    "names_say_content": "upload-of-a-stale-committer-lands-late",
    "others_verified": "all-holders-stay-away",
    "copies_repaired": "policy-changes",
    "consumption_repaired": "reader-falls-behind-the-log",
    "leaving_uncounted": "copy-that-leaves-is-none",
    "serving_counted": "holder-comes-back-empty",
    "last_copy_kept": "last-copy-is-moved",
}


def simulate_without(seed: int, off: tuple[str, ...]) -> Outcome:
    of_machines = {name: False for name in off if name in Safeguards.__struct_fields__}
    of_world = {name: False for name in off if name not in of_machines}
    return _simulate(seed, off, WorldSafeguards(machines=Safeguards(**of_machines), **of_world))


def simulate_with_all(seed: int, off: tuple[str, ...]) -> Outcome:
    """The world in which these safeguards are looked for, with them."""
    return _simulate(seed, off, ALL)


def _simulate(seed: int, off: tuple[str, ...], guards: WorldSafeguards) -> Outcome:
    places = [LOOKED_FOR_IN[name] for name in off if name in LOOKED_FOR_IN]
    return simulate(seed, guards, scenario=scenario_of(places[0]) if places else None)
