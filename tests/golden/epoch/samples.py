# SPDX-License-Identifier: Apache-2.0
"""The records of which golden bytes are kept, one or more per kind, and how the files are made.

A field that came to a version later is optional: what was written without it stays as it was.

A new format version gets a new directory: `python tests/golden/epoch/samples.py` writes the files of the newest one.
Files that are there are never written again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from cremant.epoch.format import VERSION, encode, row_block
from cremant.epoch.records import (
    EpochMark,
    Fence,
    Gap,
    GapReason,
    Heartbeat,
    PartitionMark,
    Record,
    Reset,
    RowBlock,
    UpdateBlock,
)
from cremant.epoch.updates import update_block
from cremant.model.offsets import OffsetRange

INCARNATION = "00c0ffee00c0ffee"
HERE = Path(__file__).parent
ADDED = ("rejected_from_ms",)


def samples() -> dict[str, Record]:
    rows = pa.record_batch(
        {
            "$offset": pa.array([41, 41, 43], pa.int64()),
            "$subRow": pa.array([0, 1, 0], pa.int32()),
            "$ingestionTime": pa.array([1_700_000_000_001, 1_700_000_000_001, None], pa.int64()),
            "user": pa.array(["ann", "bob", "Çelik"]),
            "price": pa.array([1.5, -0.0, 2.25e10]),
            "tags": pa.array([["a", "b"], [], ["c"]], pa.list_(pa.field("item", pa.string(), nullable=False))),
            "paid": pa.array([True, False, True]),
        }
    )
    return {
        "row_block": row_block(
            generation=7,
            epoch=12,
            config_version=3,
            range=OffsetRange(40, 45),
            batch=rows,
            rejected=1,
            filtered=1,
            timestamp_type="logAppend",
        ),
        "row_block_empty": row_block(
            generation=7,
            epoch=12,
            config_version=3,
            range=OffsetRange(45, 47),
            batch=rows.slice(0, 0),
            filtered=2,
            timestamp_type="create",
        ),
        "row_block_rejected": row_block(
            generation=7,
            epoch=12,
            config_version=3,
            range=OffsetRange(47, 50),
            batch=rows.slice(0, 0),
            rejected=2,
            timestamp_type="logAppend",
            max_ingestion_ms=1_700_000_000_009,
            rejected_from_ms=1_700_000_000_007,
        ),
        "update_block": update_block(
            generation=7, epoch=12, offsets=[43, 3, 41, 41], sub_rows=[0, 2, 1, 0], ops=[0, 1, 0, 1]
        ),
        "update_block_empty": update_block(generation=7, epoch=12, offsets=[], sub_rows=[], ops=[]),
        "gap": Gap(generation=7, range=OffsetRange(10, 40), reason=GapReason.EXPIRED),
        "epoch_mark": EpochMark(
            generation=8,
            epoch=12,
            previous=10,
            blocks_generation=7,
            config_version=3,
            partitions=(
                PartitionMark(
                    end=47, rows=3, rejected=1, filtered=3, max_ingestion_ms=1_700_000_000_001, stream_end=50
                ),
                PartitionMark(end=0, rows=0, stream_end=0, reached_at_ms=1_700_000_000_500),
            ),
        ),
        "heartbeat": Heartbeat(generation=8, last_closed=12, ends=(47, 0), at_ms=1_700_000_001_000),
        "fence": Fence(generation=8),
        "reset": Reset(generation=9, epoch=10),
    }


def as_json(record: Record) -> dict[str, Any]:
    """A record in words; the rows of a block as columns."""
    built: dict[str, Any] = {"kind": type(record).__name__}
    for field in record.__struct_fields__:
        value = getattr(record, field)
        if value is None and field in ADDED:
            continue
        built[field] = msgspec.to_builtins(value) if field != "batch" else value.to_pydict()
    if isinstance(record, RowBlock | UpdateBlock):
        built["types"] = {field.name: str(field.type) for field in record.batch.schema}
    loaded: dict[str, Any] = json.loads(json.dumps(built))
    return loaded


def main() -> None:
    target = HERE / f"v{VERSION}"
    target.mkdir(exist_ok=True)
    for name, record in samples().items():
        if (target / f"{name}.bin").exists():
            continue
        (target / f"{name}.bin").write_bytes(encode(record, INCARNATION))
        (target / f"{name}.json").write_text(json.dumps(as_json(record), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
