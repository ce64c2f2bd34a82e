# SPDX-License-Identifier: Apache-2.0
"""A controller over memory stores, driven through its real HTTP app without sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from cremant.controller.clock import Clock
from cremant.controller.core import Controller
from cremant.controller.main import make_controller_app
from cremant.controller.streams import LogSource
from cremant.log.api import Log
from cremant.log.memory import MemoryLog
from cremant.model.cluster import ClusterView, InstanceRecord, InstanceReport, Role, TableView, TailReport
from cremant.model.offsets import Watermark
from cremant.model.table import StreamConfig
from cremant.store.deepstore import DirectoryStore
from cremant.store.memory import MemoryMetadataStore
from cremant.wire.codec import decode, encode
from cremant.wire.messages import Heartbeat

SCHEMA: dict[str, Any] = {
    "schemaName": "gold",
    "dimensionFieldSpecs": [{"name": "user_id", "dataType": "LONG"}, {"name": "country", "dataType": "STRING"}],
    "metricFieldSpecs": [{"name": "amount", "dataType": "DOUBLE"}],
    "dateTimeFieldSpecs": [
        {"name": "ts", "dataType": "LONG", "format": "1:MILLISECONDS:EPOCH", "granularity": "1:MILLISECONDS"}
    ],
}


def schema(name: str = "gold") -> dict[str, Any]:
    return {**SCHEMA, "schemaName": name}


def table(
    name: str = "gold", *, topic: str = "events", replication: int = 1, start: str = "smallest"
) -> dict[str, Any]:
    stream = {
        "streamType": "embedded",
        "stream.embedded.topic.name": topic,
        "stream.embedded.consumer.prop.auto.offset.reset": start,
        "realtime.segment.flush.threshold.rows": "1000",
    }
    return {
        "tableName": name,
        "tableType": "REALTIME",
        "segmentsConfig": {"timeColumnName": "ts", "replication": str(replication)},
        "tenants": {},
        "metadata": {},
        "tableIndexConfig": {},
        "ingestionConfig": {"streamIngestionConfig": {"streamConfigMaps": [stream]}},
    }


class StillClock(Clock):
    """Stands still until it is told to move: nobody dies of a busy machine."""

    def __init__(self, now_ms: int = 1_800_000_000_000) -> None:
        self._now_ms = now_ms
        #: Wall clock minus ours.
        self.wall_offset_ms = 0

    def now_ms(self) -> int:
        return self._now_ms

    def wall_ms(self) -> int:
        return self._now_ms + self.wall_offset_ms

    def advance(self, ms: int) -> None:
        self._now_ms += ms


class OneLog:
    """One log for streams and epoch logs."""

    def __init__(self, log: Log) -> None:
        self.epoch = self.embedded = log

    @contextlib.contextmanager
    def stream(self, stream: StreamConfig) -> Iterator[Log]:
        yield self.epoch


class Cluster:
    """One controller and as many pretended members as a test wants."""

    def __init__(self, directory: Path, *, clock: Clock | None = None, logs: LogSource | None = None) -> None:
        """`logs`: others than one log in memory."""
        self.directory = directory
        self.clock = clock
        self.logs = logs
        self.store = MemoryMetadataStore()
        self.log: Log = MemoryLog(lambda: int(time.time() * 1000))
        self.deep_store = DirectoryStore(directory / "store")
        self._runner = asyncio.Runner()
        self._beats: dict[str, Heartbeat] = {}
        self.start()

    def start(self) -> None:
        self.controller = Controller(
            self.store, self.logs or OneLog(self.log), self.deep_store, servers_grace_ms=0, clock=self.clock
        )
        self.controller.start()
        self.app = make_controller_app(self.controller)

    def restart(self) -> None:
        """As after kill -9: everything volatile is gone, members keep beating."""
        self.controller.stop()
        self.start()
        for name in self._beats:
            self.beat(name)

    def close(self) -> None:
        self.controller.stop()
        self._runner.close()

    def request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30) as client:
                return await client.request(method, path, **arguments)

        return self._runner.run(run())

    def get(self, path: str) -> Any:
        answer = self.request("GET", path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, document: Any = None, *, status: int = 200, method: str = "POST") -> Any:
        answer = self.request(method, path, content=b"" if document is None else json.dumps(document).encode())
        assert answer.status_code == status, answer.text
        return answer.json()

    def send(self, path: str, message: Any, kind: Any) -> Any:
        answer = self.request("POST", f"/internal/v1/{path}", content=encode(message))
        assert answer.status_code == 200, answer.text
        return decode(answer.content, kind)

    def beat(
        self,
        name: str,
        role: Role = Role.SERVER,
        *,
        nonce: str = "n1",
        report: InstanceReport | None = None,
        tls_port: int = 0,
    ) -> httpx.Response:
        known = self._beats.get(name)
        record = InstanceRecord(
            id=name, role=known.instance.role if known else role, host="127.0.0.1", port=8098,
            tls_port=tls_port or (known.instance.tls_port if known else 0),
        )  # fmt: skip
        if name.startswith("Broker"):
            record = InstanceRecord(id=name, role=Role.BROKER, host="127.0.0.1", port=8099)
        said = report or (known.report if known else InstanceReport())
        self._beats[name] = Heartbeat(instance=record, nonce=nonce if known is None else known.nonce, report=said)
        if known is not None and nonce != "n1":
            self._beats[name] = Heartbeat(instance=record, nonce=nonce, report=said)
        return self.request("POST", "/internal/v1/heartbeat", content=encode(self._beats[name]))

    def view(self) -> ClusterView:
        answer = self.request("GET", "/internal/v1/view")
        assert answer.status_code == 200, answer.text
        return decode(answer.content, ClusterView)

    def view_where(self, condition: Callable[[ClusterView], bool]) -> ClusterView:
        deadline_s = time.monotonic() + 10
        while True:
            view = self.view()
            if condition(view):
                return view
            assert time.monotonic() < deadline_s, view
            time.sleep(0.01)

    def settled_view(self) -> ClusterView:
        """Once no further version is on its way."""
        view = self.view_where(lambda view: bool(view.instances))
        while True:
            time.sleep(0.15)
            newer = self.view()
            if newer.version == view.version:
                return newer
            view = newer

    def create(self, name: str = "gold", *, partitions: int = 2, replication: int = 1) -> TableView:
        """A server each replica, a topic, schema and table; returns the table as everyone sees it."""
        for number in range(replication):
            self.beat(f"Server_127.0.0.1_{8098 - number}")
        self.post("/topics", {"name": "events", "partitions": partitions})
        self.post("/schemas", schema(name))
        self.post("/tables", table(name, replication=replication))
        return self.view_where(lambda view: name in view.tables).tables[name]


def heartbeat_of(server: str) -> Heartbeat:
    record = InstanceRecord(id=server, role=Role.SERVER, host="127.0.0.1", port=8098)
    return Heartbeat(instance=record, nonce="n1", report=InstanceReport())


def tail(table: TableView, partition: int, *, next_offset: int = 0, error: str | None = None) -> TailReport:
    return TailReport(
        table=table.name, incarnation=table.record.incarnation, partition=partition, first_offset=0, rows=next_offset,
        watermark=Watermark(next_offset=next_offset, epoch=1, max_ingestion_ms=1000), error=error,
    )  # fmt: skip
