# SPDX-License-Identifier: Apache-2.0
"""The seed of a key coordinator's state: the table itself, read through brokers as of the committed epoch C.

    a task's pages (partition, [first, next) of offsets)
    -> SELECT keys, comparison columns, location, $validFrom  asOfEpoch = C, tombstones too, as an Arrow answer
    -> candidates under the epochs in which the rows came into force, so that nothing is written for them

Rules
- An answer that is not whole, or not of epoch C, is no answer: it is asked again, then the seed fails, and with it the
  start of the query, which begins anew. Ingestion waits meanwhile, queries go on, and C stays what it is.
- Tombstones come along: without them deleted keys would come back with the next late row.
- What expired (TTL) is left out, and DELETEd in the seed's own epoch; the bounds are part of the plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.epoch.records import DELETE
from cremant.ingest.candidates import Candidates
from cremant.model import names
from cremant.model.cluster import TableRecord
from cremant.model.errors import InvariantViolation, Unavailable
from cremant.model.limits import ANSWER_ROWS_MAX, SEED_PAGE_DEADLINE_MS
from cremant.model.schema import ARROW_TYPES, FieldSpec
from cremant.pipeline import worker
from cremant.pipeline.coordinator import packed, report_row
from cremant.pipeline.plan import EpochPlan, SeedPlan, SeedShare
from cremant.pipeline.reports import TaskReport
from cremant.pipeline.spec import RunSpec
from cremant.pipeline.task import giving_up_loudly, task_index
from cremant.pipeline.updates import Updates, append_updates
from cremant.segment.versions import deleted_rows

#: Offsets of one page: some 30 MB of keys and locations.
PAGE_OFFSETS = 500_000
_PAUSE_S = 0.5
_ARROW = "application/vnd.apache.arrow.stream"
_METADATA = b"cremant.response"


def run_seed(spec: RunSpec, shares: Sequence[SeedShare], batch_id: int, plan: EpochPlan) -> Iterator[pa.RecordBatch]:
    """What the tasks of a seed hand to the coordinator."""
    assert plan.seed is not None
    assert spec.state_partitions is not None
    with giving_up_loudly(spec):
        record = worker.table_at(spec, plan.config_version).record
        assert record.config.upsert is not None
        candidates = Candidates(record.table_schema, record.config.upsert)
        epoch, acks = spec.epoch_of(batch_id), list[tuple[int, int]]()
        with Brokers(spec.brokers) as brokers:
            for share in shares:
                rows = read_page(brokers, record, plan.seed, share)
                rows, expired = without_expired(rows, record, plan.seed)
                acks += append_updates(spec, worker.epoch_log_of(spec), epoch, deletes(expired, share.partition))
                candidates.add(
                    rows.drop_columns([names.VALID_FROM]), share.partition,
                    epoch if plan.seed.all_rows else rows.column(names.VALID_FROM).to_numpy(),
                )  # fmt: skip
                if not plan.seed.all_rows:  # rows in force are of different keys, and need not wait for each other
                    yield packed(candidates.finish(), spec.state_partitions)
        yield report_row(task_index(), TaskReport(updates=acks), spec.state_partitions)
        yield packed(candidates.finish(), spec.state_partitions)


class Brokers:
    """Asks one broker after the other until one gives a whole answer."""

    def __init__(self, urls: Sequence[str], *, deadline_ms: int = SEED_PAGE_DEADLINE_MS) -> None:
        self._urls = list(urls)
        self._deadline_ms = deadline_ms
        self._http = httpx.Client(timeout=deadline_ms / 1000, trust_env=False)

    def __enter__(self) -> Brokers:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, sql: str, epoch: int) -> pa.Table:
        """Raises Unavailable with the last reason."""
        until_s = time.monotonic() + self._deadline_ms / 1000
        reason = "no broker is alive"
        while True:
            for url in self._urls:
                try:
                    return self._answer(url, sql, epoch)
                except (httpx.HTTPError, pa.ArrowInvalid, _NotWhole) as error:
                    reason = f"{url}: {error}"
            if time.monotonic() >= until_s:
                raise Unavailable(
                    f"the key coordinator's state cannot be rebuilt, the rows in force at epoch {epoch} cannot be "
                    f"read: {reason}",
                    hint="it is tried again; queries of the table must be answered whole for it",
                )
            time.sleep(_PAUSE_S)

    def _answer(self, url: str, sql: str, epoch: int) -> pa.Table:
        response = self._http.post(f"{url}/query/sql", json={"sql": sql}, headers={"Accept": _ARROW})
        response.raise_for_status()
        if not response.headers.get("content-type", "").startswith(_ARROW):
            raise _NotWhole(response.text[:500])
        table = pa.ipc.open_stream(response.content).read_all()
        told = msgspec.json.decode((table.schema.metadata or {}).get(_METADATA, b"{}"))
        if told.get("exceptions") or told.get("partialResult"):
            raise _NotWhole(f"a partial answer: {str(told.get('exceptions'))[:300]}")
        # Where no part of the table can match, nobody was asked, and the answer is of no epoch.
        if told.get("epoch") != epoch and (told.get("epoch") is not None or table.num_rows):
            raise _NotWhole(f"an answer of epoch {told.get('epoch')}, asked for {epoch}")
        if table.num_rows >= ANSWER_ROWS_MAX:
            raise _NotWhole(f"{table.num_rows} rows are more than an answer may have")
        return table


class _NotWhole(Exception):
    """What was answered is not all that was asked for."""


def page_sql(record: TableRecord, seed: SeedPlan, share: SeedShare) -> str:
    """The query of one page."""
    assert record.config.upsert is not None
    schema = record.table_schema
    wanted = dict.fromkeys(
        (*schema.primary_key_columns, *record.config.upsert.comparison_columns, *_delete_column(record))
    )
    columns = ", ".join(f'"{name}"' for name in (*wanted, names.OFFSET, names.SUB_ROW, names.VALID_FROM))
    return (
        f"SET asOfEpoch = {seed.epoch}; SET {'skipUpsert' if seed.all_rows else 'skipUpsertDelete'} = true; "
        f"SET enableNullHandling = {str(_null_handling(record)).lower()}; SET timeoutMs = {SEED_PAGE_DEADLINE_MS}; "
        f'SELECT {columns} FROM "{record.config.name}" WHERE "{names.PARTITION}" = {share.partition} '
        f'AND "{names.OFFSET}" >= {share.first} AND "{names.OFFSET}" < {share.next} LIMIT {ANSWER_ROWS_MAX}'
    )


def read_page(brokers: Brokers, record: TableRecord, seed: SeedPlan, share: SeedShare) -> pa.RecordBatch:
    """Rows of a page in their stored form, with `$validFrom`. Raises Unavailable, InvariantViolation (a row in force
    that never came into force)."""
    table = brokers.ask(page_sql(record, seed, share), seed.epoch).combine_chunks()
    arrays: dict[str, Any] = {}
    for name in table.column_names:
        column = _whole(table.column(name))
        field = record.table_schema.field(name)
        if field is not None:
            arrays.update(_stored(field, column, nulls=_null_handling(record)))
        else:
            arrays[name] = column.cast(pa.int32() if name == names.SUB_ROW else pa.int64())
    since = arrays[names.VALID_FROM]
    if not seed.all_rows and len(since) and (since.null_count or not _all_between(since, 1, seed.epoch)):
        raise InvariantViolation(
            "U-1",
            f"table {record.config.name}, partition {share.partition}: a row in force at epoch {seed.epoch} does not "
            "say since when",
        )  # fmt: skip
    return pa.RecordBatch.from_pydict(arrays)


def _all_between(values: pa.Array, least: int, most: int) -> bool:
    found = pc.min_max(values).as_py()
    return bool(least <= found["min"] and found["max"] <= most)


def without_expired(rows: pa.RecordBatch, record: TableRecord, seed: SeedPlan) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """(what stays, what expired)."""
    upsert = record.config.upsert
    assert upsert is not None
    if seed.expired_below is None and seed.deleted_below is None:
        return rows, rows.slice(0, 0)
    # Not Arrow's cast, which refuses whole numbers that a double cannot hold exactly (nanoseconds).
    values = rows.column(upsert.comparison_columns[0]).to_numpy(zero_copy_only=False).astype(np.float64)
    expired = np.zeros(len(values), dtype=bool)
    if seed.expired_below is not None:
        expired |= values < seed.expired_below
    if seed.deleted_below is not None and (deleted := deleted_rows(rows, upsert.delete_column)) is not None:
        expired |= deleted & (values < seed.deleted_below)
    return rows.filter(pa.array(~expired)), rows.filter(pa.array(expired))


def deletes(rows: pa.RecordBatch, partition: int) -> Updates:
    count = rows.num_rows
    return Updates(
        np.full(count, partition, np.int64), rows.column(names.OFFSET).to_numpy(),
        rows.column(names.SUB_ROW).to_numpy(), np.full(count, DELETE, np.int8),
    )  # fmt: skip


def _delete_column(record: TableRecord) -> tuple[str, ...]:
    upsert = record.config.upsert
    return (upsert.delete_column,) if upsert is not None and upsert.delete_column is not None else ()


def _null_handling(record: TableRecord) -> bool:
    return record.config.null_handling or record.table_schema.enable_column_based_null_handling


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def _stored(field: FieldSpec, column: pa.Array, *, nulls: bool) -> dict[str, pa.Array]:
    """A column of an answer in its stored form, and beside it which cells are null."""
    wanted = ARROW_TYPES[field.data_type]
    stored = {field.name: column.cast(wanted).fill_null(pa.scalar(field.default, wanted))}
    if nulls:
        stored[f"{names.IS_NULL_PREFIX}{field.name}"] = column.is_null()
    return stored
