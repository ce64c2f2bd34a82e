# SPDX-License-Identifier: Apache-2.0
"""The HTTP shell of a role: an ASGI app with health, metrics, cause ids and Pinot's error shape; and its server.

Rules: errors raised on purpose (CremantError) become `{"code": status, "error": message}`; anything else becomes a 500
whose text never shows a stack trace (the log does). A listener outside of loopback is refused without `insecure`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import msgspec
import prometheus_client
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cremant.model.errors import CremantError, InvalidConfig, NoResource, UserError
from cremant.shell.logs import CAUSE_HEADER, cause, log_event

_log = logging.getLogger(__name__)

#: Names the CremantError class of an error answer, so that a peer can raise the same.
ERROR_HEADER = "X-Cremant-Error"
#: Requests in flight get this long at a stop; with process teardown the whole stop stays under 5 s.
GRACEFUL_STOP_S = 3
#: A connection that does not come to terms about TLS, or does not say goodbye, is dropped after so long.
TLS_HANDSHAKE_S, TLS_GOODBYE_S = 10, 1

Ready = Callable[[], tuple[bool, str]]
Lifespan = Callable[[Starlette], contextlib.AbstractAsyncContextManager[None]]


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON with msgspec: structs, dataclasses and plain values."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def error_response(status: int, message: str, *, kind: str = "") -> Response:
    """Pinot's error shape."""
    return json_response({"code": status, "error": message}, status, {ERROR_HEADER: kind} if kind else None)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The request's body, refused once it is larger than `max_bytes`."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise TooLarge(f"request body is larger than {max_bytes} bytes", hint="send it in several requests")
        parts.append(part)
    return b"".join(parts)


class TooLarge(UserError):
    http_status = 413


