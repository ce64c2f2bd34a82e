# SPDX-License-Identifier: Apache-2.0
"""Connections to servers, against a small real one."""

from __future__ import annotations

import asyncio
import os

from cremant.broker.peers import Peers

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
AT_ONCE = 8


class Server:
    def __init__(self) -> None:
        self._open: list[asyncio.StreamWriter] = []

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.append(writer)
        while await reader.readline():
            while await reader.readline() != b"\r\n":
                pass
            await asyncio.sleep(0.02)  # so that requests at once need a connection each
            writer.write(ANSWER)
        writer.close()

    async def stop(self) -> None:
        for writer in self._open:
            writer.close()
        self._server.close()
        await asyncio.sleep(0.05)


async def _ask(peers: Peers, url: str) -> None:
    asked = (peers.post(url, "/", b"", headers={}, timeout_s=5) for _ in range(AT_ONCE))
    assert await asyncio.gather(*asked) == [b"ok"] * AT_ONCE


def test_servers_that_are_gone_for_good_leave_no_sockets_behind() -> None:
    async def run() -> list[int]:
        peers, open_files = Peers(), []
        for _ in range(4):
            server = Server()
            await _ask(peers, await server.start())
            await server.stop()
            open_files.append(len(os.listdir("/proc/self/fd")))
        peers.close()
        return open_files

    open_files = asyncio.run(run())
    assert max(open_files) - open_files[0] < AT_ONCE, open_files


def test_a_connection_that_was_closed_while_idle_is_replaced() -> None:
    async def run() -> None:
        peers, server = Peers(), Server()
        url = await server.start()
        await _ask(peers, url)
        for writer in server._open:
            writer.close()
        await _ask(peers, url)
        await server.stop()
        peers.close()

    asyncio.run(run())
