# SPDX-License-Identifier: Apache-2.0
"""Finding a Java that is new enough, and the little jar that is built from the source beside it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cremant.model.errors import NoResource
from cremant.model.settings import Settings
from cremant.pipeline.java import QUICK_JAR, JvmStart, find_java, java_major
from cremant.pipeline.session import session_conf

ROOT = Path(__file__).resolve().parents[3]


def fake_java(home: Path, script: str) -> Path:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\n{script}\n")
    java.chmod(0o755)
    return java


def test_no_java_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoResource, match="needs Java 17 or newer: no `java` on the PATH") as caught:
        find_java()
    assert "apt-get install openjdk-17" in caught.value.hint


def test_a_java_home_without_java_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(NoResource, match=f"JAVA_HOME={tmp_path} has no bin/java"):
        find_java()


@pytest.mark.parametrize(("version", "major"), [("1.8.0_392", 8), ("11.0.2", 11), ("17.0.15", 17), ("25", 25)])
def test_the_major_version_is_read_from_the_release_file(tmp_path: Path, version: str, major: int) -> None:
    (tmp_path / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    assert java_major(tmp_path / "bin" / "java") == major


def test_an_old_java_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_java(tmp_path, "echo 'openjdk version \"11.0.2\" 2019-01-15' >&2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(NoResource, match="is Java 11"):
        find_java()


def test_a_java_that_does_not_come_up_shows_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = tmp_path / "home"
    fake_java(java, "echo 'Error: Invalid maximum heap size: -Xmx9999999g' >&2; exit 1")
    (java / "release").write_text('JAVA_VERSION="17.0.1"')
    monkeypatch.setenv("JAVA_HOME", str(java))
    with pytest.raises(NoResource, match="Invalid maximum heap size"):
        JvmStart.begin(driver_memory="9999999g", log_path=tmp_path / "spark.log").wait()


def test_quick_files_are_a_setting(tmp_path: Path) -> None:
    names = {
        value: set(session_conf(Settings(("test", {"data_dir": str(tmp_path), "pipeline_quick_files": value}))))
        for value in (0, 1)
    }
    assert names[1] - names[0] == {
        "spark.hadoop.fs.file.impl", "spark.hadoop.fs.AbstractFileSystem.file.impl"
    }  # fmt: skip


def test_the_jar_is_what_its_source_builds(tmp_path: Path) -> None:
    javac = shutil.which("javac")
    if javac is None:
        pytest.skip("no javac on the PATH: the jar cannot be rebuilt here")
    version = subprocess.run([javac, "-version"], capture_output=True, text=True, check=True).stdout
    if not re.match(r"javac 17\.", version):
        pytest.skip(f"the jar in the package was built by javac 17, here is {version.strip()}")
    built = tmp_path / "built.jar"
    subprocess.run([sys.executable, str(ROOT / "scripts" / "build-jar"), "--to", str(built)], check=True)
    assert built.read_bytes() == QUICK_JAR.read_bytes()
