# SPDX-License-Identifier: Apache-2.0
"""One table's life in the pipeline: lease, start protocol, run, and what follows when a run ends.

    waiting   somebody else holds the lease, or the controller is not reachable, or Spark is not there yet
    standby   somebody else holds the lease, and this process is there to take over: Spark is warm
    starting  start protocol and Spark query are on their way
    running   epochs are made
    paused    by the user; the lease is given back
    backoff   the query died, or stream or epoch log are not to be reached; it starts again after a growing pause
    failed    it cannot go on until the table's config changes (bad config, topic replaced, a rule does not hold)

One thread per table. Views come in from outside; the thread compares them with what it runs. While the controller is
away, a running query goes on: nobody else can get the lease meanwhile, and the fences of the log decide in any case.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from cremant.epoch.protocol import RunPlan
from cremant.log.api import Log
from cremant.log.open import Logs
from cremant.model.cluster import PipelineReport, Rewind, TableRecord, TableView
from cremant.model.errors import CremantError, Fenced, PeerError
from cremant.model.limits import PIPELINE_ASK_MS, PIPELINE_IDLE_MS
from cremant.model.settings import Settings
from cremant.pipeline.checkpoint import read_plan, remove_old_checkpoints
from cremant.pipeline.lease import Lease
from cremant.pipeline.run import Run, Totals
from cremant.pipeline.seeding import needs_seed, plan_seed
from cremant.pipeline.spec import FINAL
from cremant.pipeline.starter import Controller, StartDriver
from cremant.pipeline.worker import check_topic
from cremant.shell.backoff import Backoff
from cremant.shell.logs import log_event, log_failure

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)

#: The thread of a table looks around this often while its query runs.
LOOK_S = 0.05


class State(StrEnum):
    WAITING = "waiting"
    STANDBY = "standby"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    BACKOFF = "backoff"
    FAILED = "failed"


class TableQuery:
    """A table's thread. `update` and `report` may be called from any thread; `stop` waits for a clean end."""

    def __init__(
        self,
        session: Callable[[], SparkSession],
        logs: Logs,
        settings: Settings,
        controller: Controller,
        table: TableView,
        *,
        standby: bool = False,
        brokers: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        """`brokers`: the URLs of those that live."""
        self._session = session
        self._logs = logs
        self._settings = settings
        self._controller = controller
        self._table = table
        self._run_dir = run_dir_of(settings, table)
        self._state = State.WAITING
        self._error: str | None = None
        self._restarts = 0
        self._run: Run | None = None
        self._totals = Totals()
        self._generation = 0
        #: The last rewind that this process carried out.
        self._rewound: Rewind | None = None
        self._brokers = brokers
        #: The last rebuild of the key coordinator's state that this process has begun, and what forces another one.
        self._rebuild = 0
        self._state_lost = False
        #: How many partitions take part; 0 before the first start, which takes all there are.
        self._partitions = 0
        self._lag_rows: int | None = None
        self._standby = standby
        self._lease = Lease(controller, table.name, table.record.incarnation, standby=standby)
        self._backoff = Backoff()
        self._poked = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._live, name=f"table-{table.name}", daemon=True)

    @property
    def incarnation(self) -> str:
        return self._table.record.incarnation

    def start(self) -> None:
        self._thread.start()

    def update(self, table: TableView) -> None:
        """A newer view of the table."""
        self._table = table
        self._poked.set()

    def stop(self) -> None:
        """Asks for the end; `join` waits for it."""
        self._stopping.set()
        self._poked.set()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def report(self) -> PipelineReport:
        run, totals = self._run, self._totals
        return PipelineReport(
            table=self._table.name,
            incarnation=self.incarnation,
            state=str(self._state),
            generation=self._generation,
            epoch=run.epoch if run is not None else -1,
            batch_ms=totals.batch_ms,
            rows_total=totals.rows,
            rejected_total=sum(totals.rejected.values()),
            filtered_total=totals.filtered,
            lag_rows=self._lag_rows,
            restarts=self._restarts,
            error=self._error,
            keys=totals.keys,
            state_bytes=totals.state_bytes,
            rebuilding=run is not None and run.is_seeding,
            partitions=totals.progress.partitions,
            stream_error=totals.progress.error,
            at_ms=time.time_ns() // 1_000_000,
        )

    @property
    def totals(self) -> Totals:
        return self._totals

    # --- the thread ---

    def _live(self) -> None:
        while not self._stopping.is_set():
            try:
                self._live_once()
            except Exception as error:
                self._after_failure(error)
        self._lease.release()
        log_event(_log, "table let go", table=self._table.name)

    def _live_once(self) -> None:
        """One round: from the wish to run to the end of a run."""
        if self._unwanted():
            self._set(State.PAUSED)
            self._totals.progress.rest()
            self._lease.release()
            self._sleep(60_000)
            return
        self._session()  # before the lease: who has to wait for Spark would keep those from it that are warm
        if not self._take_lease():
            self._totals.progress.forget()
            self._set(State.STANDBY if self._standby else State.WAITING)
            self._sleep(PIPELINE_ASK_MS)
            return
        self._set(State.STARTING)
        table = self._table
        with self._logs.stream(table.record.config.stream) as stream:
            run = self._start_run(table, stream)
            try:
                self._set(State.RUNNING)
                self._watch(run)
            finally:
                self._run = None
                run.stop()
        outcome = run.outcome()
        if outcome is not None:
            raise outcome

    def _start_run(self, table: TableView, stream: Log) -> Run:
        checkpoints = self._run_dir / "checkpoints"
        self._partitions = partitions_in(table, self._partitions or len(table.partitions))
        # Before a generation is spent: the stream can be asked, and is the one the table was made for.
        topic = table.record.config.stream.topic
        with self._totals.progress.asking(f"topic {topic}"):
            check_topic(stream, topic, table.record.topic_incarnation, table.name)
        epochs = self._logs.epoch
        starting = StartDriver(
            self._controller, epochs, table, checkpoints, self._partitions, forget=self._state_lost
        )  # fmt: skip
        plan = starting.run()
        self._generation, self._rewound = plan.generation, starting.rewound or self._rewound
        self._rebuild = max(self._rebuild, starting.rebuild)
        self._state_lost = cannot_replay(table.record, plan, checkpoints, stream)
        if self._state_lost:
            raise PeerError(f"table {table.name}: the messages of epoch {plan.previous} are gone, its keys are rebuilt")
        seeding = None
        if needs_seed(table.record, plan):
            seeding = plan_seed(
                table, plan, starting.keyed_from, self._brokers(), expire_before_ms=starting.expire_before_ms
            )
            log_event(_log, "keys are rebuilt from the table", table=table.name, epoch=plan.previous, seed=seeding.seed)
        run = Run(
            self._session(), stream, epochs, self._settings, table, plan, self._run_dir, self._totals, seeding=seeding
        )  # fmt: skip
        run.start()
        self._run = run
        remove_old_checkpoints(checkpoints, plan.checkpoint)
        log_event(
            _log, "query started", table=table.name, generation=plan.generation, base=plan.base,
            first_batch=plan.first_batch, previous_epoch=plan.previous, checkpoint=plan.checkpoint, fresh=plan.fresh,
        )  # fmt: skip
        return run

    def _watch(self, run: Run) -> None:
        """Until the query ends or should end."""
        looked_s, epoch = 0.0, run.epoch
        while not run.finished():
            table = self._table
            if self._stopping.is_set() or self._unwanted():
                return
            if table.pipeline_record.rewind not in (None, self._rewound):
                log_event(_log, "query restarts for a rewind", table=table.name)
                return
            if self._wants_rebuild(table):
                log_event(_log, "query restarts for a rebuild of its keys", table=table.name)
                return
            if run.wants_restart(table.record, partitions_in(table, self._partitions)):
                log_event(_log, "query restarts for a changed table", table=table.name)
                return
            run.update(table.record)
            self._lease.check()
            if time.monotonic() - looked_s >= PIPELINE_IDLE_MS / 1000:
                looked_s = time.monotonic()
                self._lag_rows = run.look()
                if run.epoch > epoch:
                    self._backoff.reset()
                    self._error = None
            self._poked.wait(LOOK_S)
            self._poked.clear()

    def _wants_rebuild(self, table: TableView) -> bool:
        record = table.pipeline_record
        return record.rebuilds_asked > max(record.rebuilds_begun, self._rebuild)

    def _wishes(self) -> tuple[TableRecord, Rewind | None, bool]:
        return self._table.record, self._table.pipeline_record.rewind, self._wants_rebuild(self._table)

    def _unwanted(self) -> bool:
        record = self._table.record
        return record.paused or not record.enabled

    def _take_lease(self) -> bool:
        reply = self._lease.take()
        if not reply.held:
            self._error = f"the lease is held by {reply.holder}" if reply.holder else "the lease is not to be had"
        return reply.held

    def _after_failure(self, error: Exception) -> None:
        self._error = str(error)
        self._restarts += 1
        self._lease.drop()
        if isinstance(error, Fenced):
            self._set(State.WAITING)
            log_failure(_log, "fenced: another pipeline has taken over", error, table=self._table.name)
            self._sleep(PIPELINE_ASK_MS)
        elif isinstance(error, FINAL):
            self._set(State.FAILED)
            log_failure(_log, "table stopped", error, table=self._table.name)
            self._wait_for_change()
        else:
            pause_ms = self._backoff.next_ms()
            self._set(State.BACKOFF)
            known = isinstance(error, CremantError)
            log_failure(_log, "query ended, it starts again", error, table=self._table.name, pause_ms=pause_ms)
            if not known:
                _log.debug("details", exc_info=error)
            self._sleep(pause_ms)

    def _wait_for_change(self) -> None:
        """A final failure stays until the table is another one: new config version, paused and resumed, rewound."""
        before = self._wishes()
        while not self._stopping.is_set() and self._wishes() == before:
            self._poked.wait(1.0)
            self._poked.clear()
        self._error = None

    def _set(self, state: State) -> None:
        if state is not self._state:
            log_event(_log, "table state", table=self._table.name, state=str(state), before=str(self._state))
            self._state = state
            if state in (State.RUNNING, State.PAUSED):
                self._error = None if state is State.PAUSED else self._error

    def _sleep(self, pause_ms: int) -> None:
        """Until the pause is over, a newer view came, or the end."""
        self._poked.wait(pause_ms / 1000)
        self._poked.clear()


