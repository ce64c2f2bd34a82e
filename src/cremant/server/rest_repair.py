# SPDX-License-Identifier: Apache-2.0
"""What the controller, or an operator, asks a server about one of its replicas: begin anew, upload, tell its story."""

from __future__ import annotations

from typing import Protocol

import anyio
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from cremant.model.errors import NotFound
from cremant.model.limits import REPAIR_UPLOAD_TIMEOUT_MS, REPAIR_UPLOADS_MAX
from cremant.model.names import raw_table_name
from cremant.model.segments import SegmentMetadata
from cremant.server.hosting import Hosting
from cremant.server.table import HostedTable
from cremant.shell.app import json_response
from cremant.shell.journal import Journal

#: The caller gives up a moment later.
_UPLOAD_TIMEOUT_S = REPAIR_UPLOAD_TIMEOUT_MS / 1000 - 2


class Uploader(Protocol):
    def upload_now(self, table: HostedTable, metadata: SegmentMetadata, timeout_s: float) -> str:
        """Puts this server's verified copy into the store and has it recorded; returns its URL. Raises CremantError."""


def repair_routes(hosting: Hosting, uploader: Uploader) -> list[BaseRoute]:
    #: Own threads: uploads that hang must not keep other requests waiting.
    threads = anyio.CapacityLimiter(REPAIR_UPLOADS_MAX)

    async def reset(request: Request) -> Response:
        table, segment = _names(request)
        hosting.reset(table, segment)
        return json_response({"status": f"Successfully reset segment: {segment} of table: {table}_REALTIME"})

    async def upload(request: Request) -> Response:
        table, segment = _names(request)
        hosted = hosting.tables.get(table)
        known = hosted.segments.get(segment) if hosted is not None else None
        if hosted is None or known is None:
            raise NotFound(f"Table {table}_REALTIME segment {segment} is not sealed on this server")
        url = await anyio.to_thread.run_sync(
            uploader.upload_now, hosted, known.metadata, _UPLOAD_TIMEOUT_S, limiter=threads
        )
        return json_response({"segmentName": segment, "downloadUrl": url})

    return [
        Route("/segments/{table}/{segment}/reset", reset, methods=["POST"]),
        Route("/segments/{table}/{segment}/upload", upload, methods=["POST"]),
    ]


def story_routes(journal: Journal) -> list[BaseRoute]:
    async def story(request: Request) -> Response:
        _, segment = _names(request)
        return json_response({"events": await run_in_threadpool(journal.story, segment)})

    return [Route("/segments/{table}/{segment}/story", story)]


def _names(request: Request) -> tuple[str, str]:
    return raw_table_name(request.path_params["table"]), request.path_params["segment"]
