# SPDX-License-Identifier: Apache-2.0
"""Behind the key coordinator: what its decisions mean for rows, appended as update blocks to the log of the row's
partition (the document's segment update events).

If the best candidate of a key is of this epoch: INSERT it, and DELETE the best one of an earlier epoch, if there is
one. Nothing else is written: what lost inside its own epoch is superseded by implication.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from cremant.epoch.format import to_message
from cremant.epoch.records import DELETE, INSERT
from cremant.epoch.updates import update_block
from cremant.ingest.candidates import VALUE_BYTES, epochs_of, matrix_of, places_of
from cremant.log.api import Log
from cremant.model.errors import InvariantViolation
from cremant.pipeline import worker
from cremant.pipeline.coordinator import REPORT_PREFIX
from cremant.pipeline.spec import RunSpec
from cremant.pipeline.task import giving_up_loudly

#: Updates of one block, 13 bytes each: 3.4 MB.
BLOCK_UPDATES_MAX = 256 * 1024
#: What leaves the writer: an acknowledged update block, or the report of a task (rows of `task.REPORT_SCHEMA`).
OUTCOME_DDL = "partition INT, updates BIGINT, report BINARY"
OUTCOME_SCHEMA = pa.schema(
    [pa.field("partition", pa.int32()), pa.field("updates", pa.int64()), pa.field("report", pa.binary())]
)


class Updates(NamedTuple):
    """Rows of any partition and what becomes of them; arrays of one length."""

    partition: np.ndarray
    offset: np.ndarray
    sub_row: np.ndarray
    op: np.ndarray


def decide(best: pa.ListArray, epoch: int, candidates: int) -> Updates:
    """`best`: per key its greatest candidates, greatest first. Raises InvariantViolation where all that the state
    can keep of a key are of this epoch, so that the row in force before may have been pushed out, or where one is of
    a later epoch."""
    values = matrix_of(best.flatten(), VALUE_BYTES)
    lengths = best.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    firsts = np.cumsum(lengths) - lengths
    epochs = epochs_of(values)
    if len(epochs) and int(epochs.max()) > epoch:
        raise InvariantViolation("upsert", f"the key coordinator holds a row of epoch {epochs.max()} in epoch {epoch}")
    current = epochs == epoch
    wins = current[firsts]
    before = np.full(len(lengths), -1)
    for place in range(1, int(lengths.max(initial=0))):
        open_keys = np.flatnonzero((before < 0) & (lengths > place) & wins)
        at = firsts[open_keys] + place
        older = ~current[at]
        before[open_keys[older]] = at[older]
    if bool((wins & (before < 0) & (lengths >= candidates)).any()):
        raise InvariantViolation(
            "upsert",
            f"{candidates} tasks or more brought rows of one key in epoch {epoch}, at most {candidates - 1} may",
            hint="cremant table rebuild-keys makes the key coordinator's state anew",
        )
    inserted, deleted = firsts[wins], before[before >= 0]
    places = places_of(values[np.concatenate((inserted, deleted))])
    ops = np.concatenate((np.full(len(inserted), INSERT, np.int8), np.full(len(deleted), DELETE, np.int8)))
    return Updates(places.partition, places.offset, places.sub_row, ops)


class UpdateWriter:
    """`mapInArrow` behind the coordinator; pickled into the query."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec_json = spec.to_json()

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from cremant.pipeline.source import batch_id_of_task

        spec = RunSpec.from_json(self._spec_json)
        with giving_up_loudly(spec):
            yield from write_updates(spec, spec.epoch_of(batch_id_of_task()), batches)


def write_updates(spec: RunSpec, epoch: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Appends what the coordinator's output means; answers OUTCOME_SCHEMA."""
    assert spec.candidates is not None
    log = worker.epoch_log_of(spec)
    outcomes: list[tuple[int | None, int | None, bytes | None]] = []
    for batch in batches:
        rows, reports = _apart(batch)
        outcomes += [(None, None, value[8:]) for value in reports if int.from_bytes(value[:8], "big") == epoch]
        updates = decide(rows, epoch, spec.candidates)
        outcomes += [(partition, count, None) for partition, count in _append(spec, log, epoch, updates)]
    columns = list(zip(*outcomes, strict=True)) or [()] * len(OUTCOME_SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, OUTCOME_SCHEMA, strict=True)]
    yield pa.RecordBatch.from_arrays(arrays, schema=OUTCOME_SCHEMA)


def _apart(batch: pa.RecordBatch) -> tuple[pa.ListArray, list[bytes]]:
    """The candidates of keys, and the newest reports of tasks."""
    keys, best = batch.column("key").cast(pa.binary()), batch.column("best")
    _, bounds, data = keys.buffers()
    starts = np.frombuffer(bounds, np.int32, len(keys) + 1, keys.offset * 4)[:-1]
    # A key has at least one byte.
    is_report = np.frombuffer(data, np.uint8)[starts] == REPORT_PREFIX[0]
    if not is_report.any():
        return best, []
    reports = best.filter(pa.array(is_report)).to_pylist()
    return best.filter(pa.array(~is_report)), [found[0] for found in reports]


def _append(spec: RunSpec, log: Log, epoch: int, updates: Updates) -> Iterator[tuple[int, int]]:
    """Appends one block per partition, more only if it would be large; (partition, updates) of each."""
    order = np.lexsort((updates.sub_row, updates.offset, updates.partition))
    partitions = updates.partition[order]
    cuts = [0, *(np.flatnonzero(np.diff(partitions)) + 1).tolist(), len(order)]
    for start, end in pairwise(cuts):
        for first in range(start, end, BLOCK_UPDATES_MAX):
            rows = order[first : min(first + BLOCK_UPDATES_MAX, end)]
            block = update_block(
                generation=spec.generation, epoch=epoch, offsets=updates.offset[rows], sub_rows=updates.sub_row[rows],
                ops=updates.op[rows],
            )  # fmt: skip
            partition = int(partitions[first])
            log.append(spec.epoch_topic, partition, [to_message(block, spec.incarnation)])
            yield partition, block.updates
