# SPDX-License-Identifier: Apache-2.0
"""`cremant status`: the controller's `GET /status`, drawn for people or passed on to programs."""

from __future__ import annotations

from typing import Any

import httpx
from rich.markup import escape
from rich.table import Table

from cremant.cli.ages import age
from cremant.cli.client import Client
from cremant.cli.console import out, write_json
from cremant.cli.find import Target
from cremant.model.cluster import BLOCKED
from cremant.model.names import instance_id

_ERRORS_SHOWN = 5
_PORTS = {"http": 80, "https": 443}
_COLOURS = {"running": "green", "paused": "yellow", "disabled": "yellow", "failed": "red", "backoff": "red"}


def status(target: Target, *, as_json: bool) -> None:
    with Client(target.controller) as client:
        document = client.status()
    # The controller does not list itself: that it answers is its sign of life.
    url = httpx.URL(target.controller)
    itself = {
        "id": instance_id("controller", url.host, url.port or _PORTS[url.scheme]),
        "role": "controller",
        "url": target.controller,
    }
    document["instances"].insert(0, {**itself, "live": True, "heardMsAgo": 0, "enabled": True})
    if as_json:
        write_json(document)
        return
    print_status(document)


def print_status(document: dict[str, Any]) -> None:
    roles = Table("role", "instance", "address", "state", box=None, header_style="bold", pad_edge=False)
    for instance in sorted(document["instances"], key=lambda instance: (instance["role"], instance["id"])):
        state = "[green]live[/]" if instance["live"] else f"[red]dead[/], {last_heard(instance['heardMsAgo'])}"
        if not instance["enabled"]:
            state += ", [yellow]disabled[/]: it gets nothing new"
        roles.add_row(instance["role"], escape(instance["id"]), instance["url"], state)
    out.print(roles)
    out.print()
    if not document["tables"]:
        out.print("no tables")
        return
    print_tables(document["tables"])
    print_upsert(document["tables"])
    for table in document["tables"]:
        for problem in problems(table):
            out.print(f"[red]{escape(table['name'])}: {escape(problem)}[/]", soft_wrap=True)


def print_tables(found: list[dict[str, Any]]) -> None:
    tables = Table(
        "table", "state", "partitions", "rows", "sealed online", "epoch", "lag", "fresh to", box=None,
        header_style="bold", pad_edge=False,
    )  # fmt: skip
    for table in found:
        segments = table["segments"]
        tables.add_row(
            escape(table["name"]),
            _coloured(table["state"]),
            str(len(table["partitions"])),
            f"{table['rows']:,}",
            f"{segments['online']}/{segments['done']}",
            "-" if table["epoch"] is None else str(table["epoch"]),
            tell_lag(table),
            _freshness(table["partitions"]),
        )
    out.print(tables)


def print_upsert(found: list[dict[str, Any]]) -> None:
    """Upsert tables have a line of their own."""
    tables = Table(
        "upsert table", "keys", "superseded", "tombstones", "low-water mark", "answers from", box=None,
        header_style="bold", pad_edge=False,
    )  # fmt: skip
    for table in found:
        upsert = table.get("upsert")
        if upsert is not None:
            numbers = [upsert[key] for key in ("keys", "superseded", "tombstones")]
            epochs = [upsert[key] for key in ("lowWaterMark", "horizon")]
            tables.add_row(
                escape(table["name"]),
                *("-" if number is None else f"{number:,}" for number in numbers),
                *("-" if epoch is None else str(epoch) for epoch in epochs),
            )
    if tables.row_count:
        out.print()
        out.print(tables)


def tell_lag(table: dict[str, Any]) -> str:
    return "-" if table["lagRows"] is None else f"{table['lagRows']:,} rows"


def problems(table: dict[str, Any]) -> list[str]:
    """What somebody should look at, in words."""
    found = []
    report = table["pipeline"]["report"] or {}
    if report.get("error"):
        found.append(f"pipeline: {report['error']}")
    if report.get("rebuilding"):
        found.append("the keys are being rebuilt: nothing is ingested until that is done, queries go on")
    if report.get("rejectedTotal"):
        found.append(f"{report['rejectedTotal']:,} records rejected")
    if missing := table["segments"]["withoutReplica"]:
        found.append(f"{len(missing)} sealed segments are online nowhere, as {missing[0]}")
    found += copy_problems(table["segments"])
    errors = table["segments"].get("errors", [])
    found += [f"{one['segment']} on {one['instance']}: {one['error']}" for one in errors[:_ERRORS_SHOWN]]
    if len(errors) > _ERRORS_SHOWN:
        found.append(f"… and {len(errors) - _ERRORS_SHOWN} more segments with errors")
    for partition in table["partitions"]:
        for instance, replica in partition["replicas"].items():
            if not replica["live"]:
                found.append(f"partition {partition['partition']}: {instance} is dead")
            elif replica["error"]:
                found.append(f"partition {partition['partition']} on {instance}: {replica['error']}")
            elif replica.get("catchUp"):
                done, total = replica["catchUp"]["logRecordsDone"], replica["catchUp"]["logRecordsOf"]
                where = f"partition {partition['partition']} on {instance}"
                found.append(f"{where} catches up: {done:,} of {total:,} records of its log")
            elif replica["state"] in BLOCKED:
                where = f"partition {partition['partition']} on {instance}"
                found.append(f"{where} takes no more rows ({replica['state']}) until segments are committed")
    return found


def copy_problems(segments: dict[str, Any]) -> list[str]:
    """Of the copies of sealed segments."""
    found = []
    if lost := segments["lost"]:
        found.append(f"{len(lost)} sealed segments are lost, as {lost[0]}: queries that need them say so")
    if segments["withoutCopy"]:
        found.append(f"{segments['withoutCopy']} sealed segments have no copy now")
    if segments["singleCopy"]:
        found.append(f"{segments['singleCopy']} sealed segments have a single copy")
    if segments["uploadBacklog"]:
        why = f", last error: {segments['uploadError']}" if segments["uploadError"] else ""
        found.append(f"{segments['uploadBacklog']} sealed segments wait for their upload{why}")
    return found


def last_heard(ms_ago: int | None) -> str:
    """Of an instance, for people."""
    if ms_ago is None:
        return "not heard since the controller started"
    return f"heard {age(ms_ago)} ago"


def _freshness(partitions: list[dict[str, Any]]) -> str:
    lags = [partition["freshnessLagMs"] for partition in partitions]
    if not lags or None in lags:
        return "-"
    worst = max(lags)
    return f"{worst} ms" if worst < 10_000 else f"{worst / 1000:.0f} s"


def _coloured(state: str) -> str:
    colour = _COLOURS.get(state)
    return f"[{colour}]{escape(state)}[/]" if colour else escape(state)
