# SPDX-License-Identifier: Apache-2.0
"""Every call that Apache Pinot answered in a recorded session, replayed in its order on a real cluster: same statuses,
names, types. Values and words are compared by the tests of the roles; here all roles answer together.

What depends on something that another process must first notice is asked again until it fits, for a while.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench.cluster import LocalCluster

from cremant.log.api import Message
from cremant.log.embedded import EmbeddedLog

GOLDEN = Path(__file__).parents[1] / "golden"
ROWS = 200
START_MS = 1_700_000_000_000
NOTICED_S = 20.0
#: number -> our status, and why the answer has another shape, or another status.
OTHER = {
    "005": (200, "our version names our package"),
    "091": (400, "a request that is wrong is the caller's fault"),
    "093": (400, "a request that is wrong is the caller's fault"),
    "095": (200, "the plan is ours"),
    "097": (200, "the trace is ours"),
    "129": (200, "the open segments stay open while paused, and are named at once"),
}
#: Ports and times within names.
_VARIABLE = re.compile(r"_\d+__\d{8}T\d{4}Z|(?<=_127\.0\.0\.1_)\d+|\d+__\d{8}T\d{4}Z")


def calls() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for path in sorted([*(GOLDEN / "rest").glob("*.json"), *(GOLDEN / "query").glob("*.json")], key=lambda p: p.name):
        call = json.loads(path.read_bytes())
        yield path.stem, call["request"], call["response"]


def shape(value: Any) -> Any:
    """Names and types; the elements of a list count once each; null fits everything."""
    if isinstance(value, dict):
        names = {_VARIABLE.sub("*", key).replace(".embedded.", ".kafka."): inner for key, inner in value.items()}
        return {name: shape(inner) for name, inner in names.items() if name != "goldoff"}  # an offline table
    if isinstance(value, list):
        shapes = [shape(inner) for inner in value]
        return [found for n, found in enumerate(shapes) if found not in shapes[:n]]
    if isinstance(value, bool) or value is None:
        return type(value).__name__
    return "number" if isinstance(value, int | float) else type(value).__name__


def difference(ours: Any, theirs: Any, where: str = "") -> str:
    """The first place where a shape lacks what Pinot's has, or has it otherwise. What ours has beside it does not
    disturb Pinot's clients."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key, wanted in theirs.items():
            if key not in ours:
                return f"{where}/{key} is missing"
            if found := difference(ours[key], wanted, f"{where}/{key}"):
                return found
        return ""
    if isinstance(theirs, list) and isinstance(ours, list):
        return difference(ours[0], theirs[0], f"{where}/0") if ours and theirs else ""
    if "NoneType" in (ours, theirs) or ours == theirs:
        return ""
    return f"{where}: {ours}, Pinot has {theirs}"


def embedded(body: Any) -> Any:
    if body is None or isinstance(body, str):
        return body
    return json.loads(json.dumps(body).replace("stream.kafka.", "stream.embedded.").replace('"kafka"', '"embedded"'))


def produce(cluster: LocalCluster) -> None:
    log = EmbeddedLog(Path(cluster.ready["logDir"]))
    for partition in range(2):
        rows = [
            {"user_id": n * 7 % 50, "country": ("FR", "DE", "US")[n % 3], "tags": ["a", "b"][: n % 2 + 1],
             "clicks": n % 10, "amount": n / 4, "ts": START_MS + n * 1000}
            for n in range(partition, ROWS, 2)
        ]  # fmt: skip
        log.append("gold", partition, [Message(json.dumps(row).encode()) for row in rows])
    log.close()


class Replay:
    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._http = httpx.Client(timeout=30.0, trust_env=False)
        self._instances = {
            f"{name}_127.0.0.1_{port}": f"{name}_127.0.0.1_{cluster.ready['roles'][role].rpartition(':')[2]}"
            for name, port, role in (("Server", 8098, "server-1"), ("Broker", 8099, "broker"))
        }
        self._segment = ""

    def answer(self, asked: dict[str, Any]) -> httpx.Response:
        rest = self._cluster.rest
        servers = self._cluster.ready["roles"]["server-1"]
        base = {"controller": rest.controller, "broker": rest.broker, "server": servers}[asked["component"]]
        url = asked["url_path"].replace("gold__0__0__20261120T1412Z", self._segment)
        for theirs, ours in self._instances.items():
            url = url.replace(theirs, ours)
        body = embedded(asked["body"])
        content = None if body is None else body.encode() if isinstance(body, str) else json.dumps(body).encode()
        headers = {"content-type": "application/json"} if content is not None else {}
        return self._http.request(asked["method"], base + url, content=content, headers=headers)

    def compare(self, name: str, asked: dict[str, Any], wanted: dict[str, Any]) -> str:
        """Empty, or how our answer differs. A GET is asked again while it does."""
        number, until = name[:3], time.monotonic() + NOTICED_S
        while True:
            answer = self.answer(asked)
            found = self._difference(number, answer, wanted)
            is_reading = asked["method"] == "GET" or asked["url_path"].startswith("/query")
            if not found or not is_reading or time.monotonic() > until:
                return f"{name}: {found}" if found else ""
            time.sleep(0.25)

    def _difference(self, number: str, answer: httpx.Response, wanted: dict[str, Any]) -> str:
        if number in OTHER:
            status, why = OTHER[number]
            is_ours = answer.status_code == status
            return "" if is_ours else f"status {answer.status_code}, ours is {status} ({why}): {answer.text[:300]}"
        if answer.status_code != wanted["status"]:
            return f"status {answer.status_code}, Pinot's {wanted['status']}: {answer.text[:300]}"
        if wanted["headers_content_type"] != "application/json":
            return ""
        body = answer.json()
        if number == "058":
            self._segment = body[0]["REALTIME"][0]
        codes = [[found["errorCode"] for found in doc.get("exceptions", [])] if isinstance(doc, dict) else []
                 for doc in (body, wanted["body"])]  # fmt: skip
        if codes[0] != codes[1]:
            return f"error codes {codes[0]}, Pinot's {codes[1]}: {answer.text[:300]}"
        if isinstance(body, dict) and body.get("resultTable"):
            schemas = [doc["resultTable"]["dataSchema"] for doc in (body, wanted["body"])]
            if schemas[0] != schemas[1]:
                return f"columns {schemas[0]}, Pinot's {schemas[1]}"
        return difference(shape(body), shape(wanted["body"]))


def test_a_recorded_session_with_pinot_goes_the_same_way(tmp_path: Path, phase: Callable[[str], None]) -> None:
    with LocalCluster(tmp_path / "data", servers=1) as cluster:
        cluster.run("topic", "create", "gold", "--partitions", "2")
        replay = Replay(cluster)
        differences: list[str] = []
        count = 0
        for name, asked, wanted in calls():
            number = name[:3]
            if number == "125":
                cluster.rest.call("POST", "/tables/gold/pauseConsumption")
            if number == "151":  # the recording dropped the table in between
                httpx.delete(f"{cluster.rest.controller}/tables/gold", timeout=30)
            count += 1
            if found := replay.compare(name, asked, wanted):
                differences.append(found)
            if number == "026":
                produce(cluster)
                cluster.rest.wait_for("SELECT COUNT(*) FROM gold", [[ROWS]], deadline_s=240)
        phase(f"{count} calls, {len(differences)} differ")
    assert count > 90
    if differences:
        pytest.fail("\n" + "\n".join(differences))
