# SPDX-License-Identifier: Apache-2.0
"""The key coordinator: Spark's state store is modelled (per key the k greatest candidates, one version per batch), what
goes in and comes out is real (`cremant.ingest.candidates`, `cremant.pipeline.updates.decide`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from cremant.ingest.candidates import VALUE_BYTES, Candidates
from cremant.pipeline.updates import Decisions, Updates, decide
from cremant.sim.upsert.options import Safeguards
from cremant.sim.upsert.table import SCHEMA, UPSERT

#: Key -> its greatest candidates, greatest first. A version of it is never changed.
State = Mapping[bytes, tuple[bytes, ...]]


def candidates_of(batches: list[tuple[int, pa.RecordBatch]], epoch: int | np.ndarray) -> pa.RecordBatch:
    """What a task that read rows of these partitions hands on. `epoch`: of all rows, or of each."""
    reduced = Candidates(SCHEMA, UPSERT)
    for partition, batch in batches:
        reduced.add(batch, partition, epoch)
    return reduced.finish()


def merged(before: State, tasks: list[pa.RecordBatch], kept: int, guards: Safeguards) -> tuple[State, list[bytes]]:
    """State after a batch, and the keys that it touched. `kept`: k."""
    state = dict(before)
    touched: dict[bytes, None] = {}
    order = None if guards.order_total else _by_arrival
    for task in tasks:
        for key, candidate in zip(task.column("key").to_pylist(), task.column("candidate").to_pylist(), strict=True):
            found = sorted((*state.get(key, ()), candidate), key=order, reverse=True)
            state[key] = tuple(found[:kept])
            touched[key] = None
    return state, list(touched)


def _by_arrival(candidate: bytes) -> bytes:
    return candidate[-8:] + candidate[-VALUE_BYTES:]


def decided(
    state: State, touched: list[bytes], partitions: int, epoch: int, kept: int, guards: Safeguards
) -> Iterator[Updates]:
    """What each reduce task writes."""
    for number in range(partitions):
        best = [state[key] for key in touched if sum(key) % partitions == number]
        counts = np.array([len(candidates) for candidates in best], np.int64)
        values = b"".join(candidate[-VALUE_BYTES:] for candidates in best for candidate in candidates)
        starts = (np.cumsum(counts) - counts) * VALUE_BYTES
        decisions = Decisions(np.frombuffer(values, np.uint8), starts, counts)
        yield decide(decisions, epoch, kept if guards.candidates_checked else 1 << 30)
