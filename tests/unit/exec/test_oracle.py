# SPDX-License-Identifier: Apache-2.0
"""Answers against an oracle: random tables, random queries of the supported surface, DuckDB as the other opinion.

    rows -> random pieces on random servers -> server_sql each -> reduce_sql   == DuckDB over all rows
                                            -> one server               same   == the same

So both are tested: what a query means, and that splitting it into two phases changes nothing. Where Pinot means
something else than standard SQL (integer arithmetic is DOUBLE, empty aggregates, weeks), the oracle's text says so.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cremant.exec.engine import Engine
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.segment.layout import scan_schema
from cremant.segment.scan import Piece
from cremant.sql.binder import TableInfo
from cremant.sql.plan import Plan
from cremant.sql.planner import Planner

NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000


def column(name: str, kind: DataType, field: FieldType = FieldType.DIMENSION, *, multi: bool = False) -> FieldSpec:
    return FieldSpec(name=name, data_type=kind, field_type=field, single_value=not multi)


SCHEMA = Schema(
    name="events",
    fields=(
        column("id", DataType.LONG),
        column("country", DataType.STRING),
        column("tags", DataType.STRING, multi=True),
        column("ok", DataType.BOOLEAN),
        column("clicks", DataType.INT, FieldType.METRIC),
        column("amount", DataType.DOUBLE, FieldType.METRIC),
        column("ts", DataType.TIMESTAMP),
    ),
)
SCAN = scan_schema(SCHEMA)
TABLE = TableInfo("events", SCHEMA)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(threads=2, memory_bytes=256 * 1024 * 1024)
    yield engine
    engine.close()


def make_rows(seed: int, count: int) -> list[dict[str, Any]]:
    dice = random.Random(seed)
    return [
        {
            "$offset": index,
            "$subRow": 0,
            "$ingestionTime": NOW_MS,
            "id": dice.choice([dice.randrange(10), 2**53 + dice.randrange(3), -dice.randrange(5)]),
            "country": dice.choice(["DE", "FR", "US", "", "it's", "dé"]),
            "tags": [dice.choice("abcd") for _ in range(dice.randrange(1, 4))],
            "ok": dice.random() < 0.5,
            "clicks": dice.randrange(-3, 10),
            # Quarters: sums are exact in any order.
            "amount": dice.randrange(-40, 400) / 4,
            "ts": NOW_MS + dice.randrange(-400 * 24, 400 * 24) * HOUR_MS + dice.randrange(HOUR_MS),
        }
        for index in range(count)
    ]


def make_pieces(rows: list[dict[str, Any]], dice: random.Random) -> list[Piece]:
    """The rows cut at random places into pieces of random batches."""
    cuts = sorted(dice.sample(range(len(rows) + 1), k=min(len(rows) + 1, dice.randrange(0, 4))))
    pieces = []
    for index, (first, end) in enumerate(zip([0, *cuts], [*cuts, len(rows)], strict=True)):
        part = rows[first:end]
        middle = len(part) // 2
        batches = tuple(batch for batch in (make_batch(part[:middle]), make_batch(part[middle:])) if batch.num_rows)
        pieces.append(Piece(f"piece-{index}", index % 2, f"segment-{index}", batches, len(part), None, True))
    return pieces


def make_batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    arrays = []
    for field in SCAN:
        plain = pa.string() if pa.types.is_string_view(field.type) else field.type
        arrays.append(pa.array([row[field.name] for row in rows], plain).cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=SCAN)


def ask(engine: Engine, plan: Plan, servers: list[list[Piece]]) -> list[tuple[Any, ...]]:
    deadline_s = time.monotonic() + 20
    partials = [
        engine.run(plan.server_sql, pieces, plan.columns, SCAN, deadline_s=deadline_s).table for pieces in servers
    ]
    if plan.reduce_sql is None:
        table = pa.concat_tables(partials).slice(plan.offset, plan.limit)
    else:
        table = engine.reduce(plan.reduce_sql, partials, deadline_s=deadline_s)
        if not plan.paged:
            table = table.slice(plan.offset, plan.limit)
    return [tuple(row.values()) for row in table.to_pylist()] if table.num_columns else []


def normal(value: Any) -> Any:
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return "nan" if math.isnan(value) else float(value) if abs(value) < 2**53 else value
    return tuple(value) if isinstance(value, list) else value


def normal_rows(rows: list[tuple[Any, ...]], *, ordered: bool) -> list[Any]:
    result = [tuple(normal(value) for value in row) for row in rows]
    return result if ordered else sorted(result, key=repr)


CONDITIONS: list[tuple[str, str | None]] = [
    # ours, DuckDB's (None: the same)
    ("country = 'DE'", None),
    ("country <> 'FR'", None),
    ("country in ('DE', 'it''s', 'zz')", None),
    ("country not in ('DE', 'US')", None),
    ("country like 'D%' or country like '_R'", None),
    ("country = 'DE' or country = 'FR' or clicks = 1", None),
    ("country > 'DZ'", None),
    ("clicks > 5", None),
    ("clicks < 2.5", None),
    ("clicks >= 2.5 and clicks <> 3.5", None),
    ("clicks = 2.5", None),
    ("3 <= clicks", None),
    ("clicks between 2 and 4", None),
    ("not (clicks between 2 and 4)", None),
    ("clicks in (1, 2.5, 3)", "clicks in (1, 3)"),
    ("id = 9007199254740993", None),
    ("id > 9007199254740992", None),
    ("id = '3'", "id = 3"),
    ("id < 99999999999999999999", "true"),
    ("amount > clicks", None),
    ("amount * 2 >= 10.5", None),
    ("amount = 2.25 or amount < -3", None),
    ("ok", None),
    ("not ok and clicks > 0", None),
    ("ok = false", None),
    ("(clicks > 3) = ok", None),
    ("tags = 'b'", "list_contains(tags, 'b')"),
    ("tags <> 'b'", "not list_contains(tags, 'b')"),
    ("tags in ('a', 'c')", "(list_contains(tags, 'a') or list_contains(tags, 'c'))"),
    ("tags not in ('a', 'c')", "not (list_contains(tags, 'a') or list_contains(tags, 'c'))"),
    (f"ts > now() - {100 * 24 * HOUR_MS}", f"ts > {NOW_MS - 100 * 24 * HOUR_MS}"),
    ("ts >= '2023-11-14 22:13:20'", f"ts >= {NOW_MS}"),
    ("ts < ago('P30D')", f"ts < {NOW_MS - 30 * 24 * HOUR_MS}"),
    ("country is null", "false"),
    ("country is not null", "true"),
    ("case when ok then clicks else 0 end > 4", None),
    ("regexp_like(country, '[EF]')", "regexp_matches(country, '[EF]')"),
    ("clicks % 3 = 1", None),
    ("length(country) = 2", None),
    ("id > 100000 and (ok or clicks < 0) and amount <> 3", None),
]
ROW_EXPRESSIONS: list[tuple[str, str | None]] = [
        ("id", None),
        ("country", None),
        ("clicks", None),
        ("amount", None),
        ("ok", None),
        ("ts", None),
        ("tags", None),
        ("clicks + 1", "clicks + 1.0"),
        ("clicks * amount - 2", None),
        ("clicks / 2", "clicks / 2.0"),
        ("-clicks", None),
        ("clicks % 4", None),
        ("upper(country)", None),
        ("concat(country, 'x', '-')", "country || '-x'"),
        ("substr(country, 0, 1)", "substring(country, 1, 1)"),
        ("case when clicks > 3 then 'hi' when ok then 'ok' else 'lo' end", None),
        ("case when ok then clicks else amount end", None),
        ("case when ok then clicks end", "case when ok then clicks else 0 end"),
        ("cast(clicks as string)", "cast(clicks as varchar)"),
        ("cast(amount as long)", "cast(trunc(amount) as bigint)"),
        ("datetrunc('day', ts)", f"(ts // {24 * HOUR_MS}) * {24 * HOUR_MS}"),
        ("datetrunc('week', ts)", "epoch_ms(date_trunc('week', epoch_ms(ts)))"),
        ("datetrunc('month', ts)", "epoch_ms(date_trunc('month', epoch_ms(ts)))"),
        ("datetrunc('quarter', ts)", "epoch_ms(date_trunc('quarter', epoch_ms(ts)))"),
        ("datetrunc('hour', ts, 'MILLISECONDS', 'UTC', 'SECONDS')", f"(ts // {HOUR_MS}) * 3600"),
        ("datetrunc('day', ts, 'MILLISECONDS', 'Europe/Berlin')",
         "epoch_ms(timezone('Europe/Berlin', date_trunc('day', timezone('Europe/Berlin', to_timestamp(ts / 1e3)))))"),
        ("year(ts)", "year(epoch_ms(ts))"),
        ("dayofweek(ts)", "isodow(epoch_ms(ts))"),
        ("hour(ts)", "hour(epoch_ms(ts))"),
        ("least(clicks, amount)", None),
        ("abs(clicks)", None),
        ("arraylength(tags)", "len(tags)"),
        ("coalesce(country, 'x')", None),
        ("round(ts, 300000)", "(ts // 300000) * 300000"),
        ("clicks > 3", None),
]  # fmt: skip
AGGREGATES: list[tuple[str, str | None]] = [
        ("count(*)", None),
        ("count(country)", "count(*)"),
        ("sum(clicks)", "coalesce(sum(clicks), 0)"),
        ("sum(amount)", "coalesce(sum(amount), 0)"),
        ("min(clicks)", "coalesce(min(clicks)::double, 'inf'::double)"),
        ("max(amount)", "coalesce(max(amount), '-inf'::double)"),
        ("avg(clicks)", "coalesce(avg(clicks), '-inf'::double)"),
        ("avg(amount)", "coalesce(avg(amount), '-inf'::double)"),
        ("minmaxrange(ts)", "coalesce((max(ts) - min(ts))::double, '-inf'::double)"),
        ("distinctcount(country)", "count(distinct country)"),
        ("count(distinct id)", None),
        ("distinctcount(clicks) filter (where ok)", "count(distinct clicks) filter (where ok)"),
        ("sum(amount * clicks)", "coalesce(sum(amount * clicks), 0)"),
        ("sum(case when ok then amount else 0 end)", "coalesce(sum(case when ok then amount else 0 end), 0)"),
        ("count(*) filter (where clicks > 3)", None),
        ("sum(amount) filter (where ok and clicks > 3)", "coalesce(sum(amount) filter (where ok and clicks > 3), 0)"),
        ("max(ok)", "coalesce(max(ok::int)::double, '-inf'::double)"),
        ("sum(amount) / count(*)", "coalesce(sum(amount), 0) / count(*)::double"),
        ("max(clicks) - min(clicks)",
         "coalesce(max(clicks)::double, '-inf'::double) - coalesce(min(clicks)::double, 'inf'::double)"),
]  # fmt: skip
KEYS: list[tuple[str, str | None]] = [
    ("country", None),
    ("ok", None),
    ("clicks", None),
    ("clicks % 3", None),
    ("upper(country)", None),
    ("datetrunc('day', ts)", f"(ts // {24 * HOUR_MS}) * {24 * HOUR_MS}"),
    ("case when clicks > 4 then 'hi' else 'lo' end", None),
]
Pair = tuple[str, str | None]


def other(pair: Pair) -> str:
    return pair[1] if pair[1] is not None else pair[0]


def ordered_by(index: int, *, descending: bool) -> str:
    return f"{index} {'desc' if descending else 'asc'}"


@st.composite
def selections(draw: st.DrawFn) -> tuple[str, str, bool]:
    """(ours, DuckDB's, is the order total)."""
    exprs = draw(st.lists(st.sampled_from(ROW_EXPRESSIONS), min_size=1, max_size=4))
    where = draw(st.none() | st.sampled_from(CONDITIONS))
    tail, total = " limit 100000", False
    if draw(st.booleans()):
        total = True
        direction = draw(st.sampled_from(["asc", "desc"]))
        # The offset makes the order total, so that pages are the same everywhere.
        limit, offset = draw(st.integers(0, 12)), draw(st.integers(0, 6))
        tail = f' order by clicks {direction}, "$offset" limit {limit} offset {offset}'
    return *both("", exprs, where, tail), total


@st.composite
def aggregations(draw: st.DrawFn) -> tuple[str, str, bool]:
    keys = draw(st.lists(st.sampled_from(KEYS), max_size=2, unique=True))
    aggregates = draw(st.lists(st.sampled_from(AGGREGATES), min_size=1, max_size=4))
    where = draw(st.none() | st.sampled_from(CONDITIONS))
    tail = f" group by {', '.join(str(index + 1) for index in range(len(keys)))}" if keys else ""
    if keys and draw(st.booleans()):
        tail += " having count(*) > 2"
    total = False
    if keys and draw(st.booleans()):
        total = True
        order = [ordered_by(index + 1, descending=draw(st.booleans())) for index in range(len(keys))]
        if draw(st.booleans()):
            order = [ordered_by(len(keys) + 1, descending=True), *order]
        limit, offset = draw(st.integers(1, 8)), draw(st.integers(0, 3))
        tail += f" order by {', '.join(order)} limit {limit} offset {offset}"
    else:
        tail += " limit 100000"
    return *both("", [*keys, *aggregates], where, tail), total


@st.composite
def distincts(draw: st.DrawFn) -> tuple[str, str, bool]:
    keys = draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=2, unique=True))
    where = draw(st.none() | st.sampled_from(CONDITIONS))
    order = ", ".join(ordered_by(index + 1, descending=draw(st.booleans())) for index in range(len(keys)))
    limit = draw(st.integers(1, 10))
    return *both("distinct ", keys, where, f" order by {order} limit {limit}"), True


