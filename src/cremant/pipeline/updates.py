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
from cremant.ingest.candidates import VALUE_BYTES, bytes_of, epochs_of, places_of, values_at
from cremant.log.api import Log
from cremant.model.errors import InvariantViolation
from cremant.pipeline import worker
from cremant.pipeline.coordinator import IS_REPORT
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


class Decisions(NamedTuple):
    """Per key the values of its greatest candidates, greatest first: `counts` of them from byte `starts` of `data`."""

    data: np.ndarray
    starts: np.ndarray
    counts: np.ndarray


def decide(decisions: Decisions, epoch: int, candidates: int) -> Updates:
    """What becomes of rows in `epoch`, where the state keeps so many `candidates` of a key. Raises InvariantViolation
    where all of them are of this epoch, so that the row in force before may have been pushed out, or where one is of a
    later epoch."""
    data, starts, counts = decisions
    best = values_at(data, starts)
    newest = epochs_of(best)
    if len(newest) and int(newest.max()) > epoch:
        raise InvariantViolation("upsert", f"the key coordinator holds a row of epoch {newest.max()} in epoch {epoch}")
    wins = newest == epoch
    undecided = np.flatnonzero(wins & (counts > 1))
    deleted = []
    for place in range(1, int(counts.max(initial=0))):
        undecided = undecided[counts[undecided] > place]
        values = values_at(data, starts[undecided] + place * VALUE_BYTES)
        older = epochs_of(values) != epoch
        deleted.append(values[older])
        undecided = undecided[~older]
        if place == candidates - 1 and len(undecided):
            raise InvariantViolation(
                "upsert",
                f"{candidates} tasks or more brought rows of one key in epoch {epoch}, at most {candidates - 1} may",
                hint="cremant table rebuild-keys makes the key coordinator's state anew",
            )
    inserted = best[wins]
    places = places_of(np.concatenate((inserted, *deleted)))
    ops = np.full(len(places.offset), DELETE, dtype=np.int8)
    ops[: len(inserted)] = INSERT
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
        decisions, reports = apart(batch.column(0))
        outcomes += [(None, None, value[8:]) for value in reports if int.from_bytes(value[:8], "big") == epoch]
        updates = decide(decisions, epoch, spec.candidates)
        outcomes += [(partition, count, None) for partition, count in append_updates(spec, log, epoch, updates)]
    columns = list(zip(*outcomes, strict=True)) or [()] * len(OUTCOME_SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, OUTCOME_SCHEMA, strict=True)]
    yield pa.RecordBatch.from_arrays(arrays, schema=OUTCOME_SCHEMA)


def apart(cells: pa.BinaryArray) -> tuple[Decisions, list[bytes]]:
    """What the coordinator's operator said: decisions, and reports of tasks."""
    data, bounds = bytes_of(cells)
    starts, lengths = bounds[:-1], np.diff(bounds)
    is_report = data[starts] == IS_REPORT[0]
    reports = [data[starts[row] + 1 : bounds[row + 1]].tobytes() for row in np.flatnonzero(is_report).tolist()]
    rows = np.flatnonzero(~is_report)
    if bool((lengths[rows] % VALUE_BYTES != 1).any()):
        raise InvariantViolation("upsert", f"a decision of the key coordinator is no multiple of {VALUE_BYTES} bytes")
    return Decisions(data, starts[rows] + 1, lengths[rows] // VALUE_BYTES), reports


def append_updates(spec: RunSpec, log: Log, epoch: int, updates: Updates) -> Iterator[tuple[int, int]]:
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
