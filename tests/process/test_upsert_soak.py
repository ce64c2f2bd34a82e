# SPDX-License-Identifier: Apache-2.0
"""Upsert under fire: versions of 100,000 keys in a stream that is not keyed by them, segments committing, every role
killed with kill -9, orphaned pipelines and stale checkpoints made on purpose, and all the time answers that are
compared with the model at the answer's epoch. None may be wrong.

Two minutes here, and one round of all faults at least; `CREMANT_UPSERT_SOAK_MINUTES` makes it hours,
`CREMANT_UPSERT_SOAK_SEED` another order of faults, `CREMANT_UPSERT_SOAK_RATE=10000` another rate,
`CREMANT_UPSERT_SOAK_KAFKA=1` asks for stream and epoch log in Kafka: slower, as its broker takes of the same two cores.
How old answers are is told; it is judged with `CREMANT_UPSERT_SOAK_STRICT=1`, on a machine that does nothing else.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import threading
import time
from bisect import bisect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from bench.cluster import ClusterError, LocalCluster, is_complete
from bench.context import percentile
from bench.kafka import KafkaCluster
from lanes import WRONG
from ledger import EmbeddedSink, KafkaSink, Sink
from orphans import copy_while_it_runs, pipeline_of, second_pipeline, told, wait_for_another_holder
from stopping import stopped
from upsert_checker import Findings, UpsertChecker
from upsert_ledger import BUCKETS, SCHEMA, TABLE, UpsertLedger, table_config
from upsert_marks import Marks
from upsert_questions import Question, contents, total

from cremant.log.api import Log
from cremant.log.embedded import EmbeddedLog
from cremant.log.kafka import KafkaLog
from cremant.model.names import epoch_topic

MINUTES = float(os.environ.get("CREMANT_UPSERT_SOAK_MINUTES") or 2)
SEED = int(os.environ.get("CREMANT_UPSERT_SOAK_SEED") or 1)
KAFKA = bool(os.environ.get("CREMANT_UPSERT_SOAK_KAFKA"))
RATE_PER_S = int(os.environ.get("CREMANT_UPSERT_SOAK_RATE") or (3_000 if KAFKA else 4_500))
RATE_MIN_PER_S = min(RATE_PER_S, 4_000) * 0.9
STRICT = bool(os.environ.get("CREMANT_UPSERT_SOAK_STRICT"))
PARTITIONS = 4
KEYS = 100_000
FLUSH_ROWS = 25_000
KILLED = ("pipeline", "pipeline", "server-1", "server-2", "controller", "broker")
#: A round: the kills, an orphan, a stale checkpoint. Each run has one at least, however slow the machine is.
FAULTS = len(KILLED) + 2
#: An answer is one under fire if a row was acknowledged, and something killed or stopped, so shortly before it.
LOADED_MS = 2_000.0
FIRED_MS = 15_000.0
#: After a restart of the pipeline answers may be old until it has caught up, and servers have taken that epoch.
CAUGHT_UP_MS = 3_000.0
RESTART_GRACE_MS = 2_000.0
#: How long the epoch of an answer may have been closed.
AGE_MS = 2_000.0
HEALED_S = 420.0
#: Before a pipeline is taken away again it may catch up for so long, and has to close an epoch: one that never works
#: tests nothing.
SETTLED_S, BACK_S = 20.0, 120.0
Phase = Callable[[str], None]


class Fault(NamedTuple):
    """`absences`: how often it takes a pipeline away."""

    absences: int
    strike: Callable[[], str]


class Soak:
    """A cluster with an upsert table, its producer, its checker, and the faults. `kafka`: where stream and epoch log
    are in Kafka."""

    def __init__(self, cluster: LocalCluster, directory: Path, kafka: str, phase: Phase) -> None:
        self.cluster = cluster
        self.phase = phase
        self._directory = directory
        self._kafka = kafka
        self._options = ("--kafka", kafka) if kafka else ()
        cluster.run("topic", "create", TABLE, "--partitions", str(PARTITIONS), *self._options)
        cluster.rest.add_table(SCHEMA, table_config(flush_rows=FLUSH_ROWS, kafka=kafka))
        log_dir = Path(cluster.ready["logDir"])
        sink: Sink = KafkaSink(kafka, TABLE) if kafka else EmbeddedSink(log_dir, TABLE)
        log: Log = KafkaLog(kafka) if kafka else EmbeddedLog(log_dir)
        self.ledger = UpsertLedger(sink, PARTITIONS, keys=KEYS, seed=SEED)
        view = cluster.rest.call("GET", "/internal/v1/view")["tables"][TABLE]
        incarnation = str(view["record"]["incarnation"])
        self.marks = Marks(log, epoch_topic(TABLE, incarnation), incarnation, self.ledger.staleness_ms).start()
        self.checker = UpsertChecker(lambda: self.cluster.rest, self.ledger, self.marks, seed=SEED)
        self._stop = threading.Event()
        self._producer = threading.Thread(
            target=self.ledger.produce, args=(10**12,),
            kwargs={"rate_per_s": RATE_PER_S, "stop": self._goes_on},
        )  # fmt: skip
        #: Wall clock of each batch of rows, and of each fault: from when until when.
        self._batches_ms: list[float] = []
        self._faults_ms: list[tuple[float, float]] = []
        #: When a pipeline was last taken away.
        self._away_ms = 0.0
        self.disruptions = 0
        self._copies = 0
        self._copy: Path | None = None

    # --- the load ---

    def begin(self) -> None:
        """Until the first rows are there, then load and questions."""
        self.ledger.produce(2_000)
        mark = self.marks.wait_for(self.ledger.ends(), HEALED_S)
        self.phase(f"first rows closed by epoch {mark.epoch}")
        self._producer.start()
        self.checker.start()

    def _goes_on(self) -> bool:
        """A batch was acknowledged; whether that was the last one."""
        self._batches_ms.append(time.time() * 1000)
        return self._stop.is_set()

    def end_load(self) -> None:
        self._stop.set()
        self._producer.join(150)
        assert not self._producer.is_alive()

    def told(self) -> str:
        mark = self.marks.newest()
        behind = self.ledger.staleness_ms(mark.ends, time.time() * 1000) / 1000 if mark else -1
        return (
            f"{self.ledger.rows:,} rows, epoch {mark.epoch if mark else None}, {behind:.1f} s behind, "
            f"{self.checker.findings.complete} answers, {len(self.checker.findings.wrong)} wrong"
        )

    # --- the faults ---

    def strike(self, fault: Fault) -> str:
        if fault.absences:
            self._wait_until_settled()
            if self._faults_ms:  # until then it was not over
                self._faults_ms[-1] = (self._faults_ms[-1][0], time.time() * 1000)
        self.disruptions += fault.absences
        began_ms = time.time() * 1000
        try:
            return fault.strike()
        finally:
            self._faults_ms.append((began_ms, time.time() * 1000))
            if fault.absences:
                self._away_ms = self._faults_ms[-1][1]

    def _wait_until_settled(self) -> None:
        """Until an epoch is closed that is nearly up to date, or, after a while, any."""
        began_s = time.monotonic()
        while (waited_s := time.monotonic() - began_s) < BACK_S:
            mark = self.marks.newest()
            assert mark is not None
            if self.ledger.staleness_ms(mark.ends, time.time() * 1000) <= CAUGHT_UP_MS:
                return
            if waited_s > SETTLED_S and mark.at_ms > self._away_ms:
                return
            time.sleep(0.1)

    def is_under_fire(self, at_ms: float) -> bool:
        """Rows arrived then, and something had just been killed, or was stopped."""
        batches, faults = bisect(self._batches_ms, at_ms), bisect(self._faults_ms, (at_ms, float("inf")))
        loaded = batches > 0 and at_ms - self._batches_ms[batches - 1] <= LOADED_MS
        return loaded and faults > 0 and at_ms - self._faults_ms[faults - 1][1] <= FIRED_MS

    def faults(self, dice: random.Random) -> Iterator[Fault]:
        """For ever; each round has all of them, in another order. The checkpoint that comes back is of the round's
        beginning."""
        while True:
            self._copies += 1
            self._copy = self._directory / f"copy-{self._copies}"
            copy_while_it_runs(self.cluster.data_dir / "pipeline", self._copy)
            round_of = [
                *(Fault(int(role == "pipeline"), partial(self.kill, role)) for role in KILLED),
                Fault(2, self.orphan), Fault(1, self.stale_checkpoint),
            ]  # fmt: skip
            dice.shuffle(round_of)
            yield from round_of
            shutil.rmtree(self._copy)

    def kill(self, role: str) -> str:
        return f"killed {role} ({self.cluster.kill(role)})"

    def orphan(self) -> str:
        """SIGSTOP of the pipeline in mid-flight, another one takes over, SIGCONT, and the other one ends."""
        old = pipeline_of(self.cluster)
        with (
            stopped(self.cluster.pids()["pipeline"], self.cluster.ready["logDir"]) as first,
            second_pipeline(self.cluster, self._directory / f"second-{time.time_ns()}", *self._options),
        ):
            new = wait_for_another_holder(self.cluster, old["holder"], HEALED_S)
            time.sleep(2)
            first.go_on()
            time.sleep(5)
        return f"stopped {told(old)}, continued it under {told(new)}, which ended"

    def stale_checkpoint(self) -> str:
        """Everything is killed, the pipeline's disk is of some time ago, everything starts."""
        assert self._copy is not None
        self.cluster.kill_supervisor()
        shutil.rmtree(self.cluster.data_dir / "pipeline")
        shutil.copytree(self._copy, self.cluster.data_dir / "pipeline", symlinks=True)
        self.cluster.start()
        return f"started everything again with {self._copy.name} of the pipeline's disk"

    # --- the end ---

    def windows(self) -> list[tuple[float, float]]:
        """When the pipeline was away: from the last mark of a generation until the next one had caught up."""
        found: list[tuple[float, float]] = []
        away_from: float | None = None
        marks = self.marks.between(0, 2**62)
        for before, mark in itertools.pairwise(marks):
            if before.generation != mark.generation and away_from is None:
                away_from = before.at_ms
            if away_from is not None and mark.behind_ms <= CAUGHT_UP_MS:
                found.append((away_from, mark.at_ms + RESTART_GRACE_MS))
                away_from = None
        return found if away_from is None else [*found, (away_from, float("inf"))]

    def restarts(self) -> int:
        marks = self.marks.between(0, 2**62)
        return sum(a.generation != b.generation for a, b in itertools.pairwise(marks))

    def ask_at_the_end(self, question: Question, ends: tuple[int, ...]) -> list[list[Any]]:
        """Until a complete answer has every row (U-6: when faults have healed, answers advance)."""
        until = time.monotonic() + HEALED_S
        last: object = None
        while time.monotonic() < until:
            try:
                last = answer = self.cluster.rest.query(question.sql)
                mark = self.marks.at(answer.get("epoch") or 0)
                if is_complete(answer) and mark is not None and mark.ends == ends:
                    rows: list[list[Any]] = answer["resultTable"]["rows"]
                    return rows
            except (httpx.HTTPError, ClusterError, ValueError) as error:
                last = error
            time.sleep(0.2)
        raise AssertionError(
            f"{question.sql}: no answer that ends at {ends} within {HEALED_S} s, last {str(last)[:800]}"
        )

    def close(self) -> None:
        self._stop.set()
        if self._producer.is_alive():
            self._producer.join(150)
        self.marks.stop()
        self.ledger.close()


