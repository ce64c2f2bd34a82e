# SPDX-License-Identifier: Apache-2.0
"""The controller with real Kafka brokers: streams there, epoch logs there, and brokers that stop answering."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from control import Cluster, schema, table

from cremant.log.api import Log
from cremant.log.kafka import KafkaLog
from cremant.log.open import open_logs
from cremant.model.names import epoch_topic
from cremant.model.settings import Settings
from kafka import KafkaCluster

SERVER = "Server_127.0.0.1_8098"


def kafka_table(brokers: str, topic: str, name: str = "gold") -> dict[str, Any]:
    document = table(name)
    document["ingestionConfig"]["streamIngestionConfig"]["streamConfigMaps"] = [
        {
            "streamType": "kafka",
            "stream.kafka.topic.name": topic,
            "stream.kafka.broker.list": brokers,
            "stream.kafka.consumer.prop.auto.offset.reset": "smallest",
        }
    ]
    return document


class World:
    """A controller whose streams are on Kafka, and its epoch logs where the settings say."""

    def __init__(self, kafka: KafkaCluster, directory: Path, epoch_log: str) -> None:
        self.kafka = kafka
        self.topic = f"events-{secrets.token_hex(4)}"
        layer = {"data_dir": str(directory / "c"), "epoch_log": epoch_log, "kafka_brokers": kafka.brokers}
        self.logs = open_logs(Settings(("test", layer)))
        self.stream: Log = KafkaLog(kafka.brokers)
        self.stream.create_topic(self.topic, 2)
        self.cluster = Cluster(directory, logs=self.logs)
        self.cluster.beat(SERVER)
        self.cluster.post("/schemas", schema())
        self._stopping = threading.Event()
        self.slowest_s = 0.0

    def create(self, topic: str | None = None, status: int = 200) -> Any:
        self.cluster.beat(SERVER)
        return self.cluster.post("/tables", kafka_table(self.kafka.brokers, topic or self.topic), status=status)

    def until(self, condition: Callable[[], Any], timeout_s: float = 60) -> Any:
        deadline_s = time.monotonic() + timeout_s
        while not (found := condition()):
            assert time.monotonic() < deadline_s
            self.cluster.beat(SERVER)
            time.sleep(0.1)
        return found

    def close(self) -> None:
        self.cluster.close()
        self.logs.close()
        self.stream.close()


@pytest.fixture
def make_world(kafka: KafkaCluster, tmp_path: Path) -> Iterator[Callable[[str], World]]:
    made: list[World] = []

    def make(epoch_log: str) -> World:
        made.append(World(kafka, tmp_path, epoch_log))
        return made[-1]

    yield make
    kafka.heal()
    for world in made:
        world.close()


def test_a_table_on_a_kafka_topic_is_created_grows_and_shows_its_lag(make_world: Callable[[str], World]) -> None:
    world = make_world("kafka")
    error = world.create(world.topic.replace("events", "event"), status=400)["error"]
    assert f"did you mean '{world.topic}'?" in error
    world.create()
    view = world.cluster.view_where(lambda view: "gold" in view.tables).tables["gold"]
    assert [part.record.partition for part in view.partitions] == [0, 1]
    own = epoch_topic("gold", view.record.incarnation)
    assert world.logs.epoch.topic(own).partitions == 2
    world.stream.grow_topic(world.topic, 3)
    world.until(lambda: len(world.cluster.view().tables["gold"].partitions) == 3)
    assert world.logs.epoch.topic(own).partitions == 3
    assert [part["streamEnd"] for part in world.cluster.get("/status")["tables"][0]["partitions"]] == [0, 0, 0]
    world.cluster.post("/tables/gold", method="DELETE")
    world.until(lambda: own not in {info.name for info in world.logs.epoch.topics()})


def test_a_topic_that_was_made_anew_is_another_stream(make_world: Callable[[str], World]) -> None:
    world = make_world("embedded")
    world.create()
    world.stream.delete_topic(world.topic)
    world.stream.create_topic(world.topic, 4)
    assert world.cluster.controller.tables.grow("gold") == 0


def test_brokers_that_hang_hold_up_neither_heartbeats_nor_other_requests(
    make_world: Callable[[str], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world("embedded")
    world.create()
    monkeypatch.setattr(world.cluster.controller.streams, "_timeout_ms", 2_000)
    world.cluster.post("/schemas", schema("silver"))
    world.kafka.pause(1)
    answers: list[Any] = []

    def create() -> None:
        try:
            world.cluster.controller.tables.create(kafka_table(world.kafka.brokers, world.topic, "silver"))
        except Exception as error:
            answers.append(error)

    creation = threading.Thread(target=create)
    creation.start()
    slowest_s = 0.0
    while creation.is_alive():
        began_s = time.monotonic()
        assert world.cluster.beat(SERVER).status_code == 200
        world.cluster.get("/tables")
        slowest_s = max(slowest_s, time.monotonic() - began_s)
        time.sleep(0.05)
    [error] = answers
    assert "table silver" in str(error)
    assert world.topic in str(error)
    assert slowest_s < 2.0
    assert all(instance.live for instance in world.cluster.view().instances)
    began_s = time.monotonic()
    assert [part["streamEnd"] for part in world.cluster.get("/status")["tables"][0]["partitions"]] == [None, None]
    assert time.monotonic() - began_s < 10
    world.kafka.resume(1)
    monkeypatch.undo()

    def created() -> bool:
        document = kafka_table(world.kafka.brokers, world.topic, "silver")
        answer = world.cluster.request("POST", "/tables", json=document)
        return answer.status_code in (200, 409)

    world.until(created)
    assert world.cluster.get("/tables") == {"tables": ["gold", "silver"]}


def test_a_table_that_is_dropped_while_brokers_are_away_loses_its_topics_when_they_are_back(
    make_world: Callable[[str], World],
) -> None:
    world = make_world("kafka")
    world.create()
    view = world.cluster.view_where(lambda view: "gold" in view.tables).tables["gold"]
    own = epoch_topic("gold", view.record.incarnation)
    world.kafka.kill(1)
    world.cluster.post("/tables/gold", method="DELETE")
    assert world.cluster.get("/tables") == {"tables": []}
    answer = world.cluster.request("POST", "/tables", json=kafka_table(world.kafka.brokers, world.topic))
    assert answer.status_code in (503, 504), answer.text
    assert "table gold" in answer.json()["error"]
    assert len(world.cluster.controller.catalog.being_removed()) == 1
    world.kafka.restart(1)
    world.until(lambda: not world.cluster.controller.catalog.being_removed(), 90)
    assert own not in {info.name for info in world.logs.epoch.topics()}
