# SPDX-License-Identifier: Apache-2.0
"""How a command finds its cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from cremant.cli.find import ClusterFile, RunningRole, find_cluster, read_cluster_file, write_cluster_file
from cremant.model.errors import Corrupt, InvalidConfig, NoResource


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CREMANT_CONTROLLER", "CREMANT_BROKER", "CREMANT_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)


def written(data_dir: Path) -> ClusterFile:
    (data_dir / "log").mkdir()
    content = ClusterFile(
        controller="http://127.0.0.1:1",
        broker="http://127.0.0.1:2",
        log_dir=str(data_dir / "log"),
        supervisor_pid=7,
        roles={"broker": RunningRole(url="http://127.0.0.1:2", pid=8)},
    )
    write_cluster_file(data_dir, content)
    return content


def test_a_flag_beats_everything_and_says_nothing_of_a_local_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    monkeypatch.setenv("CREMANT_CONTROLLER", "http://elsewhere:9")
    target = find_cluster("http://there:9/", tmp_path)
    assert (target.controller, target.log_dir) == ("http://there:9", None)
    assert find_cluster(None, tmp_path).controller == "http://elsewhere:9"


def test_the_file_of_a_running_cluster_names_controller_broker_and_log(tmp_path: Path) -> None:
    content = written(tmp_path)
    assert read_cluster_file(tmp_path) == content
    target = find_cluster(None, tmp_path)
    assert (target.controller, target.broker) == ("http://127.0.0.1:1", "http://127.0.0.1:2")
    assert target.log_dir == tmp_path / "log"


def test_without_any_of_them_it_is_the_usual_port(tmp_path: Path) -> None:
    assert find_cluster(None, tmp_path).controller == "http://127.0.0.1:9000"


def test_a_data_directory_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NoResource, match=r"file/cluster\.json: Not a directory"):
        find_cluster(None, tmp_path / "file")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text("{", encoding="utf-8")
    with pytest.raises(Corrupt, match=r"cluster\.json"):
        find_cluster(None, tmp_path)


@pytest.mark.parametrize("given", ["localhost:9000", "foo", "ftp://there:9"])
def test_a_controller_is_a_url(given: str) -> None:
    with pytest.raises(InvalidConfig, match="expected http://HOST:PORT"):
        find_cluster(given, None)
