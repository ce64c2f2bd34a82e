# SPDX-License-Identifier: Apache-2.0
"""Pipeline processes that are killed, stopped and woken: the driver, its JVM, and what they leave behind.

The controller is a real one behind its real HTTP, in this process; pipelines are processes of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pipelines import World, check, wait_for
from stopping import stopped

from cremant.controller.main import make_controller_app
from cremant.shell.app import RunningServer, serve

PROGRAM = """
import sys
from cremant.model.settings import Settings
from cremant.pipeline.main import run_pipeline
run_pipeline(Settings(("test", {
    "data_dir": sys.argv[1], "log_dir": sys.argv[2], "controller_url": sys.argv[3], "spark_master": "local[2]"
})), port=0)
"""


class Process:
    """One pipeline process of a world."""

    def __init__(self, world: World, url: str, name: str) -> None:
        self._directory = world.directory / name
        self._directory.mkdir(exist_ok=True)
        with (self._directory / "stderr.jsonl").open("ab") as errors:
            arguments = [str(self._directory), str(world.directory / "log"), url]
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *arguments], stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        self._process.send_signal(number)

    def wait(self, timeout_s: float = 30) -> int:
        return self._process.wait(timeout_s)

    def children(self) -> list[int]:
        """Every process below this one: the JVM, Python daemons and workers."""
        table = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
        parents = {int(line.split()[0]): int(line.split()[1]) for line in table.splitlines()[1:]}
        below = {self.pid}
        while len(below) < len(below := below | {pid for pid, parent in parents.items() if parent in below}):
            pass
        return sorted(below - {self.pid})

    def log(self) -> str:
        return (self._directory / "stderr.jsonl").read_text()

    def events(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]

    def end(self) -> None:
        if self._process.poll() is None:
            self.kill(signal.SIGCONT)
            self.kill(signal.SIGTERM)
            try:
                self.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()
                self.wait()


@pytest.fixture
def url(world: World) -> Iterator[str]:
    """The world's controller, listening."""
    world.controller.start()
    started: list[str] = []
    handles: list[RunningServer] = []
    ready = threading.Event()

    def on_started(address: str) -> None:
        started.append(address)
        ready.set()

    server = threading.Thread(
        target=lambda: serve(
            make_controller_app(world.controller), "127.0.0.1", 0, insecure=False, on_started=on_started,
            on_handle=handles.append,
        )
    )  # fmt: skip
    server.start()
    assert ready.wait(20)
    yield started[0]
    handles[0].stop()
    server.join(10)
    world.controller.stop()


@contextlib.contextmanager
def pipeline(world: World, url: str, name: str = "pipeline") -> Iterator[Process]:
    process = Process(world, url, name)
    try:
        yield process
    finally:
        process.end()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_pipeline_that_is_killed_in_the_middle_of_an_epoch_loses_and_doubles_nothing(world: World, url: str) -> None:
    """kill -9 of the driver while blocks are being written: its JVM follows, its orphans are fenced."""
    world.add_table()
    produced = 0
    with pipeline(world, url) as first:
        world.produce(range(1_000))
        wait_for(lambda: world.closed_rows() == 1_000, 240)
        produced = 400_000
        world.produce(range(1_000, produced))
        wait_for(lambda: blocks_beyond(world, 1_000))
        below = first.children()
        assert below
        first.kill()
        first.wait()
        killed_s = time.monotonic()
        with pipeline(world, url) as second:
            world.produce(range(produced, produced + 1_000))
            wait_for(lambda: not any(alive(pid) for pid in below), 30, "children of the killed process end")
            print(f"children gone after {time.monotonic() - killed_s:.1f} s")
            wait_for(lambda: world.closed_rows() == produced + 1_000, 240)
            print(f"caught up after {time.monotonic() - killed_s:.1f} s")
            check(world.read(), range(produced + 1_000))
            second.kill(signal.SIGTERM)
            assert second.wait(30) == 0
            assert not any(alive(pid) for pid in second.children())


def blocks_beyond(world: World, rows: int) -> bool:
    return sum(content.row_count for content in world.read()) > rows


def test_a_pipeline_whose_java_dies_ends_itself(world: World, url: str) -> None:
    world.add_table()
    with pipeline(world, url) as process:
        world.produce(range(100))
        wait_for(lambda: world.closed_rows() == 100, 240)
        table = subprocess.run(["ps", "-wweo", "pid,args"], capture_output=True, text=True, check=True).stdout
        below = process.children()
        java = [int(line.split()[0]) for line in table.splitlines()[1:] if "PythonGatewayServer" in line]
        (ours,) = [pid for pid in java if pid in below]
        os.kill(ours, signal.SIGKILL)
        assert process.wait(60) != 0
        assert "the Java process of the pipeline died" in process.log()


def test_an_orphan_that_wakes_up_after_its_successor_took_over_is_fenced(world: World, url: str) -> None:
    """SIGSTOP of driver, JVM and workers; the lease lapses; another pipeline takes over; SIGCONT."""
    world.add_table()
    with pipeline(world, url, "orphan") as orphan:
        world.produce(range(1_000))
        wait_for(lambda: world.closed_rows() == 1_000, 240)
        world.produce(range(1_000, 200_000))
        wait_for(lambda: blocks_beyond(world, 1_000))
        with stopped(orphan.pid, world.directory / "log") as whole, pipeline(world, url, "successor"):
            world.produce(range(200_000, 201_000))
            wait_for(lambda: world.closed_rows() == 201_000, 240)
            whole.go_on()
            wait_for(lambda: any("fenced" in str(event["event"]) for event in orphan.events()), 60, "orphan is fenced")
            world.produce(range(201_000, 202_000))
            wait_for(lambda: world.closed_rows() == 202_000, 240)
            check(world.read(), range(202_000))
