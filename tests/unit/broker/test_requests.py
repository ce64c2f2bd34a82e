# SPDX-License-Identifier: Apache-2.0
"""Requests to a broker, well-formed and not; answers as Arrow; traces; queries that end early; bounds."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pyarrow as pa
import pytest
from broker_kit import START_MS, Kit, broker_kit

from cremant.broker.arrow import MEDIA_TYPE, METADATA_KEY
from cremant.broker.rest import read_query
from cremant.broker.room import Admission
from cremant.cluster.load import Loads
from cremant.model.errors import UserError
from cremant.model.limits import QUERY_TEXT_CHARS_MAX

COUNT = "select count(*) from gold"


@pytest.fixture(scope="module")
def shared_kit() -> Iterator[Kit]:
    with broker_kit() as kit:
        yield kit


@pytest.fixture
def kit(shared_kit: Kit) -> Iterator[Kit]:
    yield shared_kit
    for behaviour in shared_kit.servers.values():
        behaviour.delay_s, behaviour.behind, behaviour.refuse, behaviour.reply = 0.0, False, False, None
        behaviour.asked.clear()
        behaviour.cancelled.clear()
    shared_kit.forget()


def post(kit: Kit, sql: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(kit.url + "/query/sql", json={"sql": sql, **body}, timeout=20)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def codes(answer: dict[str, Any]) -> list[int]:
    return [exception["errorCode"] for exception in answer["exceptions"]]


def wait_until(condition: Callable[[], object], deadline_s: float = 10) -> None:
    until_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


# --- forms of a request ---


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (json.dumps({"sql": COUNT}), "application/json; charset=utf-8"),
        (json.dumps({"sql": COUNT}), "text/plain"),
        (json.dumps({"sql": COUNT}), "application/x-www-form-urlencoded"),  # what curl -d sends
        (" \n" + json.dumps({"sql": COUNT, "queryOptions": None, "trace": "false", "unknown": [1]}), "x/y"),
        (f"sql={quote(COUNT)}", "application/x-www-form-urlencoded"),
        (f"trace=true&sql={quote(COUNT)}&queryOptions=timeoutMs%3D9000", "application/x-www-form-urlencoded"),
    ],
)
def test_a_query_is_understood_however_it_comes(kit: Kit, content: str, content_type: str) -> None:
    response = httpx.post(kit.url + "/query/sql", content=content, headers={"Content-Type": content_type})
    assert response.json()["resultTable"]["rows"] == [[200]]


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (rb'{"sql": "select \ud800 from gold"}', "\\ud800, at line 1, column 8"),
        (rb'{"sql": "select * from \udc00x", "queryOptions": null}', "\\udc00, at line 1, column 15"),
        (rb'{"sql": "select count(*) from gold", "queryOptions": "a=\ud83d"}', "queryOptions has half"),
        (rb'{"sql": "select ' + b"1," * 5_000 + rb'\ud800"}', "column 10008"),
    ],
)
def test_half_of_a_surrogate_pair_is_an_error_of_the_query_with_its_place(kit: Kit, body: bytes, place: str) -> None:
    response = httpx.post(kit.url + "/query/sql", content=body)
    answer = response.json()
    assert (response.status_code, codes(answer)) == (200, [150])
    assert place in answer["exceptions"][0]["message"]
    assert httpx.get(kit.url + "/queries").json() == {}


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (b'{"sql": "select 1"', "application/json"),
        (b'{"sql": null}', "application/json"),
        (b'{"sql": "\xff"}', "application/json"),
        (b"[]", "application/json"),
        (b"\x00\x01\x02", "application/octet-stream"),
        (b"select 1", "text/plain"),
        (b"query=select+1", "application/x-www-form-urlencoded"),
        (b"", "application/x-www-form-urlencoded"),
        (b"[" * 100_000, "application/json"),
    ],
)
def test_a_body_without_a_query_is_refused_with_what_to_send(kit: Kit, content: bytes, content_type: str) -> None:
    response = httpx.post(kit.url + "/query/sql", content=content, headers={"Content-Type": content_type})
    assert (response.status_code, response.json()["code"]) == (400, 400)
    assert "Payload is not a query" in response.json()["error"]
    assert "Traceback" not in response.text


def test_a_long_text_works_up_to_the_limit_and_is_refused_clearly_beyond_it(kit: Kit) -> None:
    values = ",".join(str(10_000_000 + number) for number in range(20_000))
    assert post(kit, f"select count(*) from gold where user_id in (7,{values})")["resultTable"]["rows"] == [[4]]
    answer = post(kit, "select 1" + " " * QUERY_TEXT_CHARS_MAX)
    assert codes(answer) == [150]
    assert "at most" in answer["exceptions"][0]["message"]
    response = httpx.post(kit.url + "/query/sql", content=b" " * (6 * QUERY_TEXT_CHARS_MAX + 1), timeout=20)
    assert (response.status_code, "larger than" in response.json()["error"]) == (413, True)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"a=1&" * 101 + b"sql=select", "application/x-www-form-urlencoded"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b', "sql": "select 1"}', "application/json"),
    ],
)
def test_forms_of_too_many_fields_and_documents_nested_too_deeply_carry_no_query(
    body: bytes, content_type: str
) -> None:
    with pytest.raises(UserError, match="Payload is not a query"):
        read_query(body, content_type)


def test_a_path_that_does_not_exist_is_answered_as_pinot_does(kit: Kit) -> None:
    response = httpx.get(kit.url + "/nosuchpath")
    assert (response.status_code, response.json()) == (404, {"code": 404, "error": "HTTP 404 Not Found"})
    assert httpx.get(kit.url + "/queries").json() == {}


# --- options ---


@pytest.mark.parametrize(
    "option",
    ["timeoutMs=x", "timeoutMs=-1", f"timeoutMs={'9' * 5_000}", "numReplicaGroupsToQuery=0",
     "maxQueryResponseSizeBytes=no"],
)  # fmt: skip
def test_numbers_that_are_none_are_refused(kit: Kit, option: str) -> None:
    response = httpx.post(kit.url + "/query/sql", json={"sql": COUNT, "queryOptions": option})
    assert (response.status_code, "must be a number" in response.json()["error"]) == (400, True)


def test_more_bytes_than_the_query_wants_fail_it_alone_and_name_the_server(kit: Kit) -> None:
    sql = "select user_id, country, ts from gold limit 200"
    answer = post(kit, f"set maxServerResponseSizeBytes = 500; {sql}")
    assert codes(answer) == [245]
    assert answer["exceptions"][0]["message"].startswith("Server_")
    assert "at most 500 are read from one server" in answer["exceptions"][0]["message"]
    assert codes(post(kit, f"set maxQueryResponseSizeBytes = 500; {sql}")) == [245]
    assert len(post(kit, sql)["resultTable"]["rows"]) == 200
    assert kit.service._room.held_bytes == 0


def test_dropped_results_leave_the_counters(kit: Kit) -> None:
    answer = post(kit, f"set dropResults = true; {COUNT}")
    assert "resultTable" not in answer
    assert (answer["exceptions"], answer["totalDocs"]) == ([], 200)


def test_a_trace_says_where_the_time_went_per_server_and_in_the_broker(kit: Kit) -> None:
    for answer in (post(kit, COUNT, trace=True), post(kit, COUNT, trace="true"), post(kit, f"set trace=true; {COUNT}")):
        info = {instance: json.loads(text) for instance, text in answer["traceInfo"].items()}
        (server,) = [name for name in info if name.startswith("Server_")]
        assert info[server][0]["docsTotal"] == 200
        assert info[server][0]["roundTripMs"] >= info[server][0]["elapsedMs"] >= 0
        assert list(info[kit.service.broker_id]) == ["planMs", "waitMs", "gatherMs", "reduceMs"]
    assert post(kit, COUNT)["traceInfo"] == {}


# --- not before ---


def test_with_a_token_the_servers_are_told_what_must_be_there(kit: Kit) -> None:
    token = post(kit, COUNT)["readToken"]
    for behaviour in kit.servers.values():
        behaviour.asked.clear()
    assert post(kit, f"set notBefore = '{token}'; {COUNT}")["resultTable"]["rows"] == [[200]]
    asked = [tail for behaviour in kit.servers.values() for query in behaviour.asked for tail in query.tails]
    assert [(tail.partition, tail.not_before) for tail in asked] == [(0, 100), (1, 100)]


def test_an_answer_older_than_the_token_is_never_given_unflagged(kit: Kit) -> None:
    """These servers do not wait, and say nothing about it: the broker sees it by their offsets."""
    token = base64.urlsafe_b64encode(json.dumps({"t": "gold", "i": "abc", "e": 5, "o": {"0": 101}}).encode()).decode()
    answer = post(kit, f"set notBefore = '{token}'; set timeoutMs = 2000; {COUNT}")
    assert (codes(answer), answer["partialResult"], "resultTable" in answer) == ([305], True, False)
    assert (
        "no replica showed partition 0 up to 101, which the query must see (notBefore"
        in answer["exceptions"][0]["message"]
    )
    assert "Server_1: shows partition 0 up to 100 only" in answer["exceptions"][0]["message"]
    assert codes(post(kit, f"set notBefore = 'nonsense'; {COUNT}")) == [700]


def test_the_token_of_a_partial_answer_still_names_what_the_client_has_seen_of_the_missing_partition(kit: Kit) -> None:
    """Else the answer after it might show less of that partition than the one before it."""
    seen = {"t": "gold", "i": "abc", "e": 5, "o": {"0": 101, "1": 50}}
    token = base64.urlsafe_b64encode(json.dumps(seen).encode()).decode()
    answer = post(kit, f"set notBefore = '{token}'; set numReplicaGroupsToQuery = 2; set timeoutMs = 2000; {COUNT}")
    assert (codes(answer), answer["resultTable"]["rows"]) == ([305], [[100]])
    token = answer["readToken"]
    assert json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))["o"] == {"0": 101, "1": 100}


# --- Arrow ---


def arrow(kit: Kit, sql: str) -> httpx.Response:
    return httpx.post(kit.url + "/query/sql", json={"sql": sql}, headers={"Accept": MEDIA_TYPE}, timeout=20)


def test_an_answer_comes_as_arrow_with_everything_else_in_its_metadata(kit: Kit) -> None:
    response = arrow(
        kit, "select country, tags, ts, clicks, amount, fromepochseconds(1) as t from gold order by ts limit 2"
    )
    assert (response.headers["content-type"], response.headers["X-Pinot-Error-Code"]) == (MEDIA_TYPE, "-1")
    with pa.ipc.open_stream(response.content) as reader:
        found = reader.read_all()
    assert found.schema.names == ["country", "tags", "ts", "clicks", "amount", "t"]
    assert found.schema.field("tags").type == pa.list_(pa.string())
    assert (found.schema.field("clicks").type, found.schema.field("ts").type) == (pa.int32(), pa.int64())
    assert found.column("country").to_pylist() == ["FR", "DE"]
    assert found.column("ts").to_pylist() == [START_MS, START_MS + 1000]
    rest = json.loads(found.schema.metadata[METADATA_KEY])
    assert (rest["exceptions"], rest["partialResult"], rest["numRowsResultSet"]) == ([], False, 2)
    assert "readToken" in rest
    with pa.ipc.open_stream(arrow(kit, "select 1 as one, 'x' as two").content) as reader:
        assert reader.read_all().to_pylist() == [{"one": 1, "two": "x"}]
    with pa.ipc.open_stream(arrow(kit, "select clicks from gold where clicks > 100").content) as reader:
        assert reader.read_all().num_rows == 0


def test_an_error_stays_json(kit: Kit) -> None:
    response = arrow(kit, "select nocol from gold")
    assert response.headers["content-type"] == "application/json"
    assert codes(response.json()) == [710]


# --- queries that end early ---


def test_a_cancelled_query_is_cancelled_on_every_server_asked(kit: Kit) -> None:
    for behaviour in kit.servers.values():
        behaviour.delay_s = 1.5
    sql = f"set clientQueryId='mine'; set useFixedReplica=true; set numReplicaGroupsToQuery=2; {COUNT}"
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(post(kit, sql)))
    thread.start()
    wait_until(lambda: all(behaviour.asked for behaviour in kit.servers.values()))
    response = httpx.delete(f"{kit.url}/query/mine?client=true&verbose=true")
    assert (response.status_code, response.text.count("http://127.0.0.1")) == (200, 2)
    thread.join(5)
    assert codes(answers[0]) == [503]
    for behaviour in kit.servers.values():
        wait_until(lambda behaviour=behaviour: behaviour.cancelled == [behaviour.asked[0].request_id])
    assert httpx.delete(f"{kit.url}/clientQuery/mine").status_code == 404
    time.sleep(1.5)


def test_a_query_whose_client_hangs_up_is_cancelled_on_the_servers(kit: Kit) -> None:
    for behaviour in kit.servers.values():
        behaviour.delay_s = 1.5
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(kit.url + "/query/sql", json={"sql": COUNT}, timeout=0.3)
    wait_until(lambda: httpx.get(kit.url + "/queries").json() == {}, 1.0)
    wait_until(lambda: any(behaviour.cancelled for behaviour in kit.servers.values()))
    time.sleep(1.5)


def test_at_its_deadline_a_query_is_cancelled_on_the_servers(kit: Kit) -> None:
    for behaviour in kit.servers.values():
        behaviour.delay_s = 0.6
    assert codes(post(kit, f"set timeoutMs=200; {COUNT}")) == [427]
    wait_until(lambda: any(behaviour.cancelled for behaviour in kit.servers.values()))
    time.sleep(0.6)


# --- bounds, and servers that answer nonsense ---


def test_beyond_the_bounds_queries_wait_or_are_refused_with_pinots_code(kit: Kit) -> None:
    before, kit.service.admission = kit.service.admission, Admission(1, 1)
    for behaviour in kit.servers.values():
        behaviour.delay_s = 0.4
    answers: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda: answers.append(post(kit, COUNT))) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    finally:
        kit.service.admission = before
    assert sorted(code for answer in answers for code in codes(answer)) == [429, 429]
    assert [answer["resultTable"]["rows"] for answer in answers if not answer["exceptions"]] == [[[200]], [[200]]]


@pytest.mark.parametrize(
    "reply", [b"", b"\x00", b"\x00\x00\xff\xff{}", b"\x00\x00\x00\x02{}", b"\x00\x00\x00\x10not json at all!"]
)
def test_a_server_that_answers_nonsense_is_named_and_another_one_asked(kit: Kit, reply: bytes) -> None:
    kit.servers["Server_1"].reply = reply
    assert post(kit, f"set useFixedReplica=true; set numReplicaGroupsToQuery=2; {COUNT}")["resultTable"]["rows"] == [
        [200]
    ]
    kit.servers["Server_2"].reply = reply
    kit.service.network.loads = Loads()
    answer = post(kit, COUNT)
    assert codes(answer) == [427, 305]
    assert "[Server_1, Server_2] not responded (Server_1: " in answer["exceptions"][0]["message"]


def test_rows_that_are_no_arrow_stream_are_no_answer(kit: Kit) -> None:
    header = b'{"instance": "Server_1"}'
    for behaviour in kit.servers.values():
        behaviour.reply = len(header).to_bytes(4, "big") + header + b"\xff\xff\xff\xff\x10\x00\x00\x00garbage"
    answer = post(kit, COUNT)
    assert codes(answer) == [427, 305]
    assert "not an Arrow stream" in answer["exceptions"][0]["message"]


def test_metrics_count_requests_hedges_and_queries_that_wait(kit: Kit) -> None:
    post(kit, COUNT)
    text = httpx.get(kit.url + "/metrics").text
    for name in ("serverRequests_total", "hedgedRequests_total", "queriesRunning", "queriesWaiting"):
        assert f"pinot_broker_{name} " in text


def test_the_debug_endpoints_show_routes_of_a_query_and_loads(kit: Kit) -> None:
    post(kit, COUNT)
    found = httpx.get(kit.url + "/debug/routingTable/sql", params={"query": COUNT}).json()
    assert sorted(name for names in found.values() for name in names) == ["gold__0__0__x", "gold__1__0__x"]
    (stats,) = httpx.get(kit.url + "/debug/serverRoutingStats").json().values()
    assert (stats["numInFlightRequests"], stats["suspect"]) == (0, False)
