# SPDX-License-Identifier: Apache-2.0
"""Spark's checkpoint files, read and repaired; what is broken counts as lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cremant.epoch.protocol import CheckpointState, PlannedBatch
from cremant.model.errors import InvariantViolation
from cremant.pipeline.checkpoint import adopt_checkpoint, inspect_checkpoint, read_plan, remove_old_checkpoints
from cremant.pipeline.plan import EpochPlan, PlannedGap, PlannedRange

METADATA = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": 1, "conf": {}})


def plan(first: int, end: int, gap: int = 0) -> EpochPlan:
    return EpochPlan(
        config_version=2, topic_incarnation="abc", at_ms=5, partitions=(PlannedRange(first, end, end),),
        gaps=(PlannedGap(0, first - gap, first),) if gap else (),
    )  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Batches 0 and 1 committed, 2 planned."""
    tmp_path = tmp_path / "generation-1"
    (tmp_path / "offsets").mkdir(parents=True)
    (tmp_path / "commits").mkdir()
    (tmp_path / "metadata").write_text('{"id":"x"}')
    for batch, planned in enumerate((plan(0, 10), plan(12, 20, gap=2), plan(20, 30))):
        (tmp_path / "offsets" / str(batch)).write_text(f"v1\n{METADATA}\n{json.dumps(planned.to_offset())}")
        (tmp_path / "offsets" / f".{batch}.crc").write_text("x")
    for batch in range(2):
        (tmp_path / "commits" / str(batch)).write_text('v1\n{"nextBatchWatermarkMs":0}')
    return tmp_path


def test_plans_and_commits_are_read(directory: Path) -> None:
    assert inspect_checkpoint(directory) == CheckpointState(
        plans=(
            PlannedBatch(batch_id=0, start=(0,), end=(10,), config_version=2),
            PlannedBatch(batch_id=1, start=(10,), end=(20,), config_version=2),
            PlannedBatch(batch_id=2, start=(20,), end=(30,), config_version=2),
        ),
        committed=1,
    )


def test_a_directory_that_is_not_there_or_has_no_metadata_is_lost(directory: Path) -> None:
    assert inspect_checkpoint(directory / "other") is None
    (directory / "metadata").unlink()
    assert inspect_checkpoint(directory) is None


@pytest.mark.parametrize("text", ["", "v1\n{}", "v1\n{}\n{torn", 'v1\n{}\n{"start": [1]}', "v1\n{}\n{}\n{}"])
def test_a_plan_that_cannot_be_read_makes_the_checkpoint_a_lost_one(directory: Path, text: str) -> None:
    (directory / "offsets" / "2").write_text(text)
    assert inspect_checkpoint(directory) is None
    with pytest.raises(InvariantViolation, match="not a plan of ours"):
        read_plan(directory, 2)


def test_a_commit_without_its_plan_makes_the_checkpoint_a_lost_one(directory: Path) -> None:
    (directory / "commits" / "7").write_text("v1\n{}")
    assert inspect_checkpoint(directory) is None


def test_an_adopted_checkpoint_lacks_what_follows_a_batch(directory: Path, tmp_path: Path) -> None:
    """Of three batches the first counts: its commit, its plan and the one after, and the state that it left."""
    shard = directory / "state" / "0" / "1"
    (shard / "SSTs").mkdir(parents=True)
    versions = ["1.changelog", ".1.changelog.crc", "1_ab12.zip", "2.changelog", "2_cd34.zip", ".3.changelog.77.tmp"]
    for name in [*versions, "SSTs/000007-ab12.sst", "_metadata"]:
        (shard / name).write_text(name)
    target = tmp_path / "generation-2"
    adopt_checkpoint(directory, target, commits_above=0, plans_above=1)
    state = inspect_checkpoint(target)
    assert state is not None
    assert [each.batch_id for each in state.plans] == [0, 1]
    assert state.committed == 0
    assert not (target / "offsets" / ".2.crc").exists()
    kept = sorted(path.relative_to(target / "state" / "0" / "1").as_posix() for path in target.rglob("state/0/1/**/*"))
    assert kept == [".1.changelog.crc", "1.changelog", "1_ab12.zip", "SSTs", "SSTs/000007-ab12.sst", "_metadata"]
    assert inspect_checkpoint(directory) is not None, "the source is as it was"


def test_what_a_former_owner_writes_later_does_not_reach_the_adopted_one(directory: Path, tmp_path: Path) -> None:
    target = tmp_path / "generation-2"
    adopt_checkpoint(directory, target, commits_above=1, plans_above=2)
    aside = directory / "commits" / ".2.tmp"
    aside.write_text("v1\n{}")
    aside.replace(directory / "commits" / "2")
    state = inspect_checkpoint(target)
    assert state is not None
    assert state.committed == 1


def test_directories_of_later_generations_are_never_removed(tmp_path: Path) -> None:
    for name in ("generation-8", "generation-9", "generation-10", "left over"):
        (tmp_path / name).mkdir()
    remove_old_checkpoints(tmp_path, "generation-9")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["generation-10", "generation-9"]
