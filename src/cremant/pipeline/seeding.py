# SPDX-License-Identifier: Apache-2.0
"""Whether a start must make the key coordinator's state from the table itself, and how (the work: rebuild.py).

A fresh checkpoint of an upsert table holds no keys. Before the first epoch there are none; later every one of them
would be lost, so the first batch is a seed. A table whose keys begin after the committed epoch was an append table, or
is one again after a rewind: all of its rows are to be looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cremant.epoch.protocol import RunPlan
from cremant.model.cluster import TableRecord, TableView
from cremant.model.errors import Unavailable
from cremant.model.timeformat import parse_time_format
from cremant.model.upsert import UpsertConfig
from cremant.pipeline.plan import SeedPlan
from cremant.pipeline.rebuild import Brokers
from cremant.segment.stats import time_unit_ms


class Seeding(msgspec.Struct, frozen=True):
    """`firsts`: per partition of the run the lowest stream offset that the table has; the seed ends at the run's start.
    `brokers`: who answers queries."""

    seed: SeedPlan
    firsts: tuple[int, ...]
    brokers: tuple[str, ...]


def needs_seed(record: TableRecord, plan: RunPlan) -> bool:
    return record.config.upsert is not None and plan.fresh and plan.previous > 0


def plan_seed(
    table: TableView, plan: RunPlan, keyed_from: int | None, brokers: Sequence[str], *,
    expire_before_ms: int | None = None,
) -> Seeding:  # fmt: skip
    """`keyed_from`: the epoch that gave the table its keys, as far as is known. `expire_before_ms`: where the table's
    retention begins, if that is the TTL of keys. Raises Unavailable: there is no broker, or none tells how far the
    comparison column goes, where a TTL is measured by it."""
    upsert = table.record.config.upsert
    assert upsert is not None
    if not brokers:
        raise Unavailable(
            f"table {table.name}: its keys are to be rebuilt, and no broker is alive",
            hint="the rows in force are read through a broker; it is tried again",
        )
    all_rows = keyed_from is None or keyed_from > plan.previous
    seed = SeedPlan(epoch=plan.previous, all_rows=all_rows)
    if not all_rows and expire_before_ms is not None:
        seed = _with_retention(seed, table.record, expire_before_ms)
    if not all_rows and (upsert.ttl is not None or upsert.deleted_ttl is not None):
        seed = _with_bounds(seed, _newest(table.record, upsert, plan.previous, brokers), upsert)
    return Seeding(seed, first_offsets(table, plan.start), tuple(brokers))


def first_offsets(table: TableView, starts: Sequence[int]) -> tuple[int, ...]:
    """Per partition the lowest offset of a row that the table may have; `starts`: where the run goes on."""
    firsts = list(starts)
    for partition in table.partitions[: len(firsts)]:
        number = partition.record.partition
        firsts[number] = min(firsts[number], partition.consuming.start_offset)
    for segment in table.segments:
        if segment.partition < len(firsts):
            firsts[segment.partition] = min(firsts[segment.partition], segment.start_offset)
    return tuple(firsts)


def _newest(record: TableRecord, upsert: UpsertConfig, epoch: int, brokers: Sequence[str]) -> float | None:
    sql = (
        f"SET asOfEpoch = {epoch}; SET skipUpsertDelete = true; "
        f'SELECT COUNT(*), MAX("{upsert.comparison_columns[0]}") FROM "{record.config.name}"'
    )
    with Brokers(brokers) as asked:
        answer = asked.ask(sql, epoch)
    if not answer.num_rows or not answer.column(0)[0].as_py():
        return None
    return float(answer.column(1)[0].as_py())


def _with_retention(seed: SeedPlan, record: TableRecord, before_ms: int) -> SeedPlan:
    field = record.table_schema.field(record.config.time_column)
    assert field is not None
    assert field.format is not None
    # As of segments: a TIMESTAMP is stored in ms, whatever its format says of the stream.
    unit_ms = time_unit_ms(field) or parse_time_format(field.format, field.name).size_ms
    below = before_ms / float(unit_ms)
    return msgspec.structs.replace(seed, expired_below=below, deleted_below=below)


def _with_bounds(seed: SeedPlan, newest: float | None, upsert: UpsertConfig) -> SeedPlan:
    if newest is None:
        return seed
    deleted_ttl = upsert.deleted_ttl if upsert.deleted_ttl is not None else upsert.ttl
    return msgspec.structs.replace(
        seed,
        expired_below=seed.expired_below if upsert.ttl is None else newest - upsert.ttl,
        deleted_below=seed.deleted_below if deleted_ttl is None else newest - deleted_ttl,
    )
