# SPDX-License-Identifier: Apache-2.0
"""A hand-written epoch log of an upsert table: rows of few keys in partitions at random, updates by the reference
model, and what the versions of any range of rows must be."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from server_kit import EpochLog, open_segment_metadata, table_record
from upsert_model import History, UpsertModel

from cremant.epoch import format as records
from cremant.epoch.records import EpochMark, PartitionMark
from cremant.epoch.updates import update_block
from cremant.log.api import Log
from cremant.model.cluster import TableRecord
from cremant.model.offsets import OffsetRange, Position
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.model.segments import SegmentMetadata
from cremant.model.upsert import Cut, UpsertConfig
from cremant.segment.build import build_segment, spec_of
from cremant.segment.layout import stored_columns
from cremant.segment.reader import SealedSegment, derive
from cremant.segment.versions import UNSET_EPOCH, Versions
from cremant.server.steps import as_committed

INCARNATION = "00000000000000aa"
SCHEMA = Schema(
    name="trips",
    fields=(
        FieldSpec(name="driver", data_type=DataType.LONG, field_type=FieldType.DIMENSION),
        FieldSpec(name="gone", data_type=DataType.BOOLEAN, field_type=FieldType.DIMENSION),
        FieldSpec(
            name="ts", data_type=DataType.LONG, field_type=FieldType.DATE_TIME,
            format="1:MILLISECONDS:EPOCH", granularity="1:MILLISECONDS",
        ),
    ),
    primary_key_columns=("driver",),
)  # fmt: skip
UPSERT = UpsertConfig(comparison_columns=("ts",), delete_column="gone")


def upsert_record(**config: Any) -> TableRecord:
    record = table_record(upsert=UPSERT, **config)
    return msgspec.structs.replace(record, table_schema=SCHEMA)


@dataclass
class UpsertLog(EpochLog):
    """`write` closes an epoch with rows of `keys` keys, comparison values with ties and late ones, some deletes."""

    schema: Schema = SCHEMA
    keys: int = 20
    seed: int = 1
    #: After a Reset, until the next mark: the epoch it follows.
    reset_to: int | None = None
    model: UpsertModel = field(default_factory=UpsertModel)
    #: By partition: the position just behind each closed epoch.
    positions: list[dict[int, Position]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.history = History(self.model, self.partitions)

    def create(self) -> UpsertLog:
        start = Position(log_offset=0, epoch=0, generation=0, next_offset=0)
        self.positions = [{0: start} for _ in range(self.partitions)]
        super().create()
        return self

    def block(self, partition: int, rows: int) -> int:
        first = self.ends[partition]
        offsets = list(range(first, first + rows))
        drivers = [self.dice.randrange(self.keys) for _ in offsets]
        gone = [self.dice.random() < 0.3 for _ in offsets]
        times = [self.newest_ms + self.epoch * 10 + self.dice.randrange(-30, 10) for _ in offsets]
        for offset, key, deleted, ts in zip(offsets, drivers, gone, times, strict=True):
            self.model.apply(partition, offset, 0, key, ts, deleted, ts)
        columns = {
            "$offset": offsets, "$subRow": [0] * rows, "$ingestionTime": times,
            "driver": drivers, "gone": gone, "ts": times,
        }  # fmt: skip
        batch = pa.RecordBatch.from_pydict(columns, schema=stored_columns(self.schema))
        record = records.row_block(
            generation=self.generation, epoch=self.epoch + 1, config_version=1,
            range=OffsetRange(first, first + rows), batch=batch, timestamp_type="logAppend",
        )  # fmt: skip
        self.append(partition, record)
        self.ends[partition] += rows
        return first + rows

    def mark(self, *, reached_at_ms: int | None = None, expire_below: int | None = None) -> int:
        """`expire_below`: the epoch is a seed that leaves out keys whose row in force is older."""
        closing = self.epoch + 1
        if expire_below is None:
            updates = self.history.close(closing, self.ends)
        else:
            updates = self.history.expire(closing, expire_below)
        for partition, lines in updates.items():
            offsets, sub_rows, ops = zip(*sorted(lines), strict=True)
            block = update_block(
                generation=self.generation, epoch=closing, offsets=offsets, sub_rows=sub_rows, ops=ops
            )  # fmt: skip
            self.append(partition, block)
        lines_of_mark = tuple(
            PartitionMark(
                end=end, rows=end - closed, updates=len(updates.get(partition, ())), stream_end=end,
                reached_at_ms=reached_at_ms,
            )
            for partition, (end, closed) in enumerate(zip(self.ends, self.closed, strict=True))
        )  # fmt: skip
        mark = EpochMark(
            generation=self.generation, epoch=closing, blocks_generation=self.generation, config_version=1,
            previous=self.reset_to if self.reset_to is not None else self.epoch, partitions=lines_of_mark,
        )  # fmt: skip
        for partition in range(self.partitions):
            at = self.append(partition, mark)
            self.positions[partition][closing] = Position(
                log_offset=at + 1, epoch=closing, generation=self.generation, next_offset=self.ends[partition]
            )
        self.epoch, self.reset_to = closing, None
        self.closed = list(self.ends)
        return closing

    # --- what must be ---

    def expected(self, partition: int, first: int, end: int, epoch: int) -> dict[int, tuple[int, int]]:
        """Offset -> ($validFrom, $validUntil) of the rows of a range as seen at `epoch`."""
        found = {}
        for (owner, offset, _), version in self.history.versions.items():
            if owner == partition and first <= offset < end and version.valid_from <= epoch:
                until = version.valid_until
                seen = until if until is not None and until <= epoch else UNSET_EPOCH
                found[offset] = (version.valid_from, seen)
        return found

    def sealed(
        self, root: Path, partition: int, from_epoch: int, to_epoch: int, *, record: TableRecord | None = None
    ) -> tuple[SegmentMetadata, SealedSegment]:
        """The rows of epochs (from, to] as a segment, committed long ago."""
        start, end = self.positions[partition][from_epoch], self.positions[partition][to_epoch]
        record = record or upsert_record()
        opened = open_segment_metadata(partition, from_epoch, start, ("me", "other"))
        rows = [
            row for location, row in sorted(self.model.rows.items())
            if location[0] == partition and start.next_offset <= location[1] < end.next_offset
        ]  # fmt: skip
        columns = {
            "$offset": [row.offset for row in rows], "$subRow": [0] * len(rows),
            "$ingestionTime": [row.value for row in rows], "driver": [row.key for row in rows],
            "gone": [row.deleted for row in rows], "ts": [row.value for row in rows],
        }  # fmt: skip
        batch = pa.RecordBatch.from_pydict(columns, schema=stored_columns(self.schema))
        directory = root / opened.name
        built = build_segment(directory, [batch], spec_of(record), fsync=False)
        made = derive(directory, opened.name, built.checksum, fsync=False)
        return as_committed(opened, end, built, None), made


def shown(versions: Versions, epoch: int) -> dict[int, tuple[int, int]]:
    """Offset -> ($validFrom, $validUntil) at a closed epoch, as `UpsertLog.expected` has it."""
    order = versions.order
    since, until = versions.epochs_of(Cut(epoch=epoch))
    if order is not None:  # back to (offset, sub-row) order
        since, until = since[np.argsort(order)], until[np.argsort(order)]
    offsets = versions.locations.all_offsets().tolist()
    rows = zip(offsets, since.tolist(), until.tolist(), strict=True)
    return {offset: (first, last) for offset, first, last in rows if first <= epoch}


def upsert_log(log: Log, **fields: Any) -> UpsertLog:
    return UpsertLog(log, **fields).create()
