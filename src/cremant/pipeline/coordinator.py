# SPDX-License-Identifier: Apache-2.0
"""The key coordinator of an upsert table: our own operator over Spark's state store (design: upsert.md).

    packs of candidates, one candidate per key and task      source.py, ingest/candidates.py, ingest/packs.py
    -> shuffle: a partition of the state gets the packs for it
    -> state: per key (itself below 16 bytes, else its 128-bit hash) the greatest candidate so far    jvm/src/.../keys
    -> what that means for rows: INSERT, DELETE              updates.py

To Spark it is no stateful operator: a function on partitions that opens the state store itself, version b for batch b,
in the query's checkpoint. What a state was made with is in a file beside Spark's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from cremant.ingest.packs import REPORT, packs
from cremant.model.errors import Corrupt, InvalidConfig, NoResource
from cremant.model.schema import Schema
from cremant.model.upsert import UpsertConfig
from cremant.pipeline.java import QUICK_JAR
from cremant.pipeline.reports import TaskReport
from cremant.pipeline.spec import write_durably

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: What leaves the source: packs of candidates, and the reports of the tasks, each for a partition of the state.
PACK_DDL = "partition INT, pack BINARY"
PACK_SCHEMA = pa.schema([pa.field("partition", pa.int32()), pa.field("pack", pa.binary())])
COMPANION = "cremant.json"
#: Of layouts: of the state, and of which partition a key is in. A state of another one counts as lost.
VERSION = 2
#: Of a state that is made anew. With one, a single core would do what comes behind the shuffle.
STATE_PARTITIONS = 2


class Companion(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a checkpoint's state was made with, kept in the checkpoint."""

    version: int
    state_partitions: int
    key_columns: tuple[str, ...]
    comparison_columns: tuple[str, ...]


def new_companion(schema: Schema, upsert: UpsertConfig) -> Companion:
    """Of a state that is made anew, here and now."""
    return Companion(
        version=VERSION, state_partitions=STATE_PARTITIONS, key_columns=schema.primary_key_columns,
        comparison_columns=upsert.comparison_columns,
    )  # fmt: skip


def read_companion(checkpoint: Path) -> Companion | None:
    """What the state in `checkpoint` was made with; None where none was made. Raises Corrupt, also where it was made by
    another version: what cannot be read is made anew."""
    path = checkpoint / COMPANION
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Companion)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{path} does not say what the key coordinator's state was made with: {error}") from error
    if found.version != VERSION:
        raise Corrupt(f"{path}: the key coordinator's state is of version {found.version}, expected {VERSION}")
    return found


def companion_for(checkpoint: Path, new: Companion) -> Companion:
    """That of the checkpoint, else `new`, written. Raises InvalidConfig if the table's keys or order are not those of
    the state, NoResource if the operator is not there."""
    if not QUICK_JAR.exists():
        raise NoResource(
            f"upsert tables need {QUICK_JAR}, which is not there",
            hint="install cremant anew; in a checkout, scripts/build-jar makes it",
        )
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
    return found


def has_state(checkpoint: Path, companion: Companion, version: int) -> bool:
    """Whether every partition of the state is there as batch `version - 1` left it, as changes or as a snapshot."""
    names = (f"{version}.", f"{version}_")
    partitions = (checkpoint / "state/0" / str(number) for number in range(companion.state_partitions))
    return all(any(path.name.startswith(names) for path in partition.glob("*")) for partition in partitions)


def coordinate(frame: DataFrame, companion: Companion, checkpoint: Path) -> DataFrame:
    """Packs (PACK_DDL) to what the operator says (`updates.apart`), one binary column. `checkpoint`: of the query that
    runs this, whose batches are numbered without gaps."""
    from pyspark.sql import DataFrame

    shuffled = frame.repartitionById(companion.state_partitions, "partition").select("pack")
    keys = frame.sparkSession._jvm.dev.cremant.keys.KeyCoordinator
    # As Hadoop reads it: a path behind a scheme, in which nothing is percent-encoded.
    made = keys.coordinate(shuffled._jdf, f"file:{checkpoint.absolute()}")
    return DataFrame(made.toDF(), frame.sparkSession)


def report_row(task: int, report: TaskReport, partitions: int) -> pa.RecordBatch:
    """A task's report as it travels among the packs (PACK_SCHEMA)."""
    return _rows([(task % partitions, bytes([REPORT]) + msgspec.json.encode(report))])


def packed(candidates: pa.RecordBatch, partitions: int) -> pa.RecordBatch:
    """Candidates (CANDIDATE_SCHEMA) on their way to the coordinator (PACK_SCHEMA)."""
    return _rows(list(packs(candidates, partitions)))


def _rows(rows: list[tuple[int, bytes]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [()] * len(PACK_SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, PACK_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=PACK_SCHEMA)
