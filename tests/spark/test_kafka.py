# SPDX-License-Identifier: Apache-2.0
"""Streams and epoch logs in Kafka: real brokers that are killed, topics that change, transactions, fences."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer, TopicCollection
from confluent_kafka.admin import AdminClient, NewPartitions
from pipelines import LocalMember, World, check, event, wait_for

from cremant.epoch.format import row_block, to_message
from cremant.epoch.records import EpochMark, RowBlock
from cremant.log.api import Message
from cremant.model.errors import PeerError
from cremant.model.names import epoch_topic
from cremant.model.offsets import OffsetRange
from cremant.pipeline.query import TableQuery
from kafka import KafkaCluster

Session = Callable[[], Any]


@pytest.fixture
def make_world(tmp_path: Path, kafka: KafkaCluster) -> Iterator[Callable[..., World]]:
    """`make_world(stream=..., epoch=...)`, each in Kafka or embedded."""
    made: list[World] = []

    def make(*, stream: str = "kafka", epoch: str = "kafka") -> World:
        brokers = kafka.brokers if stream == "kafka" else ""
        settings = {"epoch_log": epoch, "kafka_brokers": kafka.brokers} if epoch == "kafka" else {}
        made.append(World(tmp_path, stream_brokers=brokers, **settings))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


@pytest.mark.parametrize(("stream", "epoch"), [("kafka", "kafka"), ("kafka", "embedded"), ("embedded", "kafka")])
def test_a_broker_that_dies_costs_a_pause_and_no_row(
    make_world: Callable[..., World], kafka: KafkaCluster, session: Session, stream: str, epoch: str
) -> None:
    """While it is away the table says so in plain words; then it goes on by itself, every row once."""
    world = make_world(stream=stream, epoch=epoch)
    world.add_table(partitions=2)
    world.produce(range(1_000), partitions=2)
    query = world.query(session)
    wait_for(lambda: world.closed_rows() == 1_000, 120)
    kafka.kill(1)
    wait_for(lambda: query.report().state == "backoff", 120)
    assert kafka.brokers in (query.report().error or "")
    kafka.restart(1)
    world.produce(range(1_000, 3_000), partitions=2)

    wait_for(lambda: closed_rows(world) == 3_000, 180)
    check(world.read(), range(3_000))
    wait_for(lambda: (query.report().state, query.report().error) == ("running", None), 60)


def test_a_change_of_leaders_loses_and_doubles_no_row(
    tmp_path: Path, kafka_three: KafkaCluster, session: Session
) -> None:
    """Of three brokers one is killed while rows flow: the leader of partition 0 of the epoch log and of a partition of
    the stream. Two of three are enough: rows are taken and become visible while it is dead. What counts is what the
    stream holds; that is all that was acknowledged, and perhaps what nobody knows of."""
    world = World(
        tmp_path, stream_brokers=kafka_three.brokers, epoch_log="kafka", kafka_brokers=kafka_three.brokers,
        kafka_replication=3,
    )  # fmt: skip
    try:
        view = world.add_table(partitions=3)
        query = world.query(session)
        with flowing(world) as acknowledged:
            wait_for(lambda: closed_rows(world) > 0, 120)
            leader = leaders_of(kafka_three, epoch_topic("events", view.record.incarnation))[0]
            assert leader in leaders_of(kafka_three, world.topic())
            kafka_three.kill(leader)
            before = acknowledged.copy()
            wait_for(lambda: len(acknowledged) > len(before) + 100, 60, "rows are taken")
            new = acknowledged - before
            wait_for(lambda: new <= numbers_in(world), 60, "rows that came without it are visible")
            kafka_three.restart(leader, wait=False)
        held = [json.loads(value)["id"] for part in range(3) for value in stream_values(world, part)]
        assert acknowledged <= set(held)
        assert len(held) == len(set(held))
        wait_for(lambda: closed_rows(world) == len(held), 120)
        check(world.read(), held)
        wait_for(lambda: (query.report().state, query.report().error) == ("running", None), 60)
    finally:
        world.close()


@contextlib.contextmanager
def flowing(world: World) -> Iterator[set[int]]:
    """Rows are produced all the time; the numbers of those that were acknowledged."""
    stop, acknowledged = threading.Event(), set[int]()

    def produce() -> None:
        first = 0
        while not stop.wait(0.1):
            numbers = range(first, first + 15)
            first += 15
            try:
                world.produce(numbers, partitions=3)
            except PeerError:  # which of them are there, nobody knows; the next ones are others
                continue
            acknowledged.update(numbers)

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield acknowledged
    finally:
        stop.set()
        thread.join(120)
        assert not thread.is_alive()


def leaders_of(kafka: KafkaCluster, topic: str) -> list[int]:
    """By partition."""
    admin = AdminClient(kafka.client())
    described = admin.describe_topics(TopicCollection([topic]))[topic].result(30)
    return [int(partition.leader.id) for partition in described.partitions]


def closed_rows(world: World) -> int:
    """-1 while brokers do not say."""
    try:
        return world.closed_rows()
    except PeerError:
        return -1


def numbers_in(world: World) -> set[int]:
    """Rows that readers of the epoch log take now."""
    try:
        return {row["id"] for content in world.read() for row in content.rows}
    except PeerError:
        return set()


def stream_values(world: World, partition: int) -> list[bytes]:
    reader = world.stream.reader(world.topic(), partition, 0)
    values: list[bytes] = []
    while (batch := reader.read(max_messages=1_000, max_bytes=1 << 20)) is not None:
        values += batch.values.to_pylist()
    return values


def test_a_broker_that_is_not_there_yet_is_waited_for(world: World, kafka: KafkaCluster, session: Session) -> None:
    world.add_table(partitions=1)
    world.produce(range(100), partitions=1)
    kafka.kill(1)
    query = world.query(session)
    wait_for(lambda: query.report().state == "backoff", 120)
    report = query.report()
    assert report.generation == 0, "nothing is fenced for a start that cannot be"
    assert kafka.brokers in (report.error or "")
    kafka.restart(1)
    wait_for(lambda: world.closed_rows() == 100, 180)
    check(world.read(), range(100))


def test_transactions_leave_holes_that_are_covered(world: World, kafka: KafkaCluster, session: Session) -> None:
    """Committed ones count, aborted ones do not, an open one holds back what is behind it; offsets of markers and of
    aborted messages are inside of blocks' ranges."""
    world.add_table(partitions=1)
    topic = world.topic()
    producer = Producer({"bootstrap.servers": kafka.brokers, "transactional.id": topic, "log_level": 0})
    producer.init_transactions(30)

    def transaction(numbers: range, *, commit: bool) -> None:
        producer.begin_transaction()
        for number in numbers:
            producer.produce(topic, event(number), partition=0)
        producer.flush(30)
        if commit:
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)

    transaction(range(10), commit=True)
    transaction(range(1_000, 1_010), commit=False)
    transaction(range(10, 20), commit=True)
    query = world.query(session)
    wait_for(lambda: sum(content.row_count for content in world.read()) == 20, 120)
    transaction(range(1_010, 1_020), commit=False)
    producer.begin_transaction()
    producer.produce(topic, event(20), partition=0)
    producer.flush(30)
    world.stream.append(topic, 0, [Message(event(21))])
    wait_for(lambda: world.closed_rows() == 44, 60, "all but what is behind the open transaction")
    producer.commit_transaction(30)
    wait_for(lambda: sum(content.row_count for content in world.read()) == 22, 120)
    wait_for(lambda: world.closed_rows() == 47, 60, "the marker at the end, too")
    (content,) = world.read()
    check([content], range(22))
    blocks = [record for record in content.records if isinstance(record, RowBlock)]
    assert [block.range.first for block in blocks] == [0, *(block.range.next for block in blocks[:-1])]
    assert (query.report().restarts, query.report().rejected_total) == (0, 0)


