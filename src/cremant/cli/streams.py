# SPDX-License-Identifier: Apache-2.0
"""Which log a command about topics means: the cluster's embedded log, a Kafka named on the command line, or whatever
log a table's stream is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cremant.cli.client import Client
from cremant.cli.find import Target
from cremant.cli.table import table_status
from cremant.log.api import Log
from cremant.log.embedded import EmbeddedLog
from cremant.log.open import open_logs
from cremant.model.errors import InvalidConfig, NotFound
from cremant.model.settings import Settings


class Kafka(NamedTuple):
    """Brokers as `host:port,…` and a Java-style properties file for their clients."""

    brokers: str
    properties: Path | None = None

    def settings(self) -> dict[str, str]:
        found = {"epoch_log": "kafka", "kafka_brokers": self.brokers}
        if self.properties is not None:
            found["kafka_properties"] = str(self.properties.absolute())
        return found


def kafka_of(brokers: str | None, properties: Path | None) -> Kafka | None:
    """Raises InvalidConfig, NotFound."""
    if properties is not None and not properties.is_file():
        raise NotFound(f"--properties {properties}: no such file")
    if brokers is None:
        if properties is not None:
            raise InvalidConfig("--properties is for the clients of --kafka HOST:PORT")
        return None
    for broker in brokers.split(","):
        host, colon, port = broker.strip().rpartition(":")
        if not (host and colon and port.isdigit()):
            raise InvalidConfig(f"--kafka {brokers}: expected HOST:PORT,…, found {broker!r}")
    return Kafka(brokers, properties)


@contextmanager
def kafka_log(kafka: Kafka) -> Iterator[Log]:
    logs = open_logs(Settings(("command line", kafka.settings())))
    try:
        yield logs.epoch
    finally:
        logs.close()


@contextmanager
def local_log(target: Target) -> Iterator[Log | None]:
    """The embedded log where its directory is on this machine; None where it is not."""
    if target.log_dir is None:
        yield None
        return
    log = EmbeddedLog(target.log_dir)
    try:
        yield log
    finally:
        log.close()


class TableStream(NamedTuple):
    topic: str
    #: None: the embedded log of a cluster elsewhere.
    log: Log | None


@contextmanager
def table_stream(target: Target, table: str) -> Iterator[TableStream]:
    """The stream that a table reads. Secrets that its config refers to are looked up here, on this machine."""
    with Client(target.controller) as client:
        name = table_status(client, table)["name"]
        stream = client.view().tables[name].record.config.stream
    if stream.stream_type != "kafka":
        with local_log(target) as log:
            yield TableStream(stream.topic, log)
        return
    logs = open_logs(Settings())
    try:
        with logs.stream(stream) as log:
            yield TableStream(stream.topic, log)
    finally:
        logs.close()
