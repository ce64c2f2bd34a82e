# SPDX-License-Identifier: Apache-2.0
"""A client of schema registries (`GET /schemas/ids/{id}`, as Confluent's and those that speak like it), for a worker.

An id never changes its meaning, so answers are kept as long as the process. That a registry does not know an id is
believed after it has said so for a while, and for a while: who writes a message has registered its schema before.
While no registry answers nothing is decided: `Unavailable`, and the table waits.
"""

from __future__ import annotations

import ssl
import time
from collections import OrderedDict
from collections.abc import Iterable

import httpx
import msgspec

from cremant.ingest.registry import Registry, without_login
from cremant.model.errors import InvalidConfig, Unavailable
from cremant.model.limits import (
    REGISTRY_DEADLINE_MS,
    REGISTRY_SCHEMAS_MAX,
    REGISTRY_TIMEOUT_MS,
    REGISTRY_UNKNOWN_AFTER_MS,
    REGISTRY_UNKNOWN_FOR_MS,
)
from cremant.shell.backoff import Backoff

#: What a registry answers if it knows no such id (Confluent: 40403).
_UNKNOWN = (404,)
#: It is up, but will not talk to us: nothing that waiting changes for long, and nothing that concerns the message.
_REFUSED = (401, 403)


class RegistryClient:
    """Not thread-safe: a worker runs one task at a time."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        headers = {"Accept": "application/vnd.schemaregistry.v1+json, application/json"}
        if registry.token:
            headers["Authorization"] = f"Bearer {registry.token}"
        name, _, password = registry.login.partition(":")
        self._client = httpx.Client(
            headers=headers,
            auth=(name, password) if registry.login else None,
            timeout=REGISTRY_TIMEOUT_MS / 1000,
            verify=_verify(registry.authority),
        )
        self._known: OrderedDict[int, str] = OrderedDict()
        self._unknown_until_s: dict[int, float] = {}

    def schemas(self, ids: Iterable[int]) -> dict[int, str | None]:
        """The text of each schema, None where the registry does not know the id. Raises Unavailable."""
        return {schema_id: self._schema(schema_id) for schema_id in sorted(ids)}

    def close(self) -> None:
        self._client.close()

    def _schema(self, schema_id: int) -> str | None:
        if schema_id in self._known:
            self._known.move_to_end(schema_id)
            return self._known[schema_id]
        if self._unknown_until_s.get(schema_id, 0.0) > time.monotonic():
            return None
        text = self._asked_for_a_while(schema_id)
        if text is None:
            if len(self._unknown_until_s) >= REGISTRY_SCHEMAS_MAX:
                self._unknown_until_s.clear()
            self._unknown_until_s[schema_id] = time.monotonic() + REGISTRY_UNKNOWN_FOR_MS / 1000
            return None
        self._known[schema_id] = text
        while len(self._known) > REGISTRY_SCHEMAS_MAX:
            self._known.popitem(last=False)
        return text

    def _asked_for_a_while(self, schema_id: int) -> str | None:
        began_s = time.monotonic()
        backoff = Backoff()
        reason = ""
        while True:
            text, unknown, reason = self._ask_all(schema_id)
            if text is not None:
                return text
            limit_ms = REGISTRY_UNKNOWN_AFTER_MS if unknown else REGISTRY_DEADLINE_MS
            pause_s = backoff.next_ms() / 1000
            if time.monotonic() + pause_s - began_s > limit_ms / 1000:
                break
            time.sleep(pause_s)
        if unknown:
            return None
        where = ", ".join(without_login(url) for url in self._registry.urls)
        raise Unavailable(
            f"schema registry {where} does not give schema {schema_id}: {reason}",
            hint="the table waits for it; nothing is lost",
        )

    def _ask_all(self, schema_id: int) -> tuple[str | None, bool, str]:
        """(text, whether a registry said that it does not know the id, why there is no text)."""
        reasons = []
        for url in self._registry.urls:
            try:
                reply = self._client.get(f"{url}/schemas/ids/{schema_id}")
            except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
                reasons.append(f"{type(error).__name__} {error}".strip())
                continue
            if reply.status_code in _UNKNOWN:
                return None, True, "unknown id"
            if reply.status_code in _REFUSED:
                reasons.append(f"HTTP {reply.status_code}: check schema.registry.basic.auth.user.info")
                continue
            try:
                if reply.status_code == 200:
                    return _text_of(reply.content), False, ""
                reasons.append(f"HTTP {reply.status_code}")
            except msgspec.MsgspecError as error:
                reasons.append(f"an answer that is none of a registry: {error}")
        return None, False, "; ".join(reasons)


class _Answer(msgspec.Struct):
    schema: str
    schemaType: str = "AVRO"


def _text_of(body: bytes) -> str:
    """The schema's text; of a type that is not Avro, what the decoder will say no to."""
    answer = msgspec.json.decode(body, type=_Answer)
    return answer.schema if answer.schemaType == "AVRO" else f"a schema of type {answer.schemaType}"


def _verify(authority: str) -> ssl.SSLContext | bool:
    if not authority:
        return True
    try:
        return ssl.create_default_context(cafile=authority)
    except (OSError, ssl.SSLError) as error:
        raise InvalidConfig(f"schema.registry.ssl.ca.location: {authority} cannot be used: {error}") from error
