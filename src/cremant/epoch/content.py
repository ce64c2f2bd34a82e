# SPDX-License-Identifier: Apache-2.0
"""The content of a row block, apart from the bytes that happen to carry it (rule E-2).

Rows are a function of the stream record and the config version alone, so two blocks of one range must hash alike even
if one was cut out of a larger batch, came out of another release of Arrow, or has other garbage below its nulls.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.model.errors import InvariantViolation
from cremant.model.names import OFFSET
from cremant.model.offsets import OffsetRange


def content_hash(batch: pa.RecordBatch) -> str:
    """32 hex digits over schema, row count and values."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(batch.num_rows.to_bytes(8, "little"))
    for field, column in zip(batch.schema, batch.columns, strict=True):
        digest.update(f"{field.name}\0{field.type}\0".encode())
        _feed(digest, column)
    return digest.hexdigest()


def _feed(digest: Any, array: pa.Array) -> None:
    if array.null_count:
        digest.update(b"n")
        digest.update(array.is_valid().cast(pa.uint8()).to_numpy())
        array = array.drop_null()
    else:
        digest.update(b"v")
    kind = array.type
    if pa.types.is_dictionary(kind):
        _feed(digest, array.dictionary_decode())
    elif pa.types.is_list(kind):
        digest.update(pc.list_value_length(array).to_numpy())
        _feed(digest, array.flatten())
    elif pa.types.is_string(kind) or pa.types.is_binary(kind):
        digest.update(pc.binary_length(array).to_numpy())
        if len(array):
            _, bounds, data = array.buffers()
            ends = np.frombuffer(bounds, np.int32, len(array) + 1, array.offset * 4)
            if data is not None:
                digest.update(data.slice(int(ends[0]), int(ends[-1] - ends[0])))
    elif pa.types.is_boolean(kind):
        digest.update(array.cast(pa.uint8()).to_numpy())
    elif len(array):
        width = kind.byte_width
        digest.update(array.buffers()[1].slice(array.offset * width, len(array) * width))


def check_offsets(batch: pa.RecordBatch, range: OffsetRange) -> None:
    """Raises InvariantViolation (E-2) where `$offset` is not ascending or leaves the range."""
    if range.first < 0 or range.next < range.first:
        raise InvariantViolation("E-2", f"a row block of the impossible range [{range.first}, {range.next})")
    if batch.num_rows == 0:
        return
    offsets = batch.column(OFFSET).to_numpy()
    if offsets[0] < range.first or offsets[-1] >= range.next or bool((offsets[1:] < offsets[:-1]).any()):
        raise InvariantViolation(
            "E-2",
            f"a row block of range [{range.first}, {range.next}) has rows from offset {offsets.min()} to "
            f"{offsets.max()}, or not in order",
        )
