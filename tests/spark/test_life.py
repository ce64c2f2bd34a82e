# SPDX-License-Identifier: Apache-2.0
"""A table's life while its query runs: pause, change, growth, expired offsets, a topic that is replaced."""

from __future__ import annotations

import copy
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pipelines import SCHEMA, LocalMember, World, check, table_config, wait_for

from cremant.epoch.records import Fence, RowBlock
from cremant.log.embedded import EmbeddedLog
from cremant.model.names import epoch_topic
from cremant.pipeline.query import TableQuery, run_dir_of

Session = Callable[[], Any]


def with_column(name: str, default: str) -> dict[str, Any]:
    schema = copy.deepcopy(SCHEMA)
    schema["dimensionFieldSpecs"].append({"name": name, "dataType": "STRING", "defaultNullValue": default})
    return schema


def stopped(query: TableQuery) -> None:
    query.stop()
    assert query.join(20)


def test_a_paused_table_makes_no_epochs_and_goes_on_where_it_was(world: World, session: Session) -> None:
    world.add_table()
    world.produce(range(400))
    query = world.query(session)
    wait_for(lambda: world.closed_rows() == 400)
    world.controller.tables.set_paused("events", paused=True, comment="")
    query.update(world.view())
    wait_for(lambda: query.report().state == "paused", 60)
    world.produce(range(400, 800))
    time.sleep(0.5)
    assert world.closed_rows() == 400
    world.controller.tables.set_paused("events", paused=False, comment="")
    query.update(world.view())
    wait_for(lambda: world.closed_rows() == 800)
    check(world.read(), range(800))


def test_a_changed_schema_applies_from_an_epoch_on_without_a_restart(world: World, session: Session) -> None:
    world.add_table()
    world.produce(range(400))
    query = world.query(session)
    wait_for(lambda: world.closed_rows() == 400)
    world.controller.schemas.change("events", with_column("kind", "plain"), force=True)
    query.update(world.view())
    assert world.view().record.config_version == 2
    time.sleep(0.3)
    world.produce(range(400, 800))
    wait_for(lambda: world.closed_rows() == 800)
    contents = world.read()
    check(contents, range(800))
    versions = [[mark.config_version for mark in content.marks] for content in contents]
    assert all(each == sorted(each) and set(each) == {1, 2} for each in versions)
    for row in contents[0].rows:
        assert row.get("kind") == ("plain" if row["id"] >= 400 else None)
    assert query.report().generation == 1


def test_a_new_partition_enters_once_it_has_a_consuming_replica(world: World, session: Session) -> None:
    world.add_table(partitions=2)
    world.entered("events", 2)
    query = world.query(session)
    world.produce(range(100), partitions=2)
    wait_for(lambda: world.closed_rows() == 100)
    world.log.grow_topic("events", 4)
    world.controller.tables.grow("events")
    query.update(world.view())
    world.produce(range(100, 200), partitions=4)
    wait_for(lambda: world.closed_rows() == 150)
    assert len(world.read(partitions=1)[0].marks[-1].partitions) == 2
    world.entered("events", 4)
    query.update(world.view())
    wait_for(lambda: world.closed_rows() == 200)
    contents = world.read()
    assert all(content.stopped is None for content in contents)
    assert sorted(row["id"] for content in contents for row in content.rows) == list(range(200))
    assert isinstance(contents[3].records[0], Fence)


def expire(world: World, directory: Path) -> int:
    """Drops the oldest messages of partition 0; the first offset left."""
    small = EmbeddedLog(directory / "log", segment_bytes=64 * 1024)
    for number in range(20):
        world.produce(range(number * 500, number * 500 + 500), partitions=1)
    small.trim("events", 0, 8_000)
    small.close()
    return world.log.earliest("events", 0)


def test_expired_offsets_become_a_gap(tmp_path: Path, session: Session) -> None:
    world = World(tmp_path, log_segment_bytes=64 * 1024)
    try:
        world.add_table(partitions=1)
        earliest = expire(world, tmp_path)
        assert 0 < earliest <= 8_000
        world.query(session)
        wait_for(lambda: world.closed_rows() == 10_000)
        content = world.read()[0]
        assert content.stopped is None
        assert [(gap.range.first, gap.range.next, gap.reason) for gap in content.gaps] == [(0, earliest, "expired")]
        assert [row["id"] for row in content.rows] == list(range(earliest, 10_000))
    finally:
        world.close()


def test_a_table_may_rather_stop_at_expired_offsets(tmp_path: Path, session: Session) -> None:
    world = World(tmp_path, log_segment_bytes=64 * 1024)
    try:
        world.add_table({"expiredOffsets": "stop"}, partitions=1)
        expire(world, tmp_path)
        query = world.query(session)
        wait_for(lambda: query.report().state == "failed")
        assert "expired before they were read" in (query.report().error or "")
        changed = table_config({"expiredOffsets": "gap"})
        world.controller.tables.change("events", changed)
        query.update(world.view())
        wait_for(lambda: world.closed_rows() == 10_000)
    finally:
        world.close()


