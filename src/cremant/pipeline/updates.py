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

import msgspec
import numpy as np
import pyarrow as pa

from cremant.epoch.format import to_message
from cremant.epoch.records import DELETE, INSERT
from cremant.epoch.updates import update_block
from cremant.ingest.candidates import VALUE_BYTES, bytes_of, epochs_of, places_of
from cremant.ingest.packs import CANDIDATES, REPORT, STATE
from cremant.log.api import Log
from cremant.model.errors import InvariantViolation
from cremant.pipeline import worker
from cremant.pipeline.reports import TaskReport
from cremant.pipeline.spec import RunSpec
from cremant.pipeline.task import giving_up_loudly

#: Updates of one block, 13 bytes each: 3.4 MB.
BLOCK_UPDATES_MAX = 256 * 1024
#: What leaves the writer: reports (`reports.TaskReport`), those that came with the decisions and its own.
OUTCOME_DDL = "report BINARY"
OUTCOME_SCHEMA = pa.schema([pa.field("report", pa.binary())])
#: A decision: values of the candidate that is the greatest now, and of the one before it.
PAIR_BYTES = 2 * VALUE_BYTES


class Updates(NamedTuple):
    """Rows of any partition and what becomes of them; arrays of one length."""

    partition: np.ndarray
    offset: np.ndarray
    sub_row: np.ndarray
    op: np.ndarray


def decide(pairs: np.ndarray, epoch: int) -> Updates:
    """What becomes of rows in `epoch`. `pairs`: per candidate that became the greatest of its key its value and that of
    the one before (zeros: none), PAIR_BYTES. Raises InvariantViolation where one is of a later epoch.

    A key whose candidates came from several tasks has several pairs. A row that is the best of one and the one before
    of another came and went inside this epoch: nothing is written for it."""
    newest = epochs_of(pairs[:, :VALUE_BYTES])
    if len(newest) and int(newest.max()) > epoch:
        raise InvariantViolation("upsert", f"the key coordinator holds a row of epoch {newest.max()} in epoch {epoch}")
    pairs = pairs[newest == epoch]
    before = pairs[:, VALUE_BYTES:]
    before = before[epochs_of(before) > 0]
    places = places_of(np.concatenate((pairs[:, :VALUE_BYTES], before)))
    ops = np.full(len(places.offset), DELETE, dtype=np.int8)
    ops[: len(pairs)] = INSERT
    order = np.lexsort((places.sub_row, places.offset, places.partition))
    found = Updates(places.partition[order], places.offset[order], places.sub_row[order], ops[order])
    again = np.ones(max(0, len(order) - 1), dtype=bool)
    for column in found[:3]:
        again &= column[1:] == column[:-1]
    twice = np.append(again, False) | np.append(False, again)
    return Updates(*(column[~twice] for column in found)) if twice.any() else found


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
    """Appends what the coordinator's output means; answers OUTCOME_SCHEMA. Keeps PAIR_BYTES per row of this epoch until
    all is there, because what comes and goes inside the epoch may be in different batches."""
    pairs: list[np.ndarray] = []
    reports: list[bytes] = []
    for batch in batches:
        decisions, told = apart(batch.column(0))
        pairs.append(decisions[epochs_of(decisions[:, :VALUE_BYTES]) >= epoch])  # of a seed's rows most are older
        reports += told
    updates = decide(np.concatenate(pairs), epoch) if pairs else None
    if updates is not None and len(updates.offset):
        acks = list(append_updates(spec, worker.epoch_log_of(spec), epoch, updates))
        reports.append(msgspec.json.encode(TaskReport(updates=acks)))
    yield pa.RecordBatch.from_arrays([pa.array(reports, pa.binary())], schema=OUTCOME_SCHEMA)


def apart(cells: pa.BinaryArray) -> tuple[np.ndarray, list[bytes]]:
    """What the coordinator's operator said: decisions, a row of PAIR_BYTES each, and reports."""
    data, bounds = bytes_of(cells)
    pairs, reports = [np.empty((0, PAIR_BYTES), dtype=np.uint8)], []
    for start, end in pairwise(bounds.tolist()):
        kind, rest = int(data[start]), data[start + 1 : end]
        if kind == REPORT:
            reports.append(rest.tobytes())
        elif kind == STATE:
            keys, size = rest.view(">i8").tolist()
            reports.append(msgspec.json.encode(TaskReport(keys=keys, state_bytes=size)))
        elif kind == CANDIDATES and len(rest) % PAIR_BYTES == 0:
            pairs.append(rest.reshape(-1, PAIR_BYTES))
        else:
            raise InvariantViolation("upsert", f"the key coordinator said {len(rest)} bytes of kind {kind}")
    return np.concatenate(pairs), reports


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