def both(prefix: str, exprs: list[Pair], where: Pair | None, tail: str) -> tuple[str, str]:
    ours = ", ".join(f"{pair[0]} as c{index}" for index, pair in enumerate(exprs))
    theirs = ", ".join(f"{other(pair)} as c{index}" for index, pair in enumerate(exprs))
    our_where = f" where {where[0]}" if where else ""
    their_where = f" where {other(where)}" if where else ""
    return f"select {prefix}{ours} from events{our_where}{tail}", f"select {prefix}{theirs} from t{their_where}{tail}"


def check(engine: Engine, query: tuple[str, str, bool], seed: int, count: int) -> None:
    ours, theirs, ordered = query
    rows = make_rows(seed, count)
    dice = random.Random(seed)
    pieces = make_pieces(rows, dice)
    plan = Planner().plan(ours, "", lambda name: TABLE, NOW_MS)
    servers: list[list[Piece]] = [[] for _ in range(3)]
    for piece in pieces:
        servers[dice.randrange(3)].append(piece)
    split = ask(engine, plan, servers)
    whole = ask(engine, plan, [pieces])
    plain = pa.schema(
        [field.with_type(pa.string() if pa.types.is_string_view(field.type) else field.type) for field in SCAN]
    )
    with duckdb.connect() as oracle:
        oracle.execute("set timezone = 'UTC'; set threads = 1")
        oracle.register("t", make_batch(rows).cast(plain) if rows else plain.empty_table())
        expected = oracle.execute(theirs.replace("desc", "desc nulls first")).fetchall()
    assert normal_rows(split, ordered=ordered) == normal_rows(expected, ordered=ordered), (ours, plan)
    assert normal_rows(whole, ordered=ordered) == normal_rows(expected, ordered=ordered), (ours, plan)


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda pair: pair[0])
def test_each_condition_keeps_the_rows_of_the_oracle(engine: Engine, condition: Pair) -> None:
    query = both("", [('"$offset"', None)], condition, ' order by "$offset" limit 1000')
    check(engine, (*query, True), 11, 300)


