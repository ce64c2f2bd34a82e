# SPDX-License-Identifier: Apache-2.0
"""An upsert table on real processes, as docs/upsert.md tells it: accounts on a stream that is not keyed by them,
deletes, history, answers as of an epoch, read tokens, segments that are sealed meanwhile, a restarted server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.cluster import LocalCluster, is_complete
from lanes import WRONG

SCHEMA: dict[str, Any] = {
    "schemaName": "accounts",
    "updateSemantic": "upsert",
    "primaryKey": "UserId",
    "dimensionFieldSpecs": [
        {"name": "UserId", "dataType": "STRING"},
        {"name": "closed", "dataType": "BOOLEAN"},
        {"name": "KafkaOffset", "dataType": "LONG"},
    ],
    "metricFieldSpecs": [{"name": "AccountBalance", "dataType": "DOUBLE"}],
    "dateTimeFieldSpecs": [
        {"name": "ts", "dataType": "LONG", "format": "1:MILLISECONDS:EPOCH", "granularity": "1:MILLISECONDS"}
    ],
}
TABLE: dict[str, Any] = {
    "tableName": "accounts",
    "tableType": "REALTIME",
    "segmentsConfig": {"timeColumnName": "ts", "replication": "2"},
    "tenants": {},
    "metadata": {},
    "tableIndexConfig": {
        "streamConfigs": {
            "streamType": "embedded",
            "stream.embedded.topic.name": "accounts",
            "stream.embedded.consumer.prop.auto.offset.reset": "smallest",
            "realtime.segment.flush.threshold.rows": "3",
        }
    },
    "upsertConfig": {"mode": "FULL", "deleteRecordColumn": "closed"},
    "cremant": {"upsert": {"historyMs": 600_000}},
}
BALANCE = "SELECT AccountBalance FROM accounts WHERE UserId = 'abc-12'"
AVERAGE = "SELECT avg(AccountBalance) FROM accounts"
APPEND = "SET skipUpsert = true; "
ALL = APPEND + "SELECT count(*) FROM accounts"


class Story:
    """Rows one by one, each under a key of its own, so any partition may get it."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.rest = cluster.rest
        self.produced = 0

    def tell(self, *rows: tuple[str, float, int], closed: bool = False) -> None:
        lines = []
        for user, balance, ts in rows:
            self.produced += 1
            row = {"UserId": user, "AccountBalance": balance, "ts": ts, "closed": closed}
            lines.append(json.dumps({"key": f"message {self.produced}", "value": row}))
        self.rest.call("POST", "/topics/accounts?keyed=true", content="\n".join(lines))
        self.rest.wait_for(ALL, [[self.produced]], deadline_s=240)

    def is_told(self, sql: str, rows: list[list[Any]]) -> dict[str, Any]:
        """At once, unless the answer itself says that something is missing."""
        deadline_s = time.monotonic() + 60
        while not is_complete(answer := self.rest.query(sql)):
            assert time.monotonic() < deadline_s, answer
        assert sorted(answer["resultTable"]["rows"]) == sorted(rows), f"{WRONG}: {sql}: {answer}"
        return answer


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path / "data", servers=2) as running:
        yield running


@pytest.mark.timeout(400)
def test_the_story_of_accounts(cluster: LocalCluster, phase: Callable[[str], None]) -> None:
    cluster.run("topic", "create", "accounts", "--partitions", "3")
    cluster.rest.add_table(SCHEMA, TABLE)
    story = Story(cluster)
    phase("the example of the design")
    story.tell(("abc-12", 100, 1), ("abc-13", 102, 2))
    first = story.is_told(BALANCE, [[100.0]])
    story.is_told(AVERAGE, [[101.0]])
    story.tell(("abc-12", 200, 3))
    story.is_told(BALANCE, [[200.0]])
    story.is_told(AVERAGE, [[151.0]])
    story.is_told(APPEND + BALANCE, [[100.0], [200.0]])
    story.is_told(APPEND + AVERAGE, [[134.0]])
    story.tell(("abc-13", 300, 4))
    story.is_told(BALANCE, [[200.0]])
    last = story.is_told(AVERAGE, [[250.0]])
    story.is_told(APPEND + AVERAGE, [[175.5]])

    phase("late, deleted, revived")
    story.tell(("abc-12", 1, 2))
    story.is_told(BALANCE, [[200.0]])
    story.tell(("abc-12", 0, 10), closed=True)
    story.is_told(BALANCE, [])
    story.is_told("SET skipUpsertDelete = true; " + BALANCE, [[0.0]])
    story.is_told("SELECT count(*), sum(AccountBalance) FROM accounts", [[1, 300.0]])
    story.tell(("abc-12", 50, 5))
    story.is_told(BALANCE, [])
    story.tell(("abc-12", 60, 11))
    story.is_told(BALANCE, [[60.0]])

    phase("history")
    assert first["epoch"] < last["epoch"]
    story.is_told(f"SET asOfEpoch = {first['epoch']}; {BALANCE}", [[100.0]])
    story.is_told(f"SET asOfEpoch = {first['epoch']}; {AVERAGE}", [[101.0]])
    story.is_told(f"SET asOfEpoch = {last['epoch']}; {AVERAGE}", [[250.0]])
    newest = story.is_told(f"SET notBefore = '{last['readToken']}'; {AVERAGE}", [[180.0]])
    assert newest["epoch"] >= last["epoch"]
    versions = "SELECT AccountBalance FROM accounts WHERE UserId = 'abc-12' AND $validUntil IS NULL"
    story.is_told(APPEND + versions, [[60.0]])
    story.is_told("SELECT count(*) FROM accounts WHERE KafkaOffset = $offset", [[2]])

    explained = cluster.rest.rows("EXPLAIN PLAN FOR " + AVERAGE)
    assert explained[0][0].startswith("BROKER_REDUCE")
    refused = cluster.rest.query(f"SET asOfEpoch = 0; {AVERAGE}")
    assert is_complete(refused) or "epoch" in str(refused["exceptions"]), refused

    phase("the same from sealed segments, and from a restarted server")
    cluster.rest.call("POST", "/tables/accounts/forceCommit")
    story.tell(("abc-14", 30, 1))
    cluster.kill("server-1")
    for _ in range(20):
        story.is_told(
            "SELECT UserId, AccountBalance FROM accounts", [["abc-12", 60.0], ["abc-13", 300.0], ["abc-14", 30.0]]
        )
        story.is_told(f"SET asOfEpoch = {last['epoch']}; {AVERAGE}", [[250.0]])
        story.is_told(APPEND + AVERAGE, [[(100 + 102 + 200 + 300 + 1 + 0 + 50 + 60 + 30) / 9]])

    phase("what the controller knows")
    state = cluster.rest.call("GET", "/tables/accounts/upsert")
    assert state["config"]["primaryKeyColumns"] == ["UserId"]
    assert state["coordinator"]["generation"] > 0
