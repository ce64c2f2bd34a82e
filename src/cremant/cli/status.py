# SPDX-License-Identifier: Apache-2.0
"""`cremant status`: the controller's `GET /status`, drawn for people or passed on to programs."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from cremant.cli.client import Client
from cremant.cli.console import out, write_json
from cremant.cli.find import Target
from cremant.model.names import instance_id

_COLOURS = {"running": "green", "paused": "yellow", "disabled": "yellow", "failed": "red", "backoff": "red"}


def status(target: Target, *, as_json: bool) -> None:
    with Client(target.controller) as client:
        document = client.status()
    # The controller does not list itself: that it answers is its sign of life.
    host, _, port = target.controller.split("//", 1)[-1].rpartition(":")
    itself = {"id": instance_id("controller", host, int(port)), "role": "controller", "url": target.controller}
    document["instances"].insert(0, {**itself, "live": True, "heardMsAgo": 0})
    if as_json:
        write_json(document)
        return
    print_status(document)


def print_status(document: dict[str, Any]) -> None:
    roles = Table("role", "instance", "address", "state", box=None, header_style="bold", pad_edge=False)
    for instance in sorted(document["instances"], key=lambda instance: (instance["role"], instance["id"])):
        state = "[green]live[/]" if instance["live"] else "[red]dead[/]"
        roles.add_row(instance["role"], escape(instance["id"]), instance["url"], state)
    out.print(roles)
    out.print()
    if not document["tables"]:
        out.print("no tables")
        return
    tables = Table(
        "table", "state", "partitions", "rows", "sealed online", "epoch", "lag", "fresh to", box=None,
        header_style="bold", pad_edge=False,
    )  # fmt: skip
    for table in document["tables"]:
        segments = table["segments"]
        tables.add_row(
            escape(table["name"]),
            _coloured(table["state"]),
            str(len(table["partitions"])),
            f"{table['rows']:,}",
            f"{segments['online']}/{segments['done']}",
            "-" if table["epoch"] is None else str(table["epoch"]),
            "-" if table["lagRows"] is None else f"{table['lagRows']:,} rows",
            _freshness(table["partitions"]),
        )
    out.print(tables)
    for table in document["tables"]:
        for problem in problems(table):
            out.print(f"[red]{escape(table['name'])}: {escape(problem)}[/]", soft_wrap=True)


def problems(table: dict[str, Any]) -> list[str]:
    """What somebody should look at, in words."""
    found = []
    report = table["pipeline"]["report"] or {}
    if report.get("error"):
        found.append(f"pipeline: {report['error']}")
    if report.get("rejectedTotal"):
        found.append(f"{report['rejectedTotal']:,} records rejected")
    if missing := table["segments"]["withoutReplica"]:
        found.append(f"{len(missing)} sealed segments are online nowhere, as {missing[0]}")
    for partition in table["partitions"]:
        for instance, replica in partition["replicas"].items():
            if not replica["live"]:
                found.append(f"partition {partition['partition']}: {instance} is dead")
            elif replica["error"]:
                found.append(f"partition {partition['partition']} on {instance}: {replica['error']}")
    return found


def _freshness(partitions: list[dict[str, Any]]) -> str:
    lags = [partition["freshnessLagMs"] for partition in partitions]
    if not lags or None in lags:
        return "-"
    worst = max(lags)
    return f"{worst} ms" if worst < 10_000 else f"{worst / 1000:.0f} s"


def _coloured(state: str) -> str:
    colour = _COLOURS.get(state)
    return f"[{colour}]{escape(state)}[/]" if colour else escape(state)
