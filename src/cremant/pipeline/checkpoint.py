# SPDX-License-Identifier: Apache-2.0
"""Reads and copies a Spark checkpoint of ours: which batches were planned, which committed (start protocol, step 7).

Spark keeps `offsets/<batch>` (written before a batch runs: version line, metadata line, one line per source) and
`commits/<batch>` (after it). One source per query, so the third line is the `EpochPlan`. Files are written aside and
renamed, so a file that is there is whole. What does not parse makes the checkpoint a lost one, never an error.
State lies in `state/<operator>/<partition>/<version>...`; batch b leaves version b + 1.

Each generation has its own directory, a copy of the one before by hard links (files are never changed in place): a
pipeline that was believed dead writes for a while, and a shared directory would let it put its state beside ours.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import msgspec

from cremant.epoch.protocol import CheckpointState, PlannedBatch
from cremant.model.errors import InvariantViolation
from cremant.pipeline.plan import EpochPlan

#: Newest plans that are read back; the start protocol needs two.
PLANS_READ = 8


def inspect_checkpoint(directory: Path) -> CheckpointState | None:
    """What the checkpoint holds; None if there is none or it cannot be read (it is lost then)."""
    planned, committed = _batches(directory / "offsets"), _batches(directory / "commits")
    if not (directory / "metadata").exists() or (committed and (not planned or committed[-1] > planned[-1])):
        return None
    try:
        plans = tuple(planned_batch(batch, read_plan(directory, batch)) for batch in planned[-PLANS_READ:])
    except (OSError, InvariantViolation):
        return None
    return CheckpointState(plans=plans, committed=committed[-1] if committed else None)


def planned_batch(batch: int, plan: EpochPlan) -> PlannedBatch:
    """A plan as the epoch protocol sees it."""
    return PlannedBatch(
        batch_id=batch, start=plan.starts, end=plan.ends, config_version=plan.config_version,
        seed=plan.seed.epoch if plan.seed is not None else None,
    )  # fmt: skip


def read_plan(directory: Path, batch: int) -> EpochPlan:
    """The plan of a batch. Raises OSError (not there) or InvariantViolation (not ours, or torn)."""
    path = directory / "offsets" / str(batch)
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        if len(lines) != 3:
            raise ValueError(f"expected 3 lines, found {len(lines)}")
        return EpochPlan.from_offset(msgspec.json.decode(lines[2]))
    except (ValueError, msgspec.MsgspecError) as error:
        raise InvariantViolation("checkpoint", f"{path} is not a plan of ours: {error}") from error


#: `7`, `.7.crc`, `7.changelog`, `7_<id>.zip`.
_NUMBERED = re.compile(r"\.?(\d+)(?:$|[._])")


def adopt_checkpoint(source: Path, target: Path, *, commits_above: int, plans_above: int) -> None:
    """Copies a checkpoint without commits and plans of batches above those, which Spark runs again as planned or plans
    anew, and without the state that followed them: nothing of an abandoned run can be taken for ours. What `source`
    loses meanwhile is not part of the copy: only files that nobody needs any more are deleted there."""
    shutil.rmtree(target, ignore_errors=True)
    highest = {"commits": commits_above, "offsets": plans_above, "state": commits_above + 1}
    for directory, _, names in os.walk(source):
        inside = Path(directory).relative_to(source)
        bound = highest.get(inside.parts[0]) if inside.parts else None
        (target / inside).mkdir(parents=True, exist_ok=True)
        for name in names:
            number = _NUMBERED.match(name)
            if name.endswith(".tmp") or (bound is not None and number is not None and int(number[1]) > bound):
                continue
            _link(Path(directory) / name, target / inside / name)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        return
    except OSError:  # a file system without hard links
        try:
            shutil.copy2(source, target)
        except FileNotFoundError:
            return


def remove_old_checkpoints(parent: Path, keep: str) -> None:
    """Drops the checkpoint directories of generations before that of `keep`. Those of later ones stay: who comes late
    may not know that it was replaced."""
    if not parent.is_dir():
        return
    for candidate in parent.iterdir():
        if _generation(candidate.name) < _generation(keep):
            shutil.rmtree(candidate, ignore_errors=True)


def _generation(name: str) -> int:
    number = name.removeprefix("generation-")
    return int(number) if number.isdigit() else 0


def _batches(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())
