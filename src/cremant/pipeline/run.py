# SPDX-License-Identifier: Apache-2.0
"""One run of a table's query: the Spark query between a finished start protocol and its end (one generation).

Exactly one Spark action per batch: collecting the report, which runs the tasks. Then the epoch is closed, then Spark
commits the batch by returning. Idle tables get heartbeats; what the driver wants of the next plan (config version,
partitions, hold) goes through a file that the planner reads each time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from cremant.epoch.protocol import RunPlan
from cremant.log.api import Log
from cremant.model.cluster import TableRecord, TableView
from cremant.model.errors import CremantError, PeerError, WorldError
from cremant.model.limits import EPOCH_ROWS_MAX, PIPELINE_STOP_MS
from cremant.model.names import dead_letter_topic, epoch_topic
from cremant.model.settings import Settings
from cremant.model.table import ExpiredOffsets
from cremant.pipeline.checkpoint import read_plan
from cremant.pipeline.closer import Closer
from cremant.pipeline.coordinator import Companion, companion_for, coordinate, new_companion
from cremant.pipeline.ends import time_before
from cremant.pipeline.function import apply_function, load_function
from cremant.pipeline.plan import Wanted
from cremant.pipeline.progress import Progress
from cremant.pipeline.reports import outcome_of
from cremant.pipeline.seeding import Seeding
from cremant.pipeline.source import FORMAT, StreamSource
from cremant.pipeline.spec import (
    FINAL,
    RunSpec,
    log_settings_of,
    remove_old_files,
    take_stopped,
    write_config,
    write_wanted,
)
from cremant.pipeline.updates import OUTCOME_DDL, UpdateWriter
from cremant.shell.logs import log_event

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

_log = logging.getLogger(__name__)


class Totals:
    """What a table's pipeline has done since this process began."""

    def __init__(self) -> None:
        self.epochs = 0
        self.rows = 0
        self.filtered = 0
        self.rejected: Counter[str] = Counter()
        self.batch_ms = 0
        #: Where the last batch that was looked at spent its ms, by Spark's names of its phases.
        self.phases_ms: dict[str, int] = {}
        #: The key coordinator's state after the last epoch: keys, and bytes of its files. None: not known, or none.
        self.keys: int | None = None
        self.state_bytes: int | None = None
        self.progress = Progress()


