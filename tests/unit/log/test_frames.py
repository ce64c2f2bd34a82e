# SPDX-License-Identifier: Apache-2.0
"""Frames of the embedded log: what is encoded is decoded, what is damaged is noticed."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cremant.log.api import Message
from cremant.log.columns import binary_array
from cremant.log.embedded_frame import (
    HEADER_BYTES,
    MAGIC,
    FrameHeader,
    check_crc,
    data_ends,
    decode,
    decode_singles,
    encode,
    parse_header,
)

maybe_bytes = st.none() | st.binary(max_size=20)
headers = st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=5)), max_size=2).map(tuple)
messages = st.lists(st.builds(Message, maybe_bytes, maybe_bytes, headers), min_size=1, max_size=20)
plain_messages = st.lists(st.builds(Message, st.binary(max_size=20)), min_size=1, max_size=20)


def frame(appended: list[Message], base_offset: int = 7, timestamp_ms: int = 1_700_000_000_000) -> bytes:
    payload = encode(appended)
    data = b"".join(bytes(part) for part in (payload.header(base_offset, timestamp_ms), *payload.parts))
    assert len(data) == payload.frame_bytes
    return data


def header_of(data: bytes, at: int = 0) -> FrameHeader:
    header = parse_header(data, at)
    assert isinstance(header, FrameHeader), header
    return header


@given(messages | plain_messages, st.integers(0, 1 << 60), st.integers(0, 1 << 45), st.integers(0, 3))
def test_a_frame_gives_back_its_messages_wherever_it_stands(
    appended: list[Message], base_offset: int, timestamp_ms: int, eights: int
) -> None:
    at = 8 * eights
    data = bytes(at) + frame(appended, base_offset, timestamp_ms) + b"whatever follows"
    header = header_of(data, at)
    assert (header.base_offset, header.timestamp_ms, header.messages) == (base_offset, timestamp_ms, len(appended))
    assert header.next_offset == base_offset + len(appended)
    assert header.frame_bytes % 8 == 0
    assert check_crc(header, data, at) is None
    columns = decode(header, data, at)
    columns.values.validate(full=True)
    assert columns.values.to_pylist() == [message.value for message in appended]
    keys = [None] * len(appended) if columns.keys is None else columns.keys.to_pylist()
    assert keys == [message.key for message in appended]
    found_headers = ((),) * len(appended) if columns.headers is None else columns.headers
    assert list(found_headers) == [message.headers for message in appended]


@given(plain_messages)
def test_ends_of_data_are_cumulated_sizes_also_of_a_slice(appended: list[Message]) -> None:
    data = frame(appended)
    values = decode(header_of(data), data, 0).values
    for start in range(len(appended)):
        sizes = [len(message.value or b"") for message in appended[start:]]
        assert data_ends(values.slice(start)).tolist() == [sum(sizes[: n + 1]) for n in range(len(sizes))]


def test_runs_of_single_plain_messages_have_a_short_cut() -> None:
    values = [b"", b"x", b"12345678", b"123456789"]
    run = b"".join(frame([Message(value)], base_offset=5 + n, timestamp_ms=n) for n, value in enumerate(values))
    for other in ([Message(None)], [Message(b"v", b"k")], [Message(b"v", None, (("h", b""),))], [Message(b"")] * 2):
        singles = decode_singles(run + frame(other, 9), 0, 5, max_messages=100, max_bytes=1000)
        assert singles == (values, [0, 1, 2, 3], len(run))
    for at in range(len(run)):
        damaged = run[:at] + bytes([run[at] ^ 1]) + run[at + 1 :]
        for data in (damaged, run[:at]):
            found = decode_singles(data, 0, 5, max_messages=100, max_bytes=1000).values
            assert found == values[: len(found)]
            assert len(found) < 4
    assert decode_singles(run, 0, 5, max_messages=2, max_bytes=1000).values == values[:2]
    assert decode_singles(run, 0, 5, max_messages=9, max_bytes=9).values == values[:3]
    assert decode_singles(run, 0, 6, max_messages=9, max_bytes=9).values == []
    assert decode_singles(frame([Message(b"large")]), 0, 7, max_messages=9, max_bytes=1).values == [b"large"]


def test_a_large_single_message_is_not_copied() -> None:
    value = bytes(1 << 20)
    assert any(part is value for part in encode([Message(value)]).parts)


@pytest.mark.parametrize(
    "appended",
    [
        [Message(b"one")],
        [Message(b"one", b"key"), Message(None), Message(b"three", None, (("h", b"x"),))],
    ],
    ids=["single", "everything"],
)
def test_every_flipped_bit_and_every_missing_byte_is_noticed(appended: list[Message]) -> None:
    data = frame(appended)

    def problem(damaged: bytes) -> str | None:
        header = parse_header(damaged, 0)
        return header if isinstance(header, str) else check_crc(header, damaged, 0)

    assert problem(data) is None
    for at in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            found = problem(bytes(damaged))
            assert found is not None
            assert "expected" in found
            assert "found" in found
        assert problem(data[:at]) is not None


def test_a_frame_of_a_later_version_is_refused_with_both_numbers() -> None:
    data = bytearray(frame([Message(b"v")]))
    data[4] = 9
    assert (
        parse_header(bytes(data), 0)
        == f"expected frame version 1, found version 9 with a header of {HEADER_BYTES} bytes"
    )


def test_the_bytes_of_a_frame_do_not_change_between_releases() -> None:
    data = frame([Message(b"value", b"key"), Message(None, b"key2")], base_offset=3, timestamp_ms=1000)
    magic, version, flags, header_bytes = struct.unpack_from("<IBBH", data)
    assert (magic, version, flags, header_bytes) == (MAGIC, 1, 3, 48)
    assert data.hex() == GOLDEN


GOLDEN = (
    "4343524d0103300038000000020000000300000000000000e80300000000000005000000070000000000000073f0ce95"
    "01000000000000000000000005000000050000000000000076616c756500000000000000030000000700000000000000"
    "6b65796b65793200"
)


@given(st.lists(maybe_bytes))
def test_binary_arrays_are_the_ones_of_arrow(values: list[bytes | None]) -> None:
    array = binary_array(values)
    array.validate(full=True)
    assert array.equals(pa.array(values, type=pa.binary()))


def test_appending_and_reading_does_not_load_pandas(tmp_path: Path) -> None:
    code = """
import sys
from cremant.log.embedded import EmbeddedLog
from cremant.log.produce import produce_lines
log = EmbeddedLog(sys.argv[1])
log.create_topic("t", 1)
produce_lines(log, "t", b'{"key": "k", "value": {"a": 1}}', keyed=True)
produce_lines(log, "t", b"{}")
assert len(log.reader("t", 0, 0).read(max_messages=9, max_bytes=99)) == 2
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
