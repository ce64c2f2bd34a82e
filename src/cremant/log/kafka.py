# SPDX-License-Identifier: Apache-2.0
"""Kafka as a log: topics of a cluster of brokers, for streams and for epoch logs.

What differs from the embedded log, and is said in `cremant.log.api`: an append of several messages is neither atomic
nor consecutive (`atomic_appends` is False); offsets have holes (transactions, compaction), and the end is the last
stable offset; topics of other people may stamp messages with the producer's time. A topic's incarnation is Kafka's
topic id.

A log costs at most four clients, each made when first needed: one for questions, one producer, one consumer for all
readers, one to wait for partitions nobody here reads. Every call has a deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from confluent_kafka.admin import OffsetSpec

from cremant.log.api import Appended, Bounds, Message, TopicInfo
from cremant.log.columns import check_append, check_new_topic
from cremant.log.kafka_admin import EARLIEST, LATEST, Admin, Where
from cremant.log.kafka_config import (
    KAFKA_RECORD_BYTES_MAX,
    admin_config,
    connection,
    consumer_config,
    login,
    producer_config,
)
from cremant.log.kafka_errors import Faults, closed
from cremant.log.kafka_fetch import Fetcher
from cremant.log.kafka_produce import Appender
from cremant.log.kafka_reader import KafkaReader, Shared
from cremant.log.kafka_topics import Topics
from cremant.log.kafka_wait import Waiter
from cremant.model.errors import Conflict, NotFound, PeerError
from cremant.model.limits import KAFKA_APPEND_DEADLINE_MS, KAFKA_DEADLINE_MS, KAFKA_STAMPED_AHEAD_MS, MIB
from cremant.model.names import is_epoch_topic

#: Trimmed epoch logs leave the disk by files of this size.
_EPOCH_FILE_BYTES = 128 * MIB


class KafkaLog:
    """Implements `cremant.log.api.Log`. `properties` are for the clients (`cremant.log.kafka_config`), `replication` is
    that of topics created here, 0 = the brokers' default. Raises InvalidConfig."""

    atomic_appends = False
    stamped_ahead_ms = KAFKA_STAMPED_AHEAD_MS

    def __init__(
        self,
        brokers: str,
        properties: Mapping[str, str] | None = None,
        *,
        replication: int = 0,
        deadline_ms: int = KAFKA_DEADLINE_MS,
        append_deadline_ms: int = KAFKA_APPEND_DEADLINE_MS,
    ) -> None:
        self.brokers = brokers
        self._replication = replication
        self._deadline_s = deadline_ms / 1000
        given = dict(properties or {})
        shared = connection(brokers, given)
        self._consumer_config = consumer_config(shared)
        self._faults = Faults(lambda: login(given))
        isolation = shared["isolation.level"]
        self._admin = Admin(admin_config(shared), brokers, isolation, self._deadline_s, self._faults)
        producing = producer_config(shared, append_deadline_ms)
        self._appender = Appender(producing, brokers, append_deadline_ms / 1000, self._faults)
        self._topics = Topics(self._admin)
        #: Guards the clients that are made on demand.
        self._guard = threading.Lock()
        self._reading: Fetcher | None = None
        self._watching: Fetcher | None = None
        self._ends: dict[Where, int] = {}
        self._closed = False

    # --- topics ---

    def create_topic(self, topic: str, partitions: int) -> TopicInfo:
        check_new_topic(topic, partitions)
        self._admin.create(topic, partitions, self._replication, self._topic_config(topic))
        self._admin.wait_until(f"create topic {topic}", lambda: self._is_complete(topic, partitions))
        return self._topics.fresh(topic)

    def _topic_config(self, topic: str) -> dict[str, str]:
        config = {"message.timestamp.type": "LogAppendTime", "max.message.bytes": str(KAFKA_RECORD_BYTES_MAX)}
        if self._replication:
            # One replica may be away: of three, acknowledged records are on two at least.
            config["min.insync.replicas"] = str(max(1, self._replication - 1))
        if is_epoch_topic(topic):
            # `trim` alone decides what may go.
            config |= {"retention.ms": "-1", "retention.bytes": "-1", "cleanup.policy": "delete"}
            config["segment.bytes"] = str(_EPOCH_FILE_BYTES)
        return config

    def _is_complete(self, topic: str, partitions: int) -> bool:
        """The brokers that answer know all its partitions and their leaders."""
        try:
            if self._topics.fresh(topic).partitions < partitions:
                return False
            self._admin.offsets({(topic, partition): LATEST for partition in range(partitions)})
        except NotFound:
            return False
        return True

    def delete_topic(self, topic: str) -> None:
        self._topics.fresh(topic)
        self._admin.delete(topic)
        self._topics.forget(topic)
        self._admin.wait_until(f"delete topic {topic}", lambda: not self._admin.describe([topic]))
        self._forget_ends(topic)

    def grow_topic(self, topic: str, partitions: int) -> TopicInfo:
        check_new_topic(topic, partitions)
        present = self._topics.fresh(topic)
        if partitions < present.partitions:
            raise Conflict(f"topic {topic} has {present.partitions} partitions and cannot shrink to {partitions}")
        if partitions > present.partitions:
            self._admin.grow(topic, partitions)
            self._admin.wait_until(f"grow topic {topic}", lambda: self._is_complete(topic, partitions))
        return self._topics.fresh(topic)

    def topics(self) -> list[TopicInfo]:
        names = self._admin.names()
        return sorted(self._admin.describe(names).values()) if names else []

    def topic(self, topic: str) -> TopicInfo:
        return self._topics.fresh(topic)

    # --- appends ---

    def append(self, topic: str, partition: int, messages: Sequence[Message]) -> Appended:
        check_append(topic, partition, messages)
        self._topics.require([(topic, partition)])
        try:
            appended = self._appender.append(topic, partition, messages)
        except (NotFound, PeerError):
            self._tell_gone(topic)
            raise
        self._know_end((topic, partition), appended.next_offset)
        return appended

    def _tell_gone(self, topic: str) -> None:
        """Raises NotFound if a failure came of the topic having been deleted."""
        try:
            self._topics.fresh(topic)
        except PeerError:
            return

    # --- offsets ---

    def earliest(self, topic: str, partition: int) -> int:
        return self._offset(topic, partition, EARLIEST)

    def latest(self, topic: str, partition: int) -> int:
        return self._latest([(topic, partition)])[topic, partition]

    def bounds(self, topic: str, partitions: Sequence[int]) -> list[Bounds]:
        where = [(topic, partition) for partition in partitions]
        self._topics.require(where)
        earliest = self._admin.offsets(dict.fromkeys(where, EARLIEST))
        latest = self._latest(where)
        return [Bounds(earliest[one], latest[one]) for one in where]

    def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        found = self._offset(topic, partition, OffsetSpec.for_timestamp(max(0, timestamp_ms)))
        return found if found >= 0 else self.latest(topic, partition)

    def known_end(self, topic: str, partition: int) -> int:
        """The least that the end is known to be."""
        return self._ends.get((topic, partition), 0)

    def _latest(self, where: Iterable[Where]) -> dict[Where, int]:
        wanted = list(where)
        self._topics.require(wanted)
        found = self._admin.offsets(dict.fromkeys(wanted, LATEST))
        for one, end in found.items():
            self._know_end(one, end)
        return found

    def _offset(self, topic: str, partition: int, spec: OffsetSpec) -> int:
        where = (topic, partition)
        self._topics.require([where])
        return self._admin.offsets({where: spec})[where]

    def _know_end(self, where: Where, end: int) -> None:
        if self._ends.get(where, 0) < end:
            self._ends[where] = end

    def _forget_ends(self, topic: str) -> None:
        for where in [where for where in self._ends if where[0] == topic]:
            self._ends.pop(where, None)

    # --- reading ---

    def reader(self, topic: str, partition: int, offset: int) -> KafkaReader:
        info = self._topics.fresh(topic)
        self._topics.require([(topic, partition)])
        with self._guard:
            self._check_open()
            if self._reading is None:
                self._reading = Fetcher(self._consumer_config, self.brokers, self._faults, keep=True)
            fetcher = self._reading
        shared = Shared(self, self._topics, fetcher, self._faults, self.brokers, self._deadline_s)
        return KafkaReader(shared, info, partition, offset)

    def wait(self, positions: dict[tuple[str, int], int], timeout_s: float) -> bool:
        return Waiter(self._reading, self._watcher, self._topics, self._latest).wait(positions, timeout_s)

    def _watcher(self) -> Fetcher:
        with self._guard:
            self._check_open()
            if self._watching is None:
                # Brokers send one batch of messages, however small the limit.
                small = {"fetch.message.max.bytes": 1024, "queued.min.messages": 1}
                config = {**self._consumer_config, **small}
                self._watching = Fetcher(config, self.brokers, self._faults, keep=False)
            return self._watching

    def trim(self, topic: str, partition: int, before_offset: int) -> None:
        [bounds] = self.bounds(topic, [partition])
        before = min(before_offset, bounds.latest)
        if before > bounds.earliest:
            self._admin.trim(topic, partition, before)

    def close(self) -> None:
        with self._guard:
            self._closed = True
            fetchers = [fetcher for fetcher in (self._reading, self._watching) if fetcher is not None]
            self._reading = self._watching = None
        for fetcher in fetchers:
            fetcher.stop()
        self._appender.close()
        self._admin.close()

    def _check_open(self) -> None:
        if self._closed:
            raise closed(self.brokers)
