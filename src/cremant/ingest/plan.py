# SPDX-License-Identifier: Apache-2.0
"""The ingest plan of a table: stream messages in, typed columns out. Compiled once per (schema, config), pure.

Row content is a function of the stream record and the config alone (rule E-2): no clock, no dice. A record that cannot
become a row is *rejected* with a cause and never stops the batch; a record that the filter drops is *filtered*.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from cremant.ingest.causes import SAMPLE_BYTES, BadValue, Cause
from cremant.ingest.cells import DEFAULT_MAX_LENGTH, Cells, finish_cells
from cremant.ingest.decode import ReadText, make_decoder
from cremant.ingest.messages import Decoded, Schemas, settle
from cremant.ingest.metadata import check_metadata, is_metadata, metadata_column
from cremant.ingest.transform import compile_derivation
from cremant.log.api import MessageBatch
from cremant.model import names
from cremant.model.errors import InvariantViolation
from cremant.model.limits import BLOCK_BYTES_MAX
from cremant.model.schema import Schema
from cremant.model.table import TableConfig
from cremant.model.upsert import NullKeyPolicy


def _none() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


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

    `filtered_offsets` ascending; `filtered` is their number. `offsets` ascending and `timestamps_ms` (NO_TIMESTAMP =
    none) are of all messages, those that became no row too; both int64.
    """

    batch: pa.RecordBatch
    rejected: tuple[Rejected, ...]
    filtered_offsets: tuple[int, ...] = ()
    offsets: np.ndarray = dataclasses.field(default_factory=_none, compare=False)
    timestamps_ms: np.ndarray = dataclasses.field(default_factory=_none, compare=False)

    @property
    def filtered(self) -> int:
        return len(self.filtered_offsets)


class IngestPlan:
    """Immutable and cheap to share between threads. Make one with `compile_ingest`."""

    def __init__(self, schema: Schema, config: TableConfig, read_text: ReadText | None) -> None:
        self._fields = schema.fields
        self._nulls = config.null_handling or schema.enable_column_based_null_handling
        keep_going = (config.raw_json.get("ingestionConfig") or {}).get("continueOnError") is True
        self._derivation = compile_derivation(schema, config, keep_going=keep_going)
        self._keep_going = keep_going
        self._columns = (*schema.fields, *self._derivation.sources)
        #: Columns that come from around the message, by their place among all columns.
        self._metadata = {at: field for at, field in enumerate(self._columns) if is_metadata(field.name)}
        for field in self._metadata.values():
            check_metadata(field.name, config.stream, f"column {field.name}")
        decoded = tuple(field for at, field in enumerate(self._columns) if at not in self._metadata)
        self._decoder = make_decoder(config.stream, decoded, keep_going=keep_going, read_text=read_text)
        self._block_schema = _block_schema(schema, with_nulls=self._nulls)
        #: Places of the key columns that must have a value.
        self._required = _required(schema, config)

    @property
    def block_schema(self) -> pa.Schema:
        """`$offset` int64, `$subRow` int32, `$ingestionTime` int64 (nullable), the table's columns in schema order,
        then `$isNull.<column>` bool for every column when null handling is on."""
        return self._block_schema

    def schema_ids(self, batch: MessageBatch) -> set[int]:
        """Ids of schemas that a registry must be asked for before these messages can be run."""
        return self._decoder.schema_ids(batch.values) if self._decoder is not None else set()

    def run(self, batch: MessageBatch, *, partition: int = 0, schemas: Schemas = MappingProxyType({})) -> Ingested:
        """All messages of `batch`: each becomes a row, a rejected record or a filtered one. Never raises for data.
        `schemas`: what the registry says of each of `schema_ids(batch)`."""
        if self._decoder is None:
            raise InvariantViolation("ingest", "a plan that was compiled without its files cannot run")
        decoded = self._decoder.decode(batch.values, schemas)
        if self._metadata:
            decoded = self._with_metadata(decoded, batch, partition)
        rejected = [_reject(batch, at, cause, detail) for at, cause, detail in decoded.bad]
        columns = decoded.columns
        kept = decoded.kept
        filtered: tuple[int, ...] = ()
        if not self._derivation.is_identity:
            derived = self._derivation.run(columns, len(kept))
            rejected.extend(
                _reject(batch, int(kept[at]), Cause.TRANSFORM_FAILED, detail) for at, detail in derived.failures
            )
            filtered = tuple(batch.offsets[kept[derived.dropped]].tolist())
            columns = derived.columns
            if derived.keep is not None:
                kept = kept[derived.keep]
        return self._finish(batch, columns, kept, rejected, filtered)

    def _with_metadata(self, decoded: Decoded, batch: MessageBatch, partition: int) -> Decoded:
        """Puts the columns that come from around the messages between the others."""
        given = iter(decoded.columns)
        columns: list[tuple[pa.Array, dict[int, BadValue]]] = [
            metadata_column(self._metadata[at], batch, decoded.kept, partition, keep_going=self._keep_going)
            if at in self._metadata
            else (next(given), {})
            for at in range(len(self._columns))
        ]
        kept, arrays = settle(self._columns, decoded.kept, columns, decoded.bad)
        return Decoded(arrays, kept, decoded.bad)

    def _finish(
        self,
        batch: MessageBatch,
        columns: list[pa.Array],
        kept: np.ndarray,
        rejected: list[Rejected],
        filtered: tuple[int, ...],
    ) -> Ingested:
        cells = [finish_cells(field, column) for field, column in zip(self._fields, columns, strict=False)]
        arrays = [
            pa.array(batch.offsets[kept], pa.int64()),
            pa.array(np.zeros(len(kept), dtype=np.int32)),
            _ingestion_times(batch.timestamps_ms[kept]),
            *(cell.array for cell in cells),
        ]
        if self._nulls:
            none_missing = pa.array(np.zeros(len(kept), dtype=bool))
            arrays.extend(none_missing if cell.missing is None else cell.missing for cell in cells)
        rows = pa.RecordBatch.from_arrays(arrays, schema=self._block_schema)
        failed = self._failed(batch, kept, cells, rejected)
        if failed is not None:
            rows = rows.filter(pa.array(~failed))
        if rows.nbytes > BLOCK_BYTES_MAX:
            rows = self._without_huge_rows(batch, rows, rejected)
        rejected.sort(key=lambda record: record.offset)
        return Ingested(rows, tuple(rejected), filtered, batch.offsets, batch.timestamps_ms)

    def _failed(
        self, batch: MessageBatch, kept: np.ndarray, cells: list[Cells], rejected: list[Rejected]
    ) -> np.ndarray | None:
        """Which rows have a value that is too long, or none where the table's key needs one; None if no row has. Says
        why in `rejected`."""
        failed: np.ndarray | None = None
        too_long = [cell.failed for cell in cells if cell.failed is not None]
        if too_long:
            failed = np.any(np.stack(too_long), axis=0)
            rejected.extend(
                _reject(batch, int(kept[at]), Cause.TOO_LONG, self._too_long_detail(cells, at))
                for at in np.flatnonzero(failed).tolist()
            )
        for at in self._required:
            missing = cells[at].missing
            if missing is None:
                continue
            null = missing.to_numpy(zero_copy_only=False)
            if failed is not None:
                null = null & ~failed
            detail = f"primary key column {self._fields[at].name} is null"
            rejected.extend(
                _reject(batch, int(kept[row]), Cause.NULL_KEY, detail) for row in np.flatnonzero(null).tolist()
            )
            failed = null if failed is None else failed | null
        return failed

    def _without_huge_rows(self, batch: MessageBatch, rows: pa.RecordBatch, rejected: list[Rejected]) -> pa.RecordBatch:
        """Transforms can make more of a message than a block may hold."""
        huge = _huge_rows(rows)
        if not huge:
            return rows
        offsets = rows.column(names.OFFSET).to_numpy()
        for row in huge:
            at = int(np.searchsorted(batch.offsets, offsets[row]))
            detail = f"a row of {rows.slice(row, 1).nbytes} bytes, at most {BLOCK_BYTES_MAX} are allowed"
            rejected.append(_reject(batch, at, Cause.TOO_LARGE, detail))
        fits = np.ones(rows.num_rows, dtype=bool)
        fits[huge] = False
        return rows.filter(pa.array(fits))

    def _too_long_detail(self, cells: list[Cells], at: int) -> str:
        for field, cell in zip(self._fields, cells, strict=True):
            if cell.failed is not None and cell.failed[at]:
                return f"column {field.name}: longer than maxLength {field.max_length or DEFAULT_MAX_LENGTH}"
        return ""


