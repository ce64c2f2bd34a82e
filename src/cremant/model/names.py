# SPDX-License-Identifier: Apache-2.0
"""Names: tables, segments, instances, internal topics, columns that Cremant adds.

A table that is dropped and created again is another table: every durable name below carries the *incarnation*
(16 hex digits, drawn once at creation), so old bytes can never be mistaken for new ones (rule E-8).
"""

from __future__ import annotations

import datetime
import re
from typing import NamedTuple

from cremant.model.errors import InvalidConfig

OFFSET = "$offset"
SUB_ROW = "$subRow"
INGESTION_TIME = "$ingestionTime"
PARTITION = "$partition"
#: Epochs between which a row of an upsert table was in force: [`$validFrom`, `$validUntil`).
VALID_FROM = "$validFrom"
VALID_UNTIL = "$validUntil"
#: In an upsert table a LONG column of this name is filled with the row's offset (key-coordinator design).
KAFKA_OFFSET = "KafkaOffset"
#: Prefix of the boolean companion columns `$isNull.<column>`, present when a table's null handling is on.
IS_NULL_PREFIX = "$isNull."
#: One number for all group keys of a row: the broker writes it into a server's query, the server fills it.
GROUP_KEY = "$key"

_RAW_TABLE = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.\-]*$")
_TOPIC = re.compile(r"^[A-Za-z0-9._\-]{1,200}$")
REALTIME_SUFFIX = "_REALTIME"
OFFLINE_SUFFIX = "_OFFLINE"


def check_table_name(raw: str) -> str:
    """A raw table name without type suffix. Raises InvalidConfig: `__` separates the parts of a segment name."""
    if not _RAW_TABLE.match(raw) or "__" in raw or len(raw) > 128:
        raise InvalidConfig(
            f"table name {raw!r} is not allowed",
            hint="letters, digits, '_', '-' and '.', at most 128, and no double underscore",
        )
    return raw


def check_topic_name(topic: str) -> str:
    if not _TOPIC.match(topic) or topic in (".", ".."):
        raise InvalidConfig(
            f"topic name {topic!r} is not allowed", hint="1 to 200 of letters, digits, '.', '_' and '-'"
        )
    return topic


def raw_table_name(name: str) -> str:
    """`gold_REALTIME` -> `gold`; a raw name stays as it is."""
    for suffix in (REALTIME_SUFFIX, OFFLINE_SUFFIX):
        if name.endswith(suffix):
            return name[: -len(suffix)]
    return name


def epoch_topic(table: str, incarnation: str) -> str:
    """Topic of a table's epoch log."""
    return f"epochs.{raw_table_name(table)}.{incarnation}"


def is_epoch_topic(topic: str) -> bool:
    """Epoch logs are kept until their consumers are past them, whatever the retention of streams is."""
    return topic.startswith("epochs.")


def dead_letter_topic(table: str, incarnation: str) -> str:
    return f"dead-letters.{raw_table_name(table)}.{incarnation}"


class SegmentName(NamedTuple):
    """`table__partition__sequence__yyyyMMddTHHmmZ`, Pinot's name of a realtime (LLC) segment."""

    table: str
    partition: int
    sequence: int
    created: str

    @classmethod
    def new(cls, table: str, partition: int, sequence: int, now_ms: int) -> SegmentName:
        minute = datetime.datetime.fromtimestamp(now_ms / 1000, tz=datetime.UTC).strftime("%Y%m%dT%H%MZ")
        return cls(raw_table_name(table), partition, sequence, minute)

    @classmethod
    def parse(cls, text: str) -> SegmentName:
        parts = text.split("__")
        if len(parts) != 4 or not parts[1].isdigit() or not parts[2].isdigit():
            raise InvalidConfig(f"segment name {text!r} is not of the form table__partition__sequence__yyyyMMddTHHmmZ")
        return cls(parts[0], int(parts[1]), int(parts[2]), parts[3])

    def __str__(self) -> str:
        return f"{self.table}__{self.partition}__{self.sequence}__{self.created}"


def instance_id(role: str, host: str, port: int) -> str:
    """Pinot's spelling: `Server_127.0.0.1_8098`."""
    return f"{role.capitalize()}_{host}_{port}"
