# SPDX-License-Identifier: Apache-2.0
"""Jobs in the catalog: found by id, and the oldest ended ones of a table forgotten.

Under the catalog's lock, as everything that decides and then commits.
"""

from __future__ import annotations

import uuid

from cremant.controller.catalog import Catalog, Record
from cremant.model.errors import NotFound
from cremant.model.jobs import Job, JobStatus, RebalanceJob, job_key
from cremant.model.limits import JOBS_KEPT_MAX


def new_job_id() -> str:
    return str(uuid.uuid4())


def find_job(catalog: Catalog, job_id: str) -> Job | None:
    with catalog.lock:
        for jobs in catalog.jobs.values():
            if job_id in jobs:
                return jobs[job_id]
    return None


def running_rebalance(catalog: Catalog, table: str) -> RebalanceJob | None:
    for job in catalog.jobs.get(table, {}).values():
        if isinstance(job, RebalanceJob) and job.status is JobStatus.IN_PROGRESS:
            return job
    return None


def write_job(catalog: Catalog, job: Job, further: dict[str, Record | None] | None = None) -> None:
    """Writes a job, with `further` changes, and forgets the oldest ended ones of its table. The lock is held."""
    if job.table not in catalog.tables:
        raise NotFound(f"Table {job.table}_REALTIME not found!")
    changes: dict[str, Record | None] = {**(further or {}), job_key(job.table, job.job_id): job}
    ended = [
        known
        for known in catalog.jobs.get(job.table, {}).values()
        if known.job_id != job.job_id
        and not (isinstance(known, RebalanceJob) and known.status is JobStatus.IN_PROGRESS)
    ]
    ended.sort(key=lambda known: known.started_ms)
    for known in ended[: max(0, len(ended) - JOBS_KEPT_MAX + 1)]:
        changes[job_key(known.table, known.job_id)] = None
    catalog.commit(changes)


def dropped_jobs(catalog: Catalog, table: str) -> dict[str, Record | None]:
    """Changes that remove all jobs of a table."""
    return {job_key(table, job_id): None for job_id in catalog.jobs.get(table, {})}
