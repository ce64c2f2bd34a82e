# SPDX-License-Identifier: Apache-2.0
"""Segments of an upsert table that retention deletes, with a real controller and servers in one process: no count
changes when keys were hidden first, and keys whose rows went with a segment come back as new ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from versions_world import Answer, Node, World, peers_only

from cremant.controller import housekeeping
from cremant.model.cluster import Expiry, pipeline_key
from cremant.model.segments import SegmentMetadata


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Rows of three years ago that are kept for a day: whatever is sealed is past its retention."""
    monkeypatch.setattr(housekeeping, "QUERY_TIMEOUT_MS", 0)
    monkeypatch.setattr(housekeeping, "UPSERT_EXPIRY_PATIENCE_MS", 10**15)
    monkeypatch.setattr(housekeeping, "RETENTION_INTERVAL_MS", 10**9)
    retention = {"retentionTimeUnit": "DAYS", "retentionTimeValue": "1"}
    more = {"cremant": {"upsert": {"historyMs": 1_000}}}
    made = World(tmp_path, ("one", "other"), table=more, **retention, **peers_only())
    made.write(40)
    made.until(lambda: made.sealed(8))
    yield made
    made.close()


def shows(world: World, node: Node, expected: Answer) -> None:
    newest = world.epochs.epoch

    def right() -> bool:
        found = node.at(newest)
        assert found in (None, expected)
        return found is not None

    world.until(right)


def without(world: World, dropped: list[SegmentMetadata]) -> Answer:
    """What is visible of the newest epoch but for rows of these segments."""
    ranges = [(one.partition, one.start_offset, one.end_offset or 0) for one in dropped]
    rows = [
        row
        for row in world.epochs.history.at(world.epochs.epoch).values()
        if not any(row.partition == number and first <= row.offset < end for number, first, end in ranges)
    ]
    return len(rows), sum(row.key for row in rows), sum(row.value for row in rows)


def test_what_is_hidden_first_changes_no_count_when_its_segment_goes(world: World) -> None:
    janitor, log = world.cluster.controller.janitor, world.epochs
    assert janitor.expire_segments() == 0, "their rows are visible"
    below = log.newest_ms + 10 * log.epoch // 2
    catalog = world.cluster.controller.catalog
    expiry = Expiry(epoch=log.epoch + 1, before_ms=below)
    record = msgspec.structs.replace(catalog.pipelines["trips"], expiry=expiry)
    catalog.commit({pipeline_key("trips"): record})
    assert janitor.expire_segments() == 0, "the seed is not closed"
    before = world.right(log.epoch)
    log.mark(expire_below=below)
    after = world.right(log.epoch)
    assert 0 < after[0] < before[0]
    for node in world.nodes:
        shows(world, node, after)
    sealed = {segment.name for segment in world.table.segments}
    world.until(janitor.expire_segments)
    world.until(lambda: len(world.table.segments) < len(sealed))
    left = {segment.name for segment in world.table.segments}
    assert left, "segments with newer rows stay"
    for node in world.nodes:
        shows(world, node, after)
    world.write(10)  # rows of expired keys, too: they are new keys
    for node in world.nodes:
        shows(world, node, world.right(log.epoch))


def test_a_row_in_force_that_went_with_its_segment_hinders_no_later_row_of_its_key(world: World) -> None:
    """The coordinator still deletes it; nobody has it."""
    visible = world.right(world.epochs.epoch)
    dropped = sorted(world.table.segments, key=lambda one: one.sequence)[-2:]
    assert world.cluster.controller.janitor.delete_segments("trips", dropped) == len(dropped)
    names = {one.name for one in dropped}
    world.until(lambda: names.isdisjoint(one.name for one in world.table.segments))
    left = without(world, dropped)
    assert left[0] < visible[0]
    for node in world.nodes:
        shows(world, node, left)
    world.write(20)
    for node in world.nodes:
        shows(world, node, without(world, dropped))
        assert all(report.error is None for report in node.hosting.report().tails)
