# SPDX-License-Identifier: Apache-2.0
"""The columnar model of the soak is the plain one, at every epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from upsert_ledger import ListSink, Rows, Table, UpsertLedger, columns_of, key_of
from upsert_model import DELETE, INSERT, UpsertModel

PARTITIONS = 3


def plain(sink: ListSink) -> UpsertModel:
    """The same out of the messages, row by row."""
    model = UpsertModel()
    for partition, messages in sink.partitions.items():
        for offset, row in enumerate(messages):
            key = None if row["key"] is None else (row["tenant"], row["key"])
            model.apply(partition, offset, 0, key, row["seq"], row["deleted"], (row["seq"], row["v"], row["bucket"]))
    return model


def assert_same(table: Table, model: UpsertModel) -> None:
    shown = {key_of(*key): row.value for key, row in model.at(table.ends).items()}  # type: ignore[misc]
    assert {key: tuple(table.row(key)[0]) for key in np.flatnonzero(table.visible).tolist()} == shown
    found = [value for value in shown.values()]
    assert table.buckets() == [
        [bucket, len(of), sum(v for _, v, _ in of)]
        for bucket in sorted({value[2] for value in found})
        if (of := [value for value in found if value[2] == bucket])
    ]
    taken = sum(row.offset < table.ends[row.partition] for row in model.rows.values())
    assert table.versions == taken


def test_rows_as_the_soak_makes_them_give_the_plain_model_at_every_step() -> None:
    sink = ListSink(PARTITIONS)
    ledger = UpsertLedger(sink, PARTITIONS, keys=300, seed=5)
    ledger.produce(4_000, batch=250)
    model, table = plain(sink), Table(ledger)
    dice = np.random.default_rng(2)
    whole = ledger.ends()
    while table.ends != whole:
        table.advance([min(end, at + int(dice.integers(0, 120))) for end, at in zip(whole, table.ends, strict=True)])
        ledger.forget(table.ends)
        if dice.random() < 0.3:
            assert_same(table, model)
    assert_same(table, model)
    rows = [row for messages in sink.partitions.values() for row in messages]
    assert len(rows) == 4_000 == ledger.rows
    assert sum(row["key"] is None for row in rows) == 4_000 - table.versions > 0
    assert any(row["deleted"] for row in rows)
    assert len(table.row(0)) <= 1
    assert table.met > 300, "keys do not meet in several partitions"


_ROW = st.tuples(
    st.integers(0, PARTITIONS - 1), st.integers(-1, 3), st.integers(0, 2), st.integers(0, 9), st.booleans()
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_ROW, max_size=40), st.lists(st.tuples(*[st.integers(0, 12)] * PARTITIONS), max_size=4))
def test_ties_deletions_and_late_rows_give_the_plain_model(
    drawn: list[tuple[int, int, int, int, bool]], steps: list[tuple[int, ...]]
) -> None:
    sink = ListSink(PARTITIONS)
    ledger = UpsertLedger(sink, PARTITIONS, keys=4)
    for partition, key, seq, v, deleted in drawn:
        one = (np.array([key]), np.array([seq]), np.array([v]), np.array([v % 3]), np.array([deleted]))
        ledger.append(Rows(*one), np.array([partition]))
    model, table = plain(sink), Table(ledger)
    for step in steps:
        table.advance([max(at, min(end, to)) for at, end, to in zip(table.ends, ledger.ends(), step, strict=True)])
        assert_same(table, model)


def test_staleness_is_the_age_of_the_oldest_row_that_is_missing() -> None:
    ledger = UpsertLedger(ListSink(PARTITIONS), PARTITIONS, keys=10)
    ledger.produce(30, batch=10)
    sent = [ledger.sent_at(partition, 0) for partition in range(PARTITIONS)]
    oldest = min(at for at in sent if at is not None)
    assert ledger.staleness_ms((0, 0, 0), oldest + 70) == 70
    assert ledger.staleness_ms(ledger.ends(), oldest + 70) == 0
    assert ledger.sent_at(0, ledger.ends()[0]) is None
    with pytest.raises(AssertionError, match="its end is"):
        ledger.slice(0, 0, ledger.ends()[0] + 1)
    assert key_of(*columns_of(1_234)) == 1_234


def test_updates_of_a_step_are_those_of_the_plain_model() -> None:
    sink = ListSink(PARTITIONS)
    ledger = UpsertLedger(sink, PARTITIONS, keys=40, seed=9)
    ledger.produce(900, batch=90)
    model, table = plain(sink), Table(ledger)
    whole = ledger.ends()
    for share in (0.2, 0.2, 0.5, 0.9, 1.0):
        before = table.ends
        updates = table.advance([int(end * share) for end in whole])
        expected = model.updates(before, table.ends)
        for partition in range(PARTITIONS):
            inserts, deletes = updates.of(partition)
            found = {(at, 0, INSERT) for at in inserts.tolist()} | {(at, 0, DELETE) for at in deletes.tolist()}
            assert found == expected.get(partition, set())
