# SPDX-License-Identifier: Apache-2.0
"""What stands in the way of a start is said before anything starts, with the fix."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.cluster import LocalCluster, command, is_alive


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


@pytest.mark.parametrize(
    ("arguments", "telling"),
    [
        (["up", "--servers", "many"], "--servers"),
        (["up", "--servers", "0"], "expected 1 to"),
        (["up", "--set", "query_threads"], "NAME=VALUE"),
        (["up", "--set", "quary_threads=2"], "unknown setting 'quary_threads' from command line"),
        (["up", "--set", "epoch_log=sqlite"], "epoch_log"),
        (["up", "--set", "epoch_log=kafka"], "kafka_brokers"),
        (["up", "--kafka", "here"], "HOST:PORT"),
        (["up", "--kafka", "localhost:1", "--properties", "/no/such/file"], "/no/such/file"),
        (["up", "--config", "/no/such/file"], "/no/such/file"),
        (["start", "nobody"], "'pipeline'"),
        (["sql", "SELECT 1", "--format", "xml"], "'csv'"),
        (["sqll"], "No such command"),
        (["produce", "topic"], "FILE"),
        (["table", "create"], "FILE"),
        (["table", "create", "/no/such/file"], "/no/such/file"),
        (["topic", "create", "a b"], "topic"),
        (["topic", "create", "t", "--partitions", "0"], "--partitions"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_told_what_is_wrong(tmp_path: Path, arguments: list[str], telling: str) -> None:
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert_refused(done, telling)
    assert done.returncode == 2
    assert not (tmp_path / "cremant-data" / "controller").exists()


def test_settings_that_are_not_toml_are_told_with_the_line(tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("query_threads = 2\nhost = 127.0.0.1\n", encoding="utf-8")
    assert_refused(up(tmp_path / "data", "--config", str(settings)), "settings.toml", "not TOML", "line 2")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_data_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o500)
    assert_refused(up(tmp_path / "data"), str(tmp_path / "data"), "Permission denied", "--data-dir")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_read_only_data_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with mounted(tmp_path / "data", "ro"):
        assert_refused(up(tmp_path / "data"), str(tmp_path / "data"), "Read-only", "--data-dir")


@contextlib.contextmanager
def mounted(directory: Path, options: str) -> Iterator[None]:
    """A file system in memory. Skips where this is not allowed (containers)."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


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


def test_a_kafka_that_is_away_is_named_with_what_to_look_at(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    (tmp_path / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    for arguments in (["topic", "list"], ["topic", "create", "t"], ["produce", "t", str(tmp_path / "rows.jsonl")]):
        done = subprocess.run(
            command(*arguments, "--kafka", address), capture_output=True, text=True, timeout=60, check=False
        )
        assert_refused(done, address, "brokers", "hint:")
        assert done.returncode == 1


def test_two_clusters_cannot_share_a_data_directory_and_no_role_outlives_its_supervisor(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "data", servers=1) as cluster:
        refused = up(tmp_path / "data")
        assert_refused(refused, "in use by another cluster", str(cluster.ready["pid"]), "--data-dir")
        pids = cluster.pids()
        assert all(pids.values())
        os.kill(cluster.ready["pid"], signal.SIGKILL)
        until = time.monotonic() + 5
        while alive := [name for name, pid in pids.items() if is_alive(pid)]:
            if time.monotonic() > until:
                pytest.fail(f"still running 5 s after their supervisor was killed: {alive}")
            time.sleep(0.1)
