# SPDX-License-Identifier: Apache-2.0
"""Smallest and largest values: of columns for pruning, of the time column in milliseconds.

A range is kept only where comparing with it is exact: single-value INT, LONG, FLOAT, DOUBLE, TIMESTAMP, BOOLEAN and
STRING columns; no NaN (it orders above everything), no infinity (JSON has none), no text beyond `TEXT_CHARS_MAX`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cremant.model.schema import DataType, FieldSpec, Schema
from cremant.model.segments import ColumnRange

#: Text longer than this is not worth carrying in cluster metadata.
TEXT_CHARS_MAX = 256

RANGED = frozenset(
    {
        DataType.INT,
        DataType.LONG,
        DataType.FLOAT,
        DataType.DOUBLE,
        DataType.TIMESTAMP,
        DataType.BOOLEAN,
        DataType.STRING,
    }
)

_UNIT_MS: dict[str, Fraction] = {
    "NANOSECONDS": Fraction(1, 1_000_000),
    "MICROSECONDS": Fraction(1, 1_000),
    "MILLISECONDS": Fraction(1),
    "SECONDS": Fraction(1_000),
    "MINUTES": Fraction(60_000),
    "HOURS": Fraction(3_600_000),
    "DAYS": Fraction(86_400_000),
}


class RangeCollector:
    """Ranges over rows that arrive batch by batch."""

    def __init__(self, schema: Schema) -> None:
        self._wanted = [spec.name for spec in schema.fields if spec.single_value and spec.data_type in RANGED]
        self._ranges: dict[str, tuple[Any, Any] | None] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        present = set(batch.schema.names)
        for name in self._wanted:
            if self._ranges.get(name, ()) is None:
                continue
            found = column_range(batch.column(name)) if name in present else None
            known = self._ranges.get(name)
            if found is not None and known is not None:
                found = (min(known[0], found[0]), max(known[1], found[1]))
            self._ranges[name] = found

    def ranges(self) -> dict[str, ColumnRange]:
        """Columns without an exact range are absent."""
        known = {name: found for name, found in self._ranges.items() if found is not None}
        return {name: ColumnRange(min=found[0], max=found[1]) for name, found in known.items()}


def column_ranges(batches: Iterable[pa.RecordBatch], schema: Schema) -> dict[str, ColumnRange]:
    collector = RangeCollector(schema)
    for batch in batches:
        collector.add(batch)
    return collector.ranges()


def column_range(column: pa.Array) -> tuple[Any, Any] | None:
    """(min, max) of a column, or None where a range would not be exact."""
    if column.null_count or not len(column):
        return None
    if pa.types.is_floating(column.type) and pc.any(pc.is_nan(column)).as_py():
        return None
    if pa.types.is_dictionary(column.type) or pa.types.is_string_view(column.type):
        column = column.cast(pa.string())
    both = pc.min_max(column)
    low, high = both["min"].as_py(), both["max"].as_py()
    if isinstance(low, float) and not (math.isfinite(low) and math.isfinite(high)):
        return None
    if isinstance(low, str) and max(len(low), len(high)) > TEXT_CHARS_MAX:
        return None
    return low, high


def time_unit_ms(spec: FieldSpec) -> Fraction | None:
    """Milliseconds of one unit of a time column; None when its values are not numbers counted from the epoch.

    Formats: `1:MILLISECONDS:EPOCH`, `EPOCH|SECONDS|5`, `EPOCH`, `TIMESTAMP`, `1:MILLISECONDS:TIMESTAMP`."""
    if spec.data_type is DataType.TIMESTAMP:
        return Fraction(1)
    if spec.data_type not in (DataType.INT, DataType.LONG) or spec.format is None:
        return None
    if ":" in spec.format:
        size, unit, kind, *_ = [*spec.format.split(":"), "", ""]
    else:
        kind, unit, size, *_ = [*spec.format.split("|"), "", ""]
    if kind == "TIMESTAMP":
        return Fraction(1)
    per_unit = _UNIT_MS.get(unit or "MILLISECONDS")
    if kind != "EPOCH" or per_unit is None or not (size or "1").isdigit():
        return None
    return per_unit * int(size or "1")


def time_range_ms(ranges: dict[str, ColumnRange], schema: Schema, time_column: str) -> tuple[int, int] | None:
    """The time column's range in milliseconds, rounded outwards."""
    spec, known = schema.field(time_column), ranges.get(time_column)
    unit = time_unit_ms(spec) if spec is not None else None
    if unit is None or known is None:
        return None
    return math.floor(known.min * unit), math.ceil(known.max * unit)
