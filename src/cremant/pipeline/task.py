# SPDX-License-Identifier: Apache-2.0
"""What a task does: read its share of the stream, decode, append row blocks, report what it appended.

The append is the idempotent side effect of the task: a retried one writes the same blocks again and readers drop them
by offset (E-2). Blocks are acknowledged by the log before the task reports them, and only the report of the attempt
that Spark takes counts. Nothing here looks at a clock.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import pyarrow as pa

from cremant.epoch.format import row_block, to_message
from cremant.ingest.blocks import to_blocks
from cremant.ingest.candidates import Candidates
from cremant.ingest.plan import Ingested, Rejected
from cremant.log.api import Log, Message
from cremant.model.errors import AlreadyExists, CremantError, InvalidConfig, InvariantViolation, NotFound
from cremant.model.limits import BLOCK_BYTES_MAX, BLOCK_ROWS_MAX, DEAD_LETTERS_PER_BLOCK_MAX
from cremant.model.offsets import OffsetRange
from cremant.pipeline import worker
from cremant.pipeline.chunks import Chunk, chunks
from cremant.pipeline.coordinator import PACK_DDL, packed, report_row
from cremant.pipeline.ends import asked_again
from cremant.pipeline.plan import Share
from cremant.pipeline.reports import Account, Report, TaskReport
from cremant.pipeline.spec import RunSpec, write_stopped

#: One row per appended block or gap; what the driver collects. `causes`: JSON object cause -> count of rejected ones.
REPORT_SCHEMA = pa.schema(
    [
        pa.field("partition", pa.int32()),
        pa.field("first", pa.int64()),
        pa.field("next", pa.int64()),
        pa.field("rows", pa.int64()),
        pa.field("rejected", pa.int64()),
        pa.field("filtered", pa.int64()),
        pa.field("max_ingestion_ms", pa.int64()),
        pa.field("causes", pa.string()),
        pa.field("gap", pa.bool_()),
    ]
)
REPORT_DDL = (
    "partition INT, first BIGINT, next BIGINT, rows BIGINT, rejected BIGINT, filtered BIGINT, "
    "max_ingestion_ms BIGINT, causes STRING, gap BOOLEAN"
)


def emission_ddl(spec: RunSpec) -> str:
    """What a task hands to Spark: its report, of an upsert table as a row among its candidates."""
    return REPORT_DDL if spec.state_partitions is None else PACK_DDL


class EpochWriter:
    """Appends the blocks of one epoch of one task, and keeps what it reports of them."""

    def __init__(self, spec: RunSpec, epoch: int, config_version: int) -> None:
        self._spec = spec
        self._epoch = epoch
        self._config_version = config_version
        self._log: Log = worker.epoch_log_of(spec)
        self._rows: list[Report] = []
        #: Of an upsert table, from its first rows on: the first batch of a table without messages is of no config.
        self._candidates: Candidates | None = None

    def gap(self, partition: int, range: OffsetRange) -> None:
        """Reports a gap that the planner has appended."""
        if range.length:
            self._rows.append(Report(partition, range.first, range.next, 0, 0, 0, None, "", True))

    def rows(self, partition: int, range: OffsetRange, ingested: Ingested, timestamp_type: str) -> None:
        """Appends what `range` became as blocks that cover it exactly."""
        for part in to_blocks(ingested, range, BLOCK_ROWS_MAX, BLOCK_BYTES_MAX):
            causes = Counter(bad.cause for bad in ingested.rejected if part.range.first <= bad.offset < part.range.next)
            account = Account(
                causes=causes, filtered=part.filtered, timestamp_type=timestamp_type,
                max_ingestion_ms=part.max_ingestion_ms, rejected_from_ms=part.rejected_from_ms,
            )  # fmt: skip
            self.block(partition, part.range, part.batch, account)

    def block(self, partition: int, range: OffsetRange, batch: pa.RecordBatch, account: Account) -> None:
        """Appends one block that accounts for exactly `range`."""
        block = row_block(
            generation=self._spec.generation, epoch=self._epoch, config_version=self._config_version, range=range,
            batch=batch, rejected=account.rejected, filtered=account.filtered, timestamp_type=account.timestamp_type,
            max_ingestion_ms=account.max_ingestion_ms, rejected_from_ms=account.rejected_from_ms,
        )  # fmt: skip
        self._log.append(self._spec.epoch_topic, partition, [to_message(block, self._spec.incarnation)])
        row = Report(
            partition,
            range.first,
            range.next,
            batch.num_rows,
            account.rejected,
            account.filtered,
            block.max_ingestion_ms,
            json.dumps(account.causes, sort_keys=True) if account.causes else "",
            False,
        )
        self._rows.append(row)
        if self._spec.state_partitions is not None and batch.num_rows:
            if self._candidates is None:
                record = worker.table_at(self._spec, self._config_version).record
                assert record.config.upsert is not None
                self._candidates = Candidates(record.table_schema, record.config.upsert)
            self._candidates.add(batch, partition, self._epoch)

    def finish(self) -> list[pa.RecordBatch]:
        """What the task hands to Spark (`emission_ddl`)."""
        partitions = self._spec.state_partitions
        if partitions is None:
            return [self.report()]
        found = [report_row(task_index(), TaskReport(self._rows), partitions)]
        if self._candidates is not None:
            found.append(packed(self._candidates.finish(), partitions))
        return found

    def report(self) -> pa.RecordBatch:
        columns = list(zip(*self._rows, strict=True)) if self._rows else [()] * len(REPORT_SCHEMA)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, REPORT_SCHEMA, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=REPORT_SCHEMA)


def ingest_share(spec: RunSpec, share: Share, config_version: int) -> Iterator[tuple[Chunk, Ingested, str]]:
    """The chunks of a share, decoded; rejected messages are sent to the dead-letter topic on the way."""
    table = worker.table_at(spec, config_version)
    try:
        reader = worker.reader_at(spec, share.partition, share.first)
        stream = worker.stream_of(spec)

        def end() -> int:
            return asked_again(
                lambda: stream.latest(spec.topic, share.partition), lambda found: found >= share.range.next
            )

        for chunk in chunks(reader, share.range, end):
            if chunk.batch is None:
                empty = pa.RecordBatch.from_pylist([], schema=table.ingest.block_schema)
                yield chunk, Ingested(batch=empty, rejected=()), ""
                continue
            ingested = table.run(chunk.batch, share.partition)
            if ingested.rejected:
                _dead_letters(spec, share.partition, ingested.rejected, table.record.config.cremant.pipeline)
            yield chunk, ingested, str(chunk.batch.timestamp_type)
    except NotFound:
        worker.drop_reader(spec, share.partition)
        worker.check_topic(worker.stream_of(spec), spec.topic, spec.topic_incarnation, spec.table)
        raise
    except BaseException:
        worker.drop_reader(spec, share.partition)
        raise


def run_task(spec: RunSpec, shares: tuple[Share, ...], batch_id: int, config_version: int) -> list[pa.RecordBatch]:
    """The fused task: stream to epoch log. Answers what it hands to Spark."""
    with giving_up_loudly(spec):
        writer = EpochWriter(spec, spec.epoch_of(batch_id), config_version)
        worker.position_readers(spec, shares)
        for share in shares:
            writer.gap(share.partition, share.gap)
            for chunk, ingested, timestamp_type in ingest_share(spec, share, config_version):
                writer.rows(share.partition, chunk.range, ingested, timestamp_type)
        return writer.finish()


def task_index() -> int:
    """Which of its stage's tasks this is, the same for all attempts."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        raise InvariantViolation("task", "an epoch is written outside of a Spark task")
    return int(context.partitionId())


