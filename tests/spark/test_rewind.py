# SPDX-License-Identifier: Apache-2.0
"""A table is taken back to a closed epoch: Resets in every partition, the stream is read again, epochs only grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pipelines import World, check, wait_for

from cremant.epoch.records import Reset
from cremant.model.errors import UserError

Session = Callable[[], Any]


def test_a_table_goes_back_and_reads_again(world: World, session: Session) -> None:
    world.add_table()
    query = world.query(session)
    for start in range(0, 2_000, 400):
        world.produce(range(start, start + 400))
        wait_for(lambda start=start: world.closed_rows() == start + 400)
    closed = world.read()[0].epochs
    back, consuming = closed[2], world.view().partitions[0].consuming
    looked = world.controller.rewinds.rewind("events", back, dry_run=True)
    assert (looked.closed, looked.offsets_again) == (closed[-1], 800)
    assert world.view().partitions[0].consuming == consuming, "only looked at"

    world.controller.rewinds.rewind("events", back)
    query.update(world.view())
    wait_for(lambda: world.view().pipeline_record.rewind is None, 60)
    wait_for(lambda: world.closed_rows() == 2_000)
    contents = world.read()
    check(contents, range(2_000))
    for content in contents:
        assert [record.epoch for record in content.records if isinstance(record, Reset)] == [back]
        assert content.epochs[:3] == closed[:3]
        assert content.epochs[3] > closed[-1], "numbers that were taken back never come again"
    (rewind,) = world.view().pipeline_record.rewinds
    assert (rewind.to_epoch, rewind.next_epoch) == (back, contents[0].epochs[3])
    opened = world.view().partitions[0].consuming
    assert (opened.start, opened.sequence) == (consuming.start, consuming.sequence + 1)
    world.produce(range(2_000, 2_400))
    wait_for(lambda: world.closed_rows() == 2_400)
    check(world.read(), range(2_400))


def test_what_cannot_be_gone_back_to_is_refused_and_nothing_changes(world: World, session: Session) -> None:
    world.add_table()
    world.query(session)
    world.produce(range(400))
    wait_for(lambda: world.closed_rows() == 400)
    (last,) = {content.epochs[-1] for content in world.read()}
    before = world.view().partitions
    for epoch in (last, last + 1, last + 1_000_000):
        with pytest.raises(UserError, match="the last one closed is"):
            world.controller.rewinds.rewind("events", epoch)
    assert world.view().partitions == before
    assert world.view().pipeline_record.rewinds == ()
