# SPDX-License-Identifier: Apache-2.0
"""Chunks of a range: where they end is a function of the messages alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cremant.log.api import LogReader, Message, MessageBatch
from cremant.log.memory import MemoryLog
from cremant.model.errors import InvariantViolation, Unavailable
from cremant.model.offsets import OffsetRange
from cremant.pipeline.chunks import Chunk, chunks
from cremant.pipeline.ends import asked_again


class Stingy:
    """A reader that hands out at most `most` messages at once, however many it is asked for."""

    def __init__(self, reader: LogReader, most: int) -> None:
        self._reader = reader
        self._most = most

    @property
    def position(self) -> int:
        return self._reader.position

    def read(self, *, max_messages: int, max_bytes: int) -> MessageBatch | None:
        return self._reader.read(max_messages=min(self._most, max_messages), max_bytes=max_bytes)

    def seek(self, offset: int) -> None:
        self._reader.seek(offset)

    def close(self) -> None:
        self._reader.close()


def log_of(sizes: list[int]) -> MemoryLog:
    log = MemoryLog(clock=lambda: 1_000)
    log.create_topic("t", 1)
    for size in sizes:
        log.append("t", 0, [Message(b"x" * size)])
    return log


def shape(found: list[Chunk]) -> list[tuple[int, int, list[int]]]:
    return [
        (chunk.range.first, chunk.range.next, chunk.batch.offsets.tolist() if chunk.batch else []) for chunk in found
    ]


def test_a_range_is_cut_by_rows() -> None:
    log = log_of([1] * 10)
    found = shape(list(chunks(log.reader("t", 0, 2), OffsetRange(2, 9), lambda: log.latest("t", 0), rows_max=3)))
    assert found == [(2, 5, [2, 3, 4]), (5, 8, [5, 6, 7]), (8, 9, [8])]


def test_a_range_is_cut_by_bytes_after_the_message_that_fills_it() -> None:
    log = log_of([10, 10, 50, 10, 10])
    found = shape(list(chunks(log.reader("t", 0, 0), OffsetRange(0, 5), lambda: log.latest("t", 0), bytes_max=60)))
    assert found == [(0, 3, [0, 1, 2]), (3, 5, [3, 4])]


def test_a_stream_that_ends_early_is_an_error_not_a_short_epoch() -> None:
    with pytest.raises(InvariantViolation, match="E-2: the stream ends at 3"):
        list(chunks(log_of([1, 1, 1]).reader("t", 0, 0), OffsetRange(0, 5), lambda: 3))


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=40),
    rows_max=st.integers(1, 20),
    bytes_max=st.integers(1, 200),
    most=st.integers(1, 40),
)
def test_chunks_do_not_depend_on_how_the_log_hands_out_messages(
    sizes: list[int], rows_max: int, bytes_max: int, most: int
) -> None:
    log, wanted = log_of(sizes), OffsetRange(0, len(sizes))
    reader = log.reader("t", 0, 0)
    found = shape(list(chunks(reader, wanted, lambda: wanted.next, rows_max=rows_max, bytes_max=bytes_max)))
    stingy = Stingy(log.reader("t", 0, 0), most)
    assert shape(list(chunks(stingy, wanted, lambda: wanted.next, rows_max=rows_max, bytes_max=bytes_max))) == found
    assert [offset for _, _, offsets in found for offset in offsets] == list(range(len(sizes)))
    assert reader.position == len(sizes)


class Late(Stingy):
    """A reader in a process that hears later of what was appended: some reads find nothing yet."""

    def __init__(self, reader: LogReader, most: int, empty: int) -> None:
        super().__init__(reader, most)
        self.empty = empty

    def read(self, *, max_messages: int, max_bytes: int) -> MessageBatch | None:
        if self.position >= 2 and self.empty > 0:
            self.empty -= 1
            return None
        return super().read(max_messages=max_messages, max_bytes=max_bytes)


def test_a_reader_that_has_not_heard_yet_of_what_was_planned_is_asked_again() -> None:
    log = log_of([1] * 5)
    found = chunks(Late(log.reader("t", 0, 0), 2, empty=3), OffsetRange(0, 5), lambda: log.latest("t", 0))
    assert shape(list(found)) == [(0, 5, [0, 1, 2, 3, 4])]
    with pytest.raises(Unavailable, match="gives nothing from 2 on"):
        list(chunks(Late(log.reader("t", 0, 0), 2, empty=99), OffsetRange(0, 5), lambda: log.latest("t", 0)))


def test_an_end_that_is_behind_for_a_moment_is_asked_for_again() -> None:
    """As the new leader of a partition may say it."""
    log, ends = log_of([1] * 5), iter([3, 2, 5])
    found = chunks(
        Late(log.reader("t", 0, 0), 2, empty=1), OffsetRange(0, 5),
        lambda: asked_again(lambda: next(ends), lambda end: end >= 5, lambda pause_s: None),
    )  # fmt: skip
    assert shape(list(found)) == [(0, 5, [0, 1, 2, 3, 4])]
    assert list(ends) == []


def test_what_is_left_of_a_range_may_be_invisible() -> None:
    """Markers of transactions: the reader gives nothing, but stands behind them."""

    class Marked(Stingy):
        def read(self, *, max_messages: int, max_bytes: int) -> MessageBatch | None:
            batch = super().read(max_messages=max_messages, max_bytes=max_bytes)
            if batch is None:
                self.seek(4)
            return batch

    log = log_of([1, 1, 1])
    assert shape(list(chunks(Marked(log.reader("t", 0, 0), 9), OffsetRange(0, 4), lambda: 4))) == [(0, 4, [0, 1, 2])]
