# SPDX-License-Identifier: Apache-2.0
"""Rows of the stream become row blocks and closed epochs, each once, whatever comes between."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from pipelines import World, check, event, python_workers, wait_for

from cremant.epoch.records import EpochMark, Heartbeat, RowBlock
from cremant.log.api import Message
from cremant.model.names import dead_letter_topic, epoch_topic

Session = Callable[[], Any]


def test_every_row_of_the_stream_is_in_one_closed_epoch(world: World, session: Session) -> None:
    world.add_table()
    world.produce(range(1_000))
    query = world.query(session)
    for start in range(1_000, 6_000, 1_000):
        world.produce(range(start, start + 1_000))
        time.sleep(0.1)
    wait_for(lambda: world.closed_rows() == 6_000)
    contents = world.read()
    check(contents, range(6_000))
    for content in contents:
        assert [closed.line.end for closed in content.closed][-1] == 1_500
        assert content.closed[-1].line.reached_at_ms is not None
        assert content.marks[0].previous == 0
        assert content.marks[0].epoch == 1
    report = query.report()
    assert (report.state, report.rows_total, report.error) == ("running", 6_000, None)


def test_an_idle_table_says_that_nothing_is_missing(world: World, session: Session) -> None:
    world.add_table()
    world.produce(range(40))
    query = world.query(session)
    wait_for(lambda: world.closed_rows() == 40)
    wait_for(lambda: query.report().lag_rows == 0)

    def beats() -> list[Heartbeat]:
        return [record for record in world.read()[3].records if isinstance(record, Heartbeat)]

    wait_for(lambda: len(beats()) >= 3)
    assert beats()[-1].ends == (10, 10, 10, 10)
    assert beats()[-1].at_ms > beats()[0].at_ms
    assert beats()[-1].last_closed == world.read()[0].epochs[-1]


def test_a_task_that_dies_after_it_wrote_blocks_is_tried_again_and_nothing_is_doubled(
    world: World, session: Session
) -> None:
    """Blocks of the first attempt stay in the log; the second attempt writes the same blocks again."""
    world.add_table()
    world.produce(range(360_000))
    topic = epoch_topic("events", world.view().record.incarnation)
    world.query(session)
    wait_for(lambda: any(world.log.latest(topic, p) > 1 for p in range(4)), what="first block")
    killed = python_workers()
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: world.closed_rows() == 360_000)
    contents = world.read()
    check(contents, range(360_000))
    blocks = [record for content in contents for record in content.records if isinstance(record, RowBlock)]
    assert {block.generation for block in blocks} == {1}, "the task was tried again, not the query"


def test_bad_messages_are_counted_sampled_and_never_stop_the_table(world: World, session: Session) -> None:
    view = world.add_table(partitions=1)
    world.log.append("events", 0, [Message(event(n)) if n % 10 else Message(b"{not json") for n in range(200)])
    query = world.query(session)
    wait_for(lambda: world.closed_rows() == 200)
    content = world.read()[0]
    assert content.stopped is None
    assert [row["id"] for row in content.rows] == [n for n in range(200) if n % 10]
    assert sum(closed.line.rejected for closed in content.closed) == 20
    assert query.report().rejected_total == 20
    assert set(query.totals.rejected) == {"malformedJson"}
    letters = dead_letter_topic("events", view.record.incarnation)
    batch = world.log.reader(letters, 0, 0).read(max_messages=1_000, max_bytes=1_000_000)
    assert batch is not None
    first = json.loads(batch.values[0].as_py())
    assert (first["offset"], first["cause"], first["sample"]) == (0, "malformedJson", "{not json")
    assert 0 < len(batch) <= 20


def test_a_table_that_stops_at_bad_messages_says_which_one(world: World, session: Session) -> None:
    world.add_table({"stopOnBadRecord": True}, partitions=1)
    world.log.append("events", 0, [Message(event(1)), Message(b"[1, 2]")])
    query = world.query(session)
    wait_for(lambda: query.report().state == "failed")
    assert "partition 0 offset 1: notAnObject" in (query.report().error or "")
    assert world.closed_rows() == 0


def test_an_epoch_holds_no_more_rows_than_the_table_allows(world: World, session: Session) -> None:
    world.add_table({"maxRowsPerEpoch": 1_000})
    world.produce(range(4_500))
    world.query(session)
    wait_for(lambda: world.closed_rows() == 4_500)
    contents = world.read()
    check(contents, range(4_500))
    marks = [record for record in contents[0].records if isinstance(record, EpochMark)]
    assert [sum(line.rows for line in mark.partitions) for mark in marks] == [1_000] * 4 + [500]
    assert marks[0].partitions[0].reached_at_ms is None


def test_two_tables_share_a_session(world: World, session: Session) -> None:
    for name in ("first", "second"):
        world.add_table(name=name, partitions=2)
        world.query(session, name=name)
    for start in range(0, 2_000, 500):
        for name in ("first", "second"):
            world.produce(range(start, start + 500), topic=name, partitions=2)
    for name in ("first", "second"):
        wait_for(lambda name=name: world.closed_rows(name) == 2_000)
        check(world.read(name), range(2_000))
