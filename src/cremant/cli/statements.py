# SPDX-License-Identifier: Apache-2.0
"""Text that a person types, or a script: cut into statements at `;`, not within quotes, not within comments; a line
that begins with a backslash between statements is a command, as long as the line. And where in a statement an error is,
drawn as carets below the line."""

from __future__ import annotations

import re
from typing import NamedTuple

#: What a `;` does not end, and what does not end it.
_TOKEN = re.compile(
    r"""'(?:[^']|'')*'        # string
      | "(?:[^"]|"")*"        # name
      | `[^`]*`
      | --[^\n]*
      | /\*.*?\*/
      | ;
      | (?:(?m:^)|(?<=;))[ \t]*\\[^\n]*  # command
      | ['"`]|/\*             # opened, not closed
    """,
    re.VERBOSE | re.DOTALL,
)
_PLACE = re.compile(r"(?:near '([^']*)' )?at line (\d+), column (\d+)")
_QUOTED = re.compile(r"'([\w$.]+)'")
_BEFORE_CARET, _LINE_SHOWN = 60, 100
#: `SET key = value;` belongs to the statement behind it.
_SET = re.compile(r"\s*SET\s", re.IGNORECASE)


class Split(NamedTuple):
    """Complete statements, `;` not included, and commands, in their order; and what follows the last of them."""

    statements: list[str]
    rest: str


def split_statements(text: str) -> Split:
    statements: list[str] = []
    begin = 0
    for token in _TOKEN.finditer(text):
        if token.group() in ("'", '"', "`", "/*"):
            break  # the rest is inside of something that is not closed
        is_command = token.group().lstrip(" \t").startswith("\\") and asks_nothing(text[begin : token.start()])
        if token.group() == ";" or is_command:
            statements.append(token.group() if is_command else text[begin : token.start()])
            begin = token.end()
    joined: list[str] = []
    settings = ""
    for statement in statements:
        if not statement.strip():
            continue
        if _SET.match(statement):
            settings += statement + ";"
        elif statement.lstrip().startswith("\\"):
            joined.append(statement.strip())
        else:
            joined.append((settings + statement).strip())
            settings = ""
    return Split(joined, settings + text[begin:])


def is_complete(text: str) -> bool:
    """Whether Enter sends it: it ends with `;` outside of quotes and comments, or asks for nothing."""
    return asks_nothing(split_statements(text).rest)


def asks_nothing(statement: str) -> bool:
    """Whether there are only comments in it, or nothing."""
    return not re.sub(r"--[^\n]*|/\*.*?\*/", "", statement, flags=re.DOTALL).strip("; \t\r\n")


def caret(sql: str, message: str) -> str:
    """The line of `sql` that an error names, and carets below the place; empty if it names none that can be found. An
    error names a place (`near 'x' at line 1, column 9`, the column of its end) or a word in quotes."""
    found = _named_place(sql, message) or _named_word(sql, message)
    if found is None:
        return ""
    number, start, length = found
    line = sql.splitlines()[number].replace("\t", " ")
    first = max(0, start - _BEFORE_CARET)
    return f"{line[first : first + _LINE_SHOWN]}\n{' ' * (start - first)}{'^' * max(1, min(length, _LINE_SHOWN))}"


def _named_place(sql: str, message: str) -> tuple[int, int, int] | None:
    """Line (from 0), first column (from 0), length."""
    places = list(_PLACE.finditer(message))
    if not places:
        return None
    near, number, end = places[-1].group(1) or "", int(places[-1].group(2)), int(places[-1].group(3))
    lines = sql.splitlines()
    if not 1 <= number <= len(lines):
        return None
    start = max(0, min(end, len(lines[number - 1])) - max(1, len(near)))
    return number - 1, start, len(near) or 1


def _named_word(sql: str, message: str) -> tuple[int, int, int] | None:
    for word in _QUOTED.findall(message):
        place = re.search(rf"(?<![\w$]){re.escape(word)}(?![\w$])", sql, re.IGNORECASE)
        if place is not None:
            before = sql[: place.start()]
            return before.count("\n"), place.start() - (before.rfind("\n") + 1), len(word)
    return None
