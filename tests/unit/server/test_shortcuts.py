# SPDX-License-Identifier: Apache-2.0
"""Indexes, codes and shortcuts never change an answer: every query is asked twice, with all that is known of it and
with its SQL alone, over the same sealed segments and the same tail."""

from __future__ import annotations

import concurrent.futures
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cremant.exec import shortcuts
from cremant.exec.engine import Engine, RunStats
from cremant.exec.keys import KeySpace
from cremant.exec.shortcuts import Task
from cremant.exec.stop import Stop
from cremant.model.cluster import TableRecord
from cremant.model.offsets import Position
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.model.segments import SegmentMetadata, SegmentStatus
from cremant.model.table import FlushConfig, IndexConfig, StreamConfig, TableConfig
from cremant.segment.build import SegmentSpec, build_segment
from cremant.segment.layout import stored_columns
from cremant.segment.reader import _filter as without
from cremant.segment.reader import derive
from cremant.segment.rows import RowMask
from cremant.segment.scan import Piece
from cremant.segment.tail import SpillQuota
from cremant.server import scan as server_scan
from cremant.server.catching_up import EndedBy
from cremant.server.partition import Partition, PartitionId
from cremant.server.scan import Scan, plan_scan
from cremant.server.table import HostedTable
from cremant.sql.binder import TableInfo
from cremant.sql.plan import Plan
from cremant.sql.planner import Planner
from cremant.wire.messages import ServerQuery, Shortcut, TailRequest


def column(name: str, kind: DataType, *, single: bool = True) -> FieldSpec:
    return FieldSpec(name=name, data_type=kind, field_type=FieldType.DIMENSION, single_value=single)


SCHEMA = Schema(
    name="sales",
    fields=(
        column("amount", DataType.DOUBLE),
        column("city", DataType.STRING),
        column("code", DataType.STRING),
        column("id", DataType.LONG),
        column("pieces", DataType.INT),
        column("tags", DataType.STRING, single=False),
        column("visits", DataType.LONG),
        FieldSpec(
            name="ts", data_type=DataType.LONG, field_type=FieldType.DATE_TIME, format="1:MILLISECONDS:EPOCH",
            granularity="1:MILLISECONDS",
        ),
    ),
)  # fmt: skip
INFO = TableInfo("sales", SCHEMA, False, "i", 1)
CITIES = ["", "Berlin", "Köln", "München", "a long name of a city", "a long name of a town", "Ulm", "Zürich"]
#: Rows per sealed segment: one with several batches, one that knows only some cities, small ones; then the tail.
SEGMENTS = [150_000, 60_000, 700, 3]
TAIL = 5_000
INDEXES = IndexConfig(inverted=("code", "id"), range=("visits",), bloom=("code",))


def rows_of(first: int, count: int, cities: int) -> pa.RecordBatch:
    dice = np.random.default_rng(first)
    offsets = np.arange(first, first + count)
    values = [
        pa.array(offsets),
        pa.array(np.zeros(count, np.int32)),
        pa.array(offsets + 1_700_000_000_000),
        pa.array(np.round(dice.random(count) * 100, 2)),
        pa.array(np.array(CITIES[:cities], dtype=object)[dice.integers(0, cities, count)]),
        pa.array([f"code-of-many-letters-{n}" for n in dice.permutation(count * 2)[:count].tolist()]),
        pa.array(dice.permutation(count) + first),
        pa.array(dice.integers(-3, 40, count).astype(np.int32)),
        pa.array([["x", "y"][: n % 3] for n in range(count)], pa.list_(pa.string())),
        pa.array(offsets * 10),
        pa.array(dice.integers(0, 2**40, count)),
    ]
    schema = stored_columns(SCHEMA)
    return pa.RecordBatch.from_arrays(
        [value.cast(field.type) for value, field in zip(values, schema, strict=True)], schema=schema
    )


@dataclass
class World:
    table: HostedTable
    engine: Engine
    space: KeySpace
    segments: tuple[str, ...]
    tail_from: int


