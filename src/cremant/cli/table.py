# SPDX-License-Identifier: Apache-2.0
"""`cremant table`: create, list, show, drop, pause, resume; over the controller's REST, as any client could."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from cremant.cli.client import Client
from cremant.cli.console import notes, out, say, warn, write_json
from cremant.cli.find import Target
from cremant.cli.status import print_tables, problems, tell_lag
from cremant.cli.table_files import read_table_files
from cremant.model.cluster import TableView
from cremant.model.errors import CremantError, InvalidConfig, NotFound, UserError
from cremant.model.secrets import redact_document
from cremant.model.segments import SegmentMetadata

#: Sealed segments that `table show` lists unless asked for all.
SEGMENTS_SHOWN = 10


def create(target: Target, paths: Sequence[str], *, check_only: bool, as_json: bool) -> None:
    """A schema that was not there before is taken back if its table is refused."""
    files = read_table_files(paths)
    if files.schema is None and files.table is None:
        raise InvalidConfig("nothing to create", hint="name a file with a schema, a table config or both")
    with Client(target.controller) as client:
        if check_only:
            client.validate(files.schema, files.table)
            say("[green]✓[/] valid; nothing was created")
            return
        name = str((files.table or files.schema or {}).get("tableName") or (files.schema or {}).get("schemaName"))
        is_new = files.schema is not None and files.schema.get("schemaName") not in client.schema_names()
        if files.schema is not None:
            client.add_schema(files.schema)
        answer: dict[str, Any] = {}
        if files.table is not None:
            try:
                answer = client.add_table(files.table)
            except CremantError:
                if is_new and files.schema is not None:
                    _take_back(client, str(files.schema["schemaName"]))
                raise
    warnings: list[str] = answer.get("warnings", [])
    if as_json:
        made = {"schema": files.schema is not None, "table": files.table is not None, "name": name}
        write_json(made | ({"warnings": warnings} if warnings else {}))
        return
    kind = "table" if files.table is not None else "schema"
    say(f"{kind} [bold]{escape(name)}[/] created")
    for warning in warnings:
        warn(warning)
    if unknown := answer.get("unrecognizedProperties"):
        warn(f"properties that nothing understands, as {', '.join(list(unknown)[:5])}: a typing error?")


def _take_back(client: Client, schema: str) -> None:
    """Never in the way of the error that made it necessary."""
    try:
        client.delete_schema(schema)
    except CremantError as error:
        warn(f"the schema {schema} stays without a table: {error.message}")


def list_tables(target: Target, *, as_json: bool) -> None:
    with Client(target.controller) as client:
        tables = client.status()["tables"]
    if as_json:
        names = ("name", "state", "topic", "replication", "rows", "lagRows")
        write_json({"tables": [{name: table[name] for name in names} for table in tables]})
    elif tables:
        print_tables(tables)
    else:
        out.print("no tables")


def show(target: Target, name: str, *, all_segments: bool, as_json: bool) -> None:
    with Client(target.controller) as client:
        status = table_status(client, name)
        document = redact_document(client.table_document(status["name"]))
        view = client.view().tables[status["name"]]
    if as_json:
        write_json({"status": status, **document})
        return
    out.print(f"[bold]{escape(status['name'])}[/]")
    config = document["realtime"]
    for what, value in (
        ("state", _state(status)),
        ("stream", f"{_stream_type(config)}, topic {status['topic']}"),
        ("rows", f"{status['rows']:,}, lag {tell_lag(status)}"),
        ("replication", str(status["replication"])),
        ("created", _time(view.record.created_ms)),
        ("config", f"version {status['configVersion']}"),
    ):
        out.print(f"  {what:<12} {escape(value)}")
    for problem in problems(status):
        out.print(f"  [red]{escape(problem)}[/]", soft_wrap=True)
    out.print()
    _print_columns(document["schema"])
    out.print()
    print_partitions(status)
    out.print()
    _print_segments(view, None if all_segments else SEGMENTS_SHOWN)
    out.print("\n[bold]table config[/]")
    out.print(escape(json.dumps(config, indent=2, ensure_ascii=False)), soft_wrap=True)


def drop(target: Target, name: str, *, yes: bool, keep_schema: bool, as_json: bool) -> None:
    with Client(target.controller) as client:
        status = table_status(client, name)
        if not yes:
            _confirm(status)
        client.delete_table(status["name"])
        dropped = ["table"]
        try:
            if not keep_schema and status["name"] in client.schema_names():
                client.delete_schema(status["name"])
                dropped.append("schema")
        except CremantError as error:
            error.message = f"the table {status['name']} is dropped, but not its schema: {error.message}"
            raise
    if as_json:
        write_json({"dropped": dropped, "name": status["name"]})
    else:
        say(f"{' and '.join(dropped)} [bold]{escape(status['name'])}[/] dropped; the topic {status['topic']} stays")


def _confirm(status: dict[str, Any]) -> None:
    if not sys.stdin.isatty():
        raise UserError(f"dropping {status['name']} needs somebody's yes", hint="add --yes")
    segments = status["segments"]["done"]
    name = escape(status["name"])
    notes.print(f"This drops table [bold]{name}[/]: {status['rows']:,} rows, {segments} sealed segments.")
    if notes.input("Type its name to go on: ").strip() != status["name"]:
        raise UserError("not dropped: that was another name")


def pause(target: Target, name: str, *, comment: str, as_json: bool) -> None:
    with Client(target.controller) as client:
        table = table_status(client, name)["name"]
        client.pause(table, comment)
    if as_json:
        write_json({"name": table, "paused": True})
    else:
        say(f"[bold]{escape(table)}[/] takes no more rows; queries go on (`cremant table resume {escape(table)}`)")


def resume(target: Target, name: str, *, as_json: bool) -> None:
    with Client(target.controller) as client:
        table = table_status(client, name)["name"]
        client.resume(table)
    if as_json:
        write_json({"name": table, "paused": False})
    else:
        say(f"[bold]{escape(table)}[/] goes on where it stopped")


def table_status(client: Client, name: str) -> dict[str, Any]:
    """The table's part of `GET /status`. Raises NotFound with the names there are."""
    raw = name.removesuffix("_REALTIME")
    tables: list[dict[str, Any]] = client.status()["tables"]
    for table in tables:
        if table["name"] == raw:
            return table
    names = [table["name"] for table in tables]
    near = get_close_matches(raw, names, n=3)
    told = f"did you mean {' or '.join(near)}?" if near else f"there is: {', '.join(names[:20])}"
    raise NotFound(f"no table {name}", hint=told if names else "there are no tables")


