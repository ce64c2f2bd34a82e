# SPDX-License-Identifier: Apache-2.0
"""Calls to a running cluster over HTTP, with errors that say what to do."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import httpx

from cremant.model.errors import (
    AlreadyExists,
    Conflict,
    CremantError,
    DeadlineExceeded,
    InvalidConfig,
    NotFound,
    Unavailable,
    UserError,
)
from cremant.wire.codec import decode

if TYPE_CHECKING:
    from cremant.model.cluster import ClusterView, LiveInstance, Role

_TIMEOUT_S = 15.0
#: A broker says within two seconds how fresh a table is; one that is stopped is not waited for.
_BROKER_LOOK_S = 4.0
_RESTART_HINT = "it may be restarting: ask again; `cremant status` shows the roles"
_START_HINT = "start a cluster with `cremant up`, or name one with --controller or --data-dir"


class Client:
    """A controller, and the broker to ask SQL (found through the controller unless given)."""

    def __init__(self, controller: str, broker: str | None = None, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._controller = controller.rstrip("/")
        self._broker = broker.rstrip("/") if broker else None
        self._http = httpx.Client(timeout=timeout_s, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    @property
    def controller(self) -> str:
        return self._controller

    def view(self) -> ClusterView:
        # Here, because it brings Arrow with it, which most commands do not need and all would wait for.
        from cremant.model.cluster import ClusterView

        return decode(self._controller_call("GET", "/internal/v1/view").content, ClusterView)

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = self._document("GET", "/status")
        return document

    def freshness(self, table: str) -> dict[str, Any]:
        """As a broker sees it, who asks the servers; or the controller, if no broker answers. Raises NotFound."""
        path = f"/tables/{quote(table, safe='')}/freshness"
        try:
            answer = self._call("GET", self.broker() + path, "broker", timeout=_BROKER_LOOK_S)
            document: dict[str, Any] = _json(answer, "broker")
        except (Unavailable, DeadlineExceeded):
            document = self._document("GET", path)
        return document

    def add_schema(self, schema: dict[str, Any]) -> None:
        self._controller_call("POST", "/schemas", json=schema)

    def schema_names(self) -> list[str]:
        names: list[str] = self._document("GET", "/schemas")
        return names

    def delete_schema(self, name: str) -> None:
        self._controller_call("DELETE", f"/schemas/{name}")

    def add_table(self, config: dict[str, Any]) -> dict[str, Any]:
        """The controller's answer: `status`, `unrecognizedProperties`, `warnings` if there are any."""
        answer: dict[str, Any] = self._document("POST", "/tables", json=config)
        return answer

    def validate(self, schema: dict[str, Any] | None, table: dict[str, Any] | None) -> None:
        """Raises what creating them would raise."""
        if table is None:
            self._controller_call("POST", "/schemas/validate", json=schema)
        elif schema is None:
            self._controller_call("POST", "/tables/validate", json=table)
        else:
            both = {"tableName": table.get("tableName"), "schema": schema, "realtime": table}
            self._controller_call("POST", "/tableConfigs/validate", json=both)

    def story(self, table: str, segment: str) -> dict[str, Any]:
        document: dict[str, Any] = self._document("GET", f"/segments/{table}/{segment}/story")
        return document

    def copies(self, table: str, *, unsafe: bool) -> dict[str, Any]:
        """Of sealed segments; `unsafe`: only of those that miss something."""
        parameters = {"unsafe": "true"} if unsafe else {}
        document: dict[str, Any] = self._document("GET", f"/tables/{table}/copies", params=parameters)
        return document

    def table_document(self, table: str) -> dict[str, Any]:
        """`tableName`, `schema`, `realtime`: what was posted, secrets hidden."""
        document: dict[str, Any] = self._document("GET", f"/tableConfigs/{table}")
        return document

    def delete_table(self, table: str) -> None:
        self._controller_call("DELETE", f"/tables/{table}")

    def pause(self, table: str, comment: str = "") -> None:
        parameters = {"comment": comment} if comment else {}
        self._controller_call("POST", f"/tables/{table}/pauseConsumption", params=parameters)

    def resume(self, table: str) -> None:
        self._controller_call("POST", f"/tables/{table}/resumeConsumption")

    def rewind(self, table: str, epoch: int, *, dry_run: bool) -> dict[str, Any]:
        """Where the table goes back to, and what that gives up."""
        parameters = {"toEpoch": epoch, "dryRun": str(dry_run).lower()}
        answer: dict[str, Any] = self._document("POST", f"/tables/{table}/rewind", params=parameters)
        return answer

    def rebuild_keys(self, table: str) -> dict[str, Any]:
        answer: dict[str, Any] = self._document("POST", f"/tables/{table}/rebuildKeys")
        return answer

    def table_names(self) -> list[str]:
        names: list[str] = self._document("GET", "/tables")["tables"]
        return names

    def topics(self) -> list[dict[str, Any]]:
        topics: list[dict[str, Any]] = self._document("GET", "/topics")["topics"]
        return topics

    def create_topic(self, topic: str, partitions: int) -> None:
        self._controller_call("PUT", f"/topics/{topic}", params={"partitions": partitions})

    def delete_topic(self, topic: str) -> None:
        self._controller_call("DELETE", f"/topics/{topic}")

    def produce(self, topic: str, lines: bytes, *, keyed: bool) -> dict[str, Any]:
        parameters = {"keyed": "true"} if keyed else {}
        answer: dict[str, Any] = self._document("POST", f"/topics/{topic}", content=lines, params=parameters)
        return answer

    def query(self, sql: str, options: str = "") -> dict[str, Any]:
        """The broker's response as it is; its `exceptions` are the caller's to look at."""
        body = {"sql": sql, "queryOptions": options} if options else {"sql": sql}
        answer: dict[str, Any] = _json(self._call("POST", self.broker() + "/query/sql", "broker", json=body), "broker")
        return answer

    def cancel(self, client_query_id: str) -> None:
        """Of the query that was sent with the option `clientQueryId`. Raises NotFound."""
        self._call("DELETE", f"{self.broker()}/clientQuery/{client_query_id}", "broker")

    def broker(self) -> str:
        if self._broker is None:
            from cremant.model.cluster import Role

            self._broker = live_instance(self.view(), Role.BROKER).url
        return self._broker

    def _document(self, method: str, path: str, **arguments: Any) -> Any:
        return _json(self._controller_call(method, path, **arguments), "controller")

    def _controller_call(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        return self._call(method, self._controller + path, "controller", **arguments)

    def _call(self, method: str, url: str, who: str, **arguments: Any) -> httpx.Response:
        base = url.split("/", 3)[:3]
        where = "/".join(base)
        try:
            answer = self._http.request(method, url, **arguments)
        except httpx.ConnectError as error:
            hint = _RESTART_HINT if who == "broker" else _START_HINT
            raise Unavailable(f"no {who} answers at {where}", hint=hint) from error
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(f"the {who} at {where} did not answer in time ({method} {url})") from error
        except httpx.HTTPError as error:
            raise Unavailable(f"the {who} at {where}: {error}", hint=_START_HINT) from error
        if answer.status_code >= 400:
            raise _refusal(answer, who, method)
        return answer


def _json(answer: httpx.Response, who: str) -> Any:
    try:
        return answer.json()
    except ValueError as error:
        raise Unavailable(
            f"what answers at {answer.url} is no {who}: its answer is not JSON", hint=_START_HINT
        ) from error


def live_instance(view: ClusterView, role: Role) -> LiveInstance:
    """The first live instance of a role."""
    for instance in view.instances:
        if instance.role == role and instance.live:
            return instance
    raise Unavailable(f"no {role} is alive", hint="`cremant status` shows the roles")


def _refusal(answer: httpx.Response, who: str, method: str) -> CremantError:
    """The CremantError that an HTTP error stands for, with the text of its body."""
    try:
        message = str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        message = answer.text.strip()[:300] or f"HTTP {answer.status_code}"
    match answer.status_code:
        case 404 if message.startswith("HTTP 404"):  # not a thing that is missing, but the endpoint
            url = answer.request.url
            return Unavailable(
                f"what answers at {url.copy_with(path='/', query=None)} is no {who}: it has no {url.path}",
                hint=_START_HINT,
            )
        case 404:
            return NotFound(message)
        case 409:
            return AlreadyExists(message) if method in ("POST", "PUT") else Conflict(message)
        case 400 | 413 | 422:
            return InvalidConfig(message)
        case 504 | 408:
            return DeadlineExceeded(message)
        case status if status < 500:
            return UserError(message)
        case _:
            return Unavailable(f"{who}: {message}")
