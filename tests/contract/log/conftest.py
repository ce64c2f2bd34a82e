# SPDX-License-Identifier: Apache-2.0
"""Every log there is, under the one contract. A new implementation joins by one more entry of `LOGS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cremant.log.api import Log
from cremant.log.embedded import EmbeddedLog
from cremant.log.memory import MemoryLog


class Clock:
    """Wall time that a test sets."""

    def __init__(self) -> None:
        self.now_ms = 1_700_000_000_000

    def __call__(self) -> int:
        return self.now_ms


LOGS: dict[str, Callable[[Path, Clock], Log]] = {
    "memory": lambda path, clock: MemoryLog(clock),
    "embedded": lambda path, clock: EmbeddedLog(path, clock=clock),
    "embedded, small files": lambda path, clock: EmbeddedLog(path, segment_bytes=4096, clock=clock),
    "embedded, fsync": lambda path, clock: EmbeddedLog(path, segment_bytes=8192, fsync="always", clock=clock),
}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=LOGS)
def log(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Log]:
    opened = LOGS[request.param](tmp_path / "log", clock)
    yield opened
    opened.close()
