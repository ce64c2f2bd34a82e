# SPDX-License-Identifier: Apache-2.0
"""How far a pipeline says it is with its stream."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cremant.epoch.records import PartitionMark
from cremant.model.cluster import StreamProgress
from cremant.model.errors import Unavailable
from cremant.pipeline import progress as module
from cremant.pipeline.plan import EpochPlan, PlannedRange, SeedPlan
from cremant.pipeline.progress import Progress


def plan(*ranges: tuple[int, int, int], at_ms: int, seed: SeedPlan | None = None) -> EpochPlan:
    partitions = tuple(PlannedRange(*one) for one in ranges)
    return EpochPlan(config_version=1, topic_incarnation="i", at_ms=at_ms, partitions=partitions, seed=seed)


def begun(closed: Sequence[int] = (10, 20)) -> Progress:
    progress = Progress()
    progress.begin(closed)
    return progress


def test_nothing_is_said_before_the_first_run() -> None:
    assert Progress().partitions == ()
    assert Progress().error is None


def test_an_epoch_on_its_way() -> None:
    """Planned, closed, and the stream's end as it was read for it; the idle partition is caught up by the same mark."""
    progress = begun()
    progress.planned(plan((10, 15, 40), (20, 20, 20), at_ms=1_000))
    assert progress.partitions == (
        StreamProgress(partition=0, stream_end=40, read_at_ms=1_000, planned=15, closed=10),
        StreamProgress(partition=1, stream_end=20, read_at_ms=1_000, planned=20, closed=20),
    )
    progress.closed(
        [
            PartitionMark(end=15, rows=5, max_ingestion_ms=900, stream_end=40),
            PartitionMark(end=20, rows=0, stream_end=20, reached_at_ms=1_000),
        ]
    )
    busy, idle = progress.partitions
    assert (busy.closed, busy.max_ingestion_ms, busy.caught_up_at_ms) == (15, 900, None)
    assert (idle.closed, idle.max_ingestion_ms, idle.caught_up_at_ms) == (20, None, 1_000)


def test_the_newest_message_counts_not_the_last() -> None:
    progress = begun((0,))
    for newest in (500, 300, None):
        progress.closed([PartitionMark(end=1, rows=1, max_ingestion_ms=newest)])
    assert progress.partitions[0].max_ingestion_ms == 500


def test_a_heartbeat_and_what_is_read_between_epochs() -> None:
    progress = begun()
    progress.read((10, 20), 2_000)
    progress.caught_up((0, 1), 2_000)
    progress.caught_up((1,), 2_500)
    progress.planned(plan((10, 12, 12), (20, 20, 20), at_ms=1_500))
    found = progress.partitions
    assert [(one.stream_end, one.read_at_ms) for one in found] == [(10, 2_000), (20, 2_000)], "an older reading"
    assert [one.caught_up_at_ms for one in found] == [2_000, 2_500]


def test_the_ends_of_a_seed_are_not_those_of_the_stream() -> None:
    progress = begun((0,))
    progress.planned(plan((0, 0, 0), at_ms=1_000, seed=SeedPlan(epoch=1)))
    assert progress.partitions[0].read_at_ms is None


def test_a_restart_keeps_what_is_known_and_a_rewind_takes_it_back() -> None:
    progress = begun()
    progress.closed([PartitionMark(end=15, rows=5, max_ingestion_ms=900), PartitionMark(end=25, rows=5)])
    progress.begin((15, 25, 0))
    assert [one.max_ingestion_ms for one in progress.partitions] == [900, None, None]
    progress.begin((12, 25, 0))
    assert [(one.closed, one.max_ingestion_ms) for one in progress.partitions] == [(12, None), (25, None), (0, None)]
    progress.forget()
    assert progress.partitions == ()


def test_an_error_stays_until_the_stream_answers() -> None:
    progress = begun()
    with pytest.raises(Unavailable), progress.asking("the end of topic t"):
        raise Unavailable("no broker of Kafka answers")
    assert progress.error == "no broker of Kafka answers"
    with progress.asking("the end of topic t"):
        assert progress.error == "no broker of Kafka answers", "not yet"
    assert progress.error is None
    with pytest.raises(Unavailable), progress.asking("the end of topic t"):
        raise Unavailable("no broker of Kafka answers")
    progress.rest()
    assert progress.error is None, "the table is paused: nobody asks"
    assert progress.partitions != ()


def test_a_question_without_an_answer_is_said_while_it_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = begun()
    now_s = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    with progress.asking("the end of topic t"):
        now_s += module.SLOW_S / 2
        assert progress.error is None
        now_s += 3 * module.SLOW_S
        assert progress.error == "the end of topic t: no answer for 4 s"
    assert progress.error is None
