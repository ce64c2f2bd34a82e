# SPDX-License-Identifier: Apache-2.0
"""Tables, streams and pipelines for tests with real Spark: a real controller (in this process, without its HTTP where
that does not matter), a real embedded log, and a reader of epoch logs that believes nothing but the records."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from cremant.controller.clock import Clock
from cremant.controller.core import Controller
from cremant.epoch.format import decode
from cremant.epoch.reader import EpochClosed, GapTaken, PartitionReader, RolledBack, Stopped, TakeRows
from cremant.epoch.records import EpochMark, Record
from cremant.log.api import Log, Message
from cremant.log.kafka import KafkaLog
from cremant.log.open import open_logs
from cremant.model.cluster import (
    InstanceRecord,
    InstanceReport,
    PipelineReport,
    Role,
    TableView,
    TailReport,
)
from cremant.model.names import epoch_topic
from cremant.model.offsets import Position, Watermark
from cremant.model.settings import Settings
from cremant.pipeline.query import TableQuery
from cremant.store.deepstore import DirectoryStore
from cremant.store.memory import MemoryMetadataStore
from cremant.wire.codec import decode as decode_message
from cremant.wire.codec import encode as encode_message
from cremant.wire.messages import BaseRequest, GenerationRequest, Heartbeat, LeaseRequest

T = TypeVar("T")

SCHEMA: dict[str, Any] = {
    "schemaName": "events",
    "dimensionFieldSpecs": [
        {"name": "id", "dataType": "LONG"},
        {"name": "name", "dataType": "STRING"},
    ],
    "metricFieldSpecs": [{"name": "v", "dataType": "DOUBLE"}],
    "dateTimeFieldSpecs": [
        {"name": "ts", "dataType": "LONG", "format": "1:MILLISECONDS:EPOCH", "granularity": "1:MILLISECONDS"}
    ],
}


def table_config(
    pipeline: dict[str, Any] | None = None, *, name: str = "events", topic: str = "events", brokers: str = "",
    stream: dict[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """`brokers`: of a Kafka stream; none, the embedded log. `stream`: more properties, behind `stream.<type>.`."""
    kind = "kafka" if brokers else "embedded"
    more = {f"stream.{kind}.{key}": value for key, value in (stream or {}).items()}
    return {
        "tableName": name,
        "tableType": "REALTIME",
        "segmentsConfig": {"timeColumnName": "ts", "schemaName": name, "replication": "1"},
        "tenants": {},
        "tableIndexConfig": {
            "streamConfigs": {
                "streamType": kind,
                f"stream.{kind}.topic.name": topic,
                f"stream.{kind}.consumer.prop.auto.offset.reset": "smallest",
                **({"stream.kafka.broker.list": brokers} if brokers else {}),
                **more,
            }
        },
        "metadata": {},
        "cremant": {"pipeline": pipeline or {}},
    }


def event(number: int) -> bytes:
    return json.dumps(
        {"id": number, "name": f"name-{number % 97}", "v": number / 2, "ts": 1_700_000_000_000 + number}
    ).encode()


def python_workers() -> list[int]:
    """Task workers of this process's Spark: children of the daemons that our JVM started."""
    table = subprocess.run(["ps", "-wweo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    processes = [line.split(None, 2) for line in table.splitlines()[1:]]
    parents = {int(pid): int(parent) for pid, parent, _ in processes}
    daemons = {int(pid) for pid, _, args in processes if "cremant.pipeline.daemon pyspark.worker" in args}

    def is_ours(pid: int) -> bool:
        while pid > 1:
            if pid == os.getpid():
                return True
            pid = parents.get(pid, 0)
        return False

    return [pid for pid, parent in parents.items() if parent in daemons and pid in daemons and is_ours(pid)]


def wait_for(condition: Callable[[], object], timeout_s: float = 180.0, what: str = "") -> None:
    """Looks again and again, but takes at most a fifth of a core for it: what is waited for needs the cores."""
    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        if condition():
            return
        looked_s = time.monotonic() - began
        assert began < deadline, f"not within {timeout_s:.0f} s: {what or condition}"
        time.sleep(max(0.02, 4 * looked_s))


class LocalMember:
    """What a pipeline needs of the cluster, straight from a controller in this process; messages go through their
    bytes. Each one is a process of its own to the controller (another nonce)."""

    def __init__(self, controller: Controller, identity: str = "Pipeline_127.0.0.1_1") -> None:
        self.id = identity
        self.nonce = secrets.token_hex(8)
        self._controller = controller

    def call(self, path: str, message: object, reply_type: type[T], timeout_ms: int = 5_000) -> T:
        pipelines = self._controller.pipelines
        kind, handle = {
            "lease": (LeaseRequest, pipelines.lease),
            "generation": (GenerationRequest, pipelines.generation),
            "base": (BaseRequest, pipelines.base),
        }[path.rpartition("/")[2]]
        request: Any = decode_message(encode_message(message), kind)
        return decode_message(encode_message(handle(request)), reply_type)


@dataclass
class PartitionContent:
    """What a reader of one partition of an epoch log takes. Made into Python's rows only where these are looked at:
    what is waited for is looked for all the time, and needs the cores."""

    batches: list[pa.RecordBatch] = field(default_factory=list)
    closed: list[EpochClosed] = field(default_factory=list)
    gaps: list[GapTaken] = field(default_factory=list)
    stopped: Stopped | None = None
    records: list[Record] = field(default_factory=list)
    ignored: int = 0

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return [row for batch in self.batches for row in batch.to_pylist()]

    @property
    def row_count(self) -> int:
        return sum(batch.num_rows for batch in self.batches)

    @property
    def marks(self) -> list[EpochMark]:
        return [record for record in self.records if isinstance(record, EpochMark)]

    @property
    def epochs(self) -> list[int]:
        return [closed.epoch for closed in self.closed]


def read_partition(log: Log, topic: str, incarnation: str, partition: int, start_offset: int = 0) -> PartitionContent:
    content = PartitionContent()
    start = Position(log_offset=0, epoch=0, generation=0, next_offset=start_offset)
    machine = PartitionReader(partition, start)
    reader = log.reader(topic, partition, log.earliest(topic, partition))
    while (batch := reader.read(max_messages=1_000, max_bytes=64 * 1024 * 1024)) is not None:
        for index, offset in enumerate(batch.offsets.tolist()):
            record = decode(batch.values[index].as_buffer(), incarnation)
            content.records.append(record)
            for effect in machine.step(record, offset):
                match effect:
                    case TakeRows():
                        content.batches.append(effect.batch)
                    case EpochClosed():
                        content.closed.append(effect)
                    case GapTaken():
                        content.gaps.append(effect)
                    case RolledBack(next_offset=end, epoch=epoch):
                        content.batches = [
                            batch.filter(pc.less(batch.column("$offset"), end)) for batch in content.batches
                        ]
                        content.closed = [closed for closed in content.closed if closed.epoch <= epoch]
                    case Stopped():
                        content.stopped = effect
    reader.close()
    content.ignored = sum(machine.ignored.values())
    return content


class World:
    """A controller, logs and a fake server that is merely alive, so that tables can be placed. `log`: the epoch logs,
    `stream` the streams; with `stream_brokers` streams are in Kafka, in topics that no other test has."""

    def __init__(
        self, directory: Path, *, stream_brokers: str = "", clock: Clock | None = None, **settings: Any
    ) -> None:
        self.directory = directory
        self.settings = self.settings_for("pipeline", **settings)
        self.logs = open_logs(self.settings)
        self.log = self.logs.epoch
        self._brokers = stream_brokers
        self._token = f"-{secrets.token_hex(4)}" if stream_brokers else ""
        self.stream: Log = KafkaLog(stream_brokers) if stream_brokers else self.logs.embedded
        self.controller = Controller(
            MemoryMetadataStore(), self.logs, DirectoryStore(directory / "store"), servers_grace_ms=0, clock=clock
        )
        self._stop = threading.Event()
        self._tails: dict[str, int] = {}
        self._nonce = secrets.token_hex(8)
        self.beat()
        self._beats = threading.Thread(target=self._beat_forever, daemon=True)
        self._beats.start()
        self._queries: list[TableQuery] = []

    def settings_for(self, name: str, **settings: Any) -> Settings:
        values = {"data_dir": str(self.directory / name), "log_dir": str(self.directory / "log"), **settings}
        return Settings(("test", values))

    def beat(self) -> None:
        tails = tuple(
            TailReport(
                table=name, incarnation=self.controller.catalog.tables[name].incarnation, partition=partition,
                first_offset=0, rows=0, watermark=Watermark(next_offset=0, epoch=0),
            )
            for name, count in self._tails.items()
            for partition in range(count)
        )  # fmt: skip
        server = InstanceRecord(id="Server_127.0.0.1_1", role=Role.SERVER, host="127.0.0.1", port=1)
        self.controller.heartbeat(Heartbeat(instance=server, nonce=self._nonce, report=InstanceReport(tails=tails)))

    def _beat_forever(self) -> None:
        while not self._stop.wait(0.5):
            self.beat()

    def close(self) -> None:
        for query in self._queries:
            query.stop()
        for query in self._queries:
            assert query.join(20), "a query did not stop"
        self._stop.set()
        self._beats.join(5)
        self.logs.close()
        self.stream.close()

    # --- tables and streams ---

    def add_table(
        self, pipeline: dict[str, Any] | None = None, *, partitions: int = 4, name: str = "events",
        schema: dict[str, Any] | None = None, config: dict[str, Any] | None = None,
        stream: dict[str, str] | None = None,
    ) -> TableView:  # fmt: skip
        if not any(topic.name == self.topic(name) for topic in self.stream.topics()):
            self.stream.create_topic(self.topic(name), partitions)
        document = {**(schema or SCHEMA), "schemaName": name}
        self.controller.schemas.add(document, override=True, force=True)
        self.controller.tables.create({**self.config(pipeline, name=name, stream=stream), **(config or {})})
        return self.view(name)

    def config(
        self, pipeline: dict[str, Any] | None = None, *, name: str = "events", stream: dict[str, str] | None = None
    ) -> dict[str, Any]:
        return table_config(pipeline, name=name, topic=self.topic(name), brokers=self._brokers, stream=stream)

    def topic(self, name: str = "events") -> str:
        """The stream topic of a table."""
        return f"{name}{self._token}"

    def view(self, name: str = "events") -> TableView:
        return self.controller.view.build(0).tables[name]

    def entered(self, name: str, partitions: int) -> None:
        """The fake server consumes this many partitions."""
        self._tails[name] = partitions
        self.beat()

    def produce(self, numbers: Iterable[int], *, topic: str = "events", partitions: int = 4) -> None:
        """Number n goes to partition n mod `partitions`, in appends of up to 5,000."""
        waiting: dict[int, list[Message]] = {}
        for number in numbers:
            part = waiting.setdefault(number % partitions, [])
            part.append(Message(event(number)))
            if len(part) == 5_000:
                self.stream.append(self.topic(topic), number % partitions, part)
                waiting[number % partitions] = []
        for partition, part in waiting.items():
            if part:
                self.stream.append(self.topic(topic), partition, part)

    # --- pipelines ---

    def query(
        self, session: Callable[[], Any], *, name: str = "events", member: LocalMember | None = None,
        settings: Settings | None = None, brokers: tuple[str, ...] = (),
    ) -> TableQuery:  # fmt: skip
        """A running pipeline of the table."""
        query = TableQuery(
            session, self.logs, settings or self.settings, member or LocalMember(self.controller), self.view(name),
            brokers=lambda: brokers,
        )  # fmt: skip
        self._queries.append(query)
        query.start()
        return query

    def read(self, name: str = "events", partitions: int | None = None) -> list[PartitionContent]:
        record = self.view(name).record
        topic = epoch_topic(name, record.incarnation)
        views = self.view(name).partitions[:partitions]
        return [
            read_partition(
                self.log, topic, record.incarnation, view.record.partition, view.record.start_offset
            )
            for view in views
        ]  # fmt: skip

    def closed_rows(self, name: str = "events") -> int:
        """Messages of the stream that are accounted for in epochs that are closed in every partition (ends of the last
        mark), over partitions."""
        record = self.view(name).record
        topic = epoch_topic(name, record.incarnation)
        marks = read_partition(self.log, topic, record.incarnation, 0).marks
        if marks and marks[-1].partition_count > 1:
            last = marks[-1].partition_count - 1
            closed = {mark.epoch for mark in read_partition(self.log, topic, record.incarnation, last).marks}
            marks = [mark for mark in marks if mark.epoch in closed or mark.partition_count <= last]
        return sum(line.end for line in marks[-1].partitions) if marks else 0


def check(contents: list[PartitionContent], expected: Iterable[int]) -> None:
    """Every expected number once, as the right row, in offset order, in the right partition; nothing stopped; all
    partitions have the same epochs."""
    for content in contents:
        assert content.stopped is None, content.stopped
    epochs = [content.epochs for content in contents]
    assert all(each == epochs[0] for each in epochs), epochs
    assert epochs[0] == sorted(set(epochs[0]))
    numbers = []
    for partition, content in enumerate(contents):
        offsets = [row["$offset"] for row in content.rows]
        assert offsets == sorted(set(offsets))
        for row in content.rows:
            assert row["id"] % len(contents) == partition
            assert (row["name"], row["v"]) == (f"name-{row['id'] % 97}", row["id"] / 2)
            assert row["$ingestionTime"] > 0
        numbers.extend(row["id"] for row in content.rows)
    assert sorted(numbers) == sorted(expected)


def state_of(query: TableQuery) -> PipelineReport:
    return query.report()