def run(soak: Soak) -> None:
    """Load, faults, questions; then everything heals and the whole table is compared."""
    phase = soak.phase
    soak.begin()
    began, rows_before = time.monotonic(), soak.ledger.rows
    dice = random.Random(SEED)
    faults = soak.faults(dice)
    done = 0
    while time.monotonic() - began < MINUTES * 60 or done < FAULTS:
        time.sleep(dice.uniform(4, 9) if time.monotonic() - began < MINUTES * 60 else 2)
        phase(f"{soak.strike(next(faults))}; {soak.told()}")
        done += 1
        assert soak.checker.findings.wrong[:3] == [], WRONG
    time.sleep(2)
    rate = (soak.ledger.rows - rows_before) / (time.monotonic() - began)
    soak.end_load()
    soak.checker.end_asking()

    phase(f"the load has ended ({rate:,.0f} rows/s); {soak.told()}")
    last = soak.marks.wait_for(soak.ledger.ends(), HEALED_S)
    findings = soak.checker.stop()
    phase(findings.told())
    for flag in findings.flags.values():
        phase(f"once or more: {flag}")
    assert findings.wrong[:3] == [], WRONG
    table = soak.checker.table_at(last)
    for question in [total(), *(contents(bucket) for bucket in range(BUCKETS))]:
        rows = soak.ask_at_the_end(question, last.ends)
        assert question.judge(table, rows), f"{WRONG}: {question.sql} at the end: {len(rows)} rows {rows[:20]}"
    phase(f"the whole table is right at epoch {last.epoch}: {int(table.visible.sum()):,} keys")
    judge_the_run(soak, findings, rate)


