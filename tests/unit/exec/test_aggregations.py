# SPDX-License-Identifier: Apache-2.0
"""Aggregations against plain Python: each has a model that reads like its definition; random rows are dealt to one to
four servers (some of them empty), and the merged answer must be the model's, per group, with and without null handling.

Sketches are compared with their own library, or with the error they state.
"""

from __future__ import annotations

import bisect
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.sqlrun import Sql, schema_of

from cremant.exec.engine import Engine
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.segment.layout import scan_schema
from cremant.segment.scan import Piece
from cremant.sql.binder import TableInfo
from cremant.sql.planner import Planner

Row = dict[str, Any]
Values = list[Any]


def column(name: str, kind: DataType, field: FieldType = FieldType.DIMENSION, *, multi: bool = False) -> FieldSpec:
    return FieldSpec(name=name, data_type=kind, field_type=field, single_value=not multi)


SCHEMA = Schema(
    name="events",
    fields=(
        column("g", DataType.STRING),
        column("s", DataType.STRING),
        column("b", DataType.BOOLEAN),
        column("sizes", DataType.INT, multi=True),
        column("words", DataType.STRING, multi=True),
        column("n", DataType.INT, FieldType.METRIC),
        column("id", DataType.LONG, FieldType.METRIC),
        column("x", DataType.DOUBLE, FieldType.METRIC),
        column("f", DataType.FLOAT, FieldType.METRIC),
        column("t", DataType.TIMESTAMP),
    ),
)
SCAN = scan_schema(SCHEMA, null_handling=True)
TABLE = TableInfo("events", SCHEMA, stores_nulls=True)
DEFAULTS = {spec.name: spec.default for spec in SCHEMA.fields}
NULLABLE = ("s", "n", "x")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine(threads=2, memory_bytes=256 * 1024 * 1024)
    yield made
    made.close()


ROWS = st.fixed_dictionaries(
    {
        "g": st.sampled_from("ab"),
        "s": st.none() | st.sampled_from(["DE", "it's", "日本", "", "2", "3.5"]),
        "b": st.booleans(),
        "sizes": st.lists(st.integers(-5, 9), min_size=1, max_size=3),
        "words": st.lists(st.sampled_from(["p", "q", "été"]), min_size=1, max_size=3),
        "n": st.none() | st.integers(-4, 6),
        "id": st.sampled_from([0, 1, -7, 2**53 + 1, -(2**63), 2**63 - 1]) | st.integers(0, 40),
        "x": st.none() | st.integers(-20, 60).map(lambda quarter: quarter / 4) | st.just(1e9 + 0.25),
        "f": st.sampled_from([0.5, -1.25, 3.0]),
        "t": st.integers(0, 6),
    }
)
TABLES = st.lists(ROWS, max_size=40)


def batch_of(rows: list[Row]) -> pa.RecordBatch:
    arrays = []
    for field in SCAN:
        name = field.name
        if name.startswith("$isNull."):
            values: list[Any] = [row[name.removeprefix("$isNull.")] is None for row in rows]
        else:
            values = [DEFAULTS[name] if row[name] is None and name in NULLABLE else row[name] for row in rows]
        plain = pa.string() if pa.types.is_string_view(field.type) else field.type
        arrays.append(pa.array(values, plain).cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=SCAN)


def numbered(rows: list[Row]) -> list[Row]:
    return [{**row, "$offset": index, "$subRow": 0, "$ingestionTime": 1} for index, row in enumerate(rows)]


