# SPDX-License-Identifier: Apache-2.0
"""The logs of a process: opened when asked for, shared, and given back."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka_kit import new_name, numbered, values_to_end, wait_until

from cremant.log.kafka import KafkaLog
from cremant.log.open import Logs, open_logs
from cremant.model.errors import InvalidConfig, Unavailable
from cremant.model.limits import KAFKA_UNUSED_LOGS_MAX
from cremant.model.settings import Settings
from cremant.model.table import StreamConfig
from kafka import KafkaCluster


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Logs]:
    opened = open_logs(Settings(("test", {"data_dir": str(tmp_path)})))
    yield opened
    opened.close()


@pytest.fixture
def topic(kafka: KafkaCluster) -> Iterator[str]:
    """With three messages."""
    log, name = KafkaLog(kafka.brokers), new_name()
    log.create_topic(name, 1)
    log.append(name, 0, numbered(0, 3))
    yield name
    log.close()


def stream_of(kafka: KafkaCluster, topic: str, client: str) -> StreamConfig:
    """Another `client` is another way to reach the brokers."""
    return StreamConfig(
        stream_type="kafka", topic=topic, brokers=kafka.brokers, client_properties={"client.id": client}
    )


def threads() -> int:
    """Of Kafka's clients, by the names that their library gives them."""
    count = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            count += Path(f"/proc/self/task/{task}/comm").read_text().startswith("rdk:")
    return count


def settled_threads() -> int:
    """Once those of clients that were closed before have ended."""
    counts = [threads()]
    while len(counts) < 3 or len(set(counts[-3:])) > 1:
        assert len(counts) < 60, f"threads of Kafka's clients come and go: {counts}"
        time.sleep(0.5)
        counts.append(threads())
    return counts[-1]


def read_all(logs: Logs, stream: StreamConfig) -> None:
    with logs.stream(stream) as log:
        assert values_to_end(log.reader(stream.topic, 0, 0)) == [b"0", b"1", b"2"]


def test_streams_that_nobody_uses_any_more_cost_no_threads(kafka: KafkaCluster, topic: str, logs: Logs) -> None:
    """As many tables with credentials of their own as there may be: made, asked, dropped."""
    before = settled_threads()
    counts = [before]
    for client in ("first", "second"):  # clients of others may still end, but hardly within both
        read_all(logs, stream_of(kafka, topic, client))
        counts.append(threads())
    each = max(after - earlier for earlier, after in itertools.pairwise(counts))
    assert each > 2, "a log has threads"
    for number in range(3 * KAFKA_UNUSED_LOGS_MAX):
        read_all(logs, stream_of(kafka, topic, f"client-{number}"))
    wait_until(lambda: threads() <= before + (KAFKA_UNUSED_LOGS_MAX + 1) * each)
    logs.close()
    wait_until(lambda: threads() <= before)


def test_a_stream_in_use_stays_open_whatever_others_come_and_go(kafka: KafkaCluster, topic: str, logs: Logs) -> None:
    mine = stream_of(kafka, topic, "mine")
    with logs.stream(mine) as log:
        reader = log.reader(topic, 0, 0)
        with logs.stream(mine) as same:
            assert same is log
        for number in range(2 * KAFKA_UNUSED_LOGS_MAX):
            read_all(logs, stream_of(kafka, topic, f"client-{number}"))
        assert values_to_end(reader) == [b"0", b"1", b"2"]
        assert log.latest(topic, 0) == 3
    for number in range(KAFKA_UNUSED_LOGS_MAX):
        read_all(logs, stream_of(kafka, topic, f"later-{number}"))
    for call in (
        lambda: log.topic(topic),
        lambda: log.reader(topic, 0, 0),
        lambda: log.append(topic, 0, numbered(3, 1)),
    ):
        with pytest.raises(Unavailable, match="is closed"):
            call()


def test_a_secret_that_changed_is_another_way_in(kafka: KafkaCluster, logs: Logs, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("before")
    stream = stream_of(kafka, "any", f"${{file:{secret}}}")
    with logs.stream(stream) as before, logs.stream(stream) as again:
        secret.write_text("after")
        with logs.stream(stream) as after:
            assert before is again
            assert after is not before


def test_the_epoch_log_is_opened_once(kafka: KafkaCluster, tmp_path: Path) -> None:
    """And shared with streams that are reached in the same way."""
    file = tmp_path / "client.properties"
    file.write_text("client.id=mine\n")
    layer = {"epoch_log": "kafka", "kafka_brokers": kafka.brokers, "kafka_properties": str(file)}
    logs = open_logs(Settings(("test", layer)))
    epoch = logs.epoch
    file.unlink()
    assert logs.epoch is epoch
    with logs.stream(stream_of(kafka, "any", "mine")) as stream:
        assert stream is epoch
    for number in range(2 * KAFKA_UNUSED_LOGS_MAX):
        with logs.stream(stream_of(kafka, "any", f"client-{number}")):
            pass
    assert isinstance(epoch.topics(), list)
    logs.close()
    with pytest.raises(InvalidConfig, match="cannot be read"):
        _ = logs.epoch


def test_the_embedded_log_is_made_by_who_needs_it(logs: Logs, tmp_path: Path) -> None:
    logs.expire()
    assert list(tmp_path.iterdir()) == []
    assert logs.epoch is logs.embedded
    assert (tmp_path / "log").is_dir()
