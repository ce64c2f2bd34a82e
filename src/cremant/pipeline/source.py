# SPDX-License-Identifier: Apache-2.0
"""The stream as a Spark source (Python Data Source API), with the decoding and the row blocks inside its read().

Three processes use it: the driver names it, one planner process per query asks `latestOffset` and `partitions`, and
workers call `read`. Only the `RunSpec` travels between them. Two lanes: fused (default) appends the blocks in `read`
and hands Spark one small report row per block; the row lane hands out decoded rows for a function of the user's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from cremant.epoch.format import to_message
from cremant.epoch.records import Gap, GapReason
from cremant.log.api import TopicInfo
from cremant.model.errors import InvalidConfig, InvariantViolation, NotFound, Unavailable
from cremant.model.limits import EPOCH_ROWS_MAX
from cremant.model.offsets import OffsetRange
from cremant.pipeline import worker
from cremant.pipeline.ends import asked_again, time_before
from cremant.pipeline.plan import (
    UNPROVEN,
    EpochPlan,
    SeedShare,
    Share,
    initial_plan,
    is_initial,
    next_plan,
    seed_plan,
    seed_shares,
    shares_of,
    tasks_of,
)
from cremant.pipeline.spec import RunSpec, WantedFile
from cremant.pipeline.task import emission_ddl, giving_up_loudly, run_task

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

FORMAT = "cremant-stream"
#: The planner waits this long for new messages before it tells Spark that there are none: no busy polling, and a stop
#: of the query waits no longer than this.
IDLE_WAIT_S = 0.2
#: How often the planner makes sure that the topic is the one it was.
LOOK_AGAIN_S = 1.0


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


class TaskSeed(InputPartition):  # type: ignore[misc]  # PySpark is untyped to mypy
    """What one task of a seed is told: the pages it reads, and the plan."""

    def __init__(self, shares: tuple[SeedShare, ...], plan: EpochPlan) -> None:
        super().__init__(None)
        self.shares = shares
        self.plan = plan


class StreamSource(DataSource):  # type: ignore[misc]  # PySpark is untyped to mypy
    """`spark.readStream.format(FORMAT).option("spec", RunSpec.to_json())`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType | str:
        spec = RunSpec.from_json(self.options["spec"])
        if spec.function_version is None:
            return emission_ddl(spec)
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
        self._looked_s = -math.inf
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
            if self._spec.seed is not None and is_initial(before):
                # Whoever holds: Spark runs a first batch even where the plan is the initial one, and a first batch
                # without the seed would leave a state that looks whole and lacks every key.
                return seed_plan(before, self._wanted.read(), self._spec.seed).to_offset()
            after = self._plan(before, limit)
            if after is before:
                stream = worker.stream_of(self._spec)
                stream.wait({(self._spec.topic, p): end for p, end in enumerate(before.ends)}, IDLE_WAIT_S)
                after = self._plan(before, limit)
            return start if after is before else after.to_offset()

    def prepareForTriggerAvailableNow(self) -> None:
        partitions = range(self._topic().partitions)
        bounds = worker.stream_of(self._spec).bounds(self._spec.topic, partitions)
        self._until = tuple(bound.latest for bound in bounds)

    def _plan(self, before: EpochPlan, limit: ReadLimit) -> EpochPlan:
        stream, topic, wanted = worker.stream_of(self._spec), self._spec.topic, self._wanted.read()
        self._look(len(wanted.starts))
        # Time first, then the ends: what was in the stream at that time is below them, unless an append is under way.
        at_ms = time_before(stream)
        try:
            bounds = asked_again(
                lambda: stream.bounds(topic, range(len(wanted.starts))),
                lambda found: all(bound.latest >= end for bound, end in zip(found, before.ends, strict=False)),
            )
            ends = [bound.latest for bound in bounds]
            at_ms = at_ms if all(bound.settled for bound in bounds) else UNPROVEN
            if self._until is not None:
                # There may be more behind them.
                ends, at_ms = [min(end, until) for end, until in zip(ends, self._until, strict=False)], UNPROVEN
            after = next_plan(
                before, wanted, earliest=[bound.earliest for bound in bounds], ends=ends, at_ms=at_ms,
                max_rows=limit.max_rows if isinstance(limit, ReadMaxRows) else 2**62,
            )  # fmt: skip
        except (NotFound, InvariantViolation):
            self._topic()  # says it better where the topic is gone or another one
            raise
        if wanted.stop_on_expired:
            for gap in after.gaps:
                self._stop_at(gap.partition, OffsetRange(gap.first, gap.next))
        return after

    def _stop_at(self, partition: int, expired: OffsetRange) -> None:
        raise InvalidConfig(
            f"table {self._spec.table}: offsets {expired.first} to {expired.next} of topic {self._spec.topic} "
            f"partition {partition} expired before they were read",
            hint='the table stops at expired offsets; set cremant.pipeline.expiredOffsets to "gap" to go on',
        )

    def _look(self, partitions: int) -> None:
        """Now and then: is the topic the one it was? Messages of another one are refused by the readers in any case."""
        if time.monotonic() - self._looked_s < LOOK_AGAIN_S:
            return
        topic = self._topic()
        if partitions > topic.partitions:
            raise InvariantViolation(
                "E-8", f"topic {topic.name} has {topic.partitions} partitions, the table has {partitions}"
            )
        self._looked_s = time.monotonic()

    def _topic(self) -> TopicInfo:
        return worker.check_topic(
            worker.stream_of(self._spec), self._spec.topic, self._spec.topic_incarnation, self._spec.table
        )

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        with giving_up_loudly(self._spec):
            plan = EpochPlan.from_offset(end)
            if plan.seed is not None:
                from cremant.pipeline.rebuild import PAGE_OFFSETS  # here, for what it imports

                groups = seed_shares(self._spec.seed_from, plan.ends, self._spec.tasks_max, PAGE_OFFSETS)
                return [TaskSeed(shares, plan) for shares in groups]
            bounds = worker.stream_of(self._spec).bounds(self._spec.topic, range(len(plan.partitions)))
            shares = shares_of(plan, [bound.earliest for bound in bounds])
            self._check_replay(plan, shares)
            if self._wanted.read().stop_on_expired:
                for share in shares:
                    if share.first > plan.partitions[share.partition].first:
                        self._stop_at(share.partition, share.gap)
            if plan.ends != self._announced:
                self._announced = plan.ends
                self._append_gaps(shares)
            return [TaskShares(group, plan.config_version) for group in tasks_of(shares, self._spec.tasks_max)]

    def _check_replay(self, plan: EpochPlan, shares: Sequence[Share]) -> None:
        """A closed epoch that runs again for the keys it brings to the coordinator's state must bring all of them."""
        spec = self._spec
        if spec.state_partitions is None or spec.replay_epoch is None or plan.ends != spec.starts[: len(plan.ends)]:
            return
        for share in shares:
            if share.first > plan.partitions[share.partition].first:
                raise Unavailable(
                    f"table {spec.table}: epoch {spec.replay_epoch} is to run again for its keys, but offsets up to "
                    f"{share.first} of topic {spec.topic} partition {share.partition} have expired",
                    hint="the next start makes the key coordinator's state anew from the table",
                )

    def _append_gaps(self, shares: Sequence[Share]) -> None:
        """Before any block behind them: readers stop at a hole that nothing explains."""
        log = worker.epoch_log_of(self._spec)
        for share in shares:
            if share.gap.length:
                gap = Gap(generation=self._spec.generation, range=share.gap, reason=GapReason.EXPIRED)
                log.append(self._spec.epoch_topic, share.partition, [to_message(gap, self._spec.incarnation)])

    # --- worker processes ---

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, TaskSeed):
            from cremant.pipeline.rebuild import run_seed  # here, for what it imports

            return run_seed(self._spec, partition.shares, batch_id_of_task(), partition.plan)
        assert isinstance(partition, TaskShares)
        if self._spec.function_version is not None:
            from cremant.pipeline.function import read_rows

            return read_rows(self._spec, partition.shares, partition.config_version)
        batch_id = batch_id_of_task()
        return iter(run_task(self._spec, partition.shares, batch_id, partition.config_version))
