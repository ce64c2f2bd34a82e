# SPDX-License-Identifier: Apache-2.0
"""`cremant sql` without a query: at a terminal, a prompt with history and completion; in a pipe, a script.

A statement goes over several lines and ends with `;`. What begins with a backslash is ours, see `\\?`. Ctrl-C while a
query runs cancels it on the broker; at the prompt it forgets the line; Ctrl-D leaves.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.lexers import PygmentsLexer
from pygments.lexers.sql import SqlLexer
from rich.markup import escape
from rich.table import Table

from cremant import __version__
from cremant.cli.ages import fresh_text
from cremant.cli.client import Client
from cremant.cli.console import exit_status, fail, notes, out, say
from cremant.cli.find import Target
from cremant.cli.options import Format
from cremant.cli.sql import error_of, print_answer
from cremant.cli.statements import asks_nothing, is_complete, split_statements
from cremant.cli.status import print_tables
from cremant.cli.table import table_status
from cremant.cli.words import Catalog, Words
from cremant.model.errors import CremantError, NotFound, UserError

_QUERY_TIMEOUT_S = 600.0
_CANCEL_TIMEOUT_S = 5.0
_POLL_S = 0.05

HELP = """\
SELECT … ;            a query, over as many lines as you like
SET key = value; …    options of the query behind it
\\d                    tables
\\d TABLE              columns of a table
\\format table|json|csv   how answers are printed
\\x                    one column per line: on or off
\\timing               how long answers took: on or off
\\status               roles, tables, lag
\\r                    read tables and columns again
\\? or help            this
\\q or Ctrl-D          leave"""


class Repl:
    """One conversation. `say` commands go to stderr like all notes, answers to stdout."""

    def __init__(self, target: Target, form: Format, options: str) -> None:
        self._target = target
        self._form = form
        self._options = options
        self._client = Client(target.controller, target.broker, timeout_s=_QUERY_TIMEOUT_S)
        self._timing = True
        self._expanded = False
        #: Why the last statement that failed did.
        self.error: CremantError | None = None
        self.catalog = Catalog(self._read_catalog)
        self.commands: dict[str, Callable[[list[str]], None]] = {
            "\\d": self._describe,
            "\\format": self._set_format,
            "\\x": self._toggle_expanded,
            "\\timing": self._toggle_timing,
            "\\status": self._status,
            "\\r": lambda _words: self.catalog.refresh(),
            "\\?": lambda _words: out.print(escape(HELP)),
            "\\q": self._leave,
        }

    def close(self) -> None:
        self._client.close()

    def run(self, statement: str) -> bool:
        """One statement or command; False if it failed. Raises EOFError to leave."""
        text = statement.strip()
        lowered = text.rstrip("; \n").lower()
        if asks_nothing(text):
            return True
        try:
            if lowered in ("exit", "quit"):
                raise EOFError
            if lowered == "help":
                self.commands["\\?"]([])
            elif text.startswith("\\"):
                self._command(text.rstrip(";").split())
            else:
                self._ask(text)
        except CremantError as error:
            if not error.hint and any(line.lstrip().startswith("\\") for line in text.splitlines()[1:]):
                error.hint = "a command, as \\d, is a line of its own behind the `;` that ends the statement before it"
            fail(error)
            self.error = error
            return False
        return True

    def _command(self, words: list[str]) -> None:
        command = self.commands.get(words[0])
        if command is None:
            raise UserError(f"no command {words[0]}", hint="\\? lists them")
        command(words[1:])

    def _ask(self, sql: str) -> None:
        started = time.monotonic()
        response = self._cancellable(sql)
        if response is None:
            say("[yellow]cancelled[/]")
            return
        if response.get("resultTable") is None:
            raise error_of(response, sql)
        if self._expanded and self._form is Format.TABLE:
            _print_expanded(response)
        else:
            print_answer(response, self._form, footer=False)
        for problem in response.get("exceptions") or []:
            say(f"[yellow]partial answer: {escape(str(problem['errorCode']))} {escape(str(problem['message']))}[/]")
        if self._timing and self._form is Format.TABLE:
            rows = len(response["resultTable"]["rows"])
            fresh = f", {fresh_text(response)}" if response.get("numPartitionsExpected") else ""
            took = (time.monotonic() - started) * 1000
            say(
                f"[dim]({rows} row{'s' * (rows != 1)}, {took:.0f} ms, {response.get('timeUsedMs', '?')} of them the "
                f"broker's; {response.get('numDocsScanned', 0):,} of {response.get('totalDocs', 0):,} documents"
                f"{fresh})[/]"
            )

    def _cancellable(self, sql: str) -> dict[str, Any] | None:
        """The broker's answer; None if Ctrl-C came first: then the broker has been told."""
        mine = f"cremant-sql-{uuid.uuid4().hex[:12]}"
        options = ";".join(part for part in (self._options, f"clientQueryId={mine}") if part)
        found: list[dict[str, Any]] = []
        failed: list[CremantError] = []

        def ask() -> None:
            try:
                found.append(self._client.query(sql, options))
            except CremantError as error:
                failed.append(error)

        asking = threading.Thread(target=ask, daemon=True, name="query")
        asking.start()
        try:
            while asking.is_alive():
                asking.join(_POLL_S)
        except KeyboardInterrupt:
            self._cancel(mine)
            asking.join(_CANCEL_TIMEOUT_S)
            return None
        if failed:
            raise failed[0]
        return found[0]

    def _cancel(self, client_query_id: str) -> None:
        with Client(self._target.controller, self._client.broker(), timeout_s=_CANCEL_TIMEOUT_S) as other:
            try:
                other.cancel(client_query_id)
            except NotFound:
                pass  # it ended meanwhile
            except CremantError as error:
                fail(error)

    def _read_catalog(self) -> dict[str, list[str]]:
        with Client(self._target.controller) as client:
            tables = client.view().tables
        return {name: list(table.record.table_schema.column_names) for name, table in tables.items()}

    def _describe(self, words: list[str]) -> None:
        if not words:
            tables = self._client.status()["tables"]
            if tables:
                print_tables(tables)
            else:
                out.print("no tables")
            return
        name = table_status(self._client, words[0].strip('"'))["name"]
        drawn = Table("column", "type", box=None, header_style="bold", pad_edge=False)
        for column in self._client.view().tables[name].record.table_schema.fields:
            drawn.add_row(escape(column.name), str(column.data_type) + ("" if column.single_value else "[]"))
        out.print(drawn)

    def _set_format(self, words: list[str]) -> None:
        forms = {str(form): form for form in Format if form is not Format.ARROW}
        if len(words) != 1 or words[0] not in forms:
            raise UserError(f"\\format {' '.join(words)}: expected one of {', '.join(forms)}")
        self._form = forms[words[0]]

    def _toggle_expanded(self, _words: list[str]) -> None:
        self._expanded = not self._expanded
        say(f"one column per line: {'on' if self._expanded else 'off'}")

    def _toggle_timing(self, _words: list[str]) -> None:
        self._timing = not self._timing
        say(f"timing: {'on' if self._timing else 'off'}")

    def _status(self, _words: list[str]) -> None:
        from cremant.cli.status import status

        status(self._target, as_json=False)

    def _leave(self, _words: list[str]) -> None:
        raise EOFError


