# SPDX-License-Identifier: Apache-2.0
"""The stream as a Spark source (Python Data Source API), with the decoding and the row blocks inside its read().

Three processes use it: the driver names it, one planner process per query asks `latestOffset` and `partitions`, and
workers call `read`. Only the `RunSpec` travels between them. Two lanes: fused (default) appends the blocks in `read`
and hands Spark one small report row per block; the row lane hands out decoded rows for a function of the user's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from cremant.epoch.format import to_message
from cremant.epoch.records import Gap, GapReason
from cremant.log.api import Log, TopicInfo
from cremant.model.errors import InvalidConfig, InvariantViolation, NotFound
from cremant.model.limits import EPOCH_ROWS_MAX
from cremant.pipeline import worker
from cremant.pipeline.plan import EpochPlan, Share, initial_plan, next_plan, shares_of, tasks_of
from cremant.pipeline.spec import RunSpec, WantedFile
from cremant.pipeline.task import REPORT_DDL, giving_up_loudly, run_task

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

FORMAT = "cremant-stream"
#: The planner waits this long for new messages before it tells Spark that there are none: no busy polling, and a stop
#: of the query waits no longer than this.
IDLE_WAIT_S = 0.2


def batch_id_of_task() -> int:
    """The batch that the task runs for. Only inside of a task of a streaming query."""
    context = TaskContext.get()
    text = context.getLocalProperty("streaming.sql.batchId") if context is not None else None
    if text is None:
        raise InvariantViolation("batch id", "a task of the stream source runs outside of a streaming query")
    return int(text)


class TaskShares(InputPartition):  # type: ignore[misc]  # PySpark is untyped to mypy
    """What one task is told: its shares, and the config version of the plan."""

    def __init__(self, shares: tuple[Share, ...], config_version: int) -> None:
        super().__init__(None)
        self.shares = shares
        self.config_version = config_version


class StreamSource(DataSource):  # type: ignore[misc]  # PySpark is untyped to mypy
    """`spark.readStream.format(FORMAT).option("spec", RunSpec.to_json())`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType | str:
        spec = RunSpec.from_json(self.options["spec"])
        if spec.function_version is None:
            return REPORT_DDL
        from cremant.pipeline.function import row_lane_schema

        return row_lane_schema(spec)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return StreamReader(RunSpec.from_json(self.options["spec"]))


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]  # PySpark is untyped to mypy
    """Planner and reader of one query."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._wanted = WantedFile(spec)
        self._until: tuple[int, ...] | None = None
        self._announced: tuple[int, ...] | None = None

    # --- planner process ---

    def initialOffset(self) -> dict[str, Any]:
        return initial_plan(self._spec.topic_incarnation, self._spec.starts).to_offset()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(EPOCH_ROWS_MAX)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        # The table's own limit is in `wanted`, so that it can change while the query runs.
        with giving_up_loudly(self._spec):
            before = EpochPlan.from_offset(start)
            after = self._plan(before, limit)
            if after is before:
                log = worker.log_of(self._spec)
                log.wait({(self._spec.topic, p): end for p, end in enumerate(before.ends)}, IDLE_WAIT_S)
                after = self._plan(before, limit)
            return start if after is before else after.to_offset()

    def prepareForTriggerAvailableNow(self) -> None:
        log, topic = worker.log_of(self._spec), self._topic()
        self._until = tuple(log.latest(self._spec.topic, p) for p in range(topic.partitions))

    def _plan(self, before: EpochPlan, limit: ReadLimit) -> EpochPlan:
        log, topic, wanted = worker.log_of(self._spec), self._topic(), self._wanted.read()
        partitions = range(len(wanted.starts))
        if len(partitions) > topic.partitions:
            raise InvariantViolation(
                "E-8", f"topic {topic.name} has {topic.partitions} partitions, the table has {len(partitions)}"
            )
        earliest = [log.earliest(topic.name, p) for p in partitions]
        # Time first, then the ends: what was in the stream at that time is below them.
        at_ms = time.time_ns() // 1_000_000
        ends = [log.latest(topic.name, p) for p in partitions]
        if self._until is not None:
            ends = [min(end, until) for end, until in zip(ends, self._until, strict=False)]
        after = next_plan(
            before, wanted, earliest=earliest, ends=ends, at_ms=at_ms,
            max_rows=limit.max_rows if isinstance(limit, ReadMaxRows) else 2**62,
        )  # fmt: skip
        if after.gaps and wanted.stop_on_expired:
            gap = after.gaps[0]
            raise InvalidConfig(
                f"table {self._spec.table}: offsets {gap.first} to {gap.next} of topic {topic.name} partition "
                f"{gap.partition} expired before they were read",
                hint='the table stops at expired offsets; set cremant.pipeline.expiredOffsets to "gap" to go on',
            )
        return after

    def _topic(self) -> TopicInfo:
        return check_topic(worker.log_of(self._spec), self._spec)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        with giving_up_loudly(self._spec):
            plan = EpochPlan.from_offset(end)
            log = worker.log_of(self._spec)
            earliest = [log.earliest(self._spec.topic, p) for p in range(len(plan.partitions))]
            shares = shares_of(plan, earliest)
            if plan.ends != self._announced:
                self._announced = plan.ends
                self._append_gaps(log, shares)
            return [TaskShares(group, plan.config_version) for group in tasks_of(shares, self._spec.tasks_max)]

    def _append_gaps(self, log: Log, shares: Sequence[Share]) -> None:
        """Before any block behind them: readers stop at a hole that nothing explains."""
        for share in shares:
            if share.gap.length:
                gap = Gap(generation=self._spec.generation, range=share.gap, reason=GapReason.EXPIRED)
                log.append(self._spec.epoch_topic, share.partition, [to_message(gap, self._spec.incarnation)])

    # --- worker processes ---

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, TaskShares)
        if self._spec.function_version is not None:
            from cremant.pipeline.function import read_rows

            return read_rows(self._spec, partition.shares, partition.config_version)
        batch_id = batch_id_of_task()
        return iter([run_task(self._spec, partition.shares, batch_id, partition.config_version)])


def check_topic(log: Log, spec: RunSpec) -> TopicInfo:
    """The stream topic. Raises InvariantViolation (E-8) if it is not the one the table was made for."""
    try:
        topic = log.topic(spec.topic)
    except NotFound as error:
        raise InvariantViolation(
            "E-8", f"topic {spec.topic} of table {spec.table} was deleted",
            hint="re-create the table for a new topic; what is sealed stays queryable",
        ) from error  # fmt: skip
    if spec.topic_incarnation and topic.incarnation != spec.topic_incarnation:
        raise InvariantViolation(
            "E-8",
            f"topic {spec.topic} was deleted and created again (incarnation {topic.incarnation}, table "
            f"{spec.table} reads {spec.topic_incarnation}); its offsets start anew",
            hint="re-create the table",
        )
    return topic
