# SPDX-License-Identifier: Apache-2.0
"""The internal endpoints: heartbeats, the view, segment completion, pipeline leases (messages: `cremant.wire`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import anyio
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from cremant.controller.core import Controller
from cremant.controller.http import flag
from cremant.controller.view import Newer
from cremant.model.errors import Unavailable, UserError
from cremant.model.limits import MIB, VIEW_POLL_MS
from cremant.shell.app import read_body
from cremant.wire.codec import decode, encode
from cremant.wire.messages import (
    BaseRequest,
    CommitEnd,
    GenerationRequest,
    Heartbeat,
    LeaseRequest,
    SegmentCompacted,
    SegmentConsumed,
    SegmentStored,
    VersionsStored,
)
from cremant.wire.view import DELTAS, VIEW_HEADER

#: A heartbeat names each segment of a server: 100 k of them at ~200 bytes.
_MESSAGE_BYTES_MAX = 32 * MIB
#: Callers that know nothing wait this long for the first view.
_FIRST_VIEW_S = 5.0
#: Own threads: slow REST calls (a creation that waits for servers) must not make members look dead.
_THREADS = 16
T = TypeVar("T")


def _endpoint(kind: type[T], handle: Callable[[T], Any], threads: anyio.CapacityLimiter) -> Any:
    async def endpoint(request: Request) -> Response:
        message = decode(await read_body(request, _MESSAGE_BYTES_MAX), kind)
        reply = await anyio.to_thread.run_sync(handle, message, limiter=threads)
        return Response(encode(reply), media_type="application/json")

    return endpoint


def internal_routes(controller: Controller) -> list[BaseRoute]:
    async def view(request: Request) -> Response:
        query = request.query_params
        if "since" not in query:
            return await _present_view(request, controller)
        try:
            since, timeout_ms = int(query["since"]), int(query.get("timeoutMs", "0"))
        except ValueError as error:
            raise UserError(f"since and timeoutMs are numbers: {error}") from error
        timeout_s = min(max(timeout_ms, 0), 6 * VIEW_POLL_MS) / 1000
        deltas = flag(request, "deltas", default=False)
        newer = await _poll(request, controller, since, query.get("nonce", ""), timeout_s, deltas=deltas)
        if newer is None:
            return Response(status_code=304)
        headers = {VIEW_HEADER: DELTAS} if newer.deltas else None
        return Response(newer.body, headers=headers, media_type="application/json")

    threads = anyio.CapacityLimiter(_THREADS)
    posts: list[tuple[str, type[Any], Callable[[Any], Any]]] = [
        ("heartbeat", Heartbeat, controller.heartbeat),
        ("segmentConsumed", SegmentConsumed, controller.commits.consumed),
        ("commitEnd", CommitEnd, controller.commits.ended),
        ("segmentStored", SegmentStored, controller.commits.stored),
        ("versionsStored", VersionsStored, controller.commits.versions_stored),
        ("segmentCompacted", SegmentCompacted, controller.compactions.ended),
        ("pipeline/lease", LeaseRequest, controller.pipelines.lease),
        ("pipeline/generation", GenerationRequest, controller.pipelines.generation),
        ("pipeline/base", BaseRequest, controller.pipelines.base),
    ]
    routes: list[BaseRoute] = [
        Route(f"/internal/v1/{path}", _endpoint(kind, handle, threads), methods=["POST"])
        for path, kind, handle in posts
    ]
    return [*routes, Route("/internal/v1/view", view, methods=["GET"])]


async def _poll(
    request: Request, controller: Controller, since: int, nonce: str, timeout_s: float, *, deltas: bool = False
) -> Newer | None:
    """A long poll that also ends when the process is told to stop."""
    stopping = asyncio.ensure_future(request.app.state.stopping.wait())
    polling = asyncio.ensure_future(controller.view.wait_newer(since, nonce, timeout_s, deltas=deltas))
    try:
        await asyncio.wait({stopping, polling}, return_when=asyncio.FIRST_COMPLETED)
        return polling.result() if polling.done() else None
    finally:
        stopping.cancel()
        polling.cancel()


async def _present_view(request: Request, controller: Controller) -> Response:
    """Without `since`: the view with the numbers of now."""
    if controller.view.version == 0:
        await _poll(request, controller, -1, "", _FIRST_VIEW_S)
    encoded = await run_in_threadpool(controller.view.fresh)
    if encoded is None:
        raise Unavailable("no view is published yet", hint="the controller is starting; try again")
    return Response(encoded, media_type="application/json")