def test_what_an_orphan_of_an_older_generation_appends_is_ignored(world: World, session: Session) -> None:
    """Blocks and a mark of generation 1 behind the Fence of generation 2, as a killed pipeline's workers may write."""
    view = world.add_table(partitions=1)
    world.produce(range(100), partitions=1)
    first = world.query(session)
    wait_for(lambda: world.closed_rows() == 100, 120)
    first.stop()
    assert first.join(20)
    world.query(session)
    world.produce(range(100, 200), partitions=1)
    wait_for(lambda: world.closed_rows() == 200, 120)
    topic, (content,) = epoch_topic("events", view.record.incarnation), world.read()
    block = next(record for record in content.records if isinstance(record, RowBlock))
    mark = content.marks[-1]
    forged = row_block(
        generation=1, epoch=mark.epoch + 1, config_version=1, range=OffsetRange(200, 300),
        batch=block.batch.set_column(0, block.batch.schema.field(0), _shifted(block, 200)), timestamp_type="logAppend",
    )  # fmt: skip
    world.log.append(topic, 0, [to_message(forged, view.record.incarnation)])
    stale = EpochMark(
        generation=1, epoch=mark.epoch + 1, previous=mark.epoch, blocks_generation=1, config_version=1,
        partitions=mark.partitions,
    )  # fmt: skip
    world.log.append(topic, 0, [to_message(stale, view.record.incarnation)])
    world.produce(range(200, 300), partitions=1)
    wait_for(lambda: world.closed_rows() >= 300, 120)
    contents = world.read()
    check(contents, range(300))
    assert contents[0].ignored >= 2


