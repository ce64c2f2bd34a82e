# SPDX-License-Identifier: Apache-2.0
"""The key coordinator: Spark's state store is modelled (per key the k greatest candidates, one version per batch), what
goes in and comes out is real (`cremant.ingest.candidates`, `cremant.pipeline.updates.decide`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa

from cremant.ingest.candidates import Candidates
from cremant.pipeline.updates import Updates, decide
from cremant.sim.upsert.options import Safeguards
from cremant.sim.upsert.table import SCHEMA, UPSERT

#: Key -> (rank, value) of its greatest candidates, greatest first. A version of it is never changed.
State = Mapping[bytes, tuple[tuple[bytes, bytes], ...]]
_BEST = pa.list_(pa.binary())


def candidates_of(batches: list[tuple[int, pa.RecordBatch]], epoch: object) -> pa.RecordBatch:
    """What a task that read rows of these partitions hands on. `epoch`: of all rows, or of each."""
    reduced = Candidates(SCHEMA, UPSERT)
    for partition, batch in batches:
        reduced.add(batch, partition, epoch)  # type: ignore[arg-type]
    return reduced.finish()


def merged(before: State, tasks: list[pa.RecordBatch], kept: int, guards: Safeguards) -> tuple[State, list[bytes]]:
    """State after a batch, and the keys that it touched. `kept`: k."""
    state = dict(before)
    touched: dict[bytes, None] = {}
    for task in tasks:
        for key, rank, value in zip(*(column.to_pylist() for column in task.columns), strict=True):
            found = (*state.get(key, ()), (rank if guards.order_total else value[-8:] + value, value))
            state[key] = tuple(sorted(found, reverse=True)[:kept])
            touched[key] = None
    return state, list(touched)


def decided(
    state: State, touched: list[bytes], partitions: int, epoch: int, kept: int, guards: Safeguards
) -> Iterator[Updates]:
    """What each reduce task writes."""
    limit = kept if guards.candidates_checked else 1 << 30
    for number in range(partitions):
        mine = [key for key in touched if sum(key) % partitions == number]
        best = [[value for _, value in state[key]] for key in mine]
        yield decide(pa.array(best, _BEST), epoch, limit)
