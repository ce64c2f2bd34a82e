# SPDX-License-Identifier: Apache-2.0
"""`cremant freshness`: how fresh a table is, replica by replica, and what holds it back."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cremant.cli.ages import ago, fresh_text
from cremant.cli.client import Client
from cremant.cli.console import out, write_json
from cremant.cli.find import Target

#: Exit status of a table that does not keep its promise, or of which nobody knows.
PROMISE_BROKEN = 3
_WATCH_EVERY_S = 1.0
_COLOURS = {
    "idle": "green", "caughtUp": "green", "behind": "yellow", "paused": "yellow", "stuck": "red", "unknown": "red",
    "ok": "green", "violated": "red",
}  # fmt: skip
_WELL = frozenset({"idle", "caughtUp"})


def freshness(target: Target, table: str, *, watch: bool, as_json: bool) -> int:
    """Exit status: 0, or PROMISE_BROKEN. With `watch`: once a second until Ctrl-C, the status of the last look."""
    with Client(target.controller, target.broker) as client:
        document = client.freshness(table)
        if not watch:
            _show(document, as_json=as_json)
        elif as_json or not out.is_terminal:
            document = _repeat(client, table, document, as_json=as_json)
        else:
            document = _live(client, table, document)
    return 0 if document["slaState"] in ("ok", "none") else PROMISE_BROKEN


def _repeat(client: Client, table: str, document: dict[str, Any], *, as_json: bool) -> dict[str, Any]:
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            _show(document, as_json=as_json)
            time.sleep(_WATCH_EVERY_S)
            document = client.freshness(table)
    return document


def _live(client: Client, table: str, document: dict[str, Any]) -> dict[str, Any]:
    with contextlib.suppress(KeyboardInterrupt), Live(drawn(document), console=out, auto_refresh=False) as live:
        while True:
            time.sleep(_WATCH_EVERY_S)
            document = client.freshness(table)
            live.update(drawn(document), refresh=True)
    return document


def _show(document: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        write_json(document)
    else:
        out.print(drawn(document))


def drawn(document: dict[str, Any]) -> RenderableType:
    """What GET /tables/{table}/freshness answered, for people."""
    lines = [Text.from_markup(_headline(document)), Text.from_markup(_origins(document)), Text("")]
    replicas = Table(
        "partition", "server", "state", "fresh as of", "lag", "visible", "stream end", "epoch", "time spent in",
        box=None, header_style="bold", pad_edge=False,
    )  # fmt: skip
    for partition in document["partitions"]:
        for replica in partition["replicas"]:
            replicas.add_row(
                str(partition["partition"]),
                escape(replica["instance"]),
                coloured(replica["state"]) + _tail_state(replica),
                ago(replica["freshnessLagMs"]),
                _count(replica["lagRows"], " rows"),
                _count(replica["visibleOffset"]),
                _count(partition["streamEnd"]),
                _count(replica["epoch"]),
                _spent(replica["stagesMs"]),
            )
    troubles = [Text.from_markup(text) for text in _troubles(document)]
    return Group(*lines, replicas, *([Text(""), *troubles] if troubles else []))


def _headline(document: dict[str, Any]) -> str:
    promised = ""
    if document["slaState"] != "none":
        bounds = []
        if document["freshnessSlaMs"] is not None:
            bounds.append(f"at most {ago(document['freshnessSlaMs'])}")
        if document["maxEventAgeMs"] is not None:
            bounds.append(f"an event each {ago(document['maxEventAgeMs'])}")
        promised = f"; promised {', '.join(bounds)}: {coloured(document['slaState'])}"
    return f"[bold]{escape(document['table'])}[/] is {coloured(document['state'])}, {fresh_text(document)}{promised}"


def _origins(document: dict[str, Any]) -> str:
    pipeline = document["pipeline"]
    heard = "" if pipeline["reportAgeMs"] is None else f", heard {ago(pipeline['reportAgeMs'])} ago"
    epoch = "" if pipeline["epoch"] is None else f", epoch {pipeline['epoch']}"
    event = "no event" if document["lastEventAgeMs"] is None else f"newest event {ago(document['lastEventAgeMs'])} ago"
    source = f" ({document['freshnessSource']})" if document["freshnessSource"] else ""
    return (
        f"[dim]{event}{source}; pipeline {escape(pipeline['state'])}{epoch}{heard}; seen by {document['observer']}[/]"
    )


def _troubles(document: dict[str, Any]) -> list[str]:
    """Each reason once, with where it holds."""
    where: dict[tuple[str, str], list[str]] = {}
    for partition in document["partitions"]:
        number, whole = partition["partition"], (partition["heldBackBy"], partition["reason"])
        if partition["state"] not in _WELL and partition["reason"] is not None:
            where.setdefault(whole, []).append(str(number))
        for replica in partition["replicas"]:
            own = (replica["heldBackBy"], replica["reason"] or replica["state"])
            if own != whole and replica["state"] not in (*_WELL, "paused"):
                where.setdefault(own, []).append(f"{number} on {replica['instance']}")
    found = [
        f"[yellow]{stage}: {escape(reason)} (partition {escape(', '.join(places))})[/]"
        for (stage, reason), places in where.items()
    ]
    alert = document["alert"]
    if alert["state"] == "firing":
        since = "" if alert["sinceMs"] is None else f" for {ago(max(0, document['timeMs'] - alert['sinceMs']))}"
        found.append(f"[red]promise broken{since}: {escape(alert['reason'])}[/]")
    return found


def coloured(state: str) -> str:
    colour = _COLOURS.get(state)
    return f"[{colour}]{state}[/]" if colour else escape(state)


def _tail_state(replica: dict[str, Any]) -> str:
    if not replica["responds"]:
        return "" if replica["live"] else ", dead"
    return "" if replica["tailState"] in ("consuming", None) else f", {escape(replica['tailState'])}"


def _count(number: int | None, unit: str = "") -> str:
    return "-" if number is None else f"{number:,}{unit}"


def _spent(stages: dict[str, int] | None) -> str:
    """The lag's larger parts."""
    if stages is None:
        return "-"
    shares = sorted(((ms, stage) for stage, ms in stages.items() if ms > 0), reverse=True)
    return ", ".join(f"{stage} {ms:,} ms" for ms, stage in shares)
