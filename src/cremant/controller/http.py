# SPDX-License-Identifier: Apache-2.0
"""Helpers of the REST endpoints: documents in (JSON or multipart), names, flags, Pinot's success shapes out."""

from __future__ import annotations

import datetime
import email
import email.policy
import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from cremant.controller.catalog import Catalog
from cremant.model.cluster import TableRecord
from cremant.model.errors import CremantError, InvalidConfig, NotFound, UserError
from cremant.model.limits import MIB
from cremant.model.names import OFFLINE_SUFFIX, REALTIME_SUFFIX, raw_table_name
from cremant.model.secrets import redact_document
from cremant.shell.app import json_response, read_body

DOCUMENT_BYTES_MAX = 4 * MIB

Handler = Callable[[Request], Any]


class NotBuilt(CremantError):
    """Pinot answers 501 here, too."""

    http_status = 501


def answering(handle: Handler) -> Any:
    """A blocking handler as an endpoint: runs on the thread pool; a plain value becomes a JSON answer."""

    async def endpoint(request: Request) -> Response:
        answer = await run_in_threadpool(handle, request)
        return answer if isinstance(answer, Response) else json_response(answer)

    return endpoint


def with_document(handle: Callable[[Request, Any], Any]) -> Any:
    """The same, with the request's JSON document (also as the first part of a multipart form)."""

    async def endpoint(request: Request) -> Response:
        document = parse_document(request.headers.get("content-type", ""), await read_body(request, DOCUMENT_BYTES_MAX))
        answer = await run_in_threadpool(handle, request, document)
        return answer if isinstance(answer, Response) else json_response(answer)

    return endpoint


def parse_document(content_type: str, body: bytes) -> Any:
    if content_type.lower().startswith("multipart/"):
        body = _first_part(content_type, body)
    if not body.strip():
        raise InvalidConfig("the request body is empty", hint="send a JSON document")
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidConfig(f"the request body is not valid JSON: {_place(body, error)}") from error


def _place(body: bytes, error: Exception) -> str:
    """What is wrong, with line and column: the standard library's parser names them."""
    try:
        json.loads(body)
    except json.JSONDecodeError as found:
        line = found.doc.split("\n")[found.lineno - 1].strip() if found.doc else ""
        return f"{found.msg} at line {found.lineno}, column {found.colno}: {line[:80]!r}"
    except UnicodeDecodeError as found:
        return f"byte {found.start} is not UTF-8"
    except RecursionError:
        return "nested too deeply"
    half = _HALF_PAIR.search(body)
    if half is not None:
        number, column = body.count(b"\n", 0, half.start()) + 1, half.start() - body.rfind(b"\n", 0, half.start())
        return f"half of a surrogate pair, {half[0].decode()}, at line {number}, column {column}"
    return str(error)


#: What the standard library's parser takes in texts, and no UTF-8 can hold.
_HALF_PAIR = re.compile(
    rb"\\u[dD][89abAB][\da-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F][\da-fA-F]{2}"
)


def _first_part(content_type: str, body: bytes) -> bytes:
    head = f"MIME-Version: 1.0\r\nContent-Type: {content_type}\r\n\r\n".encode("latin-1", "replace")
    message = email.message_from_bytes(head + body, policy=email.policy.HTTP)
    for part in message.iter_parts() if message.is_multipart() else ():
        content = part.get_payload(decode=True)
        if isinstance(content, bytes):
            return content
    raise InvalidConfig("the multipart request has no part", hint="send the JSON as one file part")


def flag(request: Request, name: str, *, default: bool) -> bool:
    value = request.query_params.get(name)
    if value is None:
        return default
    if value.lower() not in ("true", "false"):
        raise UserError(f"query parameter {name}: expected true or false, found {value!r}")
    return value.lower() == "true"


def integer(request: Request, name: str, *, default: int, at_least: int | None = None) -> int:
    value = request.query_params.get(name)
    if value is None:
        return default
    try:
        number = int(value)
    except ValueError:
        raise UserError(f"query parameter {name}: expected a number, found {value!r}") from None
    if at_least is not None and number < at_least:
        raise UserError(f"query parameter {name}: expected at least {at_least}, found {number}")
    return number


def listed(request: Request, name: str) -> list[str]:
    """Names of a parameter that may come several times, or be a comma-separated list."""
    return [one for value in request.query_params.getlist(name) for one in value.split(",") if one]


def table_type(request: Request, parameter: str = "type") -> str | None:
    """REALTIME, OFFLINE or None (not said)."""
    value = request.query_params.get(parameter)
    if not value:
        return None
    if value.upper() not in ("REALTIME", "OFFLINE"):
        raise UserError(f"query parameter {parameter}: expected realtime or offline, found {value!r}")
    return value.upper()


def raw_name(name: str) -> str:
    """Raw table name of a path. Raises NotFound for offline tables: there are none."""
    if name.endswith(OFFLINE_SUFFIX):
        raise NotFound(f"Table {name} not found")
    return raw_table_name(name)


def table_record(request: Request, catalog: Catalog, message: str = "Table {0}_REALTIME not found") -> TableRecord:
    """Of the path's table. Raises NotFound with `message`, also where the query asks for an offline one: there are
    none."""
    name = raw_name(request.path_params["table"])
    if "OFFLINE" in (table_type(request), table_type(request, "tableType")):
        raise NotFound(message.format(name))
    return catalog.table(name, message)


def typed(name: str) -> str:
    return name + REALTIME_SUFFIX


def changed(status: str, unrecognized: dict[str, Any]) -> dict[str, Any]:
    """Pinot's ConfigSuccessResponse."""
    return {"unrecognizedProperties": redact_document(unrecognized), "status": status}


def utc_text(ms: int, pattern: str) -> str:
    return datetime.datetime.fromtimestamp(ms / 1000, tz=datetime.UTC).strftime(pattern)
