# SPDX-License-Identifier: Apache-2.0
"""Queries at the bounds of what is planned: the engine answers them, or refuses them alone; the process lives on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.sqlrun import Sql, schema_of

from cremant.exec.engine import Engine
from cremant.model.errors import QueryError

ROWS = [
    {"i": 7, "d": 1.5, "s": "it's", "ss": ["k1", "k9999"], "ii": [3, 9999], "b": True, "ts": 1700000000123},
    {"i": 70000, "d": 2.5, "s": "q\0", "ss": ["a"], "ii": [-1], "b": False, "ts": 0},
]


@pytest.fixture(scope="module")
def table() -> Iterator[Sql]:
    engine = Engine(threads=2, memory_bytes=256 * 1024 * 1024)
    columns = {
        "i": "INT",
        "d": "DOUBLE",
        "s": "STRING",
        "ss": "STRING[]",
        "ii": "INT[]",
        "b": "BOOLEAN",
        "ts": "TIMESTAMP",
    }
    yield Sql(engine, schema_of("t", columns), ROWS)
    engine.close()


@pytest.mark.parametrize(("column", "values", "expected"), [
    ("i", [str(index) for index in range(10_000)], 1), ("d", [f"{index}.5" for index in range(10_000)], 2),
    ("s", [f"'{index}'" for index in range(9_999)] + ["'it''s'"], 1),
    ("ii", [str(index) for index in range(10_000)], 1),
    ("ss", [f"'k{index}'" for index in range(10_000)], 1),
])  # fmt: skip
def test_ten_thousand_values_in_a_list(table: Sql, column: str, values: list[str], expected: int) -> None:
    assert table.count(f"{column} in ({','.join(values)})") == expected
    assert table.count(f"{column} not in ({','.join(values)})") == 2 - expected


def test_a_hundred_thousand_values_in_a_list(table: Sql) -> None:
    assert table.count(f"i in ({','.join(map(str, range(100_000)))})") == 2


@pytest.mark.parametrize("sql", [
    "select " + "upper(" * 20 + "s" + ")" * 20 + " from t",
    "select " + "abs(" * 20 + "d" + ")" * 20 + " from t",
    "select " + "encodeurl(" * 20 + "s" + ")" * 20 + " from t",
    "select " + "datetrunc('day', " * 20 + "ts" + ")" * 20 + " from t",
    "select " + "d + " * 45 + "1 from t",
    "select " + "concat(s, " * 20 + "s" + ")" * 20 + " from t",
    "select count(*) from t where " + "not (b and " * 20 + "b" + ")" * 20,
    "select " + "(case when " * 16 + "i" + " = 1.5 then 1 else 2 end)" * 16 + " from t",
    "select " + "case when b then " * 40 + "i" + " else 1 end" * 40 + " from t",
    "select case " + " ".join(f"when i = {index} then {index}" for index in range(200)) + " else -1 end from t",
    "select count(*) from t where " + " or ".join(f"(i = {index} and d = {index}.5)" for index in range(600)),
    "select count(*) from t where " + " and ".join(f"s not like '%{index}%'" for index in range(900)),
    "select " + ",".join(["i"] * 5_000) + " from t",
    "select '" + "x" * 1_000_000 + "', i from t",
    "select count(*) from t group by " + ",".join(f"i + {index}" for index in range(60)),
    "select count(*) from t where i > 99999999999999999999 or i = -99999999999999999999 or d > 1e999",
    "select i from t limit 2147483647", "select i from t order by i limit 5 offset 2147483647",
    "select json_extract_scalar('" + "[" * 400 + "]" * 400 + "', '$..*', 'STRING') from t",
    "select '日本語 😀', 'a\0b' from t where s <> 'q\0'",
    "select count(*) from t where regexp_like(s, '" + "(a|b)*" * 150 + "')",
    "select s from t where regexp_like(s, '" + "(a*)*" * 20 + "$')",
])  # fmt: skip
def test_the_engine_bears_it(table: Sql, sql: str) -> None:
    table.rows(sql)


def test_names_may_be_of_any_letters(table: Sql) -> None:
    columns = {
        "größe": "INT",
        "数量": "LONG",
        "имя": "STRING",
        "a b": "INT",
        'q"uote': "INT",
        "sélect": "INT",
        "😀": "INT",
    }
    row = {"größe": 1, "数量": 2, "имя": "x", "a b": 3, 'q"uote': 4, "sélect": 5, "😀": 6}
    asked = Sql(table._engine, schema_of("таблица", columns), [row, {**row, "größe": 7}])
    assert asked.rows(
        'select größe, "数量", имя, `a b`, "q""uote", sélect, "😀" as "é 1" from таблица where größe < 7'
    ) == [[1, 2, "x", 3, 4, 5, 6]]
    assert asked.rows('select имя, sum("数量") from таблица group by имя order by имя') == [["x", 4.0]]
    assert asked.plan('select max(größe) as "é 1 😀" from таблица').result[0].name == "é 1 😀"


def test_a_table_of_thousands_of_columns(table: Sql) -> None:
    names = [f"c{index:04d}" for index in range(3_000)]
    asked = Sql(table._engine, schema_of("wide", dict.fromkeys(names, "INT")), [{name: 7 for name in names}])
    assert asked.rows("select * from wide") == [[7] * len(names)]
    assert asked.rows("select c2999, count(*) from wide where c1500 = 7 group by c2999") == [[7, 1]]


@pytest.mark.parametrize(("sql", "code"), [
    ("select count(*) from t where regexp_like(s, '((a{1,100}){1,100}){1,100}')", 200),
    ("select regexp_replace(s, '((a{1,100}){1,100}){1,100}', 'x') from t", 200),
    ("select repeat(repeat(repeat(s, 1000), 1000), 1000) from t", 200),
    ("select lpad(s, 2147483647, 'x') from t", 200),
    ("select " + "replace(" * 12 + "s" + ", 't', 'tttttttttt')" * 12 + " from t", 200),
    ("select generatelongarray(0, 100000000000, 1) from t", 700),
    ("select s from t where regexp_like(s, '" + "a" * 2_000 + "')", 700),
    ("select valuein(ss, '" + "x" * 2_000 + "') from t", 700),
])  # fmt: skip
def test_what_would_grow_without_bound_fails_alone(table: Sql, sql: str, code: int) -> None:
    with pytest.raises(QueryError) as raised:
        table.rows(sql)
    assert int(raised.value.code) == code, str(raised.value)
    assert table.count("i = 7") == 1
