# SPDX-License-Identifier: Apache-2.0
"""What a table says of its primary keys (`upsertConfig`): how the row in force of a key is found, and for how long what
was in force before can be asked for. Source: upsert design, "Table"."""

from __future__ import annotations

from enum import StrEnum

import msgspec
import pyarrow as pa

#: `$validUntil` of a row that is in force.
UNSET_EPOCH = 2**63 - 1


class NullKeyPolicy(StrEnum):
    """What becomes of a row with a null in its primary key: dead-lettered, or a row of its own that nothing
    supersedes."""

    REJECT = "reject"
    APPEND = "append"


class CompactionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """When replaced rows of a sealed segment go (Pinot's UpsertCompactionTask): its newest row came `buffer_ms` ago or
    earlier, and of its rows at least `percent`, and at least `count`, are superseded."""

    buffer_ms: int = 7 * 24 * 3_600_000
    percent: float = 0.0
    count: int = 1


class UpsertConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A table has one iff it is an upsert table; its key columns are `Schema.primary_key_columns`.

    Of the rows of a key the greatest by (`comparison_columns`, partition, offset, sub-row) is in force, whatever order
    they arrive in. If its `delete_column` is true it is a tombstone: in force, but not visible.
    """

    comparison_columns: tuple[str, ...]
    delete_column: str | None = None
    null_key: NullKeyPolicy = NullKeyPolicy.REJECT
    #: How far below the newest value of the (only, numeric) comparison column a key may fall before it expires, in
    #: units of that column; None: keys live as long as their rows.
    ttl: float | None = None
    #: The same for tombstones (`deletedKeysTTL`); None: as `ttl`.
    deleted_ttl: float | None = None
    #: The TTL of a table that names none: its retention, if the comparison column is the time column and a number. Goes
    #: by the controller's clock, as the retention of segments does; None: not so.
    retained_ms: int | None = None
    #: How long what was visible can still be asked for (`asOfEpoch`, late brokers); versions are kept that long.
    history_ms: int = 60_000
    #: None: rows stay in their segment as long as it lives.
    compaction: CompactionConfig | None = None


class Visibility(StrEnum):
    """Which versions a query sees at its epoch L."""

    #: In force and not deleted: what the table is.
    VISIBLE = "visible"
    #: In force, tombstones too (`SET skipUpsertDelete = true`).
    IN_FORCE = "inForce"
    #: Everything taken up to L, superseded rows too (`SET skipUpsert = true`).
    ALL = "all"


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """One consistent cut through a table: every server answers as of the closed epoch `epoch` (L). `unkeyed`: the
    broker takes the table for one that had no keys yet at L, so all rows are shown; a server that knows better refuses.
    """

    epoch: int
    visibility: Visibility = Visibility.VISIBLE
    unkeyed: bool = False


#: What an update does to a row.
INSERT = 0
DELETE = 1
#: Updates of one epoch to rows of one partition.
UPDATE_SCHEMA = pa.schema(
    [
        pa.field("$offset", pa.int64(), nullable=False),
        pa.field("$subRow", pa.int32(), nullable=False),
        pa.field("op", pa.int8(), nullable=False),
    ]
)