def _shifted(block: RowBlock, first: int) -> Any:
    return pa.array(range(first, first + block.batch.num_rows), pa.int64())


def test_a_pipeline_that_was_overtaken_finds_the_fence_before_its_mark(
    world: World, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs between blocks and mark while another takes over and closes the epoch; reading partition 0 back shows
    it the Fence of its successor, so it marks nothing else and commits nothing."""
    from cremant.pipeline.closer import Closer

    world.add_table(partitions=2)
    hanging, wake = threading.Event(), threading.Event()
    original = Closer.close

    def hang_once(self: Closer, *args: Any) -> Any:
        if not hanging.is_set():
            hanging.set()
            assert wake.wait(120)
        return original(self, *args)

    monkeypatch.setattr(Closer, "close", hang_once)
    first = world.query(session, member=LocalMember(world.controller, "Pipeline_first_1"))
    world.produce(range(200), partitions=2)
    assert hanging.wait(120)
    first._lease.drop()  # nobody hears of it any more, and it does not know
    world.query(
        session, member=LocalMember(world.controller, "Pipeline_second_1"), settings=world.settings_for(
            "second", epoch_log="kafka", kafka_brokers=world.settings.kafka_brokers
        )
    )  # fmt: skip
    wait_for(lambda: world.closed_rows() == 200, 180)
    wake.set()
    wait_for(lambda: first.report().restarts > 0, 120)
    wait_for(lambda: first.report().state == "waiting", 120)
    world.produce(range(200, 400), partitions=2)
    wait_for(lambda: world.closed_rows() == 400, 120)
    contents = world.read()
    check(contents, range(400))
    late = [mark for mark in contents[0].marks if mark.generation == 1]
    assert late, "its mark is in partition 0, behind the fence"
    assert not [mark for mark in contents[1].marks if mark.generation == 1]


def test_what_retention_dropped_becomes_a_gap_or_stops_the_table(world: World, session: Session) -> None:
    world.add_table(partitions=1)
    world.produce(range(1_000), partitions=1)
    world.stream.trim(world.topic(), 0, 400)
    query = world.query(session)
    wait_for(lambda: world.closed_rows() == 1_000, 120)
    (content,) = world.read()
    assert [(gap.range.first, gap.range.next, gap.reason) for gap in content.gaps] == [(0, 400, "expired")]
    assert [row["id"] for row in content.rows] == list(range(400, 1_000))
    stop(query)
    world.produce(range(1_000, 2_000), partitions=1)
    world.stream.trim(world.topic(), 0, 1_500)
    world.controller.tables.change("events", world.config({"expiredOffsets": "stop"}))
    query = world.query(session)
    wait_for(lambda: query.report().state == "failed", 120)
    assert "offsets 1000 to 1500" in (query.report().error or "")


def stop(query: TableQuery) -> None:
    query.stop()
    assert query.join(20)


def test_a_topic_that_was_created_again_stops_the_table(world: World, session: Session) -> None:
    world.add_table(partitions=1)
    world.produce(range(100), partitions=1)
    query = world.query(session)
    wait_for(lambda: world.closed_rows() == 100, 120)
    stop(query)  # else it may look between the two, when the topic is deleted and no more
    world.stream.delete_topic(world.topic())
    world.stream.create_topic(world.topic(), 1)
    world.produce(range(500, 800), partitions=1)
    query = world.query(session)
    wait_for(lambda: query.report().state == "failed", 120)
    assert "deleted and created again" in (query.report().error or "")
    check(world.read(), range(100))


def test_partitions_that_are_added_take_part_once_they_are_served(
    world: World, kafka: KafkaCluster, session: Session
) -> None:
    world.add_table(partitions=1)
    world.entered("events", 1)
    query = world.query(session)
    world.produce(range(100), partitions=1)
    wait_for(lambda: world.closed_rows() == 100, 120)
    admin = AdminClient({"bootstrap.servers": kafka.brokers, "log_level": 0})
    for done in admin.create_partitions([NewPartitions(world.topic(), 2)]).values():
        done.result(30)
    wait_for(lambda: world.stream.topic(world.topic()).partitions == 2, 30)
    world.controller.tables.grow("events")
    world.entered("events", 2)
    query.update(world.view())
    world.stream.append(world.topic(), 1, [Message(event(number)) for number in range(100, 200)])
    wait_for(lambda: world.closed_rows() == 200, 120)
    contents = world.read()
    assert all(content.stopped is None for content in contents)
    assert [len(content.rows) for content in contents] == [100, 100]


def test_keys_headers_and_offsets_of_messages_become_columns(
    world: World, kafka: KafkaCluster, session: Session
) -> None:
    world.add_table(partitions=1, schema=_SCHEMA, stream={"metadata.populate": "true"})
    producer = Producer({"bootstrap.servers": kafka.brokers, "log_level": 0})
    producer.produce(
        world.topic(), event(1), key=b"k1", partition=0, headers=[("who", b"me")], timestamp=1_700_000_000_000
    )
    producer.produce(world.topic(), event(2), partition=0)
    assert producer.flush(30) == 0
    world.query(session)
    wait_for(lambda: world.closed_rows() == 2, 120)
    (content,) = world.read()
    assert [(row["__key"], row["__header$who"], row["__metadata$offset"]) for row in content.rows] == [
        ("k1", "me", 0), ("null", "null", 1),
    ]  # fmt: skip


_SCHEMA: dict[str, Any] = {
    "schemaName": "events",
    "dimensionFieldSpecs": [
        {"name": "id", "dataType": "LONG"},
        {"name": "__key", "dataType": "STRING"},
        {"name": "__header$who", "dataType": "STRING"},
        {"name": "__metadata$offset", "dataType": "LONG"},
    ],
    "dateTimeFieldSpecs": [
        {"name": "ts", "dataType": "LONG", "format": "1:MILLISECONDS:EPOCH", "granularity": "1:MILLISECONDS"}
    ],
}
