# SPDX-License-Identifier: Apache-2.0
"""Sealed segments for other servers: `GET /tables/{table}/segments/{segment}`, and at Pinot's place,
`GET /segments/{table}/{segment}`.

The answer is a `.tar.gz` (segment/archive.py) with the checksums of content and file in headers; ranges resume a
transfer that broke. A caller that expects a certain content says so (`?checksum=` or `If-Match`) and gets 409 if it is
another one. Names are looked up, never made into paths.

Transfers are bounded per server and per caller (429, Retry-After), limited in rate if so configured, read in threads of
their own, and cut off when the caller stops reading: queries go on beside them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from cremant.completion.fetch import Cause
from cremant.model.errors import Corrupt, NotFound
from cremant.model.limits import (
    ARCHIVES_KNOWN_MAX,
    PEER_STALL_MS,
    PEER_TRANSFERS_EACH_MAX,
    PEER_TRANSFERS_MAX,
)
from cremant.model.names import OFFLINE_SUFFIX, raw_table_name
from cremant.segment.archive import Archive
from cremant.segment.build import PARQUET_FILE
from cremant.segment.reader import SealedSegment
from cremant.server.hosting import Hosting
from cremant.server.pool import DaemonPool
from cremant.shell.app import error_response
from cremant.shell.logs import log_failure
from cremant.shell.rate import Rate

_log = logging.getLogger(__name__)

#: Over the decoded columns: what the segment's metadata says.
CONTENT_HEADER = "X-Cremant-Content-Checksum"
#: Over the bytes of the Parquet file within the archive.
FILE_HEADER = "X-Cremant-File-Checksum"
#: Who asks: the instance id of a server.
CALLER_HEADER = "X-Cremant-Instance"

#: Larger ones cost twice the CPU (90 ms instead of 50 for 100 MB): the allocator gives their memory back each time.
_CHUNK_BYTES = 256 * 1024
_CHUNK_BYTES_MIN = 16 * 1024
_RETRY_AFTER_S = 1
_RANGE = re.compile(r"^bytes=(\d+)-(\d*)$")
T = TypeVar("T")


@dataclass(slots=True)
class Sent:
    """Totals for metrics."""

    transfers: int = 0
    bytes: int = 0
    #: By the cause that the caller sees.
    refused: Counter[Cause] = field(default_factory=Counter)
    broken: int = 0


class PeerService:
    """Sends sealed segments of the tables that `hosting` has. `bytes_per_s`: all transfers together, 0 = no limit."""

    def __init__(
        self,
        hosting: Hosting,
        *,
        bytes_per_s: int = 0,
        transfers_max: int = PEER_TRANSFERS_MAX,
        each_max: int = PEER_TRANSFERS_EACH_MAX,
        stall_ms: int = PEER_STALL_MS,
    ) -> None:
        self._hosting = hosting
        self._rate = Rate(bytes_per_s)
        self._transfers_max = transfers_max
        self._each_max = each_max
        self._stall_s = stall_ms / 1000
        self._running: Counter[str] = Counter()
        #: Segment and its file's checksum -> checksum of the tar around it, which has the name in it: segments of two
        #: partitions may have equal files. Used from the event loop only.
        self._known: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._pool = DaemonPool(transfers_max, "peer")
        #: A slow rate in small pieces, so that a receiver hears something every second.
        self.chunk_bytes = min(_CHUNK_BYTES, max(_CHUNK_BYTES_MIN, bytes_per_s)) if bytes_per_s else _CHUNK_BYTES
        self.sent = Sent()

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/tables/{table}/segments/{segment}", self.download),
            Route("/segments/{table}/{segment}", self.download),
        ]

    def close(self) -> None:
        self._pool.close()

    async def download(self, request: Request) -> Response:
        table, segment = request.path_params["table"], request.path_params["segment"]
        sealed = self._sealed(table, segment)
        expected = request.query_params.get("checksum") or _unquoted(request.headers.get("If-Match", "*"))
        if expected not in ("*", sealed.marker.checksum, _etag(sealed)):
            self.sent.refused[Cause.OTHER_CONTENT] += 1
            return error_response(
                409, f"segment {segment}: this server has content {sealed.marker.checksum}, expected {expected}",
                kind="Conflict",
            )  # fmt: skip
        caller = request.headers.get(CALLER_HEADER) or (request.client.host if request.client else "")
        if self._running.total() >= self._transfers_max or self._running[caller] >= self._each_max:
            self.sent.refused[Cause.BUSY] += 1
            running = f"{self._running.total()} transfers are running, {self._running[caller]} of them to {caller}"
            refused = error_response(429, f"segment {segment}: {running}", kind="Unavailable")
            refused.headers["Retry-After"] = str(_RETRY_AFTER_S)
            return refused
        self._running[caller] += 1  # given back by the response, which always runs
        try:
            return await self._response(request, sealed, caller)
        except BaseException as error:
            self.release(caller)
            if isinstance(error, Corrupt | NotFound):
                self.doubt(table, segment)
            raise

    def doubt(self, table: str, segment: str) -> None:
        """Its file is cut off or gone: it is read in full, and fetched if it is damaged."""
        with contextlib.suppress(NotFound):  # it was just deleted
            self._hosting.reset(raw_table_name(table), segment)

    def release(self, caller: str) -> None:
        self._running[caller] -= 1
        self._running += Counter()  # forget who has none

    def _sealed(self, table: str, segment: str) -> SealedSegment:
        hosted = None if table.endswith(OFFLINE_SUFFIX) else self._hosting.tables.get(raw_table_name(table))
        if hosted is not None:
            with hosted.lock:
                found = hosted.segments.get(segment)
                if found is not None and found.sealed is not None:
                    return found.sealed
        self.sent.refused[Cause.NOT_HELD] += 1
        raise NotFound(f"this server has no sealed segment {segment} of table {table}")

    async def _response(self, request: Request, sealed: SealedSegment, caller: str) -> Response:
        parquet = await self._in_thread(_open, sealed)
        try:
            archive = await self._archive(sealed, parquet)
            wanted = request.headers.get("Range", "")
            if request.headers.get("If-Range", _quoted(_etag(sealed))) != _quoted(_etag(sealed)):
                wanted = ""
            return _Transfer(self, archive, parquet, sealed, caller, wanted)
        except BaseException:
            parquet.close()
            raise

    async def _archive(self, sealed: SealedSegment, parquet: IO[bytes]) -> Archive:
        name, size_bytes = sealed.name, sealed.marker.parquet_bytes
        key = (name, _etag(sealed))
        crc32 = self._known.get(key)
        if crc32 is None:
            crc32 = await self._in_thread(Archive(name, size_bytes).tar_crc32, parquet)
            self._known[key] = crc32
            while len(self._known) > ARCHIVES_KNOWN_MAX:
                self._known.popitem(last=False)
        return Archive(name, size_bytes, crc32)

    def wait_s(self, size_bytes: int) -> float:
        """How long the rate limit makes the next bytes wait."""
        return self._rate.take(size_bytes, time.monotonic())

    async def chunk(self, archive: Archive, parquet: IO[bytes], first: int, until: int) -> bytes:
        return await self._in_thread(archive.read, parquet, first, until)

    async def _in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.wrap_future(self._pool.submit(functools.partial(call, *arguments)))

    def send_within(self) -> asyncio.Timeout:
        return asyncio.timeout(self._stall_s)


class _Transfer(Response):
    """The archive, or the range of it that was asked for."""

    def __init__(
        self,
        service: PeerService,
        archive: Archive,
        parquet: IO[bytes],
        sealed: SealedSegment,
        caller: str,
        wanted: str,
    ) -> None:
        self._service, self._archive, self._parquet, self._caller = service, archive, parquet, caller
        self._segment = sealed.name
        size_bytes = archive.size_bytes
        headers = {
            CONTENT_HEADER: sealed.marker.checksum,
            FILE_HEADER: sealed.marker.file_checksum,
            "ETag": _quoted(_etag(sealed)),
            "Accept-Ranges": "bytes",
            "Content-Disposition": f'attachment; filename="{sealed.name}.tar.gz"',
        }
        self._first, self._until = 0, size_bytes
        status = 200
        if (match := _RANGE.match(wanted)) is not None:
            self._first = int(match.group(1))
            self._until = min(size_bytes, int(match.group(2)) + 1) if match.group(2) else size_bytes
            status = 206 if self._first < self._until else 416
            shown = f"{self._first}-{self._until - 1}" if status == 206 else "*"
            headers["Content-Range"] = f"bytes {shown}/{size_bytes}"
            if status == 416:
                self._until = self._first
        headers["Content-Length"] = str(self._until - self._first)
        super().__init__(None, status, headers, "application/gzip")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if scope["method"] != "HEAD":
                await self._send_body(send, gone)
            async with self._service.send_within():  # the last bytes are waited for here
                await send({"type": "http.response.body", "body": b""})
            self._service.sent.transfers += 1
        except (TimeoutError, OSError, Corrupt) as error:
            # An answer without its end: the server closes the connection, the receiver sees that bytes are missing.
            self._service.sent.broken += 1
            log_failure(_log, "a transfer to a peer broke off", error, segment=self._segment, caller=self._caller)
            if isinstance(error, Corrupt):
                self._service.doubt(scope["path_params"]["table"], self._segment)
        finally:
            gone.cancel()
            self._parquet.close()
            self._service.release(self._caller)

    async def _send_body(self, send: Send, gone: asyncio.Future[None]) -> None:
        """Raises TimeoutError (the receiver reads nothing), OSError (it is gone), Corrupt (the file is cut off)."""
        service, at = self._service, self._first
        while at < self._until:
            until = min(at + service.chunk_bytes, self._until)
            wait_s = service.wait_s(until - at)
            if wait_s > 0:
                await asyncio.wait({gone}, timeout=wait_s)
            body = await service.chunk(self._archive, self._parquet, at, until)
            if gone.done():
                raise ConnectionResetError(f"the receiver left after {at - self._first} bytes")
            async with service.send_within():
                await send({"type": "http.response.body", "body": body, "more_body": True})
            service.sent.bytes += len(body)
            at = until


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _open(sealed: SealedSegment) -> IO[bytes]:
    """Stays readable when the segment is deleted meanwhile."""
    try:
        return (sealed.directory / PARQUET_FILE).open("rb")
    except FileNotFoundError as error:
        raise NotFound(f"segment {sealed.name} was just deleted here") from error


def _etag(sealed: SealedSegment) -> str:
    """Equal files under one name are equal archives."""
    return sealed.marker.file_checksum.replace(":", "-")


def _quoted(tag: str) -> str:
    return f'"{tag}"'


def _unquoted(tag: str) -> str:
    return tag.strip().removeprefix("W/").strip('"')
