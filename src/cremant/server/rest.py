# SPDX-License-Identifier: Apache-2.0
"""HTTP routes of a server: the internal query endpoint and the few of Pinot's server endpoints that tools ask for."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from cremant.model.errors import Unavailable
from cremant.model.limits import QUERY_TEXT_CHARS_MAX
from cremant.model.names import raw_table_name
from cremant.server.hosting import Hosting
from cremant.server.query import QueryService
from cremant.server.table import HostedTable
from cremant.shell.app import json_response, read_body
from cremant.shell.member import Member
from cremant.shell.segment_json import full_metadata
from cremant.wire.codec import decode
from cremant.wire.messages import ServerQuery

#: A query text may grow by planning, and brings lists of segments along.
QUERY_BODY_BYTES_MAX = 8 * QUERY_TEXT_CHARS_MAX


def routes(hosting: Hosting, queries: QueryService, member: Member) -> list[BaseRoute]:
    async def query(request: Request) -> Response:
        if member.fenced:
            raise Unavailable(f"{member.id} was taken over by another process")
        message = decode(await read_body(request, QUERY_BODY_BYTES_MAX), ServerQuery)
        return Response(await queries.answer(message), media_type="application/octet-stream")

    async def cancel(request: Request) -> Response:
        return Response(status_code=200 if queries.cancel(request.path_params["id"]) else 404)

    async def tables(request: Request) -> Response:
        return json_response({"tables": sorted(f"{name}_REALTIME" for name in hosting.tables)})

    async def segments(request: Request) -> Response:
        table = _table(hosting, request)
        if table is None:
            return _no_table(request)
        with table.lock:
            names = [name for name, hosted in table.segments.items() if hosted.sealed is not None]
            names += [metadata.name for metadata in table.open.values() if metadata.name not in table.segments]
        return json_response({"segments": sorted(names)})

    async def segment_metadata(request: Request) -> Response:
        table = _table(hosting, request)
        if table is None:
            return _no_table(request)
        name = request.path_params["segment"]
        with table.lock:
            hosted = table.segments.get(name)
            opened = next((metadata for metadata in table.open.values() if metadata.name == name), None)
            metadata = hosted.metadata if hosted is not None and hosted.sealed is not None else opened
            record = table.record
        if metadata is None:
            text = f"Table {request.path_params['table']} segments {name} does not exist"
            return json_response({"message": text, "status": 404}, 404)
        return json_response(full_metadata(record, metadata))

    async def size(request: Request) -> Response:
        table = _table(hosting, request)
        if table is None:
            return _no_table(request)
        with table.lock:
            sizes = [
                {"segmentName": name, "diskSizeInBytes": hosted.sealed.disk_bytes}
                for name, hosted in sorted(table.segments.items())
                if hosted.sealed is not None
            ]
        total = sum(int(str(entry["diskSizeInBytes"])) for entry in sizes)
        return json_response({"tableName": f"{table.name}_REALTIME", "diskSizeInBytes": total, "segments": sizes})

    async def liveness(request: Request) -> Response:
        return PlainTextResponse("OK")

    async def readiness(request: Request) -> Response:
        is_ready, why = hosting.ready()
        return PlainTextResponse("OK" if is_ready else why, 200 if is_ready else 503)

    return [
        Route("/internal/v1/query", query, methods=["POST"]),
        Route("/internal/v1/query/{id}", cancel, methods=["DELETE"]),
        Route("/tables", tables),
        Route("/tables/{table}/segments", segments),
        Route("/tables/{table}/segments/{segment}/metadata", segment_metadata),
        Route("/tables/{table}/size", size),
        Route("/health/liveness", liveness),
        Route("/health/readiness", readiness),
    ]


def _table(hosting: Hosting, request: Request) -> HostedTable | None:
    return hosting.tables.get(raw_table_name(request.path_params["table"]))


def _no_table(request: Request) -> Response:
    text = f"Table {request.path_params['table']} does not exist"
    return json_response({"message": text, "status": 404}, 404)
