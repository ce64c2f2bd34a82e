# SPDX-License-Identifier: Apache-2.0
"""Appends to Kafka: one idempotent producer of a process, acknowledged by all replicas in sync.

Kafka has no atomic append of several messages. Those of one append stay in order and, from one process, together;
other producers may come between them, and an append may fail in the middle: the error says how far it came. Where
nobody knows whether a message was written (the acknowledgement was lost, the deadline passed), the error is
OutcomeUnknown. Retries within the deadline write nothing twice. A producer that its broker has given up (fatal) is
replaced by the next append.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from cremant.log.api import Appended, Message, OutcomeUnknown
from cremant.log.kafka_errors import NOT_WRITTEN, UNKNOWN_TOPIC, Faults, closed, make_client, translate
from cremant.model.errors import CremantError, NoResource

_POLL_S = 0.5
#: The client gives up by itself; this much later we do.
_GRACE_S = 5.0
_CLOSE_S = 5.0
#: With headers, messages are queued one by one.
_BATCH_MESSAGES = 20_000


class _Delivery:
    """The acknowledgements of one append."""

    def __init__(self, messages: int) -> None:
        self.expected = messages
        self.settled = 0
        self.done = threading.Event()
        self.delivered = 0
        self.first = -1
        self.last = -1
        self.timestamp_ms = -1
        self.error: KafkaError | None = None
        self.unknown = False

    def __call__(self, error: KafkaError | None, message: Any) -> None:
        if error is None:
            offset = message.offset()
            if self.first < 0:
                self.first, self.timestamp_ms = offset, message.timestamp()[1]
            self.last = offset
            self.delivered += 1
        else:
            self.error = self.error or error
            self.unknown = self.unknown or error.code() not in NOT_WRITTEN
        self.settled += 1
        if self.settled >= self.expected:
            self.done.set()

    def expect(self, messages: int) -> None:
        """No more than these were queued."""
        self.expected = messages
        if self.settled >= self.expected:
            self.done.set()


class _Producer(Producer):  # type: ignore[misc]
    """Of which there are weak references."""


class _Client:
    """A producer and the thread that takes its acknowledgements."""

    def __init__(self, config: Mapping[str, Any], brokers: str, faults: Faults) -> None:
        self.broken = False
        self._faults = faults
        self.producer: Any = make_client(_Producer, config, brokers, faults, self._on_error)
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="kafka-producer", daemon=True)
        self._thread.start()

    def _on_error(self, error: KafkaError) -> None:
        self.broken = self.broken or error.fatal()
        self._faults(error)

    def _serve(self) -> None:
        while not self._stopping:
            self.producer.poll(_POLL_S)

    def stop(self) -> None:
        self._stopping = True
        self._thread.join(_POLL_S + _CLOSE_S)
        self.producer.flush(0 if self.broken else _CLOSE_S)
        if len(self.producer):
            self.producer.purge()
            self.producer.flush(0)


class Appender:
    """Thread-safe."""

    def __init__(self, config: Mapping[str, Any], brokers: str, deadline_s: float, faults: Faults) -> None:
        self._config = config
        self._brokers = brokers
        self._deadline_s = deadline_s
        self._faults = faults
        self._guard = threading.Lock()
        #: Held while the messages of an append are queued: they stay together.
        self._turn = threading.Lock()
        self._client: _Client | None = None
        self._closed = False

    def append(self, topic: str, partition: int, messages: Sequence[Message]) -> Appended:
        """Raises OutcomeUnknown; NotFound, Unavailable, UserError, NoResource when nothing was written, or as much as
        they say."""
        what = f"append to topic {topic} partition {partition}"
        client = self._live()
        delivery = _Delivery(len(messages))
        queued, failure = self._queue(client, topic, partition, messages, delivery, what)
        if queued < len(messages):
            delivery.expect(queued)
        if not delivery.done.wait(self._deadline_s + _GRACE_S):
            delivery.unknown = True
            delivery.error = delivery.error or KafkaError(KafkaError._MSG_TIMED_OUT)
        if delivery.error is not None or failure is not None:
            if delivery.error is not None and delivery.error.fatal():
                client.broken = True
            raise self._failed(what, len(messages), delivery, failure)
        return Appended(delivery.first, delivery.timestamp_ms, delivery.last + 1)

    def _queue(
        self, client: _Client, topic: str, partition: int, messages: Sequence[Message], delivery: _Delivery, what: str
    ) -> tuple[int, CremantError | None]:
        """How many were queued, and why no more."""
        with self._turn:
            queued, error = _queue_all(client.producer, topic, partition, messages, delivery)
        if queued == 0 and error is not None and error.code() in UNKNOWN_TOPIC:
            # It is new: the client has not heard of it. Nobody waits for our turn while brokers hang.
            try:
                client.producer.list_topics(topic, timeout=self._deadline_s)
            except KafkaException as failed:
                return 0, translate(failed.args[0], what, self._brokers, self._faults)
            with self._turn:
                queued, error = _queue_all(client.producer, topic, partition, messages, delivery)
        if error is None:
            return queued, None
        if error.code() == KafkaError._QUEUE_FULL:
            return queued, NoResource(f"{what}: the producer's queue is full", hint="appends outrun the brokers")
        client.broken = client.broken or error.fatal() or error.code() in (KafkaError._FATAL, KafkaError._STATE)
        return queued, translate(error, what, self._brokers, self._faults)

    def _failed(self, what: str, count: int, delivery: _Delivery, failure: CremantError | None) -> CremantError:
        reason = failure or translate(delivery.error, what, self._brokers, self._faults)
        written = f"; {delivery.delivered} of {count} messages were appended" if delivery.delivered else ""
        if not delivery.unknown:
            reason.message += written
            return reason
        return OutcomeUnknown(
            f"{reason.message}{written}; whether {'the others' if written else 'it'} will be there is unknown",
            hint=reason.hint or "read the partition back before writing again",
        )

    def _live(self) -> _Client:
        with self._guard:
            if self._closed:
                raise closed(self._brokers)
            if self._client is not None and self._client.broken:
                threading.Thread(target=self._client.stop, name="kafka-producer-end", daemon=True).start()
                self._client = None
            if self._client is None:
                self._client = _Client(self._config, self._brokers, self._faults)
            return self._client

    def close(self) -> None:
        with self._guard:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            client.stop()


def _queue_all(
    producer: Any, topic: str, partition: int, messages: Sequence[Message], delivery: _Delivery
) -> tuple[int, KafkaError | None]:
    """How many were queued, and the error of the first that was not."""
    queued = 0
    try:
        if len(messages) == 1 or any(message.headers for message in messages):
            for message in messages:
                headers = list(message.headers) or None
                producer.produce(topic, message.value, message.key, partition, delivery, headers=headers)
                queued += 1
            return queued, None
        for first in range(0, len(messages), _BATCH_MESSAGES):
            some: list[dict[str, Any]]
            some = [{"value": m.value, "key": m.key} for m in messages[first : first + _BATCH_MESSAGES]]
            queued += producer.produce_batch(topic, some, partition=partition, on_delivery=delivery)
            refused = next((message["_error"] for message in some if "_error" in message), None)
            if refused is not None:
                return queued, refused
        return queued, None
    except BufferError:
        return queued, KafkaError(KafkaError._QUEUE_FULL)
    except KafkaException as error:
        return queued, error.args[0]
