# SPDX-License-Identifier: Apache-2.0
"""REST calls that a server of Apache Pinot answered, replayed against a real one: same statuses, names and types."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[2] / "golden" / "rest-server"
_TIME = re.compile(r"\d{8}T\d{4}Z")


def _ours(text: str, segment: str) -> str:
    return text.replace("gold__0__0__20261120T1412Z", segment).replace("gold", "trips")


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return sorted({json.dumps(_shape(inner)) for inner in value})
    return type(value).__name__


def test_recorded_calls_are_answered_alike(make_cluster: Any, kit: Any) -> None:
    """Two partitions that consume, nothing sealed, as when it was recorded."""
    cluster = make_cluster(partitions=2)
    cluster.epochs.start()
    [server] = cluster.servers
    kit.eventually(lambda: cluster.http.get(f"{server.url}/health/readiness").status_code == 200)
    segment = cluster.view().tables["trips"].partitions[0].consuming.name
    differences = []
    for path in sorted(GOLDEN.glob("*.json")):
        call = json.loads(path.read_bytes())
        asked, wanted = call["request"], call["response"]
        answer = cluster.http.request(asked["method"], server.url + _ours(asked["url_path"], segment))
        is_json = wanted["headers_content_type"] == "application/json"
        body, expected = (answer.json(), wanted["body"]) if is_json else (answer.text, wanted["body"])
        alike = _shape(body) == _shape(expected) if is_json else body == expected
        message = body.get("message") if isinstance(body, dict) else None
        said = expected.get("message") if isinstance(expected, dict) else None
        if (answer.status_code, message) != (wanted["status"], said) or not alike:
            differences.append(f"{path.name}: {answer.status_code} {answer.text}\n    Pinot: {wanted}")
    assert not differences, "\n" + "\n".join(differences)
    assert len(list(GOLDEN.glob("*.json"))) == 6


def test_metadata_of_sealed_and_of_unknown_segments(make_cluster: Any, kit: Any) -> None:
    cluster = make_cluster(partitions=1, flush_rows=100)
    cluster.epochs.start()
    cluster.epochs.write(150)
    cluster.epochs.write(10)
    [server] = cluster.servers
    [sealed] = kit.eventually(lambda: cluster.view().tables["trips"].segments)
    url = f"{server.url}/tables/trips_REALTIME/segments"
    kit.eventually(lambda: sealed.name in cluster.http.get(url).json()["segments"])
    # The controller knows of the commit a moment before the server has installed it: until then it is the open one.
    kit.eventually(lambda: cluster.http.get(f"{url}/{sealed.name}/metadata").json()["totalDocs"])
    found = cluster.http.get(f"{url}/{sealed.name}/metadata").json()
    assert (found["totalDocs"], found["startOffset"], found["endOffset"]) == (150, "0", "150")
    assert found["crc"] > 0
    missing = cluster.http.get(f"{url}/nothing/metadata")
    assert missing.status_code == 404
    assert missing.json() == {"message": "Table trips_REALTIME segments nothing does not exist", "status": 404}
