# SPDX-License-Identifier: Apache-2.0
"""Real Kafka brokers for tests: `kafka` is the cluster of one node that all tests of a session share, `kafka_three` the
one of three; both are handed over alive, whatever the test before did to them. See `bench/kafka.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from bench.kafka import SASL_PASSWORD, SASL_USER, KafkaCluster, free_port, jars

__all__ = [
    "SASL_PASSWORD", "SASL_USER", "KafkaCluster", "free_port", "jars", "kafka", "kafka_one_node", "kafka_three",
    "kafka_three_nodes", "started_or_skipped",
]  # fmt: skip


def started_or_skipped(cluster: KafkaCluster) -> KafkaCluster:
    """Started. Where it cannot be, tests are skipped, but in CI they fail."""
    try:
        jars()
    except RuntimeError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    cluster.start()
    return cluster


@pytest.fixture(scope="session")
def kafka_one_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    cluster = started_or_skipped(KafkaCluster(tmp_path_factory.mktemp("kafka") / "one", 1))
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def kafka_three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    cluster = started_or_skipped(KafkaCluster(tmp_path_factory.mktemp("kafka") / "three", 3))
    yield cluster
    cluster.stop()


@pytest.fixture
def kafka(kafka_one_node: KafkaCluster) -> KafkaCluster:
    """The session's cluster of one node, alive."""
    kafka_one_node.heal()
    return kafka_one_node


@pytest.fixture
def kafka_three(kafka_three_nodes: KafkaCluster) -> KafkaCluster:
    """The session's cluster of three nodes, alive."""
    kafka_three_nodes.heal()
    return kafka_three_nodes