@pytest.mark.parametrize("expression", ROW_EXPRESSIONS, ids=lambda pair: pair[0])
def test_each_expression_has_the_values_of_the_oracle(engine: Engine, expression: Pair) -> None:
    query = both("", [expression], None, ' order by "$offset" limit 1000')
    check(engine, (*query, True), 12, 300)


@pytest.mark.parametrize("count", [0, 300])
@pytest.mark.parametrize("aggregate", AGGREGATES, ids=lambda pair: pair[0])
def test_each_aggregate_has_the_values_of_the_oracle(engine: Engine, aggregate: Pair, count: int) -> None:
    check(engine, (*both("", [aggregate], None, " limit 10"), True), 13, count)
    grouped = both("", [("country", None), aggregate], None, " group by 1 order by 1 limit 100")
    check(engine, (*grouped, True), 13, count)


@pytest.mark.parametrize("key", KEYS, ids=lambda pair: pair[0])
def test_each_key_makes_the_groups_of_the_oracle(engine: Engine, key: Pair) -> None:
    grouped = both("", [key, ("count(*)", None), ("sum(amount)", None)], None, " group by 1 order by 1 desc limit 1000")
    check(engine, (*grouped, True), 14, 300)


settings.register_profile("oracle", deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
SEEDS, COUNTS = st.integers(0, 10_000), st.sampled_from([0, 1, 7, 60, 200])


#: DataFusion leaves out the cast of a branch when a batch takes no other one.
ONE_BRANCH = (
    "select case when ok then clicks end as c0 from events where country = 'DE' limit 100000",
    "select case when ok then clicks else 0 end as c0 from t where country = 'DE' limit 100000",
    False,
)


@settings(settings.get_profile("oracle"))
@example(query=ONE_BRANCH, seed=1, count=1)
@given(query=selections(), seed=SEEDS, count=COUNTS)
def test_rows_are_those_of_the_oracle(engine: Engine, query: tuple[str, str, bool], seed: int, count: int) -> None:
    check(engine, query, seed, count)


@settings(settings.get_profile("oracle"))
@given(query=aggregations(), seed=SEEDS, count=COUNTS)
def test_aggregates_are_those_of_the_oracle(
    engine: Engine, query: tuple[str, str, bool], seed: int, count: int
) -> None:
    check(engine, query, seed, count)


@settings(settings.get_profile("oracle"), max_examples=30)
@given(query=distincts(), seed=SEEDS, count=COUNTS)
def test_distinct_rows_are_those_of_the_oracle(
    engine: Engine, query: tuple[str, str, bool], seed: int, count: int
) -> None:
    check(engine, query, seed, count)


def test_grouping_by_a_multi_value_column_counts_each_element(engine: Engine) -> None:
    check(
        engine,
        (
            "select tags, count(*), sum(clicks) from events where tags <> 'd' group by tags order by 1",
            "select tag, count(*), sum(clicks) from (select unnest(tags) as tag, clicks from t "
            "where not list_contains(tags, 'd')) group by 1 order by 1",
            True,
        ),
        7,
        200,
    )
