# SPDX-License-Identifier: Apache-2.0
"""What starts real processes is in a lane: brokers are started once, and deadlines are not met by luck."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lanes import LANES, lane_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("nodeid", "lane"),
    [
        ("tests/process/test_soak.py::test_minutes", "soak"),
        ("tests/process/test_kills.py::test_every_role[a::b]", "clusters"),
        ("tests/contract/log/test_open.py::test_streams", "spark and kafka"),
        ("tests/contract/store/test_deepstore.py::test_objects", "tests/contract/store/test_deepstore.py"),
    ],
)
def test_a_test_is_in_the_first_lane_that_fits_or_alone_with_its_file(nodeid: str, lane: str) -> None:
    assert lane_of(nodeid) == lane


def test_every_file_that_needs_brokers_is_in_a_lane() -> None:
    files = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/*/**/test_*.py")]
    imported = re.compile("^from .* import .*KafkaCluster", re.MULTILINE)
    users = [file for file in files if imported.search((ROOT / file).read_text(encoding="utf-8"))]
    assert len(users) > 4
    assert [file for file in users if lane_of(file) not in LANES] == []
