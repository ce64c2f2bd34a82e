# SPDX-License-Identifier: Apache-2.0
"""Files that `cremant table create` takes, and what it says about those it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cremant.cli.table_files import read_table_files
from cremant.model.errors import InvalidConfig, NotFound

SCHEMA = {"schemaName": "t", "dimensionFieldSpecs": []}
TABLE = {"tableName": "t", "tableType": "REALTIME"}


def files(directory: Path, *documents: Any) -> list[str]:
    paths = []
    for number, document in enumerate(documents):
        path = directory / f"{number}.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
        paths.append(str(path))
    return paths


@pytest.mark.parametrize(
    "documents",
    [
        (SCHEMA, TABLE),
        (TABLE, SCHEMA),
        ({"tableName": "t", "schema": SCHEMA, "realtime": TABLE},),
        ({"schema": SCHEMA, "table": TABLE},),
    ],
)
def test_schema_and_table_in_one_file_or_two_in_any_order(tmp_path: Path, documents: tuple[Any, ...]) -> None:
    assert read_table_files(files(tmp_path, *documents)) == (SCHEMA, TABLE)


def test_one_alone(tmp_path: Path) -> None:
    assert read_table_files(files(tmp_path, SCHEMA)) == (SCHEMA, None)
    assert read_table_files(files(tmp_path, TABLE)) == (None, TABLE)


@pytest.mark.parametrize(
    ("documents", "telling"),
    [
        (("{",), "not JSON"),
        (('{"a": 1,}',), "line 1 column"),
        (("[]",), "expected a JSON object"),
        (({"a": 1},), "neither a schema nor a table config"),
        ((SCHEMA, SCHEMA), "second schema"),
        (({"schema": SCHEMA, "realtime": TABLE}, TABLE), "second table config"),
        (({"tableName": "t", "schema": SCHEMA, "offline": TABLE},), "offline"),
        (({"schema": "rows", "realtime": TABLE},), "the schema must be a JSON object, found str"),
        (({"schema": SCHEMA, "table": [TABLE]},), "the table config must be a JSON object, found list"),
        (("[" * 100_000,), "not JSON"),
    ],
)
def test_what_is_wrong_is_said_with_the_file(tmp_path: Path, documents: tuple[Any, ...], telling: str) -> None:
    with pytest.raises(InvalidConfig, match=telling) as raised:
        read_table_files(files(tmp_path, *documents))
    assert ".json" in raised.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"nowhere\.json: No such file"):
        read_table_files([str(tmp_path / "nowhere.json")])
