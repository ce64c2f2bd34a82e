# SPDX-License-Identifier: Apache-2.0
"""What must be true of the machine before anything starts: ports free, Java there, directory writable and ours.

Each problem is reported with the command or the option that fixes it.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

from cremant.cli.console import warn
from cremant.model.errors import Conflict, InvalidConfig, NoResource
from cremant.model.settings import Settings
from cremant.shell.tls import client_context, listener_context

JAVA_MINIMUM = 17
PORT_MAX = 65_535
_JAVA_CHECK_S = 20.0
_REACH_S = 2.0
_IPV4_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: Where ports for `0` are taken from, if the kernel's range of outgoing ports leaves it free.
_FREE_PORTS = range(20_000, 32_000)


def check_java() -> str:
    """The version text of the Java that Spark will use. Raises NoResource."""
    hint = f"install Java {JAVA_MINIMUM} or newer and put it on PATH or name it in JAVA_HOME"
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        raise NoResource(f"no Java found ({'JAVA_HOME=' + home if home else 'PATH'}); Spark needs it", hint=hint)
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_JAVA_CHECK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoResource(f"{java} does not run: {error}", hint=hint) from error
    text = done.stderr or done.stdout
    found = re.search(r'version "(\d+)(?:\.(\d+))?', text)
    major = int(found.group(1)) if found else 0
    if major == 1 and found and found.group(2):
        major = int(found.group(2))
    if done.returncode or major < JAVA_MINIMUM:
        first = text.splitlines()[0] if text else f"exit status {done.returncode}"
        raise NoResource(f"{java} is too old or broken: {first}; Spark needs Java {JAVA_MINIMUM}", hint=hint)
    return text.splitlines()[0]


def check_pyspark() -> None:
    if importlib.util.find_spec("pyspark") is None:
        raise NoResource("PySpark is not installed; the pipeline needs it", hint="pip install 'cremant[pipeline]'")


def check_epoch_log(settings: Settings) -> None:
    """Raises InvalidConfig if nobody could keep epoch logs there. A Kafka that is away is only told: it may be
    starting, too, and everything waits for it."""
    if settings.epoch_log not in ("embedded", "kafka"):
        raise InvalidConfig(
            f"setting epoch_log from {settings.source('epoch_log')}: expected embedded or kafka, "
            f"found {settings.epoch_log!r}"
        )
    if settings.epoch_log == "embedded":
        return
    if not settings.kafka_brokers:
        raise InvalidConfig("epoch_log is kafka, and kafka_brokers is empty", hint="say where: --kafka HOST:PORT,…")
    away = [broker for broker in settings.kafka_brokers.split(",") if not _answers(broker.strip())]
    if len(away) == len(settings.kafka_brokers.split(",")):
        warn(f"no Kafka answers at {settings.kafka_brokers} yet; nothing is ingested until one does")


def check_tls(settings: Settings, servers: int) -> None:
    """Raises InvalidConfig for what servers of this machine could not start with."""
    listener_context(settings)
    client_context(settings)
    if settings.tls_port and servers > 1:
        raise InvalidConfig(
            f"setting tls_port: {servers} servers of one machine cannot share port {settings.tls_port}",
            hint="leave it at 0: each takes a free one, and the others learn it",
        )


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, OverflowError, ValueError):
        return False
    return True


def check_port(host: str, port: int, option: str) -> None:
    """Raises NoResource if nobody could listen there now."""
    if not 0 <= port <= PORT_MAX:
        raise InvalidConfig(f"{option} {port}: expected 0 to {PORT_MAX}")
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise NoResource(
                    f"port {port} of {host} is in use", hint=f"stop what listens there, or use {option} 0 (a free port)"
                ) from error
            raise InvalidConfig(f"cannot listen on {host}:{port}: {error.strerror}") from error


def free_port(host: str, taken: set[int]) -> int:
    """A port nobody listens on, outside the kernel's range of outgoing ports: those could take it while its role is
    being restarted. Adds it to `taken`."""
    outgoing = range(0)
    if _IPV4_RANGE.exists():
        low, high = (int(word) for word in _IPV4_RANGE.read_text(encoding="ascii").split())
        outgoing = range(low, high + 1)
    start = _FREE_PORTS.start + (os.getpid() * 37) % len(_FREE_PORTS)
    candidates: list[int] = [*range(start, _FREE_PORTS.stop), *range(_FREE_PORTS.start, start)]
    for port in candidates:
        if port in taken or port in outgoing:
            continue
        try:
            check_port(host, port, "")
        except NoResource:
            continue
        taken.add(port)
        return port
    raise NoResource(f"no free port on {host} in {_FREE_PORTS.start}..{_FREE_PORTS.stop - 1}")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class DirectoryLock:
    """Holds a data directory for one supervisor at a time; let go of by the kernel when the process ends, however."""

    def __init__(self, data_dir: Path) -> None:
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            self._file = (data_dir / "lock").open("a+", encoding="ascii")
        except OSError as error:
            raise NoResource(
                f"cannot write to the data directory {data_dir}: {error.strerror}", hint="choose another: --data-dir"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            holder = self._file.read().strip()
            raise Conflict(
                f"the data directory {data_dir} is in use by another cluster (process {holder or 'unknown'})",
                hint="use that cluster, stop it, or give another --data-dir",
            ) from error
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def release(self) -> None:
        self._file.close()
