# SPDX-License-Identifier: Apache-2.0
"""Reads and repairs a Spark checkpoint of ours: which batches were planned, which committed (start protocol, step 7).

Spark keeps `offsets/<batch>` (written before a batch runs: version line, metadata line, one line per source) and
`commits/<batch>` (after it). One source per query, so the third line is the `EpochPlan`. Files are written aside and
renamed, so a file that is there is whole. What does not parse makes the checkpoint a lost one, never an error.
"""

from __future__ import annotations

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
    return PlannedBatch(batch_id=batch, start=plan.starts, end=plan.ends, config_version=plan.config_version)


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


def remove_commits_above(directory: Path, batch: int) -> None:
    """Forgets commits of batches above `batch`; Spark runs them again as planned."""
    _remove_above(directory / "commits", batch)


def remove_plans_above(directory: Path, batch: int) -> None:
    """Forgets plans of batches above `batch`; Spark plans them anew."""
    _remove_above(directory / "offsets", batch)


def remove_old_checkpoints(parent: Path, keep: str) -> None:
    """Drops the checkpoint directories of earlier generations."""
    if not parent.is_dir():
        return
    for candidate in parent.iterdir():
        if candidate.name != keep:
            shutil.rmtree(candidate, ignore_errors=True)


def _remove_above(directory: Path, batch: int) -> None:
    for number in _batches(directory):
        if number > batch:
            (directory / str(number)).unlink()
            (directory / f".{number}.crc").unlink(missing_ok=True)


def _batches(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())
