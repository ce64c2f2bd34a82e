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

from bench.cluster import Json, LocalCluster, Rest, descendants
from cremant.log.api import Message
from cremant.log.embedded import EmbeddedLog


class Stream(Protocol):
    """Where rows are written."""

    def create(self, topic: str, partitions: int) -> None: ...

    def append(self, topic: str, partition: int, values: Sequence[bytes]) -> None: ...


class LogStream:
    """The embedded log of this machine, directly."""

    def __init__(self, log_dir: Path) -> None:
        self._log = EmbeddedLog(log_dir)

    def create(self, topic: str, partitions: int) -> None:
        self._log.create_topic(topic, partitions)

    def append(self, topic: str, partition: int, values: Sequence[bytes]) -> None:
        self._log.append(topic, partition, [Message(value) for value in values])


class HttpStream:
    """Topics of a cluster elsewhere. Batches of keyless lines take partitions in turns, as the caller's do."""

    def __init__(self, rest: Rest) -> None:
        self._rest = rest

    def create(self, topic: str, partitions: int) -> None:
        self._rest.call("PUT", f"/topics/{topic}", params={"partitions": partitions})

    def append(self, topic: str, partition: int, values: Sequence[bytes]) -> None:
        self._rest.call("POST", f"/topics/{topic}", content=b"\n".join(values) + b"\n")


class Driven(NamedTuple):
    """The cluster under test. `local` only if it was started here."""

    rest: Rest
    stream: Stream
    local: LocalCluster | None


class Context:
    def __init__(self, *, quick: bool, controller: str | None = None, broker: str | None = None) -> None:
        self.quick = quick
        self._controller = controller
        self._broker = broker
        self._started = time.monotonic()

    @property
    def drives_own_cluster(self) -> bool:
        return self._controller is None

    def show(self, text: str) -> None:
        print(f"  [{time.monotonic() - self._started:6.1f} s] {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def cluster(self, *, servers: int = 1) -> Iterator[Driven]:
        if self._controller is not None and self._broker is not None:
            rest = Rest(self._controller, self._broker)
            yield Driven(rest, HttpStream(rest), None)
            return
        with tempfile.TemporaryDirectory(prefix="cremant-bench-") as directory:
            self.show(f"starting a cluster with {servers} server{'s' if servers > 1 else ''}")
            with LocalCluster(Path(directory) / "data", servers=servers) as local:
                yield Driven(local.rest, LogStream(Path(local.ready["logDir"])), local)

    def create_table(self, driven: Driven, schema: Json, config: Json) -> None:
        """Replaces what an earlier run may have left."""
        name = config["tableName"]
        if name in driven.rest.call("GET", "/tables")["tables"]:
            driven.rest.call("DELETE", f"/tables/{name}")
            time.sleep(2)
        driven.rest.add_table(schema, config)


def table_config(name: str, topic: str, *, time_column: str = "ts", flush_rows: int = 5_000_000) -> Json:
    return {
        "tableName": name,
        "tableType": "REALTIME",
        "segmentsConfig": {"timeColumnName": time_column, "schemaName": name, "replication": "1"},
        "tenants": {},
        "tableIndexConfig": {
            "streamConfigs": {
                "streamType": "embedded",
                "stream.embedded.topic.name": topic,
                "stream.embedded.consumer.prop.auto.offset.reset": "smallest",
                "realtime.segment.flush.threshold.rows": str(flush_rows),
            }
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