def converse(target: Target, form: Format, options: str) -> None:
    """At a terminal, until Ctrl-D. Raises UserError for a format that is not for eyes."""
    if form is Format.ARROW:
        raise UserError("an Arrow stream is not for a prompt", hint='cremant sql "SELECT …" --format arrow > x.arrow')
    repl = Repl(target, form, options)
    session = _session(repl)
    repl.catalog.refresh()
    say(f"[bold]Cremant {__version__}[/], {escape(target.controller)}")
    say("End a query with [bold];[/]  [bold]\\?[/] helps, Ctrl-D leaves.")
    try:
        while True:
            try:
                text = session.prompt()
            except KeyboardInterrupt:
                continue
            found = split_statements(text)
            for statement in [*found.statements, found.rest]:
                repl.run(statement)
    except EOFError:
        pass
    finally:
        repl.close()


def run_script(target: Target, form: Format, options: str) -> None:
    """Statements from a pipe, one after the other; ends the process at the first that fails."""
    repl = Repl(target, form, options)
    try:
        found = split_statements(sys.stdin.read())
        for statement in [*found.statements, found.rest]:
            if not repl.run(statement):
                assert repl.error is not None
                sys.exit(exit_status(repl.error))
    except EOFError:
        pass
    finally:
        repl.close()


def _session(repl: Repl) -> PromptSession[str]:
    keys = KeyBindings()

    @Condition
    def finished() -> bool:
        text = session.default_buffer.text.strip()
        is_word = text.lower() in ("", "exit", "quit", "help")
        return is_word or text.startswith("\\") or (text.endswith(";") and is_complete(text))

    @keys.add("enter", filter=finished)
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    session: PromptSession[str] = PromptSession(
        "cremant> ",
        multiline=True,
        prompt_continuation=lambda width, _line, _wrapped: " " * (width - 2) + "> ",
        history=_history(),
        auto_suggest=AutoSuggestFromHistory(),
        completer=Words(repl.catalog, repl.commands),
        complete_while_typing=False,
        lexer=PygmentsLexer(SqlLexer),
        key_bindings=keys,
    )
    return session


def _history() -> History:
    """In the user's state directory; a history that cannot be written is kept in memory."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "cremant"
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = state / "sql_history"
        path.touch(mode=0o600)
    except OSError as error:
        notes.print(f"[dim]no history is kept: {state}: {error.strerror}[/]")
        return InMemoryHistory()
    return FileHistory(path)


def _print_expanded(response: dict[str, Any]) -> None:
    from cremant.cli.sql import text_of

    table = response["resultTable"]
    names = table["dataSchema"]["columnNames"]
    width = max(map(len, names), default=0)
    for number, row in enumerate(table["rows"], 1):
        out.print(f"[dim]-- row {number}[/]")
        for name, value in zip(names, row, strict=True):
            out.print(f"{escape(name):<{width}}  {escape(text_of(value))}", soft_wrap=True)
