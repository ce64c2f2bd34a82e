# SPDX-License-Identifier: Apache-2.0
"""Answers as people and programs read them."""

from __future__ import annotations

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pyarrow as pa
import pytest

from cremant.cli.arrow import to_arrow
from cremant.cli.client import Client
from cremant.cli.console import out
from cremant.cli.copies import copies
from cremant.cli.find import Target
from cremant.cli.segment import story
from cremant.cli.sql import error_of, print_table
from cremant.cli.status import print_status, problems, status
from cremant.cli.table import print_partitions
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
    with Client("http://127.0.0.1:9", "http://127.0.0.1:9") as client, pytest.raises(Unavailable) as caught:
        client.query("SELECT 1")
    assert "cremant status" in caught.value.hint


def test_another_program_that_answers_is_said_to_be_one() -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_arguments: object) -> None:
            """Nothing on stderr."""

    with HTTPServer(("127.0.0.1", 0), Page) as other:
        threading.Thread(target=other.handle_request, daemon=True).start()
        with Client(f"http://127.0.0.1:{other.server_port}") as client, pytest.raises(Unavailable) as caught:
            client.status()
    assert "is no controller" in caught.value.message


def test_a_broker_that_is_taken_for_a_controller_is_said_to_be_none() -> None:
    class Broker(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()
            self.wfile.write(b'{"code": 404, "error": "HTTP 404 Not Found"}')

        def log_message(self, *_arguments: object) -> None:
            """Nothing on stderr."""

    with HTTPServer(("127.0.0.1", 0), Broker) as other:
        threading.Thread(target=other.handle_request, daemon=True).start()
        with Client(f"http://127.0.0.1:{other.server_port}") as client, pytest.raises(Unavailable) as caught:
            client.status()
    assert f"127.0.0.1:{other.server_port}/ is no controller: it has no /status" in caught.value.message


@pytest.mark.parametrize(
    ("sql", "message", "told"),
    [
        (
            "selec 1",
            "SQLParsingError: Caught exception while parsing query: selec 1: only SELECT",
            "SQLParsingError: only SELECT (code 150)",
        ),
        (
            "select a\nfrom",
            "Caught exception while parsing query: select a\nfrom: Expected table near 'from' at line 2, column 4\n"
            "  from\n  ^",
            "Expected table near 'from' at line 2, column 4 (code 150)\n  from\n  ^",
        ),
        (
            "select b from t",
            "Unknown columnName 'b' found in the query",
            "Unknown columnName 'b' found in the query (code 150)\n  select b from t\n         ^",
        ),
        ("select 1", "no place", "no place (code 150)"),
    ],
)
def test_an_error_of_a_query_has_its_code_and_below_it_the_place(sql: str, message: str, told: str) -> None:
    assert error_of({"exceptions": [{"errorCode": 150, "message": message}]}, sql).message == told


def test_names_of_servers_and_segments_are_whole_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(out, "_width", 80)
    replica = {"live": True, "visibleOffset": 5, "epoch": 123_456, "tailRows": 12_345_678, "error": ""}
    numbers = dict.fromkeys(("streamEnd", "visibleOffset", "lagRows", "consumingRows"), 12_345_678)
    replicas = {"Server_127.0.0.1_8097": replica, "Server_127.0.0.1_8098": replica}
    print_partitions({"partitions": [{"partition": 0, **numbers, "replicas": replicas}]})
    printed = capsys.readouterr().out
    assert "127.0.0.1_8097" in printed
    assert "127.0.0.1_8098" in printed


def test_a_controller_behind_a_name_without_port_has_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Client, "status", lambda _client: {"instances": [], "tables": []})
    status(Target(controller="https://cremant.example", broker=None, log_dir=None), as_json=False)
    assert "Controller_cremant.example_443" in capsys.readouterr().out


def test_a_table_in_trouble_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    replica = {
        "live": True,
        "visibleOffset": 5,
        "epoch": 3,
        "tailRows": 5,
        "error": "E-4: epoch 4 counts 7 rows, found 6",
        "state": "stopped",
    }
    full = {**replica, "error": None, "state": "tailQuota"}
    table = {
        "name": "shop", "state": "backoff", "rows": 12_345, "epoch": 3, "lagRows": 8,
        "segments": {"online": 1, "done": 2, "withoutReplica": ["shop__0__0__20260101T0000Z"],
                     "withoutCopy": 0, "singleCopy": 3, "lost": ["shop__0__1__20260101T0000Z"], "uploadBacklog": 4,
                     "uploadError": "the store hangs"},
        "pipeline": {"report": {"error": "no space left", "rejectedTotal": 2}},
        "partitions": [
            {"partition": 0, "freshnessLagMs": 25_000, "replicas": {"Server_a_1": replica, "Server_a_2": full}},
        ],
    }  # fmt: skip
    dead = {"role": "server", "url": "http://a:1", "live": False, "enabled": True}
    instances = [
        {**dead, "id": "Server_a_1", "heardMsAgo": 200_000_000}, {**dead, "id": "Server_a_2", "heardMsAgo": None},
        {**dead, "id": "Server_a_3", "live": True, "heardMsAgo": 0, "enabled": False},
    ]  # fmt: skip
    print_status({"instances": instances, "tables": [table]})
    printed = capsys.readouterr().out
    for word in ("dead, heard 2 d ago", "dead, not heard since the controller started", "disabled: it gets nothing new",
                 "backoff", "12,345", "1/2", "8 rows", "25 s", "no space left", "2 records rejected", "E-4",
                 "3 sealed segments have a single copy", "lost, as shop__0__1", "4 sealed segments wait for their",
                 "the store hangs", "on Server_a_2 takes no more rows (tailQuota)"):  # fmt: skip
        assert word in printed


