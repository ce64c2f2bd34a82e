# SPDX-License-Identifier: Apache-2.0
"""Defaults < file < environment < flags, and every value knows where it came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from cremant.cli.options import load_settings
from cremant.model.errors import InvalidConfig


def test_each_layer_beats_the_one_below(tmp_path: Path) -> None:
    file = tmp_path / "cremant.toml"
    file.write_text('query_threads = 3\nhost = "127.0.0.2"\nlog_fsync = "always"\n', encoding="utf-8")
    settings = load_settings(file, {"host": "127.0.0.4"}, {"CREMANT_HOST": "127.0.0.3", "CREMANT_QUERY_THREADS": "5"})
    assert (settings.host, settings.source("host")) == ("127.0.0.4", "command line")
    assert (settings.query_threads, settings.source("query_threads")) == (5, "environment")
    assert (settings.log_fsync, settings.source("log_fsync")) == ("always", f"file {file}")
    assert (settings.spark_master, settings.source("spark_master")) == ("local[2]", "default")


def test_flags_not_given_leave_the_layer_below_in_force() -> None:
    assert load_settings(None, {"host": None}, {"CREMANT_HOST": "127.0.0.3"}).host == "127.0.0.3"


def test_an_unknown_setting_in_a_file_is_refused_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cremant.toml"
    file.write_text("hots = 1\n", encoding="utf-8")
    with pytest.raises(InvalidConfig, match=r"hots.*cremant\.toml"):
        load_settings(file, {}, {})


def test_an_unknown_variable_is_named_and_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    load_settings(None, {}, {"CREMANT_HOTS": "1", "CREMANT_CONTROLLER": "http://x:1"})
    assert "CREMANT_HOTS" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["= 1", "a = [", "\x00"])
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "cremant.toml"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(InvalidConfig, match="TOML"):
        load_settings(file, {}, {})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot read"):
        load_settings(tmp_path / "nowhere.toml", {}, {})


@pytest.mark.parametrize("written", ['segment.store.root.dir = "/mnt/s"', '"segment.store.root.dir" = "/mnt/s"'])
def test_the_designs_name_of_the_stores_root_is_its_uri(tmp_path: Path, written: str) -> None:
    file = tmp_path / "cremant.toml"
    file.write_text(written, encoding="utf-8")
    settings = load_settings(file, {}, {})
    assert (settings.store_uri, settings.source("store_uri")) == ("/mnt/s", f"file {file}")
    assert load_settings(file, {"store_uri": "/mnt/t"}, {}).store_uri == "/mnt/t"
    file.write_text(f'{written}\nstore_uri = "/mnt/s"', encoding="utf-8")
    with pytest.raises(InvalidConfig, match=r"has segment.store.root.dir and store_uri: both mean the same"):
        load_settings(file, {}, {})
    file.write_text("segment.store.rot = 1", encoding="utf-8")
    with pytest.raises(InvalidConfig, match=r"unknown setting 'segment\.store\.rot'"):
        load_settings(file, {}, {})
