# SPDX-License-Identifier: Apache-2.0
"""A PySpark function of the user's own in the ingest path: DataFrame -> DataFrame, row-local, deterministic.

Rules: only modules on the operator's allow-list (`pipeline_modules`) are imported. The function sees the decoded rows
(the table's columns, plus `$` columns that say where a row came from) and must hand on all of these columns; it may
change values and drop rows. It may not move rows between tasks (no shuffle, no sort, no join, no aggregate): operators
are checked against a list of those that keep a row where it is. Coverage of offsets comes from what the source read,
never from what the function let through. That it is deterministic cannot be checked beforehand: readers compare hashes
of blocks that cover the same range (E-2) and stop.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.ingest.blocks import newest_ms, rejected_from_ms
from cremant.ingest.causes import Cause
from cremant.model import names
from cremant.model.cluster import TableRecord
from cremant.model.errors import InvalidConfig
from cremant.model.offsets import OffsetRange
from cremant.model.upsert import NullKeyPolicy
from cremant.pipeline import worker
from cremant.pipeline.plan import Share
from cremant.pipeline.reports import Account
from cremant.pipeline.spec import RunSpec
from cremant.pipeline.task import EpochWriter, emission_ddl, giving_up_loudly, ingest_share

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

Function = Callable[["DataFrame"], "DataFrame"]

#: Logical operators of Spark under which every row stays where it is.
ROW_LOCAL = frozenset(
    {
        "Project", "Filter", "SubqueryAlias", "View", "ResolvedHint",
        "MapInArrow", "MapInPandas", "PythonMapInArrow", "BatchEvalPython", "ArrowEvalPython",
        "StreamingRelation", "StreamingRelationV2",
        "StreamingDataSourceV2Relation", "StreamingDataSourceV2ScanRelation",
    }
)  # fmt: skip


def load_function(path: str, allowed_modules: str) -> Function:
    """`package.module:function`. Raises InvalidConfig: not on the allow-list, not importable, not callable."""
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise InvalidConfig(f"pipeline function {path!r} is not of the form package.module:function")
    allowed = [entry.strip() for entry in allowed_modules.split(",") if entry.strip()]
    if not any(module_name == entry or module_name.startswith(f"{entry}.") for entry in allowed):
        raise InvalidConfig(
            f"pipeline function {path}: module {module_name} is not on the allow-list "
            f"({', '.join(allowed) or 'which is empty'})",
            hint="the operator adds it to the setting pipeline_modules of the pipeline process",
        )
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise InvalidConfig(
            f"pipeline function {path} cannot be loaded: {error}",
            hint="the module must be importable in the pipeline process: install it, or add it to PYTHONPATH",
        ) from error
    if not callable(function):
        raise InvalidConfig(f"pipeline function {path} is not callable, it is a {type(function).__name__}")
    loaded: Function = function
    return loaded


def row_lane_schema(spec: RunSpec) -> StructType:
    """What the function sees: `$partition`, the columns of a block; all may be null on the way."""
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.types import StructField, StructType

    assert spec.function_version is not None
    block = worker.table_at(spec, spec.function_version).ingest.block_schema
    seen = from_arrow_schema(pa.schema([pa.field(names.PARTITION, pa.int32()), *block]))
    return StructType([StructField(field.name, field.dataType, nullable=True) for field in seen.fields])


def apply_function(frame: DataFrame, function: Function, spec: RunSpec, path: str) -> DataFrame:
    """The query of a table with a function: rows, function, checks, writer. Raises InvalidConfig."""
    expected = frame.schema
    result = function(frame)
    if type(result).__name__ != "DataFrame":
        raise InvalidConfig(f"pipeline function {path} returned a {type(result).__name__}, not a DataFrame")
    check_operators(result, path)
    found = {field.name: field.dataType for field in result.schema.fields}
    missing = [field.name for field in expected.fields if field.name not in found]
    if missing:
        raise InvalidConfig(
            f"pipeline function {path} dropped the column(s) {', '.join(missing)}",
            hint="hand on all columns, the $ columns too: use withColumn and filter rather than select",
        )
    for field in expected.fields:
        if found[field.name].simpleString() != field.dataType.simpleString():
            raise InvalidConfig(
                f"pipeline function {path}: column {field.name} became {found[field.name].simpleString()}, expected "
                f"{field.dataType.simpleString()}",
                hint="cast it to the type of the table's schema",
            )
    ordered = result.select([f"`{field.name}`" for field in expected.fields])
    return ordered.mapInArrow(_Writer(spec), emission_ddl(spec))


def check_operators(frame: DataFrame, path: str) -> None:
    """Raises InvalidConfig if the plan holds anything that could move, merge or invent rows."""
    waiting: list[Any] = [frame._jdf.queryExecution().analyzed()]
    while waiting:
        node = waiting.pop()
        name = str(node.nodeName())
        if name not in ROW_LOCAL:
            raise InvalidConfig(
                f"pipeline function {path} uses the operator {name}, which does not keep each row where it is (a "
                "shuffle or the like)",
                hint="rows must stay in the task that read them: use filter, withColumn, mapInArrow and UDFs",
            )
        children = node.children()
        waiting.extend(children.apply(index) for index in range(children.size()))


class Covered(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk that the source has read: what its block accounts for."""

    partition: int
    range: OffsetRange
    rows: int
    account: Account


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """All that the source read for a task, for the writer of the same task attempt."""

    config_version: int
    gaps: tuple[tuple[int, OffsetRange], ...]
    chunks: tuple[Covered, ...]


