# SPDX-License-Identifier: Apache-2.0
"""Answers as an Arrow IPC stream (`Accept: application/vnd.apache.arrow.stream`): no text in between, types kept.

    INT LONG int32 int64       BOOLEAN  bool             STRING JSON  utf8
    FLOAT DOUBLE float, double TIMESTAMP timestamp[ms]   BYTES        binary
    BIG_DECIMAL as computed (decimal, or utf8)           *_ARRAY      lists of the same

The schema's metadata has, under `cremant.response`, the JSON answer without its `resultTable`: exceptions,
`partialResult`, counters, freshness. An answer without a result is JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa

from cremant.sql.plan import ResultColumn

MEDIA_TYPE = "application/vnd.apache.arrow.stream"
METADATA_KEY = b"cremant.response"

_TYPES: dict[str, pa.DataType] = {
    "INT": pa.int32(), "LONG": pa.int64(), "FLOAT": pa.float32(), "DOUBLE": pa.float64(), "BOOLEAN": pa.bool_(),
    "TIMESTAMP": pa.timestamp("ms"), "STRING": pa.string(), "JSON": pa.string(), "UUID": pa.string(),
    "BYTES": pa.binary(),
}  # fmt: skip


def arrow_table(table: pa.Table, columns: Sequence[ResultColumn]) -> pa.Table:
    """The result under its names, in the types above."""
    arrays = [_cast(table.column(index), column.type) for index, column in enumerate(columns)]
    fields = [pa.field(column.name, array.type) for column, array in zip(columns, arrays, strict=True)]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _cast(column: pa.ChunkedArray, pinot_type: str) -> pa.ChunkedArray:
    wanted = _TYPES.get(pinot_type.removesuffix("_ARRAY"))
    if wanted is None:
        return column
    if pinot_type.endswith("_ARRAY"):
        wanted = pa.list_(wanted)
    return column if column.type == wanted else column.cast(wanted)


def encode_arrow(table: pa.Table, fields: dict[str, Any]) -> bytes:
    """`fields` are those of the JSON answer."""
    rest = {name: value for name, value in fields.items() if name != "resultTable"}
    described = table.replace_schema_metadata({METADATA_KEY: msgspec.json.encode(rest)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, described.schema) as writer:
        writer.write_table(described)
    body: bytes = sink.getvalue().to_pybytes()
    return body
