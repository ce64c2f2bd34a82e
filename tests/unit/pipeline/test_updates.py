# SPDX-License-Identifier: Apache-2.0
"""The coordinator's decisions: candidates of several tasks through a state, against the reference model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from upsert_model import History, UpsertModel

from cremant.ingest.candidates import Candidates
from cremant.ingest.packs import CANDIDATES, STATE
from cremant.model.errors import Corrupt, InvalidConfig, InvariantViolation, NoResource, Unavailable
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.model.upsert import UpsertConfig
from cremant.pipeline.coordinator import COMPANION, companion_for, new_companion, read_companion, report_row
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
    """What the operator keeps (of each key the greatest candidate) and says: per candidate that is greater than what
    its key had, both (`keys/Decisions.java`)."""

    def __init__(self) -> None:
        self._best: dict[bytes, bytes] = {}

    def merge(self, batches: list[pa.RecordBatch]) -> pa.BinaryArray:
        said = []
        for batch in batches:
            pack = bytes([CANDIDATES])
            for row in batch.to_pylist():
                before = self._best.get(row["key"], b"")
                if row["candidate"] > before:
                    self._best[row["key"]] = row["candidate"]
                    pack += row["candidate"][-24:] + (before[-24:] or bytes(24))
            said.append(pack)
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


def run(epochs: list[list[list[tuple[int, int]]]]) -> None:
    """Epochs of tasks of (key, comparison); a task reads a partition of its own. Compares each epoch with the model."""
    model, state = UpsertModel(), State()
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
        updates = decide(decisions, epoch)
        found: dict[int, set[Any]] = {}
        for partition, offset, sub_row, op in zip(*(column.tolist() for column in updates), strict=True):
            found.setdefault(partition, set()).add((offset, sub_row, op))
        assert found == history.close(epoch, ends), f"epoch {epoch}"


TASK = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=6)
EPOCHS = st.lists(st.lists(TASK, min_size=1, max_size=3), max_size=8)


@settings(deadline=None)
@given(EPOCHS)
def test_updates_are_those_of_the_model(epochs: list[list[list[tuple[int, int]]]]) -> None:
    run(epochs)


def test_a_row_replaced_in_its_own_epoch_leaves_no_trace() -> None:
    """Three tasks bring the key, each a greater one: the last is inserted, the one of epoch 1 deleted."""
    run([[[(1, 1)]], [[(1, 2)], [(1, 3)], [(1, 4)]]])


def test_a_state_of_the_future_is_an_error() -> None:
    decisions, _ = apart(State().merge([candidates_of(0, [(0, 1, 1)], 7)]))
    with pytest.raises(InvariantViolation, match="holds a row of epoch 7 in epoch 6"):
        decide(decisions, 6)


def test_what_the_operator_cannot_have_said_is_an_error() -> None:
    for cell in (bytes([CANDIDATES]) + bytes(47), bytes([9]) + bytes(48)):
        with pytest.raises(InvariantViolation, match="the key coordinator said"):
            apart(pa.array([cell], pa.binary()))


def test_reports_travel_among_packs() -> None:
    report = Report(2, 10, 20, 9, 1, 0, 1234, '{"nullKey": 1}', False)
    gap = Report(3, 0, 5, 0, 0, 0, None, "", True)
    row = report_row(3, TaskReport([report, gap], [(0, 4)]), 2).to_pylist()[0]
    assert row["partition"] == 1
    state = bytes([STATE]) + (40).to_bytes(8, "big") + (9_000).to_bytes(8, "big")
    decisions, reports = apart(pa.array([row["pack"], state, state], pa.binary()))
    assert len(decisions) == 0
    own = msgspec.json.encode(TaskReport(updates=[(2, 5)]))
    outcome = outcome_of([(text,) for text in (*reports, own)], upsert=True)
    assert outcome.reports == [report, gap]
    assert (outcome.keys, outcome.state_bytes) == (80, 18_000)
    assert [(ack.partition, ack.updates) for ack in outcome.updates] == [(0, 4), (2, 5)]
    assert [block.rows for block in outcome.blocks] == [9]
    assert [ack.range.next for ack in outcome.gaps] == [5]


def test_what_a_state_was_made_with_stays_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tmp_path / "generation-1"
    assert read_companion(checkpoint) is None
    new = new_companion(SCHEMA, UPSERT)
    made = companion_for(checkpoint, msgspec.structs.replace(new, state_partitions=5))
    assert companion_for(checkpoint, new) == made == read_companion(checkpoint)
    other = new_companion(SCHEMA, UpsertConfig(comparison_columns=("id",)))
    with pytest.raises(InvalidConfig, match="compared by ts, the table says id compared by id"):
        companion_for(checkpoint, other)
    for text, why in (
        ("{", "truncated"),
        (msgspec.json.encode(new).decode().replace('"version":2', '"version":1'), "version 1"),
    ):
        (checkpoint / COMPANION).write_text(text)
        with pytest.raises(Corrupt, match=why):
            read_companion(checkpoint)
    monkeypatch.setattr("cremant.pipeline.coordinator.QUICK_JAR", tmp_path / "jar")
    with pytest.raises(NoResource, match="which is not there"):
        companion_for(checkpoint, new)


def test_a_closed_epoch_that_runs_again_for_its_keys_must_still_be_in_the_stream() -> None:
    spec = RunSpec(
        run_dir="", log_settings={}, table="t", incarnation="0" * 16, topic="events", topic_incarnation="",
        stream_version=1, epoch_topic="", dead_letter_topic="", generation=2, base=5, starts=(30, 40), tasks_max=2,
        replay_batch=4, replay_epoch=9, state_partitions=2,
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
    StreamReader(msgspec.structs.replace(spec, state_partitions=None))._check_replay(plan, expired)
