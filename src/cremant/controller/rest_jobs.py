# SPDX-License-Identifier: Apache-2.0
"""REST of jobs: rebalance and force commit, as Pinot's."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from cremant.cluster.rebalance import able_tails
from cremant.controller.core import Controller
from cremant.controller.http import answering, flag, integer, listed, table_record
from cremant.controller.jobs import find_job
from cremant.controller.rebalance_summary import Moved, rebalance_result
from cremant.controller.rebalances import Options, segment_unit, tail_unit
from cremant.model.errors import NotFound, UserError
from cremant.model.jobs import ForceCommitJob, JobStatus, RebalanceJob
from cremant.model.limits import REBALANCE_STALL_MS
from cremant.model.names import REALTIME_SUFFIX
from cremant.model.segments import SegmentStatus


class JobRest:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._catalog = controller.catalog

    def routes(self) -> list[BaseRoute]:
        get, post = ["GET"], ["POST"]
        return [
            Route("/tables/{table}/rebalance", answering(self.rebalance), methods=post),
            Route("/tables/{table}/rebalance", answering(self.cancel_rebalance), methods=["DELETE"]),
            Route("/rebalanceStatus/{job}", answering(self.rebalance_status), methods=get),
            Route("/tables/{table}/forceCommit", answering(self.force_commit), methods=post),
            Route("/tables/forceCommitStatus/{job}", answering(self.force_commit_status), methods=get),
        ]

    # --- rebalance ------------------------------------------------------------------------------------------------

    def rebalance(self, request: Request) -> dict[str, Any]:
        name, rebalances = self._table(request), self._controller.rebalances
        # Never fewer able replicas than now: any number that a caller demands within the replication is kept.
        integer(request, "minAvailableReplicas", default=-1)
        options = Options(
            include_consuming=flag(request, "includeConsuming", default=True),
            downtime=flag(request, "downtime", default=False),
            bootstrap=flag(request, "bootstrap", default=False),
            stall_ms=integer(request, "externalViewStabilizationTimeoutInMs", default=REBALANCE_STALL_MS, at_least=1),
        )
        dry_run = flag(request, "dryRun", default=False)
        with self._catalog.lock:
            job = rebalances.plan(name, options)
            moved = self._moved(job)
            record = self._catalog.tables[name]
            if not dry_run:
                job = rebalances.start(name, options)
        result = rebalance_result(job, record, moved)
        if dry_run and job.status is JobStatus.IN_PROGRESS:
            result |= {"status": str(JobStatus.DONE), "description": "Dry-run mode"}
        return result

    def _moved(self, job: RebalanceJob) -> list[Moved]:
        units = self._controller.rebalances.units(job)
        partitions = {record.consuming: p for p, record in self._catalog.partitions.get(job.table, {}).items()}
        found = []
        now_ms = self._controller.clock.now_ms()
        tails = self._controller.instances.tails(job.table, job.incarnation)
        for name, segment in self._catalog.segments.get(job.table, {}).items():
            if segment.status is SegmentStatus.DONE and (unit := units.get(segment_unit(name))) is not None:
                found.append(Moved(name, False, unit, segment.size_bytes))
            elif name in partitions and (unit := units.get(tail_unit(partitions[name]))) is not None:
                reports = tails.get(str(segment.partition), {})
                newest = max((reports[server].watermark.next_offset for server in able_tails(reports)), default=0)
                found.append(
                    Moved(
                        name,
                        True,
                        unit,
                        0,
                        offsets_behind=max(0, newest - segment.start_offset),
                        age_minutes=max(0, now_ms - segment.created_ms) // 60_000,
                    )
                )
        return found

    def cancel_rebalance(self, request: Request) -> list[str]:
        return self._controller.rebalances.cancel(self._table(request))

    def rebalance_status(self, request: Request) -> dict[str, Any]:
        job = self._job(request, RebalanceJob, "rebalance")
        with self._catalog.lock:
            units = self._controller.rebalances.units(job) if job.status is JobStatus.IN_PROGRESS else {}
            now_ms = self._controller.clock.now_ms()
        left = {key: unit for key, unit in units.items() if not unit.settled}
        return {
            "tableRebalanceProgressStats": {
                "status": str(job.status),
                "startTimeMs": job.started_ms,
                "timeToFinishInSeconds": max(0, job.ended_ms - job.started_ms) // 1000 if job.ended_ms else 0,
                "completionStatusMsg": job.description if job.ended_ms else "",
                "rebalanceProgressStatsOverall": {
                    "totalSegmentsToBeMoved": job.units,
                    "totalRemainingSegmentsToBeMoved": len(left),
                    "percentageRemainingSegmentsToBeMoved": 100.0 * len(left) / job.units if job.units else 0.0,
                },
            },
            "timeElapsedSinceStartInSeconds": max(0, (job.ended_ms or now_ms) - job.started_ms) // 1000,
            "jobId": job.job_id,
            "tableName": job.table + REALTIME_SUFFIX,
            "description": job.description,
            "plannedAgain": job.replanned,
            "waitingFor": {key: sorted(unit.awaited) for key, unit in sorted(left.items()) if unit.awaited},
        }

    # --- force commit ---------------------------------------------------------------------------------------------

    def force_commit(self, request: Request) -> dict[str, str]:
        name = self._table(request)
        partitions = [_partition(text) for text in listed(request, "partitions")]
        segments = listed(request, "segments")
        if partitions and segments:
            raise UserError("Cannot specify both partitions and segments to commit", hint="leave one of them out")
        job = self._controller.force_commits.start(name, partitions=partitions, segments=segments)
        return {
            "forceCommitJobId": job.job_id,
            "forceCommitStatus": "SUCCESS",
            "jobMetaZKWriteStatus": "SUCCESS",
        }

    def force_commit_status(self, request: Request) -> dict[str, Any]:
        job = self._job(request, ForceCommitJob, "force commit")
        left = self._controller.force_commits.unfinished(job)
        return {
            "jobId": job.job_id,
            "tableName": job.table + REALTIME_SUFFIX,
            "jobType": "FORCE_COMMIT",
            "submissionTimeMs": str(job.started_ms),
            "segmentsForceCommitted": list(job.segments),
            "segmentsYetToBeCommitted": left,
            "numberOfSegmentsYetToBeCommitted": len(left),
        }

    # --- lookups --------------------------------------------------------------------------------------------------

    def _table(self, request: Request) -> str:
        return table_record(request, self._catalog, "Table {0}_REALTIME not found!").config.name

    def _job(self, request: Request, kind: type[Any], words: str) -> Any:
        job = find_job(self._catalog, request.path_params["job"])
        if not isinstance(job, kind):
            raise NotFound(f"Failed to find {words} job id: {request.path_params['job']}")
        return job


def _partition(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"query parameter partitions: expected numbers, found {text[:40]!r}") from None
