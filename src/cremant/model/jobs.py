# SPDX-License-Identifier: Apache-2.0
"""Jobs: what an operator asked for and the controller carries out over time. Durable, so that a restart goes on."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class JobStatus(StrEnum):
    """Pinot's words (RebalanceResult.Status)."""

    NO_OP = "NO_OP"
    IN_PROGRESS = "IN_PROGRESS"
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class RebalanceJob(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag="rebalance"):
    """`target`: servers per partition. Progress is not kept here: it is in the replicas of the records."""

    job_id: str
    table: str
    incarnation: str
    target: dict[int, tuple[str, ...]]
    status: JobStatus = JobStatus.IN_PROGRESS
    description: str = ""
    include_consuming: bool = True
    downtime: bool = False
    #: Without progress for this long it has failed.
    stall_ms: int
    #: Units that had to move when it began.
    units: int
    started_ms: int
    ended_ms: int = 0
    #: How often servers of the target were gone and others were chosen.
    replanned: int = 0


class ForceCommitJob(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag="forceCommit"):
    """Open segments that were asked to end, and the offset per partition up to which rows are to be sealed. How far it
    is stands in the segments."""

    job_id: str
    table: str
    incarnation: str
    segments: tuple[str, ...]
    until: dict[int, int] = {}
    started_ms: int


Job = RebalanceJob | ForceCommitJob


def job_key(raw_name: str, job_id: str) -> str:
    return f"/jobs/{raw_name}/{job_id}"
