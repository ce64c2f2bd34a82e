# SPDX-License-Identifier: Apache-2.0
"""Findings about this machine: who has a port, what a directory is good for."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from msgspec import structs
from small_tables import table, view

from cremant.cli import checks
from cremant.cli.checks import Finding, Level
from cremant.cli.doctor import _roles, streams
from cremant.cli.find import ClusterFile, RunningRole
from cremant.cli.streams import kafka_of
from cremant.model.cluster import ClusterView
from cremant.model.errors import InvalidConfig, NotFound
from cremant.model.settings import Settings
from cremant.model.table import StreamConfig
from cremant.store.deepstore import DirectoryStore


def test_a_taken_port_is_told_with_the_process_that_has_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        (found,) = checks.check_ports("127.0.0.1", {"broker": port}, None)
        assert found.level is Level.WARN
        assert str(os.getpid()) in found.message
        assert "--broker-port" in found.fix
        ours = ClusterFile(
            controller="",
            broker="",
            log_dir="",
            supervisor_pid=1,
            roles={"broker": RunningRole(url="", pid=os.getpid())},
        )
        (found,) = checks.check_ports("127.0.0.1", {"broker": port}, ours)
        assert (found.level, "our own broker" in found.message) == (Level.OK, True)
    (found,) = checks.check_ports("127.0.0.1", {"broker": port}, None)
    assert found == Finding(f"port {port}", Level.OK, "free, for broker")


def test_a_directory_that_does_not_exist_is_judged_by_its_parent(tmp_path: Path) -> None:
    (found,) = checks.check_directory("data", tmp_path / "a" / "b", "--data-dir")
    assert (found.level, f"will be made in {tmp_path}" in found.message) == (Level.OK, True)
    (tmp_path / "file").touch()
    (found,) = checks.check_directory("data", tmp_path / "file" / "x", "--data-dir")
    assert found.level is Level.FAIL
    assert "--data-dir" in found.fix


def test_a_chosen_directory_without_its_marker_is_told_and_nothing_is_written_there(tmp_path: Path) -> None:
    settings = Settings(("test", {"data_dir": str(tmp_path), "store_uri": str(tmp_path / "share")}))
    looked, told = checks.check_store(settings)
    assert (looked.level, told.level) == (Level.OK, Level.WARN)
    assert "mount the share" in told.fix
    assert list(tmp_path.iterdir()) == []
    DirectoryStore(tmp_path / "share", marked=True).claim("")
    (found,) = checks.check_store(settings)
    assert found.level is Level.OK
    assert "written, read and deleted" in found.message


def test_room_is_told_once_per_file_system(tmp_path: Path) -> None:
    found = list(checks.check_rooms({"data": tmp_path / "x", "log": tmp_path}))
    assert len(found) == 1
    assert found[0].check == "room"
    assert "data, log" in found[0].message


def test_where_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    (found,) = checks.check_reach("kafka", "127.0.0.1:99999")
    assert found.level is Level.FAIL
    (found,) = checks.check_reach("kafka", address)
    assert found.level is Level.FAIL
    assert address in found.message
    (found,) = checks.check_reach("kafka", "nonsense")
    assert found.level is Level.FAIL


@pytest.mark.parametrize("brokers", ["localhost", "localhost:", ":9092", "a:1,b", "a:x"])
def test_brokers_are_host_and_port(brokers: str) -> None:
    with pytest.raises(InvalidConfig, match="HOST:PORT"):
        kafka_of(brokers, None)


def test_properties_need_a_file_and_a_kafka(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        kafka_of("a:1", tmp_path / "nowhere.properties")
    (tmp_path / "client.properties").touch()
    with pytest.raises(InvalidConfig):
        kafka_of(None, tmp_path / "client.properties")
    kafka = kafka_of("a:1,b:2", tmp_path / "client.properties")
    assert kafka is not None
    assert kafka.settings()["kafka_properties"] == str(tmp_path / "client.properties")


def reading_kafka(brokers: str, **passwords: str) -> ClusterView:
    """Table -> the password that it has in its config."""
    plain = table(())
    tables = {}
    for name, password in passwords.items():
        properties = {"sasl.username": "u", "sasl.password": password}
        stream = StreamConfig(stream_type="kafka", topic="t", brokers=brokers, client_properties=properties)
        record = structs.replace(plain.record, config=structs.replace(plain.record.config, name=name, stream=stream))
        tables[name] = structs.replace(plain, record=record)
    return structs.replace(view(plain), tables=tables)


def test_tables_with_the_same_login_are_one_check_and_passwords_make_logins_different() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        found = list(streams(reading_kafka(address, a="one", b="one", c="other")))
    assert [finding.check for finding in found] == ["kafka, a", "kafka, c"]
    assert not any("other" in str(finding) for finding in found)


def test_a_dead_role_is_told_with_how_long_and_what_to_do_when_it_is_gone_for_good() -> None:
    live = {"role": "server", "id": "Server_a_1", "url": "http://a:1", "live": True, "heardMsAgo": 100}
    dead = [
        {**live, "id": "Server_a_2", "live": False, "heardMsAgo": 7_300_000},
        {**live, "id": "Server_a_3", "live": False, "heardMsAgo": None},
    ]
    found = [finding for finding in _roles({"instances": [live, *dead]}) if finding.level is Level.WARN]
    assert [finding.message for finding in found] == [
        "Server_a_2 is dead, heard 2 h ago", "Server_a_3 is dead, not heard since the controller started",
    ]  # fmt: skip
    assert all("DELETE /instances/Server_a_" in finding.fix for finding in found)
