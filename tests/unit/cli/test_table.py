# SPDX-License-Identifier: Apache-2.0
"""`cremant table` when the second of two requests fails: what was asked, and what became of it, are both told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cremant.cli.find import Target
from cremant.cli.table import create, drop
from cremant.model.errors import InvalidConfig, Unavailable

BOTH = {"schema": {"schemaName": "t"}, "realtime": {"tableName": "t", "tableType": "REALTIME"}}


@contextmanager
def controller(answers: dict[str, tuple[int, Any]]) -> Iterator[Target]:
    """Answers "METHOD /path" as told."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, body = answers[f"{self.command} {self.path}"]
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_DELETE = do_GET

        def log_message(self, *_arguments: object) -> None:
            """Nothing on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Target(controller=f"http://127.0.0.1:{server.server_port}", broker=None, log_dir=None)
        server.shutdown()


def test_a_refused_table_is_told_although_its_schema_cannot_be_taken_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "both.json"
    file.write_text(json.dumps(BOTH), encoding="utf-8")
    answers = {
        "GET /schemas": (200, []),
        "POST /schemas": (200, {"status": "added"}),
        "POST /tables": (400, {"error": "no topic t"}),
        "DELETE /schemas/t": (503, {"error": "no leader"}),
    }
    with controller(answers) as target, pytest.raises(InvalidConfig, match="no topic t"):
        create(target, [str(file)], check_only=False, as_json=False)
    told = capsys.readouterr().err
    assert "the schema t stays" in told
    assert "no leader" in told


def test_a_table_that_is_dropped_without_its_schema_is_told_to_be_dropped() -> None:
    answers = {
        "GET /status": (200, {"tables": [{"name": "t", "topic": "t"}]}),
        "DELETE /tables/t": (200, {"status": "deleted"}),
        "GET /schemas": (200, ["t"]),
        "DELETE /schemas/t": (503, {"error": "no leader"}),
    }
    with controller(answers) as target, pytest.raises(Unavailable) as raised:
        drop(target, "t", yes=True, keep_schema=False, as_json=False)
    assert "the table t is dropped, but not its schema" in raised.value.message
    assert "no leader" in raised.value.message
