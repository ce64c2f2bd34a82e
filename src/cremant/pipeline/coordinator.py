# SPDX-License-Identifier: Apache-2.0
"""The key coordinator of an upsert table: a Spark aggregation over Spark's state store (design: upsert.md).

    candidates (key, rank, value), one per key and task      source.py, ingest/candidates.py
    -> shuffle by key (itself below 16 bytes, else its 128-bit hash)
    -> state: per key the k greatest candidates by rank      max_by(value, rank, k), update mode
    -> what that means for rows: INSERT, DELETE              updates.py

k must exceed the number of tasks of one epoch, because each may bring a candidate of the same key and all of them
together must not push the row in force out of the state: its DELETE would be lost. So tasks are at most k - 1, and k
stays with the checkpoint, in a file beside Spark's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from cremant.ingest.candidates import CANDIDATE_SCHEMA, Candidates
from cremant.model.errors import Corrupt, InvalidConfig
from cremant.model.schema import Schema
from cremant.model.upsert import UpsertConfig
from cremant.pipeline.reports import TaskReport
from cremant.pipeline.spec import write_durably

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: What leaves the source: candidates, and the reports of the tasks under keys of their own.
CANDIDATE_DDL = "key BINARY, rank BINARY, value BINARY"
#: Keys below this length stand for themselves; a hash has exactly this length.
HASH_BYTES = 16
COMPANION = "cremant.json"
#: First byte of the keys under which the reports of tasks travel; no key of a row begins so.
REPORT_PREFIX = b"\0"


class Companion(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a checkpoint's state was made with, kept in the checkpoint. `candidates`: k."""

    version: int = 1
    candidates: int
    state_partitions: int
    key_columns: tuple[str, ...]
    comparison_columns: tuple[str, ...]

    @property
    def tasks_max(self) -> int:
        return self.candidates - 1


def read_companion(checkpoint: Path) -> Companion | None:
    """What the state in `checkpoint` was made with; None where none was made. Raises Corrupt."""
    path = checkpoint / COMPANION
    try:
        return msgspec.json.decode(path.read_bytes(), type=Companion)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{path} does not say what the key coordinator's state was made with: {error}") from error


def companion_for(
    checkpoint: Path, schema: Schema, upsert: UpsertConfig, *, tasks: int, state_partitions: int
) -> Companion:
    """That of the checkpoint, else a new one for `tasks` tasks per epoch at most, written. Raises InvalidConfig if
    the table's keys or order are not those of the state."""
    wanted = Companion(
        candidates=tasks + 1, state_partitions=state_partitions, key_columns=schema.primary_key_columns,
        comparison_columns=upsert.comparison_columns,
    )  # fmt: skip
    found = read_companion(checkpoint)
    if found is None:
        checkpoint.mkdir(parents=True, exist_ok=True)
        write_durably(checkpoint / COMPANION, msgspec.json.encode(wanted))
        return wanted
    if (found.key_columns, found.comparison_columns) != (wanted.key_columns, wanted.comparison_columns):
        raise InvalidConfig(
            f"the key coordinator's state was made for keys {', '.join(found.key_columns)} compared by "
            f"{', '.join(found.comparison_columns)}, the table says {', '.join(wanted.key_columns)} compared by "
            f"{', '.join(wanted.comparison_columns)}",
            hint="cremant table rebuild-keys makes it anew from the rows in force",
        )
    return found


def coordinate(frame: DataFrame, candidates: int) -> DataFrame:
    """Per key that this epoch touched: `key`, and `best`, the values of its `candidates` greatest, greatest first."""
    from pyspark.sql import functions as f

    key = f.when(f.length("key") < HASH_BYTES, f.col("key")).otherwise(f.unhex(f.md5("key")))
    return frame.groupBy(key.alias("key")).agg(f.max_by("value", "rank", candidates).alias("best"))


def report_row(task: int, epoch: int, report: TaskReport) -> pa.RecordBatch:
    """A task's report as a row among the candidates: its rank is the epoch, so the newest one of a task wins."""
    number = epoch.to_bytes(8, "big")
    key = REPORT_PREFIX + task.to_bytes(4, "big")
    row = {"key": key, "rank": number, "value": number + msgspec.json.encode(report)}
    return pa.RecordBatch.from_pylist([row], schema=CANDIDATE_SCHEMA)


def emitted(candidates: Candidates, task: int, epoch: int, report: TaskReport) -> Iterator[pa.RecordBatch]:
    """All that a task hands to the coordinator."""
    yield report_row(task, epoch, report)
    batch = candidates.finish()
    if batch.num_rows:
        yield batch
