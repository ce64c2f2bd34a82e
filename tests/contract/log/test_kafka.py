# SPDX-License-Identifier: Apache-2.0
"""What only Kafka has: transactions, compaction, foreign topics, retention behind one's back, one consumer for all."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from kafka_kit import (
    foreign_topic,
    new_name,
    numbered,
    read_until,
    transaction,
    transactional,
    values_to_end,
    wait_until,
)

from cremant.log.api import Message, OffsetExpired, TimestampType
from cremant.log.kafka import KafkaLog
from cremant.log.produce import produce_lines
from cremant.model.errors import NotFound
from cremant.model.limits import RECORD_BYTES_MAX
from cremant.model.names import epoch_topic
from cremant.model.offsets import OffsetRange
from kafka import KafkaCluster

BIG = 1 << 30


@pytest.fixture
def log(kafka: KafkaCluster) -> Iterator[KafkaLog]:
    opened = KafkaLog(kafka.brokers)
    yield opened
    opened.close()


# --- transactions ---


def test_aborted_messages_are_never_seen_and_the_end_is_reached_behind_a_marker(
    kafka: KafkaCluster, log: KafkaLog
) -> None:
    topic = foreign_topic(kafka)
    writer = transactional(kafka)
    transaction(writer, topic, [b"a1", b"a2"], commit=True)
    transaction(writer, topic, [b"no"] * 3, commit=False)
    transaction(writer, topic, [b"b1"], commit=True)
    transaction(writer, topic, [b"no"] * 3, commit=False)
    reader = log.reader(topic, 0, 0)
    assert values_to_end(reader) == [b"a1", b"a2", b"b1"]
    # 9 messages and 4 markers: the last offset is a marker.
    assert log.latest(topic, 0) == reader.position == 13
    assert not log.wait({(topic, 0): reader.position}, 0.2)
    transaction(writer, topic, [b"c1"], commit=True)
    assert log.wait({(topic, 0): reader.position}, 30.0)
    assert values_to_end(reader) == [b"c1"]


def test_waiting_is_not_ended_by_markers_and_aborted_messages(kafka: KafkaCluster, log: KafkaLog) -> None:
    topic = foreign_topic(kafka)
    writer = transactional(kafka)
    reader = log.reader(topic, 0, 0)
    assert values_to_end(reader) == []
    aborting = threading.Timer(0.1, lambda: transaction(writer, topic, [b"no"], commit=False))
    aborting.start()
    assert not log.wait({(topic, 0): 0}, 1.0)
    aborting.join()
    assert values_to_end(reader) == []
    assert reader.position == 2


def test_an_open_transaction_hides_what_is_behind_it_until_it_ends(kafka: KafkaCluster, log: KafkaLog) -> None:
    topic = foreign_topic(kafka)
    writer = transactional(kafka)
    reader = log.reader(topic, 0, 0)
    writer.begin_transaction()
    writer.produce(topic, b"slow", partition=0)
    writer.flush(30)
    assert log.append(topic, 0, [Message(b"quick")]).first_offset == 1
    assert log.latest(topic, 0) == 0
    assert values_to_end(reader) == []
    assert not log.wait({(topic, 0): 0}, 0.2)
    writer.commit_transaction(30)
    assert log.wait({(topic, 0): 0}, 30.0)
    assert read_until(reader, 2) == [b"slow", b"quick"]


def test_uncommitted_messages_are_read_where_the_stream_says_so(kafka: KafkaCluster) -> None:
    topic = foreign_topic(kafka)
    transaction(transactional(kafka), topic, [b"undone"], commit=False)
    log = KafkaLog(kafka.brokers, {"isolation.level": "read_uncommitted"})
    assert values_to_end(log.reader(topic, 0, 0)) == [b"undone"]
    log.close()


# --- compaction, timestamps, foreign topics ---


def test_holes_of_compaction_are_passed_over(kafka: KafkaCluster, log: KafkaLog) -> None:
    topic = foreign_topic(
        kafka, cleanup_policy="compact", segment_bytes=1024 * 1024, segment_ms=100, min_cleanable_dirty_ratio=0.01,
        max_compaction_lag_ms=100,
    )  # fmt: skip
    for round_ in range(20):
        log.append(topic, 0, [Message(b"%d" % round_, b"key"), Message(b"other", b"k%d" % round_)])

    def offsets() -> list[int]:
        # A segment is rolled by the append after its time; only closed ones are compacted.
        log.append(topic, 0, [Message(b"last", b"last")])
        found: list[int] = []
        reader = log.reader(topic, 0, 0)
        while (batch := reader.read(max_messages=7, max_bytes=BIG)) is not None:
            assert batch.next_offset > batch.offsets[-1]
            found += batch.offsets.tolist()
        reader.close()
        assert found == sorted(set(found))
        assert found[-1] == reader.position - 1 == log.latest(topic, 0) - 1
        time.sleep(0.1)
        return found

    wait_until(lambda: not {0, 2, 4} & set(offsets()))
    assert {1, 3, 5, 38, 39} <= set(offsets())


def test_timestamps_of_a_foreign_topic_are_its_producers_until_it_changes(kafka: KafkaCluster, log: KafkaLog) -> None:
    topic = foreign_topic(kafka)
    producer = Producer(kafka.client())
    hour_ago_ms = int(time.time() * 1000) - 3_600_000
    for at_ms in (hour_ago_ms, hour_ago_ms + 1):
        producer.produce(topic, b"old", partition=0, timestamp=at_ms)
    producer.flush(30)
    resource = ConfigResource(
        ResourceType.TOPIC, topic,
        incremental_configs=[
            ConfigEntry("message.timestamp.type", "LogAppendTime", incremental_operation=AlterConfigOpType.SET)
        ],
    )  # fmt: skip
    admin = AdminClient(kafka.client())
    [changed] = admin.incremental_alter_configs([resource]).values()
    changed.result()
    reader = log.reader(topic, 0, 0)

    def appended_by_the_log() -> bool:
        log.append(topic, 0, [Message(b"new")])
        return TimestampType.LOG_APPEND in kinds()

    def kinds() -> list[TimestampType]:
        reader.seek(0)
        found = []
        while (batch := reader.read(max_messages=1000, max_bytes=BIG)) is not None:
            found.append(batch.timestamp_type)
            if found == [TimestampType.CREATE]:
                assert batch.timestamps_ms.tolist()[:2] == [hour_ago_ms, hour_ago_ms + 1]
        return found

    wait_until(appended_by_the_log)
    assert kinds()[0] is TimestampType.CREATE


def test_a_record_of_the_largest_size_comes_back(log: KafkaLog) -> None:
    topic = epoch_topic("large", "0123456789abcdef") + new_name()
    log.create_topic(topic, 1)
    large = bytes(range(256)) * (RECORD_BYTES_MAX // 256)
    log.append(topic, 0, [Message(b"before")])
    log.append(topic, 0, [Message(large)])
    log.append(topic, 0, [Message(b"after")])
    assert read_until(log.reader(topic, 0, 0), 3) == [b"before", large, b"after"]
    log.delete_topic(topic)


def test_lines_are_produced_with_keys_as_javas_clients_spread_them(kafka: KafkaCluster, log: KafkaLog) -> None:
    topic = new_name()
    log.create_topic(topic, 4)
    lines = b"\n".join(b'{"key": "k%d", "value": {"n": %d}}' % (n % 50, n) for n in range(1000))
    produced = produce_lines(log, topic, lines, keyed=True)
    assert produced.messages == 1000
    assert produced.ranges == {p: [OffsetRange(0, log.latest(topic, p))] for p in range(4)}
    theirs = Producer(kafka.client(partitioner="murmur2_random"))
    placed: dict[bytes, int] = {}
    for n in range(50):
        theirs.produce(topic, b"", b"k%d" % n, on_delivery=lambda _, m: placed.__setitem__(m.key(), m.partition()))
    theirs.flush(30)
    for partition in range(4):
        batch = log.reader(topic, partition, 0).read(max_messages=2000, max_bytes=BIG)
        assert batch is not None
        assert {placed[key] for key in batch.keys.to_pylist()} == {partition}


# --- retention and other people ---


def test_a_reader_that_retention_has_overtaken_is_told_what_is_left(kafka: KafkaCluster, log: KafkaLog) -> None:
    topic = foreign_topic(kafka, segment_bytes=1024 * 1024, segment_ms=100, retention_ms=500)
    for n in range(3):
        log.append(topic, 0, numbered(10 * n, 10))
    wait_until(lambda: log.earliest(topic, 0) > 0)
    reader = log.reader(topic, 0, 0)
    with pytest.raises(OffsetExpired) as caught:
        reader.read(max_messages=1, max_bytes=BIG)
    assert caught.value.earliest > 0
    reader.seek(caught.value.earliest)
    assert values_to_end(reader) == [b"%d" % n for n in range(caught.value.earliest, 30)]


def test_records_that_somebody_else_deleted_are_expired(kafka: KafkaCluster, log: KafkaLog) -> None:
    topic = new_name()
    log.create_topic(topic, 1)
    log.append(topic, 0, numbered(0, 100))
    other = KafkaLog(kafka.brokers)
    other.trim(topic, 0, 60)
    other.close()
    reader = log.reader(topic, 0, 10)
    with pytest.raises(OffsetExpired) as caught:
        reader.read(max_messages=1, max_bytes=BIG)
    assert caught.value.earliest == 60


def test_a_topic_that_somebody_else_created_again_is_another_one_even_at_offsets_that_it_has(
    kafka: KafkaCluster, log: KafkaLog
) -> None:
    topic = new_name()
    old = log.create_topic(topic, 1)
    log.append(topic, 0, numbered(0, 10))
    reader = log.reader(topic, 0, 0)
    assert len(values_to_end(reader)) == 10
    other = KafkaLog(kafka.brokers)
    other.delete_topic(topic)
    new = other.create_topic(topic, 1)
    other.append(topic, 0, numbered(0, 100))
    other.close()
    assert new.incarnation != old.incarnation
    with pytest.raises(NotFound, match=f"{old.incarnation} is gone"):
        read_until(reader, 1)
    assert len(values_to_end(log.reader(topic, 0, 0))) == 100


def test_partitions_that_somebody_else_added_are_used_at_once(kafka: KafkaCluster, log: KafkaLog) -> None:
    topic = new_name()
    log.create_topic(topic, 1)
    log.append(topic, 0, numbered(0, 1))
    assert values_to_end(log.reader(topic, 0, 0)) == [b"0"]
    other = KafkaLog(kafka.brokers)
    other.grow_topic(topic, 3)
    other.close()
    assert log.topic(topic).partitions == 3
    assert log.append(topic, 2, numbered(7, 1)).first_offset == 0
    assert read_until(log.reader(topic, 2, 0), 1) == [b"7"]


def test_what_other_processes_append_wakes_who_waits_with_a_reader_or_without(
    kafka: KafkaCluster, log: KafkaLog
) -> None:
    topic = new_name()
    log.create_topic(topic, 2)
    other = KafkaLog(kafka.brokers)
    reader = log.reader(topic, 0, 0)
    for round_ in range(5):
        for partition in (0, 1):
            assert values_to_end(reader) == []
            timer = threading.Timer(0.05, other.append, (topic, partition, numbered(round_, 1)))
            timer.start()
            assert log.wait({(topic, 0): round_, (topic, 1): round_}, 30.0)
            timer.join()
            assert log.latest(topic, partition) == round_ + 1
            if partition == 0:
                assert read_until(reader, 1) == [b"%d" % round_]
                assert not log.wait({(topic, 0): round_ + 1, (topic, 1): round_}, 0.05)
    other.close()


def test_waiting_costs_little(log: KafkaLog) -> None:
    topic = new_name()
    log.create_topic(topic, 16)
    reader = log.reader(topic, 0, 0)
    assert values_to_end(reader) == []
    positions = {(topic, partition): 0 for partition in range(16)}
    log.wait(positions, 0.5)
    began_s, used_s = time.monotonic(), time.process_time()
    assert not log.wait(positions, 3.0)
    assert time.process_time() - used_s < (time.monotonic() - began_s) / 4


# --- one consumer ---


def test_sixty_four_readers_share_one_consumer(log: KafkaLog) -> None:
    topic = new_name()
    log.create_topic(topic, 64)
    for partition in range(64):
        log.append(topic, partition, numbered(partition, 3))
    readers = [log.reader(topic, partition, 0) for partition in range(64)]
    assert values_to_end(readers[0]) == [b"0", b"1", b"2"]
    tasks = len(os.listdir("/proc/self/task"))
    for partition, reader in enumerate(readers[1:], 1):
        assert values_to_end(reader) == [b"%d" % (partition + n) for n in range(3)]
    assert len(os.listdir("/proc/self/task")) == tasks


def test_readers_of_one_partition_do_not_disturb_each_other(log: KafkaLog) -> None:
    topic = new_name()
    log.create_topic(topic, 1)
    log.append(topic, 0, numbered(0, 300))
    readers = [log.reader(topic, 0, 100 * n) for n in range(3)]
    for step in range(10):
        for n, reader in enumerate(readers):
            batch = reader.read(max_messages=10, max_bytes=BIG)
            assert batch is not None
            assert batch.offsets.tolist() == list(range(100 * n + 10 * step, 100 * n + 10 * step + 10))


def test_readers_that_jump_about_while_others_write_always_get_the_messages_of_their_offsets(
    kafka: KafkaCluster, log: KafkaLog
) -> None:
    """Every message says its partition and number; two threads move four readers, a third one appends elsewhere."""
    topic, seed = new_name(), random.randrange(2**32)
    log.create_topic(topic, 4)
    stop = threading.Event()
    failures: list[str] = []

    def write() -> None:
        other = KafkaLog(kafka.brokers)
        numbers = [0] * 4
        dice = random.Random(seed)
        while not stop.is_set():
            partition, count = dice.randrange(4), dice.choice([1, 10, 1000])
            size = dice.choice([1, 100, 3000])
            first = numbers[partition]
            other.append(
                topic,
                partition,
                [Message(b"%d/%d/" % (partition, n) + bytes(size)) for n in range(first, first + count)],
            )
            numbers[partition] += count
        other.close()

    def read(number: int) -> None:
        dice = random.Random(seed + number)
        readers = {partition: log.reader(topic, partition, 0) for partition in range(4)}
        while not stop.is_set() and not failures:
            partition = dice.randrange(4)
            reader = readers[partition]
            if dice.random() < 0.3:
                reader.seek(dice.randrange(max(1, log.latest(topic, partition))))
            at = reader.position
            batch = reader.read(max_messages=dice.choice([1, 50, 5000]), max_bytes=dice.choice([1, 10_000, BIG]))
            if batch is None:
                if at < log.known_end(topic, partition) and at < log.latest(topic, partition) and reader.position == at:
                    failures.append(f"nothing at {at} of partition {partition}")
                continue
            expected = list(range(at, at + len(batch)))
            said = [value.split(b"/", 2)[:2] for value in batch.values.to_pylist()]
            if batch.offsets.tolist() != expected or said != [[b"%d" % partition, b"%d" % n] for n in expected]:
                failures.append(f"at {at} of partition {partition}: {batch.offsets[:3]}, {said[:3]}")

    threads = [threading.Thread(target=write), *(threading.Thread(target=read, args=(n,)) for n in (1, 2))]
    for thread in threads:
        thread.start()
    time.sleep(6)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not failures, f"seed {seed}: {failures}"
