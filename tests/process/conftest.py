# SPDX-License-Identifier: Apache-2.0
"""Everything in this folder starts real processes from the real command line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.process)


@pytest.fixture
def phase(capfd: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints what a long test is doing, past pytest's capture: whoever waits wants to know."""
    started = time.monotonic()

    def show(text: str) -> None:
        with capfd.disabled():
            print(f"\n    [{time.monotonic() - started:6.1f} s] {text}", end="", file=sys.stderr, flush=True)

    return show
