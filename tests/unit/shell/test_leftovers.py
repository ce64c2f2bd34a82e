# SPDX-License-Identifier: Apache-2.0
"""Temporary directories: held while their process lives, swept when it is gone."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import pytest

from cremant.shell import leftovers
from cremant.shell.leftovers import make_held

HOLDER = """
import sys
from pathlib import Path
from cremant.shell.leftovers import make_held
make_held(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_holds_is_not() -> None:
    directory = leftovers.temporary_path("abc")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert list(leftovers.stale_directories()) == []
        with pytest.raises(FileExistsError, match="another process that lives holds it"):
            make_held(directory)
        assert [path.name for path in directory.iterdir()] == ["held.lock"]
        holder.kill()
        holder.wait(10)
    assert list(leftovers.stale_directories()) == [directory]
    assert leftovers.remove_stale_directories() == [directory]
    assert not directory.exists()


def test_a_sweep_at_any_moment_of_the_making_takes_nothing_away(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = leftovers.temporary_path("making")
    swept: list[list[Path]] = []
    real = fcntl.flock

    def flock(lock: IO[bytes], flags: int) -> None:
        if not swept:
            swept.append([])
            swept[0] = leftovers.remove_stale_directories()
        real(lock, flags)

    monkeypatch.setattr(fcntl, "flock", flock)
    make_held(directory)
    assert swept == [[]]
    assert [path.name for path in directory.iterdir()] == ["held.lock"]
    leftovers.remove_held(directory)


def test_a_directory_that_is_being_made_is_left_alone(tmp_path: Path) -> None:
    young = leftovers.temporary_path("young")
    young.mkdir()
    assert leftovers.remove_stale_directories() == []
    os.utime(young, (1, 1))
    assert leftovers.remove_stale_directories() == [young]


def test_others_directories_are_none_of_our_business(tmp_path: Path) -> None:
    for name in (f"cremant-{os.getuid() + 1}-abc", "somebody-else", "cremant-data"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1, 1))
    assert leftovers.remove_stale_directories() == []


def test_made_again_by_the_same_process_and_removed() -> None:
    directory = leftovers.temporary_path("again")
    leftovers.make_held(directory)
    (directory / "socket").touch()
    leftovers.make_held(directory)
    assert [path.name for path in directory.iterdir()] == ["held.lock"]
    assert oct(directory.stat().st_mode & 0o777) == "0o700"
    leftovers.remove_held(directory)
    assert not directory.exists()
