# SPDX-License-Identifier: Apache-2.0
"""What stands in the way of a start is said before anything starts, with the fix."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from bench.cluster import LocalCluster, command


def up(data_dir: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    free = [f"--{role}-port=0" for role in ("controller", "broker", "server", "pipeline")]
    return subprocess.run(
        command("up", "--data-dir", str(data_dir), *free, *options),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def assert_refused(done: subprocess.CompletedProcess[str], *telling: str) -> None:
    assert done.returncode in (1, 2), done
    for word in telling:
        assert word in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_a_port_in_use_is_named_with_the_option_that_changes_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        done = up(tmp_path / "data", f"--broker-port={port}")
    assert_refused(done, str(port), "in use", "--broker-port")
    assert not (tmp_path / "data" / "controller").exists()


def test_no_java_is_said_before_anything_starts(tmp_path: Path) -> None:
    done = up(tmp_path / "data", JAVA_HOME=str(tmp_path / "nowhere"))
    assert_refused(done, "Java", "17", "JAVA_HOME")


def test_an_old_java_is_refused(tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n", encoding="utf-8")
    java.chmod(0o755)
    assert_refused(up(tmp_path / "data", JAVA_HOME=str(tmp_path)), "11.0.2", "17")


def test_other_addresses_than_loopback_need_insecure(tmp_path: Path) -> None:
    assert_refused(up(tmp_path / "data", "--host", "0.0.0.0"), "0.0.0.0", "--insecure")


def test_a_setting_of_the_wrong_type_names_where_it_came_from(tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text('query_threads = "many"\n', encoding="utf-8")
    assert_refused(up(tmp_path / "data", "--config", str(settings)), "query_threads", "settings.toml", "many")
    settings.write_text("quary_threads = 2\n", encoding="utf-8")
    assert_refused(up(tmp_path / "data", "--config", str(settings)), "quary_threads", "settings.toml")


def test_an_unwritable_data_directory_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    assert_refused(up(file / "data"), str(file / "data"), "--data-dir")


def test_commands_without_a_cluster_say_how_to_start_one(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    for arguments in (["status"], ["sql", "SELECT 1"], ["topic", "list"]):
        done = subprocess.run(
            command(*arguments, "--controller", url), capture_output=True, text=True, timeout=60, check=False
        )
        assert_refused(done, url, "cremant up")


def test_two_clusters_cannot_share_a_data_directory_and_no_role_outlives_its_supervisor(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "data", servers=1) as cluster:
        refused = up(tmp_path / "data")
        assert_refused(refused, "in use by another cluster", str(cluster.ready["pid"]), "--data-dir")
        pids = cluster.pids()
        assert all(pids.values())
        os.kill(cluster.ready["pid"], signal.SIGKILL)
        until = time.monotonic() + 5
        while alive := [name for name, pid in pids.items() if _runs(pid)]:
            if time.monotonic() > until:
                pytest.fail(f"still running 5 s after their supervisor was killed: {alive}")
            time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
