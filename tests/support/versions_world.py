# SPDX-License-Identifier: Apache-2.0
"""Servers of an upsert table with a real controller, in one process, over a hand-written epoch log: what they show at
any closed epoch is compared with the reference model."""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from control import Cluster
from versions_kit import SCHEMA, UpsertLog

from cremant.exec.engine import Engine
from cremant.model.cluster import ClusterView, InstanceRecord, Role, TableView
from cremant.model.names import epoch_topic
from cremant.model.offsets import Position
from cremant.model.upsert import Cut
from cremant.server.compacting import Compactor
from cremant.server.epochs import EpochBoard
from cremant.server.fetching import SegmentFetcher
from cremant.server.files import ServerFiles
from cremant.server.hosting import Hosting
from cremant.server.peers import PeerService
from cremant.server.query import QueryService
from cremant.server.rest_versions import VersionsService
from cremant.server.sealing import Sealer
from cremant.server.uploads import Uploads
from cremant.server.validity import VersionsKeeper
from cremant.server.versions_fetch import VersionsClient
from cremant.server.versions_upload import VersionsUploads
from cremant.shell.app import RunningServer, make_app, serve
from cremant.wire.codec import decode
from cremant.wire.messages import Heartbeat, ServerAnswer, ServerQuery, TailRequest

SQL = "SELECT count(*) c, coalesce(sum(driver), 0) d, coalesce(sum(ts), 0) t FROM t"
Answer = tuple[int, int, int]


class Link:
    """A member, whose calls reach the controller at once."""

    def __init__(self, world: World, name: str) -> None:
        self.id = name
        self.view: ClusterView | None = None
        self._world = world

    def call(self, path: str, message: Any, kind: type[Any], timeout_ms: int = 0) -> Any:
        commits = self._world.cluster.controller.commits
        return {
            "/internal/v1/segmentConsumed": commits.consumed,
            "/internal/v1/commitEnd": commits.ended,
            "/internal/v1/segmentStored": commits.stored,
            "/internal/v1/versionsStored": commits.versions_stored,
            "/internal/v1/segmentCompacted": self._world.cluster.controller.compactions.ended,
        }[path](message)

    def poke(self) -> None:
        pass

    def cluster_now_ms(self) -> int:
        return int(time.time() * 1000)


