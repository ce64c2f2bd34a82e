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
    """A cluster whose roles answered /health, as seen by the command that started it."""

    def __init__(self, plan: ClusterPlan, supervisor: Supervisor, data_dir: Path) -> None:
        self.plan = plan
        self.supervisor = supervisor
        self.data_dir = data_dir

    @property
    def controller(self) -> str:
        return self.plan.cluster.controller

    @property
    def broker(self) -> str:
        return self.plan.cluster.broker


@contextmanager
def running_cluster(settings: Settings, *, servers: int, ports: Ports, insecure: bool) -> Iterator[RunningCluster]:
    """Starts everything, waits until it is healthy, stops everything at the end however the block ends."""
    data_dir = Path(settings.data_dir).absolute()
    lock = DirectoryLock(data_dir)
    try:
        check_machine()
        plan = plan_cluster(settings, servers=servers, ports=ports, insecure=insecure)
        supervisor = Supervisor(data_dir, plan.roles, cluster=plan.cluster)
        with supervisor.handling_signals():
            try:
                supervisor.start()
                _wait_until_healthy(supervisor, plan, data_dir)
                yield RunningCluster(plan, supervisor, data_dir)
            except Interrupted:
                pass
            finally:
                _stop(supervisor, data_dir)
    finally:
        lock.release()


def up(settings: Settings, *, servers: int, ports: Ports, insecure: bool, json_ready: bool) -> None:
    with running_cluster(settings, servers=servers, ports=ports, insecure=insecure) as cluster:
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


def _wait_until_healthy(supervisor: Supervisor, plan: ClusterPlan, data_dir: Path) -> None:
    started = time.monotonic()
    reported: set[str] = set()
    waiting: dict[str, str] = {}

    def done() -> bool:
        waiting.clear()
        waiting.update(supervisor.unhealthy())
        for role in plan.roles:
            if role.name not in waiting and role.name not in reported:
                reported.add(role.name)
                say(f"  [green]✓[/] {role.name:<11} {role.url}  [dim]{time.monotonic() - started:.1f} s[/]")
        return not waiting

    with progress("starting …") as show:

        def done_and_show() -> bool:
            finished = done()
            show("waiting for " + ", ".join(f"{name} ({why})" for name, why in waiting.items()))
            return finished

        try:
            healthy = supervisor.run_until(done_and_show, deadline_ms=START_DEADLINE_MS)
        except NoResource as error:
            _explain(waiting, data_dir)
            raise error
    if healthy:
        return
    if supervisor.interrupts:
        raise Interrupted
    _explain(waiting, data_dir)
    raise DeadlineExceeded(
        f"not healthy after {START_DEADLINE_MS // 1000} s: {', '.join(waiting)}",
        hint=f"their logs are in {data_dir}/<role>/log.jsonl",
    )


def _explain(waiting: dict[str, str], data_dir: Path) -> None:
    for name in waiting:
        for line in last_log_lines(data_dir / name, 5):
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
