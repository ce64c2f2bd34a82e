# SPDX-License-Identifier: Apache-2.0
"""What this server knows of rows of upsert tables, for others: the second delivery service of the key coordinator.

    GET /tables/{table}/segments/{segment}/versions?checksum=&notBefore=&waitMs=
        a snapshot (segment/snapshot.py) as of the last epoch closed here; waits a moment for epoch `notBefore`
    GET /updates?table=&segments=a,b&from=E
        an Arrow stream of the updates of epochs after E that rows of these segments got: `$segment`, `$epoch`,
        `$offset`, `$subRow`, `op`; its schema says under `cremant` up to where (JSON: segment -> position). 409 where
        rows that were updated since are gone, or what was in force at E is not known

Names are looked up, never made into paths. Few at once; made in threads of their own: queries go on beside them.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from cremant.completion.fetch import Cause
from cremant.model.errors import Conflict, NotFound, Unavailable, UserError
from cremant.model.names import OFFLINE_SUFFIX, raw_table_name
from cremant.model.offsets import Position
from cremant.segment.snapshot import Snapshot, pack
from cremant.segment.versions import UPDATES_SCHEMA, Versions
from cremant.server.hosting import Hosting
from cremant.server.partition import Partition
from cremant.server.peers import CONTENT_HEADER, Sent
from cremant.server.pool import DaemonPool
from cremant.server.table import HostedSegment, HostedTable
from cremant.shell.app import error_response

#: Snapshots and updates that are made at once.
_THREADS = 2
_WAITING_MAX = 8
#: How long a caller may have it wait for an epoch.
WAIT_MAX_MS = 5_000
_LOOK_EVERY_S = 0.02
SEGMENT = "$segment"
PULLED_SCHEMA = pa.schema([pa.field(SEGMENT, pa.string(), nullable=False), *UPDATES_SCHEMA])
#: Key of the schema's metadata.
POSITIONS = b"cremant"
_MEDIA_TYPE = "application/octet-stream"
T = TypeVar("T")


def snapshot_of(table: HostedTable, hosted: HostedSegment, checksum: str | None = None) -> Snapshot:
    """Versions of a sealed segment as of the last epoch closed here, for whoever may keep them. `checksum`: the content
    whose versions are wanted; compaction changes both at once. Raises NotFound."""
    name = hosted.metadata.name
    partition = table.updater(hosted.metadata.partition)
    if partition is None:
        raise NotFound(f"this server does not follow the updates of segment {name} of table {table.name}")
    with partition.lock:  # between two epochs: nobody writes
        with table.lock:
            versions, sealed = followed(partition, hosted), hosted.sealed
        if versions is None:
            raise NotFound(f"this server does not know which rows of segment {name} of table {table.name} are in force")
        if checksum is not None and (sealed is None or sealed.marker.checksum != checksum):
            raise NotFound(f"segment {name} of table {table.name} has other content than {checksum} here")
        # Versions that were fetched may be ahead of the partition: the log says again what is in them, and is skipped.
        return Snapshot(versions.copied(), partition.position)


def followed(reader: Partition, hosted: HostedSegment) -> Versions | None:
    """The segment's versions, if they have all that the reader has applied; its lock is held. Those that lost their
    reader are of an earlier epoch than it says."""
    versions = hosted.versions
    if versions is None or reader.versions is None:
        return None
    return versions if reader.versions.attached().get(hosted.metadata.name) is versions else None


class VersionsService:
    """Of the tables that `hosting` has."""

    def __init__(self, hosting: Hosting) -> None:
        self._hosting = hosting
        self._pool = DaemonPool(_THREADS, "versions")
        self._waiting = 0
        #: For metrics.
        self.sent = Sent()

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/tables/{table}/segments/{segment}/versions", self.versions),
            Route("/updates", self.updates),
        ]

    def close(self) -> None:
        self._pool.close()

    async def versions(self, request: Request) -> Response:
        query = request.query_params
        table = self._table(request.path_params["table"])
        hosted = self._hosted(table, request.path_params["segment"])
        sealed = hosted.sealed
        checksum = sealed.marker.checksum if sealed is not None else ""
        expected = query.get("checksum", checksum)
        if expected != checksum:
            self.sent.refused[Cause.OTHER_CONTENT] += 1
            said = f"segment {hosted.metadata.name}: this server has content {checksum}, expected {expected}"
            return error_response(409, said, kind="Conflict")
        await self._wait(table, hosted, _number(query, "notBefore", 0), _number(query, "waitMs", 0))

        def packed() -> bytes:
            return pack(snapshot_of(table, hosted, checksum), segment=hosted.metadata.name, checksum=checksum)

        return self._answer(await self._in_thread(packed), {CONTENT_HEADER: checksum})

    async def updates(self, request: Request) -> Response:
        query = request.query_params
        if "table" not in query or "from" not in query:
            raise UserError("updates are asked for with table, segments and from (an epoch)")
        table, after = self._table(query["table"]), _number(query, "from", 0)
        names = [name for name in query.get("segments", "").split(",") if name]
        segments = [self._hosted(table, name) for name in names]
        return self._answer(await self._in_thread(lambda: updates_of(table, segments, after)), {})

    def _answer(self, body: bytes, headers: Mapping[str, str]) -> Response:
        self.sent.transfers += 1
        self.sent.bytes += len(body)
        return Response(body, headers=dict(headers), media_type=_MEDIA_TYPE)

    async def _wait(self, table: HostedTable, hosted: HostedSegment, epoch: int, wait_ms: int) -> None:
        """Who asks has read further than we have; in a moment we may have, too."""
        ends_s = time.monotonic() + min(max(wait_ms, 0), WAIT_MAX_MS) / 1000
        while time.monotonic() < ends_s:
            partition = table.updater(hosted.metadata.partition)
            if partition is None or partition.position.epoch >= epoch:
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        if self._waiting >= _WAITING_MAX:
            self.sent.refused[Cause.BUSY] += 1
            raise Unavailable(f"{self._waiting} snapshots and updates are under way here", hint="try again")
        self._waiting += 1
        try:
            return await asyncio.wrap_future(self._pool.submit(call))
        finally:
            self._waiting -= 1

    def _table(self, name: str) -> HostedTable:
        table = None if name.endswith(OFFLINE_SUFFIX) else self._hosting.tables.get(raw_table_name(name))
        if table is None:
            self.sent.refused[Cause.NOT_HELD] += 1
            raise NotFound(f"this server has nothing of table {name}")
        if table.record.config.upsert is None:
            raise UserError(f"table {name} is no upsert table: its rows have no versions")
        return table

    def _hosted(self, table: HostedTable, segment: str) -> HostedSegment:
        with table.lock:
            hosted = table.segments.get(segment)
        if hosted is None or hosted.versions is None:
            self.sent.refused[Cause.NOT_HELD] += 1
            raise NotFound(f"this server does not know which rows of segment {segment} of {table.name} are in force")
        return hosted


def updates_of(table: HostedTable, segments: list[HostedSegment], after: int) -> bytes:
    """The body of `/updates`."""
    positions: dict[str, Position] = {}
    batches: list[pa.RecordBatch] = []
    for hosted in segments:
        snapshot, name = snapshot_of(table, hosted), hosted.metadata.name
        if after < (horizon := snapshot.versions.horizon):
            raise Conflict(
                f"updates of segment {name} of table {table.name} are known from epoch {horizon} on, "
                f"asked for are those after epoch {after}",
                hint=f"fetch its versions: GET /tables/{table.name}/segments/{name}/versions",
            )
        updates = snapshot.versions.updates_since(after)
        positions[name] = snapshot.position
        # What versions have beyond the position is in the log behind it.
        known = int(np.searchsorted(updates.column("$epoch").to_numpy(), snapshot.position.epoch, side="right"))
        names = pa.repeat(name, known)
        batches.append(pa.RecordBatch.from_arrays([names, *updates.slice(0, known).columns], schema=PULLED_SCHEMA))
    sink = io.BytesIO()
    schema = PULLED_SCHEMA.with_metadata({POSITIONS: msgspec.json.encode(positions)})
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


def _number(query: Mapping[str, Any], name: str, default: int) -> int:
    said = str(query.get(name, default))
    if not said.isdigit():
        raise UserError(f"{name} is a number, found {said!r}")
    return int(said)
