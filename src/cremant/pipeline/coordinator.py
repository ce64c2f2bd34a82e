# SPDX-License-Identifier: Apache-2.0
"""The key coordinator of an upsert table: a stateful Spark operator over Spark's state store (design: upsert.md).

    candidates (candidate, key), one per key and task         source.py, ingest/candidates.py
    -> shuffle by key (itself below 16 bytes, else its 128-bit hash)
    -> state: per key the greatest candidate so far
    -> what that means for rows: INSERT, DELETE              updates.py

Two operators do this; which one made a state stays with it, in a file beside Spark's checkpoint:

native  our own function on groups with state (jvm/src/.../KeyCoordinator.java): one candidate per key in the state.
stock   Spark's `max_by(..., k)`, where the jar is missing: more state, more steps. k must exceed the number of tasks of
        one epoch, because each may bring a candidate of the same key and all of them together must not push the row in
        force out of the state: its DELETE would be lost. So tasks are at most k - 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from cremant.ingest.candidates import CANDIDATE_SCHEMA, VALUE_BYTES, Candidates
from cremant.model.errors import Corrupt, InvalidConfig, NoResource
from cremant.model.schema import Schema
from cremant.model.upsert import UpsertConfig
from cremant.pipeline.java import QUICK_JAR
from cremant.pipeline.reports import TaskReport
from cremant.pipeline.spec import write_durably

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: What leaves the source: candidates, and the reports of the tasks under keys of their own.
CANDIDATE_DDL = "candidate BINARY, key BINARY"
#: Keys below this length stand for themselves; a hash has exactly this length.
HASH_BYTES = 16
COMPANION = "cremant.json"
#: Last byte of the (short) keys under which the reports of tasks travel; no key of a row ends so.
REPORT_TAG = b"\0"
#: What leaves the operator, one column: a byte that says which, then the report of a task, or the values
#: (ingest/candidates.py) of a key's greatest candidates, greatest first.
IS_REPORT, IS_DECISION = b"\0", b"\1"


class Operator(StrEnum):
    NATIVE = "native"
    STOCK = "stock"


class Companion(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a checkpoint's state was made with, kept in the checkpoint. `candidates`: how many of a key it keeps (k)."""

    version: int = 1
    operator: Operator
    candidates: int
    state_partitions: int
    key_columns: tuple[str, ...]
    comparison_columns: tuple[str, ...]

    def tasks_max(self, slots: int) -> int:
        """How many tasks an epoch may have."""
        return slots if self.operator is Operator.NATIVE else self.candidates - 1


def new_companion(schema: Schema, upsert: UpsertConfig, *, slots: int, state_partitions: int) -> Companion:
    """Of a state that is made anew, here and now."""
    native = QUICK_JAR.exists()
    return Companion(
        operator=Operator.NATIVE if native else Operator.STOCK, candidates=2 if native else slots + 1,
        state_partitions=state_partitions, key_columns=schema.primary_key_columns,
        comparison_columns=upsert.comparison_columns,
    )  # fmt: skip


def read_companion(checkpoint: Path) -> Companion | None:
    """What the state in `checkpoint` was made with; None where none was made. Raises Corrupt."""
    path = checkpoint / COMPANION
    try:
        return msgspec.json.decode(path.read_bytes(), type=Companion)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{path} does not say what the key coordinator's state was made with: {error}") from error


def companion_for(checkpoint: Path, new: Companion) -> Companion:
    """That of the checkpoint, else `new`, written. Raises InvalidConfig if the table's keys or order are not those of
    the state, NoResource if the operator that made it is not there."""
    found = read_companion(checkpoint)
    if found is None:
        checkpoint.mkdir(parents=True, exist_ok=True)
        write_durably(checkpoint / COMPANION, msgspec.json.encode(new))
        return new
    if (found.key_columns, found.comparison_columns) != (new.key_columns, new.comparison_columns):
        raise InvalidConfig(
            f"the key coordinator's state was made for keys {', '.join(found.key_columns)} compared by "
            f"{', '.join(found.comparison_columns)}, the table says {', '.join(new.key_columns)} compared by "
            f"{', '.join(new.comparison_columns)}",
            hint="cremant table rebuild-keys makes it anew from the rows in force",
        )
    if found.operator is Operator.NATIVE and not QUICK_JAR.exists():
        raise NoResource(
            f"the key coordinator's state in {checkpoint} needs {QUICK_JAR}, which is not there",
            hint="install cremant anew; or run cremant table rebuild-keys, which makes a state that does without",
        )
    return found


def coordinate(frame: DataFrame, companion: Companion) -> DataFrame:
    """Candidates to decisions, one binary column. Fixed for a query's life: the operator, and k."""
    from pyspark.sql import DataFrame
    from pyspark.sql import functions as f

    short = f.length("key") < HASH_BYTES
    groups = frame.groupBy(f.when(short, f.col("key")).otherwise(f.unhex(f.md5("key"))).alias("hash"))
    if companion.operator is Operator.NATIVE:
        made = frame.sparkSession._jvm.dev.cremant.keys.KeyCoordinator.coordinate(groups._jgd)
        return DataFrame(made.toDF(), frame.sparkSession)
    is_report = short & (f.substring("key", -1, 1) == f.lit(REPORT_TAG))
    value = f.when(is_report, f.col("candidate")).otherwise(f.substring("candidate", -VALUE_BYTES, VALUE_BYTES))
    best = groups.agg(
        f.max_by(value, "candidate", companion.candidates).alias("best"), f.max(is_report).alias("report")
    )
    rest = [f.coalesce(f.get("best", f.lit(place)), f.lit(b"")) for place in range(1, companion.candidates)]
    report = f.concat(f.lit(IS_REPORT), f.get("best", f.lit(0)))
    decision = f.concat(f.lit(IS_DECISION), f.get("best", f.lit(0)), *rest)
    return best.select(f.when(f.col("report"), report).otherwise(decision).alias("value"))


def report_row(task: int, epoch: int, report: TaskReport) -> pa.RecordBatch:
    """A task's report as a row among the candidates: it begins with the epoch, so the newest one of a task wins."""
    candidate = epoch.to_bytes(8, "big") + msgspec.json.encode(report)
    row = {"candidate": candidate, "key": task.to_bytes(4, "big") + REPORT_TAG}
    return pa.RecordBatch.from_pylist([row], schema=CANDIDATE_SCHEMA)


def emitted(candidates: Candidates | None, task: int, epoch: int, report: TaskReport) -> Iterator[pa.RecordBatch]:
    """All that a task hands to the coordinator; None: it had no rows."""
    yield report_row(task, epoch, report)
    if candidates is not None and (batch := candidates.finish()).num_rows:
        yield batch
