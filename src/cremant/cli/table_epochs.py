# SPDX-License-Identifier: Apache-2.0
"""`cremant table rewind`: what an operator does to a table's epochs."""

from __future__ import annotations

import sys
from typing import Any

from rich.markup import escape

from cremant.cli.client import Client
from cremant.cli.console import notes, say, write_json
from cremant.cli.find import Target
from cremant.cli.table import table_status
from cremant.model.errors import UserError


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


def _cost(told: dict[str, Any]) -> str:
    segments = len(told["segments"])
    return f"{told['offsetsAgain']:,} messages are read again, {segments} segment{'s' * (segments != 1)} given up"


def _confirm(table: str, cost: dict[str, Any]) -> None:
    if not sys.stdin.isatty():
        raise UserError(f"taking {table} back needs somebody's yes", hint="add --yes, or look first with --dry-run")
    notes.print(f"This takes table [bold]{escape(table)}[/] back to epoch {cost['epoch']}: {_cost(cost)}.")
    if notes.input("Type its name to go on: ").strip() != table:
        raise UserError("not taken back: that was another name")
