# SPDX-License-Identifier: Apache-2.0
"""A small HTTP/1.1 client for server queries: requests with a body, answers with a Content-Length, connections kept.

Why not httpx: a point query has a budget of a few ms for everything, and this needs little code because it speaks only
to Cremant's own servers and fails (PeerError) on anything it does not expect.
A kept connection that turns out to be closed is replaced once, silently: the request had not been read. Those that
servers closed are let go of whenever a new one is opened.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from urllib.parse import urlsplit

from cremant.model.errors import PeerError, Unavailable

#: Idle connections kept per server.
_IDLE_MAX = 16
_READ_LIMIT_BYTES = 1024 * 1024


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def request(self, head: str, body: bytes, make_room: Callable[[int], None]) -> tuple[int, bytes]:
        self._writer.write(head.encode("latin-1") + body)
        await self._writer.drain()
        answer_head = await self._reader.readuntil(b"\r\n\r\n")
        status, length = _parse_head(answer_head)
        make_room(length)
        return status, await self._reader.readexactly(length)

    @property
    def ended(self) -> bool:
        """Closed by the other side."""
        return self._reader.at_eof() or self._reader.exception() is not None

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # already gone, or the loop is closing
            self._writer.close()


def _parse_head(head: bytes) -> tuple[int, int]:
    lines = head.split(b"\r\n")
    parts = lines[0].split(b" ", 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
        raise PeerError(f"not an HTTP answer: {lines[0][:100]!r}")
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(parts[1]), int(value)
    raise PeerError("the answer does not say how long it is")


class Peers:
    """Connections to all servers of the cluster. Used from one event loop."""

    def __init__(self) -> None:
        self._idle: dict[str, list[_Connection]] = {}

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    async def post(
        self,
        url: str,
        path: str,
        body: bytes,
        *,
        headers: dict[str, str],
        timeout_s: float,
        make_room: Callable[[int], None] = lambda length: None,
    ) -> bytes:
        """The answer's body. Raises Unavailable (not reachable, gone, out of time) or PeerError (refused, nonsense).

        `make_room` is told how long the answer is before it is read, and may raise a CremantError to refuse it."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        status, answer = await self._send("POST", url, path, body, lines, timeout_s, make_room)
        if status != 200:
            raise PeerError(f"{url} answered {status}: {answer[:300].decode('utf-8', 'replace')}")
        return answer

    async def get(self, url: str, path: str, *, timeout_s: float) -> bytes:
        """The answer's body. Raises as `post`."""
        status, answer = await self._send("GET", url, path, b"", "", timeout_s, lambda length: None)
        if status != 200:
            raise PeerError(f"{url} answered {status}: {answer[:300].decode('utf-8', 'replace')}")
        return answer

    async def status(self, method: str, url: str, path: str, *, timeout_s: float) -> int:
        """The answer's status. Raises Unavailable or PeerError."""
        status, _ = await self._send(method, url, path, b"", "", timeout_s, lambda length: None)
        return status

    async def _send(
        self, method: str, url: str, path: str, body: bytes, headers: str, timeout_s: float,
        make_room: Callable[[int], None],
    ) -> tuple[int, bytes]:  # fmt: skip
        address = urlsplit(url)
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {address.hostname}\r\nContent-Type: application/json\r\n{headers}"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(timeout_s):
                return await self._request(url, address.hostname or "", address.port or 80, head, body, make_room)
        except TimeoutError as error:
            raise Unavailable(f"{url} did not answer in {timeout_s * 1000:.0f} ms") from error
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise Unavailable(f"{url}: {error or type(error).__name__}") from error

    async def _request(
        self, url: str, host: str, port: int, head: str, body: bytes, make_room: Callable[[int], None]
    ) -> tuple[int, bytes]:
        idle = self._idle.setdefault(url, [])
        if idle:
            connection = idle.pop()
            try:
                return await self._use(connection, idle, head, body, make_room)
            except (OSError, asyncio.IncompleteReadError):
                # Closed by the other side while it was idle; the others of that age are no better.
                for other in idle:
                    other.close()
                idle.clear()
        self._drop_ended()
        reader, writer = await asyncio.open_connection(host, port, limit=_READ_LIMIT_BYTES)
        return await self._use(_Connection(reader, writer), idle, head, body, make_room)

    def _drop_ended(self) -> None:
        """Of all servers: one that is gone for good is never asked again, and its sockets would stay."""
        for idle in self._idle.values():
            for connection in [one for one in idle if one.ended]:
                idle.remove(connection)
                connection.close()

    async def _use(
        self, connection: _Connection, idle: list[_Connection], head: str, body: bytes,
        make_room: Callable[[int], None],
    ) -> tuple[int, bytes]:  # fmt: skip
        try:
            answer = await connection.request(head, body, make_room)
        except BaseException:
            connection.close()
            raise
        if len(idle) < _IDLE_MAX:
            idle.append(connection)
        else:
            connection.close()
        return answer