def judge_the_run(soak: Soak, findings: Findings, rate: float) -> None:
    """Whether the test tested anything, and how old answers were."""
    windows = soak.windows()
    ages = findings.ages_outside(windows)
    epoch_ms, missing_ms = [age.epoch_ms for age in ages] or [0.0], [age.missing_ms for age in ages] or [0.0]
    age_p50, age_p99, missing_p99 = percentile(epoch_ms, 0.5), percentile(epoch_ms, 0.99), percentile(missing_ms, 0.99)
    sealed = sum(
        segment["status"] == "DONE"
        for segment in soak.cluster.rest.call("GET", "/internal/v1/view")["tables"][TABLE]["segments"]
    )
    soak.phase(
        f"outside of {len(windows)} absences of the pipeline: age of the epoch p50 {age_p50:.0f} ms, "
        f"p99 {age_p99:.0f} ms, of the oldest missing row p99 {missing_p99:.0f} ms ({len(ages)} answers); "
        f"{sealed} segments sealed; {findings.met:,} times a key in several partitions of one epoch"
    )
    under_fire = sum(map(soak.is_under_fire, findings.complete_ms))
    soak.phase(f"{under_fire} of {findings.complete} complete answers under load and kills")
    assert rate >= RATE_MIN_PER_S, f"the machine carried {rate:,.0f} rows/s only"
    assert findings.complete >= 100 * MINUTES, "too few answers for this test to mean anything"
    assert under_fire >= 0.8 * findings.complete
    assert findings.unjudged <= 0.1 * findings.complete
    assert findings.met > 1_000
    assert sealed >= PARTITIONS
    assert soak.restarts() <= soak.disruptions + 1, "the pipeline restarted by itself"
    if STRICT:
        assert len(ages) >= 100, "the pipeline was away, or behind, nearly all the time"
        assert age_p99 <= AGE_MS


@pytest.mark.timeout(MINUTES * 60 + 1_500)
def test_no_answer_is_wrong_while_everything_is_killed(tmp_path: Path, phase: Phase) -> None:
    with LocalCluster(tmp_path / "data", servers=2) as cluster:
        soak = Soak(cluster, tmp_path, "", phase)
        try:
            run(soak)
        finally:
            soak.close()


@pytest.mark.kafka
@pytest.mark.skipif(not KAFKA, reason="on demand: CREMANT_UPSERT_SOAK_KAFKA=1")
@pytest.mark.timeout(MINUTES * 60 + 1_500)
def test_no_answer_is_wrong_while_everything_is_killed_on_kafka(tmp_path: Path, phase: Phase) -> None:
    with (
        KafkaCluster(tmp_path / "kafka") as kafka,
        LocalCluster(tmp_path / "data", servers=2, options=("--kafka", kafka.brokers)) as cluster,
    ):
        soak = Soak(cluster, tmp_path, kafka.brokers, phase)
        try:
            run(soak)
        finally:
            soak.close()
