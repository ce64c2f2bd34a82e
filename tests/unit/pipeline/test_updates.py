# SPDX-License-Identifier: Apache-2.0
"""The coordinator's decisions: candidates of several tasks through a state of top k, against the reference model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from upsert_model import History, UpsertModel

from cremant.ingest.candidates import Candidates
from cremant.model.errors import Corrupt, InvalidConfig, InvariantViolation
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.model.upsert import UpsertConfig
from cremant.pipeline.coordinator import COMPANION, companion_for, emitted, read_companion
from cremant.pipeline.reports import Report, TaskReport, outcome_of
from cremant.pipeline.updates import decide

SCHEMA = Schema(
    name="t",
    fields=tuple(
        FieldSpec(name=name, data_type=DataType.LONG, field_type=FieldType.DIMENSION) for name in ("id", "ts")
    ),
    primary_key_columns=("id",),
)
UPSERT = UpsertConfig(comparison_columns=("ts",))


class State:
    """What Spark's aggregation keeps: per key the k greatest candidates."""

    def __init__(self, k: int) -> None:
        self.k = k
        self._best: dict[bytes, list[tuple[bytes, bytes]]] = {}

    def merge(self, batches: list[pa.RecordBatch]) -> pa.ListArray:
        touched: dict[bytes, None] = {}
        for batch in batches:
            for row in batch.to_pylist():
                self._best.setdefault(row["key"], []).append((row["rank"], row["value"]))
                touched[row["key"]] = None
        for key in touched:
            self._best[key] = sorted(self._best[key], reverse=True)[: self.k]
        best = [[value for _, value in self._best[key]] for key in touched]
        return pa.array(best, pa.list_(pa.binary()))


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


def run(epochs: list[list[list[tuple[int, int]]]], k: int) -> None:
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
        updates = decide(state.merge(batches), epoch, k)
        found: dict[int, set[Any]] = {}
        for partition, offset, sub_row, op in zip(*(column.tolist() for column in updates), strict=True):
            found.setdefault(partition, set()).add((offset, sub_row, op))
        assert found == history.close(epoch, ends), f"epoch {epoch}"


TASK = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=6)
EPOCHS = st.lists(st.lists(TASK, min_size=1, max_size=3), max_size=8)


@given(EPOCHS)
def test_updates_are_those_of_the_model_with_k_above_the_tasks(epochs: list[list[list[tuple[int, int]]]]) -> None:
    run(epochs, k=4)


def test_too_small_a_k_is_an_error_and_never_a_lost_delete() -> None:
    """The row of epoch 1 is pushed out by the candidates of two tasks."""
    with pytest.raises(InvariantViolation, match="2 tasks or more brought rows of one key in epoch 2"):
        run([[[(1, 1)]], [[(1, 2)], [(1, 3)]]], k=2)
    run([[[(1, 1)]], [[(1, 2)], [(1, 3)]]], k=3)


def test_a_state_of_the_future_is_an_error() -> None:
    best = State(3).merge([candidates_of(0, [(0, 1, 1)], 7)])
    with pytest.raises(InvariantViolation, match="holds a row of epoch 7 in epoch 6"):
        decide(best, 6, 3)


def test_reports_travel_among_candidates() -> None:
    report = Report(2, 10, 20, 9, 1, 0, 1234, '{"nullKey": 1}', False)
    gap = Report(3, 0, 5, 0, 0, 0, None, "", True)
    batches = list(emitted(Candidates(SCHEMA, UPSERT), 1, 7, TaskReport([report, gap], [(0, 4)])))
    assert len(batches) == 1
    row = batches[0].to_pylist()[0]
    assert row["key"][0] == 0
    assert int.from_bytes(row["rank"], "big") == int.from_bytes(row["value"][:8], "big") == 7
    outcome = outcome_of([(None, None, row["value"][8:]), (2, 5, None)], upsert=True)
    assert outcome.reports == [report, gap]
    assert [(ack.partition, ack.updates) for ack in outcome.updates] == [(0, 4), (2, 5)]
    assert [block.rows for block in outcome.blocks] == [9]
    assert [ack.range.next for ack in outcome.gaps] == [5]


def test_what_a_state_was_made_with_stays_with_it(tmp_path: Path) -> None:
    checkpoint = tmp_path / "generation-1"
    assert read_companion(checkpoint) is None
    made = companion_for(checkpoint, SCHEMA, UPSERT, tasks=2, state_partitions=1)
    assert (made.candidates, made.tasks_max) == (3, 2)
    again = companion_for(checkpoint, SCHEMA, UPSERT, tasks=8, state_partitions=4)
    assert again == made == read_companion(checkpoint)
    with pytest.raises(InvalidConfig, match="compared by ts, the table says id compared by id"):
        companion_for(checkpoint, SCHEMA, UpsertConfig(comparison_columns=("id",)), tasks=2, state_partitions=1)
    (checkpoint / COMPANION).write_text("{")
    with pytest.raises(Corrupt, match=COMPANION):
        read_companion(checkpoint)
