# SPDX-License-Identifier: Apache-2.0
"""The embedded log: topics as directories of append-only files on one machine, shared by many processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path

from cremant.log.api import Appended, LogReader, Message, TopicInfo
from cremant.model.limits import MIB


class Fsync(StrEnum):
    """When appends reach the disk. NEVER: an acknowledged append survives the death of any process, not a power cut.
    ALWAYS: survives both; each append waits for the disk."""

    NEVER = "never"
    ALWAYS = "always"


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class EmbeddedLog:
    """Implements `cremant.log.api.Log` on a directory that any number of processes of one machine share."""

    def __init__(
        self,
        directory: str | Path,
        *,
        fsync: Fsync | str = Fsync.NEVER,
        segment_bytes: int = 64 * MIB,
        retention_ms: int = 0,
        retention_bytes: int = 0,
        clock: Callable[[], int] = wall_clock_ms,
    ) -> None:
        """`retention_ms`, `retention_bytes` (per partition): 0 = keep. Creates the directory."""
        raise NotImplementedError

    def create_topic(self, topic: str, partitions: int) -> TopicInfo:
        raise NotImplementedError

    def delete_topic(self, topic: str) -> None:
        raise NotImplementedError

    def grow_topic(self, topic: str, partitions: int) -> TopicInfo:
        raise NotImplementedError

    def topics(self) -> list[TopicInfo]:
        raise NotImplementedError

    def topic(self, topic: str) -> TopicInfo:
        raise NotImplementedError

    def append(self, topic: str, partition: int, messages: Sequence[Message]) -> Appended:
        raise NotImplementedError

    def earliest(self, topic: str, partition: int) -> int:
        raise NotImplementedError

    def latest(self, topic: str, partition: int) -> int:
        raise NotImplementedError

    def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        raise NotImplementedError

    def reader(self, topic: str, partition: int, offset: int) -> LogReader:
        raise NotImplementedError

    def wait(self, positions: dict[tuple[str, int], int], timeout_s: float) -> bool:
        raise NotImplementedError

    def trim(self, topic: str, partition: int, before_offset: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
