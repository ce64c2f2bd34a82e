# SPDX-License-Identifier: Apache-2.0
"""What is each index worth? Milliseconds of CPU of one server's share of a query, in one process, over sealed segments
with and without: the same queries interleaved, CPU rather than time, so that a busy machine disturbs little.

`partition`: one member of many whose rows are all in one segment; the broker's part is in it, which asks only for that.
`many_*`: what a query costs over 1,000 segments of 10,000 rows, of which it needs all, or one.
`plan_*`: what the broker spends on a text that it has planned before, and `_without`, on one that has other literals.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

from bench.context import Context
from cremant.exec import shortcuts
from cremant.exec.engine import Engine
from cremant.exec.keys import KeySpace
from cremant.exec.shortcuts import Task
from cremant.exec.stop import Stop
from cremant.model.cluster import TableRecord
from cremant.model.offsets import Position
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.model.segments import SegmentMetadata, SegmentStatus
from cremant.model.table import (
    ColumnPartitioning,
    FlushConfig,
    IndexConfig,
    PartitionFunction,
    StreamConfig,
    TableConfig,
)
from cremant.segment.build import SegmentSpec, build_segment
from cremant.segment.layout import stored_columns
from cremant.segment.partitions import PartitionPruner
from cremant.segment.reader import derive
from cremant.server.scan import plan_scan
from cremant.server.table import HostedTable
from cremant.sql.binder import TableInfo
from cremant.sql.planner import Planner
from cremant.wire.messages import ServerQuery, Shortcut

INCARNATION = "00000000000000aa"


def _dimension(name: str, kind: DataType) -> FieldSpec:
    return FieldSpec(name=name, data_type=kind, field_type=FieldType.DIMENSION)


SCHEMA = Schema(
    name="bench",
    fields=(
        _dimension("country", DataType.STRING),
        _dimension("city", DataType.STRING),
        _dimension("key", DataType.STRING),
        _dimension("visits", DataType.LONG),
        _dimension("member", DataType.LONG),
        _dimension("amount", DataType.DOUBLE),
        FieldSpec(
            name="ts", data_type=DataType.LONG, field_type=FieldType.DATE_TIME, format="1:MILLISECONDS:EPOCH",
            granularity="1:MILLISECONDS",
        ),
    ),
)  # fmt: skip
#: Texts to plan: a lookup, and what a dashboard asks.
PLANNED = {
    "plan_lookup": "SELECT ts, city, amount FROM bench WHERE member = {n}",
    "plan_groups": (
        "SELECT country, DATETRUNC('hour', ts) AS h, COUNT(*), SUM(amount) FROM bench WHERE ts >= {n} AND city = 'c' "
        "GROUP BY country, h ORDER BY SUM(amount) DESC LIMIT 20"
    ),
}
RANGE = "SELECT SUM(amount) FROM bench WHERE visits BETWEEN {n} AND {n} + 99"
#: Name -> (indexes, query). `{n}` is a random row, `{c}` a country.
CASES: dict[str, tuple[IndexConfig, str | None, str]] = {
    "coded_equality": (IndexConfig(), None, "SELECT SUM(amount) FROM bench WHERE country = 'country-{c}'"),
    "coded_groups": (
        IndexConfig(), None, "SELECT country, city, COUNT(*), SUM(amount) FROM bench GROUP BY country, city LIMIT 10",
    ),
    "coded_distinct": (IndexConfig(), None, "SELECT DISTINCTCOUNT(city) FROM bench"),
    "inverted_lookup": (IndexConfig(inverted=("key",)), None, "SELECT ts, amount FROM bench WHERE key = 'key-{n}'"),
    "bloom_absent": (IndexConfig(bloom=("key",)), None, "SELECT ts, amount FROM bench WHERE key = 'key-{n}x'"),
    "range": (IndexConfig(range=("visits",)), None, RANGE),
    "sorted_range": (IndexConfig(), "visits", RANGE),
    "partition": (IndexConfig(), None, "SELECT SUM(amount) FROM bench WHERE member = {n}"),
    "time_pruning": (IndexConfig(), None, "SELECT SUM(amount) FROM bench WHERE ts BETWEEN {n} AND {n} + 9999"),
}  # fmt: skip


def run(context: Context) -> tuple[dict[str, Any], dict[str, Any]]:
    rows, segments, rounds, many = (1_000_000, 4, 7, 200) if context.quick else (10_000_000, 20, 15, 1_000)
    metrics: dict[str, Any] = {}
    for name, sql in PLANNED.items():
        kept, fresh = (_planning_ms(sql, rounds, kept=known) for known in (True, False))
        metrics |= {name: kept, f"{name}_without": fresh}
        context.show(f"{name}: {kept:.4f} ms of CPU, {fresh:.4f} without")
    engine = Engine(threads=2, memory_bytes=2 * 1024**3)
    for wanted, sorted_column in dict.fromkeys((case[0], case[1]) for case in CASES.values()):
        with tempfile.TemporaryDirectory(prefix="cremant-bench-") as directory:
            context.show(f"building {segments} segments, {wanted}, sorted by {sorted_column or 'nothing'}")
            server = _Server(engine, Path(directory), rows, segments, wanted, sorted_column)
            for name, (own_indexes, own_sorted, sql) in CASES.items():
                if (own_indexes, own_sorted) == (wanted, sorted_column):
                    metrics |= _compare(context, server, name, sql, rows, rounds)
    with tempfile.TemporaryDirectory(prefix="cremant-bench-") as directory:
        context.show(f"building {many} segments of 10,000 rows")
        server = _Server(engine, Path(directory), many * 10_000, many, IndexConfig(), None)
        for name, sql in (
            ("many_all", "SELECT SUM(amount) FROM bench"),
            ("many_one", "SELECT amount FROM bench WHERE ts = 77"),
        ):
            metrics[name] = median([_once_ms(server, sql, knowing=True) for _ in range(rounds + 1)][1:])
            context.show(f"{name}: {metrics[name]:.2f} ms of CPU")
    engine.close()
    return {"rows": rows, "segments": segments, "many_segments": many, "rounds": rounds}, metrics


def _planning_ms(sql: str, rounds: int, *, kept: bool) -> float:
    """Of one text: the least of several rounds, on a machine that does other things, too."""
    planner, table = Planner(), TableInfo("bench", SCHEMA, False, INCARNATION, 1)
    times = []
    for number in range(rounds + 1):
        texts = [sql.format(n=0 if kept else 1_000 * number + text) for text in range(1_000)]
        began_s = time.process_time()
        for text in texts:
            planner.plan(text, "", lambda name: table, 0)
        times.append((time.process_time() - began_s) * 1000 / len(texts))
    return min(times[1:])


def _compare(context: Context, server: _Server, name: str, sql: str, rows: int, rounds: int) -> dict[str, float]:
    dice = random.Random(3)
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        text = sql.format(n=dice.randrange(rows), c=f"{dice.randrange(20):02d}")
        for knowing in (True, False):
            took = _once_ms(server, text, knowing=knowing)
            if number:
                times[knowing].append(took)
    found = {name: median(times[True]), f"{name}_without": median(times[False])}
    context.show(f"{name}: {found[name]:.2f} ms of CPU, {found[f'{name}_without']:.2f} without")
    return found


def _once_ms(server: _Server, sql: str, *, knowing: bool) -> float:
    began_s = time.process_time()
    server.ask(sql, knowing=knowing)
    return (time.process_time() - began_s) * 1000


class _Server:
    """The part of a server that answers a query, without HTTP."""

    def __init__(
        self, engine: Engine, root: Path, rows: int, segments: int, wanted: IndexConfig, sorted_column: str | None
    ) -> None:
        config = TableConfig(
            name="bench", time_column="ts", replication=1, stream=StreamConfig(stream_type="embedded", topic="b"),
            flush=FlushConfig(), indexes=wanted, sorted_column=sorted_column,
            partitioning={"member": ColumnPartitioning(function=PartitionFunction.MODULO, partitions=segments)},
        )  # fmt: skip
        self._engine = engine
        self._table = HostedTable(TableRecord(config=config, table_schema=SCHEMA, incarnation=INCARNATION))
        self._space = KeySpace()
        self._info = TableInfo("bench", SCHEMA, False, INCARNATION, 1)
        self._planner = Planner()
        self._names: list[str] = []
        each = rows // segments
        for number in range(segments):
            self._seal(root / str(number), number, number * each, each, rows)

    def _seal(self, directory: Path, number: int, first: int, count: int, rows: int) -> None:
        config = self._table.record.config
        spec = SegmentSpec(SCHEMA, "ts", config.sorted_column, config.partitioning)
        built = build_segment(directory, [_batch(first, count, rows)], spec, fsync=False)
        name = f"bench__0__{number}__x"
        metadata = SegmentMetadata(
            name=name, partition=0, sequence=number, status=SegmentStatus.DONE, start_offset=first,
            start=_position(first), created_ms=0, replicas=("me",), end_offset=first + count,
            end=_position(first + count), rows=count, checksum=built.checksum, columns=built.columns,
            partitioning=built.partitioning,
        )  # fmt: skip
        sealed = derive(directory, name, built.checksum, fsync=False, indexes=config.indexes)
        self._table.install(metadata, sealed, verified=True)
        self._names.append(name)

    def ask(self, sql: str, *, knowing: bool) -> pa.Table:
        """`knowing`: with all shortcuts, else the engine over all rows."""
        plan = self._planner.plan(sql, "", lambda name: self._info, 0)
        pruner = PartitionPruner(plan.prune if knowing else ())
        names = [name for name in self._names if pruner.may_match(self._table.segments[name].metadata.partitioning)]
        query = ServerQuery(
            request_id="q", table="bench", incarnation=INCARNATION, sql=plan.server_sql, columns=plan.columns,
            segments=tuple(names), tails=(), prune=plan.prune if knowing else (),
            shortcut=plan.shortcut if knowing else Shortcut(), budget_ms=60_000,
        )  # fmt: skip
        stop = Stop(time.monotonic() + 60)
        found = self._table.resolve(query.segments, ())
        scan = plan_scan(self._table, found, query, stop)
        task = Task(query.sql, query.columns, found.alignment.schema, {}, query.shortcut)
        return shortcuts.run(self._engine, task, scan.pieces, self._space, stop).table


def _position(offset: int) -> Position:
    return Position(log_offset=offset, epoch=offset, generation=1, next_offset=offset)


def _batch(first: int, count: int, rows: int) -> pa.RecordBatch:
    dice = np.random.default_rng(first)
    offsets = np.arange(first, first + count)
    scattered = (offsets * 2_654_435_761) % rows
    columns: dict[str, Any] = {
        "$offset": offsets, "$subRow": np.zeros(count, np.int32), "$ingestionTime": offsets,
        "country": _named("country-{:02d}", 20)[(dice.random(count) ** 2 * 20).astype(int)],
        "city": _named("city-{:03d}", 1_000)[(dice.random(count) ** 2 * 1_000).astype(int)],
        "key": np.char.add("key-", scattered.astype(str)), "visits": scattered,
        # Anything that is first // count in its remainder: a stream of as many partitions as segments.
        "member": scattered // (rows // count) * (rows // count) + first // count, "amount": dice.random(count) * 100,
        "ts": offsets,
    }  # fmt: skip
    schema = stored_columns(SCHEMA)
    return pa.RecordBatch.from_arrays([pa.array(columns[f.name]).cast(f.type) for f in schema], schema=schema)


def _named(pattern: str, count: int) -> np.ndarray:
    return np.array([pattern.format(number) for number in range(count)], dtype=object)
