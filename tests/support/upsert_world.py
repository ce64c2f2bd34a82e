# SPDX-License-Identifier: Apache-2.0
"""An upsert table in one process, of production parts and nothing between them: candidates of tasks, the coordinator's
decision, versions of partitions, masks at a cut, planner, engine, reduction.

What Spark does between them (the greatest candidate per key) is a dictionary here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from cremant.broker.encode import encode_rows
from cremant.exec.engine import Engine
from cremant.ingest.candidates import VALUE_BYTES, Candidates
from cremant.model.names import IS_NULL_PREFIX, OFFSET, SUB_ROW, VALID_FROM, VALID_UNTIL
from cremant.model.schema import Schema
from cremant.model.upsert import UPDATE_SCHEMA, Cut, UpsertConfig, Visibility
from cremant.pipeline.updates import PAIR_BYTES, decide
from cremant.segment.layout import scan_form, stored_columns
from cremant.segment.scan import Piece
from cremant.segment.tail_versions import PartitionVersions
from cremant.sql.binder import TableInfo
from cremant.sql.planner import Planner, flag

Row = dict[str, Any]


class UpsertWorld:
    """Rows of a table with null handling, one server per partition. `close` makes an epoch of what was produced."""

    def __init__(self, engine: Engine, schema: Schema, upsert: UpsertConfig, *, partitions: int = 2) -> None:
        self._engine = engine
        self._schema = schema
        self._upsert = upsert
        self._stored = stored_columns(schema, null_handling=True)
        self._best: dict[bytes, bytes] = {}
        self._waiting: list[list[Row]] = [[] for _ in range(partitions)]
        self._ends = [0] * partitions
        self._batches: list[list[pa.RecordBatch]] = [[] for _ in range(partitions)]
        self.versions = [PartitionVersions(0, 0, upsert.delete_column) for _ in range(partitions)]
        self.epoch = 0

    def produce(self, row: Row, *, partition: int = 0) -> None:
        self._waiting[partition].append(row)

    def close(self, epoch: int | None = None) -> int:
        """Everything that waits, as one epoch with one task per partition."""
        self.epoch = self.epoch + 1 if epoch is None else epoch
        said = b""
        for partition, rows in enumerate(self._waiting):
            batch = self._batch(rows, self._ends[partition])
            self._ends[partition] += len(rows)
            rows.clear()
            if batch.num_rows:
                self._batches[partition].append(batch)
                self.versions[partition].take(self._scan(batch), self.epoch)
                said += self._decisions(batch, partition)
        updates = decide(np.frombuffer(said, np.uint8).reshape(-1, PAIR_BYTES), self.epoch)
        for partition, versions in enumerate(self.versions):
            mine = updates.partition == partition
            rows = sorted(
                zip(
                    updates.offset[mine].tolist(),
                    updates.sub_row[mine].tolist(),
                    updates.op[mine].tolist(),
                    strict=True,
                )
            )
            columns = list(zip(*rows, strict=True)) or [()] * len(UPDATE_SCHEMA)
            arrays = [pa.array(column, field.type) for column, field in zip(columns, UPDATE_SCHEMA, strict=True)]
            versions.apply(self.epoch, pa.RecordBatch.from_arrays(arrays, schema=UPDATE_SCHEMA))
            versions.closed(self.epoch)
        return self.epoch

    def _decisions(self, batch: pa.RecordBatch, partition: int) -> bytes:
        task = Candidates(self._schema, self._upsert)
        task.add(batch, partition, self.epoch)
        said = b""
        for row in task.finish().to_pylist():
            before = self._best.get(row["key"], b"")
            if row["candidate"] > before:
                self._best[row["key"]] = row["candidate"]
                said += row["candidate"][-VALUE_BYTES:] + (before[-VALUE_BYTES:] or bytes(VALUE_BYTES))
        return said

    def _batch(self, rows: Sequence[Row], first: int) -> pa.RecordBatch:
        arrays = []
        for field in self._stored:
            spec = self._schema.field(field.name)
            if field.name == OFFSET:
                values: list[Any] = list(range(first, first + len(rows)))
            elif field.name == SUB_ROW:
                values = [0] * len(rows)
            elif field.name.startswith(IS_NULL_PREFIX):
                values = [row.get(field.name.removeprefix(IS_NULL_PREFIX)) is None for row in rows]
            elif spec is not None:
                values = [spec.default if row.get(field.name) is None else row[field.name] for row in rows]
            else:
                values = [None] * len(rows)
            arrays.append(pa.array(values, field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self._stored)

    def _scan(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        schema = scan_form(self._stored)
        columns = [column.cast(field.type) for column, field in zip(batch.columns, schema, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    # --- queries ---

    def rows(self, sql: str, *, at: int | None = None, without: int | None = None) -> list[list[Any]]:
        """The answer's rows as clients see them, at epoch `at` (the newest). `without`: the partition of a server that
        has not got that far: its replica here has no rows."""
        info = TableInfo(self._schema.name, self._schema, stores_nulls=True, upsert=True)
        plan = Planner().plan(sql, "", lambda name: info, 0)
        visibility = Visibility.IN_FORCE if flag(plan.options, "skipupsertdelete") else Visibility.VISIBLE
        visibility = Visibility.ALL if flag(plan.options, "skipupsert") else visibility
        cut = Cut(epoch=self.epoch if at is None else at, visibility=visibility)
        deadline_s = time.monotonic() + 30
        partials = []
        for partition in range(len(self.versions)):
            pieces = () if partition == without else (self._piece(partition, cut),)
            found = self._engine.run(
                plan.server_sql, pieces, plan.columns, scan_form(self._stored), deadline_s=deadline_s,
                constants={"$hostName": f"host_{partition}"},
            )  # fmt: skip
            partials.append(found.table)
        if plan.reduce_sql is None:
            table = pa.concat_tables(partials).slice(plan.offset, plan.limit)
        else:
            table = self._engine.reduce(plan.reduce_sql, partials, deadline_s=deadline_s)
        answer: list[list[Any]] = json.loads(msgspec.json.encode(encode_rows(table, plan.result)))
        return answer

    def _piece(self, partition: int, cut: Cut) -> Piece:
        batches = tuple(self._scan(batch) for batch in self._batches[partition])
        lengths = [batch.num_rows for batch in batches]
        versions = self.versions[partition].tail
        masks = versions.masks(cut, lengths)
        starts = [sum(lengths[:number]) for number in range(len(lengths))]
        since, until = versions.epochs_of(cut)

        def part(column: Any) -> Any:
            return lambda number: pa.array(column[starts[number] : starts[number] + lengths[number]])

        return Piece(
            f"p{partition}", partition, f"tail_{partition}", batches, sum(lengths), masks, False,
            made={VALID_FROM: part(since), VALID_UNTIL: part(until)},
        )  # fmt: skip
