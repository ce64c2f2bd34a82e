# SPDX-License-Identifier: Apache-2.0
"""What a start believes of its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from ingest_kit import config_of, schema_of

from cremant.epoch.protocol import EffectFailed
from cremant.epoch.start import GenerationTaken
from cremant.log.memory import MemoryLog
from cremant.model.cluster import PipelineRecord, Rewind, TableRecord, TableView
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
