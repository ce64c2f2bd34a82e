# SPDX-License-Identifier: Apache-2.0
"""The supervisor with real, tiny child processes: deaths, restarts, stops, and the lock of the data directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cremant.cli.child import Child, Ended, last_log_lines
from cremant.cli.find import ClusterFile, read_cluster_file
from cremant.cli.preflight import DirectoryLock, check_port, free_port
from cremant.cli.supervisor import RoleSpec, Supervisor, restart_delay_ms
from cremant.log.embedded import EmbeddedLog
from cremant.model.errors import Conflict, InvalidConfig, NoResource
from cremant.model.limits import BACKOFF_MAX_MS

CLUSTER = ClusterFile(controller="http://x", broker="http://y", log_dir="/nowhere", supervisor_pid=1)


def feed(tmp_path: Path) -> tuple[str, ...]:
    """The cheapest role there is: the quickstart's feed."""
    if not (tmp_path / "log").exists():
        log = EmbeddedLog(tmp_path / "log")
        log.create_topic("t", 1)
        log.close()
    return ("feed", "t", "--log-dir", str(tmp_path / "log"), "--rate", "1")


def wait_until_it_runs(tmp_path: Path) -> None:
    """Its first log line means that its signal handlers are in place."""
    path = tmp_path / "feed" / "log.jsonl"
    until = time.monotonic() + 20
    while not (path.exists() and "feeding" in path.read_text(encoding="utf-8")):
        assert time.monotonic() < until, path.read_text(encoding="utf-8")
        time.sleep(0.05)


def test_the_first_restart_is_at_once_and_delays_grow_to_a_bound() -> None:
    delays = [restart_delay_ms(n) for n in range(1, 40)]
    assert delays[:4] == [0, 250, 500, 1000]
    assert delays == sorted(delays)
    assert delays[-1] == BACKOFF_MAX_MS


def test_a_killed_role_comes_back_as_another_process_and_is_published(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, [RoleSpec("feed", feed(tmp_path), "", 0)], cluster=CLUSTER)
    supervisor.start()
    try:
        first = supervisor.pids()["feed"]
        os.kill(first, signal.SIGKILL)
        assert supervisor.run_until(lambda: supervisor.pids()["feed"] not in (0, first), deadline_ms=2_000)
        published = read_cluster_file(tmp_path)
        assert published is not None
        assert published.roles["feed"].pid == supervisor.pids()["feed"]
        wait_until_it_runs(tmp_path)
    finally:
        assert supervisor.stop() == []


def test_a_role_that_ignores_sigterm_is_killed_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cremant.cli.supervisor.STOP_DEADLINE_MS", 300)
    supervisor = Supervisor(tmp_path, [RoleSpec("feed", feed(tmp_path), "", 0)], cluster=CLUSTER)
    supervisor.start()
    pid = supervisor.pids()["feed"]
    wait_until_it_runs(tmp_path)
    os.kill(pid, signal.SIGSTOP)
    assert supervisor.stop() == ["feed"]
    assert not Path(f"/proc/{pid}").exists()


def test_a_role_that_cannot_start_fails_the_start_with_its_log(tmp_path: Path) -> None:
    role = RoleSpec("server-1", ("start", "server", "--set", "nonsense=1"), "http://127.0.0.1:1", 0)
    supervisor = Supervisor(tmp_path, [role], cluster=CLUSTER)
    supervisor.start()
    try:
        with pytest.raises(NoResource, match="server-1 does not start"):
            supervisor.run_until(lambda: not supervisor.unhealthy(), deadline_ms=30_000)
    finally:
        supervisor.stop()
    assert "nonsense" in " ".join(last_log_lines(tmp_path / "server-1", 5))


def test_a_role_dies_with_its_supervisor_even_if_that_is_killed(tmp_path: Path) -> None:
    arguments = feed(tmp_path)
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom cremant.cli.child import Child\n"
        f"child = Child({arguments!r}, Path({str(tmp_path / 'feed')!r}))\n"
        "print(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_until_it_runs(tmp_path)
    parent.kill()
    parent.wait(10)
    until = time.monotonic() + 5
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < until, "the role outlived its supervisor"
        time.sleep(0.05)
    parent.stdout.close()


def test_how_a_child_ended_is_told_in_words(tmp_path: Path) -> None:
    child = Child(("--no-such-option",), tmp_path)
    until = time.monotonic() + 20
    while (ended := child.ended()) is None:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert str(ended) == "exit status 2"
    assert str(Ended(-9)) == "killed by SIGKILL"


def test_log_lines_for_people_have_no_stack_traces(tmp_path: Path) -> None:
    record = {"at": "2026", "level": "error", "event": "port in use", "trace": "Traceback ..."}
    lines = [
        "Traceback (most recent call last):",
        '  File "x.py", line 1',
        "ValueError: no",
        json.dumps(record),
        "\tat java.X",
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert last_log_lines(tmp_path, 5) == ["ValueError: no", "error port in use"]


def test_one_data_directory_has_one_supervisor_at_a_time(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    with pytest.raises(Conflict, match=str(os.getpid())):
        DirectoryLock(tmp_path)
    lock.release()
    DirectoryLock(tmp_path).release()


@pytest.mark.parametrize("port", [-1, 65_536, 70_000])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(InvalidConfig, match=f"--broker-port {port}: expected 0 to 65535"):
        check_port("127.0.0.1", port, "--broker-port")


def test_free_ports_differ_and_can_be_listened_on() -> None:
    taken: set[int] = set()
    ports = [free_port("127.0.0.1", taken) for _ in range(5)]
    assert len(set(ports)) == 5
    for port in ports:
        check_port("127.0.0.1", port, "--x")
