# SPDX-License-Identifier: Apache-2.0
"""Demands of freshness on real processes: a broker, two servers that commit segments, an epoch log written by hand.
What was written when is known, so every answer that is not flagged can be judged."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from counted import message, rows
from server_kit import Cluster, Kit, Process

COUNT = "select count(*) from trips"
ROWS_EACH, EVERY_S = 20, 0.05
LAG_MS = 4_000
#: Answers of each kind that are judged while nothing is wrong.
JUDGED = 8
PATIENCE = "SET timeoutMs = 60000"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Writer:
    """Writes epochs, one after the other. `written`: when each began, and the rows of the table after it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.written: list[tuple[int, int]] = [(0, 0)]

    def one(self) -> None:
        """All that was written before it began is in the log: that much its mark claims."""
        began_ms = now_ms()
        self._cluster.epochs.write(ROWS_EACH, reached_at_ms=began_ms)
        self.written.append((began_ms, sum(self._cluster.epochs.ends)))

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            self.one()

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(30)

    def rows_before(self, at_ms: int) -> int:
        """In the log by then: the epoch after had begun, or it was the last one."""
        began = [rows for (_, rows), (next_ms, _) in itertools.pairwise(self.written) if next_ms <= at_ms]
        return began[-1] if began else 0


def ask(broker: Process, *options: str) -> dict[str, Any]:
    sql = "; ".join((*options, COUNT))
    answer: dict[str, Any] = httpx.post(broker.url + "/query/sql", json={"sql": sql}, timeout=90).json()
    return answer


def judged(broker: Process, cluster: Cluster, writer: Writer) -> None:
    """One answer of each kind, while rows are written."""
    began_ms = now_ms()
    answer = ask(broker, f"SET maxFreshnessLagMs = {LAG_MS}", PATIENCE)
    assert answer["freshnessLagMs"] <= LAG_MS
    assert rows(answer) >= writer.rows_before(began_ms - LAG_MS)
    assert rows(answer) >= writer.rows_before(answer["minConsumingFreshnessTimeMs"])
    ahead = [end + ROWS_EACH for end in cluster.epochs.ends]  # it is not written yet
    token = f"""SET readYourWrites = '{{"0": {ahead[0] - 1}, "1": {ahead[1] - 1}}}'"""
    assert rows(ask(broker, token, PATIENCE)) >= sum(ahead)
    seen = ask(broker, PATIENCE)
    assert rows(ask(broker, f"SET notBefore = '{seen['readToken']}'", PATIENCE)) >= rows(seen)


@pytest.mark.timeout(300)
def test_what_is_demanded_is_had_or_refused(make_cluster: Callable[..., Cluster], kit: Kit) -> None:
    cluster = make_cluster(servers=2, replication=2, flush_rows=200)
    cluster.epochs.start()
    broker = cluster.add("broker", "broker")
    try:
        writer = Writer(cluster)
        writer.one()
        kit.eventually(lambda: ask(broker)["numPartitionsReporting"] == 2, 60)
        with writer:
            for _ in range(JUDGED):
                judged(broker, cluster, writer)
            with cluster.servers[0].stopped():
                for _ in range(2):
                    judged(broker, cluster, writer)
            for _ in range(2):
                judged(broker, cluster, writer)
        kit.eventually(lambda: cluster.view().tables["trips"].segments, 60)  # committed meanwhile
        nobody_writes(broker, writer)
    finally:
        broker.close()


def nobody_writes(broker: Process, writer: Writer) -> None:
    """The log stands still: what is old is refused, flagged or waited for."""
    time.sleep(LAG_MS / 1000)
    bound, total = f"SET maxFreshnessLagMs = {LAG_MS}", writer.written[-1][1]
    refused = ask(broker, bound, "SET onStale = 'error'")
    assert "partition 0 is " in message(refused)
    assert refused["freshnessLagMs"] > LAG_MS
    flagged = ask(broker, bound, "SET onStale = 'partial'")
    assert (flagged["partialResult"], flagged["resultTable"]["rows"]) == (True, [[total]])
    assert "after waiting" in message(ask(broker, bound, "SET timeoutMs = 3000"))
    demanded_ms = now_ms()  # before the timer runs, however slow the machine is
    timer = threading.Timer(0.5, writer.one)
    timer.start()
    answer = ask(broker, f"SET minFreshnessTimeMs = {demanded_ms}", PATIENCE)
    timer.join()
    assert rows(answer) == total + 2 * ROWS_EACH
    assert answer["minConsumingFreshnessTimeMs"] == writer.written[-1][0]
