# SPDX-License-Identifier: Apache-2.0
"""Compaction on servers with a real controller, in one process: replaced rows go, copies stay equal, whoever dies
whenever, and no answer is ever wrong."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from versions_world import Node, World, peers_only

from cremant.cluster.parts import parts_of
from cremant.completion import compaction
from cremant.controller import housekeeping
from cremant.model.cluster import pipeline_key, table_key
from cremant.model.errors import NoResource, UserError
from cremant.model.segments import SegmentMetadata, StoreState
from cremant.segment.snapshot import VERSIONS_FILE
from cremant.server import compacting, reports, snapshots, validity, versions_upload

COMPACTION: dict[str, Any] = {
    "task": {
        "taskTypeConfigsMap": {
            "UpsertCompactionTask": {"bufferTimePeriod": "0d", "invalidRecordsThresholdPercent": "20"},
        }
    },
    "cremant": {"upsert": {"historyMs": 1_000}},
}


@pytest.fixture
def make_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    monkeypatch.setattr(versions_upload, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(snapshots, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(snapshots, "SAVE_EVERY_S", 0.5)
    monkeypatch.setattr(validity, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(compacting, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(reports, "_COUNT_EVERY_S", 0.1)
    monkeypatch.setattr(housekeeping, "TRIM_INTERVAL_MS", 10**9)
    made: list[World] = []

    def make(*names: str, keys: int = 60, **segments: Any) -> World:
        made.append(World(tmp_path, names, table=COMPACTION, keys=keys, **segments))
        catalog = made[-1].cluster.controller.catalog
        record = catalog.pipelines["trips"]  # no pipeline runs here: the table had keys from the beginning
        catalog.commit({pipeline_key("trips"): msgspec.structs.replace(record, generation=1, keyed_from=0)})
        return made[-1]

    yield make
    for world in made:
        world.close()


def compacted(world: World) -> list[SegmentMetadata]:
    return [segment for segment in world.table.segments if segment.compacted_at]


def order(world: World) -> None:
    world.step()
    world.cluster.controller.compactions.run()


def until_compacted(world: World, segments: int, deadline_s: float = 60) -> None:
    """So many segments, on every live server."""

    def done() -> bool:
        order(world)
        return len(compacted(world)) >= segments and all(is_up_to_date(world, node) for node in world.nodes)

    world.until(done, deadline_s)


def is_up_to_date(world: World, node: Node) -> bool:
    if "trips" not in node.hosting.tables:
        return False
    held = node.hosting.tables["trips"].segments
    return all(
        segment.name in held and (sealed := held[segment.name].sealed) is not None
        and sealed.marker.checksum == segment.checksum and held[segment.name].versions is not None
        for segment in world.table.segments
    )  # fmt: skip


def check(world: World) -> None:
    """Every server is right, or refuses, at any epoch; and says the newest."""
    for node in world.nodes:
        world.check(node)


def refuses_what_is_gone(world: World) -> bool:
    oldest = max(segment.compacted_at for segment in compacted(world))
    return all(node.at(oldest - 1) is None and node.at(oldest) is not None for node in world.nodes)


def test_replaced_rows_go_on_every_replica_and_answers_stay(make_world: Callable[..., World]) -> None:
    world = make_world("one", "other", **peers_only())
    world.write(30)
    world.until(lambda: world.sealed(6))
    before = {segment.name: segment for segment in world.table.segments}
    check(world)
    until_compacted(world, 3)
    check(world)
    assert refuses_what_is_gone(world)
    world.write(15)
    check(world)
    until_compacted(world, 6)
    check(world)
    for segment in compacted(world):
        if segment.name in before:
            was = before[segment.name]
            assert segment.rows == was.rows - segment.rows_removed < was.rows
            assert (segment.columns, segment.end, segment.form) == (was.columns, was.end, was.form)
            assert set(segment.copies) == {"one", "other"}
    shown = world.cluster.get("/tables/trips/upsert")
    assert shown["compaction"]["rowsRemoved"] == sum(segment.rows_removed for segment in compacted(world))
    assert shown["compaction"]["epoch"] == max(segment.compacted_at for segment in compacted(world))
    world.until(lambda: world.cluster.get("/tables/trips/upsert")["horizon"] == shown["compaction"]["epoch"])


def test_a_server_that_comes_late_gets_what_is_left_from_the_other(make_world: Callable[..., World]) -> None:
    world = make_world("one", "other", **peers_only())
    one, other = world.nodes
    world.write(30)
    world.until(lambda: world.sealed(6))
    check(world)
    until_compacted(world, 3)
    one.lose_disk()
    world.nodes.remove(one)
    world.write(5)
    world.check(other)
    one.start()
    world.nodes.append(one)
    check(world)
    world.until(lambda: is_up_to_date(world, one))
    check(world)


def test_a_server_alone_has_it_in_the_store_before_it_lets_go(make_world: Callable[..., World]) -> None:
    world = make_world("one")
    (one,) = world.nodes
    world.write(30)
    world.until(lambda: world.sealed(6))
    world.until(lambda: all(segment.store_state is StoreState.STORED for segment in world.table.segments))
    until_compacted(world, 2)
    for segment in compacted(world):
        assert segment.store_state is StoreState.STORED
        assert segment.versions is not None
    world.write(3)
    world.check(one)
    one.lose_disk()
    one.start()
    world.check(one)
    assert is_up_to_date(world, one)


@pytest.mark.parametrize("versions_lost", [False, True])
def test_a_server_that_was_down_meanwhile_makes_the_same_of_what_it_has(
    make_world: Callable[..., World], versions_lost: bool
) -> None:
    """What it has is older than the record says; it is served until its successor is there. Who does not know which
    rows are in force fetches that."""
    world = make_world("one", "other", **peers_only())
    one, other = world.nodes
    world.write(30)
    world.until(lambda: world.sealed(6))
    check(world)
    world.until(lambda: (order(world), any(one.compacting for one in world.table.segments))[1])
    other.stop()
    world.nodes.remove(other)
    until_compacted(world, 1)
    world.check(one)
    assert not is_up_to_date(world, other)
    for path in other.root.rglob(VERSIONS_FILE) if versions_lost else ():
        path.unlink()
    other.start()
    world.nodes.append(other)
    until_compacted(world, 2)
    check(world)
    if not versions_lost:
        world.until(lambda: other.compactor.segments_total > 0)


def test_a_segment_of_which_nothing_is_left_is_served_and_goes_on_refusing(make_world: Callable[..., World]) -> None:
    world = make_world("one", "other", keys=3, **peers_only())
    world.write(24)
    world.until(lambda: world.sealed(4))
    until_compacted(world, 4)
    assert any(not segment.rows for segment in compacted(world))
    assert {part.segment for part in parts_of(world.table).needed} >= {one.name for one in compacted(world)}
    world.write(3)
    check(world)
    assert refuses_what_is_gone(world)
    one, _ = world.nodes
    one.lose_disk()
    one.start()
    check(world)


@pytest.mark.parametrize("seed", [1, 2])
def test_restarts_lost_disks_and_trims_meanwhile_leave_no_wrong_answer(
    make_world: Callable[..., World], seed: int
) -> None:
    dice = random.Random(seed)
    world = make_world("one", "other", **peers_only())
    nodes = list(world.nodes)
    world.write(12)
    for _ in range(8):
        node = dice.choice(nodes)
        world.disturb(node, dice.choice(["write", "restart", "late", "lose", "trim"]), dice, _holds_all)
        for _ in range(dice.randrange(12)):
            order(world)
            time.sleep(0.05)
        newest = world.epochs.epoch
        for each in nodes:
            for epoch in (newest, max(1, newest - dice.randrange(10))):
                assert each.at(epoch) in (None, world.right(epoch)), (each.name, epoch)
    check(world)
    until_compacted(world, 1)
    check(world)


def _holds_all(world: World, node: Node) -> bool:
    """It serves every sealed segment as the record says, and has saved the versions of each."""
    if not is_up_to_date(world, node):
        return False
    return all(one.snapshot is not None for one in node.hosting.tables["trips"].segments.values())


STEPS = ["derive", "put", "call", "adopt"]


@pytest.mark.parametrize("step", STEPS)
def test_whoever_dies_in_the_middle_goes_on_after_a_restart(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The process ends (here: fails for good, and is started again) at each step of making, storing, telling,
    replacing."""
    world = make_world("one", "other")
    one, _ = world.nodes
    world.write(24)
    world.until(lambda: world.sealed(4))
    world.until(lambda: all(segment.store_state is StoreState.STORED for segment in world.table.segments))
    died: list[str] = []

    def dies(*args: Any, **kwargs: Any) -> Any:
        died.append(step)
        raise NoResource("the process ends here")

    with monkeypatch.context() as patched:
        if step == "derive":
            patched.setattr(compacting, "derive", dies)
        elif step == "put":
            patched.setattr(compacting, "put_versions", dies)
        elif step == "call":
            real = one.link.call

            def told_and_dies(path: str, *args: Any, **kwargs: Any) -> Any:
                answer = real(path, *args, **kwargs)
                return dies() if path.endswith("segmentCompacted") else answer

            patched.setattr(one.link, "call", told_and_dies)
        else:
            real_adopt = one.files.adopt

            def moved_and_dies(sealed: Any, target: Any) -> Any:
                if ".replaced" in str(target) or target.exists():
                    target.rename(target.with_name(target.name + ".replaced"))
                    return dies()
                return real_adopt(sealed, target)

            patched.setattr(one.files, "adopt", moved_and_dies)
        world.until(lambda: (order(world), died)[1])
        one.stop()
    one.start()
    world.until(lambda: one.link.view is not None)
    check(world)
    until_compacted(world, 2)
    check(world)
    names = [segment.name for segment in world.table.segments]
    assert not [path for path in one.root.rglob("*.replaced")]
    assert set(one.files.segments_on_disk("trips", world.table.record.incarnation)) >= set(names)


