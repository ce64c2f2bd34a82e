# SPDX-License-Identifier: Apache-2.0
"""REST of freshness at a broker: how fresh a table is now, and why it is not fresher, without a query."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from cremant.broker.query import QueryService
from cremant.model.cluster import as_json
from cremant.model.errors import NotFound, QueryError, Unavailable
from cremant.model.names import REALTIME_SUFFIX, raw_table_name
from cremant.shell.app import json_response
from cremant.sql.planner import find_table


def freshness_routes(queries: QueryService) -> list[BaseRoute]:
    async def freshness(request: Request) -> Response:
        name = request.path_params["table"]
        known = queries.view()
        if known is None:
            raise Unavailable("this broker has not heard from the controller yet", hint="try again in a moment")
        try:
            routes = queries.routes(find_table(name, known.tables))
        except QueryError as error:
            raise NotFound(f"Table {raw_table_name(name)}{REALTIME_SUFFIX} not found", hint=error.hint) from error
        return json_response(as_json(await queries.watch.look(routes)))

    return [Route("/tables/{table}/freshness", freshness)]
