# SPDX-License-Identifier: Apache-2.0
"""The broker over HTTP: Pinot's answers field by field, partial answers that say so, freshness, real clients."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pinotdb
import pytest
import sqlalchemy
from broker_kit import START_MS, Kit, broker_kit

from cremant.model.segments import ColumnPartitions, SegmentStatus
from cremant.model.table import PartitionFunction

GOLDEN = Path(__file__).parents[2] / "golden" / "query"


@pytest.fixture(scope="module")
def shared_kit() -> Iterator[Kit]:
    with broker_kit() as kit:
        yield kit


@pytest.fixture
def kit(shared_kit: Kit) -> Kit:
    """Well-behaved again before each test."""
    for behaviour in shared_kit.servers.values():
        behaviour.delay_s, behaviour.behind, behaviour.error_code, behaviour.refuse = 0.0, False, 0, False
        behaviour.reply = None
        behaviour.asked.clear()
        behaviour.cancelled.clear()
    shared_kit.caught_up_at_ms[:] = [START_MS + 300_000, START_MS + 250_000]
    shared_kit.forget()
    return shared_kit


def ask(kit: Kit, sql: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(kit.url + "/query/sql", json={"sql": sql, **body}, timeout=20)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def rows(answer: dict[str, Any]) -> list[list[Any]]:
    assert answer["exceptions"] == []
    found: list[list[Any]] = answer["resultTable"]["rows"]
    return found


#: On purpose HTTP 400 in Pinot's error shape; Pinot answers 500 with plain text.
#: Has a test of its own.
OTHER = {"095-q-explain"}
REFUSED = {"091-q-timeout-zero", "093-q-not-json"}


def golden_queries() -> Iterator[Any]:
    for path in sorted(GOLDEN.glob("*.json")):
        recorded = json.loads(path.read_text())
        if recorded["request"]["url_path"] == "/sql":  # the controller's, which hands over to a broker
            recorded["request"]["url_path"] = "/query/sql"
        if recorded["request"]["url_path"].startswith("/query/sql") and path.stem not in REFUSED | OTHER:
            yield pytest.param(recorded["request"], recorded["response"], id=path.stem)


#: Hints that ours adds behind Pinot's message.
def without_hint(message: str) -> str:
    return message.split(" (")[0]


#: Our wording differs: Pinot quotes its parser or its operators there.
OWN_WORDS = {"089", "090", "094", "107", "103", "110"}
#: Answers that are exact here, whatever limit of groups is asked for.
EXACT = {"105"}


@pytest.mark.parametrize(("request_", "recorded"), list(golden_queries()))
def test_answers_look_as_those_recorded_from_pinot(
    kit: Kit, request_: dict[str, Any], recorded: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    disabled = "139" in request.node.callspec.id
    body = request_.get("body")
    if disabled:
        body = {"sql": "select count(*) from closed"}
    response = httpx.request(request_["method"], kit.url + request_["url_path"], json=body, timeout=20)
    assert response.status_code == recorded["status"]
    ours, theirs = response.json(), recorded["body"]
    missing = [key for key in theirs if key not in ours]
    assert missing == []
    order = [key for key in ours if key in theirs]
    assert order == list(theirs), "fields come in Pinot's order"
    assert ours.get("resultTable", {}).get("dataSchema") == theirs.get("resultTable", {}).get("dataSchema")
    assert [e["errorCode"] for e in ours["exceptions"]] == [e["errorCode"] for e in theirs["exceptions"]]
    if not any(request.node.callspec.id.endswith(name) or name in request.node.callspec.id for name in OWN_WORDS):
        assert [without_hint(e["message"]) for e in ours["exceptions"]] == [e["message"] for e in theirs["exceptions"]]
    if any(name in request.node.callspec.id for name in EXACT):
        assert (ours["partialResult"], ours["numGroupsLimitReached"]) == (False, False)
        return
    for key in ("partialResult", "numRowsResultSet", "pools"):
        if "q-group-by-having" not in request.node.callspec.id and not theirs["exceptions"]:
            assert ours[key] == theirs[key], key


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_requests_that_are_no_query_are_the_callers_fault(kit: Kit, name: str) -> None:
    asked = json.loads((GOLDEN / f"{name}.json").read_text())["request"]
    body = asked["body"] if isinstance(asked["body"], str) else json.dumps(asked["body"])
    response = httpx.post(kit.url + asked["url_path"], content=body)
    assert (response.status_code, response.json()["code"]) == (400, 400)


@pytest.mark.parametrize(
    "name", ["113-broker-cancel-list", "114-broker-routing", "115-broker-time-boundary", "157-broker-not-found-path"]
)
def test_other_endpoints_answer_in_the_shapes_recorded_from_pinot(kit: Kit, name: str) -> None:
    recorded = json.loads((GOLDEN / f"{name}.json").read_text())
    response = httpx.request(recorded["request"]["method"], kit.url + recorded["request"]["url_path"])
    theirs = recorded["response"]
    assert (response.status_code, response.headers["content-type"]) == (
        theirs["status"],
        theirs["headers_content_type"],
    )
    if "routing" not in name:
        assert response.json() == theirs["body"]
        return
    (table,) = theirs["body"]
    assert list(response.json()) == [table]
    assert [type(names) for names in response.json()[table].values()] == [list]


def test_an_explained_query_is_answered_by_the_broker_as_recorded_from_pinot(kit: Kit) -> None:
    recorded = json.loads((GOLDEN / "095-q-explain.json").read_text())
    answer = ask(kit, recorded["request"]["body"]["sql"])
    theirs = recorded["response"]["body"]["resultTable"]
    assert answer["resultTable"]["dataSchema"] == theirs["dataSchema"]
    assert rows(answer)[:3] == theirs["rows"][:3]
    assert all(not behaviour.asked for behaviour in kit.servers.values())
    assert rows(ask(kit, "explain plan for select 1")) == [["BROKER_EVALUATE", 0, -1]]


def test_a_trace_has_the_shape_recorded_from_pinot(kit: Kit) -> None:
    recorded = json.loads((GOLDEN / "097-q-trace.json").read_text())
    answer = ask(kit, recorded["request"]["body"]["sql"], trace=True)
    theirs = recorded["response"]["body"]["traceInfo"]
    for info in (theirs, answer["traceInfo"]):
        assert all(isinstance(text, str) and json.loads(text) for text in info.values())


def test_rows_of_all_partitions_are_counted_once(kit: Kit) -> None:
    answer = ask(kit, "select count(*), sum(clicks), min(ts), max(ts) from gold")
    assert rows(answer) == [[200, 900.0, float(START_MS), float(START_MS + 199_000)]]
    assert answer["totalDocs"] == 200
    assert answer["numServersQueried"] == answer["numServersResponded"]


def test_a_query_over_few_rows_goes_to_one_server_and_is_spread_on_demand(kit: Kit) -> None:
    assert ask(kit, "select count(*) from gold")["numServersQueried"] == 1
    spread = ask(kit, "set useFixedReplica = true; set numReplicaGroupsToQuery = 2; select count(*) from gold")
    assert (spread["numServersQueried"], rows(spread)) == (2, [[200]])


def test_pages_of_an_unordered_selection_are_cut_at_the_broker(kit: Kit) -> None:
    assert len(rows(ask(kit, "select user_id from gold limit 150, 100"))) == 50
    assert len(rows(ask(kit, "select user_id from gold"))) == 10
    assert rows(ask(kit, "select user_id from gold limit 0")) == []


def test_freshness_is_the_minimum_over_the_partitions(kit: Kit) -> None:
    answer = ask(kit, "select count(*) from gold")
    assert answer["minConsumingFreshnessTimeMs"] == START_MS + 250_000
    now_ms = time.time() * 1000
    assert answer["freshnessLagMs"] == pytest.approx(now_ms - START_MS - 250_000, abs=5_000)
    assert answer["lastEventAgeMs"] == pytest.approx(now_ms - START_MS - 199_000, abs=5_000)
    assert (answer["numPartitionsExpected"], answer["numPartitionsReporting"]) == (2, 2)
    assert (answer["numConsumingSegmentsQueried"], answer["epoch"], answer["freshnessSource"]) == (2, 5, "create")


def test_a_clock_ahead_is_no_negative_lag(kit: Kit) -> None:
    ahead = int(time.time() * 1000) + 3_600_000
    kit.caught_up_at_ms[:] = [ahead, ahead]
    assert ask(kit, "select count(*) from gold")["freshnessLagMs"] == 0


def test_the_read_token_names_the_rows_of_the_answer(kit: Kit) -> None:
    token = ask(kit, "select count(*) from gold")["readToken"]
    decoded = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    assert decoded == {"t": "gold", "i": "abc", "e": 5, "o": {"0": 100, "1": 100}}


@pytest.mark.parametrize("fault", ["behind", "refuse"])
def test_what_one_replica_cannot_serve_the_other_does(kit: Kit, fault: str) -> None:
    setattr(kit.servers["Server_1"], fault, True)
    answer = ask(kit, "select count(*) from gold")
    assert rows(answer) == [[200]]
    assert answer["partialResult"] is False
    assert answer["numServersQueried"] == answer["numServersResponded"]


def test_when_nobody_can_serve_the_answer_says_so_and_its_freshness_is_unknown(kit: Kit) -> None:
    for behaviour in kit.servers.values():
        behaviour.behind = True
    answer = ask(kit, "select count(*) from gold")
    assert answer["partialResult"] is True
    assert [exception["errorCode"] for exception in answer["exceptions"]] == [305]
    assert (answer["minConsumingFreshnessTimeMs"], answer["freshnessLagMs"]) == (0, None)


def test_a_silent_server_does_not_keep_the_answer_of_the_other_replica_back(kit: Kit) -> None:
    first = kit.service.network
    for behaviour in kit.servers.values():
        behaviour.delay_s = 2.5
    kit.servers["Server_1"].delay_s = 0.0
    answers = [ask(kit, "set timeoutMs=2000; select count(*) from gold") for _ in range(3)]
    assert [rows(answer) for answer in answers] == [[[200]]] * 3
    assert max(answer["timeUsedMs"] for answer in answers) < 1_500
    assert answers[-1]["timeUsedMs"] < 500, "known by then"
    assert first.loads.hedges_total == 1
    time.sleep(2.0)


def test_rows_that_arrived_are_given_out_although_a_server_kept_silent(kit: Kit) -> None:
    """Partition 0 is only on Server_1, which says nothing; partition 1 only on Server_2."""
    whole = kit.view
    gold = whole.tables["gold"]
    partitions = tuple(
        msgspec.structs.replace(
            part, record=msgspec.structs.replace(part.record, replicas=(f"Server_{part.record.partition + 1}",))
        )
        for part in gold.partitions
    )
    kit.view = msgspec.structs.replace(
        whole, version=2, tables={"gold": msgspec.structs.replace(gold, partitions=partitions, tails={})}
    )
    kit.servers["Server_1"].delay_s = 1.5
    try:
        answer = ask(kit, "set timeoutMs=700; select count(*) from gold")
    finally:
        kit.view = whole
    assert answer["resultTable"]["rows"] == [[100]]
    assert answer["partialResult"] is True
    assert [exception["errorCode"] for exception in answer["exceptions"]] == [427]
    assert (answer["numServersQueried"], answer["numServersResponded"]) == (2, 1)
    assert (answer["minConsumingFreshnessTimeMs"], answer["freshnessLagMs"]) == (0, None)
    time.sleep(1.0)


def test_silent_servers_are_named_in_time(kit: Kit) -> None:
    for behaviour in kit.servers.values():
        behaviour.delay_s = 1.0
    began_s = time.monotonic()
    answer = ask(kit, "select count(*) from gold", queryOptions="timeoutMs=200")
    assert time.monotonic() - began_s < 0.9
    assert [exception["errorCode"] for exception in answer["exceptions"]] == [427]
    assert "resultTable" not in answer
    assert answer["numServersResponded"] < answer["numServersQueried"]
    time.sleep(1.0)


def test_errors_become_http_codes_only_for_those_who_ask(kit: Kit) -> None:
    headers = {"Pinot-Use-Http-Status-For-Errors": "true"}
    response = httpx.post(kit.url + "/query/sql", json={"sql": "select x from nosuch"}, headers=headers)
    assert (response.status_code, response.headers["X-Pinot-Error-Code"]) == (404, "190")
    response = httpx.post(kit.url + "/query/sql", json={"sql": "select 1"}, headers=headers)
    assert (response.status_code, response.headers["X-Pinot-Error-Code"]) == (200, "-1")


@pytest.mark.parametrize("content", [b"nope", b"{}", b'{"sql": 7}', b'"select 1"', b""])
def test_a_request_without_a_query_is_refused(kit: Kit, content: bytes) -> None:
    response = httpx.post(kit.url + "/query/sql", content=content)
    assert response.status_code == 400
    assert response.json()["code"] == 400


def test_a_timeout_that_is_no_number_is_refused(kit: Kit) -> None:
    response = httpx.post(kit.url + "/query/sql", json={"sql": "select 1", "queryOptions": "timeoutMs=0"})
    assert (response.status_code, "between 1 and" in response.json()["error"]) == (400, True)


def test_options_of_set_win_over_option_over_the_request(kit: Kit) -> None:
    sql = "select count(*) from gold option(clientQueryId=two, timeoutMs=100)"
    assert ask(kit, sql, queryOptions="clientQueryId=one")["clientRequestId"] == "two"
    sql = f"set clientQueryId='three'; {sql}; set timeoutMs=9000"
    assert ask(kit, sql, queryOptions=";clientQueryId=one;unknownKey=x")["clientRequestId"] == "three"


def test_the_multi_stage_engine_is_refused_by_name(kit: Kit) -> None:
    answer = ask(kit, "select count(*) from gold", queryOptions="useMultistageEngine=true")
    assert answer["exceptions"][0]["errorCode"] == 700
    assert "multi-stage" in answer["exceptions"][0]["message"]


def test_a_running_query_is_listed_and_can_be_cancelled(kit: Kit) -> None:
    for behaviour in kit.servers.values():
        behaviour.delay_s = 1.5
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(ask(kit, "select count(*) from gold")))
    thread.start()
    listed: dict[str, str] = {}
    deadline_s = time.monotonic() + 5
    while not listed and time.monotonic() < deadline_s:
        listed = httpx.get(kit.url + "/queries").json()
    ((request_id, sql),) = listed.items()
    assert sql == "select count(*) from gold"
    assert httpx.delete(f"{kit.url}/query/{request_id}").status_code == 200
    thread.join(5)
    assert [exception["errorCode"] for exception in answers[0]["exceptions"]] == [503]
    assert httpx.delete(f"{kit.url}/query/{request_id}").status_code == 404
    assert httpx.get(kit.url + "/queries").json() == {}
    time.sleep(1.5)


def test_freshness_is_measured_once_per_query_on_consuming_partitions(kit: Kit) -> None:
    def observed() -> float:
        lines = httpx.get(kit.url + "/metrics").text.splitlines()
        found = [line for line in lines if line.startswith("pinot_broker_freshnessLagMs_count")]
        return float(found[0].split()[-1]) if found else 0.0

    before = observed()
    ask(kit, "select count(*) from gold")
    ask(kit, "select 1")
    ask(kit, "select nocol from gold")
    assert observed() == before + 1


def test_the_routing_table_names_servers_and_segments(kit: Kit) -> None:
    found = httpx.get(kit.url + "/debug/routingTable/gold_REALTIME").json()
    segments = sorted(name for listed in found["gold_REALTIME"].values() for name in listed)
    assert segments == ["gold__0__0__x", "gold__1__0__x"]
    assert httpx.get(kit.url + "/debug/routingTable/nosuch").status_code == 404
    assert httpx.get(kit.url + "/debug/timeBoundary/gold").status_code == 404


def test_pinotdb_reads_rows_types_and_errors(kit: Kit) -> None:
    port = int(kit.url.rsplit(":", 1)[1])
    connection = pinotdb.connect(host="127.0.0.1", port=port, path="/query/sql", scheme="http")
    cursor = connection.cursor()
    cursor.execute("select country, count(*) c from gold where country <> %(no)s group by country order by country",
                   {"no": "US"})  # fmt: skip
    assert [tuple(row) for row in cursor.fetchall()] == [("DE", 67), ("FR", 67)]
    cursor.execute("select * from gold order by ts limit 1")
    assert [column[0] for column in cursor.description] == [
        "amount", "clicks", "country", "extra", "tags", "ts", "user_id"
    ]  # fmt: skip
    assert list(cursor.fetchone()) == [0.0, 0, "FR", "null", ["a"], START_MS, 0]
    with pytest.raises(pinotdb.exceptions.DatabaseError, match="nocol"):
        cursor.execute("select nocol from gold")


def test_sqlalchemy_connects_pings_and_selects(kit: Kit) -> None:
    address = kit.url.removeprefix("http://")
    engine = sqlalchemy.create_engine(f"pinot://{address}/query/sql?controller=http://127.0.0.1:1/", pool_pre_ping=True)
    gold = sqlalchemy.table("gold", sqlalchemy.column("country"), sqlalchemy.column("amount"))
    query = (
        sqlalchemy.select(gold.c.country, sqlalchemy.func.sum(gold.c.amount).label("total"))
        .group_by(gold.c.country)
        .order_by(gold.c.country)
        .limit(1)
    )
    with engine.connect() as connection:
        assert [tuple(row) for row in connection.execute(query)] == [("DE", 1675.0)]


def test_sealed_segments_of_other_partitions_are_not_asked_for_and_counted(kit: Kit) -> None:
    held = kit.view
    table = held.tables["gold"]
    sealed = tuple(
        msgspec.structs.replace(
            table.partitions[0].consuming,
            name=f"gold__0__{number}__old", status=SegmentStatus.DONE, end_offset=1, rows=1,
            partitioning={"user_id": ColumnPartitions(function=PartitionFunction.MODULO, partitions=7, ids=(number,))},
        )
        for number in (1, 2)
    )  # fmt: skip
    expected = ask(kit, "SELECT COUNT(*) FROM gold WHERE user_id IN (7, 14)")
    kit.view = msgspec.structs.replace(
        held, tables=held.tables | {"gold": msgspec.structs.replace(table, segments=sealed)}
    )
    try:
        answer = ask(kit, "SELECT COUNT(*) FROM gold WHERE user_id IN (7, 14)")
    finally:
        kit.view = held
    assert rows(answer) == rows(expected)
    assert (expected["numSegmentsPrunedByBroker"], answer["numSegmentsPrunedByBroker"]) == (0, 2)
    assert all(query.segments == () for behaviour in kit.servers.values() for query in behaviour.asked)
