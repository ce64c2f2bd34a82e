# SPDX-License-Identifier: Apache-2.0
"""What benchmarks share: the cluster to drive, the stream to fill, progress, statistics, the machine's description."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from bench.cluster import ClusterError, Json, LocalCluster, Rest, descendants
from bench.kafka import KafkaCluster
from cremant.log.api import Message
from cremant.log.embedded import EmbeddedLog


class Stream(Protocol):
    """Where rows are written."""

    def create(self, topic: str, partitions: int) -> None: ...

    def append(self, topic: str, partition: int, values: Sequence[bytes]) -> None: ...

    def flush(self) -> None:
        """Returns when everything appended is acknowledged."""

    def properties(self, topic: str) -> dict[str, str]:
        """Of a table that reads the topic."""


class LogStream:
    """The embedded log of this machine, directly. Files are rolled by who writes them: `segment_bytes`, if given."""

    def __init__(self, log_dir: Path, segment_bytes: int | None = None) -> None:
        self._log = EmbeddedLog(log_dir, **({} if segment_bytes is None else {"segment_bytes": segment_bytes}))

    def create(self, topic: str, partitions: int) -> None:
        self._log.create_topic(topic, partitions)

    def append(self, topic: str, partition: int, values: Sequence[bytes]) -> None:
        self._log.append(topic, partition, [Message(value) for value in values])

    def flush(self) -> None:
        pass

    def properties(self, topic: str) -> dict[str, str]:
        return embedded_properties(topic)


class HttpStream:
    """Topics of a cluster elsewhere. Batches of keyless lines take partitions in turns, as the caller's do."""

    def __init__(self, rest: Rest) -> None:
        self._rest = rest

    def create(self, topic: str, partitions: int) -> None:
        self._rest.call("PUT", f"/topics/{topic}", params={"partitions": partitions})

    def append(self, topic: str, partition: int, values: Sequence[bytes]) -> None:
        self._rest.call("POST", f"/topics/{topic}", content=b"\n".join(values) + b"\n")

    def flush(self) -> None:
        pass

    def properties(self, topic: str) -> dict[str, str]:
        return embedded_properties(topic)


class KafkaStream:
    """Topics of a Kafka. Property names are Pinot's, so the same tables work there."""

    def __init__(self, brokers: str) -> None:
        from confluent_kafka import Producer

        self.brokers = brokers
        self._failed: list[str] = []
        self._producer = Producer(
            {
                "bootstrap.servers": brokers,
                "linger.ms": 2,
                "batch.size": 1_000_000,
                "queue.buffering.max.messages": 1_000_000,
                "queue.buffering.max.kbytes": 512 * 1024,
                "acks": "all",
                "log_level": 0,
            }
        )

    def create(self, topic: str, partitions: int) -> None:
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient({"bootstrap.servers": self.brokers})
        for created in admin.create_topics([NewTopic(topic, partitions)]).values():
            created.result(30)

    def append(self, topic: str, partition: int, values: Sequence[bytes]) -> None:
        for value in values:
            while True:
                try:
                    self._producer.produce(topic, value, partition=partition, on_delivery=self._delivered)
                    break
                except BufferError:
                    self._producer.poll(0.1)
        self._producer.poll(0)

    def flush(self) -> None:
        left = self._producer.flush(120)
        if left or self._failed:
            raise ClusterError(
                f"Kafka took not everything: {left} unsent, {len(self._failed)} failed {self._failed[:1]}"
            )

    def properties(self, topic: str) -> dict[str, str]:
        return {
            "streamType": "kafka",
            "stream.kafka.topic.name": topic,
            "stream.kafka.broker.list": self.brokers,
            "stream.kafka.consumer.factory.class.name": "org.apache.pinot.plugin.stream.kafka30.KafkaConsumerFactory",
            "stream.kafka.decoder.class.name": "org.apache.pinot.plugin.inputformat.json.JSONMessageDecoder",
            "stream.kafka.consumer.prop.auto.offset.reset": "smallest",
        }

    def _delivered(self, error: Any, _message: Any) -> None:
        if error is not None:
            self._failed.append(str(error))