def _state(status: dict[str, Any]) -> str:
    report = status["pipeline"]["report"] or {}
    holder = status["pipeline"]["holder"]
    return f"{status['state']}" + (f", epoch {report.get('epoch')} by {holder}" if holder and report else "")


def _stream_type(config: dict[str, Any]) -> str:
    text = json.dumps(config)
    return "kafka" if '"streamType": "kafka"' in text else "embedded"


def _print_columns(schema: dict[str, Any]) -> None:
    drawn = Table("column", "type", "kind", "default", box=None, header_style="bold", pad_edge=False)
    kinds = {"dimensionFieldSpecs": "dimension", "metricFieldSpecs": "metric", "dateTimeFieldSpecs": "time"}
    for key, kind in kinds.items():
        for field in schema.get(key) or []:
            many = "" if field.get("singleValueField", True) else "[]"
            default = "" if field.get("defaultNullValue") is None else str(field["defaultNullValue"])
            drawn.add_row(escape(field["name"]), field["dataType"] + escape(many), kind, escape(default))
    out.print(drawn)


def print_partitions(status: dict[str, Any]) -> None:
    drawn = Table(
        "partition", "stream end", "visible", "lag", "open rows", _whole("server"), "tail rows", "epoch", "state",
        box=None, header_style="bold", pad_edge=False,
    )  # fmt: skip
    for partition in status["partitions"]:
        first = [str(partition["partition"]), *(_number(partition[key]) for key in _PARTITION_NUMBERS)]
        for instance, replica in partition["replicas"].items():
            state = "[red]dead[/]" if not replica["live"] else escape(replica["error"] or "") or "[green]ok[/]"
            drawn.add_row(
                *first,
                escape(instance.removeprefix("Server_")),
                _number(replica["tailRows"]),
                _number(replica["epoch"]),
                state,
            )
            first = [""] * len(first)
    out.print(drawn)


def _whole(header: str) -> Column:
    """A column of names: shortened they would all look the same."""
    return Column(header, no_wrap=True, overflow="fold")


_PARTITION_NUMBERS = ("streamEnd", "visibleOffset", "lagRows", "consumingRows")


def _print_segments(view: TableView, most: int | None) -> None:
    sealed = sorted(view.segments, key=lambda segment: (segment.created_ms, segment.name), reverse=True)
    if not sealed:
        out.print("no sealed segments yet")
        return
    drawn = Table(
        _whole("sealed segment"),
        "rows",
        "MiB",
        "from",
        "to",
        "online on",
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    for segment in sealed[:most]:
        online = [instance for instance, state in view.external.get(segment.name, {}).items() if state == "ONLINE"]
        drawn.add_row(
            escape(segment.name), f"{segment.rows:,}", f"{segment.size_bytes / 2**20:.1f}", *_times(segment),
            escape(", ".join(sorted(online))) or "[red]nowhere[/]",
        )  # fmt: skip
    out.print(drawn)
    if most is not None and len(sealed) > most:
        out.print(f"… and {len(sealed) - most} older ones (--all-segments)")


def _times(segment: SegmentMetadata) -> tuple[str, str]:
    return _time(segment.min_time_ms), _time(segment.max_time_ms)


def _time(ms: int | None) -> str:
    if ms is None:
        return "-"
    try:
        return datetime.fromtimestamp(ms / 1000, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return str(ms)


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