def test_what_one_server_cannot_make_another_one_does(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of the first one is full. It says so, serves what it has, and goes on once there is room."""
    monkeypatch.setattr(compaction, "ORDER_MS", 1_000)
    world = make_world("one", "other", **peers_only())
    one, other = world.nodes
    world.write(30)
    world.until(lambda: world.sealed(6))

    def full() -> Path:
        raise NoResource("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(one.files, "new_scratch", full)
        world.until(lambda: (order(world), "not compacted: no space left" in str(one.hosting.report()))[1])
        world.until(lambda: (order(world), len(compacted(world)) >= 2)[1])
        check(world)
        assert not one.compactor.segments_total
        assert other.compactor.segments_total
    until_compacted(world, 2)
    check(world)
    world.until(lambda: "not compacted" not in str(one.hosting.report()))


def test_a_table_that_is_not_to_be_compacted_any_more_has_no_order_left(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world("one", "other", **peers_only())
    for node in world.nodes:
        monkeypatch.setattr(node.compactor, "look", lambda: None)
    world.write(30)
    world.until(lambda: world.sealed(6))

    def ordered() -> list[SegmentMetadata]:
        order(world)
        return [segment for segment in world.table.segments if segment.compacting is not None]

    world.until(ordered)
    catalog = world.cluster.controller.catalog
    record = catalog.tables["trips"]
    assert record.config.upsert is not None
    upsert = msgspec.structs.replace(record.config.upsert, compaction=None)
    config = msgspec.structs.replace(record.config, upsert=upsert)
    catalog.commit({table_key("trips"): msgspec.structs.replace(record, config=config)})
    order(world)
    world.until(lambda: not ordered())
    assert not compacted(world)


def test_no_rewind_goes_behind_what_is_gone(make_world: Callable[..., World]) -> None:
    world = make_world("one", "other", **peers_only())
    world.write(30)
    world.until(lambda: world.sealed(6))
    until_compacted(world, 1)
    oldest = max(segment.compacted_at for segment in compacted(world))
    with pytest.raises(UserError, match="was compacted at epoch"):
        world.cluster.controller.rewinds.rewind("trips", oldest - 1, dry_run=True)
