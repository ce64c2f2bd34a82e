# SPDX-License-Identifier: Apache-2.0
"""A server that lies: it says that it has every committed segment, and sends archives of the worst kind."""

from __future__ import annotations

import contextlib
import gzip
import io
import secrets
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import httpx
from server_kit import Cluster

from cremant.model.cluster import InstanceRecord, InstanceReport, Role, SegmentReport
from cremant.model.segments import ReplicaState
from cremant.wire.codec import encode
from cremant.wire.messages import Heartbeat

GIB = 1024**3


class Liar:
    """A member of the cluster while it is entered; each request gets the next of its answers."""

    def __init__(self, cluster: Cluster) -> None:
        self.asked = 0
        self.answers = (_outside, _link, _others_rows, _cut, _ten_gib, _ten_gib_inside)
        self._cluster = cluster
        self._stopping = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        port = self._server.server_address[1]
        self._record = InstanceRecord(id=f"Server_127.0.0.1_{port}", role=Role.SERVER, host="127.0.0.1", port=port)
        self._nonce = secrets.token_hex(8)
        self._threads = [
            threading.Thread(target=self._server.serve_forever),
            threading.Thread(target=self._beat),
        ]

    @property
    def id(self) -> str:
        return self._record.id

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join(20)

    def _beat(self) -> None:
        number = 0
        while not self._stopping.wait(0.3):
            number += 1
            with contextlib.suppress(httpx.HTTPError, AssertionError, KeyError):
                table = self._cluster.view().tables.get("trips")
                known = table.segments if table is not None else ()
                said = [
                    SegmentReport(
                        table="trips", segment=one.name, state=ReplicaState.ONLINE, checksum=one.checksum, rows=one.rows
                    )
                    for one in known
                ]  # fmt: skip
                evil = SegmentReport(table="trips", segment="../../evil", state=ReplicaState.ONLINE, checksum="0")
                report = InstanceReport(segments=(*said, evil) if said else ())
                beat = Heartbeat(instance=self._record, nonce=self._nonce, report=report, number=number)
                url = f"{self._cluster.controller.url}/internal/v1/heartbeat"
                httpx.post(url, content=encode(beat), timeout=10, trust_env=False)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        liar = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.partition("?")[0].rpartition("/")[2]
                answer = liar.answers[liar.asked % len(liar.answers)]
                liar.asked += 1
                body, length = answer(name)
                self.send_response(200)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                with contextlib.suppress(OSError):  # whoever asked has seen enough
                    self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        return Handler


def _archive(*members: tuple[tarfile.TarInfo, bytes]) -> tuple[bytes, int]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue(), len(buffer.getvalue())


def _outside(name: str) -> tuple[bytes, int]:
    return _archive((tarfile.TarInfo("../../../evil"), b"x" * 100), (tarfile.TarInfo(f"{name}/rows.parquet"), b"x"))


def _link(name: str) -> tuple[bytes, int]:
    info = tarfile.TarInfo(f"{name}/rows.parquet")
    info.type, info.linkname = tarfile.SYMTYPE, "../../../../evil"
    return _archive((info, b""))


def _others_rows(name: str) -> tuple[bytes, int]:
    return _archive((tarfile.TarInfo(f"{name}/rows.parquet"), b"PAR1" + b"x" * 1_000 + b"PAR1"))


def _cut(name: str) -> tuple[bytes, int]:
    body, length = _others_rows(name)
    return body[:-20], length


def _ten_gib(name: str) -> tuple[bytes, int]:
    return _others_rows(name)[0], 10 * GIB


def _ten_gib_inside(name: str) -> tuple[bytes, int]:
    """A header that claims it, and zeros that unpack to more than a segment has."""
    info = tarfile.TarInfo(f"{name}/rows.parquet")
    info.size = 10 * GIB
    body = gzip.compress(info.tobuf() + bytes(80 * 1024 * 1024), 1)
    return body, len(body)