def test_a_replica_that_starts_says_how_far_it_has_caught_up() -> None:
    replica = {"live": True, "error": None, "state": "catchingUp"}
    table = {
        "segments": {"withoutReplica": [], "lost": [], "withoutCopy": 0, "singleCopy": 0, "uploadBacklog": 0},
        "pipeline": {"report": None},
        "partitions": [
            {"partition": 3, "replicas": {
                "Server_a_1": {**replica, "catchUp": {"logRecordsDone": 12_000, "logRecordsOf": 50_000}},
                "Server_b_1": {**replica, "state": "consuming", "catchUp": None},
            }},
        ],
    }  # fmt: skip
    assert problems(table) == ["partition 3 on Server_a_1 catches up: 12,000 of 50,000 records of its log"]


def test_upsert_tables_have_a_line_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    table = {
        "name": "accounts", "state": "running", "rows": 1_500, "epoch": 41, "lagRows": 0, "partitions": [],
        "segments": {"online": 1, "done": 1, "withoutReplica": [], "withoutCopy": 0, "singleCopy": 0, "lost": [],
                     "uploadBacklog": 0, "uploadError": None},
        "pipeline": {"report": {"rebuilding": True}},
        "upsert": {"keys": 1_234, "superseded": 266, "tombstones": None, "lowWaterMark": 40, "horizon": 7},
    }  # fmt: skip
    append = table | {"name": "clicks", "upsert": None, "pipeline": {"report": None}}
    print_status({"instances": [], "tables": [table, append]})
    lines = capsys.readouterr().out.splitlines()
    [at] = [number for number, line in enumerate(lines) if "low-water mark" in line]
    assert lines[at + 1].split() == ["accounts", "1,234", "266", "-", "40", "7"]
    assert not any("clicks" in line for line in lines[at:])
    assert any("accounts: the keys are being rebuilt" in line for line in lines)


def test_a_story_is_told_line_by_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    event = {
        "at": "2026-01-01T00:00:00.000Z", "instance": "Server_a_1", "event": "segment built", "rows": 7,
        "cause": "c0ffee",
        "segment": "shop__0__0__20260101T0000Z", "role": "server", "level": "info", "logger": "x",
    }  # fmt: skip
    document = {"events": [event], "silent": {"Server_b_2": "ConnectError"}}
    monkeypatch.setattr(Client, "story", lambda _client, table, segment: document)
    story(Target(controller="http://x:1", broker=None, log_dir=None), "shop__0__0__20260101T0000Z", as_json=False)
    printed = capsys.readouterr().out
    assert "2026-01-01T00:00:00.000Z Server_a_1 segment built rows=7 c0ffee" in printed
    assert "Server_b_2 did not tell: ConnectError" in printed


def _copies_of(safety: str, **fields: Any) -> dict[str, Any]:
    store = {"wanted": True, "state": "stored", "url": "file:///a", "error": None, "changedMsAgo": 5_000}
    holders = {"Server_a_1": {"checksum": "c1", "verifiedMsAgo": 7_300_000, "live": True}}
    return {
        "safety": safety, "checksum": "c1", "rows": 12_345, "replicas": ["Server_a_1", "Server_b_2"],
        "holders": holders, "store": store, "lost": None, **fields,
    }  # fmt: skip


def test_copies_are_drawn_with_what_needs_an_eye_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    down = {"wanted": True, "state": "failed", "url": None, "error": "[bold] down", "changedMsAgo": 61_000}
    away = {"Server_b_2": {"checksum": "c1", "verifiedMsAgo": 0, "live": False}}
    document = {
        "tableName": "shop_REALTIME", "storePolicy": "STORE_BEST_EFFORT", "replication": 2,
        "totals": {"safe": 1, "singleCopy": 1, "noCopy": 1, "lost": 0, "uploadBacklog": 2, "uploadFailed": 1},
        "segments": {
            "shop__0__0__x": _copies_of("safe"),
            "shop__0__1__x": _copies_of("singleCopy", store=down, holders=away),
            "shop__0__2__x": _copies_of("noCopy", store=down | {"wanted": False}, holders={}, replicas=[]),
        },
    }  # fmt: skip
    asked: list[bool] = []

    def answer(_client: Client, table: str, *, unsafe: bool) -> dict[str, Any]:
        assert table == "shop"
        asked.append(unsafe)
        return document

    monkeypatch.setattr(Client, "copies", answer)
    monkeypatch.setattr(Client, "status", lambda _client: {"tables": [{"name": "shop"}]})
    target = Target(controller="http://x:1", broker=None, log_dir=None)
    copies(target, "shop_REALTIME", missing=True, all_segments=False, as_json=False)
    printed = capsys.readouterr().out
    assert "1 safe, 1 with a single copy, 1 without a copy now, 2 wait for their upload" in printed
    for words in ("a_1 2 h", "b_2 0 s, away", "b_2 not yet", "failed 61 s", "[bold] down", "not wanted", "nobody",
                  "12,345", "stored 5 s"):  # fmt: skip
        assert words in printed, words
    assert printed.index("shop__0__2__x") < printed.index("shop__0__1__x") < printed.index("shop__0__0__x")
    document["segments"] = {}
    copies(target, "shop", missing=True, all_segments=False, as_json=False)
    assert "nothing is missing" in capsys.readouterr().out
    assert asked == [True, True]


def test_an_empty_cluster_has_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    print_status({"instances": [], "tables": []})
    assert "no tables" in capsys.readouterr().out


def test_a_query_as_a_table_loads_no_engine() -> None:
    """What a command imports is what it waits for."""
    engines = ["pyarrow", "numpy", "datafusion", "pyspark"]
    code = f"import sys, cremant.cli.sql; print([name for name in {engines} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
