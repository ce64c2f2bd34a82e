# SPDX-License-Identifier: Apache-2.0
"""Texts that nobody should send: each is refused with a code and a reason, or planned; quickly, and never with a crash.

How the ones that are planned run: tests/unit/exec/test_hostile_queries.py.
"""

from __future__ import annotations

import pytest
from tests.unit.sql.test_plans import NOW_MS, lookup

from cremant.model.errors import QueryError
from cremant.model.limits import QUERY_ITEMS_MAX, QUERY_TEXT_CHARS_MAX
from cremant.sql.plan import Plan
from cremant.sql.planner import Planner

MANY = 100_000


def plan(text: str) -> Plan:
    return Planner().plan(text, "", lookup, NOW_MS)


DEEP = {
    "parentheses": "select " + "(" * MANY + "1" + ")" * MANY + " from gold",
    "functions": "select " + "upper(" * MANY + "country" + ")" * MANY + " from gold",
    "not": "select count(*) from gold where " + "not " * MANY + "ok",
    "signs": "select " + "- " * MANY + "clicks from gold",
    "case": "select " + "case when ok then " * 20_000 + "1" + " end" * 20_000 + " from gold",
    "cast": "select " + "cast(" * 5_000 + "1" + " as int)" * 5_000 + " from gold",
    "arithmetic": "select 1" + "+clicks" * MANY + " from gold",
    "and": "select count(*) from gold where clicks = 1" + " and amount = 1" * 50_000,
    "or": "select count(*) from gold where clicks = 1" + " or amount = 1" * 50_000,
    "between": "select count(*) from gold where " + "clicks between " * 5_000 + "1",
    "brackets": "select " + "tags[" * MANY + "1" + "]" * MANY + " from gold",
    "subqueries": "select * from " + "(select * from " * 5_000 + "gold" + ")" * 5_000,
    "unions": "select 1 from gold" + " union all select 1 from gold" * 3_000,
    "ten thousand unions": "select 1 from gold" + " union select 1 from gold" * 10_000,
    "ten thousand ors": "select count(*) from gold where clicks = 1" + " or clicks = 2" * 10_000,
    "condition in a text": "select count(*) from gold where json_match(country, '" + "(" * MANY + "')",
    "joins": "select 1 from gold" + " join gold" * 5_000,
    "with": "with " + ",".join(f"a{index} as (select 1)" for index in range(3_000)) + " select 1",
    "is null": "select count(*) from gold where country" + " is null" * 5_000,
    "concatenation": "select country" + " || country" * 3_000 + " from gold",
    "having": "select count(*) from gold having " + "(" * 3_000 + "count(*) > 1" + ")" * 3_000,
    "items": "select " + ",".join(["clicks"] * (QUERY_ITEMS_MAX + 1)) + " from gold",
}


@pytest.mark.parametrize("name", DEEP)
def test_what_is_nested_or_chained_without_end_is_refused(name: str) -> None:
    with pytest.raises(QueryError) as raised:
        plan(DEEP[name])
    assert int(raised.value.code) in (150, 700)
    assert len(str(raised.value)) < 2_000


def test_functions_inside_each_other_do_not_multiply_their_text() -> None:
    for opening, core, closing in (
        ("datetrunc('day', ", "ts", ")"), ("datetrunc('week', ", "ts", ")"), ("round(", "ts", ", 60000)"),
        ("(case when ", "clicks", " = 1.5 then 1 else 2 end)"),
        ("rounddecimal(", "amount", ", 2)"), ("lpad(", "country", ", 3, 'x')"),
        ("(case when ", "clicks", " between 1.5 and 7 then 1 else 2 end)"),
        ("(case when ", "clicks", " in (1.5, 2.5) then 1 else 2 end)"),
    ):  # fmt: skip
        sql = plan(f"select {opening * 14}{core}{closing * 14} from gold").server_sql
        assert len(sql) < 40_000, opening


def test_a_function_that_must_repeat_its_argument_takes_a_short_one() -> None:
    with pytest.raises(QueryError, match="too long"):
        plan("select " + "intdivorzero(1, " * 14 + "clicks" + ")" * 14 + " from gold")


