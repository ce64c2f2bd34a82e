# SPDX-License-Identifier: Apache-2.0
"""Secrets: resolved at the edge, never shown, kept when a hidden value comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cremant.model.errors import InvalidConfig
from cremant.model.secrets import HIDDEN, redact, redact_document, resolve, resolve_all, restore

JAAS = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="me" password="%s";'


def _no_file(path: str) -> str:
    raise FileNotFoundError(2, "No such file or directory", path)


def test_references_to_the_environment_and_to_files_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from a file\n")
    text = f"a ${{env:ONE}} b ${{file:{tmp_path / 'key'}}} c ${{other:x}} $HOME"
    found = resolve(text, {"ONE": "${env:TWO}"}, lambda path: Path(path).read_text())
    assert found == "a ${env:TWO} b from a file c ${other:x} $HOME"


@pytest.mark.parametrize("text", ["${env:ABSENT}", "${file:/absent}", "${env:}", "${file: }"])
def test_a_reference_to_nothing_is_refused_with_its_key(text: str) -> None:
    with pytest.raises(InvalidConfig, match=r"sasl\.password: \$\{"):
        resolve_all({"sasl.password": text}, {}, _no_file)


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("sasl.password", "hunter2", HIDDEN),
        ("sasl.password", "${env:PW}", "${env:PW}"),
        ("sasl.password", "x${env:PW}", HIDDEN),
        ("stream.kafka.consumer.prop.sasl.jaas.config", JAAS % "hunter2", HIDDEN),
        ("sasl.jaas.config", JAAS % "${env:PW}", JAAS % "${env:PW}"),
        ("ssl.key.password", "p", HIDDEN),
        ("ssl.key.pem", "-----BEGIN", HIDDEN),
        ("sasl.oauthbearer.client.secret", "p", HIDDEN),
        ("sasl.oauthbearer.token.endpoint.url", "https://login/token", "https://login/token"),
        ("schema.registry.basic.auth.user.info", "me:pw", HIDDEN),
        ("schema.registry.rest.url", "http://me:pw@registry:8081", f"http://me:{HIDDEN}@registry:8081"),
        ("schema.registry.rest.url", "http://me:${env:PW}@registry", "http://me:${env:PW}@registry"),
        ("schema.registry.rest.url", "http://me:p@w@registry", f"http://me:{HIDDEN}@registry"),
        ("sasl.password", "a=hunter2${env:PW}", HIDDEN),
        ("ssl.key.passphrase", "p", HIDDEN),
        ("ssl.ca.location", "/etc/ca.pem", "/etc/ca.pem"),
        ("sasl.username", "me", "me"),
        ("sasl.password", "", ""),
    ],
)
def test_literal_secrets_are_hidden_and_references_are_shown(key: str, value: str, shown: str) -> None:
    assert redact({key: value}) == {key: shown}


def _table(**stream: Any) -> dict[str, Any]:
    return {"tableName": "t", "streams": [{"streamType": "kafka", **stream}], "quota": {"n": 1, "useToken": True}}


def test_a_document_that_comes_back_as_it_was_shown_is_the_stored_one() -> None:
    stored = _table(**{"sasl.password": "hunter2", "url": "http://me:pw@host", "api.key": 7, "ssl.ca": "x"})
    seen = redact_document(stored)
    assert "hunter2" not in str(seen)
    assert seen["quota"] == stored["quota"]
    assert restore(seen, stored) == stored


def test_other_changes_of_a_document_with_hidden_values_are_kept() -> None:
    stored = _table(**{"sasl.password": "hunter2", "client.id": "a"})
    seen = redact_document(stored)
    seen["streams"][0] |= {"client.id": "b", "note": f"rated {HIDDEN}"}
    assert restore(seen, stored)["streams"][0] == {
        "streamType": "kafka", "sasl.password": "hunter2", "client.id": "b", "note": f"rated {HIDDEN}"
    }  # fmt: skip
    seen["streams"][0]["sasl.password"] = "new"
    assert restore(seen, stored)["streams"][0]["sasl.password"] == "new"


@pytest.mark.parametrize("stored", [None, _table()])
def test_a_hidden_value_where_none_is_stored_is_refused(stored: Any) -> None:
    with pytest.raises(InvalidConfig, match=r"/streams/0/sasl\.password: the value is hidden"):
        restore(_table(**{"sasl.password": HIDDEN}), stored)
