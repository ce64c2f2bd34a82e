# SPDX-License-Identifier: Apache-2.0
"""What a rebalance would change or has still to do, in Pinot's shapes (RebalanceResult). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cremant.cluster.rebalance import Unit
from cremant.model.cluster import TableRecord
from cremant.model.jobs import JobStatus, RebalanceJob
from cremant.model.segments import ReplicaState

_TAG = "DefaultTenant_REALTIME"


@dataclass(frozen=True, slots=True)
class Moved:
    """One unit under its segment's name."""

    segment: str
    consuming: bool
    unit: Unit
    size_bytes: int
    #: Rows and age that a new replica of a consuming segment has to read.
    offsets_behind: int = 0
    age_minutes: int = 0


def rebalance_result(job: RebalanceJob, record: TableRecord, moved: list[Moved]) -> dict[str, Any]:
    """`moved`: all units of the table, settled ones, too. A plan that failed has no assignment."""
    answer: dict[str, Any] = {"jobId": job.job_id, "status": str(job.status), "description": job.description}
    if job.status is JobStatus.FAILED:
        return answer
    servers = sorted({server for replicas in job.target.values() for server in replicas})
    return {
        **answer,
        "rebalanceSummaryResult": _summary(record, moved),
        "instanceAssignment": {
            "CONSUMING": {
                "instancePartitionsName": f"{job.table}_CONSUMING",
                "partitionToInstancesMap": {"0_0": servers},
                "instanceToPartitionIdMap": dict.fromkeys(servers, 0),
            }
        },
        "segmentAssignment": {
            item.segment: dict.fromkeys(
                sorted(item.unit.target), str(ReplicaState.CONSUMING if item.consuming else ReplicaState.ONLINE)
            )
            for item in sorted(moved, key=lambda item: item.segment)
        },
    }


def _summary(record: TableRecord, moved: list[Moved]) -> dict[str, Any]:
    before = _per_server({item.segment: item.unit.replicas for item in moved})
    after = _per_server({item.segment: item.unit.target for item in moved})
    gains = {server: len(after[server] - before.get(server, set())) for server in after}
    getting = sorted(server for server, count in gains.items() if count)
    return {
        "serverInfo": {
            "numServersGettingNewSegments": len(getting),
            "numServers": _change(len(before), len(after)),
            "serversAdded": sorted(after.keys() - before.keys()),
            "serversRemoved": sorted(before.keys() - after.keys()),
            "serversUnchanged": sorted(after.keys() & before.keys()),
            "serversGettingNewSegments": getting,
            "serverSegmentChangeInfo": {
                server: _server_change(server, before, after) for server in sorted(before.keys() | after.keys())
            },
        },
        "segmentInfo": _segment_info(record, moved, max(gains.values(), default=0)),
        "tagsInfo": [
            {
                "tagName": _TAG,
                "numSegmentsToDownload": sum(gains.values()),
                "numSegmentsUnchanged": sum(len(after[s] & before.get(s, set())) for s in after),
                "numServerParticipants": len(after),
            }
        ],
    }


def _per_server(replicas: Mapping[str, tuple[str, ...]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for segment, servers in replicas.items():
        for server in servers:
            found.setdefault(server, set()).add(segment)
    return found


def _change(before: int, after: int) -> dict[str, int]:
    return {"valueBeforeRebalance": before, "expectedValueAfterRebalance": after}


def _server_change(server: str, before: dict[str, set[str]], after: dict[str, set[str]]) -> dict[str, Any]:
    had, gets = before.get(server, set()), after.get(server, set())
    status = "UNCHANGED" if had and gets else "ADDED" if gets else "REMOVED"
    return {
        "serverStatus": status,
        "totalSegmentsAfterRebalance": len(gets),
        "totalSegmentsBeforeRebalance": len(had),
        "segmentsAdded": len(gets - had),
        "segmentsDeleted": len(had - gets),
        "segmentsUnchanged": len(had & gets),
        "tagList": [_TAG],
    }


def _segment_info(record: TableRecord, moved: list[Moved], added_max: int) -> dict[str, Any]:
    sealed = [item for item in moved if not item.consuming]
    average = sum(item.size_bytes for item in sealed) // len(sealed) if sealed else 0
    added = {item.segment: len(set(item.unit.target) - set(item.unit.replicas)) for item in moved}
    deleted = sum(len(set(item.unit.replicas) - set(item.unit.target)) for item in moved)
    return {
        "totalSegmentsToBeMoved": sum(added.values()),
        "totalSegmentsToBeDeleted": deleted,
        "maxSegmentsAddedToASingleServer": added_max,
        "estimatedAverageSegmentSizeInBytes": average,
        "totalEstimatedDataToBeMovedInBytes": sum(item.size_bytes * added[item.segment] for item in sealed),
        "replicationFactor": _change(
            max((len(item.unit.replicas) for item in moved), default=0), record.config.replication
        ),
        "numSegmentsInSingleReplica": _change(len(moved), len(moved)),
        "numSegmentsAcrossAllReplicas": _change(
            sum(len(item.unit.replicas) for item in moved), sum(len(item.unit.target) for item in moved)
        ),
        "consumingSegmentToBeMovedSummary": _consuming([i for i in moved if i.consuming and added[i.segment]]),
    }


def _consuming(moved: list[Moved]) -> dict[str, Any]:
    getting: dict[str, list[Moved]] = {}
    for item in moved:
        for server in sorted(set(item.unit.target) - set(item.unit.replicas)):
            getting.setdefault(server, []).append(item)
    by_offsets = sorted(moved, key=lambda item: -item.offsets_behind)[:10]
    by_age = sorted(moved, key=lambda item: -item.age_minutes)[:10]
    return {
        "numConsumingSegmentsToBeMoved": sum(len(items) for items in getting.values()),
        "numServersGettingConsumingSegmentsAdded": len(getting),
        "consumingSegmentsToBeMovedWithMostOffsetsToCatchUp": {
            item.segment: item.offsets_behind for item in by_offsets
        },
        "consumingSegmentsToBeMovedWithOldestAgeInMinutes": {item.segment: item.age_minutes for item in by_age},
        "serverConsumingSegmentSummary": {
            server: {
                "numConsumingSegmentsToBeAdded": len(items),
                "totalOffsetsToCatchUpAcrossAllConsumingSegments": sum(item.offsets_behind for item in items),
            }
            for server, items in sorted(getting.items())
        },
    }
