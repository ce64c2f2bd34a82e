# SPDX-License-Identifier: Apache-2.0
"""Driver of segment completion on a server: looks at every segment that should be sealed here and is not, asks
`completion/replica.py` what to do next, and has it done (`server/steps.py`).

Rules: one step per segment at a time, and a fetch beside it. Builds have a thread of their own, one at a time (it costs
a core): first those that the cluster waits for, then who waits longest. Fetches and uploads have others, so who asks
the controller or commits waits for none of them; consumption and queries go on meanwhile. Looking at a segment never
waits, so none holds up another. Every failure is retried with backoff and starts from what the controller says then.
"""

from __future__ import annotations

import logging
import threading

from cremant.completion.replica import Sealing, Sight, StepKind
from cremant.model.errors import CremantError, NoResource, PeerError
from cremant.model.limits import FETCHES_RUNNING_MAX
from cremant.model.offsets import Position
from cremant.model.segments import SegmentMetadata, SegmentStatus
from cremant.segment.cuts import Cut
from cremant.server.fetching import SegmentFetcher
from cremant.server.files import ServerFiles
from cremant.server.pool import DaemonPool
from cremant.server.steps import Key, Steps, Task, now_ms
from cremant.server.table import HostedTable
from cremant.server.uploads import Uploads
from cremant.shell.backoff import Backoff
from cremant.shell.logs import cause, log_failure
from cremant.shell.member import Member

_log = logging.getLogger(__name__)

#: Sooner when a step has ended.
LOOK_EVERY_S = 0.1
#: Threads that ask, commit and install; each call of the controller has a deadline.
TALKS_RUNNING_MAX = 4
#: A segment that is ready a little later costs nobody anything; queries and ingestion that wait for a core do. At
#: 10,000 rows/s on two busy cores, a commit every second: lag p99 1,098 ms without, 825 ms with; queries 188 and 134.
BUILD_NICE = 10