def embedded_properties(topic: str) -> dict[str, str]:
    return {
        "streamType": "embedded",
        "stream.embedded.topic.name": topic,
        "stream.embedded.consumer.prop.auto.offset.reset": "smallest",
    }


class Driven(NamedTuple):
    """The cluster under test. `local` only if it was started here."""

    rest: Rest
    stream: Stream
    local: LocalCluster | None


class Context:
    """`log` is where streams and epoch logs of an own cluster are: embedded or kafka. `kafka` names a Kafka; without it
    an own one is started."""

    def __init__(
        self,
        *,
        quick: bool,
        log: str = "embedded",
        kafka: str | None = None,
        controller: str | None = None,
        broker: str | None = None,
        minutes: float = 0.0,
        only: str = "",
        rows: int = 0,
        keys: int = 0,
    ) -> None:
        self.quick = quick
        self.log = log
        self.minutes = minutes
        #: The part of a benchmark to run; empty = all of it.
        self.only = only
        #: Sizes, where a benchmark has a choice; 0 = its own.
        self.rows = rows
        self.keys = keys
        self._kafka = kafka
        self._controller = controller
        self._broker = broker
        self._started = time.monotonic()

    @property
    def drives_own_cluster(self) -> bool:
        return self._controller is None

    def show(self, text: str) -> None:
        print(f"  [{time.monotonic() - self._started:6.1f} s] {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def cluster(self, *, servers: int = 1, options: tuple[str, ...] = ()) -> Iterator[Driven]:
        if self._controller is not None and self._broker is not None:
            rest = Rest(self._controller, self._broker)
            yield Driven(rest, KafkaStream(self._kafka) if self._kafka else HttpStream(rest), None)
            return
        with tempfile.TemporaryDirectory(prefix="cremant-bench-") as directory, self.brokers(Path(directory)) as kafka:
            self.show(f"starting a cluster with {servers} server{'s' if servers > 1 else ''}")
            if kafka:
                options = (*options, "--kafka", kafka)
            with LocalCluster(Path(directory) / "data", servers=servers, options=options) as local:
                stream = KafkaStream(kafka) if kafka else LogStream(Path(local.ready["logDir"]))
                yield Driven(local.rest, stream, local)

    @contextlib.contextmanager
    def brokers(self, directory: Path) -> Iterator[str]:
        """`host:port` of the Kafka to use; empty for the embedded log."""
        if self.log != "kafka" or self._kafka:
            yield self._kafka or ""
            return
        self.show("starting a Kafka broker")
        with KafkaCluster(directory / "kafka") as kafka:
            yield kafka.brokers

    def create_table(self, driven: Driven, schema: Json, config: Json) -> None:
        """Replaces what an earlier run may have left."""
        name = config["tableName"]
        if name in driven.rest.call("GET", "/tables")["tables"]:
            driven.rest.call("DELETE", f"/tables/{name}")
            time.sleep(2)
        driven.rest.add_table(schema, config)


def table_config(
    name: str,
    stream: dict[str, str],
    *,
    time_column: str = "ts",
    flush_rows: int = 5_000_000,
    replication: int = 1,
    **indexing: Any,
) -> Json:
    """`stream`: `driven.stream.properties(topic)`; `indexing`: further keys of tableIndexConfig."""
    return {
        "tableName": name,
        "tableType": "REALTIME",
        "segmentsConfig": {"timeColumnName": time_column, "schemaName": name, "replication": str(replication)},
        "tenants": {},
        "tableIndexConfig": {
            "streamConfigs": {**stream, "realtime.segment.flush.threshold.rows": str(flush_rows)},
            **indexing,
        },
        "metadata": {},
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def cpu_seconds(cluster: LocalCluster) -> float:
    """CPU time that the cluster's processes, dead children included, have used so far."""
    pid = cluster.ready["pid"]
    ticks = 0
    for process in [pid, *descendants(pid)]:
        with contextlib.suppress(OSError, IndexError):
            fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2]
            ticks += sum(int(word) for word in fields.split()[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def describe_commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return done.stdout.strip() or "unknown"


def describe_machine() -> dict[str, Any]:
    model = platform.processor()
    with contextlib.suppress(OSError, IndexError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "load_before": round(load, 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
