# SPDX-License-Identifier: Apache-2.0
"""Each safeguard taken away, in all worlds, and the seeds that notice.

    python -m cremant.sim.ablations [SEEDS [WORLD]]

runs every ablation over that many seeds, writes the table into `docs/simulation.md` and the catching seeds into
`tests/sim/ablations.json`, which the tests replay. A simulator that cannot see a missing safeguard proves nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from cremant.epoch import close, start
from cremant.epoch.safeguards import Safeguards
from cremant.sim.ablation import Ablation, Without, search, table
from cremant.sim.completion import ablations as completion
from cremant.sim.completion.scenarios import scenario_table
from cremant.sim.engine import Outcome
from cremant.sim.run import simulate
from cremant.sim.upsert import ablations as upsert

REPOSITORY = Path(__file__).parents[3]
DOCUMENT = REPOSITORY / "docs" / "simulation.md"
CAUGHT = REPOSITORY / "tests" / "sim" / "ablations.json"
#: Catching seeds that are kept per ablation.
KEPT = 3


ABLATIONS = (
    Ablation("partition 0's mark is not read back", ("read_back",)),
    Ablation("other partitions are fenced before partition 0", ("first_partition_fenced_first",)),
    Ablation("the base is taken before the scan", ("base_after_scan",)),
    Ablation("a mark rolled forward names the new generation", ("blocks_generation",)),
    Ablation("the checkpoint is not compared", ("checkpoint_compared",)),
    Ablation(
        "a batch may begin anywhere", ("plan_checked",), behind="the comparison of the checkpoint, which comes first"
    ),
    Ablation("the checkpoint is not compared, a batch may begin anywhere", ("checkpoint_compared", "plan_checked")),
    Ablation("config is not pinned to the plan", ("config_pinned",)),
    Ablation("a new partition enters without a new start (E-7)", ("growth_fenced",)),
    Ablation("records of a fenced generation are believed (E-1)", ("fenced_ignored",)),
    Ablation("rows are counted, duplicates included (E-4)", ("distinct_counts",)),
    Ablation("a stored position does not say its generation", ("position_generation",)),
    Ablation("upsert rows are taken before the mark (E-6)", ("taken_at_mark",)),
)


def simulate_without(seed: int, off: tuple[str, ...]) -> Outcome:
    return simulate(seed, Safeguards(**dict.fromkeys(off, False)))


class World(msgspec.Struct, frozen=True):
    """`section`: of the document."""

    name: str
    section: str
    ablations: tuple[Ablation, ...]
    simulate_without: Without


WORLDS = (
    World("epochs", "ablations", ABLATIONS, simulate_without),
    World("upsert", "ablations of upsert", upsert.ABLATIONS, upsert.simulate_without),
    World("completion", "ablations of completion", completion.ABLATIONS, completion.simulate_without),
)


def replaced(text: str, section: str, content: str) -> str:
    """The document with what stands between two markers replaced."""
    begin, end = f"<!-- {section} -->\n", f"\n<!-- end of {section} -->"
    head, rest = text.split(begin, 1)
    return head + begin + content + end + rest.split(end, 1)[1]


def tables_of_code(text: str) -> str:
    text = replaced(text, "scenarios", scenario_table())
    text = replaced(text, "transitions of start", start.transition_table())
    return replaced(text, "transitions of close", close.transition_table())


def main(seeds: int, names: list[str]) -> None:
    kept = json.loads(CAUGHT.read_text())
    for world in WORLDS:
        if names and world.name not in names:
            continue
        found = []
        for ablation in world.ablations:
            caught = search(ablation, world.simulate_without, seeds)
            sys.stdout.write(f"{ablation.name}: {len(caught.seeds)} of {seeds}, {caught.rules}\n")
            sys.stdout.flush()
            found.append(caught)
        kept[world.name] = {caught.ablation.name: list(caught.seeds[:KEPT]) for caught in found}
        text = replaced(DOCUMENT.read_text(encoding="utf-8"), world.section, table(found, seeds))
        DOCUMENT.write_text(text, encoding="utf-8")
    DOCUMENT.write_text(tables_of_code(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    CAUGHT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200, sys.argv[2:])
