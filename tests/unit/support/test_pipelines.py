# SPDX-License-Identifier: Apache-2.0
"""What readers of an epoch log took: its rows are counted as they are told, also after it was rolled back."""

from __future__ import annotations

from pipelines import PartitionContent, read_partition
from server_kit import EpochLog

from cremant.epoch.records import Reset
from cremant.log.memory import MemoryLog
from cremant.model.names import epoch_topic


def read(epochs: EpochLog) -> PartitionContent:
    return read_partition(epochs.log, epoch_topic(epochs.table, epochs.incarnation), epochs.incarnation, 0)


def offsets(content: PartitionContent) -> list[int]:
    return [row["$offset"] for row in content.rows]


def test_rows_of_every_block_are_there_once_and_in_order() -> None:
    epochs = EpochLog(MemoryLog(lambda: 1_700_000_000_000)).create()
    epochs.write(30)
    epochs.write(20)
    content = read(epochs)
    assert content.row_count == 50
    assert offsets(content) == list(range(50))
    assert content.rows[49]["fare"] == 49
    assert content.epochs == [1, 2]


def test_what_a_reset_takes_back_is_gone() -> None:
    epochs = EpochLog(MemoryLog(lambda: 1_700_000_000_000)).create()
    for _ in range(3):
        epochs.write(40)
    epochs.generation, epochs.epoch, epochs.ends, epochs.closed = 1, 1, [40], [40]
    epochs.start()
    epochs.append(0, Reset(generation=2, epoch=1))
    content = read(epochs)
    assert (content.row_count, offsets(content), content.epochs) == (40, list(range(40)), [1])
