# SPDX-License-Identifier: Apache-2.0
"""Answers as people and programs read them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from cremant.cli.client import Client
from cremant.cli.sql import print_table, to_arrow
from cremant.cli.status import describe
from cremant.cli.topic import offsets_json
from cremant.model.cluster import ClusterView
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


def test_an_empty_cluster_has_a_status() -> None:
    assert describe(ClusterView(version=1, controller_nonce="x"), "http://x", 0) == {
        "controller": "http://x",
        "roles": [],
        "tables": [],
    }