def position(offset: int) -> Position:
    return Position(log_offset=offset, epoch=offset, generation=1, next_offset=offset)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    config = TableConfig(
        name="sales", time_column="ts", replication=1, stream=StreamConfig(stream_type="embedded", topic="s"),
        flush=FlushConfig(), indexes=INDEXES,
    )  # fmt: skip
    table = HostedTable(TableRecord(config=config, table_schema=SCHEMA, incarnation="00000000000000aa"))
    names, first = [], 0
    with tempfile.TemporaryDirectory() as root:
        for number, count in enumerate(SEGMENTS):
            directory = Path(root) / str(number)
            built = build_segment(
                directory, [rows_of(first, count, 8 - 2 * number)], SegmentSpec(SCHEMA, "ts"), fsync=False
            )
            name = f"sales__0__{number}__x"
            metadata = SegmentMetadata(
                name=name, partition=0, sequence=number, status=SegmentStatus.DONE, start_offset=first,
                start=position(first), created_ms=0, replicas=("me",), end_offset=first + count,
                end=position(first + count), rows=count, checksum=built.checksum, columns=built.columns,
            )  # fmt: skip
            sealed = derive(directory, name, built.checksum, fsync=False, indexes=INDEXES)
            table.install(metadata, sealed, verified=True)
            names.append(name)
            first += count
        partition = Partition(PartitionId("sales", "aa", 0), position(first), Path(root) / "tail", SpillQuota())
        partition.tail.append(rows_of(first, TAIL, 8), first + TAIL)
        partition.catching_up.ended_by = EndedBy.END
        table.partitions[0] = partition
        engine = Engine(threads=2, memory_bytes=512 * 1024 * 1024)
        yield World(table, engine, KeySpace(), tuple(names), first)
        engine.close()
        partition.close()


def server_query(plan: Plan, world: World, *, tail: bool, knowing: bool) -> ServerQuery:
    return ServerQuery(
        request_id="q", table="sales", incarnation="00000000000000aa", sql=plan.server_sql, columns=plan.columns,
        segments=world.segments, tails=(TailRequest(partition=0, from_offset=world.tail_from),) if tail else (),
        prune=plan.prune if knowing else (), shortcut=plan.shortcut if knowing else Shortcut(), budget_ms=60_000,
    )  # fmt: skip


def ask(world: World, plan: Plan, *, tail: bool, knowing: bool) -> tuple[list[tuple[Any, ...]], Scan, int]:
    query = server_query(plan, world, tail=tail, knowing=knowing)
    stop = Stop(time.monotonic() + 60)
    found = world.table.resolve(query.segments, query.tails)
    assert not found.missing
    assert not found.behind
    scan = plan_scan(world.table, found, query, stop)
    task = Task(query.sql, query.columns, found.alignment.schema, {"$hostName": "me"}, query.shortcut)
    result = shortcuts.run(world.engine, task, scan.pieces, world.space, stop)
    table = result.table
    if plan.reduce_sql is None:
        table = table.slice(plan.offset, plan.limit)
    else:
        table = world.engine.reduce(plan.reduce_sql, [table], deadline_s=stop.deadline_s)
        if not plan.paged:
            table = table.slice(plan.offset, plan.limit)
    return (
        [tuple(rounded(value) for value in row.values()) for row in table.to_pylist()],
        scan,
        result.stats.rows_matched,
    )


