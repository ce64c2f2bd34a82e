# SPDX-License-Identifier: Apache-2.0
"""What clients of Kafka are told: properties in Java's spelling and in librdkafka's."""

from __future__ import annotations

from pathlib import Path

import pytest

from cremant.log.kafka_config import admin_config, connection, consumer_config, login, producer_config
from cremant.log.open import open_logs
from cremant.model.errors import InvalidConfig
from cremant.model.properties import read_properties
from cremant.model.settings import Settings


def test_a_properties_file_is_read_as_java_does() -> None:
    text = "# comment\n! another\n\n a = 1\nb:2\nc 3\nlong=one \\\n   two\n"
    text += 'url=http\\://x\nempty=\njaas=M required a="b=c";\n'
    assert read_properties(text) == {
        "a": "1", "b": "2", "c": "3", "long": "one two", "url": "http://x", "empty": "", "jaas": 'M required a="b=c";',
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"security.protocol": "SASL_SSL", "sasl.mechanism": "SCRAM-SHA-512"},
            {"security.protocol": "sasl_ssl", "sasl.mechanism": "SCRAM-SHA-512"},
        ),
        (
            {
                "sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required\n"
                ' username="me"  password="a\\"b;c=d" ;'
            },
            {"sasl.username": "me", "sasl.password": 'a"b;c=d'},
        ),
        (
            {
                "sasl.jaas.config": "x.OAuthBearerLoginModule required clientId='i' clientSecret='s' scope='a b';",
                "sasl.oauthbearer.token.endpoint.url": "https://login",
            },
            {
                "sasl.oauthbearer.method": "oidc", "sasl.oauthbearer.client.id": "i",
                "sasl.oauthbearer.client.secret": "s", "sasl.oauthbearer.scope": "a b",
                "sasl.oauthbearer.token.endpoint.url": "https://login",
            },
        ),
        (
            {"ssl.truststore.location": "/ca.pem", "ssl.truststore.password": "x", "ssl.truststore.type": "PEM"},
            {"ssl.ca.location": "/ca.pem"},
        ),
        (
            {"ssl.keystore.location": "/me.p12", "ssl.keystore.password": "p", "ssl.key.password": "k"},
            {"ssl.keystore.location": "/me.p12", "ssl.keystore.password": "p", "ssl.key.password": "k"},
        ),
        (
            {"ssl.keystore.certificate.chain": "C", "ssl.keystore.key": "K", "ssl.truststore.certificates": "A"},
            {"ssl.certificate.pem": "C", "ssl.key.pem": "K", "ssl.ca.pem": "A"},
        ),
        ({"ssl.endpoint.identification.algorithm": ""}, {"ssl.endpoint.identification.algorithm": "none"}),
        ({"client.id": "mine", "client.rack": "r"}, {"client.id": "mine", "client.rack": "r"}),
        ({"isolation.level": "READ_UNCOMMITTED"}, {"isolation.level": "read_uncommitted"}),
    ],
)  # fmt: skip
def test_properties_of_the_connection_are_taken_over(given: dict[str, str], told: dict[str, str]) -> None:
    plain = connection("a:1", {})
    found = connection("a:1", given)
    assert {key: value for key, value in found.items() if plain.get(key) != value} == told


def test_how_we_read_and_write_is_not_for_properties_to_say() -> None:
    given = {
        "group.id": "theirs", "enable.auto.commit": "true", "auto.offset.reset": "latest", "acks": "0",
        "bootstrap.servers": "other:1", "key.deserializer": "org.apache.kafka.Bytes", "linger.ms": "1000",
        "ssl.protocol": "TLSv1.2", "schema.registry.url": "http://x",
    }  # fmt: skip
    found = connection("a:1", given)
    assert found == connection("a:1", {})
    assert found["bootstrap.servers"] == "a:1"
    assert consumer_config(found)["isolation.level"] == "read_committed"
    assert producer_config(found, 1000)["acks"] == "all"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ssl.truststore.location": "/x.jks"}, "ssl.truststore.location: a store of Java.*ssl.ca.location"),
        ({"ssl.keystore.location": "/x.jks", "ssl.keystore.type": "JKS"}, "PKCS12"),
        ({"sasl.jaas.config": "nonsense"}, "sasl.jaas.config: expected"),
        ({"sasl.jaas.config": "software.amazon.msk.auth.iam.IAMLoginModule required;"}, "IAMLoginModule"),
        ({"sasl.client.callback.handler.class": "x.Y"}, "sasl.client.callback.handler.class"),
        ({"sasl.password": "${file:/no/such/file}"}, "sasl.password: .*/no/such/file"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_a_way_out(given: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        connection("a:1", given)


def test_secrets_are_resolved_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "password").write_text("from file\n")
    monkeypatch.setenv("SOME_USER", "from environment")
    found = connection(
        "a:1", {"sasl.username": "${env:SOME_USER}", "sasl.password": f"${{file:{tmp_path / 'password'}}}"}
    )
    assert (found["sasl.username"], found["sasl.password"]) == ("from environment", "from file")


@pytest.mark.parametrize("text", ["=value hunter2\n", "a=b\n: hunter2\n"])
def test_a_line_without_a_key_is_refused_and_not_shown(text: str, tmp_path: Path) -> None:
    path = tmp_path / "kafka.properties"
    path.write_text(text)
    settings = Settings(("test", {"epoch_log": "kafka", "kafka_brokers": "h:1", "kafka_properties": str(path)}))
    with pytest.raises(InvalidConfig, match=r"kafka\.properties: .* a line without a key") as refused:
        _ = open_logs(settings).epoch
    assert "hunter2" not in str(refused.value)


def test_what_a_reference_within_a_jaas_config_stands_for_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PW", 'a\\b"c;d=e')
    monkeypatch.setenv("JAAS", 'x.PlainLoginModule required username="me" password="a\\\\b";')
    options = {"sasl.jaas.config": 'x.PlainLoginModule required username="me" password="${env:PW}";'}
    assert connection("h:1", options)["sasl.password"] == 'a\\b"c;d=e'
    assert connection("h:1", {"sasl.jaas.config": "${env:JAAS}"})["sasl.password"] == "a\\b"


def test_what_is_debugged_goes_to_our_log_and_not_to_stderr() -> None:
    shared = connection("h:1", {"debug": "all"})
    assert consumer_config(shared)["debug"] == producer_config(shared, 1_000)["debug"] == "all"
    assert "debug" not in admin_config(shared)


@pytest.mark.parametrize("how", ["properties", "jaas"])
def test_a_login_is_what_its_references_give_now(tmp_path: Path, how: str) -> None:
    file = tmp_path / "password"
    jaas = (
        f'org.apache.kafka.common.security.scram.ScramLoginModule required username="me" password="${{file:{file}}}";'
    )
    given = {"sasl.username": "me", "sasl.password": f"${{file:{file}}}"} if how == "properties" else {}
    properties = {"sasl.mechanism": "PLAIN", **(given or {"sasl.jaas.config": jaas})}
    file.write_text("first\n")
    assert login(properties) == ("me", "first")
    file.write_text("second\n")
    assert login(properties) == ("me", "second")
    shared = connection("a:1", properties)
    assert (shared["sasl.username"], shared["sasl.password"]) == login(properties)
    file.unlink()
    with pytest.raises(InvalidConfig, match="cannot be read"):
        login(properties)


def test_who_has_no_password_has_no_login_to_renew() -> None:
    assert login({}) is None
    assert login({"sasl.mechanism": "GSSAPI", "sasl.kerberos.principal": "me"}) is None
