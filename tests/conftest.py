# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests: real brokers, one set per session. How tests are spread over workers."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from certificates import share_certificates
from lanes import Lanes, lanes_first, once_more

from kafka import kafka, kafka_one_node, kafka_three, kafka_three_nodes

__all__ = ["kafka", "kafka_one_node", "kafka_three", "kafka_three_nodes"]

# How long an example takes says how busy the machine is, and what the first one imports.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

share_certificates()

_BROKERS = {"kafka_one_node", "kafka_three_nodes"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _BROKERS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.kafka)
    once_more(items)
    if hasattr(config, "workerinput"):
        lanes_first(items)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes:
    return Lanes(config, log)
