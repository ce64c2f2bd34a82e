# SPDX-License-Identifier: Apache-2.0
"""Thousands of generated queries over generated tables, DuckDB as the other opinion: equal answers or a clean error.

    JSON messages -> ingest -> sealed segments with random indexes, and tails, on three servers
                  -> pruning, shortcuts, server SQL each -> reduce SQL   ==   DuckDB over the same rows

Each test is one table and `QUERIES_PER_TABLE` queries, with null handling off or on. A failure prints seed, query and
both answers; `CREMANT_FUZZ_TABLES=2000` runs more tables than CI does, `CREMANT_FUZZ_FIRST` starts elsewhere.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import duckdb
import numpy as np
import pyarrow as pa
import pytest
import sqlfuzz
from ingest_kit import config_of
from msgspec import structs

from cremant.exec import shortcuts
from cremant.exec.engine import Engine
from cremant.exec.keys import KeySpace
from cremant.exec.shortcuts import Task
from cremant.exec.stop import Stop
from cremant.ingest.plan import compile_ingest
from cremant.log.api import MessageBatch, RowMetadata, TimestampType
from cremant.model.cluster import TableRecord
from cremant.model.errors import QueryError
from cremant.model.offsets import Position
from cremant.model.query_codes import QueryCode
from cremant.model.schema import Schema
from cremant.model.schema_json import parse_schema
from cremant.model.segments import SegmentMetadata, SegmentStatus
from cremant.model.table import (
    ColumnPartitioning,
    FlushConfig,
    IndexConfig,
    PartitionFunction,
    StreamConfig,
    TableConfig,
)
from cremant.segment import build
from cremant.segment.build import SegmentSpec, build_segment
from cremant.segment.partitions import PartitionPruner
from cremant.segment.reader import derive
from cremant.segment.tail import SpillQuota
from cremant.server.catching_up import EndedBy
from cremant.server.partition import Partition, PartitionId
from cremant.server.scan import plan_scan
from cremant.server.table import HostedTable
from cremant.sql.binder import TableInfo
from cremant.sql.plan import Plan
from cremant.sql.planner import Planner
from cremant.wire.messages import ServerQuery, TailRequest

TABLES = int(os.environ.get("CREMANT_FUZZ_TABLES", "60"))
FIRST = int(os.environ.get("CREMANT_FUZZ_FIRST", "0"))
QUERIES_PER_TABLE = 50
#: Errors that say what is wrong with a query. Anything else is ours to mend.
CLEAN = {QueryCode.SQL_PARSING, QueryCode.QUERY_VALIDATION, QueryCode.UNKNOWN_COLUMN}
NOW_MS = 1_700_000_000_000
YEAR_MS = 365 * sqlfuzz.DAY_MS


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(threads=2, memory_bytes=512 * 1024 * 1024)
    yield engine
    engine.close()


def make_schema() -> Schema:
    dimensions, metrics = [], []
    for name, kind, multi, metric in sqlfuzz.COLUMNS:
        field = {"name": name, "dataType": kind, "singleValueField": not multi}
        (metrics if metric else dimensions).append(field)
    time_field = {"name": "ts", "dataType": "LONG", "format": "1:MILLISECONDS:EPOCH", "granularity": "1:MILLISECONDS"}
    document = {
        "schemaName": "events", "dimensionFieldSpecs": dimensions, "metricFieldSpecs": metrics,
        "dateTimeFieldSpecs": [time_field],
    }  # fmt: skip
    return parse_schema(document)[0]


SCHEMA = make_schema()
PLANNER = Planner()
INCARNATION = "00000000000000aa"
CONFIG = TableConfig(
    name="events", time_column="ts", replication=1, stream=StreamConfig(stream_type="embedded", topic="s"),
    flush=FlushConfig(), null_handling=True,
)  # fmt: skip


def make_value(dice: random.Random, kind: str, name: str) -> Any:
    match kind:
        case "INT":
            return dice.choice(sqlfuzz.INTS) if name == "i" else dice.randrange(-3, 9)
        case "LONG":
            return dice.choice(sqlfuzz.LONGS)
        case "DOUBLE":
            return dice.choice(sqlfuzz.EXTREMES) if name == "x" else dice.randrange(-40, 400) / 4
        case "BOOLEAN":
            return dice.random() < 0.5
        case "FLOAT":
            return dice.choice(sqlfuzz.FLOATS)
        case "BIG_DECIMAL":
            return dice.choice(sqlfuzz.DECIMALS)
        case "BYTES":
            return dice.choice(sqlfuzz.BYTES)
        case "JSON":
            return sqlfuzz.json_of(dice)
        case "TIMESTAMP":
            return NOW_MS + dice.randrange(-3 * YEAR_MS, 3 * YEAR_MS)
        case _:
            return dice.choice(sqlfuzz.WORDS)


def make_rows(dice: random.Random, count: int) -> list[dict[str, Any]]:
    """What producers send; every fifth single value is missing or null."""
    rows = []
    for _ in range(count):
        row: dict[str, Any] = {"ts": NOW_MS}
        for name, kind, multi, _ in sqlfuzz.COLUMNS:
            if multi:
                row[name] = [make_value(dice, kind, name) for _ in range(dice.randrange(1, 4))]
            elif dice.random() > 0.2:
                row[name] = make_value(dice, kind, name)
            elif dice.random() < 0.5:
                row[name] = None
        rows.append(row)
    return rows


def ingested(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    count = len(rows)
    messages = MessageBatch(
        offsets=np.arange(count, dtype=np.int64), next_offset=count,
        metadata=RowMetadata(
            timestamps_ms=np.full(count, NOW_MS, dtype=np.int64), timestamp_type=TimestampType.LOG_APPEND
        ),
        values=pa.array([json.dumps(row).encode() for row in rows], pa.binary()),
    )  # fmt: skip
    result = compile_ingest(SCHEMA, config_of(nulls=True)).run(messages)
    assert not result.rejected
    return result.batch


class Server:
    """One partition of the table: some of its rows in sealed segments, the others in the tail."""

    def __init__(self, number: int, batch: pa.RecordBatch, dice: random.Random, root: Path) -> None:
        columns = [name for name, _, multi, _ in sqlfuzz.COLUMNS if not multi]
        some = [tuple(dice.sample(columns, 3)) for _ in range(3)]
        indexes = IndexConfig(inverted=some[0], range=some[1], bloom=some[2])
        partitions = dice.choice([1, 3, 1_000])
        partitioning = {
            name: ColumnPartitioning(function=dice.choice(_functions_of(kind)), partitions=partitions)
            for name, kind, _, _ in sqlfuzz.COLUMNS
        }
        config = structs.replace(
            CONFIG, indexes=indexes, sorted_column=dice.choice([None, *columns]), partitioning=partitioning
        )
        record = TableRecord(config=config, table_schema=SCHEMA, incarnation=INCARNATION)
        self.table = HostedTable(record)
        self.number = number
        self.segments: list[str] = []
        cuts = sorted(dice.randrange(batch.num_rows + 1) for _ in range(dice.randrange(3)))
        ends = [*cuts, batch.num_rows]
        base = batch.column(0)[0].as_py() if batch.num_rows else 0
        for first, end in zip([0, *cuts], cuts, strict=False):
            if end > first:
                self._seal(batch.slice(first, end - first), base + first, base + end, root)
        self.tail_from = base + (cuts[-1] if cuts else 0)
        partition = Partition(
            PartitionId("events", INCARNATION, number), position(self.tail_from), root / f"tail-{number}", SpillQuota()
        )
        rest = batch.slice(cuts[-1] if cuts else 0)
        if rest.num_rows:
            partition.tail.append(rest, base + ends[-1])
        partition.catching_up.ended_by = EndedBy.END
        self.table.partitions[number] = partition

    def _seal(self, rows: pa.RecordBatch, first: int, end: int, root: Path) -> None:
        config, sequence = self.table.record.config, len(self.segments)
        name = f"events__{self.number}__{sequence}__x"
        directory = root / name
        spec = SegmentSpec(SCHEMA, "ts", config.sorted_column, config.partitioning)
        built = build_segment(directory, [rows], spec, fsync=False)
        metadata = SegmentMetadata(
            name=name, partition=self.number, sequence=sequence, status=SegmentStatus.DONE, start_offset=first,
            start=position(first), created_ms=0, replicas=("me",), end_offset=end, end=position(end),
            rows=rows.num_rows, checksum=built.checksum, columns=built.columns,
            partitioning=built.partitioning,
        )  # fmt: skip
        sealed = derive(directory, name, built.checksum, fsync=False, indexes=config.indexes)
        self.table.install(metadata, sealed, verified=True)
        self.segments.append(name)

    def answer(self, plan: Plan, engine: Engine, space: KeySpace, deadline_s: float) -> pa.Table:
        """As broker and server do it: prune by partition; resolve, prune, shortcuts or engine."""
        pruner = PartitionPruner(plan.prune)
        kept = [name for name in self.segments if pruner.may_match(self.table.segments[name].metadata.partitioning)]
        query = ServerQuery(
            request_id="q", table="events", incarnation=INCARNATION, sql=plan.server_sql, columns=plan.columns,
            segments=tuple(kept), tails=(TailRequest(partition=self.number, from_offset=self.tail_from),),
            prune=plan.prune, shortcut=plan.shortcut, budget_ms=60_000,
        )  # fmt: skip
        stop = Stop(deadline_s)
        found = self.table.resolve(query.segments, query.tails)
        assert not found.missing
        assert not found.behind
        scan = plan_scan(self.table, found, query, stop)
        task = Task(query.sql, query.columns, found.alignment.schema, {"$hostName": "me"}, query.shortcut)
        return shortcuts.run(engine, task, scan.pieces, space, stop).table

    def close(self) -> None:
        self.table.partitions[self.number].close()


def _functions_of(kind: str) -> list[PartitionFunction]:
    every = list(PartitionFunction)
    return every if kind in ("INT", "LONG") else [one for one in every if one is not PartitionFunction.MODULO]


def position(offset: int) -> Position:
    return Position(log_offset=offset, epoch=offset, generation=1, next_offset=offset)


@contextmanager
def serving(batch: pa.RecordBatch, dice: random.Random, root: Path) -> Iterator[list[Server]]:
    """The rows on three servers, some of which may have none."""
    cuts = sorted(dice.randrange(batch.num_rows + 1) for _ in range(2))
    parts = zip([0, *cuts], [*cuts, batch.num_rows], strict=True)
    servers = [Server(number, batch.slice(first, end - first), dice, root) for number, (first, end) in enumerate(parts)]
    try:
        yield servers
    finally:
        for server in servers:
            server.close()


def oracle_table(rows: list[dict[str, Any]], *, nulls: bool) -> pa.Table:
    """Null handling off: default values in place of nulls, and a flag beside them."""
    kinds = {"INT": pa.int32(), "LONG": pa.int64(), "DOUBLE": pa.float64(), "BOOLEAN": pa.bool_(),
             "TIMESTAMP": pa.int64(), "STRING": pa.string(), "FLOAT": pa.float32(), "JSON": pa.string(),
             "BIG_DECIMAL": pa.decimal128(38, 6), "BYTES": pa.binary()}  # fmt: skip
    defaults = {spec.name: spec.default for spec in SCHEMA.fields}
    columns: dict[str, pa.Array] = {"$offset": pa.array(range(len(rows)), pa.int64())}
    for name, kind, multi, _ in sqlfuzz.COLUMNS:
        arrow = pa.list_(kinds[kind]) if multi else kinds[kind]
        values = [row.get(name) for row in rows]
        columns[f"null_{name}"] = pa.array([value is None for value in values], pa.bool_())
        if not nulls:
            values = [defaults[name] if value is None else value for value in values]
        columns[name] = pa.array([stored(value, kind) for value in values], arrow)
    return pa.table(columns)


def stored(value: Any, kind: str) -> Any:
    """What the oracle holds for what a producer sent, or for a default."""
    if kind == "BIG_DECIMAL" and value is not None:
        return Decimal(value)
    if kind == "BYTES" and isinstance(value, str):
        return bytes.fromhex(value)
    return json.dumps(value) if kind == "JSON" and isinstance(value, dict) else value


def answer(engine: Engine, sql: str, servers: list[Server], *, nulls: bool) -> list[tuple[Any, ...]]:
    table = TableInfo("events", SCHEMA, stores_nulls=True)
    text = f"SET enableNullHandling=true; {sql}" if nulls else sql
    plan = PLANNER.plan(text, "", lambda name: table, NOW_MS)
    deadline_s = time.monotonic() + 60
    space = KeySpace()
    partials = [server.answer(plan, engine, space, deadline_s) for server in servers]
    if plan.reduce_sql is None:
        result = pa.concat_tables(partials).slice(plan.offset, plan.limit)
    else:
        result = engine.reduce(plan.reduce_sql, partials, deadline_s=deadline_s)
        if not plan.paged:
            result = result.slice(plan.offset, plan.limit)
    exact = {index for index, column in enumerate(plan.result) if column.type == "BIG_DECIMAL"}
    return [
        tuple(
            Decimal(value) if index in exact and value is not None else value
            for index, value in enumerate(row.values())
        )
        for row in result.to_pylist()
    ]


def normal(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(normal(item) for item in value)
    if isinstance(value, Decimal):
        value = float(value)
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def same(left: Any, right: Any) -> bool:
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, (int, float)) and isinstance(right, (int, float)) and not isinstance(left, bool):
        return left == right or math.isclose(left, right, rel_tol=1e-9)
    return bool(left == right)


def comparable(rows: list[tuple[Any, ...]], *, ordered: bool) -> list[tuple[Any, ...]]:
    """In the order given, or in one that does not depend on whether a number is an integer."""
    result = [tuple(normal(value) for value in row) for row in rows]
    return result if ordered else sorted(result, key=lambda row: (repr([as_float(value) for value in row]), repr(row)))


def as_float(value: Any) -> Any:
    if isinstance(value, tuple):
        return [as_float(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def difference(found: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> str:
    for index, (left, right) in enumerate(zip(found, expected, strict=False)):
        if not same(left, right):
            return f"row {index}: found {left}, expected {right} ({len(found)} and {len(expected)} rows)"
    return f"found {len(found)} rows, expected {len(expected)}"


@contextmanager
def small_limits() -> Iterator[None]:
    """Few rows make several batches, and are worth every shortcut."""
    with patch.object(build, "BATCH_ROWS", 32), patch.object(shortcuts, "_CODED_ROWS_MIN", 0):
        yield


@pytest.mark.parametrize("nulls", [False, True], ids=["defaults", "nulls"])
@pytest.mark.parametrize("seed", range(FIRST, FIRST + TABLES))
def test_generated_queries_answer_as_the_oracle_does_or_fail_cleanly(
    engine: Engine, seed: int, nulls: bool, tmp_path: Path
) -> None:
    dice = random.Random(seed * 2 + nulls)
    rows = make_rows(dice, dice.choice([0, 1, 5, 40, 300]))
    refused = 0
    with duckdb.connect() as oracle, small_limits(), serving(ingested(rows), dice, tmp_path) as servers:
        oracle.execute("set timezone = 'UTC'; set threads = 1; set ieee_floating_point_ops = true")
        oracle.register("events", oracle_table(rows, nulls=nulls))
        for number in range(QUERIES_PER_TABLE):
            query = sqlfuzz.Grammar(dice, nulls=nulls).query()
            story = f"seed {seed}, query {number}\n{query.ours}\n{query.theirs}"
            try:
                ours = answer(engine, query.ours, servers, nulls=nulls)
            except QueryError as error:
                if error.code not in CLEAN:
                    pytest.fail(f"{story}\n{error}", pytrace=False)
                refused += 1
                continue
            found = comparable(ours, ordered=query.ordered)
            expected = comparable(oracle.execute(query.theirs).fetchall(), ordered=query.ordered)
            if not same(tuple(found), tuple(expected)):
                pytest.fail(f"{story}\n{difference(found, expected)}", pytrace=False)
    assert refused <= QUERIES_PER_TABLE // 5, f"{refused} of {QUERIES_PER_TABLE} refused: this compares too little"
