# SPDX-License-Identifier: Apache-2.0
"""`cremant sql`: one query, its answer as a table, JSON (the broker's response), CSV or an Arrow IPC stream."""

from __future__ import annotations

import csv
import json
import sys
from textwrap import indent
from typing import Any, assert_never

from rich.markup import escape
from rich.table import Table

from cremant.cli.ages import fresh_text
from cremant.cli.client import Client
from cremant.cli.console import out, say, warn, write_json
from cremant.cli.find import Target
from cremant.cli.options import Format
from cremant.cli.statements import caret
from cremant.model.errors import QueryError, UserError
from cremant.model.query_codes import QueryCode

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
    if form is Format.JSON or response.get("resultTable") is not None:
        print_answer(response, form)
    if response.get("resultTable") is None:
        raise error_of(response, text)
    for problem in response.get("exceptions") or []:
        warn(f"partial answer: {problem['errorCode']} {str(problem['message']).strip()}")


def error_of(response: dict[str, Any], sql: str) -> QueryError:
    """The error of an answer without rows: what is wrong, its code, and below it the place in the query."""
    problems = response.get("exceptions") or []
    if not problems:
        return QueryError(1000, "the broker's answer has neither rows nor errors")
    code, message = int(problems[0]["errorCode"]), str(problems[0]["message"]).strip()
    # The broker repeats the query, for whom it is news.
    message = message.replace("Caught exception while parsing query: ", "").replace(f"{sql.strip()}: ", "")
    first, _, place = message.partition("\n")
    place = place or indent(caret(sql, first), "  ")
    return QueryError(code, f"{first} (code {code})" + (f"\n{place}" if place else ""), hint=_HINTS.get(code, ""))


def print_answer(response: dict[str, Any], form: Format, *, footer: bool = True) -> None:
    """An answer that has rows; as JSON, any."""
    match form:
        case Format.TABLE:
            print_table(response, footer=footer)
        case Format.CSV:
            _write_csv(response["resultTable"])
        case Format.ARROW:
            from cremant.cli.arrow import write_arrow  # 0.1 s that only this form needs

            write_arrow(response["resultTable"])
        case Format.JSON:
            write_json(response)
        case _:
            assert_never(form)


def print_table(response: dict[str, Any], *, footer: bool = True) -> None:
    """Rows, then one line on what it took."""
    table = response["resultTable"]
    names, types = table["dataSchema"]["columnNames"], table["dataSchema"]["columnDataTypes"]
    drawn = Table(box=None, header_style="bold", pad_edge=False)
    for name, kind in zip(names, types, strict=True):
        drawn.add_column(escape(name), justify="right" if kind in _NUMBERS else "left", overflow="fold")
    for row in table["rows"]:
        drawn.add_row(*(escape(text_of(value)) for value in row))
    out.print(drawn)
    if not footer:
        return
    rows = len(table["rows"])
    if response.get("numPartitionsExpected"):
        broken = "[yellow]; the table promises more[/]" if response.get("freshnessSlaViolated") else ""
        say(f"[dim]{fresh_text(response)}[/]{broken}")
    say(
        f"[dim]{rows} row{'s' if rows != 1 else ''} in {response.get('timeUsedMs', '?')} ms, "
        f"{response.get('numDocsScanned', 0):,} of {response.get('totalDocs', 0):,} documents scanned[/]"
    )


def text_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.12g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _write_csv(table: dict[str, Any]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(table["dataSchema"]["columnNames"])
    for row in table["rows"]:
        writer.writerow(
            ["" if value is None else str(value) if isinstance(value, float) else text_of(value) for value in row]
        )
