# SPDX-License-Identifier: Apache-2.0
"""Brokers that are reached by TLS, with a certificate authority of one's own: keys are made here, by Java's keytool."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka_kit import new_name, numbered, values_to_end

from cremant.log.kafka import KafkaLog
from cremant.log.open import open_logs
from cremant.model.errors import Unavailable
from cremant.model.settings import Settings
from cremant.model.table import StreamConfig
from kafka import SASL_PASSWORD, SASL_USER, KafkaCluster, started_or_skipped

pytestmark = pytest.mark.kafka

PASSWORD = "of-the-store"
LOGIN = {"sasl.mechanism": "PLAIN", "sasl.username": SASL_USER, "sasl.password": SASL_PASSWORD}


def keytool(store: Path, *arguments: str) -> None:
    command = ["keytool", *arguments, "-keystore", str(store), "-storetype", "PKCS12", "-storepass", PASSWORD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def authority(directory: Path, name: str) -> tuple[Path, Path]:
    """A store with the key `ca`, and its certificate as PEM."""
    store, certificate = directory / f"{name}.p12", directory / f"{name}.pem"
    keytool(store, "-genkeypair", "-alias", "ca", "-keyalg", "EC", "-dname", f"CN={name}", "-ext", "bc:c")
    keytool(store, "-exportcert", "-alias", "ca", "-rfc", "-file", str(certificate))
    return store, certificate


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Certificates of the one that signed the brokers' (`ours`) and of another (`theirs`); `broker`: its keystore."""
    directory = tmp_path_factory.mktemp("tls")
    store, ours = authority(directory, "ours")
    keytool(
        store, "-genkeypair", "-alias", "broker", "-signer", "ca", "-keyalg", "EC", "-dname", "CN=broker", "-ext",
        "san=ip:127.0.0.1",
    )  # fmt: skip
    keytool(store, "-delete", "-alias", "ca")
    return {"ours": ours, "theirs": authority(directory, "theirs")[1], "broker": store}


@pytest.fixture(scope="module")
def kafka_tls(authorities: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    properties = {
        "ssl.keystore.location": str(authorities["broker"]), "ssl.keystore.type": "PKCS12",
        "ssl.keystore.password": PASSWORD, "ssl.key.password": PASSWORD,
    }  # fmt: skip
    root = tmp_path_factory.mktemp("kafka") / "tls"
    cluster = started_or_skipped(KafkaCluster(root, 1, properties, ("PLAINTEXT", "SSL", "SASL_SSL")))
    yield cluster
    cluster.stop()


@pytest.mark.parametrize("listener", ["SSL", "SASL_SSL"])
def test_topics_are_written_and_read_through_tls(
    kafka_tls: KafkaCluster, authorities: dict[str, Path], listener: str, tmp_path: Path
) -> None:
    """By an epoch log whose properties are as Java's tools have them, and by a stream with librdkafka's."""
    login = LOGIN if listener == "SASL_SSL" else {}
    brokers, topic = kafka_tls.reached_by(listener), new_name()
    java = {
        **login, "security.protocol": listener, "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(authorities["ours"]),
    }  # fmt: skip
    file = tmp_path / "client.properties"
    file.write_text("".join(f"{key}={value}\n" for key, value in java.items()))
    logs = open_logs(
        Settings(("test", {"epoch_log": "kafka", "kafka_brokers": brokers, "kafka_properties": str(file)}))
    )
    logs.epoch.create_topic(topic, 1)
    assert logs.epoch.append(topic, 0, numbered(0, 3)).first_offset == 0
    stream = StreamConfig(
        stream_type="kafka", topic=topic, brokers=brokers,
        client_properties={**login, "security.protocol": listener, "ssl.ca.location": str(authorities["ours"])},
    )  # fmt: skip
    with logs.stream(stream) as log:
        assert log is not logs.epoch
        assert log.wait({(topic, 0): 2}, 30)
        assert values_to_end(log.reader(topic, 0, 0)) == [b"0", b"1", b"2"]
    logs.close()


@pytest.mark.parametrize(
    ("listener", "properties", "message", "hint"),
    [
        ("SSL", {"security.protocol": "SSL"}, "TLS failed: .*certificate verify failed", "ssl.ca.location"),
        ("SASL_SSL", {"security.protocol": "SASL_SSL"}, "TLS failed: .*certificate verify failed", "ssl.ca.location"),
        ("SSL", {"security.protocol": "PLAINTEXT"}, "Kafka at .*topics", "is security.protocol theirs"),
    ],
)
def test_an_authority_that_is_not_the_brokers_is_told_as_a_failure_of_tls(
    kafka_tls: KafkaCluster, authorities: dict[str, Path], listener: str, properties: dict[str, str], message: str,
    hint: str, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """And no TLS where there should be: brokers just hang up."""
    login = LOGIN if listener == "SASL_SSL" else {}
    own = {**login, **properties, "ssl.ca.location": str(authorities["theirs"])}
    brokers = kafka_tls.reached_by(listener)
    log = KafkaLog(brokers, own, deadline_ms=3_000, append_deadline_ms=3_000)
    for call in (lambda: log.topic("t"), log.topics):
        with pytest.raises(Unavailable, match=message) as caught:
            call()
        assert brokers in caught.value.message
        assert SASL_PASSWORD not in caught.value.message
    assert hint in caught.value.hint
    log.close()
    assert capfd.readouterr().err == ""
