# SPDX-License-Identifier: Apache-2.0
"""The planner's side of the Spark source, without Spark: what expired between planning and running."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ingest_kit import config_of, schema_of
from pyspark.sql.streaming.datasource import ReadMaxRows

from cremant.epoch.format import peek
from cremant.epoch.records import Gap
from cremant.log.api import Bounds, Log, Message
from cremant.log.open import Logs, open_logs
from cremant.model.cluster import TableRecord
from cremant.model.errors import InvalidConfig, InvariantViolation, Unavailable
from cremant.model.settings import Settings
from cremant.pipeline.ends import ASKED_MAX, PAUSE_S, asked_again
from cremant.pipeline.plan import EpochPlan, PlannedRange, SeedPlan, Share, Wanted
from cremant.pipeline.source import StreamReader, TaskShares
from cremant.pipeline.spec import RunSpec, log_settings_of, write_config, write_wanted
from cremant.pipeline.task import ingest_share, run_task

INCARNATION = "0" * 16


def forty_messages(directory: Path, *, stop_on_expired: bool = False) -> tuple[Logs, RunSpec]:
    """In one partition, and a table that reads them."""
    settings = Settings(("test", {"data_dir": str(directory), "log_segment_bytes": 4_096}))
    logs = open_logs(settings)
    topic = logs.embedded.create_topic("t", 1).incarnation
    logs.embedded.create_topic("e", 1)
    for _ in range(40):
        logs.embedded.append("t", 0, [Message(b"x" * 1_000)])
    record = TableRecord(
        config=config_of(), table_schema=schema_of({}), incarnation=INCARNATION, topic_incarnation=topic
    )
    spec = RunSpec(
        run_dir=str(directory), log_settings=log_settings_of(settings), table="t", incarnation=INCARNATION, topic="t",
        topic_incarnation=topic, stream_version=record.config_version, epoch_topic="e", dead_letter_topic="d",
        generation=1, base=1, starts=(0,), tasks_max=1,
    )  # fmt: skip
    write_config(directory, record)
    write_wanted(spec, Wanted(config_version=1, starts=(0,), max_rows=100, stop_on_expired=stop_on_expired))
    return logs, spec


def plan_up_to(end: int, spec: RunSpec) -> EpochPlan:
    return EpochPlan(
        config_version=1, topic_incarnation=spec.topic_incarnation, at_ms=0, partitions=(PlannedRange(0, end, end),)
    )


@pytest.mark.parametrize("stop", [False, True])
def test_what_expires_after_it_was_planned_widens_the_gap_or_stops_the_table(tmp_path: Path, stop: bool) -> None:
    logs, spec = forty_messages(tmp_path, stop_on_expired=stop)
    plan = plan_up_to(40, spec)
    logs.embedded.trim("t", 0, 20)
    earliest = logs.embedded.earliest("t", 0)
    assert 0 < earliest <= 20
    planner = StreamReader(spec)
    if stop:
        with pytest.raises(InvalidConfig, match=f"offsets 0 to {earliest} of topic t partition 0 expired"):
            planner.partitions({}, plan.to_offset())
    else:
        (task,) = planner.partitions({}, plan.to_offset())
        assert isinstance(task, TaskShares)
        assert [(share.gap_first, share.first, share.next) for share in task.shares] == [(0, earliest, 40)]
        batch = logs.embedded.reader("e", 0, 0).read(max_messages=9, max_bytes=9_999)
        assert batch is not None
        assert isinstance(peek(batch.values[0].as_buffer(), INCARNATION), Gap)
    logs.close()


def test_the_first_batch_of_a_table_without_messages_has_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark runs a first batch even if its plan is the initial one, which names no config."""
    monkeypatch.setattr("cremant.pipeline.task.task_index", lambda: 3)
    logs, spec = forty_messages(tmp_path)
    spec = msgspec.structs.replace(spec, starts=(40,), state_partitions=2)
    write_wanted(spec, Wanted(config_version=1, starts=(40,), max_rows=100))
    planner = StreamReader(spec)
    initial = planner.initialOffset()
    assert planner.latestOffset(initial, ReadMaxRows(1_000)) == initial
    (task,) = planner.partitions(initial, initial)
    assert isinstance(task, TaskShares)
    (batch,) = run_task(spec, task.shares, 0, task.config_version)
    assert batch.num_rows == 1, "the report"
    logs.close()


