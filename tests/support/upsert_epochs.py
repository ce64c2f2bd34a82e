# SPDX-License-Identifier: Apache-2.0
"""Whether an epoch log says of every epoch what the model says: its rows, INSERTs and DELETEs, partition by partition,
as a server would take them. For runs in which nothing was trimmed."""

from __future__ import annotations

from typing import Any

import numpy as np
from upsert_ledger import Table, UpsertLedger

from cremant.epoch.format import decode
from cremant.epoch.reader import EpochClosed, PartitionReader, Stopped, TakeRows, TakeUpdates
from cremant.epoch.records import DELETE, INSERT
from cremant.log.api import Log
from cremant.model.offsets import Position

#: Of an epoch in one partition: offsets of rows taken, of INSERTs and of DELETEs; and where the stream stands.
Said = tuple[np.ndarray, np.ndarray, np.ndarray, int]
_NOTHING = np.empty(0, dtype=np.int64)


def said_by(log: Log, topic: str, incarnation: str, partition: int) -> dict[int, Said]:
    """By epoch. A partition that stops is an error."""
    machine = PartitionReader(partition, Position(log_offset=0, epoch=0, generation=0, next_offset=0), upsert=True)
    reader = log.reader(topic, partition, log.earliest(topic, partition))
    said: dict[int, Said] = {}
    rows: list[np.ndarray] = []
    updates: Any = None
    while (batch := reader.read(max_messages=500, max_bytes=16 * 1024 * 1024)) is not None:
        for at, offset in enumerate(batch.offsets.tolist()):
            for effect in machine.step(decode(batch.values[at].as_buffer(), incarnation), offset):
                match effect:
                    case TakeRows():
                        rows.append(effect.batch.column("$offset").to_numpy())
                    case TakeUpdates():
                        updates = effect.batch
                    case EpochClosed():
                        inserts, deletes = _split(updates)
                        taken = np.concatenate([_NOTHING, *rows])
                        said[effect.epoch] = (taken, inserts, deletes, effect.line.end)
                        rows, updates = [], None
                    case Stopped():
                        raise AssertionError(f"partition {partition} stops at {offset}: {effect}")
    reader.close()
    return said


def _split(updates: Any) -> tuple[np.ndarray, np.ndarray]:
    if updates is None:
        return _NOTHING, _NOTHING
    offset, op = updates.column("$offset").to_numpy(), updates.column("op").to_numpy()
    return np.sort(offset[op == INSERT]), np.sort(offset[op == DELETE])


def differences(log: Log, topic: str, incarnation: str, ledger: UpsertLedger) -> tuple[int, list[str]]:
    """Epochs compared, and what is wrong with them."""
    parts = [said_by(log, topic, incarnation, partition) for partition in range(ledger.partitions)]
    table = Table(ledger)
    wrong: list[str] = []
    epochs = sorted(set.intersection(*(set(part) for part in parts)))
    for epoch in epochs:
        first = table.ends
        updates = table.advance([part[epoch][3] for part in parts])
        for partition, part in enumerate(parts):
            taken, inserts, deletes, end = part[epoch]
            expected = ledger.slice(partition, first[partition], end)
            kept = first[partition] + np.flatnonzero(expected.key >= 0)
            for what, found, right in (
                ("rows", taken, kept),
                ("INSERTs", inserts, updates.of(partition)[0]),
                ("DELETEs", deletes, updates.of(partition)[1]),
            ):
                if not np.array_equal(found, right):
                    more, less = np.setdiff1d(found, right), np.setdiff1d(right, found)
                    wrong.append(
                        f"epoch {epoch} partition {partition}: {what} {len(found)} instead of {len(right)}; "
                        f"too many {more[:5].tolist()}, missing {less[:5].tolist()}"
                    )
    return len(epochs), wrong
