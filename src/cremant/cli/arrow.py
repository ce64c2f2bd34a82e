# SPDX-License-Identifier: Apache-2.0
"""Answers as an Arrow IPC stream: `cremant sql --format arrow`."""

from __future__ import annotations

import sys
from typing import Any

import pyarrow as pa

#: Pinot's column types as Arrow types; the text forms of the rest are kept as they come.
_ARROW: dict[str, pa.DataType] = {
    "INT": pa.int32(),
    "LONG": pa.int64(),
    "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(),
    "BOOLEAN": pa.bool_(),
}


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


def write_arrow(table: dict[str, Any]) -> None:
    result = to_arrow(table)
    with pa.ipc.new_stream(sys.stdout.buffer, result.schema) as writer:
        writer.write_table(result)
    sys.stdout.buffer.flush()
