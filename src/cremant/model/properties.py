# SPDX-License-Identifier: Apache-2.0
"""Properties files: what the clients of other systems (Kafka, a deep store) are told, by the user."""

from __future__ import annotations

import re

from cremant.model.errors import InvalidConfig


def read_properties(text: str) -> dict[str, str]:
    """A Java properties file: `key=value`, `key: value`; `#` and `!` begin comments; a `\\` at the end of a line
    continues it. Raises InvalidConfig, never showing a line."""
    found: dict[str, str] = {}
    for line in re.sub(r"(?<!\\)\\\r?\n[ \t]*", "", text).splitlines():
        stripped = line.strip()
        if stripped and stripped[0] not in "#!":
            split = re.match(r"([^=:\s]+)\s*[=:]?\s*(.*)$", stripped)
            if split is None:
                raise InvalidConfig("a properties file has a line without a key", hint="a line is `key=value`")
            key, value = split.groups()
            found[key] = re.sub(r"\\([\\=:#! ])", r"\1", value)
    return found
