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


class TaskReport(msgspec.Struct, frozen=True, array_like=True):
    """What one task appended, as it travels among the candidates of an upsert table: row blocks and gaps, and per
    update block (partition, updates); only seeds of the key coordinator write such in their tasks."""

    blocks: list[Report]
    updates: list[tuple[int, int]] = []


class Outcome(NamedTuple):
    """All that was appended in a batch."""

    reports: list[Report]
    updates: tuple[UpdateAck, ...] = ()

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
    """What the one action of a batch answered: rows of `task.REPORT_SCHEMA`, of an upsert table those of
    `updates.OUTCOME_SCHEMA`."""
    if not upsert:
        return Outcome([Report(*row) for row in rows])  # type: ignore[arg-type]  # Spark keeps to the schema
    reports: list[Report] = []
    updates: list[tuple[int, int]] = []
    for partition, count, text in rows:
        if text is None:
            updates.append((partition, count))  # type: ignore[arg-type]
        else:
            found = msgspec.json.decode(bytes(text), type=TaskReport)  # type: ignore[call-overload]
            reports += found.blocks
            updates += found.updates
    return Outcome(reports, tuple(UpdateAck(partition=partition, updates=count) for partition, count in updates))
