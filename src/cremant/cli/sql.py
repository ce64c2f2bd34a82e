# SPDX-License-Identifier: Apache-2.0
"""`cremant sql`: one query, its answer as a table, JSON (the broker's response), CSV or an Arrow IPC stream."""

from __future__ import annotations

import csv
import json
import sys
from typing import Any, assert_never

import pyarrow as pa
from rich.markup import escape
from rich.table import Table

from cremant.cli.client import Client
from cremant.cli.console import out, say, warn, write_json
from cremant.cli.find import Target
from cremant.cli.options import Format
from cremant.model.errors import QueryError, UserError
from cremant.model.query_codes import QueryCode

#: Pinot's column types as Arrow types; the text forms of the rest are kept as they come.
_ARROW: dict[str, pa.DataType] = {
    "INT": pa.int32(),
    "LONG": pa.int64(),
    "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(),
    "BOOLEAN": pa.bool_(),
}
#: What to do about errors whose text says little (Pinot's texts are kept: clients compare them).
_HINTS = {
    int(QueryCode.TABLE_DOES_NOT_EXIST): "`cremant status` lists the tables",
    int(QueryCode.TABLE_IS_DISABLED): "enable it: PUT /tables/{table}/state?state=enable",
    int(QueryCode.BROKER_SEGMENT_UNAVAILABLE): "`cremant status` shows what is missing; it may be a matter of seconds",
}
_NUMBERS = {"INT", "LONG", "FLOAT", "DOUBLE", "BIG_DECIMAL"}


def sql(target: Target, text: str, *, form: Format, options: str = "") -> None:
    """Raises QueryError when the broker answered with exceptions and no rows; rows that came with exceptions are
    printed, and the warning says that they are partial."""
    if form is Format.ARROW and sys.stdout.isatty():
        raise UserError(
            "an Arrow stream is not for terminals", hint="redirect it: cremant sql … --format arrow > x.arrow"
        )
    with Client(target.controller, target.broker, timeout_s=120.0) as client:
        response = client.query(text, options)
    if form is Format.JSON:
        write_json(response)
    problems = response.get("exceptions") or []
    table = response.get("resultTable")
    if table is None:
        if problems:
            first = problems[0]
            code, message = int(first["errorCode"]), str(first["message"]).strip()
            raise QueryError(code, f"{message} (code {code})", hint=_HINTS.get(code, ""))
        raise QueryError(1000, "the broker's answer has neither rows nor errors")
    match form:
        case Format.TABLE:
            print_table(response)
        case Format.CSV:
            _write_csv(table)
        case Format.ARROW:
            _write_arrow(table)
        case Format.JSON:
            pass
        case _:
            assert_never(form)
    for problem in problems:
        warn(f"partial answer: {problem['errorCode']} {str(problem['message']).strip()}")


def print_table(response: dict[str, Any]) -> None:
    """Rows, then one line on what it took."""
    table = response["resultTable"]
    names, types = table["dataSchema"]["columnNames"], table["dataSchema"]["columnDataTypes"]
    drawn = Table(box=None, header_style="bold", pad_edge=False)
    for name, kind in zip(names, types, strict=True):
        drawn.add_column(escape(name), justify="right" if kind in _NUMBERS else "left", overflow="fold")
    for row in table["rows"]:
        drawn.add_row(*(escape(_text(value)) for value in row))
    out.print(drawn)
    rows = len(table["rows"])
    lag = response.get("freshnessLagMs")
    fresh = f", fresh to {lag} ms" if lag is not None else ""
    say(
        f"[dim]{rows} row{'s' if rows != 1 else ''} in {response.get('timeUsedMs', '?')} ms, "
        f"{response.get('numDocsScanned', 0):,} of {response.get('totalDocs', 0):,} documents scanned{fresh}[/]"
    )


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.12g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _write_csv(table: dict[str, Any]) -> None:
    writer = csv.writer(sys.stdout)
    writer.writerow(table["dataSchema"]["columnNames"])
    for row in table["rows"]:
        writer.writerow(
            ["" if value is None else str(value) if isinstance(value, float) else _text(value) for value in row]
        )


def to_arrow(table: dict[str, Any]) -> pa.Table:
    """A result table as Arrow: numbers and booleans typed, everything else as the text that Pinot writes."""
    schema = table["dataSchema"]
    columns = []
    for at, kind in enumerate(schema["columnDataTypes"]):
        values = [row[at] for row in table["rows"]]
        element = _ARROW.get(kind.removesuffix("_ARRAY"), pa.string())
        wanted = pa.list_(element) if kind.endswith("_ARRAY") else element
        if kind in ("FLOAT", "DOUBLE"):
            values = [float(value) if isinstance(value, str) else value for value in values]
        columns.append(pa.array(values, wanted))
    return pa.table(columns, names=schema["columnNames"])


def _write_arrow(table: dict[str, Any]) -> None:
    result = to_arrow(table)
    with pa.ipc.new_stream(sys.stdout.buffer, result.schema) as writer:
        writer.write_table(result)
    sys.stdout.buffer.flush()
