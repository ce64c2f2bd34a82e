# SPDX-License-Identifier: Apache-2.0
"""The key coordinator on a real Spark: update blocks of every epoch equal the reference model's, whatever comes
between. Streams are not keyed: a key is in every partition, in several tasks of one epoch, late, twice, deleted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipelines import World, wait_for
from upsert_pipeline import Feed, add_upsert_table, check_upserts, read_upserts

Session = Callable[[], Any]


def test_every_epoch_has_the_updates_of_the_model(world: World, session: Session) -> None:
    add_upsert_table(world)
    feed = Feed(world, keys=300)
    feed.produce(500)
    query = world.query(session)
    for step in range(1, 6):
        wait_for(lambda: world.closed_rows() == feed.rows, what=f"step {step}")
        feed.produce(1_000)
    wait_for(lambda: world.closed_rows() == feed.rows)
    history = check_upserts(read_upserts(world), feed.model, feed.rows)
    assert len(history.epochs) >= 6
    assert query.report().error is None


def test_keys_in_several_tasks_of_an_epoch_push_nothing_out(world: World, session: Session) -> None:
    """Few keys, epochs of 60,000 rows in two tasks: each brings a candidate of nearly every key."""
    add_upsert_table(world, {"maxRowsPerEpoch": 60_000})
    feed = Feed(world, keys=1_000)
    feed.produce(180_000)
    world.query(session)
    wait_for(lambda: world.closed_rows() == feed.rows)
    check_upserts(read_upserts(world), feed.model, feed.rows)
