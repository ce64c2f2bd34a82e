# SPDX-License-Identifier: Apache-2.0
"""Every log there is, under the one contract. A new implementation joins by one more entry of `LOGS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cremant.log.api import Log
from cremant.log.embedded import EmbeddedLog
from cremant.log.kafka import KafkaLog
from cremant.log.memory import MemoryLog


class Clock:
    """Wall time that a test sets."""

    def __init__(self) -> None:
        self.now_ms = 1_700_000_000_000

    def __call__(self) -> int:
        return self.now_ms


#: Logs on a machine of their own, whose clock a test sets.
LOGS: dict[str, Callable[[Path, Clock], Log]] = {
    "memory": lambda path, clock: MemoryLog(clock),
    "embedded": lambda path, clock: EmbeddedLog(path, clock=clock),
    "embedded, small files": lambda path, clock: EmbeddedLog(path, segment_bytes=4096, clock=clock),
    "embedded, fsync": lambda path, clock: EmbeddedLog(path, segment_bytes=8192, fsync="always", clock=clock),
}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=[*LOGS, pytest.param("kafka", marks=pytest.mark.kafka)])
def log(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Log]:
    if request.param == "kafka":
        opened: Log = _empty(KafkaLog(request.getfixturevalue("kafka").brokers))
    else:
        opened = LOGS[request.param](tmp_path / "log", clock)
    yield opened
    opened.close()


@pytest.fixture(params=LOGS)
def clocked_log(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Log]:
    """A log that stamps messages by `clock`."""
    opened = LOGS[request.param](tmp_path / "log", clock)
    yield opened
    opened.close()


def _empty(log: KafkaLog) -> KafkaLog:
    """The brokers are shared by all tests."""
    for topic in log.topics():
        log.delete_topic(topic.name)
    return log
