# SPDX-License-Identifier: Apache-2.0
"""A query over rows in memory, from text to the JSON values of the answer: planned, run on one or two servers, reduced,
encoded."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa

from cremant.broker.encode import encode_rows
from cremant.exec.engine import Engine
from cremant.model.names import IS_NULL_PREFIX
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.segment.layout import scan_schema
from cremant.segment.scan import Piece
from cremant.sql.binder import TableInfo
from cremant.sql.plan import Plan
from cremant.sql.planner import Planner

NOW_MS = 1_700_000_000_000
Row = dict[str, Any]


def schema_of(name: str, columns: dict[str, str]) -> Schema:
    """`columns`: Pinot's types by name; a type with `[]` is multi-value."""
    fields = tuple(
        FieldSpec(
            name=column, data_type=DataType(kind.removesuffix("[]")), field_type=FieldType.DIMENSION,
            single_value=not kind.endswith("[]"),
        )
        for column, kind in columns.items()
    )  # fmt: skip
    return Schema(name=name, fields=fields)


class Sql:
    """Asks queries of one table. A missing cell (None) is stored as its default, and as null."""

    def __init__(self, engine: Engine, schema: Schema, rows: Sequence[Row], *, servers: int = 1) -> None:
        self._engine = engine
        self.schema = schema
        self._scan = scan_schema(schema, null_handling=True)
        self._table = TableInfo(schema.name, schema, stores_nulls=True)
        self._servers = [[self._piece(rows[start::servers], start)] for start in range(servers)]

    def _piece(self, rows: Sequence[Row], number: int) -> Piece:
        batch = self._batch(rows)
        batches = (batch,) if batch.num_rows else ()
        return Piece(f"p{number}", number, f"segment_{number}", batches, batch.num_rows, None, True)

    def _batch(self, rows: Sequence[Row]) -> pa.RecordBatch:
        arrays = []
        for field in self._scan:
            values = [self._cell(field.name, row, index) for index, row in enumerate(rows)]
            plain = pa.string() if pa.types.is_string_view(field.type) else field.type
            plain = pa.binary() if pa.types.is_binary_view(field.type) else plain
            arrays.append(pa.array(values, plain).cast(field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self._scan)

    def _cell(self, name: str, row: Row, index: int) -> Any:
        if name.startswith(IS_NULL_PREFIX):
            return row.get(name.removeprefix(IS_NULL_PREFIX)) is None
        spec = self.schema.field(name)
        if spec is None:
            return {"$offset": index, "$subRow": 0, "$ingestionTime": NOW_MS}[name]
        value = row.get(name)
        if value is None:
            return spec.default if spec.single_value else [spec.default]
        return str(value) if isinstance(value, Decimal) else value

    def plan(self, sql: str) -> Plan:
        return Planner().plan(sql, "", lambda name: self._table, NOW_MS)

    def rows(self, sql: str) -> list[list[Any]]:
        """The answer's rows as clients see them."""
        plan = self.plan(sql)
        if plan.literals:
            return [list(plan.literals)]
        deadline_s = time.monotonic() + 30
        if plan.table is None:
            assert plan.reduce_sql is not None
            table = self._engine.reduce(plan.reduce_sql, [pa.table({"one": [1]})], deadline_s=deadline_s)
        else:
            table = self._run(plan, deadline_s)
        answer: list[list[Any]] = json.loads(msgspec.json.encode(encode_rows(table, plan.result)))
        return answer

    def _run(self, plan: Plan, deadline_s: float) -> pa.Table:
        partials = [
            self._engine.run(
                plan.server_sql, pieces, plan.columns, self._scan, deadline_s=deadline_s,
                constants={"$hostName": f"host_{index}"},
            ).table
            for index, pieces in enumerate(self._servers)
        ]  # fmt: skip
        if plan.reduce_sql is None:
            return pa.concat_tables(partials).slice(plan.offset, plan.limit)
        table = self._engine.reduce(plan.reduce_sql, partials, deadline_s=deadline_s)
        return table if plan.paged else table.slice(plan.offset, plan.limit)

    def value(self, expression: str, where: str = "") -> Any:
        """The expression over the first row."""
        return self.rows(f"SELECT {expression} FROM {self.schema.name} {where} LIMIT 1")[0][0]

    def count(self, where: str) -> int:
        return int(self.rows(f"SELECT COUNT(*) FROM {self.schema.name} WHERE {where}")[0][0])