class Run:
    """Built after the start protocol; `start`, watch `finished`, then `stop`. One thread drives it."""

    def __init__(
        self, spark: SparkSession, stream: Log, epochs: Log, settings: Settings, table: TableView, plan: RunPlan,
        run_dir: Path, totals: Totals, *, seeding: Seeding | None = None,
    ) -> None:  # fmt: skip
        """`stream` holds the table's stream, `epochs` its epoch log; both stay open until `stop`. `seeding`: the first
        batch brings the table's rows to the key coordinator."""
        self.plan = plan
        self._spark = spark
        self._stream = stream
        self._settings = settings
        self._run_dir = run_dir
        self._totals = totals
        self._topic = epoch_topic(table.name, table.record.incarnation)
        self._incarnation = table.record.incarnation
        self._name = table.name
        self._checkpoint = run_dir / "checkpoints" / plan.checkpoint
        self._closer = Closer(epochs, self._topic, self._incarnation, table.name, plan)
        self._query: StreamingQuery | None = None
        self._batch_error: BaseException | None = None
        self._record = table.record
        self._starts = plan.start
        self._wanted: Wanted | None = None
        self._in_batch = threading.Event()
        function = table.record.config.cremant.pipeline.function
        self._companion: Companion | None = None
        if (upsert := table.record.config.upsert) is not None:
            self._companion = companion_for(self._checkpoint, new_companion(table.record.table_schema, upsert))
        self.spec = RunSpec(
            run_dir=str(run_dir),
            log_settings=log_settings_of(settings),
            table=table.name,
            incarnation=self._incarnation,
            topic=table.record.config.stream.topic,
            topic_incarnation=table.record.topic_incarnation,
            stream_version=table.record.config_version,
            epoch_topic=self._topic,
            dead_letter_topic=dead_letter_topic(table.name, self._incarnation),
            generation=plan.generation,
            base=plan.base,
            seed=seeding.seed if seeding else None,
            brokers=seeding.brokers if seeding else (),
            seed_from=seeding.firsts if seeding else (),
            starts=plan.start,
            tasks_max=task_slots(spark),
            replay_batch=plan.replay.batch_id if plan.replay else None,
            replay_epoch=plan.replay.epoch if plan.replay else None,
            function_version=plan.config_version if function else None,
            state_partitions=self._companion.state_partitions if self._companion is not None else None,
        )

    @property
    def is_seeding(self) -> bool:
        """The key coordinator's state is being made; no row of the stream is taken meanwhile."""
        return self.spec.seed is not None and self._closer.epoch == self.plan.previous

    @property
    def epoch(self) -> int:
        return self._closer.epoch

    @property
    def ends(self) -> tuple[int, ...]:
        return self._closer.ends

    def start(self) -> None:
        """Starts the Spark query. Raises InvalidConfig where a user's function cannot be used."""
        self._run_dir.mkdir(parents=True, exist_ok=True)
        remove_old_files(self.spec)
        write_config(self._run_dir, self._record)
        self._want(hold=False)
        self._totals.progress.begin(self._starts)
        self._spark.dataSource.register(StreamSource)
        frame = self._spark.readStream.format(FORMAT).option("spec", self.spec.to_json()).load()
        pipeline = self._record.config.cremant.pipeline
        if self.spec.function_version is not None and pipeline.function:
            function = load_function(pipeline.function, str(self._settings.pipeline_modules))
            frame = apply_function(frame, function, self.spec, pipeline.function)
        if self._companion is not None:
            frame = coordinate(frame, self._companion, self._checkpoint)
            frame = frame.mapInArrow(UpdateWriter(self.spec), OUTCOME_DDL)
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", self._name)
        self._query = (
            frame.writeStream.foreachBatch(self._on_batch)
            .option("checkpointLocation", str(self._checkpoint))
            .trigger(processingTime=f"{max(0, pipeline.min_epoch_ms)} milliseconds")
            .start()
        )

    # --- from the driver's thread, while it runs ---

    def finished(self) -> bool:
        return self._query is None or not self._query.isActive

    def outcome(self) -> BaseException | None:
        """Why the query ended: what closing raised, what planner or task left, or what Spark says; None if it was
        stopped. What a task left and another attempt of it got over does not count."""
        if self._batch_error is not None:
            return self._batch_error
        left = take_stopped(self.spec)
        error = self._query.exception() if self._query is not None else None
        if left is not None and (error is not None or isinstance(left, FINAL)):
            return left
        return None if error is None else PeerError(f"table {self._name}: {_last_cause(str(error))}")

    def wants_restart(self, record: TableRecord, partitions: int) -> bool:
        """What a running query cannot take over: more partitions (they are fenced by a start, E-7), other properties of
        the stream, another trigger, a user's function, which is part of the query, or any new config of a table with
        one."""
        if partitions > len(self._starts):
            return True
        if (record.config.upsert is None) != (self._record.config.upsert is None):
            return True
        before, after = self._record.config.cremant.pipeline, record.config.cremant.pipeline
        if record.config_version == (self.spec.function_version or self._record.config_version):
            return False
        if record.config.stream != self._record.config.stream:
            return True
        return bool(before.function or after.function) or before.min_epoch_ms != after.min_epoch_ms

    def update(self, record: TableRecord) -> None:
        """A new config version, from the next plan on."""
        if record.config_version != self._record.config_version:
            write_config(self._run_dir, record)
            self._record = record
            self._want(hold=False)

    def look(self) -> int:
        """Offsets of the stream that are not in a closed epoch yet. Where there is none, says how far the stream went
        (heartbeat). Raises PeerError if the stream cannot be asked."""
        closed, progress = self._closer.ends, self._totals.progress
        with progress.asking(f"the end of topic {self.spec.topic}"):
            at_ms = time_before(self._stream)
            bounds = self._stream.bounds(self.spec.topic, range(len(closed)))
        self._look_at_phases()
        progress.read([bound.latest for bound in bounds], at_ms)
        # An append under way counts: where there is one, nobody is caught up.
        ends = tuple(bound.latest if bound.settled else bound.latest + 1 for bound in bounds)
        progress.caught_up(self._closer.heartbeat(ends, at_ms), at_ms)
        return sum(max(0, bound.latest - done) for bound, done in zip(bounds, closed, strict=True))

    def _look_at_phases(self) -> None:
        last = self._query.lastProgress if self._query is not None else None
        if last is not None:
            self._totals.phases_ms = dict(last["durationMs"])

    def stop(self) -> None:
        """Ends the query after the epoch in flight, or within PIPELINE_STOP_MS whatever it does."""
        if self._query is None:
            return
        with contextlib.suppress(OSError, WorldError):
            self._want(hold=True)
        deadline = time.monotonic() + PIPELINE_STOP_MS / 1000
        while self._query.isActive and time.monotonic() < deadline:
            status = self._query.status
            if not self._in_batch.is_set() and not status["isDataAvailable"]:
                break
            time.sleep(0.02)
        self._query.stop()
        self._closer.end()

    # --- from Spark's callback thread ---

    def _on_batch(self, frame: DataFrame, batch_id: int) -> None:
        began_s = time.monotonic()
        self._in_batch.set()
        try:
            self._close_batch(frame, batch_id)
        except BaseException as error:
            if isinstance(error, CremantError):
                self._batch_error = error
            raise
        finally:
            self._in_batch.clear()
            self._totals.batch_ms = int((time.monotonic() - began_s) * 1000)

    def _close_batch(self, frame: DataFrame, batch_id: int) -> None:
        plan = read_plan(self._checkpoint, batch_id)
        self._totals.progress.planned(plan)
        found = outcome_of(frame.collect(), upsert=self._companion is not None)
        blocks, gaps = found.blocks, found.gaps
        outcome = self._closer.close(batch_id, plan, blocks, gaps, found.updates)
        if outcome.replayed:
            return
        self._totals.progress.closed(self._closer.lines)
        if self._companion is not None:
            self._totals.keys, self._totals.state_bytes = found.keys, found.state_bytes
        self._totals.epochs += 1
        self._totals.rows += sum(block.rows for block in blocks)
        self._totals.filtered += sum(block.filtered for block in blocks)
        for report in found.reports:
            if report.causes:
                self._totals.rejected.update(json.loads(report.causes))
        for gap in gaps:
            log_event(
                _log, "stream offsets expired before they were read", level=logging.WARNING, table=self._name,
                partition=gap.partition, first=gap.range.first, next=gap.range.next, epoch=outcome.epoch,
            )  # fmt: skip

    def _want(self, *, hold: bool) -> None:
        pipeline = self._record.config.cremant.pipeline
        version = self.spec.function_version or self._record.config_version
        write_wanted(
            self.spec,
            Wanted(
                config_version=version,
                starts=self._starts,
                max_rows=min(EPOCH_ROWS_MAX, max(len(self._starts), pipeline.max_rows_per_epoch)),
                stop_on_expired=pipeline.expired_offsets is ExpiredOffsets.STOP,
                hold=hold,
            ),
        )


def task_slots(spark: SparkSession) -> int:
    return int(spark.sparkContext.defaultParallelism)


def _last_cause(text: str) -> str:
    """The line of Spark's error that says what happened, without the stack traces around it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error:" in line or "Exception:" in line]
    return (errors[-1] if errors else lines[0] if lines else "unknown failure")[:500]
