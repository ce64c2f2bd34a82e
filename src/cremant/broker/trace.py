# SPDX-License-Identifier: Apache-2.0
"""What `trace=true` tells: where the time of a query went, per server and in the broker. Pure.

Pinot's shape: `traceInfo` maps an instance to a JSON text. Ours have, per request to a server, `roundTripMs` (seen by
the broker), `elapsedMs` (by the server), of it `waitMs` (for a query slot, or for rows that `notBefore` names), and
what was scanned; of the broker, its stages in order.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from cremant.broker.scatter import Arrival
from cremant.wire.messages import ServerAnswer


def trace_info(
    broker_id: str, stages_ms: dict[str, float], answers: Iterable[tuple[ServerAnswer, Arrival]]
) -> dict[str, str]:
    told: dict[str, list[dict[str, object]]] = {}
    for answer, arrival in answers:
        told.setdefault(answer.instance, []).append(
            {
                "roundTripMs": round(arrival.round_trip_ms, 2),
                "elapsedMs": round(answer.elapsed_ms, 2),
                "waitMs": round(answer.wait_ms, 2),
                "segmentsQueried": answer.segments_queried,
                "segmentsPruned": answer.segments_pruned,
                "segmentsProcessed": answer.segments_processed,
                "segmentsMatched": answer.segments_matched,
                "docsTotal": answer.docs_total,
                "docsScanned": answer.docs_scanned,
                "rowsSent": arrival.rows.num_rows if arrival.rows is not None else 0,
                "consumingPartitions": [tail.partition for tail in answer.partitions],
            }
        )
    info = {instance: msgspec.json.encode(requests).decode() for instance, requests in sorted(told.items())}
    stages = {name: round(value, 2) for name, value in stages_ms.items()}
    return {broker_id: msgspec.json.encode(stages).decode(), **info}
