# SPDX-License-Identifier: Apache-2.0
"""A schema registry over real HTTP: `GET /schemas/ids/{id}` with Confluent's answers, and what can go wrong."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any


class SchemaRegistry:
    """Listens while it is entered. `schemas`: id -> schema; `broken`: HTTP status of every answer; `asked`: paths."""

    def __init__(self, port: int = 0) -> None:
        self.schemas: dict[int, Any] = {}
        self.broken: int | None = None
        self.login: str | None = None
        self.asked: list[str] = []
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                registry.asked.append(self.path)
                status, body = registry.answer(self.path, self.headers.get("Authorization", ""))
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, path: str, authorization: str) -> tuple[int, dict[str, Any]]:
        if self.broken is not None:
            return self.broken, {"error_code": self.broken * 100 + 1, "message": "out of order"}
        if self.login is not None and authorization != f"Basic {base64.b64encode(self.login.encode()).decode()}":
            return 401, {"error_code": 401, "message": "Unauthorized"}
        prefix, _, number = path.rpartition("/")
        if prefix != "/schemas/ids" or not number.isdigit():
            return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}
        schema = self.schemas.get(int(number))
        if schema is None:
            return 404, {"error_code": 40403, "message": f"Schema {number} not found"}
        return 200, {"schema": json.dumps(schema)}

    def __enter__(self) -> SchemaRegistry:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