def test_a_replaced_topic_stops_the_table_instead_of_mixing_offsets(world: World, session: Session) -> None:
    world.add_table()
    world.produce(range(400))
    query = world.query(session)
    wait_for(lambda: world.closed_rows() == 400)
    world.log.delete_topic("events")
    world.log.create_topic("events", 4)
    world.produce(range(1_000))
    wait_for(lambda: query.report().state == "failed")
    assert "deleted and created again" in (query.report().error or "")
    check(world.read(), range(400))


def test_a_query_that_dies_starts_again_and_shows_it(world: World, session: Session) -> None:
    """Its epoch log is unreadable for a moment: as good a reason as any."""
    world.add_table()
    query = world.query(session)
    world.produce(range(400))
    wait_for(lambda: world.closed_rows() == 400)
    run = query._run
    assert run is not None
    assert run._query is not None
    run._query._jsq.stop()
    world.produce(range(400, 800))
    wait_for(lambda: world.closed_rows() == 800)
    check(world.read(), range(800))
    assert query.report().generation == 2


def test_a_lost_checkpoint_costs_nothing(world: World, session: Session) -> None:
    world.add_table()
    world.produce(range(400))
    first = world.query(session)
    wait_for(lambda: world.closed_rows() == 400)
    stopped(first)
    shutil.rmtree(run_dir_of(world.settings, world.view()))
    world.produce(range(400, 800))
    world.query(session)
    wait_for(lambda: world.closed_rows() == 800)
    check(world.read(), range(800))


def test_a_checkpoint_from_the_past_is_recognised(world: World, session: Session) -> None:
    """The directory of a minute ago is put back: its plans end below the committed epoch."""
    world.add_table()
    world.produce(range(400))
    query = world.query(session)
    wait_for(lambda: world.closed_rows() == 400)
    stopped(query)
    run_dir = run_dir_of(world.settings, world.view())
    shutil.copytree(run_dir, world.directory / "old")
    query = world.query(session)
    for start in range(400, 1_200, 400):
        world.produce(range(start, start + 400))
        wait_for(lambda start=start: world.closed_rows() == start + 400)
    stopped(query)
    shutil.rmtree(run_dir)
    shutil.copytree(world.directory / "old", run_dir)
    world.produce(range(1_200, 1_600))
    world.query(session)
    wait_for(lambda: world.closed_rows() == 1_600)
    check(world.read(), range(1_600))


def test_a_checkpoint_ahead_of_the_log_is_rolled_back(world: World, session: Session) -> None:
    """Spark believes a batch is committed whose marks were never written: its commit is forgotten, its plan kept."""
    world.add_table()
    world.produce(range(400))
    query = world.query(session)
    wait_for(lambda: world.closed_rows() == 400)
    stopped(query)
    checkpoints = run_dir_of(world.settings, world.view()) / "checkpoints"
    (checkpoint,) = checkpoints.iterdir()
    last = max(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdigit())
    shutil.copy(checkpoint / "commits" / str(last), checkpoint / "commits" / str(last + 1))
    version, metadata, line = (checkpoint / "offsets" / str(last)).read_text().splitlines()
    plan = json.loads(line)
    plan["partitions"] = [[100, 177, 177]] * 4
    (checkpoint / "offsets" / str(last + 1)).write_text(f"{version}\n{metadata}\n{json.dumps(plan)}")
    world.produce(range(400, 800))
    world.query(session)
    wait_for(lambda: world.closed_rows() == 800)
    check(world.read(), range(800))


def test_a_pipeline_that_lost_its_lease_is_fenced_and_changes_nothing(
    world: World, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pipeline hangs between blocks and marks; a second takes over and closes the epoch; the first wakes up,
    appends its mark, finds the Fence before it, and stops."""
    from cremant.pipeline.closer import Closer

    world.add_table()
    hanging, wake = threading.Event(), threading.Event()
    original = Closer.close

    def hang_once(self: Closer, *args: Any) -> Any:
        if not hanging.is_set():
            hanging.set()
            assert wake.wait(60)
        return original(self, *args)

    monkeypatch.setattr(Closer, "close", hang_once)
    first = world.query(session, member=LocalMember(world.controller, "Pipeline_first_1"))
    world.produce(range(400))
    assert hanging.wait(60)
    first._lease.drop()  # nobody hears of it any more, and it does not know
    second_member = LocalMember(world.controller, "Pipeline_second_1")
    second = world.query(session, member=second_member, settings=world.settings_for("second"))
    wait_for(lambda: world.closed_rows() == 400)
    assert second.report().generation == 2
    wake.set()
    wait_for(lambda: first.report().state == "waiting", 60)
    assert "taken over" in (first.report().error or "") or "held by" in (first.report().error or "")
    world.produce(range(400, 800))
    wait_for(lambda: world.closed_rows() == 800)
    contents = world.read()
    check(contents, range(800))
    topic = epoch_topic("events", world.view().record.incarnation)
    assert world.log.latest(topic, 0) > 0
    blocks = [record for record in contents[0].records if isinstance(record, RowBlock)]
    assert {block.generation for block in blocks} == {1, 2}
    assert contents[0].ignored >= 1
