# SPDX-License-Identifier: Apache-2.0
"""Calls to a running cluster over HTTP, with errors that say what to do."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import httpx

from cremant.model.cluster import ClusterView, LiveInstance, Role
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

_TIMEOUT_S = 15.0
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
        self._http.close()

    @property
    def controller(self) -> str:
        return self._controller

    def view(self) -> ClusterView:
        return decode(self._controller_call("GET", "/internal/v1/view").content, ClusterView)

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = self._controller_call("GET", "/status").json()
        return document

    def add_schema(self, schema: dict[str, Any]) -> None:
        self._controller_call("POST", "/schemas", json=schema)

    def add_table(self, config: dict[str, Any]) -> None:
        self._controller_call("POST", "/tables", json=config)

    def table_names(self) -> list[str]:
        names: list[str] = self._controller_call("GET", "/tables").json()["tables"]
        return names

    def topics(self) -> list[dict[str, Any]]:
        topics: list[dict[str, Any]] = self._controller_call("GET", "/topics").json()["topics"]
        return topics

    def create_topic(self, topic: str, partitions: int) -> None:
        self._controller_call("PUT", f"/topics/{topic}", params={"partitions": partitions})

    def delete_topic(self, topic: str) -> None:
        self._controller_call("DELETE", f"/topics/{topic}")

    def produce(self, topic: str, lines: bytes, *, keyed: bool) -> dict[str, Any]:
        parameters = {"keyed": "true"} if keyed else {}
        answer: dict[str, Any] = self._controller_call(
            "POST", f"/topics/{topic}", content=lines, params=parameters
        ).json()
        return answer

    def query(self, sql: str, options: str = "") -> dict[str, Any]:
        """The broker's response as it is; its `exceptions` are the caller's to look at."""
        body = {"sql": sql, "queryOptions": options} if options else {"sql": sql}
        answer: dict[str, Any] = self._call("POST", self.broker() + "/query/sql", "broker", json=body).json()
        return answer

    def broker(self) -> str:
        if self._broker is None:
            self._broker = live_instance(self.view(), Role.BROKER).url
        return self._broker

    def _controller_call(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        return self._call(method, self._controller + path, "controller", **arguments)

    def _call(self, method: str, url: str, who: str, **arguments: Any) -> httpx.Response:
        base = url.split("/", 3)[:3]
        where = "/".join(base)
        try:
            answer = self._http.request(method, url, **arguments)
        except httpx.ConnectError as error:
            raise Unavailable(f"no {who} answers at {where}", hint=_START_HINT) from error
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(f"the {who} at {where} did not answer in time ({method} {url})") from error
        except httpx.HTTPError as error:
            raise Unavailable(f"the {who} at {where}: {error}", hint=_START_HINT) from error
        if answer.status_code >= 400:
            raise _refusal(answer, who, method)
        return answer


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
