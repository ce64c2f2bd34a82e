# SPDX-License-Identifier: Apache-2.0
"""Cuts what a message batch became into parts of bounded size that cover an offset range exactly (rule E-2)."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from cremant.ingest.plan import Ingested
from cremant.model.offsets import OffsetRange


@dataclass(frozen=True, slots=True)
class BlockPart:
    """What a RowBlock says of its rows; the parts of a range follow each other without a hole."""

    range: OffsetRange
    batch: pa.RecordBatch
    rejected: int
    filtered: int
    max_ingestion_ms: int | None


def to_blocks(ingested: Ingested, range: OffsetRange, max_rows: int) -> list[BlockPart]:
    """The parts of `range`, each of at most `max_rows` rows; one (maybe empty) part at least unless the range is empty.
    A function of its arguments alone. Raises InvariantViolation if something of `ingested` lies outside `range`."""
    raise NotImplementedError
