# SPDX-License-Identifier: Apache-2.0
"""Servers that send and fetch sealed segments over real sockets, and peers that answer as a script says."""

from __future__ import annotations

import http.server
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cremant.log.memory import MemoryLog
from cremant.model.cluster import ClusterView, LiveInstance, Role
from cremant.model.offsets import Position
from cremant.model.segments import Copy, SegmentMetadata, SegmentStatus
from cremant.segment.archive import Archive
from cremant.segment.build import PARQUET_FILE, SegmentSpec, build_segment
from cremant.segment.reader import SealedSegment, derive
from cremant.server.fetching import SegmentFetcher
from cremant.server.files import ServerFiles
from cremant.server.hosting import Hosting
from cremant.server.peers import PeerService
from cremant.server.table import HostedSegment, HostedTable
from cremant.shell.app import RunningServer, TlsListener, listen, make_app, serve
from cremant.store.deepstore import DirectoryStore

ROWS = 40_000
END = Position(log_offset=1, epoch=1, generation=1, next_offset=ROWS)


class PeerServer:
    """One server that holds one sealed segment, and sends it."""

    def __init__(self, kit: Any, root: Path, tls: ssl.SSLContext | None = None, **limits: Any) -> None:
        self.files = ServerFiles(root)
        self.hosting = Hosting(self.files, MemoryLog(lambda: 0))
        self.record = kit.table_record()
        self.table = self.hosting.tables["trips"] = HostedTable(self.record)
        epochs = kit.EpochLog(MemoryLog(lambda: 0)).create()
        scratch = self.files.new_scratch()
        built = build_segment(scratch, [rows(epochs)], SegmentSpec(kit.SCHEMA, "ts"), fsync=False)
        opened = kit.open_segment_metadata(0, 0, kit.START, ("Server_a", "me"))
        self.metadata: SegmentMetadata = msgspec.structs.replace(
            opened, status=SegmentStatus.DONE, end=END, end_offset=ROWS, rows=ROWS,
            size_bytes=built.size_bytes, checksum=built.checksum, file_checksum=built.file_checksum,
            copies={"Server_a": Copy(checksum=built.checksum, verified_at_ms=0)},
        )  # fmt: skip
        sealed = derive(scratch, opened.name, built.checksum, fsync=False)
        target = self.files.segment_directory("trips", self.record.incarnation, opened.name)
        self.sealed: SealedSegment = self.files.adopt(sealed, target)
        self.table.segments[opened.name] = HostedSegment(self.metadata, self.sealed)
        self.service = PeerService(self.hosting, **limits)
        app = make_app("server", self.service.routes(), ready=lambda: (True, ""))
        started, self._handles = threading.Event(), list[RunningServer]()
        listener = TlsListener(listen("127.0.0.1", 0), tls) if tls is not None else None
        self.tls_url = f"https://127.0.0.1:{listener.bound.getsockname()[1]}" if listener is not None else ""
        self._thread = threading.Thread(
            target=serve, args=(app, "127.0.0.1", 0),
            kwargs={
                "insecure": False, "tls": listener, "on_handle": self._handles.append,
                "on_started": lambda url: started.set(),
            },
        )  # fmt: skip
        self._thread.start()
        assert started.wait(20)
        self.url = self._handles[0].url
        self.path = f"{self.url}/segments/trips_REALTIME/{opened.name}"

    @property
    def archive(self) -> bytes:
        with (self.sealed.directory / PARQUET_FILE).open("rb") as file:
            size = self.sealed.marker.parquet_bytes
            archive = Archive(self.sealed.name, size, Archive(self.sealed.name, size).tar_crc32(file))
            return archive.read(file, 0, archive.size_bytes)

    def stop(self) -> None:
        self._handles[0].stop()
        self._thread.join(10)

    def close(self) -> None:
        self.stop()
        self.service.close()
        self.files.close()


def rows(epochs: Any) -> Any:
    """One epoch's rows as a server stores them."""
    held: list[Any] = []
    epochs.append = lambda partition, record: held.append(record)
    epochs.block(0, ROWS)
    return held[0].batch


class Script:
    """A peer that answers as it is told: each request takes the next of `answers` (the last one stays)."""

    def __init__(self, *answers: Callable[[http.server.BaseHTTPRequestHandler], None]) -> None:
        self.heard: list[dict[str, str]] = []
        script, left = self, list(answers)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                script.heard.append({"path": self.path, **self.headers})
                (left.pop(0) if len(left) > 1 else left[0])(self)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def says(status: int, body: bytes = b"", *, cut: int | None = None, tag: str = "") -> Callable[[Any], None]:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        if tag:
            handler.send_header("ETag", tag)
        handler.end_headers()
        handler.wfile.write(body[:cut])

    return answer


def hangs(handler: http.server.BaseHTTPRequestHandler) -> None:
    time.sleep(5)


class Follower:
    """A server without the segment. `by_tls`: the authorities it trusts, when its table asks for https."""

    def __init__(
        self, kit: Any, holder: PeerServer, root: Path, urls: dict[str, str], by_tls: ssl.SSLContext | None = None
    ) -> None:
        self.kit = kit
        self.holder = holder
        self.metadata = msgspec.structs.replace(
            holder.metadata, copies={name: Copy(checksum="c", verified_at_ms=0) for name in urls}
        )
        self.urls = urls
        self._by_tls = by_tls
        completion = msgspec.structs.replace(
            holder.record.config.completion, peer_scheme="https" if by_tls is not None else None
        )
        config = msgspec.structs.replace(holder.record.config, completion=completion)
        self.record = msgspec.structs.replace(holder.record, config=config)
        self.store = DirectoryStore(root / "store")
        self.fetcher = SegmentFetcher("me", self.store, self.view, fsync=False, authorities=by_tls)
        self.scratch = root / "scratch"
        self.scratch.mkdir(parents=True)

    def view(self) -> ClusterView:
        opened = self.kit.open_segment_metadata(0, 1, END, ("me",))
        table = self.kit.view_of(self.record, [opened], [self.metadata]).tables["trips"]
        key = "url" if self._by_tls is None else "tls_url"
        live = tuple(
            LiveInstance(id=name, role=Role.SERVER, **{"url": "http://127.0.0.1:1", key: url})
            for name, url in self.urls.items()
        )
        return ClusterView(version=1, controller_nonce="n", instances=live, tables={"trips": table})

    def fetch(self) -> SealedSegment:
        return self.fetcher.fetch(self.record, self.metadata, self.scratch)

    def fetched_right(self) -> bool:
        sealed = self.fetch()
        left = {path.name for path in self.scratch.iterdir()}
        return sealed.marker.checksum == self.metadata.checksum and "archive.tar.gz" not in left