LISTS = {
    "numbers": ("user_id", [str(index) for index in range(10_000)]),
    "negative numbers": ("clicks", [str(-index) for index in range(10_000)]),
    "texts": ("country", [f"'it''s {index}'" for index in range(10_000)]),
    "doubles": ("amount", [f"{index}.25" for index in range(10_000)]),
    "elements": ("sizes", [str(index) for index in range(10_000)]),
    "texts among elements": ("tags", [f"'{index}'" for index in range(10_000)]),
}


@pytest.mark.parametrize("name", LISTS)
def test_ten_thousand_values_in_a_list_are_planned(name: str) -> None:
    column, values = LISTS[name]
    for word in ("in", "not in"):
        found = plan(f"select count(*) from gold where {column} {word} ({', '.join(values)})")
        assert found.server_sql.count(",") >= 9_999
        assert not found.prune


def test_a_list_with_anything_but_literals_is_parsed_as_ever() -> None:
    assert "OR" in plan("select count(*) from gold where clicks in (1, user_id)").server_sql
    assert "(1, 2)" in plan("select count(*) from gold where clicks in (1, 1 + 1)").server_sql
    for text in ("()", "(1", "(,)", "(-)", "(- 'a')", "(1 2)", "1"):
        with pytest.raises(QueryError):
            plan(f"select count(*) from gold where clicks in {text}")


@pytest.mark.parametrize(("text", "code", "message"), [
    ("", 150, "executable statement not found"), ("   \n", 150, "executable statement not found"),
    (";;;", 150, "executable statement not found"), ("-- nothing", 150, "executable statement not found"),
    ("/* nothing */", 150, "executable statement not found"),
    ("-- a\n/* b */ -- c\n;\n", 150, "executable statement not found"),
    ("\ufeff", 150, ""), ("\u00a0\u2003", 150, ""), ("select count(*) from größe", 190, "TableDoesNotExist"),
    ("select 'abc from gold", 150, "the quote ' opened at line 1, column 8 is not closed"),
    ('select "abc\nfrom gold', 150, 'the quote " opened at line 1, column 8 is not closed'),
    ("select 1 /* from gold", 150, "the comment /* opened at line 1, column 10 is not closed"),
    ("select \0 from gold", 710, "Unknown columnName"), ("select größe from gold", 710, "Unknown columnName 'größe'"),
    ("select " + "," * 1000 + " from gold", 150, "names no columns"), ("drop table gold", 150, "DROP"),
    ("select * from gold limit 99999999999", 700, "LIMIT above"), ("select * from gold limit -1", 150, "LIMIT takes"),
    ("select 1; select 2", 150, "only one query"), ("select * from gold, gold", 700, "JOIN"),
    ("select * from gold where text_match(country, 'x')", 700, "TEXT_MATCH is not supported"),
    ("x" * (QUERY_TEXT_CHARS_MAX + 1), 150, "characters, at most"),
    ("select count(*) from gold where clicks in (select 1)", 700, "a subquery in IN"),
    ("select count(*)\n  from gold\n where clicks = = 1", 150,
     "line 3, column 17\n   where clicks = = 1\n                  ^"),
])  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(text: str, code: int, message: str) -> None:
    with pytest.raises(QueryError) as raised:
        plan(text)
    assert (int(raised.value.code), message in str(raised.value)) == (code, True), str(raised.value)


def test_odd_characters_are_only_characters() -> None:
    assert "'a\0b'" in plan("select count(*) from gold where country = 'a\0b'").server_sql
    assert "'日本 😀'" in plan("select count(*) from gold where country = '日本 😀'").server_sql
    assert "'it''s -- /* \" `'" in plan("select count(*) from gold where country = 'it''s -- /* \" `'").server_sql
    assert len(plan("select '" + "x" * 1_000_000 + "', country from gold").server_sql) > 1_000_000


@pytest.mark.parametrize(("text", "options", "place"), [
    ("select '\ud800' from gold", "", "the query has half of a surrogate pair, \\ud800, at line 1, column 9\n  select"),
    ("select 1,\n \"a\udc00\"", "", "\\udc00, at line 2, column 4"), ("select count(*) from \ud83d", "", "column 22"),
    ("select 1 -- \udfff", "", "column 13"), ("set a = '\ud800'; select 1", "", "column 10"),
    ("\ud800" * 5, "", "at line 1, column 1\n  ?????\n"),
    ("select 1", "timeoutMs=1;a=\udbff", "queryOptions has half of a surrogate pair, \\udbff, at line 1, column 15"),
])  # fmt: skip
def test_half_of_a_surrogate_pair_is_refused_with_its_place(text: str, options: str, place: str) -> None:
    with pytest.raises(QueryError) as raised:
        Planner().plan(text, options, lookup, NOW_MS)
    assert (int(raised.value.code), place in str(raised.value)) == (150, True), str(raised.value)
    assert str(raised.value).encode()