class Node:
    """One server with all its threads, but in this process."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.starts = world, name, 0
        self.root = world.root / name
        self.start()

    def start(self) -> None:
        world, self.starts = self.world, self.starts + 1
        self.link: Any = Link(world, self.name)
        self.files = ServerFiles(self.root)
        self.board = EpochBoard()
        self.hosting = Hosting(self.files, world.cluster.log, board=self.board)
        tables, store = self.hosting.tables, world.cluster.deep_store

        def view() -> ClusterView | None:
            known: ClusterView | None = self.link.view
            return known

        fetcher = SegmentFetcher(self.name, store, view, fsync=False)
        uploads = Uploads(tables, self.files, store, self.link, has_store=True)
        self.keeper = VersionsKeeper(
            tables, self.files, world.cluster.log, VersionsClient(self.name, store), self.name, view
        )
        self.versions_uploads = VersionsUploads(tables, self.files, store, self.link, uploads, view)
        sealer = Sealer(tables, self.files, self.link, fetcher, uploads, fsync=False)
        self.compactor = Compactor(tables, self.files, store, self.link, fetcher, view, fsync=False)
        peers, known = PeerService(self.hosting), VersionsService(self.hosting)
        self.engine = Engine(threads=1, memory_bytes=1 << 28)
        self.queries = QueryService(tables, self.engine, self.board)
        app = make_app("server", [*peers.routes(), *known.routes()], ready=lambda: (True, ""))
        started, handles = threading.Event(), list[RunningServer]()
        self._thread = threading.Thread(
            target=serve, args=(app, "127.0.0.1", 0),
            kwargs={"insecure": False, "on_handle": handles.append, "on_started": lambda url: started.set()},
        )  # fmt: skip
        self._thread.start()
        assert started.wait(20)
        self.handle, self.port = handles[0], int(handles[0].url.rsplit(":", 1)[1])
        self.hosting.start(self.name)
        self.parts = (sealer, uploads, self.keeper, self.versions_uploads, self.compactor)
        for part in self.parts:
            part.start()
        self._services = (peers, known)

    def beat(self) -> None:
        record = InstanceRecord(id=self.name, role=Role.SERVER, host="127.0.0.1", port=self.port)
        self.world.cluster.controller.heartbeat(
            Heartbeat(instance=record, nonce=f"{self.name}-{self.starts}", report=self.hosting.report())
        )

    def stop(self) -> None:
        self.handle.stop()
        self._thread.join(10)
        for part in self.parts:
            part.stop()
        for service in self._services:
            service.close()
        self.hosting.stop()
        self.queries.close()
        self.engine.close()
        self.files.close()

    def lose_disk(self) -> None:
        self.stop()
        shutil.rmtree(self.root)

    def at(self, epoch: int) -> Answer | None:
        """What it shows at a closed epoch; None: it does not say."""
        table = self.world.table
        query = ServerQuery(
            request_id="q", table="trips", incarnation=table.record.incarnation, sql=SQL, columns=("driver", "ts"),
            segments=tuple(segment.name for segment in table.segments), cut=Cut(epoch=epoch), budget_ms=2_000,
            tails=tuple(
                TailRequest(partition=one.record.partition, from_offset=one.consuming.start_offset)
                for one in table.partitions
            ),
        )  # fmt: skip
        body = asyncio.run(_whole(self.queries, query))
        length = int.from_bytes(body[:4], "big")
        header = decode(body[4 : 4 + length], ServerAnswer)
        if header.error_code or header.missing_segments or header.behind_partitions or header.refused_partitions:
            return None
        found = pa.ipc.open_stream(body[4 + length :]).read_all().to_pylist()[0]
        return found["c"], found["d"], found["t"]


async def _whole(queries: QueryService, query: ServerQuery) -> bytes:
    return bytes(await queries.answer(query))


class World:
    def __init__(
        self, root: Path, names: tuple[str, ...], *, table: dict[str, Any] | None = None, keys: int = 400,
        **segments: Any,
    ) -> None:  # fmt: skip
        """`table`: more of its config, `segments` of its segmentsConfig."""
        self.root = root
        self.cluster = Cluster(root)
        self.cluster.post("/topics", {"name": "trips", "partitions": 2})
        self.nodes = [Node(self, name) for name in names]
        self.view = self.cluster.view()
        for node in self.nodes:
            node.beat()
        self.cluster.post("/schemas", schema_json())
        self.cluster.post("/tables", table_json(len(names), segments) | (table or {}))
        self.until(lambda: "trips" in self.view.tables and len(self.table.partitions) == 2)
        incarnation = self.table.record.incarnation
        self.epochs = UpsertLog(self.cluster.log, incarnation=incarnation, partitions=2, keys=keys)
        start = Position(log_offset=0, epoch=0, generation=0, next_offset=0)
        self.epochs.positions = [{0: start} for _ in range(2)]
        self.epochs.start()
        self.topic = epoch_topic("trips", incarnation)

    @property
    def table(self) -> TableView:
        return self.view.tables["trips"]

    def step(self) -> None:
        for node in self.nodes:
            node.beat()
        self.view = self.cluster.view()
        for node in self.nodes:
            node.link.view = self.view
            node.hosting.on_view(self.view)

    def until(self, condition: Callable[[], Any], deadline_s: float = 30) -> None:
        until_s = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < until_s, [node.hosting.report() for node in self.nodes]
            self.step()
            time.sleep(0.05)

    def write(self, epochs: int) -> None:
        for number in range(epochs):
            self.epochs.write(40)
            if number % 4 == 0:
                self.step()

    def sealed(self, count: int) -> bool:
        return len(self.table.segments) >= count

    def right(self, epoch: int) -> Answer:
        rows = self.epochs.history.at(epoch).values()
        return len(rows), sum(row.key for row in rows), sum(row.value for row in rows)

    def check(self, node: Node) -> None:
        """Whatever epoch it is asked for, it is right, or does not say; and the newest it says in the end."""
        newest = self.epochs.epoch

        def right() -> bool:
            found = node.at(newest)
            assert found in (None, self.right(newest))
            return found is not None

        self.until(right)
        for epoch in range(max(1, newest - 20), newest + 1):
            found = node.at(epoch)
            assert found in (None, self.right(epoch)), epoch

    def trim(self) -> dict[int, int]:
        """The controller does, by what it was told; the offsets that the log begins at then."""
        self.step()
        self.cluster.controller.janitor.trim_epoch_logs()
        return {partition: self.cluster.log.earliest(self.topic, partition) for partition in range(2)}

    def close(self) -> None:
        for node in self.nodes:
            node.stop()
        self.cluster.close()

    def disturb(self, node: Node, what: str, dice: random.Random, holds_all: Callable[[World, Node], bool]) -> None:
        """`write` rows, `trim` the log, or take a node away: it comes back at once (`restart`), once there are more
        rows and less log (`late`), or so and without its disk (`lose`)."""
        if what == "write":
            self.write(dice.randrange(1, 12))
        elif what == "trim":
            self.trim()
        else:
            if what == "lose":  # the other one has everything: what one disk has is not the only copy of anything
                other = next(one for one in self.nodes if one is not node)
                self.until(lambda: holds_all(self, other))
                node.lose_disk()
            else:
                node.stop()
            self.nodes.remove(node)
            if what != "restart":
                self.write(dice.randrange(1, 12))
                self.trim()
            node.start()
            self.nodes.append(node)


def schema_json() -> dict[str, Any]:
    return {
        "schemaName": SCHEMA.name,
        "primaryKeyColumns": ["driver"],
        "dimensionFieldSpecs": [{"name": "driver", "dataType": "LONG"}, {"name": "gone", "dataType": "BOOLEAN"}],
        "dateTimeFieldSpecs": [
            {"name": "ts", "dataType": "LONG", "format": "1:MILLISECONDS:EPOCH", "granularity": "1:MILLISECONDS"}
        ],
    }


def table_json(replication: int, segments: dict[str, Any]) -> dict[str, Any]:
    stream = {
        "streamType": "embedded", "stream.embedded.topic.name": "trips",
        "stream.embedded.consumer.prop.auto.offset.reset": "smallest",
        "realtime.segment.flush.threshold.rows": "300",
    }  # fmt: skip
    return {
        "tableName": "trips", "tableType": "REALTIME",
        "segmentsConfig": {"timeColumnName": "ts", "replication": str(replication), **segments},
        "tenants": {}, "metadata": {}, "tableIndexConfig": {"streamConfigs": stream},
        "routing": {"instanceSelectorType": "strictReplicaGroup"},
        "upsertConfig": {"mode": "FULL", "comparisonColumns": ["ts"], "deleteRecordColumn": "gone"},
    }  # fmt: skip


def peers_only() -> dict[str, Any]:
    return {"peerSegmentDownloadScheme": "http", "completionConfig": {"storePolicy": "PEERS_ONLY"}}
