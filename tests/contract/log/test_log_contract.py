# SPDX-License-Identifier: Apache-2.0
"""What every log promises (`cremant.log.api`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cremant.log.api import Bounds, Log, LogReader, Message, MessageBatch, OffsetExpired, TimestampType
from cremant.model.errors import AlreadyExists, Conflict, InvalidConfig, NotFound, UserError
from cremant.model.limits import APPEND_MESSAGES_MAX, PARTITIONS_MAX, RECORD_BYTES_MAX

BIG = 1 << 30


def numbered(first: int, count: int, size: int = 10) -> list[Message]:
    return [Message(b"%0*d" % (size, number)) for number in range(first, first + count)]


def messages_of(batch: MessageBatch) -> list[Message]:
    headers = batch.headers or ((),) * len(batch)
    return [Message(*row) for row in zip(batch.values.to_pylist(), batch.keys.to_pylist(), headers, strict=True)]


def read_some(reader: LogReader) -> MessageBatch:
    batch = reader.read(max_messages=10, max_bytes=BIG)
    assert batch is not None
    return batch


def drain(reader: LogReader, max_messages: int = 1000, max_bytes: int = BIG) -> list[Message]:
    found: list[Message] = []
    while (batch := reader.read(max_messages=max_messages, max_bytes=max_bytes)) is not None:
        assert len(batch) >= 1
        assert len(batch.values) == len(batch.keys) == len(batch.timestamps_ms) == len(batch)
        assert batch.next_offset == reader.position
        found += messages_of(batch)
    return found


# --- topics ---


def test_a_created_topic_is_listed_with_its_partitions(log: Log) -> None:
    created = log.create_topic("b", 3)
    log.create_topic("a", 1)
    assert created.partitions == 3
    assert log.topic("b") == created
    assert [info.name for info in log.topics()] == ["a", "b"]


def test_a_topic_cannot_be_created_twice(log: Log) -> None:
    log.create_topic("t", 1)
    with pytest.raises(AlreadyExists):
        log.create_topic("t", 1)


@pytest.mark.parametrize("name", ["", "..", "a/b", "ä", "x" * 201])
def test_a_topic_name_that_is_no_name_is_refused(log: Log, name: str) -> None:
    with pytest.raises(InvalidConfig):
        log.create_topic(name, 1)


@pytest.mark.parametrize("partitions", [0, -1, PARTITIONS_MAX + 1])
def test_a_count_of_partitions_out_of_bounds_is_refused(log: Log, partitions: int) -> None:
    with pytest.raises(InvalidConfig):
        log.create_topic("t", partitions)
    assert log.topics() == []


def test_a_grown_topic_keeps_its_messages_and_takes_new_ones_in_the_new_partitions(log: Log) -> None:
    before = log.create_topic("t", 1)
    log.append("t", 0, numbered(0, 3))
    grown = log.grow_topic("t", 3)
    assert grown == before._replace(partitions=3)
    assert log.append("t", 2, numbered(0, 1)).first_offset == 0
    assert drain(log.reader("t", 0, 0)) == numbered(0, 3)
    assert log.grow_topic("t", 3) == grown


def test_a_topic_does_not_shrink(log: Log) -> None:
    log.create_topic("t", 2)
    with pytest.raises(Conflict):
        log.grow_topic("t", 1)
    assert log.topic("t").partitions == 2


OPERATIONS: dict[str, Callable[[Log, str, int], object]] = {
    "append": lambda log, topic, partition: log.append(topic, partition, numbered(0, 1)),
    "earliest": lambda log, topic, partition: log.earliest(topic, partition),
    "latest": lambda log, topic, partition: log.latest(topic, partition),
    "offset_at": lambda log, topic, partition: log.offset_at(topic, partition, 0),
    "reader": lambda log, topic, partition: log.reader(topic, partition, 0),
    "bounds": lambda log, topic, partition: log.bounds(topic, [partition]),
    "trim": lambda log, topic, partition: log.trim(topic, partition, 0),
    "wait": lambda log, topic, partition: log.wait({(topic, partition): 0}, 0.0),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_topic_or_partition_that_does_not_exist_is_not_found(log: Log, operation: str) -> None:
    act = OPERATIONS[operation]
    log.create_topic("t", 2)
    for topic, partition in (("other", 0), ("t", 2), ("t", -1)):
        with pytest.raises(NotFound):
            act(log, topic, partition)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_deleted_topic_is_not_found(log: Log, operation: str) -> None:
    log.create_topic("t", 1)
    log.append("t", 0, numbered(0, 1))
    log.delete_topic("t")
    with pytest.raises(NotFound):
        OPERATIONS[operation](log, "t", 0)
    for act in (log.topic, log.delete_topic, lambda topic: log.grow_topic(topic, 2)):
        with pytest.raises(NotFound):
            act("t")
    assert log.topics() == []


def test_a_reader_tells_when_the_log_last_answered(log: Log) -> None:
    log.create_topic("t", 1)
    reader = log.reader("t", 0, 0)
    before_s = time.monotonic()
    log.append("t", 0, numbered(0, 3))
    drain(reader)
    assert before_s <= reader.answered_s <= time.monotonic()


def test_a_reader_of_a_deleted_topic_finds_it_gone(log: Log) -> None:
    log.create_topic("t", 1)
    log.append("t", 0, numbered(0, 3))
    reader = log.reader("t", 0, 0)
    reader.read(max_messages=1, max_bytes=BIG)
    log.delete_topic("t")
    with pytest.raises(NotFound):
        reader.read(max_messages=1, max_bytes=BIG)


def test_a_topic_created_again_is_another_one_and_old_readers_do_not_read_it(log: Log) -> None:
    old = log.create_topic("t", 1)
    log.append("t", 0, numbered(0, 3))
    reader = log.reader("t", 0, 1)
    log.delete_topic("t")
    new = log.create_topic("t", 1)
    assert new.incarnation != old.incarnation
    assert log.latest("t", 0) == 0
    assert log.append("t", 0, numbered(100, 5)).first_offset == 0
    with pytest.raises(NotFound):
        reader.read(max_messages=10, max_bytes=BIG)
    assert drain(log.reader("t", 0, 0)) == numbered(100, 5)


# --- appends ---


def test_offsets_are_consecutive_and_start_at_zero(log: Log) -> None:
    log.create_topic("t", 2)
    assert log.append("t", 0, numbered(0, 3)).first_offset == 0
    assert log.append("t", 0, numbered(3, 1))[::2] == (3, 4)
    assert log.append("t", 1, numbered(0, 5))[::2] == (0, 5)
    assert (log.earliest("t", 0), log.latest("t", 0)) == (0, 4)
    assert log.bounds("t", [1, 0]) == [Bounds(0, 5), Bounds(0, 4)]


def test_everything_of_a_message_comes_back(log: Log) -> None:
    messages = [
        Message(b"plain"),
        Message(None, b"tombstone"),
        Message(b"", b""),
        Message(b"\x00\xff", b"\x00", (("trace", b"1"), ("trace", b""), ("ä", b"\x80"))),
        Message(None),
    ]
    log.create_topic("t", 1)
    log.append("t", 0, messages)
    for message in messages:
        log.append("t", 0, [message])
    batch = log.reader("t", 0, 0).read(max_messages=100, max_bytes=BIG)
    assert batch is not None
    assert messages_of(batch) == messages * 2
    assert batch.offsets.tolist() == list(range(10))
    assert batch.headers is not None


def test_headers_are_none_when_no_message_has_any(log: Log) -> None:
    log.create_topic("t", 1)
    log.append("t", 0, [Message(b"v", b"k")])
    batch = log.reader("t", 0, 0).read(max_messages=1, max_bytes=1)
    assert batch is not None
    assert batch.headers is None


def test_an_append_that_cannot_be_is_refused_and_leaves_nothing(log: Log) -> None:
    log.create_topic("t", 1)
    too_large = Message(bytes(RECORD_BYTES_MAX + 1))
    for messages in ([], [Message(b"small"), too_large], [Message(b"")] * (APPEND_MESSAGES_MAX + 1)):
        with pytest.raises(UserError):
            log.append("t", 0, messages)
    assert log.latest("t", 0) == 0
    assert log.append("t", 0, numbered(0, 1)).first_offset == 0


def test_a_message_of_megabytes_comes_back_among_small_ones(log: Log) -> None:
    large = Message(bytes(range(256)) * 40_000, b"key")
    messages = [*numbered(0, 2), large, *numbered(2, 2)]
    log.create_topic("t", 1)
    for message in messages:
        log.append("t", 0, [message])
    assert drain(log.reader("t", 0, 0)) == messages
    assert drain(log.reader("t", 0, 0), max_bytes=1000) == messages


def test_appends_of_the_threads_of_a_process_interleave_only_at_their_bounds(log: Log) -> None:
    log.create_topic("t", 1)

    def write(writer: int) -> list[int]:
        return [log.append("t", 0, [Message(b"%d" % writer)] * (1 + n % 5)).first_offset for n in range(50)]

    with ThreadPoolExecutor(4) as pool:
        firsts = dict(enumerate(pool.map(write, range(4))))
    found = drain(log.reader("t", 0, 0))
    assert len(found) == log.latest("t", 0) == 4 * sum(1 + n % 5 for n in range(50))
    for writer, offsets in firsts.items():
        for n, first in enumerate(offsets):
            assert {message.value for message in found[first : first + 1 + n % 5]} == {b"%d" % writer}


# --- time ---


def test_the_log_stamps_messages_at_append(log: Log) -> None:
    log.create_topic("t", 1)
    appended = log.append("t", 0, numbered(0, 2))
    batch = log.reader("t", 0, 0).read(max_messages=10, max_bytes=BIG)
    assert batch is not None
    assert batch.timestamps_ms.tolist() == [appended.timestamp_ms] * 2
    assert batch.timestamp_type is TimestampType.LOG_APPEND


def test_a_message_is_found_by_the_timestamp_of_its_append(log: Log) -> None:
    log.create_topic("t", 1)
    appended = []
    for n in range(5):
        appended.append(log.append("t", 0, numbered(3 * n, 3)))
        time.sleep(0.002)
    # Without atomic appends the messages of one append may stand in several batches, each with the time of its own.
    batch = log.reader("t", 0, 0).read(max_messages=100, max_bytes=BIG)
    assert batch is not None
    stamps = batch.timestamps_ms.tolist()
    assert [stamps[one.first_offset] for one in appended] == [one.timestamp_ms for one in appended]
    for one in appended:
        first = min(offset for offset, stamp in enumerate(stamps) if stamp >= one.timestamp_ms)
        assert log.offset_at("t", 0, one.timestamp_ms) == first
    assert log.offset_at("t", 0, 0) == 0
    assert log.offset_at("t", 0, stamps[-1] + 1) == log.latest("t", 0) == len(stamps) == 15


def test_the_clock_of_the_log_counts(clocked_log: Log, clock: Any) -> None:
    clocked_log.create_topic("t", 1)
    assert clocked_log.append("t", 0, numbered(0, 2)).timestamp_ms == clock()


def test_timestamps_do_not_decrease_when_the_wall_clock_does(clocked_log: Log, clock: Any) -> None:
    clocked_log.create_topic("t", 1)
    start = clock.now_ms
    for step in (0, 500, -100_000, 100, 1000):
        clock.now_ms += step
        clocked_log.append("t", 0, numbered(0, 1))
    batch = clocked_log.reader("t", 0, 0).read(max_messages=10, max_bytes=BIG)
    assert batch is not None
    assert batch.timestamps_ms.tolist() == [start, start + 500, start + 500, start + 500, start + 500]


def test_offset_at_finds_the_first_message_not_older(clocked_log: Log, clock: Any) -> None:
    clocked_log.create_topic("t", 1)
    start = clock.now_ms
    assert clocked_log.offset_at("t", 0, start) == 0
    for n in range(200):
        clock.now_ms = start + 10 * (n // 2)
        clocked_log.append("t", 0, numbered(3 * n, 3, size=30))
    for pair in range(100):
        assert clocked_log.offset_at("t", 0, start + 10 * pair) == 6 * pair
        assert clocked_log.offset_at("t", 0, start + 10 * pair - 9) == 6 * pair
    assert clocked_log.offset_at("t", 0, 0) == 0
    assert clocked_log.offset_at("t", 0, start + 991) == clocked_log.latest("t", 0) == 600


# --- reading ---


@pytest.mark.parametrize("limit", [1, 2, 7, 1000])
def test_a_read_takes_at_most_what_is_asked_for_and_goes_on_where_it_stopped(log: Log, limit: int) -> None:
    log.create_topic("t", 1)
    for first in range(0, 30, 3):
        log.append("t", 0, numbered(first, 3))
    reader = log.reader("t", 0, 0)
    offsets: list[int] = []
    while (batch := reader.read(max_messages=limit, max_bytes=BIG)) is not None:
        assert len(batch) == min(limit, 30 - len(offsets))
        offsets += batch.offsets.tolist()
    assert offsets == list(range(30))


def test_a_read_takes_at_most_the_bytes_asked_for_but_always_one_message(log: Log) -> None:
    log.create_topic("t", 1)
    log.append("t", 0, numbered(0, 10, size=100))
    for first in range(10, 20):
        log.append("t", 0, numbered(first, 1, size=100))
    log.append("t", 0, [Message(b"v" * 60, b"k" * 40)] * 4)
    for size, expected in ((1, 1), (100, 1), (199, 1), (250, 2), (1000, 10)):
        reader = log.reader("t", 0, 0)
        batch = reader.read(max_messages=1000, max_bytes=size)
        assert batch is not None
        assert len(batch) == expected
        assert len(drain(log.reader("t", 0, 0), max_bytes=size)) == 24


def test_many_appends_come_back_in_one_batch(log: Log) -> None:
    log.create_topic("t", 1)
    messages = [*numbered(0, 100), Message(b"v", b"k"), *numbered(100, 5), Message(None)]
    for message in messages:
        log.append("t", 0, [message])
    batch = log.reader("t", 0, 0).read(max_messages=1000, max_bytes=BIG)
    assert batch is not None
    assert messages_of(batch) == messages


def test_a_reader_starts_at_any_offset_also_inside_an_append(log: Log) -> None:
    log.create_topic("t", 1)
    for first in range(0, 200, 4):
        log.append("t", 0, numbered(first, 4, size=50))
    reader = log.reader("t", 0, 0)
    for offset in range(200):
        reader.seek(offset)
        assert reader.position == offset
        for opened in (reader, log.reader("t", 0, offset)):
            batch = opened.read(max_messages=2, max_bytes=BIG)
            assert batch is not None
            assert messages_of(batch) == numbered(offset, min(2, 200 - offset), size=50)
            assert batch.offsets[0] == offset


def test_there_is_nothing_at_the_end_until_something_is_appended(log: Log) -> None:
    log.create_topic("t", 1)
    reader = log.reader("t", 0, 0)
    for n in range(5):
        assert reader.read(max_messages=10, max_bytes=BIG) is None
        log.append("t", 0, numbered(n, 1))
        batch = reader.read(max_messages=10, max_bytes=BIG)
        assert batch is not None
        assert messages_of(batch) == numbered(n, 1)
    assert reader.position == 5


def test_a_reader_ahead_of_the_end_waits_for_its_offset(log: Log) -> None:
    log.create_topic("t", 1)
    reader = log.reader("t", 0, 3)
    log.append("t", 0, numbered(0, 3))
    assert reader.read(max_messages=10, max_bytes=BIG) is None
    log.append("t", 0, numbered(3, 2))
    assert drain(reader) == numbered(3, 2)


# --- retention by position ---


def test_trim_drops_nothing_at_or_past_its_offset(log: Log) -> None:
    log.create_topic("t", 1)
    for first in range(0, 400, 4):
        log.append("t", 0, numbered(first, 4, size=50))
    for before in (0, 1, 150, 399, 400, 10_000):
        log.trim("t", 0, before)
        earliest = log.earliest("t", 0)
        assert earliest <= min(before, 400)
        assert drain(log.reader("t", 0, earliest)) == numbered(earliest, 400 - earliest, size=50)
    assert log.append("t", 0, numbered(0, 1)).first_offset == 400


def test_an_offset_that_is_gone_is_reported_with_the_earliest_left(log: Log) -> None:
    log.create_topic("t", 1)
    for first in range(0, 400, 4):
        log.append("t", 0, numbered(first, 4, size=50))
    log.trim("t", 0, 300)
    earliest = log.earliest("t", 0)
    reader = log.reader("t", 0, 1)
    if earliest > 1:
        with pytest.raises(OffsetExpired) as caught:
            reader.read(max_messages=1, max_bytes=BIG)
        assert caught.value.earliest == earliest
        reader.seek(earliest)
    assert reader.read(max_messages=1, max_bytes=BIG) is not None
    assert log.offset_at("t", 0, 0) == earliest


def test_a_reader_overtaken_by_retention_hands_over_what_it_has_already_or_says_what_is_left(log: Log) -> None:
    log.create_topic("t", 1)
    for first in range(0, 400, 4):
        log.append("t", 0, numbered(first, 4, size=50))
    reader = log.reader("t", 0, 0)
    found = messages_of(read_some(reader))
    log.trim("t", 0, 300)
    earliest = log.earliest("t", 0)
    left = -1
    try:
        found += drain(reader)
    except OffsetExpired as expired:
        left = expired.earliest
        reader.seek(left)
        found += drain(reader)
    assert left in (-1, earliest)
    if left < 0:
        assert found == numbered(0, 400, size=50)
    else:
        assert found[10:] == numbered(earliest, 400 - earliest, size=50)


# --- waiting ---


def test_waiting_ends_at_once_when_a_partition_is_past_its_position(log: Log) -> None:
    log.create_topic("t", 2)
    log.append("t", 1, numbered(0, 2))
    assert log.wait({("t", 0): 0, ("t", 1): 1}, 10.0)
    assert not log.wait({("t", 0): 0, ("t", 1): 2}, 0.0)
    assert not log.wait({("t", 0): 0, ("t", 1): 2}, 0.05)


def test_waiting_ends_with_an_append(log: Log) -> None:
    log.create_topic("t", 3)
    for round_ in range(5):
        timer = threading.Timer(0.05, lambda: log.append("t", 1, numbered(0, 1)))
        timer.start()
        started_s = time.monotonic()
        assert log.wait({("t", 0): 0, ("t", 1): round_, ("t", 2): 0}, 30.0)
        assert time.monotonic() - started_s < 10
        timer.join()
        assert log.latest("t", 1) == round_ + 1
