# SPDX-License-Identifier: Apache-2.0
"""Real Kafka brokers for tests and benchmarks: KRaft clusters of one or more nodes on loopback, to be started, killed,
frozen and restarted.

Jars come from Maven once, into `~/.cache/cremant-tests`. Topics are not created by themselves. Each node also listens
with SASL/PLAIN (`sasl_brokers`; user `tester`, password `right`); with TLS where a cluster is given `listeners` and a
keystore. Nodes die with this process.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

VERSION = "4.4.0"
_POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>cremant.tests</groupId><artifactId>kafka-broker</artifactId><version>1</version><packaging>pom</packaging>
<dependencies>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{VERSION}</version>
<exclusions><exclusion><groupId>org.apache.kafka</groupId><artifactId>kafka-tools-api</artifactId></exclusion></exclusions>
</dependency>
<dependency><groupId>org.apache.logging.log4j</groupId><artifactId>log4j-slf4j-impl</artifactId><version>2.25.5</version>
</dependency>
</dependencies></project>
"""
_LOG4J = """rootLogger.level = warn
rootLogger.appenderRef.out.ref = out
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{HH:mm:ss.SSS} %p %c{1} %m%n
"""
_JAVA = ("-Xms64m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
SASL_USER, SASL_PASSWORD = "tester", "right"
_START_S_MAX = 120.0
_FETCH_S_MAX = 900.0


def jars() -> Path:
    """The folder of the broker's jars, fetched by Maven if this machine has none yet. Raises RuntimeError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cremant-tests"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"kafka-{VERSION}"
    with (cache / f"kafka-{VERSION}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _fetch(cache, folder)
    return folder


def _fetch(cache: Path, folder: Path) -> None:
    for name in ("mvn", "java"):
        if shutil.which(name) is None:
            raise RuntimeError(f"Kafka brokers need {name}, which is not on PATH")
    fresh = cache / f"{folder.name}.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    (fresh / "pom.xml").write_text(_POM)
    command = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=.", "-DincludeScope=runtime"]
    done = subprocess.run(command, cwd=fresh, capture_output=True, text=True, timeout=_FETCH_S_MAX, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"Maven could not fetch Kafka {VERSION}: {(done.stdout + done.stderr)[-2000:]}")
    fresh.rename(folder)


def free_port() -> int:
    """A port nobody listens on, below the range that outgoing connections take theirs from: a client that keeps trying
    the port of a dead node must not meet itself there."""
    for _ in range(1000):
        port = random.randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port")


class _Node:
    """One broker and controller: its files, its ports, and the process while it runs."""

    def __init__(self, number: int, directory: Path, listeners: Sequence[str]) -> None:
        self.number = number
        self.directory = directory
        #: By listener, whose name is its protocol.
        self.ports = {name: free_port() for name in listeners}
        self.controller_port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self, classpath: str) -> None:
        assert self.process is None
        log4j = f"-Dlog4j2.configurationFile={self.directory / 'log4j2.properties'}"
        command = ["java", *_JAVA, log4j, "-cp", classpath, "kafka.Kafka", str(self.directory / "server.properties")]
        with (self.directory / "broker.log").open("ab") as out:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        # Its end of the pipe closes with this process, however that ends; then the broker must not stay.
        watch = ["sh", "-c", 'read x; kill -9 "$0" 2>/dev/null', str(self.process.pid)]
        self._guard = subprocess.Popen(watch, stdin=subprocess.PIPE, start_new_session=True)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)


class KafkaCluster:
    """`with KafkaCluster(tmp_path) as kafka: … kafka.brokers`. `properties` go into each node's server.properties;
    `listeners`: protocols that nodes are reached by, PLAINTEXT first."""

    def __init__(
        self,
        root: Path,
        nodes: int = 1,
        properties: dict[str, str] | None = None,
        listeners: Sequence[str] = ("PLAINTEXT", "SASL_PLAINTEXT"),
    ) -> None:
        self.root = root
        self._properties = properties or {}
        self._id = "k" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]  # a dash first would be a flag
        self._nodes = [_Node(number, root / f"node-{number}", listeners) for number in range(1, nodes + 1)]
        self._classpath = ""

    @property
    def nodes(self) -> list[int]:
        """Their numbers, which are also Kafka's broker ids."""
        return [node.number for node in self._nodes]

    @property
    def brokers(self) -> str:
        return self.reached_by("PLAINTEXT")

    @property
    def sasl_brokers(self) -> str:
        return self.reached_by("SASL_PLAINTEXT")

    def reached_by(self, listener: str) -> str:
        return ",".join(f"127.0.0.1:{node.ports[listener]}" for node in self._nodes)

    def __enter__(self) -> KafkaCluster:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        self._classpath = f"{jars()}/*"
        try:
            for node in self._nodes:
                self._format(node)
            for node in self._nodes:
                node.start(self._classpath)
            self.wait_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for node in self._nodes:
            node.kill()

    def kill(self, number: int) -> None:
        """kill -9."""
        self._node(number).kill()

    def restart(self, number: int, *, wait: bool = True) -> None:
        node = self._node(number)
        node.kill()
        node.start(self._classpath)
        if wait:
            self.wait_ready()

    def pause(self, number: int) -> None:
        """SIGSTOP: connections stay open, nothing is answered. Returns when it has stopped."""
        node = self._node(number)
        assert node.process is not None
        node.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, node.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self, number: int) -> None:
        self._node(number).signal(signal.SIGCONT)

    def heal(self) -> None:
        """Everything runs again."""
        for node in self._nodes:
            if node.process is not None and node.process.poll() is None:
                node.signal(signal.SIGCONT)
            else:
                node.kill()
                node.start(self._classpath)
        self.wait_ready()

    def wait_ready(self, timeout_s: float = _START_S_MAX) -> None:
        """Until every node is in the metadata and takes requests."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        deadline_s = time.monotonic() + timeout_s
        for node in self._nodes:
            # A client that knows no other node: the answer is its own.
            admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{node.ports['PLAINTEXT']}", "log_level": 0})
            while True:
                with contextlib.suppress(KafkaException):
                    if set(admin.list_topics(timeout=1.0).brokers) >= set(self.nodes):
                        break
                if node.process is None or node.process.poll() is not None:
                    raise RuntimeError(f"Kafka node {node.number} ended: {self.output(node.number)}")
                if time.monotonic() > deadline_s:
                    raise RuntimeError(f"Kafka is not ready after {timeout_s} s: {self.output(node.number)}")
                time.sleep(0.05)

    def output(self, number: int, size: int = 3000) -> str:
        """The end of what the node has logged."""
        path = self._node(number).directory / "broker.log"
        return path.read_bytes()[-size:].decode(errors="replace") if path.exists() else ""

    def client(self, **properties: Any) -> dict[str, Any]:
        """Properties of a confluent_kafka client of one's own."""
        return {"bootstrap.servers": self.brokers, "log_level": 0, **properties}

    def _node(self, number: int) -> _Node:
        return next(node for node in self._nodes if node.number == number)

    def _format(self, node: _Node) -> None:
        node.directory.mkdir(parents=True)
        (node.directory / "log4j2.properties").write_text(_LOG4J)
        path = node.directory / "server.properties"
        path.write_text("".join(f"{key}={value}\n" for key, value in self._server_properties(node).items()))
        tool = ["java", *_JAVA, "-cp", self._classpath, "kafka.tools.StorageTool"]
        done = subprocess.run(
            [*tool, "format", "-t", self._id, "-c", str(path), "--ignore-formatted"],
            capture_output=True, text=True, timeout=_START_S_MAX, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"Kafka node {node.number} could not be formatted: {done.stdout}{done.stderr}")

    def _server_properties(self, node: _Node) -> dict[str, str]:
        replicas = str(min(3, len(self._nodes)))
        here = "127.0.0.1"
        reached = ",".join(f"{name}://{here}:{port}" for name, port in node.ports.items())
        protocols = ",".join(f"{name}:{name}" for name in node.ports)
        login = "org.apache.kafka.common.security.plain.PlainLoginModule required"
        return {
            "node.id": str(node.number),
            "process.roles": "broker,controller",
            "controller.quorum.voters": ",".join(f"{n.number}@{here}:{n.controller_port}" for n in self._nodes),
            "listeners": f"{reached},CONTROLLER://{here}:{node.controller_port}",
            "advertised.listeners": reached,
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": f"{protocols},CONTROLLER:PLAINTEXT",
            "sasl.enabled.mechanisms": "PLAIN",
            **{
                f"listener.name.{name.lower()}.plain.sasl.jaas.config": f'{login} user_{SASL_USER}="{SASL_PASSWORD}";'
                for name in node.ports
                if name.startswith("SASL_")
            },
            "log.dirs": str(node.directory / "data"),
            "auto.create.topics.enable": "false",
            "offsets.topic.num.partitions": "1",
            "transaction.state.log.num.partitions": "1",
            "offsets.topic.replication.factor": replicas,
            "transaction.state.log.replication.factor": replicas,
            "transaction.state.log.min.isr": "1",
            "share.coordinator.state.topic.replication.factor": replicas,
            "default.replication.factor": replicas,
            "group.initial.rebalance.delay.ms": "0",
            "log.cleaner.dedupe.buffer.size": "8388608",
            "log.cleaner.backoff.ms": "500",
            "log.initial.task.delay.ms": "500",
            "log.retention.check.interval.ms": "1000",
            # A node that was killed is missed after 2 s, not 9, and may come back as soon.
            "broker.session.timeout.ms": "2000",
            "broker.heartbeat.interval.ms": "250",
            **self._properties,
        }
