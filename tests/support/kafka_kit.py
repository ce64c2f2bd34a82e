# SPDX-License-Identifier: Apache-2.0
"""What tests of Kafka logs share: topics of one's own, foreign producers, transactions, reading until a condition."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from cremant.log.api import LogReader, Message
from kafka import KafkaCluster

_numbers = itertools.count()


def new_name(prefix: str = "t") -> str:
    """A topic that no other test has."""
    return f"{prefix}-{os.getpid()}-{next(_numbers)}"


def foreign_topic(kafka: KafkaCluster, partitions: int = 1, **config: Any) -> str:
    """A topic as somebody else made it, in the brokers' own defaults but for `config` (dots as underscores)."""
    name = new_name("foreign")
    settings = {key.replace("_", "."): str(value) for key, value in config.items()}
    admin = AdminClient(kafka.client())
    [created] = admin.create_topics([NewTopic(name, partitions, -1, config=settings)]).values()
    created.result()
    wait_until(lambda: name in admin.list_topics(timeout=5).topics)
    return name


def transactional(kafka: KafkaCluster) -> Any:
    producer = Producer(kafka.client(**{"transactional.id": new_name("writer"), "linger.ms": 0}))
    producer.init_transactions(30)
    return producer


def transaction(producer: Any, topic: str, values: Sequence[bytes], *, commit: bool) -> None:
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value, partition=0)
    producer.flush(30)
    if commit:
        producer.commit_transaction(30)
    else:
        producer.abort_transaction(30)


def numbered(first: int, count: int) -> list[Message]:
    return [Message(b"%d" % number) for number in range(first, first + count)]


def values_to_end(reader: LogReader) -> list[bytes]:
    found: list[bytes] = []
    while (batch := reader.read(max_messages=1000, max_bytes=1 << 20)) is not None:
        found += batch.values.to_pylist()
    return found


def read_until(reader: LogReader, count: int, timeout_s: float = 60.0) -> list[bytes]:
    """`count` values at least, whatever errors and pauses come between."""
    from cremant.model.errors import PeerError

    found: list[bytes] = []
    until_s = time.monotonic() + timeout_s
    while len(found) < count:
        assert time.monotonic() < until_s, f"{len(found)} of {count} messages after {timeout_s} s"
        try:
            batch = reader.read(max_messages=1000, max_bytes=1 << 20)
        except PeerError:
            batch = None
        if batch is None:
            time.sleep(0.01)
        else:
            found += batch.values.to_pylist()
    return found


def wait_until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < until_s, f"not after {timeout_s} s"
        time.sleep(0.02)
