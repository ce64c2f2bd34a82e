# SPDX-License-Identifier: Apache-2.0
"""Changes of the cluster view, as they travel: what differs between two versions, tables and segments by name.

`GET /internal/v1/view?since=N&nonce=X&deltas=true` answers an array of these, oldest first, under the header
`X-Cremant-View: deltas`; or the whole view where N is unknown or too old. A field that is absent has not changed.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from cremant.model.cluster import (
    LiveInstance,
    PartitionView,
    PipelineRecord,
    PipelineReport,
    TableRecord,
    TableView,
    TailReport,
)
from cremant.model.segments import ReplicaState, SegmentMetadata

VIEW_HEADER = "X-Cremant-View"
DELTAS = "deltas"


class TableDelta(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """`external`: what changed, by segment; without any replica it is gone. Partitions and segments by name."""

    record: TableRecord | UnsetType = UNSET
    partitions: tuple[PartitionView, ...] = ()
    segments: tuple[SegmentMetadata, ...] = ()
    segments_gone: tuple[str, ...] = ()
    external: dict[str, dict[str, ReplicaState]] = {}
    tails: dict[str, dict[str, TailReport]] = {}
    pipeline: PipelineReport | UnsetType | None = UNSET
    pipeline_record: PipelineRecord | UnsetType = UNSET


class ViewDelta(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """From version `since` to `version`. `whole`: tables that are new, or new again (another incarnation)."""

    since: int
    version: int
    controller_nonce: str
    instances: tuple[LiveInstance, ...] | UnsetType = UNSET
    tables: dict[str, TableDelta] = {}
    whole: dict[str, TableView] = {}
    gone: tuple[str, ...] = ()
