# SPDX-License-Identifier: Apache-2.0
"""Answers as people and programs read them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from cremant.cli.client import Client
from cremant.cli.sql import print_table, to_arrow
from cremant.cli.status import print_status
from cremant.cli.topic import offsets_json
from cremant.model.errors import Unavailable
from cremant.model.offsets import OffsetRange


def result(names: list[str], types: list[str], rows: list[list[Any]]) -> dict[str, Any]:
    return {"dataSchema": {"columnNames": names, "columnDataTypes": types}, "rows": rows}


def test_pinots_types_become_arrow_types() -> None:
    table = to_arrow(
        result(
            ["i", "l", "d", "b", "s", "big", "many", "at"],
            ["INT", "LONG", "DOUBLE", "BOOLEAN", "STRING", "BIG_DECIMAL", "LONG_ARRAY", "TIMESTAMP"],
            [[1, 2**60, "NaN", True, "x", "1.50", [1, 2], "2026-01-01 00:00:00.0"], [None] * 8],
        )
    )
    assert table.schema.types == [
        pa.int32(), pa.int64(), pa.float64(), pa.bool_(), pa.string(), pa.string(), pa.list_(pa.int64()), pa.string(),
    ]  # fmt: skip
    assert table.column("l").to_pylist() == [2**60, None]
    assert str(table.column("d")[0]) == "nan"


def test_brackets_in_data_are_data(capsys: pytest.CaptureFixture[str]) -> None:
    print_table({"resultTable": result(["[red]x[/]"], ["STRING"], [["[bold]y[/]"], [None]]), "timeUsedMs": 3})
    printed = capsys.readouterr()
    assert "[red]x[/]" in printed.out
    assert "[bold]y[/]" in printed.out
    assert "null" in printed.out
    assert "2 rows" in printed.err


def test_neighbouring_ranges_of_offsets_are_joined() -> None:
    assert offsets_json({1: [OffsetRange(5, 7), OffsetRange(7, 9), OffsetRange(12, 13)], 0: [OffsetRange(0, 1)]}) == {
        "0": [[0, 1]],
        "1": [[5, 9], [12, 13]],
    }


def test_a_controller_that_does_not_answer_is_said_with_the_way_out() -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(Unavailable) as caught:
        client.view()
    assert "http://127.0.0.1:9" in caught.value.message
    assert "cremant up" in caught.value.hint


def test_a_table_in_trouble_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    replica = {
        "live": True,
        "visibleOffset": 5,
        "epoch": 3,
        "tailRows": 5,
        "error": "E-4: epoch 4 counts 7 rows, found 6",
    }
    table = {
        "name": "shop", "state": "backoff", "rows": 12_345, "epoch": 3, "lagRows": 8,
        "segments": {"online": 1, "done": 2, "withoutReplica": ["shop__0__0__20260101T0000Z"]},
        "pipeline": {"report": {"error": "no space left", "rejectedTotal": 2}},
        "partitions": [{"partition": 0, "freshnessLagMs": 25_000, "replicas": {"Server_a_1": replica}}],
    }  # fmt: skip
    instances = [{"role": "server", "id": "Server_a_1", "url": "http://a:1", "live": False}]
    print_status({"instances": instances, "tables": [table]})
    printed = capsys.readouterr().out
    for word in ("dead", "backoff", "12,345", "1/2", "8 rows", "25 s", "no space left", "2 records rejected", "E-4"):
        assert word in printed


def test_an_empty_cluster_has_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    print_status({"instances": [], "tables": []})
    assert "no tables" in capsys.readouterr().out
