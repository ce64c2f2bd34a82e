# SPDX-License-Identifier: Apache-2.0
"""`cremant up`: all roles of a cluster on this machine, until Ctrl-C."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.markup import escape
from rich.status import Status

from cremant.cli.child import last_log_lines
from cremant.cli.console import notes, say, warn, write_json
from cremant.cli.find import CLUSTER_FILE
from cremant.cli.plan import ClusterPlan, Ports, check_machine, plan_cluster
from cremant.cli.preflight import DirectoryLock
from cremant.cli.supervisor import Supervisor
from cremant.model.errors import DeadlineExceeded, NoResource
from cremant.model.settings import Settings

#: A cold JVM on a busy laptop takes 20 s; a minute and a half means that something is wrong.
START_DEADLINE_MS = 90_000


class Interrupted(Exception):
    """The user asked to stop while the cluster was starting."""


class RunningCluster:
    """A cluster that was started, as seen by the command that did."""

    def __init__(self, plan: ClusterPlan, supervisor: Supervisor, data_dir: Path) -> None:
        self.plan = plan
        self.supervisor = supervisor
        self.data_dir = data_dir
        self.watch = HealthWatch(supervisor, plan, data_dir)

    @property
    def roles(self) -> set[str]:
        return {role.name for role in self.plan.roles}

    @property
    def controller(self) -> str:
        return self.plan.cluster.controller

    @property
    def broker(self) -> str:
        return self.plan.cluster.broker


@contextmanager
def running_cluster(settings: Settings, *, servers: int, ports: Ports, insecure: bool) -> Iterator[RunningCluster]:
    """Starts everything; stops it at the end, however the block ends. Ctrl-C in the block: raise Interrupted."""
    data_dir = Path(settings.data_dir).absolute()
    lock = DirectoryLock(data_dir)
    try:
        check_machine()
        plan = plan_cluster(settings, servers=servers, ports=ports, insecure=insecure)
        supervisor = Supervisor(data_dir, plan.roles, cluster=plan.cluster)
        with supervisor.handling_signals():
            try:
                supervisor.start()
                yield RunningCluster(plan, supervisor, data_dir)
            except Interrupted:
                pass
            finally:
                _stop(supervisor, data_dir)
    finally:
        lock.release()


def up(settings: Settings, *, servers: int, ports: Ports, insecure: bool, json_ready: bool) -> None:
    with running_cluster(settings, servers=servers, ports=ports, insecure=insecure) as cluster:
        cluster.watch.wait(cluster.roles)
        if json_ready:
            write_json(ready_line(cluster))
        say(f"[bold green]Cremant is up.[/]  Data: {escape(str(cluster.data_dir))}")
        say(f"  controller  {cluster.controller}   (tables, schemas, topics)")
        say(f"  broker      {cluster.broker}   (SQL: POST /query/sql)")
        say("  Ctrl-C stops it; the data stays.")
        cluster.supervisor.run_until(lambda: False)


def ready_line(cluster: RunningCluster) -> dict[str, object]:
    """What a program that started `up --json-ready` reads from stdout, as one line."""
    return {
        "ready": True,
        "pid": os.getpid(),
        "controller": cluster.controller,
        "broker": cluster.broker,
        "dataDir": str(cluster.data_dir),
        "logDir": cluster.plan.cluster.log_dir,
        "roles": {role.name: role.url for role in cluster.plan.roles},
        "pids": cluster.supervisor.pids(),
    }


class HealthWatch:
    """Asks /health of the roles of a cluster that is starting, and says of each when it is there."""

    def __init__(self, supervisor: Supervisor, plan: ClusterPlan, data_dir: Path) -> None:
        self._supervisor = supervisor
        self._plan = plan
        self._data_dir = data_dir
        self._started = time.monotonic()
        self._reported: set[str] = set()
        self._waiting: dict[str, str] = {}

    def look(self, roles: set[str]) -> bool:
        """True when all of `roles` are healthy. Raises NoResource, after their last log lines, if it is hopeless."""
        try:
            unhealthy = self._supervisor.unhealthy()
        except NoResource:
            self._explain(roles - self._reported)
            raise
        for role in self._plan.roles:
            if role.name not in unhealthy and role.name not in self._reported:
                self._reported.add(role.name)
                took = time.monotonic() - self._started
                say(f"  [green]✓[/] {role.name:<11} {role.url}  [dim]{took:.1f} s[/]")
        self._waiting = {name: why for name, why in unhealthy.items() if name in roles}
        return not self._waiting

    def wait(self, roles: set[str]) -> None:
        """Raises Interrupted, NoResource, DeadlineExceeded."""
        with progress("starting …") as show:

            def done() -> bool:
                healthy = self.look(roles)
                show("waiting for " + ", ".join(f"{name} ({why})" for name, why in self._waiting.items()))
                return healthy

            if self._supervisor.run_until(done, deadline_ms=START_DEADLINE_MS):
                return
        if self._supervisor.interrupts:
            raise Interrupted
        self._explain(set(self._waiting))
        raise DeadlineExceeded(
            f"not healthy after {START_DEADLINE_MS // 1000} s: {', '.join(self._waiting)}",
            hint=f"their logs are in {self._data_dir}/<role>/log.jsonl",
        )

    def _explain(self, roles: set[str]) -> None:
        for name in sorted(roles):
            for line in last_log_lines(self._data_dir / name, 5):
                say(f"  [dim]{name}:[/] {escape(line)}")


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner whose text can be changed; on something that is not a terminal, nothing."""
    if not notes.is_terminal:
        yield lambda _text: None
        return
    with Status(escape(text), console=notes) as status:
        yield lambda changed: status.update(escape(changed))


def _stop(supervisor: Supervisor, data_dir: Path) -> None:
    say("stopping …")
    killed = supervisor.stop()
    (data_dir / CLUSTER_FILE).unlink(missing_ok=True)
    if killed:
        warn(f"did not stop in time and were killed: {', '.join(killed)}")
    say("stopped")
