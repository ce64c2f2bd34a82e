# SPDX-License-Identifier: Apache-2.0
"""The table of the world of upsert: what its messages become, and which row of a key is in force, in the shortest form.

The stream is not keyed: rows of a key are in any partition, late, with equal comparison values, deleted and revived.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from cremant.epoch.records import DELETE, INSERT
from cremant.model.cluster import TableRecord
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.model.table import FlushConfig, StreamConfig, TableConfig
from cremant.model.upsert import UpsertConfig
from cremant.pipeline.plan import SeedPlan
from cremant.sim import stream

_DIMENSION = FieldType.DIMENSION
SCHEMA = Schema(
    name="sim",
    fields=(
        FieldSpec(name="value", data_type=DataType.LONG, field_type=FieldType.METRIC),
        FieldSpec(name="key", data_type=DataType.LONG, field_type=_DIMENSION),
        FieldSpec(name="ts", data_type=DataType.LONG, field_type=_DIMENSION),
        FieldSpec(name="deleted", data_type=DataType.BOOLEAN, field_type=_DIMENSION),
    ),
    primary_key_columns=("key",),
)
UPSERT = UpsertConfig(comparison_columns=("ts",), delete_column="deleted")
RECORD = TableRecord(
    config=TableConfig(
        name="sim", time_column="ts", replication=1, stream=StreamConfig(stream_type="embedded", topic="sim"),
        flush=FlushConfig(), upsert=UPSERT,
    ),
    table_schema=SCHEMA, incarnation="",
)  # fmt: skip

#: (offset, sub-row, op).
Update = tuple[int, int, int]


@lru_cache(maxsize=8192)
def rows(partition: int, first: int, end: int, config: int, keys: int, spread: int) -> pa.RecordBatch:
    """As in the world of epochs, with a key, a comparison value and a delete flag that depend on the message alone."""
    plain = stream.rows(partition, first, end, config)
    offset, sub_row = plain.column("$offset").to_numpy(), plain.column("$subRow").to_numpy()
    noise = _noise(partition, offset, sub_row)
    keyed = _keyed(noise, offset, keys, spread)
    return pa.RecordBatch.from_arrays(
        [*plain.columns, *(pa.array(one) for one in keyed.values())], names=[*plain.schema.names, *keyed]
    )


def rows_at(partition: int, offset: np.ndarray, sub_row: np.ndarray, keys: int, spread: int) -> pa.RecordBatch:
    """What whoever reads rows from the table finds: where they are, keys, comparison values, delete flags."""
    noise = _noise(partition, offset, sub_row)
    columns = {"$offset": offset, "$subRow": sub_row.astype(np.int32), **_keyed(noise, offset, keys, spread)}
    return pa.RecordBatch.from_pydict({name: pa.array(column) for name, column in columns.items()})


def _keyed(noise: np.ndarray, offset: np.ndarray, keys: int, spread: int) -> dict[str, np.ndarray]:
    late = offset // 2 - noise // 7 % spread
    return {"key": noise % keys, "ts": late, "deleted": noise // 11 % 6 == 0}


def _noise(partition: int, offset: np.ndarray, sub_row: np.ndarray) -> np.ndarray:
    mixed: np.ndarray = (offset * 2_654_435_761 + sub_row.astype(np.int64) * 40_503 + partition * 97_003) % 1_000_003
    return mixed


class Row(NamedTuple):
    """Ordered as rows of a key are."""

    ts: int
    partition: int
    offset: int
    sub_row: int
    deleted: bool


def _is_expired(row: Row, expiry: SeedPlan) -> bool:
    live, dead = expiry.expired_below, expiry.deleted_below
    return (live is not None and row.ts < live) or (row.deleted and dead is not None and row.ts < dead)


class Table:
    """What is in force after each closed epoch: the oracle."""

    def __init__(self) -> None:
        self.winners: dict[int, Row] = {}
        self._at: dict[int, dict[int, Row]] = {0: {}}
        #: Epoch -> partition -> what it does to rows.
        self.updates: dict[int, dict[int, set[Update]]] = {}
        #: Epoch -> (partition, offset, sub-row) of what a query shows.
        self.visible: dict[int, frozenset[tuple[int, int, int]]] = {0: frozenset()}
        #: The same with tombstones.
        self.in_force: dict[int, frozenset[tuple[int, int, int]]] = {0: frozenset()}

    def close(self, epoch: int, batches: list[tuple[int, pa.RecordBatch]], expiry: SeedPlan | None) -> None:
        """`batches`: the rows of the epoch with their partition. `expiry`: of a seed, which has none."""
        if expiry is not None:
            self._expire(epoch, expiry)
            return
        new: dict[int, Row] = {}
        for partition, batch in batches:
            columns = [batch.column(name).to_pylist() for name in ("key", "ts", "$offset", "$subRow", "deleted")]
            for key, ts, offset, sub_row, deleted in zip(*columns, strict=True):
                row = Row(ts, partition, offset, sub_row, deleted)
                best = new.get(key, self.winners.get(key))
                if best is None or row > best:
                    new[key] = row
        updates: dict[int, set[Update]] = {}
        for key, row in new.items():
            updates.setdefault(row.partition, set()).add((row.offset, row.sub_row, INSERT))
            was = self.winners.get(key)
            if was is not None:
                updates.setdefault(was.partition, set()).add((was.offset, was.sub_row, DELETE))
        self._closed(epoch, self.winners | new, updates)

    def _expire(self, epoch: int, expiry: SeedPlan) -> None:
        gone = {key: row for key, row in self.winners.items() if _is_expired(row, expiry)}
        updates: dict[int, set[Update]] = {}
        for row in gone.values():
            updates.setdefault(row.partition, set()).add((row.offset, row.sub_row, DELETE))
        self._closed(epoch, {key: row for key, row in self.winners.items() if key not in gone}, updates)

    def _closed(self, epoch: int, winners: dict[int, Row], updates: dict[int, set[Update]]) -> None:
        self.winners = self._at[epoch] = winners
        self.updates[epoch] = updates
        force = self.winners.values()
        self.in_force[epoch] = frozenset(row[1:4] for row in force)
        self.visible[epoch] = frozenset(row[1:4] for row in force if not row.deleted)

    def newest(self, epoch: int) -> int | None:
        """Greatest comparison value of the rows in force at an epoch."""
        return max((row.ts for row in self._at[epoch].values()), default=None)

    def take_back(self, epoch: int) -> None:
        """What later epochs did is still known: whoever reads the log comes by."""
        self.winners = self._at[epoch]