def _coverage_path(spec: RunSpec) -> Path:
    """A file that only the two Python workers of one task attempt on one machine share."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    name = f"cremant-{spec.incarnation}-{spec.generation}-{context.stageId()}-{context.taskAttemptId()}.json"
    return Path(os.environ.get("SPARK_LOCAL_DIRS", tempfile.gettempdir()).split(",")[0]) / name


def read_rows(spec: RunSpec, shares: tuple[Share, ...], config_version: int) -> Iterator[pa.RecordBatch]:
    """The source's side: decoded rows in the types Spark wants; then, what they cover."""
    from pyspark.sql.pandas.types import to_arrow_schema

    target = to_arrow_schema(row_lane_schema(spec), timezone="UTC")
    covered: list[Covered] = []
    with giving_up_loudly(spec):
        worker.position_readers(spec, shares)
        for share in shares:
            for chunk, ingested, timestamp_type in ingest_share(spec, share, config_version):
                account = Account(
                    causes=Counter(bad.cause for bad in ingested.rejected), filtered=ingested.filtered,
                    timestamp_type=timestamp_type, max_ingestion_ms=newest_ms(ingested, chunk.range),
                    rejected_from_ms=rejected_from_ms(ingested, chunk.range),
                )  # fmt: skip
                rows = ingested.batch.num_rows
                covered.append(Covered(partition=share.partition, range=chunk.range, rows=rows, account=account))
                if rows:
                    partition = pa.array(np.full(rows, share.partition, dtype=np.int32))
                    yield _as_schema([partition, *ingested.batch.columns], target)
        coverage = Coverage(
            config_version=config_version,
            gaps=tuple((share.partition, share.gap) for share in shares if share.gap.length),
            chunks=tuple(covered),
        )
        _coverage_path(spec).write_bytes(msgspec.json.encode(coverage))


