# SPDX-License-Identifier: Apache-2.0
"""A log in memory: deterministic, for tests and the simulated world. One process, no durability.

Time is an argument (`clock`), incarnations are a count. It can show what other logs show only now and then:
`skip` leaves a hole in the offsets as aborted transactions do, `trim` expires exactly what it is told.
Timestamps are log-append and never decrease within a partition (design: epoch-log.md, Embedded log).
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

from cremant.log.api import Appended, Bounds, Message, MessageBatch, OffsetExpired, TopicInfo
from cremant.log.columns import (
    batch_of,
    check_append,
    check_new_topic,
    no_such_partition,
    no_such_topic,
    recreated,
)
from cremant.model.errors import AlreadyExists, Conflict


class _Partition:
    """Columns of one partition; `next` is the offset the next append gets, `earliest` the first that is left."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.timestamps_ms: list[int] = []
        self.messages: list[Message] = []
        self.earliest = 0
        self.next = 0

    def append(self, messages: Sequence[Message], now_ms: int) -> Appended:
        first = self.next
        timestamp_ms = max(now_ms, self.timestamps_ms[-1]) if self.timestamps_ms else now_ms
        self.offsets.extend(range(first, first + len(messages)))
        self.timestamps_ms.extend([timestamp_ms] * len(messages))
        self.messages.extend(messages)
        self.next = first + len(messages)
        return Appended(first, timestamp_ms, self.next)

    def trim(self, before: int) -> None:
        before = min(before, self.next)
        if before <= self.earliest:
            return
        count = bisect_left(self.offsets, before)
        del self.offsets[:count], self.timestamps_ms[:count], self.messages[:count]
        self.earliest = before


class _Topic:
    def __init__(self, incarnation: str, partitions: int) -> None:
        self.incarnation = incarnation
        self.partitions = [_Partition() for _ in range(partitions)]


class MemoryLog:
    """Implements `cremant.log.api.Log`. `clock` answers the wall time in ms."""

    atomic_appends = True
    stamped_ahead_ms = 0

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._topics: dict[str, _Topic] = {}
        self._created = 0
        self._changed = threading.Condition(threading.RLock())

    def create_topic(self, topic: str, partitions: int) -> TopicInfo:
        check_new_topic(topic, partitions)
        with self._changed:
            if topic in self._topics:
                raise AlreadyExists(f"topic {topic!r} exists already")
            self._created += 1
            self._topics[topic] = _Topic(f"{self._created:016x}", partitions)
            return self.topic(topic)

    def delete_topic(self, topic: str) -> None:
        with self._changed:
            self._require(topic)
            del self._topics[topic]
            self._changed.notify_all()

    def grow_topic(self, topic: str, partitions: int) -> TopicInfo:
        check_new_topic(topic, partitions)
        with self._changed:
            found = self._require(topic)
            present = len(found.partitions)
            if partitions < present:
                raise Conflict(f"topic {topic} has {present} partitions and cannot shrink to {partitions}")
            found.partitions.extend(_Partition() for _ in range(partitions - present))
            return self.topic(topic)

    def topics(self) -> list[TopicInfo]:
        with self._changed:
            return [self.topic(name) for name in sorted(self._topics)]

    def topic(self, topic: str) -> TopicInfo:
        with self._changed:
            found = self._require(topic)
            return TopicInfo(topic, len(found.partitions), found.incarnation)

    def append(self, topic: str, partition: int, messages: Sequence[Message]) -> Appended:
        check_append(topic, partition, messages)
        with self._changed:
            appended = self._partition(topic, partition).append(messages, self._clock())
            self._changed.notify_all()
            return appended

    def skip(self, topic: str, partition: int, count: int) -> None:
        """Leaves a hole of `count` offsets, as an aborted transaction does in other logs."""
        with self._changed:
            self._partition(topic, partition).next += count

    def earliest(self, topic: str, partition: int) -> int:
        with self._changed:
            return self._partition(topic, partition).earliest

    def latest(self, topic: str, partition: int) -> int:
        with self._changed:
            return self._partition(topic, partition).next

    def bounds(self, topic: str, partitions: Sequence[int]) -> list[Bounds]:
        with self._changed:
            return [Bounds(self.earliest(topic, partition), self.latest(topic, partition)) for partition in partitions]

    def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        with self._changed:
            found = self._partition(topic, partition)
            index = bisect_left(found.timestamps_ms, timestamp_ms)
            return found.offsets[index] if index < len(found.offsets) else found.next

    def reader(self, topic: str, partition: int, offset: int) -> MemoryReader:
        with self._changed:
            self._partition(topic, partition)
            return MemoryReader(self, topic, partition, offset, self._topics[topic].incarnation)

    def wait(self, positions: dict[tuple[str, int], int], timeout_s: float) -> bool:
        def ready() -> bool:
            return any(self._partition(*where).next > position for where, position in positions.items())

        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not ready():
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
            return True

    def trim(self, topic: str, partition: int, before_offset: int) -> None:
        with self._changed:
            self._partition(topic, partition).trim(before_offset)

    def close(self) -> None:
        """Nothing to release: a closed MemoryLog still holds its messages."""

    def read(
        self, topic: str, incarnation: str, partition: int, offset: int, max_messages: int, max_bytes: int
    ) -> MessageBatch | None:
        """The read of `MemoryReader`."""
        with self._changed:
            found = self._require(topic)
            if found.incarnation != incarnation:
                raise recreated(topic, incarnation, found.incarnation)
            log = self._partition(topic, partition)
            if offset < log.earliest:
                raise OffsetExpired(topic, partition, offset, log.earliest)
            first = bisect_left(log.offsets, offset)
            last, size = first, 0
            while last < len(log.offsets) and last - first < max(1, max_messages):
                message = log.messages[last]
                size += len(message.value or b"") + len(message.key or b"")
                if size > max_bytes and last > first:
                    break
                last += 1
            if last == first:
                return None
            next_offset = log.offsets[last] if last < len(log.offsets) else log.next
            return batch_of(
                log.offsets[first:last], log.timestamps_ms[first:last], log.messages[first:last], next_offset
            )

    def _require(self, topic: str) -> _Topic:
        found = self._topics.get(topic)
        if found is None:
            raise no_such_topic(topic)
        return found

    def _partition(self, topic: str, partition: int) -> _Partition:
        found = self._require(topic)
        if not 0 <= partition < len(found.partitions):
            raise no_such_partition(topic, partition, len(found.partitions))
        return found.partitions[partition]


class MemoryReader:
    """Implements `cremant.log.api.LogReader` on a MemoryLog."""

    def __init__(self, log: MemoryLog, topic: str, partition: int, offset: int, incarnation: str) -> None:
        self._log = log
        self._topic = topic
        self._partition = partition
        self._incarnation = incarnation
        self._position = offset

    @property
    def position(self) -> int:
        return self._position

    @property
    def answered_s(self) -> float:
        return time.monotonic()

    def read(self, *, max_messages: int, max_bytes: int) -> MessageBatch | None:
        batch = self._log.read(self._topic, self._incarnation, self._partition, self._position, max_messages, max_bytes)
        if batch is not None:
            self._position = batch.next_offset
        return batch

    def seek(self, offset: int) -> None:
        self._position = offset

    def close(self) -> None:
        """Nothing to release."""