def ask(
    engine: Engine, sql: str, rows: list[Row], servers: int, seed: int = 0
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Names and rows of the answer, the rows dealt to so many servers in two pieces each."""
    plan = Planner().plan(sql, "", lambda name: TABLE, 0)
    deadline_s = time.monotonic() + 60
    dealt: list[list[Row]] = [[] for _ in range(servers)]
    for index, row in enumerate(numbered(rows)):
        dealt[(index * (seed + 1) + seed) % servers if seed != 3 else 0].append(row)
    partials = []
    for part in dealt:
        middle = len(part) // 2
        pieces = [
            Piece(f"p{index}", 0, f"s{index}", (batch_of(half),), len(half), None, True)
            for index, half in enumerate((part[:middle], part[middle:]))
            if half
        ]
        partials.append(engine.run(plan.server_sql, pieces, plan.columns, SCAN, deadline_s=deadline_s).table)
    assert plan.reduce_sql is not None
    table = engine.reduce(plan.reduce_sql, partials, deadline_s=deadline_s)
    answer = [tuple(column[index].as_py() for column in table.columns) for index in range(table.num_rows)]
    return [column.name for column in plan.result], answer


def percentile(p: float) -> Callable[[Values], float]:
    def model(values: Values) -> float:
        ordered = sorted(float(value) for value in values)
        return ordered[-1] if p == 100 else ordered[int(len(ordered) * p / 100)]

    return model


def mode(choose: Callable[[Values], float]) -> Callable[[Values], float]:
    def model(values: Values) -> float:
        counts = Counter(values)
        best = max(counts.values())
        return float(choose([value for value, count in counts.items() if count == best]))

    return model


def moment(values: Values, power: int) -> Fraction:
    exact = [Fraction(value) for value in values]
    mean = sum(exact) / len(exact)
    return sum(((value - mean) ** power for value in exact), Fraction(0))


def variance(values: Values) -> float:
    return float(moment(values, 2) / len(values))


def sample_variance(values: Values) -> float | None:
    return float(moment(values, 2) / (len(values) - 1)) if len(values) > 1 else None


def skewness(values: Values) -> float:
    n = len(values)
    if n < 3:
        return math.nan
    spread = float(moment(values, 2)) / (n - 1)
    return 0.0 if spread < 10e-20 else n * float(moment(values, 3)) / ((n - 1) * (n - 2) * spread**1.5)


def kurtosis(values: Values) -> float:
    n = len(values)
    if n < 4:
        return math.nan
    spread = float(moment(values, 2)) / (n - 1)
    if spread < 10e-20:
        return 0.0
    first = n * (n + 1) * float(moment(values, 4)) / ((n - 1) * (n - 2) * (n - 3) * spread**2)
    return first - 3 * (n - 1) ** 2 / ((n - 2) * (n - 3))


def histogram(values: Values) -> list[float]:
    edges = [-5.0, 0.0, 5.0, 10.0]
    counts = [0.0, 0.0, 0.0]
    for value in values:
        if -5 <= value <= 10:
            counts[min(bisect.bisect_right(edges, value) - 1, 2)] += 1
    return counts


INF = math.inf
#: SQL, the column (or columns) it reads, its model over values, and the answer for no values without null handling.
MODELS: list[tuple[str, str, Callable[[Values], Any], Any]] = [
    ("sum(x)", "x", math.fsum, 0.0),
    ("min(n)", "n", min, INF),
    ("max(x)", "x", max, -INF),
    ("avg(n)", "n", statistics.fmean, -INF),
    ("minmaxrange(x)", "x", lambda values: max(values) - min(values), -INF),
    ("sumint(n)", "n", sum, 0),
    ("minlong(id)", "id", min, 2**63 - 1),
    ("maxlong(id)", "id", max, -(2**63)),
    ("minstring(s)", "s", lambda values: min(values, key=str.encode), None),
    ("maxstring(s)", "s", lambda values: max(values, key=str.encode), None),
    ("bool_and(b)", "b", all, True),
    ("bool_or(b)", "b", any, False),
    ("booland(n)", "n", all, True),
    ("distinctcount(n)", "n", lambda values: len(set(values)), 0),
    ("distinctcount(s)", "s", lambda values: len(set(values)), 0),
    ("distinctcountbitmap(id)", "id", lambda values: len(set(values)), 0),
    ("segmentpartitioneddistinctcount(x)", "x", lambda values: len(set(values)), 0),
    ("distinctcount(b)", "b", lambda values: len(set(values)), 0),
    ("distinctsum(n)", "n", lambda values: float(sum(set(values))), 0.0),
    ("distinctavg(x)", "x", lambda values: statistics.fmean(set(values)), math.nan),
    ("sum(distinct x)", "x", lambda values: math.fsum(set(values)), 0.0),
    ("percentile(x, 50)", "x", percentile(50), -INF),
    ("percentile(n, 99.9)", "n", percentile(99.9), -INF),
    ("percentile100(f)", "f", percentile(100), -INF),
    ("percentile0(x)", "x", percentile(0), -INF),
    ("percentileest(n, 75)", "n", lambda values: int(percentile(75)(values)), -(2**63)),
    ("mode(n)", "n", mode(min), -INF),
    ("mode(x, 'MAX')", "x", mode(max), -INF),
    ("mode(n, 'AVG')", "n", mode(statistics.fmean), -INF),
    ("var_pop(x)", "x", variance, -INF),
    ("var_samp(n)", "n", sample_variance, -INF),
    ("stddev_pop(x)", "x", lambda values: math.sqrt(variance(values)), -INF),
    ("skewness(n)", "n", skewness, math.nan),
    ("kurtosis(n)", "n", kurtosis, math.nan),
    ("histogram(n, -5, 10, 3)", "n", histogram, [0.0, 0.0, 0.0]),
    ("sumprecision(n)", "n", lambda values: str(sum(values)), "0"),
    ("sumprecision(id)", "id", lambda values: str(sum(values)), "0"),
    ("countmv(sizes)", "sizes", len, 0),
    ("summv(sizes)", "sizes", math.fsum, 0.0),
    ("minmv(sizes)", "sizes", min, INF),
    ("max(sizes)", "sizes", max, -INF),
    ("avgmv(sizes)", "sizes", statistics.fmean, -INF),
    ("minmaxrangemv(sizes)", "sizes", lambda values: max(values) - min(values), -INF),
    ("distinctcountmv(sizes)", "sizes", lambda values: len(set(values)), 0),
    ("distinctcountmv(words)", "words", lambda values: len(set(values)), 0),
    ("distinctsummv(sizes)", "sizes", lambda values: float(sum(set(values))), 0.0),
    ("percentilemv(sizes, 90)", "sizes", percentile(90), -INF),
    ("percentile50mv(sizes)", "sizes", percentile(50), -INF),
]
#: Answers of no values that stay with null handling.
NEVER_NULL = ("distinctcount", "segmentpartitioned", "countmv", "histogram")


def values_of(rows: list[Row], name: str, *, nulls: bool) -> Values:
    found: Values = []
    for row in rows:
        value = row[name]
        if value is None and nulls:
            continue
        value = DEFAULTS[name] if value is None else value
        found.extend(value if isinstance(value, list) else [value])
    return found


def expected_of(sql: str, values: Values, model: Callable[[Values], Any], empty: Any, *, nulls: bool) -> Any:
    if values:
        result = model(values)
        return (None if nulls else empty) if result is None else result
    return empty if not nulls or sql.startswith(NEVER_NULL) else None


def same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, int | float) and not isinstance(right, bool):
        if math.isnan(left) or math.isnan(right):
            return math.isnan(left) and math.isnan(right)
        return left == right or math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-7)
    return bool(left == right)


PROFILE = settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model[0])
@PROFILE
@given(rows=TABLES, servers=st.integers(1, 4), seed=st.integers(0, 3), nulls=st.booleans())
def test_the_answer_is_the_models(
    engine: Engine,
    model: tuple[str, str, Callable[[Values], Any], Any],
    rows: list[Row],
    servers: int,
    seed: int,
    nulls: bool,
) -> None:
    sql, name, function, empty = model
    prefix = "set enableNullHandling=true; " if nulls else ""
    expected = expected_of(sql, values_of(rows, name, nulls=nulls), function, empty, nulls=nulls)
    _, [(found,)] = ask(engine, f"{prefix}select {sql} from events", rows, servers, seed)
    assert same(found, expected), (found, expected)

    filtered = [row for row in rows if row["b"]]
    expected = expected_of(sql, values_of(filtered, name, nulls=nulls), function, empty, nulls=nulls)
    query = f"{prefix}select {sql} filter (where b), {sql}, count(*) from events"
    _, [(found, _, _)] = ask(engine, query, rows, servers, seed)
    assert same(found, expected), (found, expected)

    _, groups = ask(engine, f"{prefix}select g, {sql} from events group by g order by g", rows, servers, seed)
    assert [key for key, _ in groups] == sorted({row["g"] for row in rows})
    for key, found in groups:
        group = values_of([row for row in rows if row["g"] == key], name, nulls=nulls)
        assert same(found, expected_of(sql, group, function, empty, nulls=nulls)), key


@PROFILE
@given(rows=TABLES, servers=st.integers(1, 4), picked=st.lists(st.sampled_from(MODELS), min_size=2, max_size=5))
def test_aggregations_beside_each_other_do_not_change_each_other(
    engine: Engine, rows: list[Row], servers: int, picked: list[tuple[str, str, Callable[[Values], Any], Any]]
) -> None:
    listed = ", ".join(sql for sql, *_ in picked)
    _, [found] = ask(engine, f"select {listed} from events", rows, servers)
    for value, (sql, name, function, empty) in zip(found, picked, strict=True):
        assert same(value, expected_of(sql, values_of(rows, name, nulls=False), function, empty, nulls=False)), sql


@PROFILE
@given(rows=TABLES, servers=st.integers(1, 4))
def test_a_row_belongs_to_each_combination_of_its_elements(engine: Engine, rows: list[Row], servers: int) -> None:
    expected: dict[tuple[int, str], Row] = {}
    for row in rows:
        for size in row["sizes"]:
            for word in row["words"]:
                group = expected.setdefault((size, word), {"count": 0, "values": []})
                group["count"] += 1
                group["values"] += row["sizes"]
    query = "select sizes, words, count(*), summv(sizes), percentilemv(sizes, 50) from events group by sizes, words"
    _, found = ask(engine, f"{query} order by sizes, words limit 1000", rows, servers)
    assert found == [
        (*key, group["count"], float(sum(group["values"])), percentile(50)(group["values"]))
        for key, group in sorted(expected.items())
    ]


@PROFILE
@given(rows=TABLES, servers=st.integers(1, 4), nulls=st.booleans())
def test_covariance_takes_pairs_of_which_both_are_there(
    engine: Engine, rows: list[Row], servers: int, nulls: bool
) -> None:
    def filled(row: Row, name: str) -> Any:
        return DEFAULTS[name] if row[name] is None else row[name]

    pairs = [
        (Fraction(filled(row, "x")), Fraction(filled(row, "n")))
        for row in rows
        if not nulls or (row["x"] is not None and row["n"] is not None)
    ]
    prefix = "set enableNullHandling=true; " if nulls else ""
    _, [found] = ask(engine, f"{prefix}select covar_pop(x, n), covar_samp(x, n), corr(x, n) from events", rows, servers)
    count, nothing = len(pairs), None if nulls else -INF
    if not count:
        assert found == (nothing, nothing, nothing)
        return
    mean_x, mean_y = (sum(values) / count for values in zip(*pairs, strict=True))
    cross = sum(((x - mean_x) * (y - mean_y) for x, y in pairs), Fraction(0))
    assert same(found[0], float(cross / count))
    assert same(found[1], float(cross / (count - 1))) if count > 1 else found[1] == nothing


def test_variance_keeps_its_digits_far_from_zero(engine: Engine) -> None:
    """A sum of squares would lose all of them: the values are 1e9, their variance is 2/3."""
    row = {"g": "a", "s": "x", "b": True, "sizes": [1], "words": ["p"], "n": 1, "id": 1, "f": 1.0, "t": 1}
    rows = [{**row, "x": 1e9 + offset} for offset in (-1.0, 0.0, 1.0)] * 10
    _, [(found,)] = ask(engine, "select var_pop(x) from events", rows, 4)
    assert math.isclose(found, 2 / 3, rel_tol=1e-6)


@PROFILE
@given(rows=TABLES, servers=st.integers(1, 4))
def test_values_by_time_are_the_latest_arrived_of_the_extreme_time(
    engine: Engine, rows: list[Row], servers: int
) -> None:
    query = (
        "select firstwithtime(id, t, 'LONG'), lastwithtime(s, t, 'STRING'), lastwithtime(b, t, 'BOOLEAN') from events"
    )
    _, [found] = ask(engine, query, rows, servers)
    if not rows:
        assert found == (-(2**63), "", False)
        return
    ordered = list(enumerate(rows))
    first = min(ordered, key=lambda pair: (pair[1]["t"], -pair[0]))[1]
    last = max(ordered, key=lambda pair: (pair[1]["t"], pair[0]))[1]
    assert found == (first["id"], DEFAULTS["s"] if last["s"] is None else last["s"], last["b"])


@PROFILE
@given(rows=TABLES, servers=st.integers(1, 4))
def test_collected_lists_hold_each_value_as_often_as_it_occurs(engine: Engine, rows: list[Row], servers: int) -> None:
    lists = "array_agg(n, 'INT'), array_agg(s, 'STRING', true), listagg(s, ';'), array_agg(sizes, 'LONG')"
    query = f"select {lists} from events"
    _, [(numbers, words, text, sizes)] = ask(engine, query, rows, servers)
    texts = values_of(rows, "s", nulls=False)
    assert Counter(numbers) == Counter(values_of(rows, "n", nulls=False))
    assert Counter(words) == Counter(set(texts))
    assert Counter(text.split(";")) == Counter(texts or [""])
    assert Counter(sizes) == Counter(values_of(rows, "sizes", nulls=False))


def test_texts_that_spell_numbers_are_numbers_to_those_that_compute_in_double(engine: Engine) -> None:
    row = {"g": "a", "b": True, "sizes": [1], "words": ["p"], "n": 1, "id": 1, "x": 1.0, "f": 1.0, "t": 1}
    rows = [{**row, "s": text} for text in ("2", "3.5", "-1e2")]
    query = "select avg(s), percentile(s, 50), minmaxrange(s), sumprecision(s), distinctsum(s) from events"
    _, [found] = ask(engine, query, rows, 2)
    assert found == (pytest.approx(-31.5), 2.0, 103.5, "-94.5", -94.5)


def test_one_column_with_and_without_casts_has_several_sums(engine: Engine) -> None:
    row = {"g": "a", "b": True, "s": "x", "sizes": [1], "words": ["p"], "id": 1, "f": 1.0, "t": 1}
    rows = [{**row, "n": n, "x": n + 0.75} for n in (1, 2, 3)]
    query = (
        "select x, cast(x as long), count(*), sum(x), sum(cast(x as long)), sum(cast(x as int)), avg(n), sum(n), "
        "max(case when cast(n as double) > 1 then 'a)' else 'b' end = 'a)') "
        "from events group by 1, 2 order by 1 limit 1"
    )
    _, [found] = ask(engine, query, rows, 2)
    assert found == (1.75, 1, 1, 1.75, 1.0, 1.0, 1.0, 1.0, 0.0)


def test_columns_are_named_as_pinot_names_them(engine: Engine) -> None:
    wanted = {
        "PERCENTILE(x, 80)": "percentile(x, 80.0)",
        "percentile95(x)": "percentile95(x)",
        "percentileMV(sizes, 99.99)": "percentilemv(sizes, 99.99)",
        "PERCENTILE_TDIGEST(x, 95, 100)": "percentiletdigest(x, 95.0)",
        "percentileTDigest(x, 95, 200)": "percentiletdigest(x, 95.0, 200)",
        "percentile_kll(x, 90, 400)": "percentilekll(x, 90.0)",
        "distinct_count_hll(n, 12)": "distinctcounthll(n)",
        "mode(n, 'MAX')": "mode(n)",
        "FIRST_WITH_TIME(n, t, 'INT')": "firstwithtime(n,t,'INT')",
        "covar_pop(x, n)": "covarpop(x,n)",
        "count(distinct n)": "distinctcount(n)",
        "count(n)": "count(*)",
        "sum(x) filter (where n > 1)": "sum(x) FILTER(WHERE n > '1')",
        "percentile(x, 50) filter (where b = true)": "percentile(x, 50.0) FILTER(WHERE b = 'true')",
        "percentile(x, 50) + 1": "plus(percentile(x,'50'),'1')",
    }
    names, _ = ask(engine, f"select {', '.join(wanted)} from events", [], 1)
    assert names == list(wanted.values())


@pytest.mark.parametrize("null_handling", ["", "set enableNullHandling = true; "])
def test_a_second_argument_that_is_null_leaves_its_row_out(engine: Engine, null_handling: str) -> None:
    schema = schema_of("t", {"x": "INT", "y": "INT"})
    table = Sql(engine, schema, [{"x": 1, "y": 10}, {"x": 2, "y": 30}, {"x": 900, "y": 99}])
    sql = (
        "select covar_pop(x, nullif(y, 99)), first_with_time(x, nullif(y, 10), 'INT'), "
        "last_with_time(x, nullif(y, 99), 'INT') from t"
    )
    assert table.rows(null_handling + sql) == [[5.0, 2, 2]]


def test_sketches_of_nothing_but_nans_are_those_of_no_rows(engine: Engine) -> None:
    schema = schema_of("t", {"g": "INT", "x": "DOUBLE"})
    rows = [{"g": 1, "x": float("nan")}, {"g": 2, "x": 4.0}, {"g": 2, "x": float("nan")}]
    table = Sql(engine, schema, rows, servers=2)
    columns = "percentile_tdigest(x, 50), percentile_kll(x, 50), percentile_est(x, 50)"
    assert table.rows(f"select g, {columns} from t group by g order by g") == [
        [1, "NaN", "NaN", -(2**63)], [2, 4.0, 4.0, 4],
    ]  # fmt: skip
    assert table.rows(f"select {columns} from t where g = 1") == [["NaN", "NaN", -(2**63)]]
