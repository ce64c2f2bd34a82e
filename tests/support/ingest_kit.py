# SPDX-License-Identifier: Apache-2.0
"""Builds schemas, table configs and message batches for tests of ingest."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa

from cremant.log.api import MessageBatch, RowMetadata, TimestampType
from cremant.model.schema import Schema
from cremant.model.schema_json import parse_schema
from cremant.model.table import TableConfig
from cremant.model.table_json import parse_table

FIRST_OFFSET = 100
TIME_MS = 1_700_000_000_000


def schema_of(columns: dict[str, Any], **more: Any) -> Schema:
    """`columns`: name -> type, or a dict with dataType and other keys. `ts` is added as the time column."""
    specs = [
        {"name": name, **(spec if isinstance(spec, dict) else {"dataType": spec})} for name, spec in columns.items()
    ]
    metrics = [spec for spec in specs if spec.pop("metric", False)]
    document = {
        "schemaName": "t",
        "dimensionFieldSpecs": [spec for spec in specs if spec not in metrics],
        "metricFieldSpecs": metrics,
        "dateTimeFieldSpecs": [
            {"name": "ts", "dataType": "TIMESTAMP", "format": "TIMESTAMP", "granularity": "1:MILLISECONDS"}
        ],
        **more,
    }
    return parse_schema(document)[0]


def config_of(*, nulls: bool = False, stream: dict[str, str] | None = None, **ingestion: Any) -> TableConfig:
    """`stream`: more properties, `decoder.class.name` and the like, behind `stream.embedded.`."""
    more = {f"stream.embedded.{key}": value for key, value in (stream or {}).items()}
    transforms = ingestion.pop("transforms", {})
    filter_function = ingestion.pop("filter_function", None)
    if transforms:
        ingestion["transformConfigs"] = [
            {"columnName": column, "transformFunction": function} for column, function in transforms.items()
        ]
    if filter_function is not None:
        ingestion["filterConfig"] = {"filterFunction": filter_function}
    return parse_table(
        {
            "tableName": "t",
            "tableType": "REALTIME",
            "segmentsConfig": {"timeColumnName": "ts"},
            "tenants": {},
            "tableIndexConfig": {
                "nullHandlingEnabled": nulls,
                "streamConfigs": {"streamType": "embedded", "stream.embedded.topic.name": "t", **more},
            },
            "ingestionConfig": ingestion,
            "metadata": {},
        }
    )


def messages_of(records: list[Any], *, first: int = FIRST_OFFSET, times: list[int] | None = None) -> MessageBatch:
    """Records as JSON; bytes and None as they are. Message i has offset first + 2 * i: offsets may have holes."""
    values = [item if item is None or isinstance(item, bytes) else json.dumps(item).encode() for item in records]
    count = len(values)
    return MessageBatch(
        offsets=np.arange(count, dtype=np.int64) * 2 + first,
        values=pa.array(values, pa.binary()),
        next_offset=first + 2 * count,
        metadata=RowMetadata(
            timestamps_ms=np.array(times if times is not None else [TIME_MS] * count, dtype=np.int64),
            timestamp_type=TimestampType.LOG_APPEND,
        ),
    )
