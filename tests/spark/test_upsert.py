# SPDX-License-Identifier: Apache-2.0
"""The key coordinator on a real Spark: update blocks of every epoch equal the reference model's, whatever comes
between. Streams are not keyed: a key is in every partition, in several tasks of one epoch, late, twice, deleted."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pipelines import World, python_workers, wait_for
from upsert_pipeline import LONG_KEYS, Feed, add_upsert_table, check_upserts, read_upserts

from cremant.model.names import epoch_topic
from cremant.pipeline.checkpoint import inspect_checkpoint
from cremant.pipeline.coordinator import has_state, read_companion

Session = Callable[[], Any]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """In a directory whose name paths and URIs spell differently."""
    world = World(tmp_path / "an é")
    yield world
    world.close()


def test_every_epoch_has_the_updates_of_the_model(world: World, session: Session) -> None:
    """Again after a new generation, which goes on with the state of the one before."""
    add_upsert_table(world, schema=LONG_KEYS)
    feed = Feed(world, keys=2_000)
    feed.produce(4_000)
    for generation in (1, 2):
        query = world.query(session)
        for _ in range(3):
            wait_for(lambda: world.closed_rows() == feed.rows)
            feed.produce(1_000)
        wait_for(lambda: world.closed_rows() == feed.rows)
        query.stop()
        assert query.join(30)
        (checkpoint,) = (world.directory / "pipeline" / "tables").glob(f"*/checkpoints/generation-{generation}")
        companion, state = read_companion(checkpoint), inspect_checkpoint(checkpoint)
        assert companion is not None
        assert state is not None
        assert state.committed is not None
        assert has_state(checkpoint, companion, state.committed + 1)
    history = check_upserts(read_upserts(world), feed.model, feed.rows)
    assert len(history.epochs) >= 8


def test_keys_in_several_tasks_of_an_epoch_push_nothing_out(world: World, session: Session) -> None:
    """Few keys, epochs of 60,000 rows in two tasks: each brings a candidate of nearly every key."""
    add_upsert_table(world, {"maxRowsPerEpoch": 60_000})
    feed = Feed(world, keys=1_000)
    feed.produce(120_000)
    world.query(session)
    wait_for(lambda: world.closed_rows() == feed.rows)
    check_upserts(read_upserts(world), feed.model, feed.rows)


def test_tasks_that_die_are_tried_again_and_no_update_is_lost_or_wrong(world: World, session: Session) -> None:
    """Workers of both stages are killed while they write; their blocks stay in the log."""
    view = add_upsert_table(world, {"maxRowsPerEpoch": 80_000})
    feed = Feed(world, keys=5_000)
    feed.produce(160_000)
    topic = epoch_topic("events", view.record.incarnation)
    world.query(session)
    for records in (2, 4):
        wait_for(lambda records=records: world.log.latest(topic, 0) >= records or world.closed_rows() == feed.rows)
        for pid in python_workers():
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: world.closed_rows() == feed.rows)
    contents = read_upserts(world)
    check_upserts(contents, feed.model, feed.rows)
    assert {block.generation for content in contents for block in content.blocks} == {1}, "the query was not restarted"
