# SPDX-License-Identifier: Apache-2.0
"""`cremant table rewind` and `rebuild-keys`: what an operator does to a table's epochs and keys."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.markup import escape

from cremant.cli.client import Client
from cremant.cli.console import notes, say, write_json
from cremant.cli.find import Target
from cremant.cli.table import table_status
from cremant.model.errors import DeadlineExceeded, UserError


def rewind(target: Target, name: str, epoch: int, *, dry_run: bool, yes: bool, as_json: bool) -> None:
    """What it would cost is told and asked about first."""
    with Client(target.controller) as client:
        table = table_status(client, name)["name"]
        cost = client.rewind(table, epoch, dry_run=True)
        if not (dry_run or yes):
            _confirm(table, cost)
        told = cost if dry_run else client.rewind(table, epoch, dry_run=False)
    if as_json:
        write_json(told)
        return
    would = "would go" if dry_run else "goes"
    say(f"[bold]{escape(table)}[/] {would} back to epoch {told['epoch']} (from {told['closed']}): {_cost(told)}")


def rebuild_keys(target: Target, name: str, *, wait_s: float, as_json: bool) -> None:
    """Waits until the pipeline takes rows again, at most `wait_s`; 0 = not at all."""
    with Client(target.controller) as client:
        before = table_status(client, name)
        table = before["name"]
        answer = client.rebuild_keys(table)
        took_s = _wait(client, table, before["pipeline"]["generation"], wait_s) if wait_s else None
    if as_json:
        write_json({**answer, "seconds": took_s})
    elif took_s is not None:
        say(f"the keys of [bold]{escape(table)}[/] were rebuilt in {took_s:.1f} s; it takes rows again")
    else:
        say(f"the keys of [bold]{escape(table)}[/] are being rebuilt; queries go on, new rows wait")


def _wait(client: Client, table: str, generation: int, wait_s: float) -> float:
    began_s = time.monotonic()
    while True:
        pipeline = table_status(client, table)["pipeline"]
        report = pipeline["report"] or {}
        newer = report.get("generation", 0) > generation
        if newer and report.get("state") == "running" and not report.get("rebuilding"):
            return time.monotonic() - began_s
        if time.monotonic() - began_s > wait_s:
            raise DeadlineExceeded(
                f"the keys of {table} were not rebuilt within {wait_s:.0f} s: {report.get('error') or 'still at it'}",
                hint="it goes on; cremant status says how far it is",
            )
        time.sleep(0.2)


def _cost(told: dict[str, Any]) -> str:
    segments = len(told["segments"])
    return f"{told['offsetsAgain']:,} messages are read again, {segments} segment{'s' * (segments != 1)} given up"


def _confirm(table: str, cost: dict[str, Any]) -> None:
    if not sys.stdin.isatty():
        raise UserError(f"taking {table} back needs somebody's yes", hint="add --yes, or look first with --dry-run")
    notes.print(f"This takes table [bold]{escape(table)}[/] back to epoch {cost['epoch']}: {_cost(cost)}.")
    if notes.input("Type its name to go on: ").strip() != table:
        raise UserError("not taken back: that was another name")