def rounded(value: Any) -> Any:
    """Sums of doubles depend on the order of adding."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    return tuple(value) if isinstance(value, list) else value


def plan_of(sql: str) -> Plan:
    return Planner().plan(sql, "", lambda name: INFO, 1_700_000_000_000)


CONDITIONS = [
    "city = 'Köln'", "city in ('Ulm', '', 'nowhere', 'a long name of a town')", "city > 'Berlin'", "city <= 'K'",
    "city between 'B' and 'N'", "city = 'nowhere'", "'Ulm' = city", "code = 'code-of-many-letters-17'",
    "code in ('code-of-many-letters-17', 'code-of-many-letters-90000', 'x')", "code = 'short'",
    "code > 'code-of-many-letters-9'", "id = 150017", "id in (3, 77, 209999, 210002, 214000, -1)",
    "id between 100 and 200", "id > 210600", "id = 99999999999999999999", "id = '150017'", "pieces = 7",
    "pieces in (-3, 0, 39, 40, 5000000000)", "pieces between 5 and 9", "pieces > 2.5", "pieces >= -3", "pieces < -3",
    "pieces between 9 and 5", "id between 99999999999999999999 and 5000", "id between 5 and -99999999999999999999",
    "id between 200000 and 99999999999999999999", "ts >= 2090000", "ts < 5", "ts between 1490000 and 1510000",
    "visits < 1000000000", "visits between 5000000 and 60000000", "visits = 12",
    "amount > 99.5", "amount = 50.25", "tags = 'x'",
    "city like '%n'", "city <> 'Köln'", "pieces not in (1, 2)", "not (pieces = 3)", "city is null",
]  # fmt: skip
AGGREGATES = [
    "count(*)", "sum(amount)", "min(pieces)", "max(visits)", "distinctcount(city)", "distinctcount(pieces)",
    "distinctcount(code)", "sum(pieces) filter (where city = 'Ulm')", "avg(amount)", "sum(visits)", "avg(pieces)",
    "count(id)", "sumlong(visits)",
]  # fmt: skip
KEYS = ["city", "pieces", "upper(city)", "ts % 3", "tags"]

conditions = st.lists(st.sampled_from(CONDITIONS), max_size=3).flatmap(
    lambda chosen: st.sampled_from([" and ", " or "]).map(lambda word: f" where {word.join(chosen)}" if chosen else "")
)


@st.composite
def groups(draw: st.DrawFn) -> str:
    keys = draw(st.lists(st.sampled_from(KEYS), max_size=3, unique=True))
    aggregates = draw(st.lists(st.sampled_from(AGGREGATES), min_size=0 if keys else 1, max_size=3, unique=True))
    selected = ", ".join([*keys, *aggregates])
    where = draw(conditions)
    if not keys:
        return f"select {selected} from sales{where}"
    order = ", ".join(str(number + 1) for number in range(len(keys)))
    limit = draw(st.sampled_from([3, 100_000]))
    return f"select {selected} from sales{where} group by {', '.join(keys)} order by {order} limit {limit}"


@st.composite
def selections(draw: st.DrawFn) -> str:
    columns = draw(
        st.lists(
            st.sampled_from(['"$offset"', "city", "code", "amount", "tags", "id", "pieces + 1", '"$segmentName"']),
            min_size=1, max_size=4, unique=True,
        )
    )  # fmt: skip
    order = draw(st.sampled_from(["", ' order by "$offset"', ' order by amount desc, "$offset"']))
    limit = draw(st.sampled_from([5, 300_000])) if order else 300_000
    return f"select {', '.join(columns)} from sales{draw(conditions)}{order} limit {limit}"


def check(world: World, sql: str, *, tail: bool) -> None:
    plan = plan_of(sql)
    known, scan, matched = ask(world, plan, tail=tail, knowing=True)
    plain, _, expected = ask(world, plan, tail=tail, knowing=False)
    if " order by " not in sql:
        known, plain = sorted(known, key=repr), sorted(plain, key=repr)
    assert known == plain, (sql, plan.server_sql, plan.shortcut)
    assert scan.docs_total == sum(SEGMENTS) + (TAIL if tail else 0)
    if " where " in sql and "limit 5" not in sql and "tags" not in sql:
        assert matched == expected, sql


few = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("condition", CONDITIONS)
def test_each_condition_finds_the_same_rows_with_and_without_indexes(world: World, condition: str) -> None:
    for tail in (False, True):
        check(world, f'select "$offset", city from sales where {condition} limit 300000', tail=tail)
        check(world, f"select count(*), sum(amount) from sales where {condition}", tail=tail)
        check(
            world,
            f"select city, pieces, count(*) from sales where {condition} group by city, pieces limit 100000",
            tail=tail,
        )


@few
@given(sql=groups(), tail=st.booleans())
def test_groups_are_the_same_with_and_without_shortcuts(world: World, sql: str, tail: bool) -> None:
    check(world, sql, tail=tail)


@few
@given(sql=selections(), tail=st.booleans())
def test_rows_are_the_same_with_and_without_shortcuts(world: World, sql: str, tail: bool) -> None:
    check(world, sql, tail=tail)


@pytest.mark.parametrize("order", ["id desc", "amount", "id"])
def test_an_order_of_no_rows_has_none(world: World, order: str) -> None:
    check(world, f"select id from sales order by {order} limit 0", tail=True)


@pytest.mark.parametrize(
    ("selected", "sums"),
    [
        ("sum(amount), sum(pieces), count(*)", (("p0", "amount"), ("p1", "pieces"), ("p2", ""))),
        ("avg(visits), sum(visits)", (("p0", "visits"), ("p1", ""))),
        ("count(city)", (("p0", ""),)),
        ("sum(amount + 1)", ()),
        ("sum(amount), max(pieces)", ()),
        ("sum(amount) filter (where city = 'Ulm')", ()),
        ("sumlong(visits)", ()),
        ("count(tags), countmv(tags)", ()),
    ],
)
def test_sums_that_need_no_engine_are_known(
    world: World, selected: str, sums: tuple[tuple[str, str], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(f"select {selected} from sales where city = 'Ulm'")
    assert tuple((one.name, one.column) for one in plan.shortcut.sums) == sums
    expected, _, _ = ask(world, plan, tail=False, knowing=False)
    if sums:
        monkeypatch.setattr(Engine, "run", None)
    assert ask(world, plan, tail=False, knowing=True)[0] == expected


def test_a_limit_without_order_gives_that_many_matching_rows(world: World) -> None:
    plan = plan_of("select city, pieces from sales where city = 'Ulm' limit 7")
    rows, _, matched = ask(world, plan, tail=True, knowing=True)
    assert [city for city, _ in rows] == ["Ulm"] * 7
    assert matched == 7
    rows, _, _ = ask(world, plan_of("select id from sales limit 12 "), tail=True, knowing=True)
    assert len(set(rows)) == 12


def test_segments_that_an_index_rules_out_count_as_pruned(world: World) -> None:
    """The ranges of `code` and `city` let all pass; dictionary, order and Bloom filter do not."""
    for sql, pruned in (
        ("select id from sales where code = 'code-of-many-letters-5x'", 4),
        ("select count(*) from sales where city = 'Berlin and more'", 4),
        ("select count(*) from sales where id in (20, 150001)", 2),
    ):
        _, scan, _ = ask(world, plan_of(sql), tail=False, knowing=True)
        assert (scan.segments_queried, scan.segments_pruned) == (4, pruned), sql


def test_rows_that_are_not_there_any_more_are_in_no_shortcut(world: World) -> None:
    """A piece with a validity bitmap takes part in filters by index, but not in what is read from metadata."""
    plans = [
        plan_of("select distinctcount(city) from sales"),
        plan_of("select count(*) from sales where pieces = 7"),
        plan_of("select count(*), sum(amount) from sales"),
        plan_of("select pieces, city, count(*) from sales group by pieces, city order by 1, 2 limit 100000"),
        plan_of("select id from sales where id between 5 and 900 limit 100000"),
    ]
    for plan in plans:
        answers = []
        for knowing in (True, False):
            query = server_query(plan, world, tail=False, knowing=knowing)
            stop = Stop(time.monotonic() + 60)
            found = world.table.resolve(query.segments, ())
            scan = plan_scan(world.table, found, query, stop)
            pieces = [_without_some(piece) for piece in scan.pieces]
            task = Task(query.sql, query.columns, found.alignment.schema, {}, query.shortcut)
            table = shortcuts.run(world.engine, task, pieces, world.space, stop).table
            if plan.reduce_sql is not None:
                table = world.engine.reduce(plan.reduce_sql, [table], deadline_s=stop.deadline_s)
            rows = [tuple(map(rounded, row.values())) for row in table.to_pylist()]
            answers.append(sorted(map(repr, rows)))
        assert answers[0] == answers[1]
        assert answers[0]


def _without_some(piece: Any) -> Any:
    """Rows with an odd `$offset`, and all of Ulm, are gone."""
    masks: list[RowMask | None] = []
    for batch in piece.batches:
        odd = (batch.column("$offset").to_numpy() % 2).astype(bool)
        ulm = np.array(batch.column("city").cast(pa.string()).to_pylist(), dtype=object) == "Ulm"
        flags = ~odd & ~ulm
        masks.append(RowMask(flags, int(flags.sum())))
    return replace(existing_only(piece, masks), immutable=False)


def existing_only(piece: Piece, validity: Sequence[RowMask | None]) -> Piece:
    """As a server makes it where some rows do not exist: those are in no mask."""
    masks = piece.masks and tuple(
        mask and (RowMask(flags := mask.flags & there.flags, int(flags.sum())) if there is not None else mask)
        for mask, there in zip(piece.masks, validity, strict=True)
    )
    return replace(piece, validity=tuple(validity), masks=masks)


#: Share of the rows that do not exist.
GONE = [0.0, 0.01, 0.1, 0.6, 0.999, 1.0]


def exist(batch: pa.RecordBatch, gone: float, seed: int) -> RowMask | None:
    """Which rows do, by their offsets: the same ones in whatever batch they are."""
    offsets = batch.column("$offset").to_numpy().astype(np.uint64)
    mixed = (offsets + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
    flags = (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53 >= gone
    flags.setflags(write=False)  # a server's masks are those of other queries, too
    return RowMask(flags, int(flags.sum())) if not flags.all() else None


def ask_existing(world: World, plan: Plan, *, gone: float, seed: int, knowing: bool) -> list[str]:
    return answer_existing(world, plan, gone=gone, seed=seed, knowing=knowing)[0]


def answer_existing(world: World, plan: Plan, *, gone: float, seed: int, knowing: bool) -> tuple[list[str], RunStats]:
    """`knowing`: with all shortcuts, over rows of which some do not exist. Else the SQL alone over those that do."""
    query = server_query(plan, world, tail=True, knowing=knowing)
    stop = Stop(time.monotonic() + 60)
    found = world.table.resolve(query.segments, query.tails)

    def masks_of(batches: Sequence[pa.RecordBatch]) -> tuple[RowMask | None, ...]:
        return tuple(exist(batch, gone, seed) for batch in batches)

    if knowing:
        with (
            mock.patch.object(server_scan, "segment_validity", lambda part, batches, cut: masks_of(batches)),
            mock.patch.object(server_scan, "tail_validity", lambda rows, cut: masks_of(rows.batches(found.alignment))),
        ):
            pieces = plan_scan(world.table, found, query, stop).pieces
    else:
        pieces = [_existing_rows(piece, masks_of(piece.batches)) for piece in
                  plan_scan(world.table, found, query, stop).pieces]  # fmt: skip
    task = Task(query.sql, query.columns, found.alignment.schema, {}, query.shortcut)
    result = shortcuts.run(world.engine, task, pieces, world.space, stop)
    table = result.table
    if plan.reduce_sql is not None:
        table = world.engine.reduce(plan.reduce_sql, [table], deadline_s=stop.deadline_s)
    rows_of_answer = [tuple(map(rounded, row.values())) for row in table.slice(plan.offset, plan.limit).to_pylist()]
    return sorted(map(repr, rows_of_answer)), result.stats


def _existing_rows(piece: Piece, masks: Sequence[RowMask | None]) -> Piece:
    left = tuple(
        batch if mask is None else without(batch, pa.array(mask.flags))
        for batch, mask in zip(piece.batches, masks, strict=True)
    )
    return Piece(piece.key, 0, piece.segment, left, sum(batch.num_rows for batch in left), None, immutable=False)


seeds = st.integers(0, 10**6)


@few
@given(sql=groups(), gone=st.sampled_from(GONE), seed=seeds)
def test_groups_have_only_rows_that_exist(world: World, sql: str, gone: float, seed: int) -> None:
    plan = plan_of(sql)
    known = ask_existing(world, plan, gone=gone, seed=seed, knowing=True)
    assert known == ask_existing(world, plan, gone=gone, seed=seed, knowing=False), (sql, plan.shortcut)


@settings(few, max_examples=6)
@given(sql=selections().filter(lambda sql: "segmentName" not in sql), gone=st.sampled_from(GONE), seed=seeds)
def test_selections_have_only_rows_that_exist(world: World, sql: str, gone: float, seed: int) -> None:
    plan = plan_of(sql)
    known = ask_existing(world, plan, gone=gone, seed=seed, knowing=True)
    assert known == ask_existing(world, plan, gone=gone, seed=seed, knowing=False), (sql, plan.shortcut)


@pytest.mark.parametrize("gone", GONE)
@pytest.mark.parametrize("sql", [
    "select count(*), sum(amount), sum(pieces), avg(visits) from sales",
    "select count(*), sum(amount) from sales where city = 'Ulm'",
    "select count(*) from sales where code = 'code-of-many-letters-17'",
    "select distinctcount(city), distinctcount(pieces) from sales",
    "select distinct city from sales limit 50",
    "select city, count(*), sum(amount) from sales group by city limit 50",
    "select city, pieces, max(id) from sales where pieces > 20 group by city, pieces limit 1000",
    "select city, pieces, max(id) from sales where pieces = 20 group by city, pieces limit 1000",
    "select city, count(*) filter (where pieces > 3) from sales where amount > 5.5 group by city limit 50",
    "select id, city from sales where id between 100 and 30000 limit 100000",
    "select id from sales order by amount desc, id limit 10",
    "select id, city from sales where city = 'Ulm' order by pieces, amount desc, id limit 700",
    "select id from sales where amount > 50 order by visits limit 5 option(timeoutMs=60000)",
    "select id, ts from sales where pieces = 7 order by ts desc limit 3, 20",
])  # fmt: skip
def test_each_shortcut_has_only_rows_that_exist(world: World, sql: str, gone: float) -> None:
    plan = plan_of(sql)
    known, stats = answer_existing(world, plan, gone=gone, seed=1, knowing=True)
    plain, plain_stats = answer_existing(world, plan, gone=gone, seed=1, knowing=False)
    assert known == plain
    assert stats.rows_scanned >= 0
    assert stats.rows_matched == plain_stats.rows_matched


@pytest.mark.parametrize("gone", [0.1, 0.9])
@pytest.mark.parametrize("where", ["", " where city = 'Ulm'", " where amount > 50"])
def test_a_limit_is_filled_with_rows_that_exist(world: World, gone: float, where: str) -> None:
    """Rows that do not exist are not counted towards it, neither in the shortcut nor by the engine."""
    everything = set(ask_existing(world, plan_of(f"select id from sales{where} limit 300000"), gone=gone, seed=2,
                                  knowing=False))  # fmt: skip
    some = ask_existing(world, plan_of(f"select id from sales{where} limit 2000"), gone=gone, seed=2, knowing=True)
    assert len(set(some)) == min(2000, len(everything))
    assert everything.issuperset(some)


@pytest.mark.parametrize("options", ["", "enableNullHandling=true"])
@pytest.mark.parametrize("stores_nulls", [False, True])
def test_columns_and_nulls_that_came_after_the_segments_were_sealed(
    world: World, stores_nulls: bool, options: str
) -> None:
    record = world.table.record
    land = FieldSpec(
        name="land", data_type=DataType.STRING, field_type=FieldType.DIMENSION, default_null_value="nowhere"
    )
    schema = msgspec.structs.replace(SCHEMA, fields=(*SCHEMA.fields, land, column("size", DataType.INT)))
    config = msgspec.structs.replace(record.config, null_handling=stores_nulls)
    info = TableInfo("sales", schema, stores_nulls, "i", 2)
    world.table.update(msgspec.structs.replace(record, table_schema=schema, config=config))
    try:
        for sql in LATER:
            plan = Planner().plan(sql, options, lambda name: info, 1_700_000_000_000)
            known, _, _ = ask(world, plan, tail=True, knowing=True)
            plain, _, _ = ask(world, plan, tail=True, knowing=False)
            assert sorted(known, key=repr) == sorted(plain, key=repr), (sql, plan.shortcut)
    finally:
        world.table.update(record)


LATER = [
    "select land, size from sales limit 300000", "select distinct land from sales limit 50",
    "select LAND, city from sales where City = 'Ulm' limit 300000",
    "select city from sales where size < 7 limit 300000",
    "select land, city, count(*) from sales group by land, city order by 1, 2 limit 50",
    "select city, count(*), count(land) from sales where land is null group by city order by 1 limit 50",
    "select size, count(*) from sales where land = 'nowhere' and city is not null group by size limit 50",
]  # fmt: skip


@pytest.mark.parametrize("numbers_max", [10, 1_000_000])
def test_many_queries_at_once_number_the_same_columns(
    world: World, numbers_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a column has more values than are numbered: then the plain query groups by them."""
    monkeypatch.setattr("cremant.exec.keys.NUMBERS_MAX", numbers_max)
    plan = plan_of(
        "select city, pieces, count(*), sum(visits) from sales group by city, pieces order by 1, 2 limit 999"
    )
    expected, _, _ = ask(world, plan, tail=True, knowing=False)
    fresh = replace(world, space=KeySpace())
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, fresh, plan, tail=True, knowing=True) for _ in range(12)]
        assert all(one.result()[0] == expected for one in asked)


def test_an_old_broker_that_knows_no_shortcuts_is_answered(world: World) -> None:
    query = server_query(plan_of("select city from sales"), world, tail=False, knowing=True)
    wire = msgspec.json.decode(msgspec.json.encode(query))
    del wire["shortcut"]
    assert msgspec.convert(wire, ServerQuery).shortcut == Shortcut()
