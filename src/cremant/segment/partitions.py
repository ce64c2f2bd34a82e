# SPDX-License-Identifier: Apache-2.0
"""Pruning by partition: which partitions of a column's values a sealed segment really has (`segmentPartitionConfig`).

Rules:

- The partitions are found in the rows themselves when a segment is built, never inferred from the stream: a stream that
  is not partitioned as the config says gives segments that have all partitions, and nothing is dropped.
- What decides is the function that the segment's metadata names, not that of today's config.
- A segment is dropped only if every value that a term wants is exactly a stored form of the column and is of another
  partition; whatever is in doubt is kept.

Functions as Pinot's (org.apache.pinot.segment.spi.partition), over the text of a value:

    Murmur    (murmur2(UTF-8) & 0x7fffffff) % n     as Java's Kafka clients partition by key
    Modulo    number % n, never negative
    HashCode  |String.hashCode()| % n               0 for the one number that has no absolute value
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.log.partitioner import murmur2_array
from cremant.model.schema import DataType, Schema
from cremant.model.segments import ColumnPartitions
from cremant.model.table import ColumnPartitioning, PartitionFunction
from cremant.segment.stats import TEXT_CHARS_MAX
from cremant.wire.messages import PruneTerm

#: A segment of more partitions is not worth carrying in cluster metadata: 128 numbers are about 700 bytes of JSON.
PARTITION_IDS_MAX = 128
PARTITIONED = frozenset({DataType.STRING, DataType.INT, DataType.LONG})


class PartitionCollector:
    """Partitions over rows that arrive batch by batch."""

    def __init__(self, schema: Schema, wanted: Mapping[str, ColumnPartitioning]) -> None:
        self._wanted = dict(wanted)
        self._found: dict[str, set[int] | None] = {}
        for column in wanted:
            spec = schema.field(column)
            if spec is None or not spec.single_value or spec.data_type not in PARTITIONED:
                del self._wanted[column]

    def add(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        present = set(batch.schema.names)
        for column, how in self._wanted.items():
            known = self._found.get(column, set())
            if known is None:
                continue
            here = _partitions_in(batch.column(column), how) if column in present else None
            both = None if here is None else known | here
            self._found[column] = both if both is not None and len(both) <= PARTITION_IDS_MAX else None

    def partitions(self) -> dict[str, ColumnPartitions]:
        """Columns of which not every value's partition is known, or of too many partitions, are absent."""
        return {
            column: ColumnPartitions(function=how.function, partitions=how.partitions, ids=tuple(sorted(ids)))
            for column, how in self._wanted.items()
            if (ids := self._found.get(column)) is not None
        }


def _partitions_in(column: pa.Array, how: ColumnPartitioning) -> set[int] | None:
    if column.null_count:
        return None
    values = pc.unique(column)
    if pa.types.is_string(values.type) and pc.max(pc.utf8_length(values)).as_py() > TEXT_CHARS_MAX:
        return None
    return set(np.unique(partitions_of_values(values, how)).tolist())


def partitions_of_values(values: pa.Array, how: ColumnPartitioning) -> np.ndarray:
    """The partition of each value (text or integers, no nulls); Modulo takes integers only."""
    if how.function is PartitionFunction.MODULO:
        numbers: np.ndarray = values.cast(pa.int64()).to_numpy()
        return numbers % how.partitions
    texts = values.cast(pa.string())
    if how.function is PartitionFunction.MURMUR:
        hashes = murmur2_array(texts.cast(pa.binary())) & np.uint32(0x7FFFFFFF)
    else:
        hashes = _absolute(java_hash_codes(texts))
    partitions: np.ndarray = hashes.astype(np.int64) % how.partitions
    return partitions


def _absolute(hashes: np.ndarray) -> np.ndarray:
    """As Pinot does it: the smallest int, whose absolute value is no int, counts as 0."""
    numbers = hashes.view(np.int32).astype(np.int64)
    return np.where(numbers == -(2**31), 0, np.abs(numbers))


def java_hash_codes(texts: pa.StringArray) -> np.ndarray:
    """Java's `String.hashCode()` of each text, as uint32: s[0]·31^(n-1) + … + s[n-1] over UTF-16 units."""
    offsets = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]
    data = texts.buffers()[2]
    utf8 = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]] if data is not None else np.zeros(0, np.uint8)
    units = np.frombuffer(utf8.tobytes().decode().encode("utf-16-le"), np.uint16)
    # A character is one unit, two where its UTF-8 form has four bytes; counted at its first byte.
    units_before = np.zeros(len(utf8) + 1, np.int64)
    np.cumsum(((utf8 & 0xC0) != 0x80).astype(np.int64) + (utf8 >= 0xF0), out=units_before[1:])
    borders = units_before[offsets - offsets[0]]
    starts, lengths = borders[:-1], np.diff(borders)
    hashes = np.zeros(len(texts), np.uint32)
    for at in range(int(lengths.max(initial=0))):
        rows = np.nonzero(lengths > at)[0]
        hashes[rows] = hashes[rows] * np.uint32(31) + units[starts[rows] + at]
    return hashes


class PartitionPruner:
    """The terms of one query against many segments: a wanted value is hashed once for all of them."""

    def __init__(self, terms: Sequence[PruneTerm]) -> None:
        self._terms = [term for term in terms if term.op in ("=", "in") and term.values]
        self._wanted: dict[tuple[int, PartitionFunction, int], frozenset[int] | None] = {}

    def may_match(self, known: Mapping[str, ColumnPartitions]) -> bool:
        """False only if no row of a segment of these partitions can satisfy all terms."""
        if not known:
            return True
        for number, term in enumerate(self._terms):
            column = known.get(term.column)
            if column is None:
                continue
            key = (number, column.function, column.partitions)
            if key not in self._wanted:
                how = ColumnPartitioning(function=column.function, partitions=column.partitions)
                self._wanted[key] = _partitions_wanted(term.values, how)
            wanted = self._wanted[key]
            if wanted is not None and wanted.isdisjoint(column.ids):
                return False
        return True


def _partitions_wanted(values: Sequence[Any], how: ColumnPartitioning) -> frozenset[int] | None:
    """None where a value is not certainly of one partition."""
    is_text = how.function is not PartitionFunction.MODULO and all(_is_short_text(value) for value in values)
    if not is_text and not all(type(value) is int and -(2**63) <= value < 2**63 for value in values):
        return None
    array = pa.array(values, pa.string() if is_text else pa.int64())
    return frozenset(partitions_of_values(array, how).tolist())


def _is_short_text(value: Any) -> bool:
    """Long texts are not worth hashing, and half characters have no UTF-8 form."""
    return isinstance(value, str) and len(value) <= TEXT_CHARS_MAX and not any("\ud800" <= c <= "\udfff" for c in value)
