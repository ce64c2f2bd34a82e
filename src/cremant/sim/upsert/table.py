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
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.model.upsert import UpsertConfig
from cremant.sim import stream
from cremant.sim.upsert.options import Options

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

#: (offset, sub-row, op).
Update = tuple[int, int, int]


@lru_cache(maxsize=8192)
def rows(partition: int, first: int, end: int, config: int, keys: int, spread: int) -> pa.RecordBatch:
    """As in the world of epochs, with a key, a comparison value and a delete flag that depend on the message alone."""
    plain = stream.rows(partition, first, end, config)
    offset, sub_row = plain.column("$offset").to_numpy(), plain.column("$subRow").to_numpy()
    noise = _noise(partition, offset, sub_row)
    arrays = [*plain.columns, noise % keys, _time(noise, offset, spread), noise // 11 % 6 == 0]
    return pa.RecordBatch.from_arrays(
        [pa.array(one) for one in arrays], names=[*plain.schema.names, "key", "ts", "deleted"]
    )


def keys_and_times(
    partition: int, offset: np.ndarray, sub_row: np.ndarray, options: Options
) -> tuple[np.ndarray, np.ndarray]:
    """Key and comparison value of rows, as whoever reads them from the table finds them."""
    noise = _noise(partition, offset, sub_row)
    return noise % options.keys, _time(noise, offset, options.spread)


def _noise(partition: int, offset: np.ndarray, sub_row: np.ndarray) -> np.ndarray:
    mixed: np.ndarray = (offset * 2_654_435_761 + sub_row.astype(np.int64) * 40_503 + partition * 97_003) % 1_000_003
    return mixed


def _time(noise: np.ndarray, offset: np.ndarray, spread: int) -> np.ndarray:
    late: np.ndarray = offset // 2 - noise // 7 % spread
    return late


class Row(NamedTuple):
    """Ordered as rows of a key are."""

    ts: int
    partition: int
    offset: int
    sub_row: int
    deleted: bool


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

    def close(self, epoch: int, batches: list[tuple[int, pa.RecordBatch]]) -> None:
        """`batches`: the rows of the epoch with their partition."""
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
        self.winners = self._at[epoch] = self.winners | new
        self.updates[epoch] = updates
        force = self.winners.values()
        self.in_force[epoch] = frozenset(row[1:4] for row in force)
        self.visible[epoch] = frozenset(row[1:4] for row in force if not row.deleted)

    def take_back(self, epoch: int) -> None:
        """What later epochs did is still known: whoever reads the log comes by."""
        self.winners = self._at[epoch]
