# SPDX-License-Identifier: Apache-2.0
"""What Tab offers in `cremant sql`: keywords, functions, tables, columns of the tables that the statement names."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator

from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document

KEYWORDS = (
    "SELECT", "DISTINCT", "FROM", "WHERE", "GROUP BY", "HAVING", "ORDER BY", "LIMIT", "OFFSET", "AS", "AND", "OR",
    "NOT", "IN", "BETWEEN", "LIKE", "IS NULL", "IS NOT NULL", "CASE", "WHEN", "THEN", "ELSE", "END", "CAST", "ASC",
    "DESC", "NULLS FIRST", "NULLS LAST", "FILTER (WHERE", "EXPLAIN PLAN FOR", "EXPLAIN FRESHNESS FOR", "SET", "OPTION",
    "TRUE", "FALSE", "NULL",
)  # fmt: skip
_WORD = re.compile(r"[\w$]+$")
_TABLE_EXPECTED = re.compile(r"\b(from|\\d)\s+[\w$]*$", re.IGNORECASE)


class Catalog:
    """Tables and their columns, as last read; read again in the background so that typing never waits."""

    def __init__(self, read: Callable[[], dict[str, list[str]]]) -> None:
        self._read = read
        self.columns: dict[str, list[str]] = {}
        self.functions: list[str] = []

    def refresh(self) -> None:
        threading.Thread(target=self._refresh, daemon=True, name="catalog").start()

    def _refresh(self) -> None:
        from cremant.model.errors import CremantError

        try:
            self.columns = self._read()
        except CremantError:
            return  # no cluster just now: the words of before will do
        if not self.functions:
            from cremant.sql.aggregates import aggregate_names
            from cremant.sql.scalars import SCALARS

            scalars = {name for scalar in SCALARS for name in scalar.names}
            self.functions = sorted(name.upper() for name in aggregate_names() | scalars)


class Words(Completer):
    def __init__(self, catalog: Catalog, commands: Iterable[str]) -> None:
        self._catalog = catalog
        self._commands = sorted(commands)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        before = document.text_before_cursor
        if before.startswith("\\") and " " not in before:
            yield from (Completion(name, -len(before)) for name in self._commands if name.startswith(before))
            return
        found = _WORD.search(before)
        typed = found.group() if found else ""
        if not typed and not complete_event.completion_requested:
            return
        for word, kind in self._offers(before, document.text):
            if word.lower().startswith(typed.lower()) and word.lower() != typed.lower():
                yield Completion(word, -len(typed), display_meta=kind)

    def _offers(self, before: str, text: str) -> Iterator[tuple[str, str]]:
        tables = self._catalog.columns
        if _TABLE_EXPECTED.search(before):
            yield from ((name, "table") for name in tables)
            return
        lowered = text.lower()
        named = [name for name in tables if re.search(rf"\b{re.escape(name.lower())}\b", lowered)]
        for name in named or tables:
            yield from ((column, f"column of {name}") for column in tables[name])
        yield from ((word, "") for word in KEYWORDS)
        yield from ((name, "function") for name in self._catalog.functions)
        yield from ((name, "table") for name in tables)
