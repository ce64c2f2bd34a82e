# SPDX-License-Identifier: Apache-2.0
"""EXPLAIN FRESHNESS FOR a query: what it is planned as; what is no such statement says what is wrong."""

from __future__ import annotations

import pytest
from tests.unit.sql.test_plans import NOW_MS, lookup

from cremant.model.errors import QueryError
from cremant.sql.explain import FRESHNESS_COLUMNS
from cremant.sql.plan import Plan
from cremant.sql.planner import Planner


def plan(text: str) -> Plan:
    return Planner().plan(text, "", lookup, NOW_MS)


@pytest.mark.parametrize(
    "text",
    [
        "EXPLAIN FRESHNESS FOR SELECT count(*) FROM gold WHERE user_id = 7",
        "set a = 1; explain freshness for select country from gold",
        "explain  freshness\nfor select distinct country from gold;",
    ],
)
def test_the_query_is_planned_and_its_answer_has_other_columns(text: str) -> None:
    found = plan(text)
    assert found.explains_freshness
    assert (found.explain, found.table, found.result) == (None, "gold", FRESHNESS_COLUMNS)


def test_the_query_itself_is_another_plan() -> None:
    planner = Planner()
    for text, explains in (("", False), ("EXPLAIN FRESHNESS FOR ", True), ("EXPLAIN PLAN FOR ", False), ("", False)):
        found = planner.plan(text + "select clicks from gold where user_id = 7", "", lookup, NOW_MS)
        assert (found.explains_freshness, found.explain is not None) == (explains, "PLAN" in text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("EXPLAIN FRESHNESS SELECT clicks FROM gold", "expected EXPLAIN FRESHNESS FOR and a SELECT"),
        ("EXPLAIN FRESHNESS FOR", "expected EXPLAIN FRESHNESS FOR and a SELECT"),
        ("EXPLAIN FRESHNESS", "expected EXPLAIN FRESHNESS FOR and a SELECT"),
        ("EXPLAIN FRESNESS FOR SELECT clicks FROM gold", "PLAN FOR or FRESHNESS FOR"),
        ("EXPLAIN SELECT clicks FROM gold", "found 'SELECT clicks'"),
        ("EXPLAIN FRESHNESS FOR SELECT 1", "reads no table"),
        ("EXPLAIN FRESHNESS FOR SELECT nope FROM gold", "nope"),
    ],
)
def test_bad_statements_say_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(QueryError) as error:
        plan(text)
    assert said in str(error.value)
