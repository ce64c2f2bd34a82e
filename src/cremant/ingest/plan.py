# SPDX-License-Identifier: Apache-2.0
"""The ingest plan of a table: stream messages in, typed columns out. Compiled once per (schema, config), pure.

Row content is a function of the stream record and the config alone (rule E-2): no clock, no dice. A record that cannot
become a row is *rejected* with a cause and never stops the batch; a record that the filter drops is *filtered*.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from cremant.log.api import MessageBatch
from cremant.model.schema import Schema
from cremant.model.table import TableConfig


@dataclass(frozen=True, slots=True)
class Rejected:
    """A stream record that did not become a row. `cause` is one of `cremant.ingest.causes.Cause`; `sample` is the
    beginning of the message, for the dead-letter topic."""

    offset: int
    cause: str
    detail: str
    sample: bytes


@dataclass(frozen=True, slots=True)
class Ingested:
    """What a message batch became: rows ordered by `$offset`, the records that were rejected, and the dropped ones.

    `filtered_offsets` ascending; `filtered` is their number.
    """

    batch: pa.RecordBatch
    rejected: tuple[Rejected, ...]
    filtered_offsets: tuple[int, ...] = ()

    @property
    def filtered(self) -> int:
        return len(self.filtered_offsets)


class IngestPlan:
    """Immutable and cheap to share between threads. Make one with `compile_ingest`."""

    @property
    def block_schema(self) -> pa.Schema:
        """`$offset` int64, `$subRow` int32, `$ingestionTime` int64 (nullable), the table's columns in schema order, then
        `$isNull.<column>` bool for every column when null handling is on."""
        raise NotImplementedError

    def run(self, batch: MessageBatch) -> Ingested:
        raise NotImplementedError


def compile_ingest(schema: Schema, config: TableConfig) -> IngestPlan:
    """Raises InvalidConfig for transforms and filters that this version cannot run."""
    raise NotImplementedError