def cannot_replay(record: TableRecord, plan: RunPlan, checkpoints: Path, stream: Log) -> bool:
    """The committed batch is to run again for the keys it brings, and the stream no longer has all of it: as row blocks
    they are in the epoch log, but the state would lack them for ever."""
    if plan.replay is None or record.config.upsert is None:
        return False
    replayed = read_plan(checkpoints / plan.checkpoint, plan.replay.batch_id)
    bounds = stream.bounds(record.config.stream.topic, range(len(replayed.partitions)))
    return any(
        bound.earliest > planned.first and planned.rows
        for bound, planned in zip(bounds, replayed.partitions, strict=True)
    )


def run_dir_of(settings: Settings, table: TableView) -> Path:
    """Where a table's checkpoints are, and what planner and tasks need beside them."""
    return _run_dir(settings, table.name, table.record.incarnation)


def remove_run_dir(settings: Settings, name: str, incarnation: str) -> None:
    shutil.rmtree(_run_dir(settings, name, incarnation), ignore_errors=True)


def _run_dir(settings: Settings, name: str, incarnation: str) -> Path:
    return Path(settings.checkpoint_dir or settings.data_dir).absolute() / "tables" / f"{name}.{incarnation}"


def partitions_in(table: TableView, entered: int) -> int:
    """How many partitions may take part: those that are in, and those that follow and have a consuming replica online
    (E-7)."""
    count = min(entered, len(table.partitions))
    while count < len(table.partitions) and table.tails.get(str(table.partitions[count].record.partition)):
        count += 1
    return count
