# SPDX-License-Identifier: Apache-2.0
"""A cluster of this machine, started from the real command line; and the few REST calls that any Pinot-compatible
cluster understands. Used by the benchmarks and by the tests with real processes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

READY_DEADLINE_S = 240.0
STOP_DEADLINE_S = 25.0

Json = dict[str, Any]


class ClusterError(RuntimeError):
    """The cluster refused a request or did not reach a state in time."""


class Rest:
    """A controller and a broker, by their URLs."""

    def __init__(self, controller: str, broker: str) -> None:
        self.controller = controller
        self.broker = broker
        self._http = httpx.Client(timeout=30.0, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, path: str, **arguments: Any) -> Any:
        response = self._http.request(method, self.controller + path, **arguments)
        if response.status_code >= 400:
            raise ClusterError(f"{method} {path}: HTTP {response.status_code} {response.text[:500]}")
        return response.json()

    def add_table(self, schema: Json, config: Json) -> None:
        self.call("POST", "/schemas", json=schema)
        self.call("POST", "/tables", json=config)

    def query(self, sql: str, *, timeout_s: float = 30.0) -> Json:
        """The broker's answer; raises httpx.HTTPError while nobody answers."""
        response = self._http.post(self.broker + "/query/sql", json={"sql": sql}, timeout=timeout_s)
        response.raise_for_status()
        answer: Json = response.json()
        return answer

    def rows(self, sql: str) -> list[list[Any]]:
        """Rows of a complete answer; anything else raises."""
        answer = self.query(sql)
        if not is_complete(answer):
            raise ClusterError(f"{sql}: {answer.get('exceptions')} partial={answer.get('partialResult')}")
        rows: list[list[Any]] = answer["resultTable"]["rows"]
        return rows

    def wait_for(self, sql: str, expected: list[list[Any]], *, deadline_s: float) -> float:
        """Asks until a complete answer has the expected rows. Returns the seconds it took."""
        started = time.monotonic()
        last: Any = None
        while time.monotonic() - started < deadline_s:
            try:
                last = self.rows(sql)
                if last == expected:
                    return time.monotonic() - started
            except (httpx.HTTPError, ClusterError) as error:
                last = error
            time.sleep(0.1)
        raise ClusterError(f"{sql}: expected {expected} within {deadline_s} s, last {last!r}")


def is_complete(answer: Json) -> bool:
    return not answer.get("exceptions") and not answer.get("partialResult") and answer.get("resultTable") is not None


def token_offsets(answer: Json) -> dict[int, int]:
    """Per partition the next visible offset that an answer's readToken names."""
    text = answer["readToken"]
    token = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    return {int(partition): int(offset) for partition, offset in token["o"].items()}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "cremant", *arguments]


class LocalCluster:
    """`cremant up` (or `quickstart`) on free ports, as a child process; a context manager that always cleans up."""

    def __init__(self, data_dir: Path, *, servers: int = 2, options: tuple[str, ...] = ()) -> None:
        self.data_dir = data_dir
        self._options = ("--servers", str(servers), *options)
        self._process: subprocess.Popen[str] | None = None
        self.ready: Json = {}
        self.rest: Rest = None  # type: ignore[assignment]  # set by start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            try:
                self.stop()
            except ClusterError:
                self.kill_supervisor()

    def start(self) -> None:
        """Returns when every role is healthy."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        output = self.data_dir.parent / f"{self.data_dir.name}.up.log"
        ports = [f"--{role}-port=0" for role in ("controller", "broker", "server", "pipeline")]
        with output.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command("up", "--data-dir", str(self.data_dir), "--json-ready", *ports, *self._options),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        line = _read_line(self._process, READY_DEADLINE_S)
        if not line:
            self.kill_supervisor()
            raise ClusterError(f"`cremant up` did not become ready:\n{output.read_text(encoding='utf-8')[-3000:]}")
        self.ready = json.loads(line)
        if self.rest is not None:
            self.rest.close()
        self.rest = Rest(self.ready["controller"], self.ready["broker"])

    def stop(self) -> None:
        """Ctrl-C. Raises ClusterError unless it ends by itself with status 0."""
        process = self._running()
        process.send_signal(signal.SIGINT)
        try:
            status = process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"`cremant up` did not stop within {STOP_DEADLINE_S} s of Ctrl-C") from error
        if status:
            raise ClusterError(f"`cremant up` ended with status {status}")

    def kill_supervisor(self) -> None:
        """SIGKILL to the supervisor; the kernel takes the roles with it. Returns when all of them are gone: Java tidies
        up its files before it ends."""
        if self._process is not None:
            roles = descendants(self._process.pid)
            self._process.kill()
            self._process.wait(10)
            deadline_s = time.monotonic() + STOP_DEADLINE_S
            while any(is_alive(pid) for pid in roles):
                if time.monotonic() > deadline_s:
                    raise ClusterError(f"of the processes {roles} some live on without their supervisor")
                time.sleep(0.05)

    def pids(self) -> dict[str, int]:
        """Process ids of the roles, as the supervisor last published them (0 = being restarted)."""
        published = json.loads((self.data_dir / "cluster.json").read_text(encoding="utf-8"))
        return {name: role["pid"] for name, role in published["roles"].items()}

    def kill(self, role: str) -> int:
        """kill -9 of one role. Returns the id of the killed process."""
        pid = self.pids()[role]
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pid

    def run(self, *arguments: str, stdin: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Another command of the command line, pointed at this cluster."""
        done = subprocess.run(
            command(*arguments, "--data-dir", str(self.data_dir)),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if check and done.returncode:
            raise ClusterError(f"cremant {' '.join(arguments)}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def log_tail(self, role: str, lines: int = 20) -> str:
        path = self.data_dir / role / "log.jsonl"
        if not path.exists():
            return f"{path} does not exist"
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            raise ClusterError("the cluster is not running")
        return self._process


@contextlib.contextmanager
def second_pipeline(cluster: LocalCluster, directory: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another pipeline process on the same log, with a disk of its own: what an operator starts on a second machine."""
    directory.mkdir(parents=True)
    with (directory / "log.jsonl").open("wb") as log:
        process = subprocess.Popen(
            command(
                "start", "pipeline", "--data-dir", str(directory), "--port", "0",
                "--controller", cluster.rest.controller, "--log-dir", cluster.ready["logDir"],
                "--store-uri", str(cluster.data_dir / "store"), *options,
            ),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def _read_line(process: subprocess.Popen[str], deadline_s: float) -> str:
    """The first line of stdout; empty if the process ends or the deadline passes before there is one."""
    assert process.stdout is not None
    until = time.monotonic() + deadline_s
    while time.monotonic() < until and process.poll() is None:
        readable, _, _ = select.select([process.stdout], [], [], 0.2)
        if readable:
            return process.stdout.readline()
    return ""


def is_alive(pid: int) -> bool:
    try:
        return _stat(pid)[0] not in "ZX"
    except OSError:
        return False


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, from its state and its parent on. Raises OSError when it is gone."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()


def descendants(pid: int) -> list[int]:
    """All living processes below `pid`, whatever their process group."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
    return list(_below(pid, children))


def _below(pid: int, children: dict[int, list[int]]) -> Iterator[int]:
    for child in children.get(pid, []):
        yield child
        yield from _below(child, children)
