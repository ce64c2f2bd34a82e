# SPDX-License-Identifier: Apache-2.0
"""A hand-written epoch log, tables made of it, the one true answer to compare with; and a cluster of real processes
around it, without Spark."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pyarrow as pa

from cremant.epoch import format as records
from cremant.epoch.records import EpochMark, Fence, PartitionMark
from cremant.log.api import Log
from cremant.log.open import open_logs
from cremant.model.cluster import (
    ClusterView,
    PartitionRecord,
    PartitionView,
    TableRecord,
    TableView,
)
from cremant.model.names import SegmentName, epoch_topic
from cremant.model.offsets import OffsetRange, Position
from cremant.model.query_codes import QueryCode
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.model.segments import SegmentMetadata, SegmentStatus
from cremant.model.settings import Settings
from cremant.model.table import FlushConfig, StreamConfig, TableConfig
from cremant.segment.layout import stored_columns
from cremant.wire.codec import decode, encode
from cremant.wire.messages import ServerAnswer, ServerQuery, TailRequest

SCHEMA = Schema(
    name="trips",
    fields=(
        FieldSpec(name="city", data_type=DataType.STRING, field_type=FieldType.DIMENSION),
        FieldSpec(name="fare", data_type=DataType.LONG, field_type=FieldType.METRIC),
        FieldSpec(
            name="ts", data_type=DataType.LONG, field_type=FieldType.DATE_TIME,
            format="1:MILLISECONDS:EPOCH", granularity="1:MILLISECONDS",
        ),
    ),
)  # fmt: skip
CITIES = ("Berlin", "Köln", "München", "Ulm")


@dataclass
class EpochLog:
    """Writes what a pipeline would: fences, blocks, marks. Row i of partition p has fare i, city by i."""

    log: Log
    table: str = "trips"
    incarnation: str = "00000000000000aa"
    partitions: int = 1
    schema: Schema = SCHEMA
    generation: int = 0
    epoch: int = 0
    ends: list[int] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    newest_ms: int = 1_700_000_000_000

    def create(self) -> EpochLog:
        self.log.create_topic(epoch_topic(self.table, self.incarnation), self.partitions)
        return self.start()

    def start(self) -> EpochLog:
        self.ends = self.ends or [0] * self.partitions
        self.closed = self.closed or [0] * self.partitions
        self.generation += 1
        for partition in range(self.partitions):
            self.append(partition, Fence(generation=self.generation))
        return self

    def append(self, partition: int, record: Any) -> int:
        message = records.to_message(record, self.incarnation)
        return self.log.append(epoch_topic(self.table, self.incarnation), partition, [message]).first_offset

    def block(self, partition: int, rows: int) -> int:
        first = self.ends[partition]
        offsets = list(range(first, first + rows))
        columns = [
            pa.array(offsets, pa.int64()),
            pa.array([0] * rows, pa.int32()),
            pa.array([self.newest_ms + o for o in offsets], pa.int64()),
            pa.array([CITIES[o % len(CITIES)] for o in offsets], pa.string()),
            pa.array(offsets, pa.int64()),
            pa.array([self.newest_ms + o for o in offsets], pa.int64()),
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=stored_columns(self.schema))
        record = records.row_block(
            generation=self.generation, epoch=self.epoch + 1, config_version=1,
            range=OffsetRange(first, first + rows), batch=batch, timestamp_type="logAppend",
        )  # fmt: skip
        self.append(partition, record)
        self.ends[partition] += rows
        return first + rows

    def mark(self, *, reached_at_ms: int | None = None) -> int:
        lines = tuple(
            PartitionMark(end=end, rows=end - closed, stream_end=end, reached_at_ms=reached_at_ms)
            for end, closed in zip(self.ends, self.closed, strict=True)
        )
        mark = EpochMark(
            generation=self.generation, epoch=self.epoch + 1, previous=self.epoch, blocks_generation=self.generation,
            config_version=1, partitions=lines,
        )  # fmt: skip
        for partition in range(self.partitions):
            self.append(partition, mark)
        self.epoch += 1
        self.closed = list(self.ends)
        return self.epoch

    def write(self, rows: int, *, reached_at_ms: int | None = None) -> None:
        """One epoch with `rows` rows in each partition."""
        for partition in range(self.partitions):
            self.block(partition, rows)
        self.mark(reached_at_ms=reached_at_ms)


def table_record(flush_rows: int = 5_000_000, *, incarnation: str = "00000000000000aa", **config: Any) -> TableRecord:
    return TableRecord(
        config=TableConfig(
            name="trips", time_column="ts", replication=1, stream=StreamConfig(stream_type="embedded", topic="trips"),
            flush=FlushConfig(rows=flush_rows), **config,
        ),
        table_schema=SCHEMA,
        incarnation=incarnation,
    )  # fmt: skip


def open_segment_metadata(partition: int, sequence: int, start: Position, replicas: tuple[str, ...]) -> SegmentMetadata:
    return SegmentMetadata(
        name=str(SegmentName.new("trips", partition, sequence, 0)), partition=partition, sequence=sequence,
        status=SegmentStatus.IN_PROGRESS, start_offset=start.next_offset, start=start, created_ms=0, replicas=replicas,
    )  # fmt: skip


START = Position(log_offset=0, epoch=0, generation=0, next_offset=0)


def view_of(
    record: TableRecord, opened: list[SegmentMetadata], sealed: list[SegmentMetadata], version: int = 1
) -> ClusterView:
    partitions = tuple(
        PartitionView(
            record=PartitionRecord(
                partition=m.partition, consuming=m.name, sequence=m.sequence, replicas=m.replicas, start_offset=0
            ),
            consuming=m,
        )
        for m in opened
    )
    table = TableView(record=record, partitions=partitions, segments=tuple(sealed))
    return ClusterView(version=version, controller_nonce="n", tables={"trips": table})


class Kit:
    """Everything above, for tests."""

    EpochLog = EpochLog
    SCHEMA = SCHEMA
    CITIES = CITIES
    START = START
    table_record = staticmethod(table_record)
    open_segment_metadata = staticmethod(open_segment_metadata)
    view_of = staticmethod(view_of)

    @staticmethod
    def eventually(condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
        """Looks again and again, but takes a fifth of a core for it at most: what is waited for needs the cores."""
        until_s = time.monotonic() + timeout_s
        while True:
            began_s = time.monotonic()
            value = condition()
            if value:
                return value
            assert began_s < until_s, f"did not become true within {timeout_s} s"
            time.sleep(max(0.01, 4 * (time.monotonic() - began_s)))


# --- real processes ---

_RUN = """
import sys, json
from cremant.cli.child import die_with_parent
die_with_parent()
from cremant.model.settings import Settings
from cremant.{role}.main import run_{role}
options = json.loads(sys.argv[1])
run_{role}(Settings(("test", options["settings"])), port=options["port"], insecure=False)
"""


class Process:
    """One role as a process of its own; `kill` is kill -9. `settings`: beside those that every role gets here."""

    def __init__(self, role: str, root: Path, name: str, controller_url: str = "", **settings: Any) -> None:
        self.data_dir = root / name
        self._role, self._root = role, root
        self._settings = {
            "data_dir": str(self.data_dir), "log_dir": str(root / "log"), "store_uri": str(root / "store"),
            "controller_url": controller_url, **settings,
        }  # fmt: skip
        self._port = 0
        self.start()

    def start(self) -> None:
        address = self.data_dir / "address.json"
        address.unlink(missing_ok=True)
        self.data_dir.mkdir(parents=True, exist_ok=True)
        options = msgspec.json.encode({"settings": self._settings, "port": self._port}).decode()
        with (self._root / f"{self.data_dir.name}.log").open("ab") as out:
            command = [sys.executable, "-c", _RUN.format(role=self._role), options]
            # A role does not outlive the tests, whatever ends them.
            environment = {**os.environ, "CREMANT_PARENT_PID": str(os.getpid())}
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        Kit.eventually(address.exists)
        self.url = str(msgspec.json.decode(address.read_bytes())["url"])
        # The same address after a restart, as under a supervisor.
        self._port = int(self.url.rsplit(":", 1)[1])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)

    @property
    def id(self) -> str:
        """As a server is called in the view."""
        return f"Server_127.0.0.1_{self._port}"

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """It hangs: it holds its connections and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=10)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=10)


