# SPDX-License-Identifier: Apache-2.0
"""HTTP routes of a broker: Pinot's query endpoint and the debug endpoints that clients ask for.

A query's error is HTTP 200 with `exceptions` (what Pinot's clients expect), unless the request asks for HTTP codes with
`Pinot-Use-Http-Status-For-Errors: true`. A request that carries no query is HTTP 400.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from cremant.broker.query import QueryService, table_info
from cremant.cluster.routing import routing_table
from cremant.model.cluster import ClusterView
from cremant.model.errors import NotFound, QueryError, UserError
from cremant.model.limits import QUERY_TEXT_CHARS_MAX
from cremant.model.query_codes import HTTP_STATUS
from cremant.shell.app import json_response, read_body
from cremant.sql.planner import find_table

ERROR_CODE_HEADER = "X-Pinot-Error-Code"
USE_STATUS_HEADER = "Pinot-Use-Http-Status-For-Errors"
#: UTF-8 and JSON escapes: six bytes per character at the very most.
_BODY_BYTES_MAX = 6 * QUERY_TEXT_CHARS_MAX


class QueryRequest(msgspec.Struct, frozen=True, rename="camel"):
    """Body of POST /query/sql. Other keys are ignored, as Pinot does."""

    sql: str
    query_options: str | None = None
    trace: bool | str | None = None


_decoder = msgspec.json.Decoder(QueryRequest)


def routes(queries: QueryService, view: Callable[[], ClusterView | None]) -> list[BaseRoute]:
    async def post_sql(request: Request) -> Response:
        body = await read_body(request, _BODY_BYTES_MAX)
        try:
            asked = _decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise UserError(f"Payload is not a query: {error}", hint='send {"sql": "SELECT ..."}') from error
        return await _answer(request, asked.sql, asked.query_options or "")

    async def get_sql(request: Request) -> Response:
        asked = request.query_params
        return await _answer(request, asked.get("sql", ""), asked.get("queryOptions", ""))

    async def _answer(request: Request, sql: str, options: str) -> Response:
        response = await queries.answer(sql, options)
        code = int(response.error_code)
        wants_status = request.headers.get(USE_STATUS_HEADER, "").lower() == "true"
        status = HTTP_STATUS.get(code, 500) if wants_status and code >= 0 else 200
        return Response(response.encode(), status, {ERROR_CODE_HEADER: str(code)}, media_type="application/json")

    async def running(request: Request) -> Response:
        return json_response({request_id: query.sql for request_id, query in queries.running.items()})

    async def cancel(request: Request) -> Response:
        request_id = request.path_params["id"]
        if not queries.cancel(request_id):
            raise NotFound(f"Query {request_id} not found on this broker")
        return PlainTextResponse(f"Cancelled query: {request_id}")

    async def routing(request: Request) -> Response:
        name = request.path_params["table"]
        known = view()
        try:
            table_info(known, name)
            assert known is not None
            table = known.tables[find_table(name, known.tables)]
        except QueryError as error:
            raise NotFound(f"Cannot find routing for table: {name}", hint=error.hint) from error
        return json_response({f"{table.name}_REALTIME": routing_table(known, table)})

    async def time_boundary(request: Request) -> Response:
        raise NotFound(f"Cannot find time boundary for table: {request.path_params['table']}")

    endpoints: list[tuple[str, Any, list[str]]] = [
        ("/query/sql", post_sql, ["POST"]),
        ("/query/sql", get_sql, ["GET"]),
        ("/query", post_sql, ["POST"]),
        ("/query", get_sql, ["GET"]),
        ("/queries", running, ["GET"]),
        ("/query/{id}", cancel, ["DELETE"]),
        ("/debug/routingTable/{table}", routing, ["GET"]),
        ("/debug/timeBoundary/{table}", time_boundary, ["GET"]),
    ]
    return [Route(path, endpoint, methods=methods) for path, endpoint, methods in endpoints]
