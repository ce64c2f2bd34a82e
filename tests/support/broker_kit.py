# SPDX-License-Identifier: Apache-2.0
"""A broker with servers behind it, in this process, over real HTTP: the broker's own app, and servers that answer
ServerQuery with the real engine from rows held in memory. What a server may do wrong is set on it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import anyio.to_thread
import msgspec
import pyarrow as pa
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cremant.broker.metrics import BrokerMetrics, NetworkMetrics
from cremant.broker.query import QueryService
from cremant.broker.rest import routes
from cremant.cluster.load import Loads
from cremant.exec.engine import Engine
from cremant.model.cluster import (
    ClusterView,
    LiveInstance,
    PartitionRecord,
    PartitionView,
    Rewind,
    Role,
    TableRecord,
    TableView,
    TailReport,
)
from cremant.model.errors import QueryError
from cremant.model.offsets import OffsetRange, Position, Watermark
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.model.segments import SegmentMetadata, SegmentStatus
from cremant.model.table import FlushConfig, StreamConfig, TableConfig
from cremant.model.upsert import Cut, UpsertConfig
from cremant.segment.layout import scan_schema
from cremant.segment.rows import RowMask
from cremant.segment.scan import Piece
from cremant.server.epochs import EpochBoard
from cremant.server.query import pack, pack_rows
from cremant.shell.app import RunningServer, listen, make_app, serve, url_of
from cremant.wire.codec import decode, encode
from cremant.wire.messages import PartitionAnswer, ServerAnswer, ServerQuery
from cremant.wire.watermarks import WatermarksReply, WatermarksRequest

START_MS = 1_700_000_000_000
PARTITIONS = 2
#: Of each partition, as an upsert table.
ROWS_PER_EPOCH = 10


def _field(name: str, kind: DataType, field_type: FieldType = FieldType.DIMENSION, **more: Any) -> FieldSpec:
    return FieldSpec(name=name, data_type=kind, field_type=field_type, **more)


#: The table of the recorded answers.
SCHEMA = Schema(
    name="gold",
    fields=(
        _field("user_id", DataType.LONG),
        _field("country", DataType.STRING),
        _field("tags", DataType.STRING, single_value=False),
        _field("extra", DataType.STRING),
        _field("clicks", DataType.INT, FieldType.METRIC),
        _field("amount", DataType.DOUBLE, FieldType.METRIC),
        _field("ts", DataType.LONG, FieldType.DATE_TIME, format="1:MILLISECONDS:EPOCH", granularity="1:MILLISECONDS"),
    ),
)
SCAN = scan_schema(SCHEMA)


def gold_rows(count: int = 200) -> list[dict[str, Any]]:
    return [
        {
            "$offset": index // PARTITIONS, "$subRow": 0, "$ingestionTime": START_MS + index * 1000,
            "user_id": (index * 7) % 50, "country": ("FR", "DE", "US")[index % 3], "tags": ["a", "b"][: index % 2 + 1],
            "extra": "null", "clicks": index % 10, "amount": index / 4, "ts": START_MS + index * 1000,
        }
        for index in range(count)
    ]  # fmt: skip


def batch_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    arrays = [pa.array([row[f.name] for row in rows], _plain(f.type)).cast(f.type) for f in SCAN]
    return pa.RecordBatch.from_arrays(arrays, schema=SCAN)


def _plain(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_string_view(kind) else kind


@dataclass(slots=True)
class Behaviour:
    """Of one server. `delay_s` passes before it answers; `behind` is what it says; `refuse`: HTTP 500; `reply`: its
    body, whatever it is asked; `lost_until_s`: up to then it says that it no longer knows the epoch."""

    delay_s: float = 0.0
    behind: bool = False
    error_code: int = 0
    refuse: bool = False
    lost_until_s: float = 0.0
    reply: bytes | None = None
    asked: list[ServerQuery] = field(default_factory=list)
    #: Partition -> watermark, in place of what its rows say.
    marks: dict[int, Watermark] = field(default_factory=dict)
    #: When it was asked how far it is; it does not answer (HTTP 500) while `mute`.
    marks_asked: list[WatermarksRequest] = field(default_factory=list)
    mute: bool = False
    #: What it has closed, if the table is an upsert table.
    board: EpochBoard = field(default_factory=EpochBoard)
    cancelled: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Kit:
    url: str
    servers: dict[str, Behaviour]
    view: ClusterView
    service: QueryService
    caught_up_at_ms: list[int | None]
    rows: dict[int, pa.RecordBatch]

    def forget(self) -> None:
        """What the broker has learnt of its servers: load, and how far they are."""
        self.service.network.loads = Loads()
        self.service.marks._shown.clear()
        self.service.marks._looked_s.clear()


def _answer(query: ServerQuery, name: str, kit: Kit, engine: Engine) -> tuple[ServerAnswer, pa.Table | None]:
    behaviour = kit.servers[name]
    if behaviour.error_code:
        return ServerAnswer(instance=name, error_code=behaviour.error_code, error="on purpose"), None
    wanted = () if behaviour.behind else query.tails
    late: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
    horizon = 0
    if query.cut is not None:
        epoch = query.cut.epoch
        known = {tail.partition: behaviour.board.state("abc", tail.partition) for tail in query.tails}
        late = tuple(number for number, state in known.items() if state is None or state.closed < epoch)
        refused = tuple(number for number, state in known.items() if state is not None and state.horizon > epoch)
        if time.monotonic() < behaviour.lost_until_s:
            refused = tuple(known)
        horizon = max((state.horizon for state in known.values() if state is not None), default=0)
        wanted = tuple(tail for tail in wanted if tail.partition not in {*late, *refused})
    shown = {tail.partition: min(mark_of(kit, name, tail.partition).next_offset, 100) for tail in wanted}
    pieces = [_piece(number, kit.rows[number].slice(0, offset), query.cut) for number, offset in shown.items()]
    try:
        result = engine.run(
            query.sql, pieces, query.columns, SCAN, deadline_s=time.monotonic() + query.budget_ms / 1000,
            constants={"$hostName": name},
        )  # fmt: skip
    except QueryError as error:
        return ServerAnswer(instance=name, error_code=error.code, error=str(error)), None
    marks = {tail.partition: mark_of(kit, name, tail.partition) for tail in wanted}
    partitions = tuple(
        PartitionAnswer(partition=number, covered=OffsetRange(0, mark.next_offset), watermark=mark)
        for number, mark in marks.items()
    )
    header = ServerAnswer(
        instance=name, partitions=partitions, docs_total=result.stats.rows_scanned,
        behind_partitions=tuple(tail.partition for tail in query.tails) if behaviour.behind else late,
        refused_partitions=refused, horizon=horizon,
        docs_scanned=result.stats.rows_matched, segments_queried=len(pieces), segments_processed=len(pieces),
        segments_matched=len(pieces),
    )  # fmt: skip
    return header, result.table


def mark_of(kit: Kit, name: str, partition: int) -> Watermark:
    """How far a server is visible."""
    rows = kit.rows[partition].num_rows
    usual = Watermark(
        next_offset=rows, epoch=5 + partition, max_ingestion_ms=START_MS + 199_000,
        caught_up_at_ms=kit.caught_up_at_ms[partition],
    )  # fmt: skip
    return kit.servers[name].marks.get(partition, usual)


def _reached(kit: Kit, name: str, asked: WatermarksRequest) -> bool:
    marks = {one: mark_of(kit, name, one.partition) for one in asked.wanted}
    return all(
        mark.next_offset >= one.offset and (mark.freshness_ms or 0) >= one.fresh_ms for one, mark in marks.items()
    )


def _piece(partition: int, rows: pa.RecordBatch, cut: Cut | None) -> Piece:
    """Of an upsert table: each epoch brought ROWS_PER_EPOCH rows, and superseded none."""
    mask = None
    if cut is not None:
        flags = rows.column("$offset").to_numpy() < cut.epoch * ROWS_PER_EPOCH
        mask = (RowMask(flags, int(flags.sum())),)
    return Piece(f"p{partition}", partition, f"gold__{partition}__0__x", (rows,), rows.num_rows, mask, False)


def as_upsert(view: ClusterView, *, version: int = 2, rewinds: tuple[Rewind, ...] = ()) -> ClusterView:
    """The same cluster, where `gold` is an upsert table."""
    gold = view.tables["gold"]
    config = msgspec.structs.replace(gold.record.config, upsert=UpsertConfig(comparison_columns=("ts",)))
    record = msgspec.structs.replace(gold.record, config=config)
    pipeline = msgspec.structs.replace(gold.pipeline_record, rewinds=rewinds)
    changed = msgspec.structs.replace(gold, record=record, pipeline_record=pipeline)
    return msgspec.structs.replace(view, version=version, tables={**view.tables, "gold": changed})


def table_of(*, enabled: bool = True) -> TableView:
    config = TableConfig(
        name="gold", time_column="ts", replication=2, stream=StreamConfig(stream_type="embedded", topic="gold"),
        flush=FlushConfig(),
    )  # fmt: skip
    start = Position(log_offset=0, epoch=0, generation=0, next_offset=0)
    replicas = ("Server_1", "Server_2")
    partitions = []
    for partition in range(PARTITIONS):
        name = f"gold__{partition}__0__x"
        record = PartitionRecord(partition=partition, consuming=name, sequence=0, replicas=replicas, start_offset=0)
        consuming = SegmentMetadata(
            name=name, partition=partition, sequence=0, status=SegmentStatus.IN_PROGRESS, start_offset=0, start=start,
            created_ms=0, replicas=replicas,
        )  # fmt: skip
        partitions.append(PartitionView(record=record, consuming=consuming))
    record_of_table = TableRecord(config=config, table_schema=SCHEMA, incarnation="abc", enabled=enabled)
    at_end = Watermark(next_offset=100, epoch=5)
    tails = {
        str(partition): {
            name: TailReport(
                table="gold", incarnation="abc", partition=partition, first_offset=0, rows=100, watermark=at_end
            )
            for name in replicas
        }
        for partition in range(PARTITIONS)
    }
    return TableView(record=record_of_table, partitions=tuple(partitions), segments=(), tails=tails)


@contextlib.contextmanager
def running(app: Any) -> Iterator[str]:
    """Serves an app from a thread, on a free port of 127.0.0.1."""
    bound = listen("127.0.0.1", 0)
    handles: list[RunningServer] = []
    up = threading.Event()
    thread = threading.Thread(
        target=serve, args=(app, "127.0.0.1", 0),
        kwargs={"insecure": False, "bound": bound, "on_handle": handles.append, "on_started": lambda url: up.set()},
    )  # fmt: skip
    thread.start()
    try:
        assert up.wait(10)
        yield url_of(bound)
    finally:
        handles[0].stop()
        thread.join(10)


@contextlib.contextmanager
def broker_kit() -> Iterator[Kit]:
    """Two servers that replicate both partitions of `gold`, and a broker."""
    rows = {
        partition: batch_of([row for index, row in enumerate(gold_rows()) if index % PARTITIONS == partition])
        for partition in range(PARTITIONS)
    }
    engine = Engine(threads=2, memory_bytes=256 * 1024 * 1024)
    with contextlib.ExitStack() as stack:
        stack.callback(engine.close)
        empty = ClusterView(version=0, controller_nonce="")
        service = QueryService(lambda: kit.view, engine, "Broker_127.0.0.1_8099")
        stack.callback(service.close)
        kit = Kit("", {}, empty, service, [START_MS + 300_000, START_MS + 250_000], rows)
        instances = []
        for name in ("Server_1", "Server_2"):
            kit.servers[name] = Behaviour()
            url = stack.enter_context(running(_server_app(name, kit, engine)))
            instances.append(LiveInstance(id=name, role=Role.SERVER, url=url))
        disabled = table_of(enabled=False)
        config = msgspec.structs.replace(disabled.record.config, name="closed")
        closed = msgspec.structs.replace(disabled, record=msgspec.structs.replace(disabled.record, config=config))
        kit.view = ClusterView(
            version=1, controller_nonce="c", instances=tuple(instances), tables={"gold": table_of(), "closed": closed}
        )
        registry = CollectorRegistry()
        service.on_response = BrokerMetrics(registry).query_answered
        registry.register(NetworkMetrics(service))
        app = make_app("broker", routes(service), ready=lambda: (True, ""), registry=registry)
        kit.url = stack.enter_context(running(app))
        yield kit


def _server_app(name: str, kit: Kit, engine: Engine) -> Any:
    def query(request: Request) -> Response:
        behaviour = kit.servers[name]
        message = decode(bytes(request.state.body), ServerQuery)
        behaviour.asked.append(message)
        time.sleep(behaviour.delay_s)
        if behaviour.refuse:
            return Response(b"on purpose", 500)
        if behaviour.reply is not None:
            return Response(behaviour.reply, media_type="application/octet-stream")
        header, table = _answer(message, name, kit, engine)
        body = pack(header, pack_rows(table) if table is not None else None)
        return Response(body, media_type="application/octet-stream")

    async def endpoint(request: Request) -> Response:
        request.state.body = await request.body()
        return await anyio.to_thread.run_sync(query, request)

    async def watermarks(request: Request) -> Response:
        behaviour = kit.servers[name]
        asked = decode(await request.body(), WatermarksRequest)
        behaviour.marks_asked.append(asked)
        ends_s = time.monotonic() + asked.timeout_ms / 1000
        while time.monotonic() < ends_s and not (behaviour.mute or _reached(kit, name, asked)):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        if behaviour.mute:
            return Response(b"on purpose", 500)
        tails = tuple(
            TailReport(
                table="gold", incarnation="abc", partition=one.partition, first_offset=0, rows=0,
                watermark=mark_of(kit, name, one.partition),
            )
            for one in asked.wanted
        )  # fmt: skip
        return Response(encode(WatermarksReply(instance=name, tails=tails)), media_type="application/json")

    async def cancel(request: Request) -> Response:
        kit.servers[name].cancelled.append(request.path_params["id"])
        return Response(b"")

    async def liveness(request: Request) -> Response:
        return Response(b"OK")

    async def epochs(request: Request) -> Response:
        asked = request.query_params
        reply = await kit.servers[name].board.poll(int(asked["since"]), asked["nonce"], 0.5)
        return Response(encode(msgspec.structs.replace(reply, instance=name)))

    routes = [
        Route("/internal/v1/epochs", epochs),
        Route("/internal/v1/watermarks", watermarks, methods=["POST"]),
        Route("/health/liveness", liveness),
        Route("/internal/v1/query", endpoint, methods=["POST"]),
        Route("/internal/v1/query/{id}", cancel, methods=["DELETE"]),
    ]
    return make_app("server", routes, ready=lambda: (True, ""))
