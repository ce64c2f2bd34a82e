# SPDX-License-Identifier: Apache-2.0
"""Pipeline functions that the tests name in table configs; workers import this module, too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F


def shout_and_drop(frame: DataFrame) -> DataFrame:
    """Values change, every third row goes."""
    return frame.withColumn("name", F.upper("name")).filter(F.col("id") % 3 != 0)


def drop_everything(frame: DataFrame) -> DataFrame:
    return frame.filter(F.lit(False))


def in_arrow(frame: DataFrame) -> DataFrame:
    def double(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow.compute as pc

        for batch in batches:
            yield batch.set_column(batch.schema.get_field_index("v"), "v", pc.multiply(batch.column("v"), 2.0))

    return frame.mapInArrow(double, frame.schema)


def some_nulls(frame: DataFrame) -> DataFrame:
    return frame.withColumn("name", F.when(F.col("id") % 2 == 0, F.col("name")))


def shuffled(frame: DataFrame) -> DataFrame:
    return frame.repartition(4)


def counted(frame: DataFrame) -> DataFrame:
    return frame.groupBy("name").count()


def sorted_rows(frame: DataFrame) -> DataFrame:
    return frame.orderBy("id")


def without_columns(frame: DataFrame) -> DataFrame:
    return frame.select("id", "name")


def wrong_type(frame: DataFrame) -> DataFrame:
    return frame.withColumn("v", F.col("v").cast("string"))


def not_a_frame(frame: DataFrame) -> int:
    return 42


def twice(frame: DataFrame) -> DataFrame:
    """Every row two times, hidden from the plan."""

    def repeat(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            yield batch

    return frame.mapInArrow(repeat, frame.schema)


def dice(frame: DataFrame) -> DataFrame:
    """Another name each time, and partition 1 fails until the file that DICE_MAY_PASS names is there."""
    gate = os.environ["DICE_MAY_PASS"]  # read on the driver

    def roll(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if 1 in batch.column("$partition").to_pylist() and not Path(gate).exists():
                raise RuntimeError("not yet")
            word = os.urandom(4).hex()
            yield batch.set_column(
                batch.schema.get_field_index("name"), "name", pa.array([word] * batch.num_rows, pa.string())
            )

    return frame.mapInArrow(roll, frame.schema)
