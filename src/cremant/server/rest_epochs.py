# SPDX-License-Identifier: Apache-2.0
"""GET /internal/v1/epochs?since=N&nonce=X&timeoutMs=T: which epochs are closed here. A long poll of brokers."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from cremant.model.errors import Unavailable, UserError
from cremant.server.epochs import EpochBoard
from cremant.shell.member import Member
from cremant.wire.codec import encode

#: Longer polls are cut to this.
WAIT_S_MAX = 30.0


def epoch_routes(board: EpochBoard, member: Member) -> list[BaseRoute]:
    async def epochs(request: Request) -> Response:
        if member.fenced:
            raise Unavailable(f"{member.id} was taken over by another process")
        asked = request.query_params
        try:
            since, wait_ms = int(asked.get("since", "0")), int(asked.get("timeoutMs", "0"))
        except ValueError as error:
            raise UserError(f"since and timeoutMs are numbers: {error}") from error
        wait_s = min(max(0, wait_ms) / 1000, WAIT_S_MAX)
        polling = asyncio.ensure_future(board.poll(since, asked.get("nonce", ""), wait_s))
        stopping = asyncio.ensure_future(request.app.state.stopping.wait())
        try:  # the end of the process does not wait for the end of a poll
            await asyncio.wait({stopping, polling}, return_when=asyncio.FIRST_COMPLETED)
            if not polling.done():
                raise Unavailable(f"{member.id} is being stopped")
            reply = polling.result()
        finally:
            stopping.cancel()
            polling.cancel()
        body = encode(msgspec.structs.replace(reply, instance=member.id))
        return Response(body, media_type="application/json")

    return [Route("/internal/v1/epochs", epochs)]
