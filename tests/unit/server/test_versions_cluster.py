# SPDX-License-Identifier: Apache-2.0
"""Servers of an upsert table that lose their disks, with a real controller, in one process: rows and versions come
back, the epoch log is trimmed meanwhile, and no answer is ever wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from versions_world import Node, World, peers_only

from cremant.controller import housekeeping
from cremant.model.segments import StoreState
from cremant.segment.snapshot import VERSIONS_FILE
from cremant.server import snapshots, validity, versions_upload
from cremant.server.validity import VersionsSource


@pytest.fixture
def make_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    monkeypatch.setattr(versions_upload, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(versions_upload, "ONLY_COPY_EVERY_S", 0.5)
    monkeypatch.setattr(snapshots, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(snapshots, "SAVE_EVERY_S", 0.5)
    monkeypatch.setattr(validity, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(housekeeping, "TRIM_INTERVAL_MS", 10**9)
    made: list[World] = []

    def make(*names: str, **segments: Any) -> World:
        made.append(World(tmp_path, names, **segments))
        return made[-1]

    yield make
    for world in made:
        world.close()


def test_a_server_that_lost_its_disk_gets_versions_from_the_other_one(make_world: Callable[..., World]) -> None:
    world = make_world("one", "other", **peers_only())
    one, other = world.nodes
    world.write(40)
    world.until(lambda: world.sealed(8))
    for node in (one, other):
        world.check(node)
    world.until(lambda: all(at > 0 for at in world.trim().values()))
    for node in (one, other):
        world.check(node)
    one.lose_disk()
    world.nodes.remove(one)
    world.write(10)
    world.check(other)
    for opened in world.table.partitions:  # what follows is all that the log has
        world.cluster.log.trim(world.topic, opened.record.partition, opened.consuming.start.log_offset - 1)
    one.start()
    world.nodes.append(one)
    for node in (one, other):
        world.check(node)
    assert one.keeper.brought[VersionsSource.PEER] >= 8
    world.write(10)
    for node in (one, other):
        world.check(node)


def test_a_server_alone_that_lost_its_disk_gets_versions_from_the_store(make_world: Callable[..., World]) -> None:
    world = make_world("one")
    (one,) = world.nodes
    world.write(30)
    world.until(lambda: world.sealed(6))
    world.until(lambda: all(segment.store_state is StoreState.STORED for segment in world.table.segments))
    world.until(lambda: all(segment.versions is not None for segment in world.table.segments))
    world.until(lambda: all(at > 0 for at in world.trim().values()))
    world.write(3)
    world.check(one)
    one.lose_disk()
    one.start()
    world.check(one)
    assert one.keeper.brought[VersionsSource.STORE] >= 6
    world.write(5)
    world.check(one)


def test_versions_on_disk_that_are_damaged_or_gone_are_fetched(make_world: Callable[..., World]) -> None:
    world = make_world("one", "other", **peers_only())
    one, other = world.nodes
    world.write(30)
    world.until(lambda: world.sealed(6))
    world.until(lambda: len(list(one.root.rglob(VERSIONS_FILE))) >= 6)
    one.stop()
    gone, damaged = sorted(one.root.rglob(VERSIONS_FILE))[:2]
    gone.unlink()
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    world.write(2)
    one.start()
    world.check(one)
    assert one.keeper.brought[VersionsSource.PEER] >= 2
    world.check(other)


@pytest.mark.parametrize("seed", [1, 2])
def test_restarts_lost_disks_and_trims_in_any_order_leave_no_wrong_answer(
    make_world: Callable[..., World], seed: int
) -> None:
    dice = random.Random(seed)
    world = make_world("one", "other", **peers_only())
    nodes = list(world.nodes)
    world.write(12)
    for _ in range(10):
        node = dice.choice(nodes)
        what = dice.choice(["write", "restart", "late", "lose", "trim"])
        world.disturb(node, what, dice, _holds_all)
        newest = world.epochs.epoch
        for each in nodes:
            for epoch in (newest, max(1, newest - dice.randrange(10))):
                assert each.at(epoch) in (None, world.right(epoch)), (what, each.name, epoch)
    for each in nodes:
        world.check(each)


def _holds_all(world: World, node: Node) -> bool:
    """It serves every sealed segment from its own files, and has saved the versions of each."""
    table = node.hosting.tables.get("trips")
    if table is None:
        return False
    held = [table.segments.get(segment.name) for segment in world.table.segments]
    return all(one is not None and one.versions is not None and one.snapshot is not None for one in held)
