# SPDX-License-Identifier: Apache-2.0
"""`cremant table copies`: where the bytes of a table's sealed segments are, over the controller's REST."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from cremant.cli.ages import age
from cremant.cli.client import Client
from cremant.cli.console import out, write_json
from cremant.cli.find import Target
from cremant.cli.table import table_status

#: Segments that are listed unless all are asked for.
SEGMENTS_SHOWN = 50
_COLOURS = {"safe": "green", "singleCopy": "yellow", "noCopy": "red", "lost": "red"}
_WORDS = {"safe": "safe", "singleCopy": "single copy", "noCopy": "no copy now", "lost": "lost"}


def copies(target: Target, name: str, *, missing: bool, all_segments: bool, as_json: bool) -> None:
    """`missing`: only segments that are not safe, or not in the store although they should be."""
    with Client(target.controller) as client:
        document = client.copies(table_status(client, name)["name"], unsafe=missing)
    if as_json:
        write_json(document)
        return
    totals, replication = document["totals"], document["replication"]
    out.print(
        f"[bold]{escape(document['tableName'])}[/]  {document['storePolicy']}, replication {replication}: "
        f"{told_totals(totals)}",
        soft_wrap=True,
    )
    segments = document["segments"]
    if not segments:
        out.print("nothing is missing" if missing else "no sealed segments yet")
        return
    drawn = Table(
        Column("segment", no_wrap=True, overflow="fold"), "rows", "safety", "holders", "store",
        box=None, header_style="bold", pad_edge=False,
    )  # fmt: skip
    # What needs somebody's eye first: the order of the colours' words.
    ranks = {safety: rank for rank, safety in enumerate(("lost", "noCopy", "singleCopy", "safe"))}
    ordered = sorted(segments.items(), key=lambda item: (ranks.get(item[1]["safety"], 0), item[0]))
    shown = ordered if all_segments else ordered[:SEGMENTS_SHOWN]
    for segment, told in shown:
        colour = _COLOURS.get(told["safety"], "red")
        safety = f"[{colour}]{_WORDS.get(told['safety'], escape(told['safety']))}[/]"
        drawn.add_row(escape(segment), f"{told['rows']:,}", safety, _holders(told), _store(told))
    out.print(drawn)
    if len(ordered) > len(shown):
        out.print(f"… and {len(ordered) - len(shown)} more (--all-segments)")


def told_totals(totals: dict[str, int]) -> str:
    """In words; what there is none of is left out."""
    words = (
        ("safe", "safe"), ("singleCopy", "with a single copy"), ("noCopy", "without a copy now"), ("lost", "lost"),
        ("uploadBacklog", "wait for their upload"),
    )  # fmt: skip
    return ", ".join(f"{totals[key]:,} {word}" for key, word in words if totals[key]) or "no sealed segments"


def _holders(told: dict[str, Any]) -> str:
    """Who has verified bytes, since when, and who should have and has not."""
    lines = []
    for server, copy in told["holders"].items():
        away = "" if copy["live"] else ", [red]away[/]"
        lines.append(f"{_short(server)} {age(copy['verifiedMsAgo'])}{away}")
    lines += [f"{_short(server)} [yellow]not yet[/]" for server in told["replicas"] if server not in told["holders"]]
    return "\n".join(lines) or "[red]nobody[/]"


def _store(told: dict[str, Any]) -> str:
    store = told["store"]
    if not store["wanted"] and store["state"] != "stored":
        return "not wanted"
    since = "" if store["changedMsAgo"] is None else f" {age(store['changedMsAgo'])}"
    error = f"\n[red]{escape(store['error'])}[/]" if store["error"] else ""
    return f"{escape(store['state'])}{since}{error}"


def _short(server: str) -> str:
    return escape(server.removeprefix("Server_"))
