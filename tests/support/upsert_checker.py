# SPDX-License-Identifier: Apache-2.0
"""Asks an upsert table all the time and compares every complete answer with the model at the answer's epoch.

An answer names its epoch; the mark of that epoch says where it ends in every partition; the rows below those ends make
the model. So nothing is believed but the producer's acknowledgements and partition 0 of the epoch log.

Judging lags behind by `JUDGE_AFTER_S` (the model goes forwards only, and answers come a little out of order), and what
was judged is forgotten: a run may take hours.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import httpx
import numpy as np
from bench.cluster import Rest, is_complete
from upsert_ledger import Table, UpsertLedger
from upsert_marks import Mark, Marks
from upsert_questions import Question, any_question

#: More than a query may take, and than anybody looks back.
JUDGE_AFTER_S = 60.0
_JUDGE_EVERY_S = 5.0


class Answer(NamedTuple):
    question: Question
    epoch: int
    rows: list[list[Any]]
    #: Wall clock of its arrival, and the epoch of the token that was passed as `notBefore`.
    at_ms: float
    not_before: int | None


class Age(NamedTuple):
    """Of one answer to a question about now: how long ago its epoch was closed, and for how long the oldest row that it
    misses had been there."""

    at_ms: float
    epoch_ms: float
    missing_ms: float


@dataclass
class Findings:
    """`wrong` must stay empty; the rest is for judging whether the test tested anything."""

    complete: int = 0
    partial: int = 0
    unanswered: int = 0
    #: Answers whose epoch was older than anybody should have waited for; not compared.
    unjudged: int = 0
    wrong: list[str] = field(default_factory=list)
    by_kind: Counter[str] = field(default_factory=Counter)
    #: What incomplete answers said, the last one of each beginning.
    flags: dict[str, str] = field(default_factory=dict)
    ages: list[Age] = field(default_factory=list)
    #: When complete answers arrived, wall clock.
    complete_ms: list[float] = field(default_factory=list)
    #: Keys that one epoch had rows of in several partitions, over all epochs that were judged.
    met: int = 0

    @property
    def longest_gap_s(self) -> float:
        moments = [age.at_ms for age in self.ages]
        return max((b - a for a, b in pairwise(moments)), default=0.0) / 1000

    def ages_outside(self, windows: Sequence[tuple[float, float]]) -> list[Age]:
        """`windows`: wall-clock ms, of answers that do not count."""
        return [age for age in self.ages if not any(first <= age.at_ms <= last for first, last in windows)]

    def told(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.by_kind.most_common())
        return (
            f"{self.complete} complete answers ({kinds}), {self.partial} partial, {self.unanswered} unanswered, "
            f"longest gap {self.longest_gap_s:.1f} s, {len(self.wrong)} wrong"
        )


class UpsertChecker:
    """Threads that ask, and one that judges. `rest`: of the cluster as it is now; it may be closed any time, when the
    cluster is started again."""

    def __init__(
        self, rest: Callable[[], Rest], ledger: UpsertLedger, marks: Marks, *, threads: int = 2, pause_s: float = 0.05,
        seed: int = 1,
    ) -> None:  # fmt: skip
        self.findings = Findings()
        self._rest = rest
        self._ledger = ledger
        self._marks = marks
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._waiting: list[Answer] = []
        self._table = Table(ledger)
        self._judged = 0
        self._advanced = 0
        self._threads = [threading.Thread(target=self._ask, args=(seed + n,), daemon=True) for n in range(threads)]
        self._judging = threading.Thread(target=self._judge_forever, daemon=True)
        self._failed: list[BaseException] = []

    def start(self) -> UpsertChecker:
        for thread in (*self._threads, self._judging):
            thread.start()
        return self

    def end_asking(self) -> None:
        self._stop.set()

    def stop(self) -> Findings:
        """Ends when every answer was judged."""
        self._stop.set()
        for thread in (*self._threads, self._judging):
            thread.join(60)
            assert not thread.is_alive(), "a query did not return within its timeout"
        assert not self._failed, self._failed
        self._judge(None)
        self.findings.met = self._table.met
        return self.findings

    def table_at(self, mark: Mark) -> Table:
        """The model at a mark that is not below any that was judged; once stopped."""
        self._advance(mark)
        return self._table

    # --- asking ---

    def _ask(self, seed: int) -> None:
        dice = np.random.default_rng(seed)
        token: str | None = None
        seen: int | None = None
        try:
            while not self._stop.is_set():
                question = any_question(dice, self._ledger.keys, seen)
                passed = token if token is not None and dice.random() < 0.5 else None
                epoch, token = self._one(question, passed, seen if passed else None, token)
                seen = epoch if epoch is not None else seen
                self._stop.wait(self._pause_s)
        except BaseException as error:
            self._failed.append(error)
            raise

    def _one(
        self, question: Question, passed: str | None, floor: int | None, token: str | None
    ) -> tuple[int | None, str | None]:
        """Asks; answers the epoch (of a question about now) and the token to go on with."""
        now = question.as_of is None
        sql = f"SET notBefore = '{passed}'; {question.sql}" if passed is not None and now else question.sql
        try:
            answer = self._rest().query(sql)
        except (httpx.HTTPError, ValueError, RuntimeError) as error:
            with self._lock:
                self.findings.unanswered += 1
                self.findings.flags[type(error).__name__] = str(error)[:200]
            self._stop.wait(0.1)
            return None, token
        at_ms = time.time() * 1000
        with self._lock:
            if not is_complete(answer):
                self.findings.partial += 1
                self._flagged(answer)
                return None, token
            self.findings.complete += 1
            self.findings.complete_ms.append(at_ms)
            self.findings.by_kind[question.kind] += 1
            if answer.get("epoch") is None or not answer.get("readToken"):
                self.findings.wrong.append(f"a complete answer without epoch or readToken: {str(answer)[:600]}")
                return None, token
            rows = answer["resultTable"]["rows"]
            one = Answer(question, int(answer["epoch"]), rows, at_ms, floor if now else None)
            self._waiting.append(one)
        return (one.epoch, answer["readToken"]) if now else (None, token)

    def _flagged(self, answer: dict[str, Any]) -> None:
        for exception in answer.get("exceptions") or [{"message": "partial, without an exception"}]:
            text = str(exception.get("message"))
            self.findings.flags[text[:40]] = text[:300]

    # --- judging ---

    def _judge_forever(self) -> None:
        newest: list[tuple[float, int]] = []
        try:
            while not self._stop.wait(_JUDGE_EVERY_S):
                mark = self._marks.newest()
                if mark is None:
                    continue
                newest.append((time.monotonic(), mark.epoch))
                while newest and newest[0][0] < time.monotonic() - JUDGE_AFTER_S:
                    self._judge(newest.pop(0)[1])
        except BaseException as error:
            self._failed.append(error)
            raise

    def _judge(self, until: int | None) -> None:
        """Answers of epochs up to `until`, or all."""
        with self._lock:
            ready = [answer for answer in self._waiting if until is None or answer.epoch <= until]
            self._waiting = [answer for answer in self._waiting if until is not None and answer.epoch > until]
        for answer in sorted(ready, key=lambda answer: answer.epoch):
            problem = self._problem(answer)
            if problem:
                self.findings.wrong.append(f"{answer.question.kind}: {problem}")
        self._ledger.forget(self._table.ends)

    def _problem(self, answer: Answer) -> str | None:
        question, epoch = answer.question, answer.epoch
        mark = self._marks.at(epoch)
        if answer.not_before is not None and epoch < answer.not_before:
            return f"epoch {epoch} after a token of epoch {answer.not_before} (U-3)"
        if question.as_of is not None:
            asked = self._marks.at(question.as_of)
            if (asked and asked.ends) != (mark and mark.ends):
                return f"epoch {epoch} where epoch {question.as_of} was asked for: {mark} instead of {asked}"
        elif mark is not None and mark.epoch != epoch:
            return f"epoch {epoch} was never closed; the newest below is {mark.epoch}"
        if epoch < self._judged:
            self.findings.unjudged += 1
            return None
        self._judged = epoch
        if mark is not None:
            self._advance(mark)
            if question.as_of is None:
                missing_ms = self._ledger.staleness_ms(mark.ends, answer.at_ms)
                self.findings.ages.append(Age(answer.at_ms, answer.at_ms - mark.at_ms, missing_ms))
        if question.judge(self._table, answer.rows):
            return None
        shown = f"{answer.rows[:20]} at epoch {epoch}, which ends at {self._table.ends}"
        return f"{question.sql}: {shown}; the model has {self._table.buckets()}"

    def _advance(self, mark: Mark) -> None:
        """Epoch by epoch, so that keys are counted that meet in one."""
        for one in self._marks.between(self._advanced, mark.epoch):
            self._table.advance(one.ends)
            self._advanced = one.epoch
