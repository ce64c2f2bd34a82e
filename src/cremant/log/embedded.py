# SPDX-License-Identifier: Apache-2.0
"""The embedded log: topics as directories of append-only files on one machine, shared by any number of processes.

Not a replacement for Kafka on a cluster: one machine, local file system, no replication. What it promises is in
`cremant.log.api`; how, in the `embedded_*` modules: topics (which there are), partition (appends, retention), state
(the commit record and the lock), frame (bytes of an append), files and index (finding things), reader, recovery, wait.
Timestamps are log-append and never decrease within a partition, even if the wall clock does (design: epoch-log.md,
Embedded log).
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from cremant.log.api import Appended, Bounds, Message, TopicInfo
from cremant.log.columns import check_append, no_such_partition, no_such_topic, recreated
from cremant.log.embedded_files import world_error
from cremant.log.embedded_frame import encode
from cremant.log.embedded_partition import EmbeddedPartition, PartitionGone, PartitionOptions, state_path
from cremant.log.embedded_reader import EmbeddedReader
from cremant.log.embedded_topics import Topics
from cremant.log.embedded_wait import Waiters
from cremant.model.errors import CremantError, InvalidConfig, NotFound, Unavailable
from cremant.model.limits import KIB, MIB
from cremant.model.names import is_epoch_topic

T = TypeVar("T")
logger = logging.getLogger(__name__)

#: Below this a file per append would be the rule.
_SEGMENT_BYTES_MIN = 4 * KIB
#: A topic deleted and created again while an operation looks at it; more often than this in a row it is refused.
_REOPEN_TRIES = 3
#: How long `bounds` waits for appends under way: one takes well under a millisecond, a stopped one is not waited for.
SETTLE_S = 0.02


_logs: weakref.WeakSet[EmbeddedLog] = weakref.WeakSet()


def _start_anew_in_a_fork() -> None:
    """A forked child opens its own files: with inherited ones it would share the locks of its parent."""
    for log in list(_logs):
        log._reset()


os.register_at_fork(after_in_child=_start_anew_in_a_fork)


class Fsync(StrEnum):
    """When appends reach the disk. NEVER: an acknowledged append survives the death of any process, not a power cut.
    ALWAYS: survives both; each append waits for the disk."""

    NEVER = "never"
    ALWAYS = "always"


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class EmbeddedLog:
    """Implements `cremant.log.api.Log` on a directory that any number of processes of one machine share."""

    atomic_appends = True
    stamped_ahead_ms = 0

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
        """`retention_ms`, `retention_bytes` (per partition): 0 = keep; epoch logs are only ever trimmed.

        Creates the directory. Raises InvalidConfig (a setting, or a directory with something else in it), NoResource,
        Corrupt.
        """
        if fsync not in list(Fsync):
            raise InvalidConfig(f"setting log_fsync: expected never or always, found {fsync!r}")
        if segment_bytes < _SEGMENT_BYTES_MIN:
            raise InvalidConfig(
                f"setting log_segment_bytes: expected {_SEGMENT_BYTES_MIN} or more, found {segment_bytes}"
            )
        self.directory = Path(directory).absolute()
        self._streams = PartitionOptions(fsync == Fsync.ALWAYS, segment_bytes, retention_ms, retention_bytes, clock)
        self._epochs = PartitionOptions(fsync == Fsync.ALWAYS, segment_bytes, 0, 0, clock)
        self._topics = Topics(self.directory, self._streams)
        self._closed = False
        self._reset()
        _logs.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int], tuple[str, EmbeddedPartition]] = {}
        self._waiters = Waiters()

    def create_topic(self, topic: str, partitions: int) -> TopicInfo:
        return self._topics.create(topic, partitions)

    def delete_topic(self, topic: str) -> None:
        self._topics.delete(topic)

    def grow_topic(self, topic: str, partitions: int) -> TopicInfo:
        return self._topics.grow(topic, partitions)

    def topics(self) -> list[TopicInfo]:
        return self._topics.list()

    def topic(self, topic: str) -> TopicInfo:
        return self._topics.load(topic)

    def append(self, topic: str, partition: int, messages: Sequence[Message]) -> Appended:
        check_append(topic, partition, messages)
        payload = encode(messages)
        return self._with(topic, partition, lambda opened: opened.append(payload))

    def earliest(self, topic: str, partition: int) -> int:
        return self._with(topic, partition, lambda opened: opened.state().earliest)

    def latest(self, topic: str, partition: int) -> int:
        return self._with(topic, partition, lambda opened: opened.state().next_offset)

    def bounds(self, topic: str, partitions: Sequence[int]) -> list[Bounds]:
        until_s = time.monotonic() + SETTLE_S
        return [self._with(topic, partition, lambda opened: opened.bounds(until_s)) for partition in partitions]

    def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        return self._with(topic, partition, lambda opened: opened.offset_at(timestamp_ms))

    def reader(self, topic: str, partition: int, offset: int) -> EmbeddedReader:
        self._with(topic, partition, lambda opened: opened.state())
        incarnation, opened = self._partition(topic, partition)

        def gone() -> CremantError:
            try:
                found = self._topics.load(topic)
            except NotFound as error:
                return error
            return recreated(topic, incarnation, found.incarnation)

        return EmbeddedReader(opened, topic, partition, offset, gone)

    def wait(self, positions: dict[tuple[str, int], int], timeout_s: float) -> bool:
        opened = [(where, self._partition(*where)[1], position) for where, position in positions.items()]

        def ready() -> bool:
            try:
                return any(partition.state().next_offset > position for _, partition, position in opened)
            except PartitionGone:
                return any(self.latest(*where) > position for where, _, position in opened)

        return self._waiters.wait((state_path(partition.directory) for _, partition, _ in opened), ready, timeout_s)

    def trim(self, topic: str, partition: int, before_offset: int) -> None:
        self._with(topic, partition, lambda opened: opened.trim(before_offset))

    def expire(self) -> None:
        """Applies retention to all partitions now. Appends do it as well, but only to the partition they write to."""
        for info in self.topics():
            for partition in range(info.partitions):
                try:
                    self._with(info.name, partition, lambda opened: opened.expire())
                except NotFound:
                    break  # deleted since it was listed
                except CremantError as error:
                    logger.warning("topic %s partition %d: retention failed: %s", info.name, partition, error)

    def close(self) -> None:
        """Releases files as soon as nobody reads them; open readers stay usable."""
        with self._lock:
            self._closed = True
            self._open.clear()

    def _with(self, topic: str, partition: int, act: Callable[[EmbeddedPartition], T]) -> T:
        """Acts on the partition; once more on the new one if the topic was deleted and created again."""
        for _ in range(_REOPEN_TRIES):
            opened = self._partition(topic, partition)
            try:
                return act(opened[1])
            except PartitionGone:
                with self._lock:
                    if self._open.get((topic, partition)) is opened:
                        del self._open[topic, partition]
            except OSError as error:
                raise world_error(error, opened[1].name) from error
        raise no_such_topic(topic)

    def _partition(self, topic: str, partition: int) -> tuple[str, EmbeddedPartition]:
        """The open partition and its incarnation."""
        found = self._open.get((topic, partition))
        if found is not None:
            return found
        info = self._topics.load(topic)
        if not 0 <= partition < info.partitions:
            raise no_such_partition(topic, partition, info.partitions)
        options = self._epochs if is_epoch_topic(topic) else self._streams
        directory = self._topics.partition_directory(info, partition)
        try:
            opened = EmbeddedPartition(directory, f"topic {topic} partition {partition}", options)
        except PartitionGone:
            raise no_such_topic(topic) from None
        with self._lock:
            if self._closed:
                raise Unavailable(f"the log in {self.directory} is closed")
            return self._open.setdefault((topic, partition), (info.incarnation, opened))
