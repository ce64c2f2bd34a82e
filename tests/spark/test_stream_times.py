# SPDX-License-Identifier: Apache-2.0
"""What a table's pipeline says of the times of its stream: in marks and heartbeats, and in its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from pipelines import World, event, wait_for

from cremant.epoch.records import Heartbeat, RowBlock
from cremant.log.api import Message
from cremant.model.cluster import StreamProgress
from cremant.pipeline.query import TableQuery
from kafka import KafkaCluster

Session = Callable[[], Any]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def proven(query: TableQuery, partition: int = 0) -> int:
    """The last time at which the partition was caught up; 0: never."""
    partitions = query.report().partitions
    return (partitions[partition].caught_up_at_ms or 0) if partition < len(partitions) else 0


def test_messages_that_become_no_rows_make_the_table_no_less_fresh(world: World, session: Session) -> None:
    """All are dropped by the filter, broken or empty: the newest of them counts, and errors are told from the rest."""
    ingestion = {"filterConfig": {"filterFunction": "id >= 0"}}
    world.add_table(partitions=1, config={"ingestionConfig": ingestion})
    values = [event(1), b"{broken", event(2), None, event(3)]
    times = []
    for value in values:
        times.append(world.stream.append("events", 0, [Message(value)]).timestamp_ms)
        time.sleep(0.003)
    query = world.query(session)
    wait_for(lambda: world.closed_rows() == 5)
    (content,) = world.read()
    assert (content.stopped, content.rows) == (None, [])
    blocks = [record for record in content.records if isinstance(record, RowBlock)]
    assert max(block.max_ingestion_ms or 0 for block in blocks) == times[-1]
    assert [block.rejected_from_ms for block in blocks if block.rejected_from_ms is not None] == [times[1]]
    assert max(mark.partitions[0].max_ingestion_ms or 0 for mark in content.marks) == times[-1]
    wait_for(lambda: query.report().partitions[0].max_ingestion_ms == times[-1], 60)
    assert (query.report().rejected_total, query.report().filtered_total) == (2, 3)


def test_an_idle_partition_is_proven_fresh_while_another_waits_for_its_epoch(world: World, session: Session) -> None:
    """Epochs days apart: what waits for the next one holds back its own partition alone."""
    world.add_table({"minEpochMs": 10**9}, partitions=2)
    query = world.query(session)
    wait_for(lambda: proven(query, 0) and proven(query, 1))
    written_ms = world.stream.append("events", 0, [Message(event(0))]).timestamp_ms
    wait_for(lambda: (query.report().partitions[0].stream_end, query.report().lag_rows) == (1, 1), 30)
    wait_for(lambda: proven(query, 1) > written_ms + 500, 30)
    waiting = query.report().partitions[0]
    assert (waiting.closed, waiting.max_ingestion_ms) == (0, None), "the epoch is not due yet"
    assert proven(query, 0) <= written_ms, "a message that was there is not visible"
    beats = [record for record in world.read()[1].records if isinstance(record, Heartbeat)]
    assert beats[-1].ends == (1, 0)


def test_the_report_before_while_and_after_a_pause(world: World, session: Session) -> None:
    world.add_table(partitions=2)
    query = world.query(session)
    wait_for(lambda: proven(query, 1))
    began_ms = now_ms()
    world.produce(range(40), partitions=2)
    wait_for(lambda: proven(query, 0) > began_ms and query.report().partitions[0].closed == 20, 60)
    report = query.report()
    assert report.at_ms >= began_ms
    for partition, one in enumerate(report.partitions):
        assert (one.partition, one.stream_end, one.planned, one.closed) == (partition, 20, 20, 20)
        assert began_ms <= (one.max_ingestion_ms or 0) <= (one.read_at_ms or 0) <= report.at_ms

    world.controller.tables.set_paused("events", paused=True, comment="")
    query.update(world.view())
    wait_for(lambda: query.report().state == "paused", 60)
    before = query.report()
    world.produce(range(40, 80), partitions=2)
    time.sleep(0.7)
    after = query.report()
    assert after.partitions == before.partitions, "nobody looks at the stream meanwhile"
    assert (after.stream_error, after.error) == (None, None)
    assert after.at_ms > before.at_ms

    world.controller.tables.set_paused("events", paused=False, comment="")
    query.update(world.view())
    wait_for(lambda: [one.closed for one in query.report().partitions] == [40, 40], 60)
    wait_for(lambda: proven(query, 0) > after.at_ms, 60)


def test_a_pipeline_that_starts_again_is_proven_caught_up_without_a_new_message(world: World, session: Session) -> None:
    """By another process: it knows nothing of what the first one reported."""
    world.add_table(partitions=2)
    first = world.query(session)
    world.produce(range(40), partitions=2)
    wait_for(lambda: world.closed_rows() == 40 and proven(first, 0) and proven(first, 1))
    first.stop()
    assert first.join(20)
    stopped_ms = now_ms()
    second = world.query(session)
    assert second.report().partitions == ()
    wait_for(lambda: proven(second, 0) > stopped_ms and proven(second, 1) > stopped_ms)
    found = second.report().partitions
    assert [(one.stream_end, one.closed, one.max_ingestion_ms) for one in found] == [(20, 20, None)] * 2
    assert isinstance(found[0], StreamProgress)


# --- streams in Kafka ---


@pytest.fixture
def kafka_world(tmp_path: Path, kafka: KafkaCluster) -> Iterator[World]:
    """Streams in Kafka, epoch logs embedded."""
    world = World(tmp_path, stream_brokers=kafka.brokers)
    yield world
    kafka.heal()
    world.close()


def test_a_stream_that_does_not_answer_is_said_in_words(
    kafka_world: World, kafka: KafkaCluster, session: Session
) -> None:
    """Before any deadline of its requests; nothing is proven meanwhile, and it goes on by itself."""
    world = kafka_world
    world.add_table(partitions=1)
    query = world.query(session)
    wait_for(lambda: proven(query))
    assert query.report().stream_error is None
    kafka.pause(1)
    stopped_ms = now_ms()
    wait_for(lambda: query.report().stream_error, 30)
    said = query.report()
    assert "no answer for" in (said.stream_error or "")
    assert world.topic() in (said.stream_error or "")
    (one,) = said.partitions
    assert (one.read_at_ms or 0) <= stopped_ms
    assert (one.caught_up_at_ms or 0) <= stopped_ms
    kafka.resume(1)
    resumed_ms = now_ms()
    wait_for(lambda: proven(query) > resumed_ms, 120)
    assert query.report().stream_error is None


def test_what_nobody_can_see_of_transactions_is_nothing_that_is_missing(
    kafka_world: World, kafka: KafkaCluster, session: Session
) -> None:
    """A stream that ends with markers or aborted messages is caught up with, and so is what may be read while a
    transaction is open."""
    world = kafka_world
    world.add_table(partitions=1)
    topic = world.topic()
    producer = Producer({"bootstrap.servers": kafka.brokers, "transactional.id": topic, "log_level": 0})
    producer.init_transactions(30)

    def write(numbers: range) -> None:
        producer.begin_transaction()
        for number in numbers:
            producer.produce(topic, event(number), partition=0)
        producer.flush(30)

    def caught_up_at(end: int) -> None:
        asked_ms = now_ms()
        wait_for(lambda: proven(query) > asked_ms and query.report().partitions[0].closed == end, 120)
        assert query.report().partitions[0].stream_end == end

    write(range(10))
    producer.commit_transaction(30)
    write(range(1_000, 1_010))
    producer.abort_transaction(30)
    query = world.query(session)
    caught_up_at(22)
    write(range(1_010, 1_020))
    caught_up_at(22)
    producer.abort_transaction(30)
    caught_up_at(33)
    (content,) = world.read()
    assert [row["id"] for row in content.rows] == list(range(10))
    blocks = [record for record in content.records if isinstance(record, RowBlock)]
    assert (blocks[-1].timestamp_type, blocks[-1].max_ingestion_ms) == ("", None), "markers have no time"
