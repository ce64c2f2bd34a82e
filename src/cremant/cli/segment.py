# SPDX-License-Identifier: Apache-2.0
"""`cremant segment`: the story of a segment, drawn for people or passed on to programs."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from cremant.cli.client import Client
from cremant.cli.console import out, write_json
from cremant.cli.find import Target
from cremant.model.names import SegmentName

#: Fields that every event has, or that say what is told already.
_TOLD = frozenset({"at", "level", "role", "instance", "logger", "event", "cause", "segment", "table"})


def story(target: Target, segment: str, *, as_json: bool) -> None:
    with Client(target.controller) as client:
        document = client.story(SegmentName.parse(segment).table, segment)
    if as_json:
        write_json(document)
        return
    for event in document["events"]:
        out.print(told(event), soft_wrap=True)
    if not document["events"]:
        out.print("nothing is known of this segment: its story is too old, or its name is another one")
    for server, why in document["silent"].items():
        out.print(f"[red]{escape(server)} did not tell: {escape(why)}[/]", soft_wrap=True)


def told(event: dict[str, Any]) -> str:
    """One line: when, who, what, and the fields."""
    fields = " ".join(f"{name}={value}" for name, value in event.items() if name not in _TOLD)
    cause = f" [dim]{escape(str(event['cause']))}[/]" if event.get("cause") else ""
    what = escape(f"{event.get('event')} {fields}".strip())
    return f"{escape(str(event.get('at')))} [bold]{escape(str(event.get('instance')))}[/] {what}{cause}"