@pytest.mark.parametrize("rest", [" LIMIT 3", " x", "; SELECT 1", ") OR (1 = 1", " GROUP BY a"])
def test_text_after_the_filter_of_json_match_is_refused_when_the_query_is_planned(rest: str) -> None:
    with pytest.raises(QueryError, match="JSON_MATCH: cannot read the filter") as raised:
        plan(f"""select count(*) from gold where json_match(country, '"$.a" = 1{rest}')""")
    assert int(raised.value.code) == 700


def test_numbers_beyond_64_bits_mean_what_they_say() -> None:
    found = plan("select count(*) from gold where clicks > 99999999999999999999 or user_id < 1e999 or amount > -1e999")
    assert "99999999999999999999" not in found.server_sql
    assert [column.type for column in plan("select 99999999999999999999, 1e999, -3000000000").result] == [
        "BIG_DECIMAL", "DOUBLE", "LONG",
    ]  # fmt: skip


@pytest.mark.parametrize("clause", ["limit", "limit 1 offset"])
def test_a_limit_of_thousands_of_digits_is_refused(clause: str) -> None:
    with pytest.raises(QueryError, match="above 2147483647"):
        plan(f"select clicks from gold {clause} {'9' * 5000}")


def test_plans_are_kept_while_they_are_used() -> None:
    planner = Planner(cached_max=2)

    def planned(text: str) -> Plan:
        return planner.plan(text, "", lookup, NOW_MS)

    often = planned("select ok from gold")
    for number in range(5):
        planned(f"select clicks from gold limit {number}")
        assert planned("select ok from gold") is often


EXPLAINED = (
    ("explain plan for select country, sum(amount) from gold where user_id = 7 group by country", (
        ("BROKER_REDUCE(limit:10)", 1, 0),
        ("COMBINE_GROUP_BY", 2, 1),
        ("PLAN_START(numSegmentsForThisPlan:{segments})", -1, -1),
        ("GROUP_BY(groupKeys:country, aggregations:sum(amount))", 3, 2),
        ("PROJECT(country, amount)", 4, 3),
        ("DOC_ID_SET", 5, 4),
        ("FILTER_FULL_SCAN(operator:EQ,predicate:user_id = '7')", 6, 5),
    )),
    ("EXPLAIN PLAN FOR select 1", (("BROKER_EVALUATE", 0, -1),)),
    ("set a=1; explain plan for select upper(country) from gold where (clicks > 1 or not tags = 'a') and ok "
     "order by ts", (
        ("BROKER_REDUCE(sort:[ts ASC],limit:10)", 1, 0),
        ("COMBINE_SELECT_ORDERBY", 2, 1),
        ("PLAN_START(numSegmentsForThisPlan:{segments})", -1, -1),
        ("SELECT_ORDERBY(selectList:upper(country), ts)", 3, 2),
        ("TRANSFORM(upper(country), ts)", 4, 3),
        ("PROJECT(country, ts)", 5, 4),
        ("DOC_ID_SET", 6, 5),
        ("FILTER_AND", 7, 6),
        ("FILTER_OR", 8, 7),
        ("FILTER_FULL_SCAN(operator:RANGE,predicate:clicks > '1')", 9, 8),
        ("FILTER_NOT", 10, 8),
        ("FILTER_FULL_SCAN(operator:EQ,predicate:tags = 'a')", 11, 10),
        ("FILTER_FULL_SCAN(operator:EQ,predicate:ok = 'true')", 12, 7),
    )),
)  # fmt: skip


@pytest.mark.parametrize(("text", "rows"), EXPLAINED, ids=[text[:50] for text, _ in EXPLAINED])
def test_explain_gives_pinots_rows(text: str, rows: tuple[tuple[str, int, int], ...]) -> None:
    found = plan(text)
    assert found.explain == rows
    assert [(column.name, column.type) for column in found.result] == [
        ("Operator", "STRING"), ("Operator_Id", "INT"), ("Parent_Id", "INT"),
    ]  # fmt: skip
