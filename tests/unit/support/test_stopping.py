# SPDX-License-Identifier: Apache-2.0
"""Processes are stopped outside of appends, with all below them, and always go on."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from stopping import stopped

#: A child holds the lock half of the time; both say that they go on.
PROGRAM = """
import fcntl, os, sys, time
is_child = not os.fork()
with open(sys.argv[1], "ab") as lock, open(sys.argv[2] + (".child" if is_child else ".parent"), "ab", 0) as beats:
    while True:
        if is_child:
            fcntl.flock(lock, fcntl.LOCK_EX)
            time.sleep(0.02)
            fcntl.flock(lock, fcntl.LOCK_UN)
        beats.write(b".")
        time.sleep(0.02)
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "log" / "topic").mkdir(parents=True)
    lock = str(tmp_path / "log" / "topic" / "lock")
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, lock, str(tmp_path / "beats")], start_new_session=True)
    try:
        wait_for_beats(tmp_path, [0, 0])
        yield process
    finally:
        subprocess.run(["kill", "-KILL", "--", f"-{process.pid}"], check=True)
        process.wait(20)


def beats(directory: Path) -> list[int]:
    files = [directory / f"beats.{name}" for name in ("parent", "child")]
    return [file.stat().st_size if file.exists() else 0 for file in files]


def wait_for_beats(directory: Path, than: list[int]) -> None:
    until = time.monotonic() + 60
    while not all(now > then for now, then in zip(beats(directory), than, strict=True)):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_what_is_stopped_holds_no_lock_and_goes_on(tmp_path: Path, writer: subprocess.Popen[bytes]) -> None:
    for _ in range(5):
        with stopped(writer.pid, tmp_path / "log") as whole:
            assert len(whole.pids) == 2
            with (tmp_path / "log" / "topic" / "lock").open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            before = beats(tmp_path)
            time.sleep(0.05)
            assert beats(tmp_path) == before
        wait_for_beats(tmp_path, before)


def test_it_goes_on_when_the_block_fails(tmp_path: Path, writer: subprocess.Popen[bytes]) -> None:
    with pytest.raises(RuntimeError), stopped(writer.pid, tmp_path / "log"):
        raise RuntimeError
    wait_for_beats(tmp_path, beats(tmp_path))


def test_who_never_lets_go_is_told_and_goes_on(
    tmp_path: Path, writer: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stopping.DEADLINE_S", 0.2)
    monkeypatch.setattr("stopping._holders", lambda log_dir: {writer.pid})
    with pytest.raises(AssertionError, match="never stood still without locks"), stopped(writer.pid, tmp_path / "log"):
        pass
    wait_for_beats(tmp_path, beats(tmp_path))
