# SPDX-License-Identifier: Apache-2.0
"""The judge of answers about freshness: it finds what is wrong with them, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from freshness_checker import AFTER_TOKEN, NOT_OLDER, PLAIN, Answer, FreshnessChecker
from freshness_ledger import APPEND, KEYS, TOPIC, UPSERT, MomentLedger, row_of

from cremant.log.memory import MemoryLog

NOW_MS = 10_000


class Clock:
    now_ms = 1_000

    def __call__(self) -> int:
        return self.now_ms


@pytest.fixture
def ledger() -> MomentLedger:
    """Partition 0 gets 3 rows at 1,000 and 2 at 2,000, partition 1 one row at 3,000."""
    clock = Clock()
    log = MemoryLog(clock)
    log.create_topic(TOPIC, 2)
    made = MomentLedger(log, 2)
    for clock.now_ms, partition, count in ((1_000, 0, 3), (2_000, 0, 2), (3_000, 1, 1)):
        made.append(partition, count)
    return made


def problems(ledger: MomentLedger, **changes: Any) -> list[str]:
    said: dict[str, Any] = {
        "table": APPEND, "wish": PLAIN, "asked_ms": NOW_MS, "came_ms": NOW_MS + 10, "complete": True,
        "rows": {0: 5, 1: 1}, "fresh_ms": NOW_MS - 100, "lag_ms": 105, "floors": {}, "lag_max_ms": None,
    }  # fmt: skip
    checker = FreshnessChecker(lambda: None, ledger, threads=0)  # type: ignore[arg-type, return-value]
    checker._answers.append(Answer(**said | changes))
    return checker.stop().wrong


def test_an_answer_with_every_row_may_say_anything_that_is_true(ledger: MomentLedger) -> None:
    assert problems(ledger) == []


@pytest.mark.parametrize(("fresh_ms", "wrong"), [(1_000, False), (2_000, False), (2_001, True), (9_900, True)])
def test_a_row_that_arrived_before_the_claim_must_be_there(ledger: MomentLedger, fresh_ms: int, wrong: bool) -> None:
    """Partition 0 is shown without the rows that arrived at 2,000."""
    found = problems(ledger, rows={0: 3, 1: 1}, fresh_ms=fresh_ms, lag_ms=NOW_MS + 5 - fresh_ms)
    assert [text[:24] for text in found] == (["claims to be fresh as of"] if wrong else [])


def test_flagged_answers_with_rows_may_not_claim_more_either(ledger: MomentLedger) -> None:
    assert problems(ledger, rows={0: 3, 1: 1}, complete=False) != []
    assert problems(ledger, rows={}, complete=False) == [], "without rows it speaks of servers, not of itself"
    assert problems(ledger, rows={0: 0, 1: 0}, fresh_ms=0, lag_ms=None) == [], "nothing is claimed"


@pytest.mark.parametrize(("lag_ms", "wrong"), [(50, True), (100, False), (110, False), (150, True)])
def test_a_lag_is_the_age_of_the_claim_when_the_answer_was_delivered(
    ledger: MomentLedger, lag_ms: int, wrong: bool
) -> None:
    assert bool(problems(ledger, lag_ms=lag_ms)) is wrong


def test_an_answer_is_as_fresh_as_was_demanded(ledger: MomentLedger) -> None:
    assert problems(ledger, wish=NOT_OLDER, lag_max_ms=105) == []
    assert "older than the 104 ms" in problems(ledger, wish=NOT_OLDER, lag_max_ms=104)[0]
    assert "older than the 9000 ms" in problems(ledger, wish=NOT_OLDER, lag_max_ms=9_000, fresh_ms=0, lag_ms=None)[0]
    old = {"rows": {0: 0, 1: 1}, "fresh_ms": 1_000, "lag_ms": 9_005, "wish": NOT_OLDER}
    assert problems(ledger, **old, lag_max_ms=9_005) == [], "the rows of 1,000 were 9,000 ms old when it was asked"
    assert problems(ledger, **old, lag_max_ms=9_005, complete=False) == []


def test_an_answer_shows_what_a_token_names(ledger: MomentLedger) -> None:
    assert problems(ledger, wish=AFTER_TOKEN, floors={0: 5}) == []
    (found,) = problems(ledger, wish=AFTER_TOKEN, floors={0: 6, 1: 1})
    assert found.startswith("partition 0 ends at 5, below 6")
    assert problems(ledger, wish=AFTER_TOKEN, floors={0: 6}, complete=False) == []


@pytest.mark.parametrize("rows", [1, 2, KEYS, KEYS + 1, 3 * KEYS + 7])
def test_rows_of_a_prefix(rows: int) -> None:
    assert row_of(APPEND, 3, rows) == [3, rows, rows - 1, float(sum(range(rows)))]
    newest = {n % KEYS: n for n in range(rows)}
    assert row_of(UPSERT, 3, rows) == [3, len(newest), rows - 1, float(sum(newest.values()))]
