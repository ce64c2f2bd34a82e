# SPDX-License-Identifier: Apache-2.0
"""The client of schema registries, against one that answers over HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from registry import SchemaRegistry

from cremant.ingest.registry import Registry, parse_registry
from cremant.model.errors import InvalidConfig, Unavailable
from cremant.pipeline import registry as module
from cremant.pipeline.registry import RegistryClient

SCHEMA = {"type": "record", "name": "r", "fields": []}


@pytest.fixture
def server() -> Iterator[SchemaRegistry]:
    with SchemaRegistry() as registry:
        yield registry


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REGISTRY_DEADLINE_MS", 1_500)
    monkeypatch.setattr(module, "REGISTRY_UNKNOWN_AFTER_MS", 600)


def test_a_schema_is_asked_for_once(server: SchemaRegistry) -> None:
    server.schemas[7] = SCHEMA
    client = RegistryClient(Registry((server.url,)))
    assert client.schemas([7]) == client.schemas([7])
    assert client.schemas([7])[7] is not None
    assert server.asked == ["/schemas/ids/7"]
    client.close()


def test_an_unknown_id_is_believed_after_a_while_and_not_asked_for_again_soon(
    server: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REGISTRY_UNKNOWN_AFTER_MS", 2_500)
    client = RegistryClient(Registry((server.url,)))
    assert client.schemas([9]) == {9: None}
    asked = len(server.asked)
    assert asked >= 2
    assert client.schemas([9]) == {9: None}
    assert len(server.asked) == asked


def test_an_id_that_is_registered_a_moment_later_is_found(
    server: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REGISTRY_UNKNOWN_AFTER_MS", 60_000)
    client = RegistryClient(Registry((server.url,)))

    def register() -> None:
        while not server.asked:
            time.sleep(0.01)
        server.schemas[9] = SCHEMA

    later = threading.Thread(target=register)
    later.start()
    assert client.schemas([9])[9] is not None
    later.join()


def test_a_registry_that_is_down_or_out_of_order_decides_nothing(server: SchemaRegistry) -> None:
    server.broken = 503
    client = RegistryClient(Registry((server.url,)))
    with pytest.raises(Unavailable, match=r"does not give schema 1: HTTP 503"):
        client.schemas([1])
    server.broken, server.schemas[1] = None, SCHEMA
    assert client.schemas([1])[1] is not None
    nobody = RegistryClient(Registry(("http://user:secret@127.0.0.1:9",)))
    with pytest.raises(Unavailable, match="Connect") as raised:
        nobody.schemas([1])
    assert "secret" not in str(raised.value)


def test_the_next_registry_is_asked_where_one_is_down(server: SchemaRegistry) -> None:
    server.schemas[1] = SCHEMA
    client = RegistryClient(Registry(("http://127.0.0.1:9", server.url)))
    assert client.schemas([1])[1] is not None


def test_a_login_is_sent(server: SchemaRegistry) -> None:
    server.login, server.schemas[1] = "me:pass:word", SCHEMA
    properties = {"schema.registry.rest.url": f"{server.url}/", "schema.registry.basic.auth.user.info": "me:pass:word"}
    assert RegistryClient(parse_registry(properties)).schemas([1])[1] is not None
    with pytest.raises(Unavailable, match="HTTP 401"):
        RegistryClient(Registry((server.url,), login="me:wrong")).schemas([1])


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ({}, "is missing"),
        ({"schema.registry.rest.url": "registry:8081"}, "must be http://host:port"),
        ({"schema.registry.rest.url": "http://me:hunter2@[::1"}, "must be http://host:port"),
        ({"schema.registry.rest.url": "http://me:hunter2@r:port"}, "must be http://host:port"),
        ({"schema.registry.rest.url": "me:hunter2@r:8081"}, "must be http://host:port"),
        ({"schema.registry.rest.url": "http://r", "schema.registry.bearer.auth.token": "hunter2\nx"}, "token must be"),
        ({"schema.registry.rest.url": "http://r", "schema.registry.ssl.keystore.location": "x"}, "not supported"),
    ],
)
def test_properties_that_cannot_be_are_refused(properties: dict[str, str], reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason) as refused:
        parse_registry(properties)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("token", ["${env:TOKEN}", "${file:/run/my secrets/token}", "abc.def-_~=\n"])
def test_a_token_may_be_a_reference_and_end_in_a_line_break(token: str) -> None:
    properties = {"schema.registry.rest.url": "http://r", "schema.registry.bearer.auth.token": token}
    assert parse_registry(properties).token == token.strip()


@pytest.mark.parametrize("url", ["http://a..b", "http://h\x01"])
def test_an_address_that_nobody_can_have_is_a_registry_that_does_not_answer(url: str) -> None:
    with pytest.raises(Unavailable, match="does not give schema 1"):
        RegistryClient(Registry((url,))).schemas([1])