class Cluster:
    """A controller, servers, and an epoch log written by hand. `ask` does what a broker does, without retries."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self._root, self._settings = root, settings
        self.controller = Process("controller", root, "controller", **settings)
        self.http = httpx.Client(timeout=10, trust_env=False)
        self.servers: list[Process] = []
        known = {"data_dir": str(root), "log_dir": str(root / "log"), **settings}
        self.log = open_logs(Settings(("test", known))).epoch

    def add(self, role: str, name: str) -> Process:
        """One more process of a role, with the settings of all."""
        return Process(role, self._root, name, self.controller.url, **self._settings)

    def form(self, servers: int, partitions: int, flush_rows: int, replication: int, **segments: Any) -> None:
        """`segments`: of the table's segmentsConfig beside."""
        self.servers += [self.add("server", f"server-{i}") for i in range(servers)]
        self.log.create_topic("trips", partitions)
        self.config = self._create_table(flush_rows, replication, segments)
        self.incarnation = Kit.eventually(lambda: self.view().tables.get("trips")).record.incarnation
        self.epochs = EpochLog(self.log, incarnation=self.incarnation, partitions=partitions)

    def _create_table(self, flush_rows: int, replication: int, segments: dict[str, Any]) -> dict[str, Any]:
        fields = {
            "schemaName": "trips",
            "dimensionFieldSpecs": [{"name": "city", "dataType": "STRING"}],
            "metricFieldSpecs": [{"name": "fare", "dataType": "LONG"}],
            "dateTimeFieldSpecs": [
                {"name": "ts", "dataType": "LONG", "format": "1:MILLISECONDS:EPOCH", "granularity": "1:MILLISECONDS"}
            ],
        }
        stream = {
            "streamType": "embedded", "stream.embedded.topic.name": "trips",
            "stream.embedded.consumer.prop.auto.offset.reset": "smallest",
            "realtime.segment.flush.threshold.rows": str(flush_rows),
        }  # fmt: skip
        table: dict[str, Any] = {
            "tableName": "trips", "tableType": "REALTIME",
            "segmentsConfig": {
                "timeColumnName": "ts", "schemaName": "trips", "replication": str(replication), **segments,
            },
            "tenants": {}, "tableIndexConfig": {"streamConfigs": stream}, "metadata": {},
        }  # fmt: skip
        Kit.eventually(lambda: len([i for i in self.view().instances if i.live]) > len(self.servers) - 1)
        assert self.http.post(f"{self.controller.url}/schemas", json=fields).status_code == 200
        answer = self.http.post(f"{self.controller.url}/tables", json=table)
        assert answer.status_code == 200, answer.text
        return table

    def view(self) -> ClusterView:
        url = f"{self.controller.url}/internal/v1/view?since=-1&nonce=&timeoutMs=0"
        # 304 until a controller that has just started has made its first view.
        return decode(Kit.eventually(lambda: self.http.get(url).content), ClusterView)

    def ask(self, server: Process, sql: str, *, view: ClusterView | None = None) -> tuple[ServerAnswer, pa.Table]:
        """All of the table from this one server."""
        table = (view or self.view()).tables["trips"]
        query = ServerQuery(
            request_id="q", table="trips", incarnation=self.incarnation, sql=sql, columns=("city", "fare", "$offset"),
            segments=tuple(segment.name for segment in table.segments),
            tails=tuple(
                TailRequest(partition=partition.record.partition, from_offset=partition.consuming.start_offset)
                for partition in table.partitions
            ),
            budget_ms=10_000,
        )  # fmt: skip
        body = self.http.post(f"{server.url}/internal/v1/query", content=encode(query)).content
        length = int.from_bytes(body[:4], "big")
        header = decode(body[4 : 4 + length], ServerAnswer)
        if header.error_code == QueryCode.SERVER_TABLE_MISSING:  # it has just started and has no view yet
            return header, pa.table({})
        assert header.error_code == 0, header.error
        return header, pa.ipc.open_stream(body[4 + length :]).read_all()

    def totals(self, server: Process, view: ClusterView | None = None) -> tuple[int, int, int] | None:
        """(count, sum of fares, rows promised by the watermarks), or None if the server could not serve all of it."""
        known = view or self.view()
        header, table = self.ask(server, "SELECT count(*) c, coalesce(sum(fare), 0) s FROM t", view=known)
        if header.error_code or header.missing_segments or header.behind_partitions:
            return None
        promised = sum(partition.covered.next for partition in header.partitions)
        return int(table["c"][0].as_py()), int(table["s"][0].as_py()), promised

    def expected(self) -> tuple[int, int, int]:
        ends = self.epochs.ends
        return sum(ends), sum(end * (end - 1) // 2 for end in ends), sum(ends)

    def holds_everything(self, server: Process) -> bool:
        try:
            return self.totals(server) == self.expected()
        except (httpx.HTTPError, AssertionError):
            return False

    def close(self) -> None:
        for process in (*self.servers, self.controller):
            process.close()
        self.http.close()
        self.log.close()
