# SPDX-License-Identifier: Apache-2.0
"""What a session is spared."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from cremant.pipeline.session import know_no_other_sources


def test_no_process_looks_for_data_sources_in_packages(spark: Any, caplog: pytest.LogCaptureFixture) -> None:
    """This is told by a setter that is not part of Spark's interface: another Spark may have another one."""
    with caplog.at_level(logging.WARNING):
        know_no_other_sources(spark)
    assert caplog.records == []
