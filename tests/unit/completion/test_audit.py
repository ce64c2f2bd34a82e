# SPDX-License-Identifier: Apache-2.0
"""Which stored objects are looked at, and when."""

from __future__ import annotations

from cremant.completion.audit import Audit, Stored
from cremant.model.limits import STORE_LOOK_EVERY_MS, STORE_LOOK_FIRST_MS

A, B = Stored("gold", "a", "file:///s/a"), Stored("gold", "b", "file:///s/b")


def made() -> Audit:
    audit = Audit()
    audit.put(A.table, A.segment, A.url, 0)
    audit.put(B.table, B.segment, B.url, 1)
    return audit


def test_an_object_is_looked_at_soon_then_every_day_the_longest_due_first() -> None:
    audit = made()
    assert audit.take(10, STORE_LOOK_FIRST_MS - 1) == []
    assert audit.take(1, STORE_LOOK_FIRST_MS + 1) == [A]
    assert audit.take(10, STORE_LOOK_FIRST_MS + 1) == [B]
    assert audit.take(10, STORE_LOOK_FIRST_MS + 1) == [], "they are being looked at"
    now_ms = STORE_LOOK_FIRST_MS + 5
    audit.looked(A, now_ms, answered=True)
    audit.looked(B, now_ms, answered=False)
    assert audit.take(10, now_ms) == [B], "the store did not answer for it"
    audit.looked(B, now_ms, answered=True)
    assert audit.take(10, now_ms + STORE_LOOK_EVERY_MS - 1) == []
    assert audit.take(10, now_ms + STORE_LOOK_EVERY_MS) == [A, B]


def test_what_has_no_object_any_more_or_another_one_is_not_looked_at() -> None:
    audit = made()
    audit.put(A.table, A.segment, A.url, 70_000)  # the record changed, its object did not
    audit.put(B.table, B.segment, None, 70_000)
    assert audit.take(10, STORE_LOOK_FIRST_MS + 1) == [A]
    audit.put(A.table, A.segment, None, 70_000)
    audit.looked(A, 70_000, answered=True)
    audit.put(B.table, B.segment, "file:///s/other", 70_000)
    assert audit.take(10, 70_000 + STORE_LOOK_FIRST_MS) == [Stored("gold", "b", "file:///s/other")]
    assert audit.take(10, 70_000 + 10 * STORE_LOOK_EVERY_MS) == []


def test_somebody_who_doubts_an_object_waits_for_no_day() -> None:
    audit = made()
    audit.hurry(B.table, B.segment, 5)
    audit.hurry("gold", "unknown", 5)
    audit.hurry(B.table, B.segment, 7)
    assert audit.take(10, 6) == [B], "who asks again and again keeps its place"
    audit.looked(B, 6, answered=True)
    assert audit.take(10, STORE_LOOK_FIRST_MS + 1) == [A]
