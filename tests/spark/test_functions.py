# SPDX-License-Identifier: Apache-2.0
"""A user's own PySpark function in the ingest path: what it may do, what is refused, what gives it away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pipelines import World, table_config, wait_for

from cremant.epoch.records import RowBlock
from cremant.pipeline.query import TableQuery

Session = Callable[[], Any]


@pytest.fixture
def allowed(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, pipeline_modules="somebody.elses, spark_functions")
    yield world
    world.close()


def start(world: World, session: Session, function: str) -> TableQuery:
    world.add_table({"function": f"spark_functions:{function}"})
    return world.query(session)


def rows(world: World) -> dict[int, dict[str, Any]]:
    contents = world.read()
    assert all(content.stopped is None for content in contents), [content.stopped for content in contents]
    return {row["id"]: row for content in contents for row in content.rows}


def test_a_function_changes_values_and_drops_rows(allowed: World, session: Session) -> None:
    """Coverage comes from what was read: dropped rows are accounted for as filtered."""
    query = start(allowed, session, "shout_and_drop")
    allowed.produce(range(1_200))
    wait_for(lambda: allowed.closed_rows() == 1_200)
    found = rows(allowed)
    assert sorted(found) == [n for n in range(1_200) if n % 3]
    assert found[100]["name"] == f"NAME-{100 % 97}"
    assert sum(closed.line.filtered for content in allowed.read() for closed in content.closed) == 400
    assert query.report().filtered_total == 400


def test_a_function_may_drop_every_row(allowed: World, session: Session) -> None:
    start(allowed, session, "drop_everything")
    allowed.produce(range(100))
    wait_for(lambda: allowed.closed_rows() == 100)
    assert rows(allowed) == {}


def test_a_function_may_work_on_arrow_batches(allowed: World, session: Session) -> None:
    start(allowed, session, "in_arrow")
    allowed.produce(range(100))
    wait_for(lambda: allowed.closed_rows() == 100)
    assert [row["v"] for _, row in sorted(rows(allowed).items())] == [float(n) for n in range(100)]


def test_a_null_from_a_function_is_stored_as_the_default(allowed: World, session: Session) -> None:
    start(allowed, session, "some_nulls")
    allowed.produce(range(10))
    wait_for(lambda: allowed.closed_rows() == 10)
    assert [row["name"] for _, row in sorted(rows(allowed).items())][:4] == ["name-0", "null", "name-2", "null"]


def test_a_function_is_taken_out_of_a_running_table(allowed: World, session: Session) -> None:
    query = start(allowed, session, "shout_and_drop")
    allowed.produce(range(300))
    wait_for(lambda: allowed.closed_rows() == 300)
    allowed.controller.tables.change("events", table_config())
    query.update(allowed.view())
    wait_for(lambda: query.report().generation == 2 and query.report().state == "running")
    allowed.produce(range(300, 600))
    wait_for(lambda: allowed.closed_rows() == 600)
    found = rows(allowed)
    assert sorted(found) == [n for n in range(300) if n % 3] + list(range(300, 600))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("shuffled", "the operator Repartition"),
        ("counted", "the operator Aggregate"),
        ("sorted_rows", "the operator Sort"),
        ("without_columns", "dropped the column(s) $partition, $offset"),
        ("wrong_type", "column v became string, expected double"),
        ("not_a_frame", "returned a int, not a DataFrame"),
        ("no_such_function", "cannot be loaded"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_with_the_reason(
    allowed: World, session: Session, function: str, words: str
) -> None:
    query = start(allowed, session, function)
    wait_for(lambda: query.report().state == "failed")
    assert words in (query.report().error or "")


def test_a_function_outside_of_the_allow_list_is_not_even_imported(world: World, session: Session) -> None:
    query = start(world, session, "shout_and_drop")
    wait_for(lambda: query.report().state == "failed")
    assert "not on the allow-list (which is empty)" in (query.report().error or "")


def test_a_function_that_repeats_rows_is_stopped(allowed: World, session: Session) -> None:
    query = start(allowed, session, "twice")
    allowed.produce(range(10))
    wait_for(lambda: query.report().state == "failed")
    assert "repeated or reordered rows" in (query.report().error or "")
    assert allowed.closed_rows() == 0


def test_a_function_that_is_not_deterministic_is_caught_by_readers(
    allowed: World, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partition 0 writes its block, partition 1 fails: the epoch stays open. The next run writes the block of the same
    offsets again, with other content: readers stop (E-2) instead of choosing."""
    gate = tmp_path / "gate"
    monkeypatch.setenv("DICE_MAY_PASS", str(gate))
    query = start(allowed, session, "dice")
    allowed.produce(range(50_000), partitions=2)
    wait_for(lambda: query.report().generation > 1)
    wait_for(lambda: any(isinstance(record, RowBlock) for record in allowed.read(partitions=1)[0].records))
    gate.touch()
    wait_for(lambda: allowed.closed_rows() == 50_000)
    stopped = allowed.read(partitions=1)[0].stopped
    assert stopped is not None
    assert stopped.rule == "E-2"
    assert "not deterministic" in stopped.hint