@pytest.mark.parametrize("stop", [False, True])
def test_a_closed_epoch_whose_messages_expired_is_not_run_again_for_its_keys(tmp_path: Path, stop: bool) -> None:
    """Whatever the table's policy: its rows are in the epoch log, so nothing is lost; and no gap is written."""
    logs, spec = forty_messages(tmp_path, stop_on_expired=stop)
    spec = msgspec.structs.replace(spec, starts=(40,), state_partitions=2, replay_batch=0, replay_epoch=9)
    logs.embedded.trim("t", 0, 20)
    with pytest.raises(Unavailable, match="epoch 9 is to run again for its keys"):
        StreamReader(spec).partitions({}, plan_up_to(40, spec).to_offset())
    assert logs.embedded.latest("e", 0) == 0
    logs.close()


def test_a_seed_is_planned_even_if_the_query_is_to_end(tmp_path: Path) -> None:
    """The first batch runs in any case: without its seed it would be closed with a state that lacks every key."""
    logs, spec = forty_messages(tmp_path)
    spec = msgspec.structs.replace(spec, starts=(40,), state_partitions=2, seed=SeedPlan(epoch=7))
    write_wanted(spec, Wanted(config_version=1, starts=(40,), max_rows=100, hold=True))
    planner = StreamReader(spec)
    plan = EpochPlan.from_offset(planner.latestOffset(planner.initialOffset(), ReadMaxRows(1_000)))
    assert (plan.seed, plan.config_version, plan.ends) == (SeedPlan(epoch=7), 1, (40,))
    logs.close()


class Forgetful:
    """A log that knows less than there is, the first `times` it is asked."""

    def __init__(self, log: Log, times: int) -> None:
        self._log = log
        self.times = times

    def bounds(self, topic: str, partitions: Sequence[int]) -> list[Bounds]:
        self.times -= 1
        found = self._log.bounds(topic, partitions)
        return [Bounds(0, 12)] * len(found) if self.times >= 0 else found

    def latest(self, topic: str, partition: int) -> int:
        return self.bounds(topic, [partition])[0].latest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


def test_a_leader_that_does_not_know_the_end_yet_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the planner, and by a task whose reader gives nothing either. One that stays behind is believed."""
    monkeypatch.setattr("cremant.pipeline.ends.PAUSE_S", 0.0)
    logs, spec = forty_messages(tmp_path)
    stream = Forgetful(logs.embedded, 3)
    monkeypatch.setattr("cremant.pipeline.worker.stream_of", lambda spec: stream)
    planner = StreamReader(spec)
    after = planner.latestOffset(plan_up_to(30, spec).to_offset(), ReadMaxRows(1_000))
    assert EpochPlan.from_offset(after).partitions == (PlannedRange(30, 40, 40),)
    stream.times = ASKED_MAX
    with pytest.raises(InvariantViolation, match="E-8: partition 0 was read to offset 30, but the stream ends at 12"):
        planner.latestOffset(plan_up_to(30, spec).to_offset(), ReadMaxRows(1_000))
    assert stream.times == 0

    stream.times = 10**9
    with pytest.raises(InvariantViolation, match="E-2: the stream ends at 12, an epoch was planned up to 60"):
        list(ingest_share(spec, Share(0, 0, 0, 60), 1))
    logs.close()


def test_a_log_that_shows_messages_late_is_believed_for_the_time_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a plan says was in the stream at its time had to be visible by then."""
    logs, spec = forty_messages(tmp_path)
    stream = Forgetful(logs.embedded, 0)
    stream.stamped_ahead_ms = 60_000
    monkeypatch.setattr("cremant.pipeline.worker.stream_of", lambda spec: stream)
    now_ms = time.time_ns() // 1_000_000
    after = EpochPlan.from_offset(StreamReader(spec).latestOffset(plan_up_to(0, spec).to_offset(), ReadMaxRows(9)))
    assert now_ms - 60_000 <= after.at_ms <= time.time_ns() // 1_000_000 - 60_000
    logs.close()


def test_an_end_is_asked_for_at_most_so_often_and_with_pauses() -> None:
    ends, pauses = iter([3, 5, 9, 11]), list[float]()
    assert asked_again(lambda: next(ends), lambda end: end >= 9, pauses.append) == 9
    assert pauses == [PAUSE_S] * 2
    pauses.clear()
    ends = iter(range(10**6))
    assert asked_again(lambda: next(ends), lambda end: False, pauses.append) == ASKED_MAX - 1
    assert pauses == [PAUSE_S] * (ASKED_MAX - 1)
    assert 3.0 <= sum(pauses) <= 10.0, "longer than a change of leaders, shorter than anybody's patience"
