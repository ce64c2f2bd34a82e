# SPDX-License-Identifier: Apache-2.0
"""The key coordinator: Spark's state store is modelled (per key the greatest candidate, one version per batch), what
goes in and comes out is real (`cremant.ingest.candidates`, `cremant.pipeline.updates.decide`)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from cremant.ingest.candidates import VALUE_BYTES, Candidates
from cremant.pipeline.updates import PAIR_BYTES, Updates, decide
from cremant.sim.upsert.options import Safeguards
from cremant.sim.upsert.table import SCHEMA, UPSERT

#: Key -> its greatest candidate. A version of it is never changed.
State = Mapping[bytes, bytes]


def candidates_of(batches: list[tuple[int, pa.RecordBatch]], epoch: int | np.ndarray) -> pa.RecordBatch:
    """What a task that read rows of these partitions hands on. `epoch`: of all rows, or of each."""
    reduced = Candidates(SCHEMA, UPSERT)
    for partition, batch in batches:
        reduced.add(batch, partition, epoch)
    return reduced.finish()


def coordinated(
    before: State, tasks: list[pa.RecordBatch], partitions: int, epoch: int, guards: Safeguards
) -> tuple[State, list[Updates]]:
    """State after a batch, and what the reduce task of each of its partitions writes."""
    state = dict(before)
    said = [b""] * partitions
    order = None if guards.order_total else _by_arrival
    for task in tasks:
        for key, candidate in zip(task.column("key").to_pylist(), task.column("candidate").to_pylist(), strict=True):
            known = state.get(key)
            if known is None or (known != candidate and max(known, candidate, key=order) == candidate):
                state[key] = candidate
                said[sum(key) % partitions] += candidate[-VALUE_BYTES:] + (known or bytes(VALUE_BYTES))[-VALUE_BYTES:]
    return state, [decide(np.frombuffer(pairs, np.uint8).reshape(-1, PAIR_BYTES), epoch) for pairs in said]


def _by_arrival(candidate: bytes) -> bytes:
    return candidate[-8:] + candidate[-VALUE_BYTES:]
