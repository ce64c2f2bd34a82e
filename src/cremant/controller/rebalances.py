# SPDX-License-Identifier: Apache-2.0
"""Rebalance jobs: carries out `cluster.rebalance` step by step.

Rules
- The job record holds where to; how far it is stands in the replicas of partitions and segments. So a controller that
  restarts at any step goes on, and a step that was computed from old records fails its compare-and-set and is repeated.
- One job per table. A server of the target that stays away is replaced by others; a job without progress fails after a
  while, and leaves what is served served: replicas gained so far stay until the next rebalance.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from cremant.cluster.placement import NotEnoughServers, load_of
from cremant.cluster.rebalance import Replicas, Step, Unit, able_tails, gone_servers, next_step, plan_target
from cremant.cluster.states import replica_state
from cremant.controller.catalog import Catalog, Record
from cremant.controller.clock import Clock
from cremant.controller.instances import Instances
from cremant.controller.jobs import new_job_id, running_rebalance, write_job
from cremant.model.cluster import TableRecord, partition_key, segment_key, table_key
from cremant.model.errors import Conflict, NotFound
from cremant.model.jobs import JobStatus, RebalanceJob
from cremant.model.limits import REBALANCE_AWAY_MS, REBALANCE_STALL_MS
from cremant.model.segments import ReplicaState, SegmentStatus, StoreState
from cremant.shell.logs import log_event

_log = logging.getLogger(__name__)

BALANCED = "Table is already balanced"
#: Kinds of units in keys: a partition's tail, a sealed segment.
_TAIL, _SEGMENT = "tail", "segment"


def tail_unit(partition: int) -> str:
    return f"{_TAIL}/{partition:05d}"


def segment_unit(segment: str) -> str:
    return f"{_SEGMENT}/{segment}"


@dataclass(frozen=True, slots=True)
class Options:
    include_consuming: bool = True
    downtime: bool = False
    bootstrap: bool = False
    stall_ms: int = REBALANCE_STALL_MS


@dataclass(slots=True)
class _Progress:
    """Volatile: what a job waited for last, since when; since when servers of its target are away."""

    awaited: dict[str, frozenset[str]]
    moved_at_ms: int
    away_since_ms: dict[str, int]


class Rebalances:
    """Guarded by the catalog's lock."""

    def __init__(self, catalog: Catalog, instances: Instances, clock: Clock) -> None:
        self._catalog = catalog
        self._instances = instances
        self._clock = clock
        self._progress: dict[str, _Progress] = {}
        #: Called when a job may be stepped at once.
        self.on_started: Callable[[], None] = lambda: None

    # --- asking ---------------------------------------------------------------------------------------------------

    def plan(self, name: str, options: Options) -> RebalanceJob:
        """The job as it would run; nothing is written. Raises NotFound; a plan that cannot be made is FAILED."""
        with self._catalog.lock:
            record = self._catalog.tables.get(name)
            if record is None:
                raise NotFound(f"Table {name}_REALTIME not found!")
            now_ms = self._clock.now_ms()
            job = RebalanceJob(
                job_id=new_job_id(), table=name, incarnation=record.incarnation, target={}, units=0, started_ms=now_ms,
                include_consuming=options.include_consuming, downtime=options.downtime, stall_ms=options.stall_ms,
            )  # fmt: skip
            try:
                target = self._target(record, bootstrap=options.bootstrap)
            except NotEnoughServers as error:
                return msgspec.structs.replace(job, status=JobStatus.FAILED, description=str(error), ended_ms=now_ms)
            job = msgspec.structs.replace(job, target=target)
            moving = sum(not unit.settled for unit in self.units(job).values())
            if not moving:
                return msgspec.structs.replace(job, status=JobStatus.NO_OP, description=BALANCED, ended_ms=now_ms)
            text = f"In progress: {moving} segments move. GET /rebalanceStatus/{job.job_id} says how far it is"
            return msgspec.structs.replace(job, units=moving, description=text)

    def start(self, name: str, options: Options) -> RebalanceJob:
        """Plans and begins. Raises NotFound, Conflict (one runs already)."""
        with self._catalog.lock:
            running = running_rebalance(self._catalog, name)
            if running is not None:
                raise Conflict(
                    f"Table {name}_REALTIME is already being rebalanced by job {running.job_id}",
                    hint="wait for it, or cancel it with DELETE /tables/{table}/rebalance",
                )
            job = self.plan(name, options)
            write_job(self._catalog, job)
        log_event(
            _log, "rebalance asked for", table=name, job=job.job_id, status=str(job.status), units=job.units,
            description=job.description,
        )  # fmt: skip
        self.on_started()
        return job

    def cancel(self, name: str) -> list[str]:
        """Ids of the jobs that were stopped. Replicas gained so far stay."""
        with self._catalog.lock:
            if name not in self._catalog.tables:
                raise NotFound(f"Table {name}_REALTIME not found!")
            job = running_rebalance(self._catalog, name)
            if job is None:
                return []
            self._end(job, JobStatus.CANCELLED, "Cancelled by request; the next rebalance goes on from here")
            return [job.job_id]

    def _target(self, record: TableRecord, *, bootstrap: bool = False) -> dict[int, Replicas]:
        name = record.config.name
        own = self._catalog.partitions.get(name, {})
        others = [p for table, known in self._catalog.partitions.items() if table != name for p in known.values()]
        current: dict[int, Replicas] = {p: () if bootstrap else known.replicas for p, known in own.items()}
        return plan_target(current, record.config.replication, self._instances.usable(), load_of(others))

    # --- going there ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """One step of every running job."""
        with self._catalog.lock:
            running = [job for name in sorted(self._catalog.jobs) if (job := running_rebalance(self._catalog, name))]
            for job in running:
                self._run(job)

    def _run(self, job: RebalanceJob) -> None:
        now_ms = self._clock.now_ms()
        progress = self._progress.setdefault(job.job_id, _Progress({}, now_ms, {}))
        job = self._replanned(job, progress, now_ms)
        step = next_step(self.units(job), downtime=job.downtime)
        if step.done:
            self._end(job, JobStatus.DONE, "Success: every segment is on its target servers")
            return
        if step.changes:
            self._apply(job, step)
        if step.changes or step.awaited != progress.awaited:
            progress.awaited, progress.moved_at_ms = step.awaited, now_ms
        elif now_ms - progress.moved_at_ms > job.stall_ms:
            self._end(job, JobStatus.FAILED, f"no progress for {job.stall_ms} ms: {describe_awaited(step.awaited)}")

    def units(self, job: RebalanceJob) -> dict[str, Unit]:
        """Everything of the table that the job moves, as it is now. The lock is held."""
        partitions = self._catalog.partitions.get(job.table, {})
        segments = self._catalog.segments.get(job.table, {})
        tails = self._instances.tails(job.table, job.incarnation)
        units: dict[str, Unit] = {}
        for number, target in job.target.items():
            record = partitions.get(number)
            if record is None or not job.include_consuming:
                continue
            opened = segments[record.consuming]
            committing = opened.status is SegmentStatus.COMMITTING and opened.committer is not None
            pinned = [opened.committer] if committing and self._instances.is_alive(opened.committer or "") else []
            able = able_tails(tails.get(str(number), {}))
            units[tail_unit(number)] = Unit(record.replicas, target, able, frozenset(s for s in pinned if s))
        verified = self._verified(job.table)
        for segment in segments.values():
            goal = job.target.get(segment.partition)
            if segment.status is SegmentStatus.DONE and goal is not None:
                # Who is no replica may say that it has it, and be deleting it: only a recorded copy counts.
                able = frozenset(verified.get(segment.name, ())) & segment.copies.keys()
                stored = segment.store_state is StoreState.STORED
                sole = frozenset() if stored else frozenset(segment.copies)
                units[segment_unit(segment.name)] = Unit(segment.replicas, goal, able, sole=sole)
        return units

    def _verified(self, table: str) -> dict[str, set[str]]:
        """Segment -> live servers that serve it from verified bytes; who serves it from a tail has no copy yet."""
        segments = self._catalog.segments.get(table, {})
        online: dict[str, set[str]] = {}
        for instance, report in self._instances.reports().items():
            for said in report.segments:
                if said.table != table or (metadata := segments.get(said.segment)) is None:
                    continue
                if said.checksum is not None and replica_state(metadata, said) is ReplicaState.ONLINE:
                    online.setdefault(said.segment, set()).add(instance)
        return online

    def _apply(self, job: RebalanceJob, step: Step) -> None:
        changes: dict[str, Record | None] = {}
        for key, replicas in step.changes.items():
            kind, _, name = key.partition("/")
            if kind == _SEGMENT:
                segment = self._catalog.segments[job.table][name]
                # Who gives a segment up deletes it: its copy counts no more.
                copies = {holder: copy for holder, copy in segment.copies.items() if holder in replicas}
                changes[segment_key(job.table, name)] = msgspec.structs.replace(
                    segment, replicas=replicas, copies=copies
                )
                continue
            record = self._catalog.partitions[job.table][int(name)]
            opened = self._catalog.segments[job.table][record.consuming]
            changes[partition_key(job.table, record.partition)] = msgspec.structs.replace(record, replicas=replicas)
            changes[segment_key(job.table, opened.name)] = msgspec.structs.replace(opened, replicas=replicas)
        self._catalog.commit(changes, unchanged=[table_key(job.table)])
        log_event(_log, "rebalance step", table=job.table, job=job.job_id, units=len(step.changes))

    def _replanned(self, job: RebalanceJob, progress: _Progress, now_ms: int) -> RebalanceJob:
        """With another target when a server of this one stays away and there are others."""
        gone = gone_servers(job.target, self._instances.usable())
        progress.away_since_ms = {server: progress.away_since_ms.get(server, now_ms) for server in gone}
        if not any(now_ms - since_ms > REBALANCE_AWAY_MS for since_ms in progress.away_since_ms.values()):
            return job
        try:
            target = self._target(self._catalog.tables[job.table])
        except NotEnoughServers:
            return job  # nobody to take over; the job goes on waiting, and fails when it stalls
        changed = msgspec.structs.replace(job, target=target, replanned=job.replanned + 1)
        write_job(self._catalog, changed)
        progress.away_since_ms, progress.moved_at_ms = {}, now_ms
        log_event(_log, "rebalance planned again", table=job.table, job=job.job_id, gone=sorted(gone))
        return changed

    def _end(self, job: RebalanceJob, status: JobStatus, description: str) -> None:
        now_ms = self._clock.now_ms()
        write_job(self._catalog, msgspec.structs.replace(job, status=status, description=description, ended_ms=now_ms))
        self._progress.pop(job.job_id, None)
        log_event(_log, "rebalance ended", table=job.table, job=job.job_id, status=str(status), description=description)


def describe_awaited(awaited: Mapping[str, frozenset[str]], *, shown: int = 5) -> str:
    """For people: which segment waits for which server."""
    named = [f"{key} for {', '.join(sorted(servers))}" for key, servers in sorted(awaited.items())[:shown]]
    more = f" and {len(awaited) - shown} more" if len(awaited) > shown else ""
    return f"waiting: {'; '.join(named)}{more}" if named else "nothing is waited for"