class _RequestMiddleware:
    """Every request runs under a cause id, which the answer names; a bug becomes a 500 and one log line."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        wanted = CAUSE_HEADER.lower().encode()
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), "")
        with cause(given[:64]) as cause_id:
            started = False

            async def send_with_cause(message: Message) -> None:
                nonlocal started
                if message["type"] == "http.response.start":
                    started = True
                    message["headers"] = [*message.get("headers", ()), (wanted, cause_id.encode("latin-1", "replace"))]
                await send(message)

            try:
                await self._app(scope, receive, send_with_cause)
            except Exception as error:
                _log.error("request failed on a bug", exc_info=error, extra={"fields": {"path": scope["path"]}})
                if started:
                    raise
                await _bug_response(error)(scope, receive, send_with_cause)


def _on_cremant_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, CremantError)
    if error.http_status >= 500:
        log_event(
            _log, "request failed", level=logging.WARNING, path=request.url.path, error_type=type(error).__name__,
            error=str(error),
        )  # fmt: skip
    return error_response(error.http_status, str(error), kind=type(error).__name__)


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(error.status_code, f"HTTP {error.status_code} {error.detail}")


def _bug_response(error: Exception) -> Response:
    return error_response(500, f"internal error: {type(error).__name__}; the log of this process has the details")


def make_app(
    role: str,
    routes: Sequence[BaseRoute],
    *,
    ready: Ready,
    registry: prometheus_client.CollectorRegistry | None = None,
    lifespan: Lifespan | None = None,
) -> Starlette:
    """The app of a role: `routes` plus `/health` (text OK, or 503 and why not) and `/metrics` (Prometheus text).

    `app.state.registry` is the metrics registry (own one per app); `app.state.stopping` is an asyncio.Event that is
    set when the process is told to stop: long polls should wait on it, too.
    """
    metrics = registry or prometheus_client.CollectorRegistry()

    async def health(request: Request) -> Response:
        is_ready, why = ready()
        return PlainTextResponse("OK" if is_ready else why or f"{role} is starting", 200 if is_ready else 503)

    async def metrics_text(request: Request) -> Response:
        return Response(prometheus_client.generate_latest(metrics), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    @contextlib.asynccontextmanager
    async def whole_lifespan(app: Starlette) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            if lifespan is not None:
                await stack.enter_async_context(lifespan(app))
            yield

    shared: list[BaseRoute] = [Route("/health", health), Route("/metrics", metrics_text)]
    app = Starlette(
        routes=[*routes, *shared],
        middleware=[Middleware(_RequestMiddleware)],
        exception_handlers={CremantError: _on_cremant_error, HTTPException: _on_http_error},
        lifespan=whole_lifespan,
    )
    app.state.registry = metrics
    app.state.stopping = asyncio.Event()
    app.state.role = role
    return app


def check_host(host: str, *, insecure: bool) -> None:
    """Raises InvalidConfig for an address that other machines can reach, unless `insecure` says it is meant."""
    if insecure or host == "localhost":
        return
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise InvalidConfig(
            f"refusing to listen on {host}: there is no authentication yet, and other machines could reach it",
            hint="use 127.0.0.1, or pass --insecure if the network is trusted",
        )


def listen(host: str, port: int, *, insecure: bool = False) -> socket.socket:
    """A bound socket; port 0 picks a free one. Raises InvalidConfig (address refused) or NoResource (in use)."""
    check_host(host, insecure=insecure)
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
    except OSError as error:
        raise NoResource(f"cannot resolve the address {host}:{port}: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise NoResource(
                f"port {port} on {host} is in use", hint="stop the other process or choose another port (0 = any free)"
            ) from error
        raise NoResource(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def write_address(data_dir: str | Path, role: str, url: str) -> None:
    """`<data_dir>/address.json`: where this process really listens, written once it does."""
    target = Path(data_dir) / "address.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(f".tmp{os.getpid()}")
    temporary.write_bytes(msgspec.json.encode({"role": role, "url": url, "pid": os.getpid()}))
    temporary.replace(target)


class TlsListener(NamedTuple):
    """A socket from `listen`, and what is shown and demanded there."""

    bound: socket.socket
    context: ssl.SSLContext


class _Server(uvicorn.Server):
    """Ends cleanly (exit code 0) on SIGTERM and SIGINT; a second signal ends at once."""

    def __init__(
        self,
        config: uvicorn.Config,
        stopping: Callable[[], None],
        started: Callable[[], None],
        tls: TlsListener | None,
    ) -> None:
        super().__init__(config)
        self._stopping = stopping
        self._started = started
        self._tls = tls

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        try:
            previous = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: whoever runs us stops us through `should_exit`
            yield
            return
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._tls is not None:
            await self._listen_by_tls(self._tls)
        if not self.should_exit:
            self._started()

    async def _listen_by_tls(self, tls: TlsListener) -> None:
        """Beside the sockets that uvicorn listens on, and closed with them."""
        listener = await asyncio.get_running_loop().create_server(
            self._protocol, sock=tls.bound, ssl=tls.context, backlog=self.config.backlog,
            ssl_handshake_timeout=TLS_HANDSHAKE_S, ssl_shutdown_timeout=TLS_GOODBYE_S,
        )  # fmt: skip
        self.servers.append(listener)

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping()
        await super().shutdown(sockets)


class RunningServer:
    """Handle of a server: `stop()` may be called from any thread."""

    def __init__(self, server: uvicorn.Server, url: str) -> None:
        self._server = server
        self.url = url

    def stop(self) -> None:
        self._server.should_exit = True


def serve(
    app: Starlette,
    host: str,
    port: int,
    *,
    insecure: bool,
    on_started: Callable[[str], None] | None = None,
    data_dir: str | Path | None = None,
    bound: socket.socket | None = None,
    tls: TlsListener | None = None,
    on_handle: Callable[[RunningServer], None] | None = None,
) -> None:
    """Runs `app` until SIGTERM or SIGINT (or the handle's `stop`), then returns within 5 s.

    `on_started(url)` is called in the event loop once requests are accepted; with `data_dir`, the real address has been
    written to `<data_dir>/address.json` by then. `bound` is a socket from `listen`, for roles that must know their port
    before they build the app; then `host` and `port` are ignored. `tls`: where the same is served by HTTPS, too.
    Raises InvalidConfig and NoResource as `listen`.
    """
    own = bound if bound is not None else listen(host, port, insecure=insecure)
    url = url_of(own)
    role: str = app.state.role

    def started() -> None:
        if data_dir is not None:
            write_address(data_dir, role, url)
        log_event(_log, "listening", url=url)
        if on_started is not None:
            on_started(url)

    config = uvicorn.Config(
        app, loop="uvloop", http="httptools", ws="none", lifespan="on", log_config=None, access_log=False,
        timeout_graceful_shutdown=GRACEFUL_STOP_S, timeout_keep_alive=75, backlog=512, server_header=False,
    )  # fmt: skip
    server = _Server(config, app.state.stopping.set, started, tls)
    if on_handle is not None:
        on_handle(RunningServer(server, url))
    try:
        server.run(sockets=[own])
    finally:
        own.close()
        if tls is not None:
            tls.bound.close()
    log_event(_log, "stopped", url=url)


async def sleep_or_stop(app: Starlette, event: Awaitable[Any], timeout_s: float) -> bool:
    """Waits for `event`, the stop of the process or the timeout; True if it was the event."""
    stopping = asyncio.ensure_future(app.state.stopping.wait())
    waited = asyncio.ensure_future(event)
    try:
        done, _ = await asyncio.wait({stopping, waited}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return waited in done
    finally:
        stopping.cancel()
        waited.cancel()


__all__ = [
    "ERROR_HEADER", "RunningServer", "TlsListener", "TooLarge", "check_host", "error_response", "json_response",
    "listen", "make_app", "read_body", "serve", "sleep_or_stop", "url_of", "write_address",
]  # fmt: skip
