# SPDX-License-Identifier: Apache-2.0
"""The REST calls that Apache Pinot answered, replayed in their order: same statuses, names, types and messages.

What differs on purpose is listed here, each with its reason.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from control import Cluster, tail

from cremant.model.cluster import InstanceReport, PipelineReport, Role

GOLDEN = Path(__file__).parents[2] / "golden" / "rest"

#: number -> why the text of `error`, `comment` or `status` differs. Status and shape must agree all the same.
OTHER_WORDS = {
    "019": "our own parser names the place in the document",
    "029": "the hint says more",
    "030": "our own JSON parser",
    "129": "consumption resumes in place: no new segments are created",
}
#: number -> why the body has another shape.
OTHER_SHAPE = {
    "005": "our version",
    "129": "the open segments stay open while paused, and are named at once",
}
#: Sequence and time of a segment's name: the recording had cut some segments already.
_TIME = re.compile(r"\d+__\d{8}T\d{4}Z")


def _embedded(body: Any) -> str | bytes | None:
    if body is None:
        return None
    if isinstance(body, str):
        return body.encode()
    return json.dumps(body).replace("stream.kafka.", "stream.embedded.").replace('"kafka"', '"embedded"')


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            _TIME.sub("TIME", key).replace(".embedded.", ".kafka."): _shape(inner)
            for key, inner in value.items()
            if key != "goldoff"
        }
    if isinstance(value, list):
        shapes = [_shape(inner) for inner in value]
        return [shape for n, shape in enumerate(shapes) if shape not in shapes[:n]]
    return type(value).__name__


def _words(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [str(value[key]) for key in ("error", "status", "comment", "pauseFlag", "state") if key in value]
    return []


def test_recorded_calls_are_answered_alike(still_cluster: Cluster) -> None:
    cluster = still_cluster  # on a busy machine nobody dies between two calls
    cluster.beat("Server_127.0.0.1_8098")
    cluster.beat("Broker_127.0.0.1_8099", Role.BROKER)
    cluster.post("/topics", {"name": "gold", "partitions": 2})
    differences: list[str] = []
    segment = ""
    for path in sorted(GOLDEN.glob("*.json")):
        number, call = path.name[:3], json.loads(path.read_bytes())
        asked, wanted = call["request"], call["response"]
        if number == "125":
            cluster.post("/tables/gold/pauseConsumption")
        if number == "151":  # the recording dropped the table in between
            cluster.request("DELETE", "/tables/gold")
        _play_members(cluster)
        url = asked["url_path"].replace("gold__0__0__20261120T1412Z", segment)
        answer = cluster.request(asked["method"], url, content=_embedded(asked["body"]))
        is_json = wanted["headers_content_type"] == "application/json"
        body = answer.json() if is_json else answer.text
        if number == "058":
            segment = body[0]["REALTIME"][0]
        if answer.status_code != wanted["status"]:
            differences.append(
                f"{path.name}: status {answer.status_code}, Pinot's {wanted['status']}: {answer.text[:300]}"
            )
        elif number not in OTHER_SHAPE and _shape(body) != _shape(wanted["body"]):
            differences.append(
                f"{path.name}: {json.dumps(_shape(body))}\n    Pinot: {json.dumps(_shape(wanted['body']))}"
            )
        elif number not in OTHER_WORDS and _words(body) != _words(wanted["body"]):
            differences.append(f"{path.name}: {_words(body)}\n    Pinot: {_words(wanted['body'])}")
    assert not differences, "\n" + "\n".join(differences)


def _play_members(cluster: Cluster) -> None:
    """A server that tails what it is given, and a pipeline that pauses when told."""
    view = cluster.controller.view.build(0)
    tails, pipelines = [], []
    for table in view.tables.values():
        tails += [tail(table, p.record.partition, next_offset=100) for p in table.partitions]
        state = "paused" if table.record.paused else "running"
        pipelines.append(PipelineReport(table=table.name, incarnation=table.record.incarnation, state=state))
    cluster.beat("Server_127.0.0.1_8098", report=InstanceReport(tails=tuple(tails)))
    cluster.beat("Broker_127.0.0.1_8099")
    cluster.beat("Pipeline_127.0.0.1_8100", Role.PIPELINE, report=InstanceReport(pipelines=tuple(pipelines)))


def test_the_server_instance_has_pinots_names(cluster: Cluster) -> None:
    """No gRPC and no multi-stage ports (-1), no JVM to report the memory of."""
    cluster.beat("Server_127.0.0.1_8098")
    assert cluster.get("/instances/Server_127.0.0.1_8098") == {
        "instanceName": "Server_127.0.0.1_8098",
        "hostName": "127.0.0.1",
        "enabled": True,
        "port": "8098",
        "tags": ["DefaultTenant_REALTIME"],
        "pools": None,
        "grpcPort": -1,
        "adminPort": 8098,
        "queryServicePort": -1,
        "queryMailboxPort": -1,
        "shutdownInProgress": False,
    }
