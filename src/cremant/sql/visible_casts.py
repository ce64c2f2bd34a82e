# SPDX-License-Identifier: Apache-2.0
"""Casts that DataFusion sees in the names of expressions.

DataFusion names an aggregation or a group key by its text without CASTs, and refuses two of one name: `sum(x)` beside
`sum(CAST(x AS DOUBLE))`. `arrow_cast(x, 'Float64')` is the same cast, and part of the name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

_TYPES = {
    "INT": "Int32", "BIGINT": "Int64", "REAL": "Float32", "DOUBLE": "Float64", "BOOLEAN": "Boolean",
    "VARCHAR": "Utf8View", "BYTEA": "Binary",
}  # fmt: skip
#: What matters of a text: quoted parts (skipped), the beginning of a CAST, parentheses.
_PARTS = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|\bCAST\(|[()]""")
_COLUMN = re.compile(r"""'(?:[^']|'')*'|("(?:[^"]|"")*")""")
_AS_TYPE = re.compile(r" AS ([A-Z]+)\Z")


def may_collide(columns: Iterable[str]) -> bool:
    """Whether a column of the table occurs twice, and something is cast."""
    texts = list(columns)
    if not any("CAST(" in text for text in texts):
        return False
    names = Counter(match[1] for text in texts for match in _COLUMN.finditer(text) if match[1])
    return any(count > 1 for count in names.values())


def visible(sql: str) -> str:
    """`sql` with arrow_cast instead of CAST."""
    if "CAST(" not in sql:
        return sql
    pieces: list[str] = [""]
    opened: list[bool] = []
    at = 0
    for match in _PARTS.finditer(sql):
        pieces[-1] += sql[at : match.start()]
        at = match.end()
        token = match[0]
        if token in ("CAST(", "("):
            opened.append(token == "CAST(")
            if token == "CAST(":
                pieces.append("")
            else:
                pieces[-1] += token
        elif token == ")" and opened and opened.pop():
            inner = pieces.pop()
            pieces[-1] += _cast(inner)
        else:
            pieces[-1] += token
    return pieces[-1] + sql[at:]


def _cast(inner: str) -> str:
    match = _AS_TYPE.search(inner)
    if match is None or match[1] not in _TYPES:
        return f"CAST({inner})"
    return f"arrow_cast({inner[: match.start()]}, '{_TYPES[match[1]]}')"
