# SPDX-License-Identifier: Apache-2.0
"""What a table's pipeline says of the times of its stream: in marks and heartbeats, and in its report."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pipelines import World, event, wait_for

from cremant.epoch.records import Heartbeat, RowBlock
from cremant.log.api import Message
from cremant.model.cluster import StreamProgress
from cremant.pipeline.query import TableQuery

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
    """Epochs a minute apart: what waits for the next one holds back its own partition alone."""
    world.add_table({"minEpochMs": 60_000}, partitions=2)
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
