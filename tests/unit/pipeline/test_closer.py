# SPDX-License-Identifier: Apache-2.0
"""Heartbeats of a run, over a real log: who gets them, and who is not waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cremant.epoch.close import BlockAck
from cremant.epoch.format import decode
from cremant.epoch.protocol import RunPlan
from cremant.epoch.records import EpochMark, Heartbeat, Record
from cremant.log.api import Appended, Message
from cremant.log.embedded import EmbeddedLog
from cremant.model.errors import Fenced
from cremant.model.offsets import OffsetRange
from cremant.pipeline.closer import Closer
from cremant.pipeline.plan import EpochPlan, PlannedRange

INCARNATION = "0" * 16
RUN = RunPlan(
    generation=1, base=1, checkpoint="generation-1", fresh=True, first_batch=0, replay=None, start=(0, 0), previous=0,
    config_version=1, fence_offset=0,
)  # fmt: skip
PLAN = EpochPlan(
    config_version=1, topic_incarnation="i", at_ms=500, partitions=(PlannedRange(0, 3, 9), PlannedRange(0, 0, 0))
)
BLOCKS = (BlockAck(partition=0, range=OffsetRange(0, 3), rows=3, max_ingestion_ms=450),)


class Slow(EmbeddedLog):
    """Appends wait for `go`, if there is one."""

    go: threading.Event | None = None

    def append(self, topic: str, partition: int, messages: Sequence[Message]) -> Appended:
        if self.go is not None:
            assert self.go.wait(60)
        return super().append(topic, partition, messages)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Slow]:
    log = Slow(tmp_path)
    log.create_topic("e", 2)
    yield log
    log.close()


def records(log: EmbeddedLog, partition: int) -> list[Record]:
    batch = log.reader("e", partition, 0).read(max_messages=100, max_bytes=1_000_000)
    return [decode(value.as_buffer(), INCARNATION) for value in batch.values] if batch is not None else []


def test_marks_and_heartbeats_prove_idle_partitions_caught_up(log: Slow) -> None:
    closer = Closer(log, "e", INCARNATION, "t", RUN)
    assert closer.lines == ()
    assert closer.heartbeat((3, 0), 400) == (1,), "messages of partition 0 are not in an epoch yet"
    closer.close(0, PLAN, BLOCKS, ())
    busy, idle = closer.lines
    assert (busy.end, busy.stream_end, busy.reached_at_ms, busy.max_ingestion_ms) == (3, 9, None, 450)
    assert (idle.end, idle.reached_at_ms) == (0, 500)
    assert closer.heartbeat((3, 0), 600) == (0, 1)
    assert [type(record) for record in records(log, 0)] == [EpochMark, Heartbeat]
    assert [type(record) for record in records(log, 1)] == [Heartbeat, EpochMark, Heartbeat]
    assert records(log, 1)[-1] == Heartbeat(generation=1, last_closed=1, ends=(3, 0), at_ms=600)


def test_a_close_under_way_is_not_waited_for(log: Slow) -> None:
    """A log that hangs must not keep the table's thread from looking at the stream."""
    closer = Closer(log, "e", INCARNATION, "t", RUN)
    log.go = threading.Event()
    closing = threading.Thread(target=closer.close, args=(0, PLAN, BLOCKS, ()))
    closing.start()
    try:
        while not closer.lines:
            assert closing.is_alive()
        assert closer.heartbeat((0, 0), 400) == ()
    finally:
        log.go.set()
        closing.join(60)
    assert not closing.is_alive()
    assert closer.heartbeat((3, 0), 600) == (0, 1)


def test_after_its_end_a_run_says_nothing(log: Slow) -> None:
    closer = Closer(log, "e", INCARNATION, "t", RUN)
    closer.end()
    assert closer.heartbeat((0, 0), 400) == ()
    with pytest.raises(Fenced):
        closer.close(0, PLAN, BLOCKS, ())
    assert records(log, 0) == []
