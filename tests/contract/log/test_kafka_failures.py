# SPDX-License-Identifier: Apache-2.0
"""Brokers that die, hang, come back, were never there or do not let us in."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bench.kafka import free_port
from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient
from kafka_kit import new_name, numbered, read_until, values_to_end, wait_until

from cremant.log.api import Message, OutcomeUnknown
from cremant.log.kafka import KafkaLog
from cremant.log.open import open_logs
from cremant.model.errors import CremantError, InvalidConfig, PeerError, Unavailable
from cremant.model.settings import Settings
from cremant.model.table import StreamConfig
from kafka import SASL_PASSWORD, SASL_USER, KafkaCluster


@pytest.fixture
def log(kafka: KafkaCluster) -> Iterator[KafkaLog]:
    opened = KafkaLog(kafka.brokers)
    yield opened
    opened.close()


@contextlib.contextmanager
def appending(log: KafkaLog, topic: str) -> Iterator[dict[int, bytes]]:
    """A thread that appends one message after the other; what was acknowledged where."""
    stop, acknowledged = threading.Event(), dict[int, bytes]()

    def append() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            value = b"%d" % number
            try:
                acknowledged[log.append(topic, 0, [Message(value)]).first_offset] = value
            except PeerError:
                time.sleep(0.05)

    thread = threading.Thread(target=append)
    thread.start()
    try:
        yield acknowledged
    finally:
        stop.set()
        thread.join(60)


# --- a broker dies and comes back ---


def test_reading_waiting_and_appending_go_on_when_a_killed_broker_is_back(kafka: KafkaCluster, log: KafkaLog) -> None:
    topic = new_name()
    log.create_topic(topic, 2)
    reader = log.reader(topic, 0, 0)
    with appending(log, topic) as acknowledged, ThreadPoolExecutor(2) as pool:
        found = read_until(reader, 5)
        kafka.kill(1)
        reading = pool.submit(read_until, reader, 200)
        waiting = pool.submit(log.wait, {(topic, 1): 0}, 60.0)
        time.sleep(0.5)
        kafka.restart(1)
        before = len(acknowledged)
        wait_until(lambda: len(acknowledged) > before + 100)
        log.append(topic, 1, numbered(0, 1))
        assert waiting.result(60)
        found += reading.result(60)
    found += read_until(reader, log.latest(topic, 0) - reader.position)
    assert len(found) == len(set(found)), "read or written twice"
    assert {offset: found[offset] for offset in acknowledged} == acknowledged


def test_the_death_of_a_leader_loses_nothing_acknowledged_and_appends_go_on(kafka_three: KafkaCluster) -> None:
    log = KafkaLog(kafka_three.brokers, replication=3)
    topic = new_name()
    log.create_topic(topic, 1)
    admin = AdminClient(kafka_three.client())
    described = admin.describe_topics(TopicCollection([topic]))[topic].result()
    leader = described.partitions[0].leader.id
    assert len(described.partitions[0].replicas) == 3
    reader = log.reader(topic, 0, 0)
    with appending(log, topic) as acknowledged:
        found = read_until(reader, 100)
        kafka_three.kill(leader)
        before = len(acknowledged)
        wait_until(lambda: len(acknowledged) > before + 100)
        found += read_until(reader, 100)
        kafka_three.restart(leader)
    found += read_until(reader, log.latest(topic, 0) - reader.position)
    assert len(found) == len(set(found)), "read or written twice"
    assert {offset: found[offset] for offset in acknowledged} == acknowledged
    log.close()


def test_topics_are_described_and_changed_while_the_broker_that_was_the_controller_is_dead(
    kafka_three: KafkaCluster,
) -> None:
    """Brokers name any broker that they believe to be alive, a dead one, too, for a while: the client must not go on
    waiting for what it was told last."""
    log = KafkaLog(kafka_three.brokers, replication=3)
    topic = new_name()
    log.create_topic(topic, 1)
    client = log._admin._client
    kafka_three.kill(1)
    wait_until(lambda: _controller_of(client) == 1)
    assert log.topic(topic).partitions == 1
    assert log.grow_topic(topic, 2).partitions == 2
    log.close()


def _controller_of(client: AdminClient) -> int:
    """As it is told now; -1 while a connection breaks."""
    with contextlib.suppress(KafkaException):
        return int(client.list_topics(timeout=5).controller_id)
    return -1


# --- a broker hangs ---


def test_deadlines_hold_when_a_broker_hangs_and_the_fate_of_an_append_is_said_to_be_unknown(
    kafka: KafkaCluster,
) -> None:
    log = KafkaLog(kafka.brokers, deadline_ms=1500, append_deadline_ms=2000)
    topic = new_name()
    log.create_topic(topic, 1)
    log.append(topic, 0, numbered(0, 3))
    reader = log.reader(topic, 0, 0)
    assert len(values_to_end(reader)) == 3
    log.append(topic, 0, numbered(3, 1))
    fresh = log.reader(topic, 0, 0)
    kafka.pause(1)
    try:
        calls: dict[str, Callable[[], object]] = {
            "latest": lambda: log.latest(topic, 0),
            "bounds": lambda: log.bounds(topic, [0]),
            "topic": lambda: log.topic(topic),
            "read": lambda: fresh.read(max_messages=1, max_bytes=1),
        }
        for name, call in calls.items():
            began_s = time.monotonic()
            with pytest.raises(PeerError, match=kafka.brokers):
                pytest.fail(f"{name} gave {call()}")
            assert time.monotonic() - began_s < 20, name
        assert not log.wait({(topic, 0): 4}, 0.5)
        with pytest.raises(OutcomeUnknown, match="whether it will be there is unknown"):
            log.append(topic, 0, [Message(b"perhaps")])
    finally:
        kafka.resume(1)
    found = read_until(fresh, 4)
    assert found[:4] == [b"0", b"1", b"2", b"3"]
    wait_until(lambda: _appends(log, topic))
    log.close()
    with contextlib.closing(KafkaLog(kafka.brokers)) as patient:
        assert values_to_end(patient.reader(topic, 0, 0)).count(b"perhaps") <= 1


def test_an_append_to_a_partition_not_known_yet_holds_up_no_other_while_a_broker_hangs(
    kafka: KafkaCluster, log: KafkaLog
) -> None:
    """The producer knows one partition of two; asking for the other hangs with the broker."""
    topic = new_name()
    log.create_topic(topic, 1)
    log.append(topic, 0, numbered(0, 1))
    log.grow_topic(topic, 2)
    client = log._appender._live()
    assert len(client.producer) == 0
    with ThreadPoolExecutor(2) as pool:
        kafka.pause(1)
        try:
            unknown = pool.submit(log.append, topic, 1, numbered(0, 1))
            time.sleep(1.0)
            known = pool.submit(log.append, topic, 0, numbered(1, 1))
            wait_until(lambda: len(client.producer) > 0, 15)
            assert not unknown.done()
        finally:
            kafka.resume(1)
        assert known.result(60).first_offset == 1
        assert unknown.result(60).first_offset == 0


def _appends(log: KafkaLog, topic: str) -> bool:
    try:
        return log.append(topic, 0, [Message(b"again")]).first_offset > 0
    except PeerError:
        return False


# --- no broker, no entry ---


def test_brokers_that_are_not_there_are_named_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    brokers = f"127.0.0.1:{free_port()}"
    log = KafkaLog(brokers, deadline_ms=500, append_deadline_ms=500)
    calls: tuple[Callable[[], object], ...] = (
        lambda: log.topic("t"),
        log.topics,
        lambda: log.latest("t", 0),
        lambda: log.append("t", 0, [Message(b"")]),
        lambda: log.wait({("t", 0): 0}, 0.1),
        lambda: log.reader("t", 0, 0),
        lambda: log.bounds("t", [0]),
    )
    for call in calls:
        with pytest.raises(PeerError, match=brokers) as caught:
            call()
        assert caught.value.hint
    log.close()
    assert capfd.readouterr().err == ""


JAAS = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="%s" password="%s";'


def test_a_login_with_secrets_by_reference_reads_and_writes(
    kafka: KafkaCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TESTER_PASSWORD", SASL_PASSWORD)
    (tmp_path / "user").write_text(f"{SASL_USER}\n")
    file = tmp_path / "client.properties"
    file.write_text(
        "# as for Java's tools\nsecurity.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\n"
        f"sasl.jaas.config={JAAS % (f'${{file:{tmp_path}/user}}', '${env:TESTER_PASSWORD}')}\n"
    )
    settings = Settings(
        ("test", {"epoch_log": "kafka", "kafka_brokers": kafka.sasl_brokers, "kafka_properties": str(file)})
    )
    logs = open_logs(settings)
    topic = new_name()
    logs.epoch.create_topic(topic, 1)
    logs.epoch.append(topic, 0, numbered(0, 3))
    stream = StreamConfig(
        stream_type="kafka", topic=topic, brokers=kafka.sasl_brokers,
        client_properties={
            "security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": SASL_USER,
            "sasl.password": "${env:TESTER_PASSWORD}", "value.deserializer": "of.Java", "max.poll.records": "500",
        },
    )  # fmt: skip
    with logs.stream(stream) as log, logs.stream(stream) as again:
        assert values_to_end(log.reader(topic, 0, 0)) == [b"0", b"1", b"2"]
        assert log is again
        assert log is not logs.epoch
    logs.close()


def test_a_password_in_a_file_may_be_changed_while_clients_run(kafka: KafkaCluster, tmp_path: Path) -> None:
    """The brokers take another one; who is connected stays so, whoever connects again is refused until the file has it,
    too, and then goes on without being started again."""
    file = tmp_path / "password"
    file.write_text(f"{SASL_PASSWORD}\n")
    jaas = JAAS % (SASL_USER, f"${{file:{file}}}")
    with contextlib.closing(
        KafkaLog(
            kafka.sasl_brokers,
            {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.jaas.config": jaas},
            deadline_ms=3_000, append_deadline_ms=5_000,
        )
    ) as log, contextlib.ExitStack() as later:  # fmt: skip
        topic = new_name()
        log.create_topic(topic, 1)
        log.append(topic, 0, numbered(0, 2))
        reader = log.reader(topic, 0, 0)
        assert len(values_to_end(reader)) == 2
        later.callback(kafka.restart, 1)
        later.callback(change_password, kafka, "another", SASL_PASSWORD)
        change_password(kafka, SASL_PASSWORD, "another")
        kafka.restart(1)
        with pytest.raises(PeerError, match="login failed"):
            log.topic(topic)
        file.write_text("another\n")
        wait_until(lambda: _appends(log, topic))
        assert read_until(reader, 1) == [b"again"]
        assert log.topic(topic).partitions == 1


def change_password(kafka: KafkaCluster, old: str, new: str) -> None:
    """Counts when brokers start."""
    file = kafka.root / "node-1" / "server.properties"
    text = file.read_text(encoding="utf-8")
    assert f'="{old}"' in text
    file.write_text(text.replace(f'="{old}"', f'="{new}"'), encoding="utf-8")


@pytest.mark.parametrize(
    ("protocol", "password", "message"),
    [
        ("SASL_PLAINTEXT", "wrong", "login failed: .*Authentication failed"),
        ("SASL_SSL", SASL_PASSWORD, "TLS failed"),
        ("PLAINTEXT", SASL_PASSWORD, "brokers"),
    ],
)
def test_a_login_that_fails_is_told_soon_and_without_the_password(
    kafka: KafkaCluster, protocol: str, password: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    properties = {
        "security.protocol": protocol, "sasl.mechanism": "PLAIN", "sasl.jaas.config": JAAS % (SASL_USER, password),
    }  # fmt: skip
    log = KafkaLog(kafka.sasl_brokers, properties, deadline_ms=3000, append_deadline_ms=3000)
    for call in (lambda: log.topic("t"), log.topics):
        with pytest.raises(Unavailable, match=message) as caught:
            call()
        assert password not in str(caught.value).replace("wrong version number", "")
        assert caught.value.hint
    log.close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ({"sasl.password": "${env:NO_SUCH_NAME}"}, "sasl.password: .*NO_SUCH_NAME"),
        ({"security.protocol": "SASL"}, "security.protocol"),
        ({"sasl.passwrd": "x"}, "sasl.passwrd"),
        ({"isolation.level": "serializable"}, "isolation.level"),
        ({"ssl.truststore.location": "/etc/store.jks"}, "ssl.truststore.location"),
    ],
)
def test_properties_that_cannot_be_are_refused_by_name(properties: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        KafkaLog("127.0.0.1:1", properties)


@pytest.mark.parametrize(
    "settings",
    [
        {"epoch_log": "pulsar"},
        {"epoch_log": "kafka"},
        {"epoch_log": "kafka", "kafka_brokers": "a:1", "kafka_properties": "/no"},
    ],
)
def test_settings_of_the_epoch_log_that_cannot_be_are_refused(settings: dict[str, str]) -> None:
    with pytest.raises(InvalidConfig, match="setting "):
        _ = open_logs(Settings(("test", settings))).epoch


def test_a_topic_cannot_be_created_with_more_replicas_than_brokers(kafka: KafkaCluster) -> None:
    log = KafkaLog(kafka.brokers, replication=3)
    with pytest.raises(CremantError, match="replication factor"):
        log.create_topic(new_name(), 1)
    log.close()
