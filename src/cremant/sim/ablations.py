# SPDX-License-Identifier: Apache-2.0
"""Each safeguard of the epoch protocol taken away, and the seeds that notice.

    python -m cremant.sim.ablations [SEEDS]

runs every ablation over that many seeds, writes the table into `docs/simulation.md` and the catching seeds into
`tests/sim/ablations.json`, which the tests replay. A simulator that cannot see a missing safeguard proves nothing.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import msgspec

from cremant.epoch import close, start
from cremant.epoch.safeguards import Safeguards
from cremant.sim.run import simulate

REPOSITORY = Path(__file__).parents[3]
DOCUMENT = REPOSITORY / "docs" / "simulation.md"
CAUGHT = REPOSITORY / "tests" / "sim" / "ablations.json"
#: Catching seeds that are kept per ablation.
KEPT = 3


class Ablation(msgspec.Struct, frozen=True):
    """`off`: fields of Safeguards. `behind`: what catches it alone, if no seed does (a second line of defence)."""

    name: str
    off: tuple[str, ...]
    behind: str = ""

    @property
    def safeguards(self) -> Safeguards:
        return Safeguards(**dict.fromkeys(self.off, False))


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


class Caught(msgspec.Struct, frozen=True):
    ablation: Ablation
    seeds: tuple[int, ...]
    rules: dict[str, int]


def search(ablation: Ablation, seeds: int) -> Caught:
    """Which of the seeds notice, and by which rule."""
    caught = []
    rules: Counter[str] = Counter()
    for seed in range(seeds):
        outcome = simulate(seed, ablation.safeguards)
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


def replaced(text: str, section: str, content: str) -> str:
    """The document with what stands between two markers replaced."""
    begin, end = f"<!-- {section} -->\n", f"\n<!-- end of {section} -->"
    head, rest = text.split(begin, 1)
    return head + begin + content + end + rest.split(end, 1)[1]


def tables_of_machines(text: str) -> str:
    text = replaced(text, "transitions of start", start.transition_table())
    return replaced(text, "transitions of close", close.transition_table())


def main(seeds: int) -> None:
    found = []
    for ablation in ABLATIONS:
        caught = search(ablation, seeds)
        sys.stdout.write(f"{ablation.name}: {len(caught.seeds)} of {seeds}, {caught.rules}\n")
        sys.stdout.flush()
        found.append(caught)
    text = replaced(DOCUMENT.read_text(encoding="utf-8"), "ablations", table(found, seeds))
    DOCUMENT.write_text(tables_of_machines(text), encoding="utf-8")
    kept = {caught.ablation.name: list(caught.seeds[:KEPT]) for caught in found}
    CAUGHT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
