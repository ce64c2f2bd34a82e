# SPDX-License-Identifier: Apache-2.0
"""Pinot's debug endpoints of a broker: who would be asked for what, and what is known of the servers' load."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from cremant.broker.query import QueryService
from cremant.broker.tables import table_info
from cremant.cluster.routing import routing_table
from cremant.model.errors import NotFound, QueryError
from cremant.shell.app import json_response
from cremant.sql.planner import find_table


def debug_routes(queries: QueryService) -> list[BaseRoute]:
    async def routing(request: Request) -> Response:
        name = request.path_params["table"]
        if name == "sql" and "query" in request.query_params:
            return await _routing_of(request.query_params["query"])
        known = queries.view()
        try:
            table_info(known, name)
            assert known is not None
            found = queries.routes(find_table(name, known.tables))
        except QueryError as error:
            raise NotFound(f"Cannot find routing for table: {name}", hint=error.hint) from error
        return json_response({f"{found.table.name}_REALTIME": routing_table(found)})

    async def _routing_of(sql: str) -> Response:
        """Server -> segments it would be asked for (the rest is pruned)."""
        plan = await queries.plan(sql)
        if plan.table is None:
            raise NotFound("the query asks no table")
        return json_response(routing_table(queries.routes(plan.table), plan.prune))

    async def time_boundary(request: Request) -> Response:
        raise NotFound(f"Cannot find time boundary for table: {request.path_params['table']}")

    async def server_loads(request: Request) -> Response:
        now_ms = time.monotonic() * 1000
        known = queries.view()
        servers = [one.id for one in known.instances] if known is not None else []
        suspects = queries.network.loads.suspects(now_ms)
        loads = queries.network.loads.of(servers, now_ms)
        return json_response(
            {
                server: {
                    "numInFlightRequests": load.in_flight,
                    "latencyMs": round(load.latency_ms, 2),
                    "suspect": server in suspects,
                }
                for server, load in sorted(loads.items())
            }
        )

    return [
        Route("/debug/routingTable/{table}", routing),
        Route("/debug/timeBoundary/{table}", time_boundary),
        Route("/debug/serverRoutingStats", server_loads),
    ]