class giving_up_loudly:
    """Leaves the reason of an error where the driver finds it in plain words; the error goes on to Spark."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CremantError):
            write_stopped(self._spec, error)


def _dead_letters(spec: RunSpec, partition: int, rejected: tuple[Rejected, ...], config: object) -> None:
    """A bounded sample of rejected messages, for people to look at; counts are in the marks."""
    from cremant.model.table import PipelineConfig

    assert isinstance(config, PipelineConfig)
    if config.stop_on_bad_record:
        bad = rejected[0]
        raise InvalidConfig(
            f"table {spec.table} stops at bad records: partition {partition} offset {bad.offset}: {bad.cause}: "
            f"{bad.detail}",
            hint="fix the producer or the schema, or set cremant.pipeline.stopOnBadRecord to false",
        )
    messages = [
        Message(
            key=f"{partition}:{bad.offset}".encode(),
            value=json.dumps(
                {
                    "table": spec.table, "topic": spec.topic, "partition": partition, "offset": bad.offset,
                    "cause": bad.cause, "detail": bad.detail, "sample": bad.sample.decode("utf-8", "backslashreplace"),
                }
            ).encode(),
        )
        for bad in rejected[:DEAD_LETTERS_PER_BLOCK_MAX]
    ]  # fmt: skip
    log = worker.epoch_log_of(spec)
    try:
        log.append(spec.dead_letter_topic, 0, messages)
    except NotFound:
        try:
            log.create_topic(spec.dead_letter_topic, 1)
        except AlreadyExists:
            pass  # another worker was quicker
        log.append(spec.dead_letter_topic, 0, messages)
