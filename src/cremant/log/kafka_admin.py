# SPDX-License-Identifier: Apache-2.0
"""What is asked of a Kafka cluster besides messages: topics and their ids, offsets, retention. Every call has a
deadline.

An attempt gets a part of the deadline, so that a broker that hangs does not use up all of it; what a new leader or a
broker behind on its metadata answers is asked again until the deadline. Failed logins are not waited for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from confluent_kafka import OFFSET_INVALID, IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic, OffsetSpec

from cremant.log.api import TopicInfo
from cremant.log.columns import no_such_partition, no_such_topic
from cremant.log.kafka_errors import UNKNOWN_TOPIC, Faults, closed, make_client, translate

logger = logging.getLogger(__name__)

T = TypeVar("T")
Where = tuple[str, int]

_AGAIN = UNKNOWN_TOPIC | {
    KafkaError._NOENT,
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._RESOLVE,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._WAIT_CACHE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.NOT_CONTROLLER,
    KafkaError.KAFKA_STORAGE_ERROR,
}
_PERHAPS_GONE = UNKNOWN_TOPIC | {KafkaError._NOENT}
_ATTEMPT_S = 1.5
_LEADERS_S = 0.5
#: A controller that has not answered for this long may be dead, and another one in its place.
_CONTROLLER_S = 0.5
#: Changes of topics take brokers longer than answers.
_CHANGE_S = 30.0
_PAUSE_FIRST_S, _PAUSE_MAX_S = 0.01, 0.25
_POLL_S = 0.05

EARLIEST = OffsetSpec.earliest()
LATEST = OffsetSpec.latest()


class Admin:
    """Thread-safe."""

    def __init__(
        self, config: Mapping[str, Any], brokers: str, isolation: str, deadline_s: float, faults: Faults
    ) -> None:
        self._brokers = brokers
        self._deadline_s = deadline_s
        self._faults = faults
        self._isolation = (
            IsolationLevel.READ_COMMITTED if isolation == "read_committed" else IsolationLevel.READ_UNCOMMITTED
        )
        self._live: AdminClient | None = make_client(AdminClient, config, brokers, faults)

    @property
    def _client(self) -> AdminClient:
        live = self._live
        if live is None:
            raise closed(self._brokers)
        return live

    def close(self) -> None:
        """Ends the client, as soon as no call uses it any more."""
        self._live = None

    def names(self) -> list[str]:
        """Topics but Kafka's own."""

        def ask(timeout_s: float) -> list[str]:
            listed = self._client.list_topics(timeout=timeout_s).topics
            return [name for name in listed if not name.startswith("__")]

        return self._repeat("list topics", ask, _AGAIN)

    def describe(self, names: Iterable[str], deadline_s: float | None = None) -> dict[str, TopicInfo]:
        """Those that exist."""

        def ask(timeout_s: float) -> dict[str, TopicInfo]:
            asked = self._client.describe_topics(TopicCollection(sorted(set(names))), request_timeout=timeout_s)
            found = {}
            for name, future in self._settled(asked, by_controller=True).items():
                error = future.exception()
                if error is None:
                    described = future.result()
                    found[name] = TopicInfo(name, len(described.partitions), _incarnation(described.topic_id))
                elif error.args[0].code() not in UNKNOWN_TOPIC:
                    raise error
            return found

        return self._repeat(f"describe topics {', '.join(names)}", ask, _AGAIN - UNKNOWN_TOPIC, deadline_s)

    def create(self, topic: str, partitions: int, replication: int, config: dict[str, str]) -> None:
        """Raises AlreadyExists, InvalidConfig (replication, the brokers' policies)."""
        fresh = NewTopic(topic, num_partitions=partitions, replication_factor=replication or -1, config=config)
        self._once(f"create topic {topic}", lambda s: self._client.create_topics([fresh], request_timeout=s))

    def delete(self, topic: str) -> None:
        self._once(f"delete topic {topic}", lambda s: self._client.delete_topics([topic], request_timeout=s))

    def grow(self, topic: str, partitions: int) -> None:
        wanted = NewPartitions(topic, partitions)
        self._once(f"grow topic {topic}", lambda s: self._client.create_partitions([wanted], request_timeout=s))

    def offsets(self, wanted: Mapping[Where, OffsetSpec]) -> dict[Where, int]:
        """Of all at once; -1 where no message is as young as asked for. Raises NotFound."""
        asked = {TopicPartition(*where): spec for where, spec in wanted.items()}
        topics = sorted({topic for topic, _ in wanted})

        def ask(timeout_s: float) -> dict[Where, int]:
            futures = self._client.list_offsets(asked, isolation_level=self._isolation, request_timeout=timeout_s)
            done = self._settled(futures)
            try:
                found = {(tp.topic, tp.partition): future.result().offset for tp, future in done.items()}
                if any(offset == OFFSET_INVALID for offset in found.values()):
                    # What the client answers, without an error, when a broker did not within the time.
                    raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
                return found
            except KafkaException as error:
                if error.args[0].code() in _PERHAPS_GONE:
                    # A broker may say so of what is only new to it.
                    self._check_exist(wanted, self.describe(topics, _ATTEMPT_S))
                raise

        return self._repeat(f"list offsets of topics {', '.join(topics)}", ask, _AGAIN, led_by=topics)

    def trim(self, topic: str, partition: int, before: int) -> None:
        asked = [TopicPartition(topic, partition, before)]

        def ask(timeout_s: float) -> None:
            done = self._settled(self._client.delete_records(asked, request_timeout=timeout_s))
            for future in done.values():
                future.result()

        self._repeat(f"trim topic {topic} partition {partition} to {before}", ask, _AGAIN, led_by=[topic])

    def wait_until(self, what: str, holds: Callable[[], bool]) -> None:
        """Asks again and again: brokers learn of a change one by one."""
        until_s = time.monotonic() + _CHANGE_S
        pause_s = _PAUSE_FIRST_S
        while not holds():
            if time.monotonic() > until_s:
                raise translate(KafkaError(KafkaError._TIMED_OUT), what, self._brokers, self._faults)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    @staticmethod
    def _check_exist(wanted: Iterable[Where], found: Mapping[str, TopicInfo]) -> None:
        for topic, partition in wanted:
            if topic not in found:
                raise no_such_topic(topic)
            if not 0 <= partition < found[topic].partitions:
                raise no_such_partition(topic, partition, found[topic].partitions)

    def _once(self, what: str, ask: Callable[[float], dict[Any, Future[Any]]]) -> None:
        """For what must not be done twice blindly."""
        try:
            for future in self._settled(ask(_CHANGE_S), by_controller=True).values():
                future.result()
        except KafkaException as error:
            raise translate(error.args[0], what, self._brokers, self._faults) from None

    def _repeat(
        self,
        what: str,
        ask: Callable[[float], T],
        again: Iterable[int],
        deadline_s: float | None = None,
        led_by: Iterable[str] = (),
    ) -> T:
        """`led_by`: topics whose leaders are asked."""
        began_s = time.monotonic()
        until_s = began_s + (self._deadline_s if deadline_s is None else deadline_s)
        pause_s = _PAUSE_FIRST_S
        while True:
            try:
                answer = ask(max(_POLL_S, min(_ATTEMPT_S, until_s - time.monotonic())))
                self._faults.settle()
                return answer
            except KafkaException as failed:
                error = failed.args[0]
                self._client.poll(0)
                left_s = until_s - time.monotonic()
                if error.code() not in again or left_s <= 0 or self._faults.denied_since(began_s):
                    raise translate(error, what, self._brokers, self._faults) from None
            for topic in led_by:
                self._look_for_leaders(topic)
            time.sleep(min(pause_s, max(0.0, left_s)))
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    def _look_for_leaders(self, topic: str) -> None:
        """Otherwise the client goes on asking a leader that is dead."""
        try:
            self._client.list_topics(topic, timeout=_LEADERS_S)
        except KafkaException as error:
            logger.info("Kafka at %s: no leaders of topic %s: %s", self._brokers, topic, error.args[0].str())

    def _look_for_controller(self) -> None:
        """Otherwise the client goes on waiting for one that is dead."""
        try:
            self._client.list_topics(timeout=_LEADERS_S)
        except KafkaException as error:
            logger.info("Kafka at %s: no controller: %s", self._brokers, error.args[0].str())

    def _settled(self, futures: dict[Any, Future[Any]], *, by_controller: bool = False) -> dict[Any, Future[Any]]:
        """The futures, done: their requests have timeouts, and a failed login ends the waiting. `by_controller`: it is
        the broker that the client takes for the controller who is asked."""
        began_s = looked_s = time.monotonic()
        pending = set(futures.values())
        while pending:
            _, pending = wait(pending, timeout=_POLL_S)
            if pending:
                self._client.poll(0)
                denied = self._faults.denied_since(began_s)
                if denied is not None:
                    raise KafkaException(denied)
                if by_controller and time.monotonic() > looked_s + _CONTROLLER_S:
                    self._look_for_controller()
                    looked_s = time.monotonic()
        return futures


def _incarnation(topic_id: Any) -> str:
    """Kafka's id of the topic as 32 hex digits."""
    bits = (topic_id.get_most_significant_bits() & (2**64 - 1), topic_id.get_least_significant_bits() & (2**64 - 1))
    return f"{bits[0]:016x}{bits[1]:016x}"
