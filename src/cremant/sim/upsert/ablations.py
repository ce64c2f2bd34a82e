# SPDX-License-Identifier: Apache-2.0
"""Each safeguard of upsert taken away (run by `cremant.sim.ablations`)."""

from __future__ import annotations

from cremant.epoch.safeguards import Safeguards as EpochSafeguards
from cremant.sim.ablation import Ablation
from cremant.sim.engine import Outcome
from cremant.sim.upsert.options import Safeguards
from cremant.sim.upsert.run import simulate

ABLATIONS = (
    Ablation("candidates are compared by arrival", ("order_total",)),
    Ablation(
        "a batch begins with the newest state, committed or not",
        ("state_follows_commits",),
        behind="adoption, which drops the others; one seed in hundreds notices",
    ),
    Ablation(
        "adoption keeps state that nobody committed",
        ("state_dropped",),
        behind="batches, which begin with the state of the batch before them",
    ),
    Ablation("both of these", ("state_follows_commits", "state_dropped")),
    Ablation("a fresh checkpoint begins with an empty state", ("state_rebuilt",)),
    Ablation("a seed leaves tombstones out", ("tombstones_rebuilt",)),
    Ablation("a seed takes what it gets of a table", ("seed_whole",)),
    Ablation("a seed leaves out what expired, and does not DELETE it", ("expired_deleted",)),
    Ablation("a batch is replayed without the messages that are gone", ("replay_whole",)),
    Ablation("rows are taken before the mark (E-6)", ("taken_at_mark",)),
    Ablation("rows and updates are counted, duplicates included (E-4)", ("distinct_counts",)),
    Ablation("a mark rolled forward names the new generation", ("blocks_generation",)),
    Ablation("records of a fenced generation are believed (E-1)", ("fenced_ignored",)),
    Ablation(
        "a server reads on from its open segment, wherever its snapshots are",
        ("snapshot_position",),
        behind="versions that lack updates, which are given up and fetched",
    ),
    Ablation("... and what is fetched is served before it has caught up", ("snapshot_position", "fetched_caught_up")),
    Ablation("a fetched segment is served before it has caught up", ("fetched_caught_up",)),
    Ablation("the epoch log is trimmed below what versions are brought up to date with", ("log_kept",)),
    Ablation(
        "the epoch log is trimmed below segments that are not safe",
        ("unsafe_kept",),
        behind="what their versions need, which is as much",
    ),
    Ablation("the epoch log is trimmed below both", ("log_kept", "unsafe_kept")),
    Ablation("the epoch log is trimmed below single copies", ("two_copies",)),
    Ablation("a server answers at L before it has closed L", ("cut_awaited",)),
    Ablation(
        "L is the highest epoch that any server has closed",
        ("cut_lowest",),
        behind="servers, who wait until L is closed",
    ),
    Ablation("L is the highest, and servers do not wait", ("cut_lowest", "cut_awaited")),
    Ablation("a second attempt asks at what is closed by then", ("cut_kept",)),
    Ablation("a tail answers from its own start", ("tail_from_offset",)),
    Ablation("a broker answers below what it has answered (U-3)", ("floor_kept",)),
    Ablation(
        "a segment is compacted at an epoch that a replica has not closed",
        ("compacted_at_mark",),
        behind="servers, who compact what they have closed and refuse earlier epochs",
    ),
    Ablation("... and a server answers below the epoch of its compaction", ("compacted_at_mark", "horizon_refused")),
    Ablation("compaction drops tombstones", ("tombstones_kept",)),
    Ablation("a server answers below the epoch at which it compacted", ("horizon_refused",)),
    Ablation("a table goes back below the epoch of a compaction", ("compacted_kept",)),
    Ablation("a segment ends at an epoch that is to be taken back", ("cut_not_void",)),
    Ablation("a server answers at an epoch that was taken back", ("void_refused",)),
    Ablation("an answer needs the first partition only (E-7)", ("growth_counted",)),
    Ablation("a broker answers without partitions that it has not heard of (E-7)", ("partitions_known",)),
    Ablation("a row is shown up to its validUntil, inclusive", ("half_open",)),
)


def simulate_without(seed: int, off: tuple[str, ...]) -> Outcome:
    of_epochs = {name: False for name in off if name in EpochSafeguards.__struct_fields__}
    of_world = {name: False for name in off if name not in of_epochs}
    return simulate(seed, EpochSafeguards(**of_epochs), Safeguards(**of_world))
