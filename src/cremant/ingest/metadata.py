# SPDX-License-Identifier: Apache-2.0
"""Columns that come from around a message instead of from inside it, under Pinot's names, where the stream's property
`stream.<type>.metadata.populate` is true:

    __key                        the message's key
    __header$<name>              value of the header; of several headers of one name the last
    __metadata$offset, __metadata$partition, __metadata$recordTimestamp (ms)

The schema may have columns of these names, and transforms and filters may use them. Keys and headers are bytes as they
are in BYTES columns, and otherwise UTF-8 text; where they are not, the row is rejected. (Pinot shows headers as hex.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from cremant.ingest.causes import BadValue, Cause, shorten
from cremant.ingest.messages import as_lists, fit
from cremant.log.api import MessageBatch
from cremant.log.columns import binary_array
from cremant.model.errors import InvalidConfig
from cremant.model.schema import DataType, FieldSpec
from cremant.model.table import StreamConfig

KEY = "__key"
HEADER_PREFIX = "__header$"
METADATA_PREFIX = "__metadata$"
OFFSET, PARTITION, RECORD_TIMESTAMP = (
    f"{METADATA_PREFIX}{name}" for name in ("offset", "partition", "recordTimestamp")
)

Problems = dict[int, BadValue]


def is_populated(stream: StreamConfig) -> bool:
    return stream.properties.get(f"stream.{stream.stream_type}.metadata.populate", "").strip().lower() == "true"


def is_metadata(name: str) -> bool:
    return name == KEY or name.startswith((HEADER_PREFIX, METADATA_PREFIX))


def check_metadata(name: str, stream: StreamConfig, where: str) -> None:
    """Raises InvalidConfig if there is no such thing, or it is not asked for."""
    natural_type(name, where)
    if not is_populated(stream):
        raise InvalidConfig(
            f"{where}: message metadata {name} is not populated",
            hint=f"set the stream property stream.{stream.stream_type}.metadata.populate to true",
        )


def natural_type(name: str, where: str) -> DataType:
    """What a metadata column that the schema does not have is read as. Raises InvalidConfig for a name that is none."""
    if name == KEY or name.startswith(HEADER_PREFIX):
        return DataType.STRING
    if name in (OFFSET, PARTITION, RECORD_TIMESTAMP):
        return DataType.LONG
    raise InvalidConfig(
        f"{where}: message metadata {name} is not supported by this version",
        hint=f"{KEY}, {HEADER_PREFIX}<name>, {OFFSET}, {PARTITION}, {RECORD_TIMESTAMP}",
    )


def metadata_column(
    field: FieldSpec, batch: MessageBatch, kept: np.ndarray, partition: int, *, keep_going: bool
) -> tuple[pa.Array, Problems]:
    """The column for the messages at `kept`, in its working type; rows whose value does not fit are named."""
    raw = _raw(field.name, batch, kept, partition)
    if not pa.types.is_binary(raw.type):
        return fit(field, raw, keep_going=keep_going)
    if field.data_type is DataType.BYTES:
        return raw if field.single_value else as_lists(raw), {}
    text, problems = _as_text(raw)
    column, others = fit(field, text, keep_going=keep_going)
    return column, {} if keep_going else others | problems


def _raw(name: str, batch: MessageBatch, kept: np.ndarray, partition: int) -> pa.Array:
    if name == KEY:
        return batch.keys.take(pa.array(kept))
    if name == OFFSET:
        return pa.array(batch.offsets[kept], pa.int64())
    if name == RECORD_TIMESTAMP:
        times = batch.timestamps_ms[kept]
        return pa.array(times, pa.int64(), mask=times < 0)
    if name == PARTITION:
        return pa.array(np.full(len(kept), partition, dtype=np.int64))
    if name.startswith(HEADER_PREFIX):
        return _header(name.removeprefix(HEADER_PREFIX), batch, kept.tolist())
    return pa.nulls(len(kept))


def _header(name: str, batch: MessageBatch, kept: Sequence[int]) -> pa.Array:
    if batch.headers is None:
        return pa.nulls(len(kept), pa.binary())
    found: list[bytes | None] = []
    for at in kept:
        value = None
        for key, given in batch.headers[at]:
            if key == name:
                value = given
        found.append(value)
    return binary_array(found)


def _as_text(raw: pa.BinaryArray) -> tuple[pa.StringArray, Problems]:
    try:
        return raw.cast(pa.string()), {}
    except pa.ArrowInvalid:
        pass
    texts: list[str | None] = []
    problems: Problems = {}
    for row, value in enumerate(raw.to_pylist()):
        try:
            texts.append(None if value is None else value.decode())
        except UnicodeDecodeError:
            texts.append(None)
            problems[row] = BadValue(Cause.WRONG_TYPE, f"{shorten(value)} is not UTF-8 text")
    return pa.array(texts, pa.string()), problems
