# SPDX-License-Identifier: Apache-2.0
"""Streams that are slow, gone or refuse: whoever asked gets a clear error in time, and nobody else notices."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from control import Cluster, OneLog, schema, table

from cremant.controller.streams import Round, Streams
from cremant.log.api import Log
from cremant.log.memory import MemoryLog
from cremant.model.errors import DeadlineExceeded, InvalidConfig, NoResource, Unavailable, UserError
from cremant.model.names import epoch_topic
from cremant.model.table import StreamConfig
from cremant.shell.bounded import BoundedCalls

STREAM = StreamConfig(stream_type="kafka", topic="orders", brokers="k1:9092")


class Faulty:
    """A log that hangs or fails while it is told to."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.hang = threading.Event()
        self.error: Exception | None = None
        #: Error by topic.
        self.error_of: Callable[[str], Exception | None] | None = None
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.calls += 1
            if self.hang.is_set():
                time.sleep(30)
            error = self.error or (self.error_of and arguments and self.error_of(arguments[0]))
            if error:
                raise error
            return getattr(self.log, name)(*arguments, **keywords)

        return call


class Logs(OneLog):
    """Streams and epoch log may fail by themselves."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.streams = Faulty(log)
        self.epochs = Faulty(log)
        self.epoch = self.epochs  # type: ignore[assignment]

    @contextlib.contextmanager
    def stream(self, stream: StreamConfig) -> Iterator[Log]:
        yield self.streams  # type: ignore[misc]


@pytest.fixture
def logs(still_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Logs]:
    made = Logs(still_cluster.log)
    streams = still_cluster.controller.streams
    monkeypatch.setattr(streams, "logs", made)
    monkeypatch.setattr(streams, "_timeout_ms", 300)
    still_cluster.beat("Server_127.0.0.1_8098")
    still_cluster.post("/topics", {"name": "events", "partitions": 2})
    still_cluster.post("/schemas", schema())
    yield made
    made.streams.hang.clear()


def test_a_stream_that_hangs_costs_its_creation_a_clear_error_and_nobody_else_anything(
    still_cluster: Cluster, logs: Logs
) -> None:
    logs.streams.hang.set()
    began_s = time.monotonic()
    error = still_cluster.post("/tables", table(), status=504)["error"]
    assert time.monotonic() - began_s < 10
    assert "table gold: embedded stream events: no answer within 300 ms (is it reachable?)" in error
    assert still_cluster.get("/tables") == {"tables": []}
    assert still_cluster.beat("Server_127.0.0.1_8098").status_code == 200


def test_while_a_stream_hangs_status_answers_and_everyone_lives(
    still_cluster: Cluster, logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cremant.controller.status.STREAM_LOOK_MS", 200)
    for name in ("gold", "silver", "iron"):
        still_cluster.post("/schemas", schema(name))
        still_cluster.post("/tables", table(name))
    logs.streams.hang.set()
    began_s = time.monotonic()
    found = still_cluster.get("/status")
    assert time.monotonic() - began_s < 10
    assert [part["streamEnd"] for part in found["tables"][0]["partitions"]] == [None, None]
    before = logs.streams.calls
    still_cluster.controller.janitor.grow_tables()
    # One look of ours and perhaps one of the housekeeping's own round, not one for each of the three tables.
    assert logs.streams.calls - before in (1, 2)
    assert still_cluster.beat("Server_127.0.0.1_8098").status_code == 200
    logs.streams.hang.clear()
    assert still_cluster.get("/status")["tables"][0]["partitions"][0]["streamEnd"] == 0


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (Unavailable("broker k1:9092 is not reachable"), 503, "table gold: broker k1:9092 is not reachable"),
        (InvalidConfig("authentication failed", hint="sasl.password"), 400, "authentication failed (sasl.password)"),
    ],
)
def test_what_a_stream_says_reaches_the_user(
    still_cluster: Cluster, logs: Logs, error: Exception, status: int, words: str
) -> None:
    logs.streams.error = error
    assert words in still_cluster.post("/tables", table(), status=status)["error"]


def test_an_epoch_log_that_fails_leaves_no_half_table(still_cluster: Cluster, logs: Logs) -> None:
    logs.epochs.error = Unavailable("broker is gone")
    still_cluster.post("/tables", table(), status=503)
    assert still_cluster.get("/tables") == {"tables": []}
    logs.epochs.error = None
    still_cluster.post("/tables", table())
    still_cluster.controller.clock.advance(60_000)  # type: ignore[attr-defined]
    still_cluster.controller.tables.finish_drops()
    assert still_cluster.controller.catalog.being_removed() == []
    [record] = still_cluster.controller.catalog.tables.values()
    mine = [info.name for info in still_cluster.log.topics() if "gold" in info.name]
    assert len(mine) == 2
    assert all(record.incarnation in name for name in mine)


def test_a_table_dropped_while_the_log_is_away_loses_its_topics_later(still_cluster: Cluster, logs: Logs) -> None:
    still_cluster.post("/tables", table())
    incarnation = still_cluster.controller.catalog.tables["gold"].incarnation
    logs.epochs.error = Unavailable("broker is gone")
    still_cluster.post("/tables/gold", method="DELETE")
    assert still_cluster.get("/tables") == {"tables": []}
    assert still_cluster.controller.tables.finish_drops() == 0
    still_cluster.post("/tables", table(), status=503)
    logs.epochs.error = None
    still_cluster.post("/tables", table())
    still_cluster.controller.clock.advance(60_000)  # type: ignore[attr-defined]
    still_cluster.controller.tables.finish_drops()
    topics = {info.name for info in still_cluster.log.topics()}
    assert epoch_topic("gold", incarnation) not in topics
    assert still_cluster.controller.catalog.being_removed() == []


@pytest.mark.parametrize("error", [Unavailable("no leader"), UserError("not authorized")])
def test_a_dropped_table_whose_topics_cannot_be_deleted_holds_up_no_other(
    still_cluster: Cluster, logs: Logs, error: Exception
) -> None:
    for name in ("gold", "silver", "iron"):
        still_cluster.post("/schemas", schema(name))
        still_cluster.post("/tables", table(name))
    tables = still_cluster.controller.tables
    logs.epochs.error_of = lambda topic: error if ".gold." in topic else None
    for name in ("gold", "silver", "iron"):
        still_cluster.post(f"/tables/{name}", method="DELETE")
    for _ in range(4):
        tables.finish_drops()
    assert [drop.table for drop in still_cluster.controller.catalog.being_removed()] == ["gold"]
    logs.epochs.error_of = None
    tables.finish_drops()
    assert still_cluster.controller.catalog.being_removed() == []
    assert [info.name for info in still_cluster.log.topics()] == ["events"]


def test_trimming_waits_while_the_log_is_away(still_cluster: Cluster, logs: Logs) -> None:
    still_cluster.post("/tables", table())
    logs.epochs.error = Unavailable("broker is gone")
    still_cluster.controller.janitor.trim_epoch_logs()


def test_calls_that_hang_do_not_pile_up() -> None:
    calls = BoundedCalls(2, "test")
    release = threading.Event()
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match="thing: no answer within 20 ms"):
            calls.call("thing", release.wait, 20)
    with pytest.raises(Unavailable, match="2 calls are waiting for an answer already"):
        calls.call("thing", release.wait, 20)
    release.set()
    deadline_s = time.monotonic() + 10
    while True:
        try:
            assert calls.call("thing", lambda: 7, 1_000) == 7
            return
        except Unavailable:
            assert time.monotonic() < deadline_s


def test_a_call_hands_on_what_it_raised_also_a_timeout_of_its_own() -> None:
    def fail(error: Exception) -> None:
        raise error

    for error in (InvalidConfig("no"), TimeoutError("own")):
        with pytest.raises(type(error)):
            BoundedCalls(1, "test").call("thing", lambda error=error: fail(error), 5_000)  # type: ignore[misc]


def test_a_call_that_gets_no_thread_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    calls = BoundedCalls(1, "test")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(NoResource, match="thing: can't start new thread"):
                calls.call("thing", lambda: 7, 1_000)
    assert calls.call("thing", lambda: 7, 1_000) == 7


def test_within_a_round_a_silent_cluster_is_asked_once_and_others_are_asked() -> None:
    log = MemoryLog(lambda: 0)
    log.create_topic("orders", 1)
    streams = Streams(OneLog(log))
    asked: list[str] = []

    def ask(name: str, error: Exception | None) -> str:
        asked.append(name)
        if error:
            raise error
        return name

    looks = Round()
    other = StreamConfig(stream_type="kafka", topic="orders", brokers="k2:9092")
    assert looks.ask(STREAM, lambda: ask("first", Unavailable("gone"))) is None
    assert looks.ask(STREAM, lambda: ask("second", None)) is None
    assert looks.ask(other, lambda: ask("third", None)) == "third"
    assert asked == ["first", "third"]
    assert streams.topic(STREAM).partitions == 1
