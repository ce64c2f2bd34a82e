# SPDX-License-Identifier: Apache-2.0
"""The story of a segment: servers that hang or tell something else are named, and cost one deadline together."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from control import Cluster

from cremant.controller import rest_story
from cremant.model.cluster import InstanceRecord, InstanceReport, Role
from cremant.wire.codec import encode
from cremant.wire.messages import Heartbeat

SEGMENT = "gold__0__0__20270101T0000Z"
EVENT = {"at": "2027-01-01T00:00:00.000Z", "event": "segment built", "segment": SEGMENT, "cause": "c1"}


class _Teller(BaseHTTPRequestHandler):
    """Hangs, or says what it was given, by the server's port."""

    answers: ClassVar[dict[int, bytes | None]] = {}
    released = threading.Event()

    def do_GET(self) -> None:
        answer = self.answers[self.server.server_port]  # type: ignore[attr-defined]
        if answer is None:
            self.released.wait(30)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def tellers(cluster: Cluster) -> Iterator[dict[str, str]]:
    """Live servers and what each of them answers: name -> what it is."""
    _Teller.released.clear()
    started, names = [], {}
    for what, answer in (
        ("well", json.dumps({"events": [EVENT]}).encode()),
        ("hangs", None),
        ("hangs too", None),
        ("a list", b"[1, 2]"),
        ("no events", b"{}"),
        ("events of another shape", b'{"events": ["x"]}'),
        ("no JSON", b"\xff\xfe<html>"),
    ):
        server = ThreadingHTTPServer(("127.0.0.1", 0), _Teller)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        started.append(server)
        _Teller.answers[server.server_port] = answer
        name = f"Server_127.0.0.1_{server.server_port}"
        names[name] = what
        record = InstanceRecord(id=name, role=Role.SERVER, host="127.0.0.1", port=server.server_port)
        beat = Heartbeat(instance=record, nonce="n1", report=InstanceReport())
        assert cluster.request("POST", "/internal/v1/heartbeat", content=encode(beat)).status_code == 200
    yield names
    _Teller.released.set()
    for server in started:
        server.shutdown()
        server.server_close()


def test_silent_servers_are_named_and_have_one_deadline_together(
    cluster: Cluster, tellers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rest_story, "STORY_DEADLINE_MS", 700)
    begun_s = time.monotonic()
    told = cluster.get(f"/segments/gold/{SEGMENT}/story")
    assert time.monotonic() - begun_s < 1.3, "two that hang take no longer than one"
    assert told["events"] == [EVENT]
    silent = {tellers[name]: why for name, why in told["silent"].items()}
    assert set(silent) == set(tellers.values()) - {"well"}
    assert "Timeout" in silent["hangs"]
    assert "events" in silent["no events"], silent
