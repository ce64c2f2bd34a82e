# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the controller's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from control import Cluster, StillClock


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


@pytest.fixture
def still_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Its clock moves only when it is told to."""
    made = Cluster(tmp_path, clock=StillClock())
    yield made
    made.close()
