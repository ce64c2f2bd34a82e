# SPDX-License-Identifier: Apache-2.0
"""Runs the roles of one machine as child processes: starts them, restarts the dead, stops all.

Rules:

- the pipeline starts first: its JVM is the long pole;
- a role that lived a while is restarted at once, one that keeps dying with a growing delay (`restart_delay_ms`);
- a death is one line; a role that keeps dying shows the end of its log;
- stopping is ordered: what writes (generator, pipeline) before what stores and what decides; then SIGKILL at
  a deadline;
- if the supervisor itself is killed, the kernel kills the roles (`child.die_with_parent`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGINT, SIGTERM, getsignal, signal
from typing import Any, NamedTuple

import httpx
from msgspec import structs

from cremant.cli.child import Child, Ended, last_log_lines, log_path
from cremant.cli.console import say
from cremant.cli.find import ClusterFile, RunningRole, write_cluster_file
from cremant.model.errors import NoResource
from cremant.model.limits import BACKOFF_FIRST_MS, BACKOFF_MAX_MS

#: A role that lived this long failed anew, not again.
SETTLED_AFTER_MS = 10_000
#: Deaths in a row during the start after which the start has failed.
START_ATTEMPTS = 3
#: Deaths in a row after which the end of the log is shown with each further line.
CRASH_LOOP_AFTER = 3
STOP_DEADLINE_MS = 12_000
TICK_S = 0.05
_HEALTH_TIMEOUT_S = 1.0


class RoleSpec(NamedTuple):
    """A role to run: `name` is also its directory below the data directory. `url` is empty for what does not listen."""

    name: str
    arguments: tuple[str, ...]
    url: str
    #: Roles of a lower rank are stopped first.
    stop_rank: int


def restart_delay_ms(deaths_in_a_row: int) -> int:
    """0 for the first death, then doubling from BACKOFF_FIRST_MS up to BACKOFF_MAX_MS."""
    if deaths_in_a_row <= 1:
        return 0
    return min(BACKOFF_MAX_MS, BACKOFF_FIRST_MS << min(deaths_in_a_row - 2, 16))


class _Supervised:
    """A role and its present process (None while it waits to be restarted)."""

    def __init__(self, spec: RoleSpec) -> None:
        self.spec = spec
        self.child: Child | None = None
        self.started_ms = 0
        self.restart_at_ms = 0
        self.deaths_in_a_row = 0
        self.healthy_once = False


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class Supervisor:
    """Used from one thread, which must outlive the children (the kernel ties them to the thread that started them)."""

    def __init__(self, data_dir: Path, roles: list[RoleSpec], *, cluster: ClusterFile) -> None:
        self._data_dir = data_dir
        self._roles = [_Supervised(spec) for spec in roles]
        self._cluster = cluster
        self._http = httpx.Client(timeout=_HEALTH_TIMEOUT_S, trust_env=False)
        self.interrupts = 0

    def start(self) -> None:
        for role in self._roles:
            self._start(role)
        self._publish()

    def add(self, spec: RoleSpec) -> None:
        role = _Supervised(spec)
        self._roles.append(role)
        self._start(role)
        self._publish()

    def tick(self) -> None:
        """Notices deaths, restarts what is due. Call it every TICK_S or so."""
        changed = False
        for role in self._roles:
            if role.child is not None:
                ended = role.child.ended()
                if ended is not None:
                    self._died(role, ended)
                    changed = True
            if role.child is None and _now_ms() >= role.restart_at_ms:
                self._start(role)
                changed = True
        if changed:
            self._publish()

    def pids(self) -> dict[str, int]:
        return {role.spec.name: role.child.pid if role.child else 0 for role in self._roles}

    def unhealthy(self) -> dict[str, str]:
        """Roles that do not answer /health with 200, and why. Raises NoResource when a start is hopeless."""
        found: dict[str, str] = {}
        for role in self._roles:
            if role.healthy_once or not role.spec.url:
                continue
            if role.deaths_in_a_row >= START_ATTEMPTS:
                raise NoResource(
                    f"{role.spec.name} does not start: it died {role.deaths_in_a_row} times",
                    hint=f"its log: {log_path(self._directory(role))}",
                )
            state = self._health(role.spec.url)
            if state:
                found[role.spec.name] = state
            else:
                role.healthy_once = True
        return found

    def run_until(self, done: Callable[[], bool], *, deadline_ms: int | None = None) -> bool:
        """Ticks until `done()` (True), Ctrl-C or SIGTERM (False) or the deadline (False)."""
        until = None if deadline_ms is None else _now_ms() + deadline_ms
        while not self.interrupts:
            self.tick()
            if done():
                return True
            if until is not None and _now_ms() >= until:
                return False
            time.sleep(TICK_S)
        return False

    def stop(self) -> list[str]:
        """Stops everything, lowest rank first. Returns the roles that had to be killed."""
        killed: list[str] = []
        until = _now_ms() + STOP_DEADLINE_MS
        impatient_at = self.interrupts + 1
        for rank in sorted({role.spec.stop_rank for role in self._roles}):
            children = [(role, role.child) for role in self._roles if role.spec.stop_rank == rank and role.child]
            for _, child in children:
                child.ask_to_stop()
            while any(child.ended() is None for _, child in children):
                if _now_ms() >= until or self.interrupts >= impatient_at:
                    for role, child in children:
                        if child.ended() is None:
                            killed.append(role.spec.name)
                            child.kill()
                time.sleep(TICK_S)
        self._http.close()
        return sorted(set(killed))

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM are counted in `interrupts`; a second one while stopping kills what is left."""

        def count(_number: int, _frame: Any) -> None:
            self.interrupts += 1

        before = {number: getsignal(number) for number in (SIGINT, SIGTERM)}
        for number in before:
            signal(number, count)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal(number, handler)

    def _start(self, role: _Supervised) -> None:
        role.child = Child(role.spec.arguments, self._directory(role))
        role.started_ms = _now_ms()

    def _died(self, role: _Supervised, ended: Ended) -> None:
        lived_ms = _now_ms() - role.started_ms
        role.child = None
        role.deaths_in_a_row = 1 if lived_ms >= SETTLED_AFTER_MS else role.deaths_in_a_row + 1
        delay_ms = restart_delay_ms(role.deaths_in_a_row)
        role.restart_at_ms = _now_ms() + delay_ms
        when = f"in {delay_ms / 1000:.1f} s" if delay_ms else "now"
        say(f"[yellow]{role.spec.name} ended after {lived_ms / 1000:.1f} s ({ended}); restarting {when}[/]")
        if role.deaths_in_a_row >= CRASH_LOOP_AFTER:
            for line in last_log_lines(self._directory(role), 5):
                say(f"  [dim]{role.spec.name}:[/] {line.replace('[', chr(92) + '[')}")

    def _health(self, url: str) -> str:
        """Empty when healthy, else why not."""
        try:
            answer = self._http.get(f"{url}/health")
        except httpx.ConnectError:
            return "starting"
        except httpx.HTTPError as error:
            return type(error).__name__
        return "" if answer.status_code == 200 else answer.text.strip()[:120] or f"HTTP {answer.status_code}"

    def _directory(self, role: _Supervised) -> Path:
        return self._data_dir / role.spec.name

    def _publish(self) -> None:
        roles = {
            role.spec.name: RunningRole(url=role.spec.url, pid=role.child.pid if role.child else 0)
            for role in self._roles
        }
        self._cluster = structs.replace(self._cluster, roles=roles)
        write_cluster_file(self._data_dir, self._cluster)