class Sealer:
    """Seals and fetches segments of the tables in `tables` (shared with the host that reconciles them)."""

    def __init__(
        self, tables: dict[str, HostedTable], files: ServerFiles, member: Member, fetcher: SegmentFetcher,
        uploads: Uploads, *, fsync: bool,
    ) -> None:  # fmt: skip
        self._tables = tables
        self._member = member
        self._fetcher = fetcher
        self._uploads = uploads
        self.steps = Steps(tables, files, member, fetcher, uploads, fsync=fsync)
        self._stopping = threading.Event()
        self._poked = threading.Event()
        #: Guards what is under way; never held while anything is done.
        self._lock = threading.Lock()
        self._busy: set[Key] = set()
        self._fetching: set[Key] = set()
        self._building: Key | None = None
        #: Of each kind of step by itself: that asking works says nothing of builds.
        self._backoffs: dict[tuple[Key, StepKind], Backoff] = {}
        self._talk_pool = DaemonPool(TALKS_RUNNING_MAX, "seal")
        self._build_pool = DaemonPool(1, "build", nice=BUILD_NICE)
        self._fetch_pool = DaemonPool(FETCHES_RUNNING_MAX, "fetch")
        self._thread = threading.Thread(target=self._look_forever, name="seal", daemon=True)
        #: For metrics.
        self.failures_total = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Steps that wait are dropped; one that runs is abandoned, its scratch is removed at the next start."""
        self._stopping.set()
        self._poked.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1)
        self._fetcher.stop()
        for pool in (self._talk_pool, self._build_pool, self._fetch_pool):
            pool.close()

    def _look_forever(self) -> None:
        while not self._stopping.is_set():
            self._poked.wait(LOOK_EVERY_S)
            self._poked.clear()
            try:
                self.look()
            except Exception:
                _log.exception("looking for segments to seal failed")

    def look(self) -> None:
        """Begins what is due and has a thread."""
        builds: list[Task] = []
        unsealed: set[Key] = set()
        for table in list(self._tables.values()):
            for metadata, sealing in table.unsealed():
                unsealed.add((table.record.incarnation, metadata.name))
                try:
                    task = self._due(table, metadata, sealing)
                except Exception:
                    _log.exception("a look at a segment failed", extra={"fields": {"segment": metadata.name}})
                    continue
                if task is None:
                    continue
                if task.step.kind is StepKind.BUILD:
                    builds.append(task)
                else:
                    self._begin(task)
        if builds and self._building is None:
            self._begin(min(builds, key=_urgency))
        with self._lock:
            busy = frozenset(self._busy)
            self._backoffs = {key: kept for key, kept in self._backoffs.items() if key[0] in unsealed}
        self.steps.release(busy)

    def _due(self, table: HostedTable, metadata: SegmentMetadata, sealing: Sealing) -> Task | None:
        key = (table.record.incarnation, metadata.name)
        with self._lock:
            if key in self._busy:
                return None
            fetching = key in self._fetching
        if table.sealings.get(metadata.name) is not sealing:  # installed since the list was made
            return None
        step = sealing.next_step(self._seen(table, metadata, sealing, key, fetching=fetching), now_ms())
        return Task(table, metadata, sealing, step) if step.kind is not StepKind.NOTHING else None

    def _seen(
        self, table: HostedTable, metadata: SegmentMetadata, sealing: Sealing, key: Key, *, fetching: bool
    ) -> Sight:
        partition = table.partitions.get(metadata.partition)
        closed: Position | None = None
        wanted: Cut | None = None
        if partition is not None and partition.tail.snapshot.first_offset <= metadata.start_offset:
            with partition.lock:
                closed = partition.closings.last
                if metadata.status is SegmentStatus.IN_PROGRESS:
                    flush, age_ms = table.record.config.flush, self._member.cluster_now_ms() - metadata.created_ms
                    wanted = partition.closings.wanted_cut(
                        metadata.start_offset, flush, age_ms, pressed=partition.tail.blocked is not None,
                        force_at_offset=metadata.force_at_offset,
                    )  # fmt: skip
        policy = self._uploads.policy(table)
        return Sight(
            metadata, closed, wanted, policy, table.record.config.completion,
            upload=self.steps.seen_upload(table, sealing, key, policy),
            has_source=metadata.store_url is not None or any(holder != self._member.id for holder in metadata.copies),
            fetching=fetching,
        )  # fmt: skip

    def _begin(self, task: Task) -> None:
        with self._lock:
            match task.step.kind:
                case StepKind.FETCH:
                    pool, running = self._fetch_pool, self._fetching
                case StepKind.BUILD:
                    pool, running = self._build_pool, self._busy
                    self._building = task.key
                case _:
                    pool, running = self._talk_pool, self._busy
            running.add(task.key)
        pool.submit(self.run, task)

    @cause()
    def run(self, task: Task) -> None:
        """Does one step, in the thread of the caller; a failure is noted and tried again later."""
        table, name, sealing, kind = task.table, task.metadata.name, task.sealing, task.step.kind
        try:
            self.steps.act(task)
            with self._lock:
                self._backoffs.pop((task.key, kind), None)
            table.solved(name)
        except Exception as error:
            self.failures_total += 1
            with self._lock:
                retry_ms = self._backoffs.setdefault((task.key, kind), Backoff()).next_ms()
            sealing.failed(kind, retry_ms, now_ms(), passing=isinstance(error, (NoResource, PeerError)))
            table.note_problem(name, str(error))
            if isinstance(error, CremantError):
                log_failure(_log, "a step of sealing failed", error, segment=name, step=kind.value, retry_ms=retry_ms)
            else:
                _log.exception("a step of sealing failed on a bug", extra={"fields": {"segment": name}})
        finally:
            self._ended(task)

    def _ended(self, task: Task) -> None:
        with self._lock:
            if task.step.kind is StepKind.FETCH:
                self._fetching.discard(task.key)
            else:
                self._busy.discard(task.key)
            if task.step.kind is StepKind.BUILD:
                self._building = None
        self._poked.set()


def _urgency(task: Task) -> tuple[bool, int]:
    """Of builds: what is committed here comes before what is only kept here."""
    return not task.sealing.commits, task.sealing.reached_ms or 0
