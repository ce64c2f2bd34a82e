# SPDX-License-Identifier: Apache-2.0
"""`GET /segments/{table}/{segment}` on the controller: the segment's archive, as servers give it, for tools.

It passes on what a live holder sends, ranges too, asked by the table's scheme. When none does, it gets the file from
the deep store, verified, and sends the same archive whole. Servers fetch from each other and the store, never here.
"""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import IO

import httpx
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from cremant.controller.core import Controller
from cremant.controller.http import raw_name
from cremant.model.errors import CremantError, NotFound, Unavailable
from cremant.model.limits import CONTROLLER_DOWNLOADS_MAX, PEER_CONNECT_MS, PEER_SILENCE_MS
from cremant.model.segments import SegmentMetadata, SegmentStatus
from cremant.segment.archive import Archive
from cremant.segment.build import PARQUET_FILE

_ASKED = ("range", "if-range", "if-match")
_TOLD = (
    "content-type", "content-length", "content-range", "content-disposition", "accept-ranges", "etag",
    "x-cremant-content-checksum", "x-cremant-file-checksum",
)  # fmt: skip
_CHUNK_BYTES = 1024 * 1024


class DownloadRest:
    """`authorities`: who vouches for servers that are asked by HTTPS; those of the system if None."""

    def __init__(self, controller: Controller, authorities: ssl.SSLContext | None) -> None:
        self._controller = controller
        self._authorities = authorities or ssl.create_default_context()
        self._running = 0

    def routes(self) -> list[BaseRoute]:
        return [Route("/segments/{table}/{segment}", self.download, methods=["GET"])]

    async def download(self, request: Request) -> Response:
        segment = self._segment(request)
        if self._running >= CONTROLLER_DOWNLOADS_MAX:
            raise Unavailable(f"{self._running} downloads are running already", hint="try again later")
        async with AsyncExitStack() as stack:
            self._running += 1
            stack.callback(self._release)
            troubles: list[str] = []
            answer = await self._from_holder(stack, request, segment, troubles)
            if answer is None:
                answer = await self._from_store(stack, segment, troubles)
            if answer is None:
                raise Unavailable(f"segment {segment.name} cannot be had now: {'; '.join(troubles)}")
            answer.cleanup = stack.pop_all()
            return answer
        raise AssertionError  # the stack swallows nothing

    def _release(self) -> None:
        self._running -= 1

    def _segment(self, request: Request) -> SegmentMetadata:
        table, name = raw_name(request.path_params["table"]), request.path_params["segment"]
        with self._controller.catalog.lock:
            known = self._controller.catalog.segments.get(table, {}).get(name)
        if known is None or known.status is not SegmentStatus.DONE:
            raise NotFound(f"table {table} has no sealed segment {name}")
        return known

    def _by_tls(self, request: Request) -> bool:
        record = self._controller.catalog.tables.get(raw_name(request.path_params["table"]))
        return record is not None and record.config.completion.peer_scheme == "https"

    async def _from_holder(
        self, stack: AsyncExitStack, request: Request, segment: SegmentMetadata, troubles: list[str]
    ) -> _Download | None:
        timeout = httpx.Timeout(PEER_SILENCE_MS / 1000, connect=PEER_CONNECT_MS / 1000)
        client = await stack.enter_async_context(
            httpx.AsyncClient(timeout=timeout, trust_env=False, verify=self._authorities)
        )
        by_tls = self._by_tls(request)
        headers = {name: request.headers[name] for name in _ASKED if name in request.headers}
        for holder in self._controller.instances.described():
            if holder.id not in segment.copies:
                continue
            if not holder.live:
                troubles.append(f"{holder.id} is away")
                continue
            base = holder.tls_url if by_tls else holder.url
            if not base:
                troubles.append(f"{holder.id} offers no HTTPS, which the table demands (settings tls_cert, tls_key)")
                continue
            asked = client.build_request(
                "GET", f"{base}{request.url.path}", params=request.query_params, headers=headers
            )
            try:
                response = await client.send(asked, stream=True)
            except httpx.HTTPError as error:
                troubles.append(f"{holder.id}: {type(error).__name__} {error}")
                continue
            stack.push_async_callback(response.aclose)
            if response.status_code in (200, 206, 409, 416):
                told = {name: response.headers[name] for name in _TOLD if name in response.headers}
                return _Download(response.aiter_raw(), response.status_code, told)
            troubles.append(f"{holder.id}: status {response.status_code}")
        return None

    async def _from_store(
        self, stack: AsyncExitStack, segment: SegmentMetadata, troubles: list[str]
    ) -> _Download | None:
        if segment.store_url is None:
            troubles.append("the deep store does not have it")
            return None
        url = segment.store_url
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        target = scratch / PARQUET_FILE
        try:
            store, name = self._controller.deep_store.by_url(url)
            await run_in_threadpool(store.get, name, target, checksum=segment.file_checksum)
        except CremantError as error:
            troubles.append(str(error))
            return None
        parquet = stack.enter_context(target.open("rb"))
        size_bytes = target.stat().st_size
        crc32 = await run_in_threadpool(Archive(segment.name, size_bytes).tar_crc32, parquet)
        archive = Archive(segment.name, size_bytes, crc32)
        told = {
            "content-type": "application/gzip",
            "content-length": str(archive.size_bytes),
            "content-disposition": f'attachment; filename="{segment.name}.tar.gz"',
            "x-cremant-content-checksum": segment.checksum or "",
            "x-cremant-file-checksum": segment.file_checksum or "",
        }
        return _Download(_chunks(archive, parquet), 200, told)


class _Download(StreamingResponse):
    """Lets go of connections, places and files when it ends, however it ends."""

    cleanup: AsyncExitStack

    def __init__(self, body: AsyncIterator[bytes], status: int, headers: dict[str, str]) -> None:
        super().__init__(body, status, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.cleanup:
            await super().__call__(scope, receive, send)


async def _chunks(archive: Archive, parquet: IO[bytes]) -> AsyncIterator[bytes]:
    for first in range(0, archive.size_bytes, _CHUNK_BYTES):
        until = min(first + _CHUNK_BYTES, archive.size_bytes)
        yield await run_in_threadpool(archive.read, parquet, first, until)
