# SPDX-License-Identifier: Apache-2.0
"""What answers say of their freshness is never optimistic, whatever is killed or stopped: rows arrive with known times
in an append and an upsert table, segments commit, every role is killed with kill -9 or stopped for seconds at random,
and every answer is judged by the log's acknowledgements (`freshness_checker`).

About a minute and a half here; `CREMANT_FRESHNESS_ANSWERS=100000` goes on until there are as many,
`CREMANT_FRESHNESS_SEED` takes another order of faults.
"""

from __future__ import annotations

import os
import random
import threading
import time
from bisect import bisect
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.cluster import LocalCluster
from bench.context import percentile
from freshness_checker import WISHES, Findings, FreshnessChecker
from freshness_ledger import APPEND, TOPIC, UPSERT, MomentLedger, schema, table_config
from lanes import WRONG
from stopping import stopped

from cremant.log.embedded import EmbeddedLog

ANSWERS = int(os.environ.get("CREMANT_FRESHNESS_ANSWERS") or 0)
SEED = int(os.environ.get("CREMANT_FRESHNESS_SEED") or 1)
MEASURE_S = 75.0
PARTITIONS = 4
RATE_PER_S = 2_000
FLUSH_ROWS = 15_000
#: A round, in any order: (role, whether it is killed; else it is stopped for a while). A pipeline needs seconds to come
#: back, and while it is away there is nothing to be optimistic about.
ROUND = (
    ("server-1", True), ("server-2", True), ("broker", True), ("controller", True), ("pipeline", True),
    ("server-1", False), ("server-2", False), ("server-1", False), ("server-2", False),
    ("broker", False), ("controller", False), ("pipeline", False), ("pipeline", False), ("pipeline", False),
)  # fmt: skip
STALL_S = (0.3, 3.0)
PAUSE_S = (1.0, 4.0)
#: An answer is one under fire if something was killed, or stopped, so shortly before it.
FIRED_MS = 10_000.0
HEALED_S = 240.0
#: Answers at least, and complete ones of each way to ask: a slow machine has most of these when it has caught up.
ANSWERS_MIN, COMPLETE_MIN = 600, 20
Phase = Callable[[str], None]


class Fire:
    """Kills and stops roles at random, one at a time; `faults_ms`: when."""

    def __init__(self, cluster: LocalCluster, seed: int) -> None:
        self._cluster = cluster
        self._dice = random.Random(seed)
        self._left: list[tuple[str, bool]] = []
        #: Of whole rounds.
        self.rounds = 0
        self.faults_ms: list[float] = []

    def strike(self) -> str:
        if not self._left:
            self._left = self._dice.sample(ROUND, len(ROUND))
        role, kills = self._left.pop()
        self.rounds += not self._left
        self.faults_ms.append(time.time() * 1000)
        if kills:
            return f"killed {role} ({self._cluster.kill(role)})"
        pid = self._cluster.pids()[role]
        stall_s = self._dice.uniform(*STALL_S)
        if pid:
            with stopped(pid, self._cluster.ready["logDir"]):
                time.sleep(stall_s)
        self.faults_ms.append(time.time() * 1000)
        return f"stopped {role} ({pid}) for {stall_s:.1f} s"

    def pause(self) -> None:
        time.sleep(self._dice.uniform(*PAUSE_S))

    def was_lately(self, at_ms: float) -> bool:
        before = bisect(self.faults_ms, at_ms)
        return before > 0 and at_ms - self.faults_ms[before - 1] <= FIRED_MS


def wait_for_all(cluster: LocalCluster, ledger: MomentLedger, table: str) -> float:
    ends = [[partition, end - 1] for partition, end in ledger.ends().items()]
    sql = f"SELECT part, MAX(seq) FROM {table} GROUP BY part ORDER BY part LIMIT 100"
    return cluster.rest.wait_for(sql, ends, deadline_s=HEALED_S)


def has_asked_enough(checker: FreshnessChecker) -> bool:
    return checker.count >= ANSWERS_MIN and checker.fewest_complete >= COMPLETE_MIN


@pytest.mark.timeout(900 + ANSWERS)
def test_no_answer_is_older_than_it_says_while_everything_is_killed_and_stopped(tmp_path: Path, phase: Phase) -> None:
    with LocalCluster(tmp_path / "data", servers=2) as cluster:
        cluster.run("topic", "create", TOPIC, "--partitions", str(PARTITIONS))
        ledger = MomentLedger(EmbeddedLog(Path(cluster.ready["logDir"])), PARTITIONS)
        for table in (APPEND, UPSERT):
            cluster.rest.add_table(schema(table), table_config(table, flush_rows=FLUSH_ROWS))
        for partition in range(PARTITIONS):
            ledger.append(partition, 10)
        for table in (APPEND, UPSERT):
            wait_for_all(cluster, ledger, table)
        stop = threading.Event()
        producer = threading.Thread(target=ledger.produce, args=(RATE_PER_S, stop), daemon=True)
        checker = FreshnessChecker(lambda: cluster.rest, ledger, seed=SEED)
        fire = Fire(cluster, SEED)
        phase(f"producing at {RATE_PER_S} rows/s, asking, killing, stopping; seed {SEED}")
        producer.start()
        checker.start()
        began_s = time.monotonic()
        try:
            while time.monotonic() - began_s < MEASURE_S or checker.count < ANSWERS or not fire.rounds:
                fire.pause()
                phase(f"{fire.strike()}; {ledger.rows:,} rows, {checker.count:,} answers")
            calm_s = time.monotonic() + HEALED_S
            while not has_asked_enough(checker) and time.monotonic() < calm_s:
                time.sleep(0.2)
            phase(f"{time.monotonic() + HEALED_S - calm_s:.1f} s without faults")
        finally:
            stop.set()
            producer.join(60)
            findings = checker.stop()
        assert not producer.is_alive()
        phase(findings.told())
        for said in findings.flags.values():
            phase(f"  flagged: {said}")
        lags = findings.lags_ms
        phase(
            f"reported lag p50 {percentile(lags, 0.5)} ms, p90 {percentile(lags, 0.9)} ms; "
            f"{sum(map(fire.was_lately, findings.came_ms)):,} answers under fire"
        )
        for problem in findings.wrong[:20]:
            phase(f"  WRONG: {problem}")
        assert findings.wrong[:3] == [], WRONG
        for table in (APPEND, UPSERT):
            phase(f"{table}: everything visible after {wait_for_all(cluster, ledger, table):.1f} s")
        check_that_it_meant_something(cluster, findings, fire)
        ledger.close()


def check_that_it_meant_something(cluster: LocalCluster, findings: Findings, fire: Fire) -> None:
    assert findings.claims >= ANSWERS_MIN / 3
    assert sum(map(fire.was_lately, findings.came_ms)) >= ANSWERS_MIN / 3
    for wish in WISHES:
        assert findings.complete[wish] >= COMPLETE_MIN, f"too few answers with {wish}"
    until_s = time.monotonic() + HEALED_S
    while min(sealed_of(cluster).values()) < PARTITIONS:
        assert time.monotonic() < until_s, f"segments sealed: {sealed_of(cluster)}"
        time.sleep(0.2)


def sealed_of(cluster: LocalCluster) -> dict[str, int]:
    """Segments that are sealed, by table."""
    view = cluster.rest.call("GET", "/internal/v1/view")["tables"]
    return {
        table: sum(segment["status"] == "DONE" for segment in view[table]["segments"]) for table in (APPEND, UPSERT)
    }
