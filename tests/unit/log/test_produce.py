# SPDX-License-Identifier: Apache-2.0
"""Producing JSON lines, and which partition they go to."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cremant.log.api import Appended, Message
from cremant.log.memory import MemoryLog
from cremant.log.partitioner import Turns, murmur2, partition_of, partitions_of
from cremant.log.produce import BATCH_LINES, produce_lines
from cremant.model.errors import NoResource, NotFound, UserError
from cremant.model.limits import MESSAGE_BYTES_MAX, PRODUCE_BODY_BYTES_MAX
from cremant.model.offsets import OffsetRange


def new_log(partitions: int = 3) -> MemoryLog:
    log = MemoryLog(lambda: 0)
    log.create_topic("t", partitions)
    return log


def values(log: MemoryLog, partition: int) -> list[tuple[bytes | None, bytes | None]]:
    batch = log.reader("t", partition, 0).read(max_messages=1 << 30, max_bytes=1 << 40)
    return [] if batch is None else list(zip(batch.keys.to_pylist(), batch.values.to_pylist(), strict=True))


# --- partitioner ---


@pytest.mark.parametrize(
    ("key", "hash_"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_answers_what_kafkas_own_test_expects(key: bytes, hash_: int) -> None:
    assert int(murmur2([key])[0]) == hash_ & 0xFFFFFFFF


def murmur2_by_the_book(key: bytes) -> int:
    """One key, plain integers: the same algorithm written the other way."""
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    h = 0x9747B28C ^ len(key)
    whole = len(key) & ~3
    for at in range(0, whole, 4):
        k = (int.from_bytes(key[at : at + 4], "little") * m) & mask
        h = ((h * m) & mask) ^ (((k ^ (k >> 24)) * m) & mask)
    if whole != len(key):
        h = ((h ^ int.from_bytes(key[whole:], "little")) * m) & mask
    h = ((h ^ (h >> 13)) * m) & mask
    return h ^ (h >> 15)


@given(st.lists(st.binary(max_size=40)), st.integers(1, 1000))
def test_many_keys_at_once_hash_as_each_alone(keys: list[bytes], partitions: int) -> None:
    assert murmur2(keys).tolist() == [murmur2_by_the_book(key) for key in keys]
    expected = [(murmur2_by_the_book(key) & 0x7FFFFFFF) % partitions for key in keys]
    assert partitions_of(keys, partitions).tolist() == expected
    assert [partition_of(key, partitions) for key in keys] == expected


# --- lines ---


def test_each_line_is_a_message_kept_as_it_was_written() -> None:
    log = new_log(1)
    produced = produce_lines(log, "t", b'{"a":  1}\r\n\n  {"b": "\xc3\xa4"}  \n\n{}')
    assert produced.messages == 3
    assert produced.ranges == {0: [OffsetRange(0, 3)]}
    assert values(log, 0) == [(None, b'{"a":  1}'), (None, b'{"b": "\xc3\xa4"}'), (None, b"{}")]


def test_keyless_batches_take_turns() -> None:
    log = new_log(3)
    turns = Turns()
    for _ in range(6):
        produce_lines(log, "t", b'{"a":1}\n{"a":2}', turns=turns)
    assert [log.latest("t", partition) for partition in range(3)] == [4, 4, 4]


def test_keyless_producers_that_share_nothing_do_not_all_use_one_partition() -> None:
    log = new_log(3)
    for _ in range(30):
        produce_lines(log, "t", b"{}")
    assert [log.latest("t", partition) for partition in range(3)] == [10, 10, 10]


@given(st.lists(st.tuples(st.none() | st.text(max_size=8), st.integers())), st.integers(1, 5))
def test_keyed_lines_go_to_the_partition_of_their_key_in_order(
    rows: list[tuple[str | None, int]], partitions: int
) -> None:
    log = new_log(partitions)
    body = "\n".join(json.dumps({"key": key, "value": {"n": n, "i": i}}) for i, (key, n) in enumerate(rows))
    produced = produce_lines(log, "t", body.encode(), keyed=True, turns=Turns())
    assert produced.messages == len(rows) == sum(r.length for ranges in produced.ranges.values() for r in ranges)
    for partition in range(partitions):
        expected = [
            (None if key is None else key.encode(), json.dumps({"n": n, "i": i}).encode())
            for i, (key, n) in enumerate(rows)
            if (0 if key is None else partition_of(key.encode(), partitions)) == partition
        ]
        assert values(log, partition) == expected
        assert produced.ranges.get(partition, []) == ([OffsetRange(0, len(expected))] if expected else [])


def test_a_keyed_value_may_be_text_that_is_no_json() -> None:
    log = new_log(1)
    produce_lines(log, "t", b'{"key": "k", "value": "not \\"json\\" \\u00e4"}\n{"value": {"a": [1,2]}}', keyed=True)
    assert values(log, 0) == [(b"k", 'not "json" ä'.encode()), (None, b'{"a": [1,2]}')]


MALFORMED = [
    (False, b'{"a":1}\n\n{"b":', 'line 3: Input data was truncated, found {"b":'),
    (False, b'{"a":1}\n{"b":nope}\n{"c":1}', "line 2: JSON is malformed"),
    (False, b'{"a":1}\n[1]', "line 2: expected a JSON object, found [1]"),
    (False, b'{"a":1}\n"x"', "line 2: expected a JSON object"),
    (False, b'{"a":1}{"b":2}', "line 1: expected one JSON object, found 2"),
    (False, b'{"a":\n1}', "line 1: "),
    (False, b'{"a":\n1}\n{}{}', "line 1: "),
    (False, b'{}\n{"a":"\xff"}', "line 2: expected UTF-8, found b'\\xff"),
    (False, b'{}\n{"a":"%s"}' % (b"x" * MESSAGE_BYTES_MAX), "line 2: a value of 8388616 bytes"),
    (True, b'{"key":"k","value":{}}\n{"key":"k"}', "line 2: Object missing required field `value`"),
    (True, b'{"key":7,"value":{}}', "line 1: Expected `str | null`, got `int` - at `$[0].key`"),
    (True, b'{"key":"k","value":7}', "line 1: expected the value to be an object or a string"),
    (True, b'{"key":"k","value":null}', "line 1: expected the value to be an object or a string"),
    (True, b"[]", "line 1: Expected `object`, got `array`"),
]


@pytest.mark.parametrize(("keyed", "body", "message"), MALFORMED)
def test_a_malformed_line_is_refused_with_its_number_and_nothing_is_appended(
    keyed: bool, body: bytes, message: str
) -> None:
    log = new_log(2)
    for lines in (body, body.split(b"\n")):
        with pytest.raises(UserError) as caught:
            produce_lines(log, "t", lines, keyed=keyed)
        assert str(caught.value).startswith(message)
        assert len(str(caught.value)) < 300
    assert [log.latest("t", partition) for partition in range(2)] == [0, 0]


def test_batches_before_a_malformed_line_stay_and_the_error_says_so() -> None:
    log = new_log(1)
    lines = [b'{"n":%d}\n' % n for n in range(BATCH_LINES * 2 + 5)]
    lines[-2] = b"oops\n"
    with pytest.raises(
        UserError, match=rf"line {BATCH_LINES * 2 + 4}: .*; {BATCH_LINES * 2} messages before were appended"
    ):
        produce_lines(log, "t", iter(lines))
    assert log.latest("t", 0) == BATCH_LINES * 2


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n"])
def test_many_lines_are_the_same_as_one_body(ending: bytes) -> None:
    log = new_log(1)
    count = BATCH_LINES + 123
    produced = produce_lines(log, "t", (b'{"n":%d}' % n + ending for n in range(count)), turns=Turns())
    assert produced.ranges == {0: [OffsetRange(0, count)]}
    assert [value for _, value in values(log, 0)] == [b'{"n":%d}' % n for n in range(count)]


def test_a_pipe_is_taken_as_it_comes() -> None:
    log = new_log(1)
    reading, writing = os.pipe()
    with open(reading, "rb") as source, open(writing, "wb", buffering=0) as sink, ThreadPoolExecutor(1) as pool:
        producing = pool.submit(produce_lines, log, "t", source, turns=Turns())
        for n in range(3):
            sink.write(b'{"n":%d}\n{"half' % n)
            assert log.wait({("t", 0): 2 * n}, 30.0)
            assert log.latest("t", 0) == 2 * n + 1
            sink.write(b'":1}\n')
            assert log.wait({("t", 0): 2 * n + 1}, 30.0)
        sink.write(b'{"end":')
        sink.write(b"1}")
        sink.close()
        assert producing.result(30).ranges == {0: [OffsetRange(0, 7)]}
    assert values(log, 0)[-2:] == [(None, b'{"half":1}'), (None, b'{"end":1}')]


def test_a_file_is_produced_whole_and_its_lines_are_counted(tmp_path: Path) -> None:
    log = new_log(1)
    path = tmp_path / "lines"
    lines = [b'{"n":%d,"text":"%s"}' % (n, b"x" * 200) for n in range(20_000)]
    path.write_bytes(b"\n".join(lines))
    with path.open("rb") as file:
        assert produce_lines(log, "t", file, turns=Turns()).ranges == {0: [OffsetRange(0, 20_000)]}
    assert [value for _, value in values(log, 0)] == lines
    path.write_bytes(b"\n".join([*lines[:15_000], b"oops", *lines]))
    with path.open("rb") as file, pytest.raises(UserError, match=r"^line 15001: .*\d+ messages before were appended"):
        produce_lines(log, "t", file)


def test_a_file_without_lines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "zeros"
    with path.open("wb") as file:
        file.truncate(100 * 1024 * 1024)
    with path.open("rb") as file, pytest.raises(UserError, match="line 1: longer than"):
        produce_lines(new_log(), "t", file)


def test_nothing_to_produce_is_not_an_error() -> None:
    for lines in (b"", b"\n \n", [], [b"\n"]):
        assert produce_lines(new_log(), "t", lines).messages == 0


def test_a_body_that_is_too_large_and_a_topic_that_is_not_there_are_refused() -> None:
    with pytest.raises(UserError, match="a body of"):
        produce_lines(new_log(), "t", bytes(PRODUCE_BODY_BYTES_MAX + 1))
    with pytest.raises(NotFound, match="topic 'other'"):
        produce_lines(new_log(), "other", b"{}")


class FullDisk(MemoryLog):
    """Refuses appends to one partition."""

    def append(self, topic: str, partition: int, messages: Sequence[Message]) -> Appended:
        if partition == 1:
            raise NoResource("no space left", hint="free disk space")
        return super().append(topic, partition, messages)


def test_a_failure_between_two_partitions_says_how_much_was_appended() -> None:
    log = FullDisk(lambda: 0)
    log.create_topic("t", 2)
    keys = [f"k{n}" for n in range(10)]
    in_first = sum(partition_of(key.encode(), 2) == 0 for key in keys)
    body = "\n".join(json.dumps({"key": key, "value": {}}) for key in keys).encode()
    with pytest.raises(NoResource, match=f"{in_first} of 10 messages from line 1 on were appended"):
        produce_lines(log, "t", body, keyed=True)