def _as_schema(columns: list[Any], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [column.cast(field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class _Writer:
    """The writer's side, in a worker behind the function; pickled into the query."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec_json = spec.to_json()

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from cremant.pipeline.source import batch_id_of_task

        spec = RunSpec.from_json(self._spec_json)
        with giving_up_loudly(spec):
            yield from write_rows(spec, batch_id_of_task(), list(batches))


def write_rows(spec: RunSpec, batch_id: int, batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Appends what came through the function, one block per chunk that the source read. Answers what the task hands to
    Spark."""
    path = _coverage_path(spec)
    if not path.exists():
        raise InvalidConfig(
            f"table {spec.table}: the pipeline function stopped before it had read all its input",
            hint="a function may drop rows, but must read them all: no limit, no early return",
        )
    coverage = msgspec.json.decode(path.read_bytes(), type=Coverage)
    path.unlink()
    assert spec.function_version is not None
    table = worker.table_at(spec, spec.function_version)
    schema = table.ingest.block_schema
    rows = pa.Table.from_batches(batches) if batches else None
    writer = EpochWriter(spec, spec.epoch_of(batch_id), coverage.config_version)
    for partition, gap in coverage.gaps:
        writer.gap(partition, gap)
    for chunk in coverage.chunks:
        part = _rows_of(rows, chunk) if rows is not None else None
        block, account, handed_on = pa.RecordBatch.from_pylist([], schema=schema), chunk.account, 0
        if part is not None and part.num_rows:
            handed_on = part.num_rows
            part, keyless = apart_by_key(part, table.record)
            defaults = {field.name: field.default for field in table.record.table_schema.fields}
            block = to_block(part, schema, defaults, spec.table)
            account = with_rejected(account, keyless)
        account = msgspec.structs.replace(account, filtered=account.filtered + chunk.rows - handed_on)
        writer.block(chunk.partition, chunk.range, block, account)
    return writer.finish()


def apart_by_key(rows: pa.Table, record: TableRecord) -> tuple[pa.Table, pa.Table]:
    """Rows whose key is whole, and the others, if the table rejects those: rows of the source have whole keys, a
    function can make nulls."""
    if record.config.upsert is None or record.config.upsert.null_key is not NullKeyPolicy.REJECT:
        return rows, rows.slice(0, 0)
    whole = np.ones(rows.num_rows, dtype=bool)
    for name in record.table_schema.primary_key_columns:
        whole &= np.asarray(pc.is_valid(rows.column(name)))
    return rows.filter(pa.array(whole)), rows.filter(pa.array(~whole))


def with_rejected(account: Account, keyless: pa.Table) -> Account:
    """The account with these rows rejected for their null key."""
    if not keyless.num_rows:
        return account
    oldest = [account.rejected_from_ms, pc.min(keyless.column(names.INGESTION_TIME)).as_py()]
    return msgspec.structs.replace(
        account,
        causes=dict(Counter(account.causes) + Counter({Cause.NULL_KEY.value: keyless.num_rows})),
        rejected_from_ms=min((at_ms for at_ms in oldest if at_ms is not None), default=None),
    )


def _rows_of(rows: pa.Table, chunk: Covered) -> pa.Table:
    offsets = rows.column(names.OFFSET)
    inside = pc.and_(
        pc.equal(rows.column(names.PARTITION), chunk.partition),
        pc.and_(pc.greater_equal(offsets, chunk.range.first), pc.less(offsets, chunk.range.next)),
    )
    return rows.filter(inside)


def to_block(rows: pa.Table, schema: pa.Schema, defaults: dict[str, Any], table: str) -> pa.RecordBatch:
    """Rows as a block holds them: the block's types, defaults for nulls and, where nulls are stored, which they are;
    each (offset, sub-row) once, ascending."""
    arrays = []
    for field in schema:
        column = rows.column(field.name).combine_chunks().cast(field.type)
        if field.name.startswith(names.IS_NULL_PREFIX):  # what the function made null is null, too
            value = rows.column(field.name.removeprefix(names.IS_NULL_PREFIX)).combine_chunks()
            column = pc.or_kleene(column, value.is_null())
        if column.null_count and not field.nullable:
            default = False if field.name.startswith(names.IS_NULL_PREFIX) else defaults.get(field.name)
            if pa.types.is_list(field.type):
                default = [default]
            column = (
                pc.fill_null(column, pa.scalar(default, field.type))
                if not pa.types.is_list(field.type)
                else (pc.if_else(pc.is_valid(column), column, pa.scalar(default, field.type)))
            )
        arrays.append(column)
    block = pa.RecordBatch.from_arrays(arrays, schema=schema)
    offsets = block.column(names.OFFSET).to_numpy(zero_copy_only=False)
    sub_rows = block.column(names.SUB_ROW).to_numpy(zero_copy_only=False)
    rising = (np.diff(offsets) > 0) | ((np.diff(offsets) == 0) & (np.diff(sub_rows) > 0))
    if not bool(rising.all()):
        raise InvalidConfig(
            f"table {table}: the pipeline function repeated or reordered rows, or changed $offset or $subRow",
            hint="a function may change values and drop rows, but not invent or reorder them",
        )
    return block
