# SPDX-License-Identifier: Apache-2.0
"""What a run's processes tell each other through files."""

from __future__ import annotations

from pathlib import Path

import pytest

from cremant.model.errors import Corrupt, InvalidConfig, InvariantViolation, NotFound, Unavailable
from cremant.pipeline.plan import Wanted
from cremant.pipeline.spec import (
    RunSpec,
    WantedFile,
    read_config,
    remove_old_files,
    take_stopped,
    write_durably,
    write_stopped,
    write_wanted,
)


def spec(**changes: object) -> RunSpec:
    values: dict[str, object] = {
        "run_dir": "/r", "log_settings": {"log_dir": "/l"}, "table": "t", "incarnation": "i", "topic": "s",
        "topic_incarnation": "x", "stream_version": 1, "epoch_topic": "e", "dead_letter_topic": "d", "generation": 2,
        "base": 7, "starts": (0,), "tasks_max": 2, **changes,
    }  # fmt: skip
    return RunSpec(**values)  # type: ignore[arg-type]


def test_the_replayed_batch_keeps_its_epoch_and_all_others_count_from_the_base() -> None:
    run = spec(replay_batch=4, replay_epoch=5)
    assert [run.epoch_of(batch) for batch in (4, 5, 6)] == [5, 12, 13]
    assert RunSpec.from_json(run.to_json()) == run


def test_the_planner_sees_what_the_driver_wants_when_it_changes(tmp_path: Path) -> None:
    run = spec(run_dir=str(tmp_path))
    file = WantedFile(run)
    for version in range(1, 5):
        write_wanted(run, Wanted(config_version=version, starts=(0,), max_rows=5))
        assert file.read().config_version == version


@pytest.mark.parametrize(
    "error", [InvalidConfig("wrong", hint="right it"), InvariantViolation("E-8", "other topic"), Corrupt("torn")]
)
def test_the_reason_of_a_failure_reaches_the_driver_as_the_same_error(tmp_path: Path, error: Exception) -> None:
    assert isinstance(error, InvalidConfig | InvariantViolation | Corrupt)
    run = spec(run_dir=str(tmp_path))
    write_stopped(run, error)
    write_stopped(run, InvalidConfig("a later one"))
    write_stopped(run, Unavailable("a passing one"))
    found = take_stopped(run)
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert take_stopped(run) is None


def test_of_passing_reasons_the_newest_is_told_and_a_final_one_counts_more(tmp_path: Path) -> None:
    run = spec(run_dir=str(tmp_path))
    write_stopped(run, Unavailable("no broker answers", hint="is Kafka running?"))
    write_stopped(run, NotFound("gone"))
    assert str(take_stopped(run)) == "gone"
    write_stopped(run, Unavailable("no broker answers"))
    write_stopped(run, InvalidConfig("wrong"))
    assert isinstance(take_stopped(run), InvalidConfig)


def test_an_orphan_of_an_earlier_generation_disturbs_nobody(tmp_path: Path) -> None:
    """It may even wish that its query holds."""
    old, new = spec(run_dir=str(tmp_path)), spec(run_dir=str(tmp_path), generation=3)
    write_wanted(new, Wanted(config_version=1, starts=(0,), max_rows=5))
    write_wanted(old, Wanted(config_version=1, starts=(0,), max_rows=5, hold=True))
    write_stopped(old, InvalidConfig("an old story"))
    assert not WantedFile(new).read().hold
    assert take_stopped(new) is None
    remove_old_files(new)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["wanted-3.json"]


def test_a_config_version_that_is_gone_is_an_error_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(Corrupt, match="config version 3 of a planned epoch"):
        read_config(tmp_path, 3)


def test_what_is_written_durably_is_for_this_user_alone(tmp_path: Path) -> None:
    """Configs may hold secrets."""
    path = tmp_path / "config-1.json"
    write_durably(path, b"one")
    write_durably(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == [path]
