# SPDX-License-Identifier: Apache-2.0
"""What a start believes of its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ingest_kit import config_of, schema_of

from cremant.epoch.protocol import EffectFailed
from cremant.epoch.start import GenerationTaken
from cremant.log.memory import MemoryLog
from cremant.model.cluster import PipelineRecord, Rewind, TableRecord, TableView
from cremant.model.upsert import UpsertConfig
from cremant.pipeline.coordinator import companion_for, new_companion
from cremant.pipeline.plan import EpochPlan, PlannedRange
from cremant.pipeline.starter import StartDriver
from cremant.wire.messages import GenerationReply

ASKED = Rewind(to_epoch=7, asked_ms=1)
EARLIER = Rewind(to_epoch=3, next_epoch=5, generation=2)


class Controller:
    id = "Pipeline_1"
    nonce = "n"

    def __init__(self, rewind: Rewind | None) -> None:
        self._reply = GenerationReply(generation=4, base=1, checkpoint="generation-3", rewind=rewind)

    def call(self, path: str, message: object, reply_type: type[Any], timeout_ms: int = 0) -> Any:
        return self._reply


@pytest.mark.parametrize(
    ("granted", "known", "goes_on"),
    [
        (None, (), True),
        (None, (EARLIER,), True),
        (ASKED, (EARLIER, ASKED), True),
        (ASKED, (EARLIER,), False),
        (ASKED, (), False),
        (None, (msgspec.structs.replace(ASKED, generation=0),), True),
    ],
)
def test_a_rewind_waits_for_the_view_that_reopens_its_segments(
    tmp_path: Path, granted: Rewind | None, known: tuple[Rewind, ...], goes_on: bool
) -> None:
    """Else the log would be scanned from behind the epoch to go back to, and the table would fail for good."""
    record = TableRecord(config=config_of(), table_schema=schema_of({}), incarnation="0" * 16)
    table = TableView(record=record, partitions=(), segments=(), pipeline_record=PipelineRecord(rewinds=known))
    start = StartDriver(Controller(granted), MemoryLog(lambda: 0), table, tmp_path, 1)
    event = start._take_generation()
    if goes_on:
        assert event == GenerationTaken(4, "generation-3", granted.to_epoch if granted else None)
        assert start.rewound == granted
    else:
        assert isinstance(event, EffectFailed)
        assert "rewind to epoch 7" in event.reason


def test_what_was_planned_before_a_table_had_keys_is_not_run_again(tmp_path: Path) -> None:
    """With rows that another transform made, perhaps: the epoch is planned anew, as the table is by then."""
    checkpoint = tmp_path / "generation-3"
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "metadata").write_text('{"id":"x"}')
    planned = EpochPlan(
        config_version=2, topic_incarnation="abc", at_ms=5, partitions=(PlannedRange(0, 10, 10),)
    )  # fmt: skip
    (checkpoint / "offsets" / "0").write_text(f"v1\n{{}}\n{json.dumps(planned.to_offset())}")
    found = {}
    for upsert in (None, UpsertConfig(comparison_columns=("ts",))):
        config = msgspec.structs.replace(config_of(), upsert=upsert)
        record = TableRecord(config=config, table_schema=schema_of({}), incarnation="0" * 16)
        table = TableView(record=record, partitions=(), segments=(), pipeline_record=PipelineRecord())
        start = StartDriver(Controller(None), MemoryLog(lambda: 0), table, tmp_path, 1)
        found[upsert is not None] = start._inspect(checkpoint)
    assert found[False] is not None
    assert found[False].plans[0].config_version == 2
    assert found[True] is None


def test_a_checkpoint_whose_state_is_not_whole_is_a_lost_one(tmp_path: Path) -> None:
    """Spark would try, and fail, for ever."""
    checkpoint = tmp_path / "generation-3"
    for name in ("offsets", "commits", "state/0/0", "state/0/1"):
        (checkpoint / name).mkdir(parents=True)
    (checkpoint / "metadata").write_text('{"id":"x"}')
    planned = EpochPlan(
        config_version=2, topic_incarnation="abc", at_ms=5, partitions=(PlannedRange(0, 10, 10),)
    )  # fmt: skip
    for batch in ("8", "9"):
        (checkpoint / "offsets" / batch).write_text(f"v1\n{{}}\n{json.dumps(planned.to_offset())}")
        (checkpoint / "commits" / batch).touch()
    upsert = UpsertConfig(comparison_columns=("ts",))
    record = TableRecord(
        config=msgspec.structs.replace(config_of(), upsert=upsert), table_schema=schema_of({}), incarnation="0" * 16
    )
    companion_for(checkpoint, new_companion(record.table_schema, upsert))
    table = TableView(record=record, partitions=(), segments=(), pipeline_record=PipelineRecord())
    start = StartDriver(Controller(None), MemoryLog(lambda: 0), table, tmp_path, 1)
    for name, is_whole in (
        ("0/9.changelog", False),
        ("1/9.changelog", False),
        ("0/10.changelog", False),
        ("1/10.zip", True),
    ):
        (checkpoint / "state/0" / name).touch()
        assert (start._inspect(checkpoint) is not None) == is_whole
