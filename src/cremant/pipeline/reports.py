# SPDX-License-Identifier: Apache-2.0
"""What tasks tell the driver of what they appended: the acknowledgements that an epoch is closed with."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from cremant.epoch.close import BlockAck, GapAck, UpdateAck
from cremant.model.offsets import OffsetRange


class Report(NamedTuple):
    """One appended block or gap: a row of `task.REPORT_SCHEMA`. `causes`: JSON object cause -> count of rejected."""

    partition: int
    first: int
    next: int
    rows: int
    rejected: int
    filtered: int
    max_ingestion_ms: int | None
    causes: str
    gap: bool


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """What a block says of the messages it covers, beside their rows (`RowBlock`). `causes`: why how many of them were
    rejected."""

    causes: dict[str, int] = {}
    filtered: int = 0
    timestamp_type: str
    max_ingestion_ms: int | None = None
    rejected_from_ms: int | None = None

    @property
    def rejected(self) -> int:
        return sum(self.causes.values())


class TaskReport(msgspec.Struct, frozen=True, array_like=True):
    """What one task appended, as it travels through the coordinator of an upsert table: row blocks and gaps, and per
    update block (partition, updates). And what a partition of the coordinator's state has grown to."""

    blocks: list[Report] = []
    updates: list[tuple[int, int]] = []
    keys: int = 0
    state_bytes: int = 0


class Outcome(NamedTuple):
    """All that was appended in a batch."""

    reports: list[Report]
    updates: tuple[UpdateAck, ...] = ()
    #: The coordinator's state after it: keys, and bytes of its files and memory.
    keys: int = 0
    state_bytes: int = 0

    @property
    def blocks(self) -> tuple[BlockAck, ...]:
        return tuple(
            BlockAck(
                partition=report.partition, range=OffsetRange(report.first, report.next), rows=report.rows,
                rejected=report.rejected, filtered=report.filtered, max_ingestion_ms=report.max_ingestion_ms,
            )
            for report in self.reports
            if not report.gap
        )  # fmt: skip

    @property
    def gaps(self) -> tuple[GapAck, ...]:
        return tuple(
            GapAck(partition=report.partition, range=OffsetRange(report.first, report.next))
            for report in self.reports
            if report.gap
        )


def outcome_of(rows: list[tuple[object, ...]], *, upsert: bool) -> Outcome:
    """What the one action of a batch answered: rows of `task.REPORT_SCHEMA`, of an upsert table a
    `TaskReport` in each."""
    if not upsert:
        return Outcome([Report(*row) for row in rows])  # type: ignore[arg-type]  # Spark keeps to the schema
    found = [msgspec.json.decode(bytes(text), type=TaskReport) for (text,) in rows]  # type: ignore[call-overload]
    return Outcome(
        [report for task in found for report in task.blocks],
        tuple(UpdateAck(partition=partition, updates=count) for task in found for partition, count in task.updates),
        sum(task.keys for task in found), sum(task.state_bytes for task in found),
    )  # fmt: skip
