# SPDX-License-Identifier: Apache-2.0
"""Reads one partition of a Kafka topic forward, out of the buffers of the log's Fetcher.

`None` means: nothing more, as far as this process can know. That is when the brokers' last answer ended here, and here
is past everything this process appended or was told is there (`known_end`); otherwise the brokers are asked for the
end. Data that must be there is waited for, up to the deadline. Where nothing but markers of transactions or aborted
messages is left, the position goes past them, also when `None` is returned.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from confluent_kafka import KafkaError

from cremant.log.api import MessageBatch, OffsetExpired, TopicInfo
from cremant.log.kafka_errors import CORRUPT, UNKNOWN_TOPIC, Faults, translate
from cremant.log.kafka_fetch import Fetcher, Slot
from cremant.log.kafka_topics import Topics
from cremant.model.errors import DeadlineExceeded, PeerError
from cremant.model.limits import MIB

OUT_OF_RANGE = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})
#: Upper bound of a batch whatever the caller asks: offsets of its arrays are 32 bits.
_BATCH_BYTES_MAX = 512 * MIB
_PAUSE_S = 0.05
#: How long messages are waited for when nobody could be asked for the end.
_LAST_S = 0.25


class _Ask(Enum):
    """For the end, once in a read: but messages that are on their way are quicker."""

    LATER = "later"
    NOW = "now"
    DONE = "done"


class Ends(Protocol):
    """What a reader asks of its log."""

    def earliest(self, topic: str, partition: int) -> int: ...

    def latest(self, topic: str, partition: int) -> int: ...

    def known_end(self, topic: str, partition: int) -> int: ...


@dataclass(frozen=True)
class Shared:
    """What the readers of a log have in common."""

    log: Ends
    topics: Topics
    fetcher: Fetcher
    faults: Faults
    brokers: str
    deadline_s: float


class KafkaReader:
    """Implements `cremant.log.api.LogReader`."""

    def __init__(self, shared: Shared, info: TopicInfo, partition: int, offset: int) -> None:
        self._topic, self._partition = info.name, partition
        self._incarnation = info.incarnation
        self._position = offset
        self._answered_s = 0.0
        self._log = shared.log
        self._topics = shared.topics
        self._fetcher = shared.fetcher
        self._shared = shared
        self._slot: Slot | None = None
        self.seek(offset)

    @property
    def position(self) -> int:
        return self._position

    @property
    def answered_s(self) -> float:
        return max(self._answered_s, self._topics.answered_s(self._topic))

    def seek(self, offset: int) -> None:
        """Fetching begins here: who seeks several readers before the first `read` waits once for all."""
        self._position = offset
        with self._fetcher:
            if self._slot is None:
                self._slot = self._fetcher.slot((self._topic, self._partition))
            self._fetcher.place(self._slot, offset)

    def close(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._fetcher.drop(slot)

    def __del__(self) -> None:
        self.close()

    def read(self, *, max_messages: int, max_bytes: int) -> MessageBatch | None:
        if self._slot is None:
            self.seek(self._position)
        assert self._slot is not None
        with self._slot.turn:
            return self._read(self._slot, max(1, max_messages), max(1, min(max_bytes, _BATCH_BYTES_MAX)))

    def _read(self, slot: Slot, max_messages: int, max_bytes: int) -> MessageBatch | None:
        until_s = time.monotonic() + self._shared.deadline_s
        ask = _Ask.LATER
        trouble: PeerError | None = None
        while True:
            with self._fetcher:
                self._fetcher.place(slot, self._position)
                taken = self._fetcher.take(slot, max_messages, max_bytes)
                error, at_end = slot.error, taken is None and self._at_end(slot)
                if taken is None and slot.position > self._position:
                    self._position = slot.position
            if taken is not None:
                batch, came_s = taken
                self._topics.confirm(self._topic, self._incarnation, came_s)
                self._position, self._answered_s = batch.next_offset, came_s
                return batch
            if error is not None:
                if self._settled(slot, error):
                    return None
            elif at_end:
                self._topics.glance(self._topic, self._incarnation)
                return None
            elif ask is _Ask.NOW:
                asked_s = time.monotonic()
                try:
                    if self._log.latest(self._topic, self._partition) <= self._position:
                        self._answered_s = asked_s
                        return None
                except PeerError as failed:
                    # Messages may come all the same.
                    trouble, until_s = failed, max(until_s, time.monotonic() + _LAST_S)
            ask = _Ask.NOW if ask is _Ask.LATER else _Ask.DONE
            self._wait(slot, until_s, trouble)

    def _at_end(self, slot: Slot) -> bool:
        """For who holds the Fetcher."""
        position = slot.position
        if not slot.heard or position < self._log.known_end(self._topic, self._partition):
            return False
        return slot.ended >= position or 0 <= self._fetcher.high_watermark(slot) <= position

    def _wait(self, slot: Slot, until_s: float, trouble: PeerError | None) -> None:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            if trouble is not None:
                raise trouble
            what = f"read topic {self._topic} partition {self._partition} from offset {self._position}"
            fault = self._shared.faults.newest()
            if fault is not None:
                raise translate(fault, what, self._shared.brokers, self._shared.faults)
            raise DeadlineExceeded(
                f"Kafka at {self._shared.brokers}: {what}: nothing came within {self._shared.deadline_s:.0f} s",
                hint="there is more, but the brokers did not send it",
            )
        with self._fetcher:
            self._fetcher.place(slot, self._position)
            if not slot.chunks and slot.error is None:
                self._fetcher.poll(left_s)

    def _settled(self, slot: Slot, error: KafkaError) -> bool:
        """True: there is nothing at the position yet. False: try again. Raises what is final."""
        code = error.code()
        if code in OUT_OF_RANGE:
            earliest = self._log.earliest(self._topic, self._partition)
            latest = self._log.latest(self._topic, self._partition)
            self._topics.confirm(self._topic, self._incarnation, time.monotonic())
            self._forget_error(slot)
            if self._position < earliest:
                raise OffsetExpired(self._topic, self._partition, self._position, earliest)
            return self._position >= latest
        if code in UNKNOWN_TOPIC:
            # Gone, or new to a broker.
            self._topics.confirm(self._topic, self._incarnation, time.monotonic())
        elif code in CORRUPT or not error.retriable():
            self._forget_error(slot)
            what = f"read topic {self._topic} partition {self._partition} from offset {self._position}"
            raise translate(error, what, self._shared.brokers, self._shared.faults)
        time.sleep(_PAUSE_S)
        self._forget_error(slot)
        return False

    def _forget_error(self, slot: Slot) -> None:
        with self._fetcher:
            self._fetcher.retry(slot)