def _required(schema: Schema, config: TableConfig) -> tuple[int, ...]:
    if config.upsert is None or config.upsert.null_key is not NullKeyPolicy.REJECT:
        return ()
    return tuple(at for at, field in enumerate(schema.fields) if field.name in schema.primary_key_columns)


def _huge_rows(rows: pa.RecordBatch) -> list[int]:
    """Rows that are larger than a block, found by halving: few slices are measured, however many rows there are."""
    huge = []
    waiting = [(0, rows.num_rows)]
    while waiting:
        first, end = waiting.pop()
        if rows.slice(first, end - first).nbytes <= BLOCK_BYTES_MAX:
            continue
        if end - first == 1:
            huge.append(first)
        else:
            middle = (first + end) // 2
            waiting += [(first, middle), (middle, end)]
    return sorted(huge)


def _reject(batch: MessageBatch, at: int, cause: Cause, detail: str) -> Rejected:
    value = batch.values[at]
    sample = value.as_buffer()[:SAMPLE_BYTES].to_pybytes() if value.is_valid else b""
    return Rejected(int(batch.offsets[at]), cause.value, detail, sample)


def _ingestion_times(timestamps_ms: np.ndarray) -> pa.Array:
    """Null where the stream gave no time (negative)."""
    unknown = timestamps_ms < 0
    return pa.array(timestamps_ms, pa.int64(), mask=unknown if unknown.any() else None)


def _block_schema(schema: Schema, *, with_nulls: bool) -> pa.Schema:
    fields = [
        pa.field(names.OFFSET, pa.int64(), nullable=False),
        pa.field(names.SUB_ROW, pa.int32(), nullable=False),
        pa.field(names.INGESTION_TIME, pa.int64()),
        *schema.arrow_schema(),
    ]
    if with_nulls:
        fields += [pa.field(f"{names.IS_NULL_PREFIX}{spec.name}", pa.bool_(), nullable=False) for spec in schema.fields]
    return pa.schema(fields)


def compile_ingest(schema: Schema, config: TableConfig, read_text: ReadText | None = None) -> IngestPlan:
    """`read_text` reads files that the decoder's properties name; without it such a plan is only checked. Raises
    InvalidConfig for decoders, transforms and filters that this version cannot run."""
    return IngestPlan(schema, config, read_text)
