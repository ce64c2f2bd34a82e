# SPDX-License-Identifier: Apache-2.0
"""`cremant doctor`: machine, directories, Kafka and cluster, each finding with its fix. Exit status 1 if one fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import msgspec
from rich.markup import escape

import cremant
from cremant.cli import checks
from cremant.cli.checks import Finding, Level, failed, of_error, ok, skipped, warned
from cremant.cli.client import Client
from cremant.cli.console import out, write_json
from cremant.cli.find import ClusterFile, Target, read_cluster_file
from cremant.cli.plan import Ports
from cremant.cli.status import last_heard, problems
from cremant.log.open import Logs, log_directory, open_logs
from cremant.model.cluster import ClusterView
from cremant.model.errors import CremantError, Unavailable
from cremant.model.settings import Settings
from cremant.model.table import StreamConfig
from cremant.store.open import store_directory

#: Freshness and leases live with small differences between machines, not with this.
_SKEW_WARN_MS = 500
_MARKS = {Level.OK: "[green]✓[/]", Level.WARN: "[yellow]![/]", Level.FAIL: "[red]✗[/]", Level.SKIP: "[dim]-[/]"}
Check = Callable[[], Iterator[Finding]]


def doctor(target: Target, settings: Settings, trouble: CremantError | None = None, *, as_json: bool) -> int:
    """`trouble`: why the data directory does not tell which cluster is meant. Returns the exit status."""
    found: list[Finding] = []
    for check in _checks(target, settings, trouble):
        for finding in check():
            found.append(finding)
            if not as_json:
                _print(finding)
    bad = sum(finding.level is Level.FAIL for finding in found)
    worrying = sum(finding.level is Level.WARN for finding in found)
    if as_json:
        write_json({"ok": bad == 0, "findings": msgspec.to_builtins(found)})
    else:
        told = "all is well" if not bad + worrying else f"{bad} to mend, {worrying} to look at"
        out.print(f"\n[bold]{told}[/]")
    return 1 if bad else 0


def _print(finding: Finding) -> None:
    out.print(f"{_MARKS[finding.level]} {escape(f'{finding.check:<18}')} {escape(finding.message)}", soft_wrap=True)
    if finding.fix and finding.level is not Level.OK:
        out.print(f"  {'':<18} [dim]fix:[/] {escape(finding.fix)}", soft_wrap=True)


def _checks(target: Target, settings: Settings, trouble: CremantError | None) -> list[Check]:
    data_dir = Path(settings.data_dir).absolute()
    running = _cluster_file(data_dir)
    troubles = [of_error("cluster file", trouble)] if trouble is not None else []
    defaults = Ports()
    ports = {
        "controller": defaults.controller,
        "broker": defaults.broker,
        "server-1": defaults.server,
        "server-2": defaults.server - 1,
        "pipeline": defaults.pipeline,
    }
    log = Path(running.log_dir) if running is not None else log_directory(settings)
    rooms = {"data": data_dir, "log": log, "store": _store_room(settings), "temporary files": Path(gettempdir())}
    return [
        checks.check_python,
        checks.check_java,
        checks.check_pyspark,
        lambda: checks.check_ports(settings.host, ports, running),
        lambda: checks.check_directory("data directory", data_dir, "--data-dir"),
        lambda: iter(troubles),
        lambda: checks.check_directory("embedded log", log, "--log-dir"),
        lambda: checks.check_store(settings),
        checks.check_temporary,
        lambda: checks.check_rooms(rooms),
        checks.check_memory,
        checks.check_files,
        checks.check_clock,
        lambda: _epoch_log(_with_kafka_of(running, settings)),
        lambda: _cluster(target, is_expected=running is not None),
    ]


def _store_room(settings: Settings) -> Path | None:
    try:
        return store_directory(settings)
    except CremantError:
        return None  # told by the check of the store


def _cluster_file(data_dir: Path) -> ClusterFile | None:
    try:
        return read_cluster_file(data_dir)
    except CremantError:
        return None  # told as a finding of its own


def _with_kafka_of(running: ClusterFile | None, settings: Settings) -> Settings:
    """The epoch log of the cluster that runs here, unless another one was asked about."""
    if running is None or not running.kafka or settings.epoch_log == "kafka":
        return settings
    values = {"epoch_log": "kafka", "kafka_brokers": running.kafka, "kafka_properties": running.kafka_properties}
    return Settings(("cluster.json", values))


def _epoch_log(settings: Settings) -> Iterator[Finding]:
    if settings.epoch_log != "kafka":
        return
    logs = open_logs(settings)
    try:
        yield from _kafka("kafka, epoch log", str(settings.kafka_brokers), lambda: f"{len(logs.epoch.topics())} topics")
    except CremantError as error:
        yield of_error("kafka, epoch log", error)
    finally:
        logs.close()


def _kafka(check: str, brokers: str, ask: Callable[[], Any]) -> Iterator[Finding]:
    """First whether anything listens there, then whether it lets us in."""
    unreachable = list(checks.check_reach(check, brokers))
    yield from unreachable
    if len(unreachable) == len(brokers.split(",")):
        return
    started = time.monotonic()
    try:
        told = ask()
    except CremantError as error:
        hint = error.hint or "it answers, but does not let us in: security.protocol, sasl.*, ssl.*?"
        yield failed(check, error.message, hint)
        return
    yield ok(check, f"{brokers}: {told}, {(time.monotonic() - started) * 1000:.0f} ms")


def _cluster(target: Target, *, is_expected: bool) -> Iterator[Finding]:
    with Client(target.controller) as client:
        try:
            asked_ms = time.time() * 1000
            status = client.status()
            answered_ms = time.time() * 1000
            view = client.view()
        except Unavailable as error:
            if is_expected:
                yield failed("controller", error.message, "its log: <data dir>/controller/log.jsonl")
            else:
                yield skipped("cluster", f"none answers at {target.controller}")
            return
        except CremantError as error:
            yield of_error("controller", error)
            return
    yield from _controller(status, asked_ms, answered_ms, target)
    yield from _roles(status)
    for table in status["tables"]:
        troubles = problems(table)
        for trouble in troubles:
            yield warned(f"table {table['name']}", trouble, f"cremant table show {table['name']}")
        if not troubles:
            yield ok(f"table {table['name']}", f"{table['state']}, {table['rows']:,} rows")
    yield from streams(view)


def _controller(status: dict[str, Any], asked_ms: float, answered_ms: float, target: Target) -> Iterator[Finding]:
    version = str(status["version"])
    if version != cremant.__version__:
        yield warned("controller", f"version {version}, this command is {cremant.__version__}", "update the older one")
    else:
        yield ok("controller", f"{target.controller}, version {version}")
    theirs = float(status["timeMs"])
    skew_ms = max(0.0, asked_ms - theirs) or max(0.0, theirs - answered_ms)
    if skew_ms > _SKEW_WARN_MS:
        yield warned("clock skew", f"{skew_ms:.0f} ms between this machine and the controller", "run NTP on both")
    else:
        yield ok("clock skew", f"less than {max(1.0, skew_ms + answered_ms - asked_ms):.0f} ms to the controller")


def _roles(status: dict[str, Any]) -> Iterator[Finding]:
    for role, what in (("broker", "no queries"), ("server", "no rows"), ("pipeline", "nothing is ingested")):
        members = [instance for instance in status["instances"] if instance["role"] == role]
        live = [member for member in members if member["live"]]
        for member in members:
            if not member["live"]:
                dead = f"{member['id']} is dead, {last_heard(member['heardMsAgo'])}"
                gone = f"one that is gone for good: rebalance its tables, then DELETE /instances/{member['id']}"
                yield warned(role, dead, f"its log says why; {gone}")
        if live:
            yield ok(role, ", ".join(member["url"] for member in live))
        else:
            yield failed(role, f"no {role} is alive: {what}", f"start one: cremant start {role} --controller …")


def streams(view: ClusterView) -> Iterator[Finding]:
    """Each Kafka that a table reads, with the table's own credentials, once."""
    seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    for name, table in sorted(view.tables.items()):
        stream = table.record.config.stream
        if stream.stream_type != "kafka":
            continue
        client = (stream.brokers, tuple(sorted(stream.client_properties.items())))
        if client in seen:
            continue
        seen.add(client)
        yield from _stream(name, stream)


def _stream(table: str, stream: StreamConfig) -> Iterator[Finding]:
    check = f"kafka, {table}"
    logs = open_logs(Settings())
    try:
        yield from _kafka(check, stream.brokers, lambda: _told_topic(logs, stream))
    finally:
        logs.close()


def _told_topic(logs: Logs, stream: StreamConfig) -> str:
    with logs.stream(stream) as log:
        return f"topic {stream.topic} of {log.topic(stream.topic).partitions} partitions"
