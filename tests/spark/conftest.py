# SPDX-License-Identifier: Apache-2.0
"""Everything in this folder runs real Spark; tests that kill nothing share one session."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pipelines import World

from cremant.model.errors import NoResource
from cremant.model.settings import Settings
from cremant.pipeline.java import find_java

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two slots, three attempts per task."""
    try:
        find_java()
    except NoResource as error:
        pytest.skip(str(error))
    from cremant.pipeline.session import begin_jvm, open_session, remove_socket_directory

    directory = tmp_path_factory.mktemp("spark")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    sys.path.insert(0, str(HERE))
    settings = Settings(("test", {"data_dir": str(directory), "spark_master": "local[2,3]"}))
    start = begin_jvm(settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jvm = start.wait()
        session = open_session(settings, jvm)
    yield session
    session.stop()
    jvm.stop()
    remove_socket_directory(settings)


@pytest.fixture
def session(spark: Any) -> Callable[[], Any]:
    return lambda: spark


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()
