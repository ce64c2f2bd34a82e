# SPDX-License-Identifier: Apache-2.0
"""REST of the cluster: instances, brokers, tenants, versions, status, and SQL handed to a live broker."""

from __future__ import annotations

from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

import cremant
from cremant.controller.core import Controller
from cremant.controller.http import answering, raw_name, typed
from cremant.controller.status import status
from cremant.model.cluster import InstanceRecord, Role
from cremant.model.errors import DeadlineExceeded, NotFound, Unavailable, UserError
from cremant.model.limits import MIB, QUERY_TIMEOUT_MS
from cremant.shell.app import read_body
from cremant.shell.logs import CAUSE_HEADER, current_cause

CLUSTER_NAME = "Cremant"
TENANT = "DefaultTenant"
_SQL_BODY_BYTES_MAX = 2 * MIB


class ClusterRest:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._catalog = controller.catalog
        self._instances = controller.instances

    def routes(self) -> list[BaseRoute]:
        gets: list[tuple[str, Any]] = [
            ("/pinot-controller/admin", lambda request: PlainTextResponse("GOOD")),
            ("/version", lambda request: {"cremant": cremant.__version__}),
            ("/cluster/info", lambda request: {"clusterName": CLUSTER_NAME}),
            ("/cluster/configs", lambda request: {}),
            ("/databases", lambda request: ["default"]),
            ("/instances", self.instances),
            ("/liveinstances", self.live_instances),
            ("/instances/{instance}", self.instance),
            ("/tenants", self.tenants),
            ("/tenants/{tenant}", self.tenant),
            ("/tables/livebrokers", self.live_brokers),
            ("/tables/{table}/instances", self.table_instances),
            ("/brokers/tables/{table}", self.broker_names_of_table),
            ("/v2/brokers", self.brokers),
            ("/v2/brokers/tables", self.brokers_by_table),
            ("/v2/brokers/tables/{table}", self.brokers_of_table),
            ("/v2/brokers/tenants/{tenant}", self.brokers_of_tenant),
            ("/status", lambda request: status(self._controller)),
        ]
        return [
            *(Route(path, answering(handle), methods=["GET"]) for path, handle in gets),
            Route("/instances/{instance}", answering(self.forget_instance), methods=["DELETE"]),
            Route("/instances/{instance}/state", answering(self.set_state), methods=["PUT"]),
            Route("/sql", self.sql, methods=["GET", "POST"]),
        ]

    # --- instances ------------------------------------------------------------------------------------------------

    def instances(self, request: Request) -> dict[str, list[str]]:
        return {"instances": [self._controller.name, *sorted(self._catalog.members)]}

    def live_instances(self, request: Request) -> dict[str, list[str]]:
        live = [name for name in sorted(self._catalog.members) if self._instances.is_alive(name)]
        return {"instances": [self._controller.name, *live]}

    def instance(self, request: Request) -> dict[str, Any]:
        name = request.path_params["instance"]
        member = self._catalog.members.get(name)
        if member is None:
            raise NotFound(f"Instance {name} not found")
        record = member.record
        return {
            "instanceName": record.id,
            "hostName": record.host,
            "enabled": member.enabled,
            "port": str(record.port),
            "tags": list(record.tags) or _default_tags(record.role),
            "pools": None,
            "grpcPort": -1,
            "adminPort": record.port if record.role is Role.SERVER else -1,
            "queryServicePort": -1,
            "queryMailboxPort": -1,
            "shutdownInProgress": False,
        }

    def forget_instance(self, request: Request) -> dict[str, str]:
        self._instances.forget(request.path_params["instance"])
        return {"status": "Successfully dropped instance"}

    def set_state(self, request: Request) -> dict[str, str]:
        """`state`: ENABLE, DISABLE (nothing new goes there; what is there is served until a rebalance moved it) or
        DROP."""
        name, state = request.path_params["instance"], request.query_params.get("state", "")
        match state.upper():
            case "ENABLE" | "DISABLE":
                self._instances.set_enabled(name, enabled=state.upper() == "ENABLE")
            case "DROP":
                self._instances.forget(name)
            case _:
                raise UserError(f"Unknown state '{state}'", hint="state=ENABLE, DISABLE or DROP")
        return {"status": f"Request to {state} instance '{name}' is successful"}

    def tenants(self, request: Request) -> dict[str, list[str]]:
        return {"SERVER_TENANTS": [TENANT], "BROKER_TENANTS": [TENANT]}

    def tenant(self, request: Request) -> dict[str, Any]:
        name = request.path_params["tenant"]
        if name != TENANT:
            raise NotFound(f"Failed to find tenant: {name}")
        by_role: dict[Role, list[str]] = {Role.SERVER: [], Role.BROKER: []}
        for instance, member in sorted(self._catalog.members.items()):
            if member.record.role in by_role:
                by_role[member.record.role].append(instance)
        return {
            "ServerInstances": by_role[Role.SERVER], "BrokerInstances": by_role[Role.BROKER], "tenantName": name,
        }  # fmt: skip

    # --- brokers --------------------------------------------------------------------------------------------------

    def _live_brokers(self) -> list[InstanceRecord]:
        with self._catalog.lock:
            return [self._catalog.members[name].record for name in self._instances.live(Role.BROKER)]

    def _brokers(self) -> list[dict[str, Any]]:
        """`grpcPort` -1: there is no gRPC; clients that look at it fall back to HTTP."""
        return [{"host": b.host, "port": b.port, "instanceName": b.id, "grpcPort": -1} for b in self._live_brokers()]

    def live_brokers(self, request: Request) -> dict[str, Any]:
        wanted = {raw_name(name) for part in request.query_params.getlist("tables") for name in part.split(",") if name}
        with self._catalog.lock:
            names = [name for name in sorted(self._catalog.tables) if not wanted or name in wanted]
        return {typed(name): self._brokers() for name in names}

    def brokers(self, request: Request) -> dict[str, Any]:
        return {"tenants": {TENANT: self._brokers()}, "tables": self.brokers_by_table(request)}

    def brokers_by_table(self, request: Request) -> dict[str, Any]:
        with self._catalog.lock:
            names = sorted(self._catalog.tables)
        return {name: self._brokers() for name in names}

    def brokers_of_table(self, request: Request) -> list[dict[str, Any]]:
        self._check_table(request)
        return self._brokers()

    def broker_names_of_table(self, request: Request) -> list[str]:
        self._check_table(request)
        return [broker.id for broker in self._live_brokers()]

    def brokers_of_tenant(self, request: Request) -> list[dict[str, Any]]:
        if request.path_params["tenant"] != TENANT:
            raise NotFound(f"Failed to find tenant: {request.path_params['tenant']}")
        return self._brokers()

    def _check_table(self, request: Request) -> str:
        name = raw_name(request.path_params["table"])
        if name not in self._catalog.tables:
            raise NotFound(f"Table {request.path_params['table']} not found.")
        return name

    def table_instances(self, request: Request) -> dict[str, Any]:
        name = self._check_table(request)
        with self._catalog.lock:
            servers = sorted({s for p in self._catalog.partitions.get(name, {}).values() for s in p.replicas})
        brokers = [broker.id for broker in self._live_brokers()]
        return {
            "tableName": request.path_params["table"],
            "brokers": [{"tableType": "realtime", "instances": brokers}],
            "server": [{"tableType": "realtime", "instances": servers}],
        }

    # --- SQL ------------------------------------------------------------------------------------------------------

    async def sql(self, request: Request) -> Response:
        """Hands the query to a live broker and its answer back, byte for byte."""
        brokers = self._live_brokers()
        if not brokers:
            raise Unavailable("no broker is alive", hint="start one: cremant start broker")
        body = await read_body(request, _SQL_BODY_BYTES_MAX)
        url = f"http://{brokers[0].host}:{brokers[0].port}/query/sql"
        headers = {CAUSE_HEADER: current_cause(), "Content-Type": "application/json"}
        timeout_s = 2 * QUERY_TIMEOUT_MS / 1000
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=timeout_s) as client:
                answer = await client.request(
                    request.method, url, params=str(request.query_params), content=body, headers=headers
                )
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(f"broker {brokers[0].id} did not answer in {timeout_s:.0f} s") from error
        except httpx.HTTPError as error:
            raise Unavailable(f"broker {brokers[0].id} is not reachable: {error}") from error
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


def _default_tags(role: Role) -> list[str]:
    match role:
        case Role.SERVER:
            return [f"{TENANT}_REALTIME"]
        case Role.BROKER:
            return [f"{TENANT}_BROKER"]
        case _:
            return []
