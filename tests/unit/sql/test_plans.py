# SPDX-License-Identifier: Apache-2.0
"""Every fixture: a query, and exactly what servers and broker are asked to run for it.

A case in fixtures/*.sql is a block of `key: text` lines, blocks separated by blank lines. `query` is planned against
the table below; then `server`, `reduce`, `columns`, `result`, `prune` or `error` must be as written (what is
not written is not compared). Rewrite the expectations by running this file: `python tests/unit/sql/test_plans.py`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cremant.model.errors import QueryError
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.sql.binder import TableInfo
from cremant.sql.planner import Planner, find_table

FIXTURES = Path(__file__).parent / "fixtures"
NOW_MS = 1_700_000_000_000
KEYS = ("server", "reduce", "columns", "result", "prune", "error")


def column(name: str, kind: DataType, field: FieldType = FieldType.DIMENSION, *, multi: bool = False) -> FieldSpec:
    time = {"format": "1:MILLISECONDS:TIMESTAMP", "granularity": "1:MILLISECONDS"}
    extra = time if field is FieldType.DATE_TIME else {}
    return FieldSpec(name=name, data_type=kind, field_type=field, single_value=not multi, **extra)


SCHEMA = Schema(
    name="gold",
    fields=(
        column("user_id", DataType.LONG),
        column("country", DataType.STRING),
        column("tags", DataType.STRING, multi=True),
        column("sizes", DataType.INT, multi=True),
        column("ok", DataType.BOOLEAN),
        column("raw", DataType.BYTES),
        column("price", DataType.BIG_DECIMAL),
        column("ratio", DataType.FLOAT),
        column("clicks", DataType.INT, FieldType.METRIC),
        column("amount", DataType.DOUBLE, FieldType.METRIC),
        column("ts", DataType.TIMESTAMP, FieldType.DATE_TIME),
    ),
)
TABLE = TableInfo("gold", SCHEMA, stores_nulls=True, incarnation="1", version=1)
#: The same as an upsert table.
KEYED = replace(TABLE, name="keyed", upsert=True)


def lookup(name: str) -> TableInfo:
    return KEYED if find_table(name, ["gold", "keyed"]) == "keyed" else TABLE


def outcome(query: str) -> dict[str, str]:
    try:
        plan = Planner().plan(query, "", lookup, NOW_MS)
    except QueryError as error:
        return {"error": f"{int(error.code)} {error}".replace("\n", "\\n")}
    found = {
        "server": plan.server_sql,
        "reduce": plan.reduce_sql or "",
        "columns": ", ".join(plan.columns),
        "result": ", ".join(f"{column.name} {column.type}" for column in plan.result),
        "prune": "; ".join(f"{term.column} {term.op} {list(term.values)}" for term in plan.prune),
    }
    return {key: text for key, text in found.items() if text}


def blocks(path: Path) -> list[list[str]]:
    return [block.splitlines() for block in path.read_text().strip().split("\n\n")]


def parse_block(block: list[str]) -> dict[str, str]:
    lines = [line for line in block if line and not line.startswith("#")]
    return {key: text.strip() for key, _, text in (line.partition(":") for line in lines)}


CASES = [
    pytest.param(case, id=f"{path.stem}: {case['query'][:60]}")
    for path in sorted(FIXTURES.glob("*.sql"))
    for case in (parse_block(block) for block in blocks(path))
    if "query" in case
]


@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_as_the_fixture_says(case: dict[str, str]) -> None:
    found = outcome(case["query"])
    expected = {key: case[key] for key in KEYS if key in case}
    assert expected, "a fixture without expectations proves nothing; run this file to write them"
    assert {key: found.get(key, "") for key in expected} == expected
    assert ("error" in found) == ("error" in expected), found


def test_an_order_of_no_rows_has_no_first_ones() -> None:
    for order in ("ASC", "DESC"):
        query = f"SELECT clicks FROM gold ORDER BY clicks {order} LIMIT"
        assert Planner().plan(f"{query} 0", "", lookup, NOW_MS).shortcut.top == ""
        assert Planner().plan(f"{query} 3", "", lookup, NOW_MS).shortcut.top == "clicks"


def rewrite() -> None:
    for path in sorted(FIXTURES.glob("*.sql")):
        texts = []
        for block in blocks(path):
            kept = [line for line in block if line.startswith("#") or line.startswith("query:")]
            case = parse_block(block)
            if "query" in case:
                kept += [f"{key}: {text}" for key, text in outcome(case["query"]).items()]
            texts.append("\n".join(kept))
        path.write_text("\n\n".join(texts) + "\n")


if __name__ == "__main__":
    sys.exit(rewrite())
