# SPDX-License-Identifier: Apache-2.0
"""HTTP routes of a broker: Pinot's query endpoint, the list of running queries, cancel.

A query's error is HTTP 200 with `exceptions` (what Pinot's clients expect), unless the request asks for HTTP codes with
`Pinot-Use-Http-Status-For-Errors: true`. A request that carries no query is HTTP 400. A query is JSON, whatever the
content type says (as in Pinot), or a form (`sql=...`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from cremant.broker.arrow import MEDIA_TYPE, encode_arrow
from cremant.broker.query import QueryService
from cremant.broker.response import BrokerResponse
from cremant.broker.rest_debug import debug_routes
from cremant.broker.rest_freshness import freshness_routes
from cremant.model.errors import NotFound, UserError
from cremant.model.limits import QUERY_TEXT_CHARS_MAX
from cremant.model.query_codes import HTTP_STATUS
from cremant.shell.app import json_response, read_body

ERROR_CODE_HEADER = "X-Pinot-Error-Code"
USE_STATUS_HEADER = "Pinot-Use-Http-Status-For-Errors"
#: UTF-8 and JSON escapes: six bytes per character at the very most.
_BODY_BYTES_MAX = 6 * QUERY_TEXT_CHARS_MAX
#: Watching whether the client is still there begins when a query has taken this long: most are over by then.
_WATCH_AFTER_S = 0.05
_FORM = "application/x-www-form-urlencoded"
_FORM_FIELDS_MAX = 100


class QueryRequest(msgspec.Struct, frozen=True, rename="camel"):
    """Body of POST /query/sql. Other keys are ignored, as Pinot does."""

    sql: str
    query_options: str | None = None
    trace: bool | str | None = None


_decoder = msgspec.json.Decoder(QueryRequest)


def read_query(body: bytes, content_type: str) -> QueryRequest:
    """Raises UserError for what carries no query."""
    if content_type.startswith(_FORM) and not body.lstrip().startswith((b"{", b'"')):
        try:
            fields = parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=_FORM_FIELDS_MAX)
        except ValueError as error:
            raise UserError(f"Payload is not a query: a form of more than {_FORM_FIELDS_MAX} fields") from error
        return _from_fields(dict(fields))
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        half = _with_half_pairs(body)
        if half is not None:
            return half
        raise UserError(f"Payload is not a query: {error}", hint='send {"sql": "SELECT ..."}') from error


def _with_half_pairs(body: bytes) -> QueryRequest | None:
    """A query with half of a surrogate pair in it: the decoder does not say where, the planner does."""
    try:
        asked = msgspec.convert(json.loads(body), QueryRequest)
    except (ValueError, RecursionError):
        return None
    text = asked.sql + (asked.query_options or "")
    return asked if text != _encodable(text) else None


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()


def _from_fields(fields: Any) -> QueryRequest:
    if "sql" not in fields:
        raise UserError("Payload is not a query: no field sql", hint="send sql=SELECT..., or JSON")
    return QueryRequest(fields["sql"], fields.get("queryOptions"), fields.get("trace"))


@contextlib.contextmanager
def watched(request: Request, hung_up: Callable[[], object]) -> Iterator[None]:
    """Calls `hung_up` when the client goes away meanwhile."""
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        hung_up()

    timer = loop.call_later(_WATCH_AFTER_S, lambda: tasks.append(loop.create_task(watch())))
    try:
        yield
    finally:
        timer.cancel()
        for task in tasks:
            task.cancel()


def routes(queries: QueryService) -> list[BaseRoute]:
    async def post_sql(request: Request) -> Response:
        body = await read_body(request, _BODY_BYTES_MAX)
        return await _answer(request, read_query(body, request.headers.get("content-type", "")))

    async def get_sql(request: Request) -> Response:
        asked = dict(request.query_params)
        return await _answer(request, _from_fields({"sql": "", **asked}))

    async def _answer(request: Request, asked: QueryRequest) -> Response:
        ids: list[str] = []
        arrow = MEDIA_TYPE in request.headers.get("accept", "")
        with watched(request, lambda: queries.cancel(ids[0])):
            response = await queries.answer(
                asked.sql, asked.query_options or "", trace=str(asked.trace).lower() == "true", arrow=arrow,
                on_request_id=ids.append,
            )  # fmt: skip
        code = int(response.error_code)
        wants_status = request.headers.get(USE_STATUS_HEADER, "").lower() == "true"
        status = HTTP_STATUS.get(code, 500) if wants_status and code >= 0 else 200
        body, media_type = _encoded(response)
        return Response(body, status, {ERROR_CODE_HEADER: str(code)}, media_type=media_type)

    async def running(request: Request) -> Response:
        return json_response({request_id: _encodable(query.sql) for request_id, query in queries.running.items()})

    async def cancel(request: Request) -> Response:
        return _cancel(request, by_client=request.query_params.get("client", "").lower() == "true")

    async def cancel_of_client(request: Request) -> Response:
        return _cancel(request, by_client=True)

    def _cancel(request: Request, *, by_client: bool) -> Response:
        name = request.path_params["id"]
        request_id = queries.request_id_of(name) if by_client else name
        servers = queries.cancel(request_id) if request_id is not None else None
        if servers is None:
            raise NotFound(f"Query: {name} not found on the broker")
        text = f"Cancelled client query: {name}" if by_client else f"Cancelled query: {name}"
        if request.query_params.get("verbose", "").lower() == "true":
            text += f" on servers: {sorted(servers)}"
        return PlainTextResponse(text)

    endpoints: list[tuple[str, Any, list[str]]] = [
        ("/query/sql", post_sql, ["POST"]),
        ("/query/sql", get_sql, ["GET"]),
        ("/query", post_sql, ["POST"]),
        ("/query", get_sql, ["GET"]),
        ("/queries", running, ["GET"]),
        ("/query/{id}", cancel, ["DELETE"]),
        ("/clientQuery/{id}", cancel_of_client, ["DELETE"]),
    ]
    own = [Route(path, endpoint, methods=methods) for path, endpoint, methods in endpoints]
    return [*own, *debug_routes(queries), *freshness_routes(queries)]


def _encoded(response: BrokerResponse) -> tuple[bytes, str]:
    if response.result is not None and response.result.table is not None:
        return encode_arrow(response.result.table, response.as_fields()), MEDIA_TYPE
    return response.encode(), "application/json"
