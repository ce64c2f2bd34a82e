# SPDX-License-Identifier: Apache-2.0
"""The coordinator's decisions: candidates of several tasks through a state of top k, against the reference model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from upsert_model import History, UpsertModel

from cremant.ingest.candidates import Candidates
from cremant.model.errors import Corrupt, InvalidConfig, InvariantViolation, NoResource, Unavailable
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.model.upsert import UpsertConfig
from cremant.pipeline.coordinator import COMPANION, companion_for, emitted, new_companion, read_companion
from cremant.pipeline.plan import EpochPlan, PlannedRange, shares_of
from cremant.pipeline.reports import Report, TaskReport, outcome_of
from cremant.pipeline.source import StreamReader
from cremant.pipeline.spec import RunSpec
from cremant.pipeline.updates import apart, decide

SCHEMA = Schema(
    name="t",
    fields=tuple(
        FieldSpec(name=name, data_type=DataType.LONG, field_type=FieldType.DIMENSION) for name in ("id", "ts")
    ),
    primary_key_columns=("id",),
)
UPSERT = UpsertConfig(comparison_columns=("ts",))


class State:
    """What the operators keep and say: the k greatest candidates of a key, all of a touched one's (stock); or one, and
    the one before if it is another (native: k = None)."""

    def __init__(self, k: int | None) -> None:
        self.k = k
        self._best: dict[bytes, list[bytes]] = {}

    def merge(self, batches: list[pa.RecordBatch]) -> pa.BinaryArray:
        came: dict[bytes, list[bytes]] = {}
        for batch in batches:
            for row in batch.to_pylist():
                came.setdefault(row["key"], []).append(row["candidate"])
        said = []
        for key, candidates in came.items():
            before = self._best.get(key, [])
            best = sorted([*before, *candidates], reverse=True)[: self.k or 1]
            self._best[key] = best
            if self.k is None:
                if best == before:
                    continue
                best = [*best, *before]
            said.append(b"\1" + b"".join(candidate[-24:] for candidate in best))
        return pa.array(said, pa.binary())


def candidates_of(partition: int, rows: list[tuple[int, int, int]], epoch: int) -> pa.RecordBatch:
    """Rows: (offset, key, comparison)."""
    offsets, keys, stamps = (pa.array(column, pa.int64()) for column in zip(*rows, strict=True))
    sub_rows = pa.array([0] * len(rows), pa.int32())
    candidates = Candidates(SCHEMA, UPSERT)
    candidates.add(
        pa.RecordBatch.from_arrays([offsets, sub_rows, keys, stamps], ["$offset", "$subRow", "id", "ts"]), partition,
        epoch,
    )  # fmt: skip
    return candidates.finish()


def run(epochs: list[list[list[tuple[int, int]]]], k: int | None) -> None:
    """Epochs of tasks of (key, comparison); a task reads a partition of its own. Compares each epoch with the model."""
    model, state = UpsertModel(), State(k)
    history = History(model, 3)
    ends = [0, 0, 0]
    for epoch, tasks in enumerate(epochs, 1):
        batches = []
        for partition, rows in enumerate(tasks):
            located = [(ends[partition] + at, key, stamp) for at, (key, stamp) in enumerate(rows)]
            for offset, key, stamp in located:
                model.apply(partition, offset, 0, key, stamp)
            ends[partition] += len(rows)
            if located:
                batches.append(candidates_of(partition, located, epoch))
        decisions, _ = apart(state.merge(batches))
        updates = decide(decisions, epoch, k or 2)
        found: dict[int, set[Any]] = {}
        for partition, offset, sub_row, op in zip(*(column.tolist() for column in updates), strict=True):
            found.setdefault(partition, set()).add((offset, sub_row, op))
        assert found == history.close(epoch, ends), f"epoch {epoch}"


TASK = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=6)
EPOCHS = st.lists(st.lists(TASK, min_size=1, max_size=3), max_size=8)


@given(EPOCHS)
def test_updates_are_those_of_the_model(epochs: list[list[list[tuple[int, int]]]]) -> None:
    run(epochs, k=4)
    run(epochs, k=None)


def test_too_small_a_k_is_an_error_and_never_a_lost_delete() -> None:
    """The row of epoch 1 is pushed out by the candidates of two tasks."""
    with pytest.raises(InvariantViolation, match="2 tasks or more brought rows of one key in epoch 2"):
        run([[[(1, 1)]], [[(1, 2)], [(1, 3)]]], k=2)
    run([[[(1, 1)]], [[(1, 2)], [(1, 3)]]], k=3)


def test_a_state_of_the_future_is_an_error() -> None:
    decisions, _ = apart(State(3).merge([candidates_of(0, [(0, 1, 1)], 7)]))
    with pytest.raises(InvariantViolation, match="holds a row of epoch 7 in epoch 6"):
        decide(decisions, 6, 3)


def test_reports_travel_among_candidates() -> None:
    report = Report(2, 10, 20, 9, 1, 0, 1234, '{"nullKey": 1}', False)
    gap = Report(3, 0, 5, 0, 0, 0, None, "", True)
    batches = list(emitted(Candidates(SCHEMA, UPSERT), 1, 7, TaskReport([report, gap], [(0, 4)])))
    assert len(batches) == 1
    row = batches[0].to_pylist()[0]
    assert row["key"][-1] == 0
    _, reports = apart(pa.array([b"\0" + row["candidate"]], pa.binary()))
    assert int.from_bytes(reports[0][:8], "big") == 7
    outcome = outcome_of([(None, None, reports[0][8:]), (2, 5, None)], upsert=True)
    assert outcome.reports == [report, gap]
    assert [(ack.partition, ack.updates) for ack in outcome.updates] == [(0, 4), (2, 5)]
    assert [block.rows for block in outcome.blocks] == [9]
    assert [ack.range.next for ack in outcome.gaps] == [5]


def test_what_a_state_was_made_with_stays_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tmp_path / "generation-1"
    assert read_companion(checkpoint) is None
    monkeypatch.setattr("cremant.pipeline.coordinator.QUICK_JAR", tmp_path / "jar")
    stock = companion_for(checkpoint, new_companion(SCHEMA, UPSERT, slots=2, state_partitions=1))
    assert (stock.operator, stock.candidates, stock.tasks_max(8)) == ("stock", 3, 2)
    (tmp_path / "jar").touch()
    native = new_companion(SCHEMA, UPSERT, slots=8, state_partitions=4)
    assert (native.operator, native.candidates, native.tasks_max(8)) == ("native", 2, 8)
    assert companion_for(checkpoint, native) == stock == read_companion(checkpoint)
    other = new_companion(SCHEMA, UpsertConfig(comparison_columns=("id",)), slots=2, state_partitions=1)
    with pytest.raises(InvalidConfig, match="compared by ts, the table says id compared by id"):
        companion_for(checkpoint, other)
    (checkpoint / COMPANION).unlink()
    companion_for(checkpoint, native)
    (tmp_path / "jar").unlink()
    with pytest.raises(NoResource, match="which is not there"):
        companion_for(checkpoint, native)
    (checkpoint / COMPANION).write_text("{")
    with pytest.raises(Corrupt, match=COMPANION):
        read_companion(checkpoint)


def test_a_closed_epoch_that_runs_again_for_its_keys_must_still_be_in_the_stream() -> None:
    spec = RunSpec(
        run_dir="", log_settings={}, table="t", incarnation="0" * 16, topic="events", topic_incarnation="",
        stream_version=1, epoch_topic="", dead_letter_topic="", generation=2, base=5, starts=(30, 40), tasks_max=2,
        replay_batch=4, replay_epoch=9, candidates=2,
    )  # fmt: skip
    plan = EpochPlan(
        config_version=1, topic_incarnation="", at_ms=0, partitions=(PlannedRange(10, 30, 30), PlannedRange(20, 40, 40))
    )
    whole, expired = shares_of(plan, [0, 20]), shares_of(plan, [0, 21])
    StreamReader(spec)._check_replay(plan, whole)
    with pytest.raises(Unavailable, match="epoch 9 is to run again for its keys, but offsets up to 21 of topic events"):
        StreamReader(spec)._check_replay(plan, expired)
    following = msgspec.structs.replace(plan, partitions=(PlannedRange(30, 31, 31), PlannedRange(40, 50, 50)))
    StreamReader(spec)._check_replay(following, shares_of(following, [31, 45]))
    StreamReader(msgspec.structs.replace(spec, candidates=None))._check_replay(plan, expired)
