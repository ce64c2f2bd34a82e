# SPDX-License-Identifier: Apache-2.0
"""Asks all the time, in each way that a query may speak of freshness, and judges every answer by what the log had
acknowledged when (`MomentLedger`).

An answer with rows shows a prefix of each partition; which one is read off its rows, not off what it says of itself.
Then, whatever was killed or stopped meanwhile:

- it claims F = minConsumingFreshnessTimeMs > 0: every row that the log had before F is in it (never optimistic);
- it was asked for with `maxFreshnessLagMs` = N and is not flagged: F is not older than N, nor is a row missing that
  was in the log N ms before anybody asked;
- with `readYourWrites`, and not flagged: the row that was written before is in it;
- with `notBefore`, and not flagged: it shows no partition less far than the answer that the token is of.

Answers are judged at the end: an append may be acknowledged after an answer that shows it.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
from bench.cluster import ClusterError, Rest, is_complete
from freshness_ledger import APPEND, QUESTION, UPSERT, MomentLedger, row_of

PLAIN, AFTER_TOKEN, OWN_WRITE, NOT_OLDER = "plain", "notBefore", "readYourWrites", "maxFreshnessLagMs"
#: Ways to ask, by weight.
WISHES = {PLAIN: 4, AFTER_TOKEN: 2, OWN_WRITE: 2, NOT_OLDER: 2}
LAGS_MS = (300, 1_000, 3_000, 10_000)
#: Longer than most stalls, shorter than the longest.
TIMEOUT_MS = 4_000
#: Answers speak of the broker's clock, in whole milliseconds: it is ours, rounded.
ROUNDING_MS = 2


class Answer(NamedTuple):
    """`rows`: how many rows of each partition it shows. `fresh_ms`, `lag_ms`: what it claims, 0 and None = nothing.
    `floors`: offsets that it had to reach; `lag_max_ms`: how old it may be."""

    table: str
    wish: str
    asked_ms: float
    came_ms: float
    complete: bool
    rows: dict[int, int]
    fresh_ms: int
    lag_ms: int | None
    floors: dict[int, int]
    lag_max_ms: int | None


@dataclass
class Findings:
    """`wrong` must stay empty; the rest is for judging whether the test tested anything."""

    wrong: list[str] = field(default_factory=list)
    answers: int = 0
    claims: int = 0
    #: Complete answers by way of asking, and flagged ones.
    complete: Counter[str] = field(default_factory=Counter)
    flagged: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0
    #: What flagged answers said, the last one of each beginning.
    flags: dict[str, str] = field(default_factory=dict)
    #: Arrival of each answer, wall clock, and how old it says it is.
    came_ms: list[float] = field(default_factory=list)
    lags_ms: list[int] = field(default_factory=list)

    def told(self) -> str:
        complete = ", ".join(f"{count:,} {wish}" for wish, count in self.complete.most_common())
        flagged = ", ".join(f"{count:,} {wish}" for wish, count in self.flagged.most_common())
        return (
            f"{self.answers:,} answers, {self.claims:,} with a claim; complete: {complete}; flagged: {flagged or 0}; "
            f"{self.unanswered:,} unanswered; {len(self.wrong)} wrong"
        )


class FreshnessChecker:
    """Threads that ask. `rest`: of the cluster as it is now."""

    def __init__(
        self, rest: Callable[[], Rest], ledger: MomentLedger, *, threads: int = 6, seed: int = 1, pause_s: float = 0.01,
        tables: Sequence[str] = (APPEND, UPSERT), wishes: Mapping[str, int] = WISHES,
    ) -> None:  # fmt: skip
        self.findings = Findings()
        self._rest = rest
        self._ledger = ledger
        self._pause_s = pause_s
        self._tables = tables
        self._wishes = wishes
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._answers: list[Answer] = []
        self._failed: list[BaseException] = []
        self._threads = [threading.Thread(target=self._ask, args=(seed + n,), daemon=True) for n in range(threads)]

    @property
    def count(self) -> int:
        return len(self._answers)

    @property
    def fewest_complete(self) -> int:
        """Of all ways to ask."""
        with self._lock:
            found = Counter(answer.wish for answer in self._answers if answer.complete)
        return min(found[wish] for wish in self._wishes)

    def start(self) -> FreshnessChecker:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> Findings:
        """Ends when every answer was judged. Nobody appends any more."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a query did not return within its timeout"
        assert not self._failed, self._failed
        for answer in self._answers:
            self._judge(answer)
        return self.findings

    # --- asking ---

    def _ask(self, seed: int) -> None:
        dice = random.Random(seed)
        #: By table the token of the last complete answer to this thread, and what that showed.
        seen: dict[str, tuple[str, dict[int, int]]] = {}
        http = httpx.Client(timeout=30.0, trust_env=False)
        try:
            while not self._stop.is_set():
                table = dice.choice(self._tables)
                (wish,) = dice.choices(list(self._wishes), list(self._wishes.values()))
                self._one(http, dice, table, wish, seen)
                self._stop.wait(self._pause_s)
        except BaseException as error:
            self._failed.append(error)
            raise
        finally:
            http.close()

    def _one(
        self, http: httpx.Client, dice: random.Random, table: str, wish: str,
        seen: dict[str, tuple[str, dict[int, int]]],
    ) -> None:  # fmt: skip
        said, floors, lag_max_ms = f"SET timeoutMs = {TIMEOUT_MS}; ", {}, None
        if wish == AFTER_TOKEN and table in seen:
            token, floors = seen[table]
            said += f"SET notBefore = '{token}'; "
        elif wish == OWN_WRITE:
            partition = dice.randrange(self._ledger.partitions)
            offset = self._ledger.append(partition, 1).last_offset
            floors = {partition: offset + 1}
            said += f"SET readYourWrites = '{json.dumps({str(partition): offset})}'; "
        elif wish == NOT_OLDER:
            lag_max_ms = dice.choice(LAGS_MS)
            said += (
                f"SET maxFreshnessLagMs = {lag_max_ms}; SET onStale = '{dice.choice(('wait', 'error', 'partial'))}'; "
            )
        asked_ms = time.time() * 1000
        try:
            url = self._rest().broker + "/query/sql"
            response = http.post(url, json={"sql": said + QUESTION.format(table=table)})
            response.raise_for_status()
            body = response.json()
        except (httpx.HTTPError, ValueError, ClusterError):
            with self._lock:
                self.findings.unanswered += 1
            self._stop.wait(0.1)
            return
        came_ms = time.time() * 1000
        rows = self._shown(table, body)
        complete = is_complete(body)
        if complete and body.get("readToken"):
            seen[table] = (body["readToken"], rows or {})
        if rows is None and not complete:
            self._stop.wait(0.1)  # e.g. a broker that has not heard from the controller yet
        with self._lock:
            self.findings.came_ms.append(came_ms)
            if not complete:
                self._flagged(table, body)
            if complete and rows is None:
                self.findings.wrong.append(f"{wish}: rows that are no prefix: {str(body)[:1500]}")
            if complete and body["numPartitionsReporting"] != self._ledger.partitions:
                self.findings.wrong.append(f"{wish}: a complete answer without some partition: {str(body)[:1500]}")
            self._answers.append(
                Answer(
                    table, wish, asked_ms, came_ms, complete, rows or {}, body.get("minConsumingFreshnessTimeMs") or 0,
                    body.get("freshnessLagMs"), floors, lag_max_ms,
                )
            )  # fmt: skip

    def _shown(self, table: str, body: dict[str, Any]) -> dict[int, int] | None:
        """How many rows of each partition an answer shows; None if it has no rows, or not those of prefixes."""
        if body.get("resultTable") is None:
            return None
        found = {partition: 0 for partition in range(self._ledger.partitions)}
        for row in body["resultTable"]["rows"]:
            found[row[0]] = int(row[2]) + 1
            if row != row_of(table, row[0], found[row[0]]):
                return None
        return found

    def _flagged(self, table: str, body: dict[str, Any]) -> None:
        for exception in body.get("exceptions") or [{"message": "partial, without an exception"}]:
            text = f"{table}: {exception.get('errorCode')} {exception.get('message')}"
            self.findings.flags[text[:60]] = text[:300]

    # --- judging ---

    def _judge(self, answer: Answer) -> None:
        found = self.findings
        found.answers += 1
        (found.complete if answer.complete else found.flagged)[answer.wish] += 1
        if answer.complete and answer.lag_ms is not None:
            found.lags_ms.append(answer.lag_ms)
        if answer.fresh_ms and answer.rows:
            found.claims += 1
        found.wrong += [f"{problem}: {answer}" for problem in self._problems(answer)]

    def _problems(self, answer: Answer) -> list[str]:
        problems = []
        if answer.fresh_ms:
            if answer.rows:
                problems += self._missing(answer, answer.fresh_ms, "claims to be fresh as of")
            if answer.lag_ms is None or not self._is_age(answer, answer.lag_ms):
                problems.append(f"its lag is not its age, delivered at about {answer.came_ms:.0f}")
        if not answer.complete:
            return problems
        if not answer.fresh_ms and answer.lag_ms is not None:
            problems.append("a lag without a claim")
        if answer.lag_max_ms is not None:
            if answer.lag_ms is None or answer.lag_ms > answer.lag_max_ms:
                problems.append(f"older than the {answer.lag_max_ms} ms that were demanded")
            problems += self._missing(answer, answer.asked_ms - answer.lag_max_ms, "was to be as fresh as of")
        problems += [
            f"partition {partition} ends at {answer.rows[partition]}, below {floor}"
            for partition, floor in answer.floors.items()
            if answer.rows[partition] < floor
        ]
        return problems

    def _missing(self, answer: Answer, at_ms: float, said: str) -> list[str]:
        promised = {partition: self._ledger.rows_before(partition, at_ms) for partition in answer.rows}
        return [
            f"{said} {at_ms:.0f}, but misses {count - answer.rows[partition]} rows of partition {partition}, which had "
            f"{count} then"
            for partition, count in promised.items()
            if answer.rows[partition] < count
        ]

    def _is_age(self, answer: Answer, lag_ms: int) -> bool:
        """Of a time between question and arrival; clocks ahead count as no lag."""
        as_of = answer.fresh_ms + lag_ms
        return as_of >= answer.asked_ms - ROUNDING_MS and (lag_ms == 0 or as_of <= answer.came_ms + ROUNDING_MS)
