# SPDX-License-Identifier: Apache-2.0
"""The examples of the key-coordinator design, and what docs/upsert.md promises of every kind of row, on the production
parts from candidates to reduction (tests/support/upsert_world.py)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlrun import schema_of
from upsert_model import History, UpsertModel
from upsert_world import UpsertWorld

from cremant.cluster.lowwater import LowWater
from cremant.exec.engine import Engine
from cremant.model.upsert import NullKeyPolicy, UpsertConfig
from cremant.wire.messages import EpochsReply, EpochState

BALANCE = "SELECT AccountBalance FROM accounts WHERE UserId = 'abc-12'"
AVERAGE = "SELECT avg(AccountBalance) FROM accounts"
APPEND = "SET skipUpsert = true; "


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine(threads=2, memory_bytes=256 * 1024 * 1024)
    yield made
    made.close()


def world(
    engine: Engine, columns: dict[str, str], key: tuple[str, ...], *, partitions: int = 2, **upsert: Any
) -> UpsertWorld:
    schema = msgspec.structs.replace(schema_of("accounts", columns), primary_key_columns=key)
    config = UpsertConfig(**({"comparison_columns": ("ts",)} | upsert))
    return UpsertWorld(engine, schema, config, partitions=partitions)


# --- the document, word for word ---


def test_the_example_of_accounts(engine: Engine) -> None:
    """ "Original table", "New data arrived", "New data arrived", with upsert enabled and without."""
    table = world(engine, {"UserId": "STRING", "AccountBalance": "DOUBLE", "ts": "LONG"}, ("UserId",))
    for ts, (user, balance, partition) in enumerate([("abc-12", 100, 0), ("abc-13", 102, 1)]):
        table.produce({"UserId": user, "AccountBalance": balance, "ts": ts}, partition=partition)
    table.close()
    assert table.rows(BALANCE) == [[100.0]]
    assert table.rows(AVERAGE) == [[101.0]]

    table.produce({"UserId": "abc-12", "AccountBalance": 200, "ts": 2}, partition=1)
    table.close()
    assert table.rows(BALANCE) == [[200.0]]
    assert table.rows(AVERAGE) == [[151.0]]
    assert sorted(table.rows(APPEND + BALANCE)) == [[100.0], [200.0]]
    assert table.rows(APPEND + AVERAGE) == [[134.0]]

    table.produce({"UserId": "abc-13", "AccountBalance": 300, "ts": 3}, partition=0)
    table.close()
    assert table.rows(BALANCE) == [[200.0]]
    assert table.rows(AVERAGE) == [[250.0]]
    assert sorted(table.rows(APPEND + BALANCE)) == [[100.0], [200.0]]
    assert table.rows(APPEND + AVERAGE) == [[175.5]]


QUERY = "SELECT * FROM accounts WHERE PK = 'a-1'"


@pytest.fixture(scope="module")
def rewritten(engine: Engine) -> UpsertWorld:
    """Segment 1 (partition 0): a-1 = 1, [500, 1000). Segment 2 (partition 1): a-1 = 2, [1000, nil)."""
    table = world(engine, {"PK": "STRING", "value": "INT", "ts": "LONG"}, ("PK",))
    table.produce({"PK": "a-1", "value": 1, "ts": 1}, partition=0)
    table.close(500)
    table.produce({"PK": "a-1", "value": 2, "ts": 2}, partition=1)
    table.close(1000)
    table.close(1300)
    table.versions[0].closed(1300)
    return table


def low_water(marks: dict[tuple[int, str], int]) -> LowWater:
    known = LowWater()
    by_server = itertools.groupby(sorted(marks, key=lambda pair: pair[1]), key=lambda pair: pair[1])
    for server, pairs in by_server:
        states = {str(partition): EpochState(closed=marks[partition, server]) for partition, _ in pairs}
        known.told(server, EpochsReply(instance=server, nonce="1", version=1, epochs={"i": states}))
    return known


def test_rewrite_example_1_low_water_mark_800(rewritten: UpsertWorld) -> None:
    """Servers at 1200, 1100 and 900; the last has not ingested a-1 = 2. Expected: PK = "a-1" and value = 1, whichever
    replica of segment 2 is asked."""
    versions = "SELECT PK, value, $validUntil, $validFrom FROM accounts"
    assert rewritten.rows(APPEND + versions + " WHERE value = 1") == [["a-1", 1, 1000, 500]]
    null = "SET enableNullHandling = true; "
    assert rewritten.rows(APPEND + null + versions + " WHERE value = 2") == [["a-1", 2, None, 1000]]
    assert rewritten.rows(QUERY, at=800) == [["a-1", 1, 1]]
    assert rewritten.rows(QUERY, at=800, without=1) == [["a-1", 1, 1]]


def test_rewrite_example_1_without_a_low_water_mark(rewritten: UpsertWorld) -> None:
    """ "queries dispatched to server 1 and server 3 will fetch 0 records": each by what it has itself."""
    assert rewritten.rows(QUERY, at=1200, without=1) == []


def test_rewrite_example_1_the_mark_is_that_of_the_servers_asked(rewritten: UpsertWorld) -> None:
    marks = low_water({(0, "server 1"): 1200, (1, "server 2"): 1100, (1, "server 3"): 900}).marks("i")
    for replica, epoch, value in (("server 3", 900, 1), ("server 2", 1100, 2)):
        chosen = marks.choose([(0, "server 1"), (1, replica)])
        assert chosen is not None
        assert chosen.epoch == epoch
        lagging = 1 if replica == "server 3" else None
        assert [row[2] for row in rewritten.rows(QUERY, at=epoch, without=lagging)] == [value]


def test_rewrite_example_2_low_water_mark_1200(rewritten: UpsertWorld) -> None:
    """Servers at 1200 and 1300. Expected: PK = "a-1" and value = 2."""
    chosen = low_water({(0, "server 1"): 1200, (1, "server 2"): 1300}).marks("i").choose(
        [(0, "server 1"), (1, "server 2")]
    )  # fmt: skip
    assert chosen is not None
    assert chosen.epoch == 1200
    assert rewritten.rows(QUERY, at=1200) == [["a-1", 2, 2]]


def test_the_bounds_are_half_open(rewritten: UpsertWorld) -> None:
    """The document's predicate as printed shows no row where an epoch is equal to the mark, and two in between."""
    for epoch, values in ((499, []), (500, [1]), (999, [1]), (1000, [2]), (1001, [2])):
        assert [row[2] for row in rewritten.rows(QUERY, at=epoch)] == values


# --- every kind of row ---


COLUMNS = {"k": "STRING", "v": "INT", "ts": "LONG", "gone": "BOOLEAN"}
SEEN = "SELECT k, v FROM accounts ORDER BY k, v LIMIT 100"
Produced = tuple[int, dict[str, Any]]


def seen(table: UpsertWorld, *epochs: list[Produced]) -> list[list[Any]]:
    for rows in epochs:
        for partition, row in rows:
            table.produce({"k": "a", "gone": False} | row, partition=partition)
        table.close()
    return table.rows(SEEN)


@pytest.fixture
def keyed(engine: Engine) -> UpsertWorld:
    return world(engine, COLUMNS, ("k",), delete_column="gone")


def test_a_late_row_is_kept_and_never_visible(keyed: UpsertWorld) -> None:
    assert seen(keyed, [(0, {"v": 1, "ts": 10})], [(1, {"v": 2, "ts": 5})]) == [["a", 1]]
    history = "SELECT v, $validFrom, $validUntil FROM accounts ORDER BY v"
    assert keyed.rows(APPEND + history) == [[1, 1, 2**63 - 1], [2, 2, 2]]
    assert keyed.rows(APPEND + "SELECT v FROM accounts WHERE $validUntil IS NULL") == [[1]]


def test_out_of_order_within_an_epoch_the_greatest_wins(keyed: UpsertWorld) -> None:
    rows = [(0, {"v": 1, "ts": 30}), (0, {"v": 2, "ts": 10}), (1, {"v": 3, "ts": 20})]
    assert seen(keyed, rows) == [["a", 1]]


def test_a_duplicate_changes_no_answer(keyed: UpsertWorld) -> None:
    row = {"v": 1, "ts": 10}
    assert seen(keyed, [(0, row)], [(0, row), (1, row)], [(0, row)]) == [["a", 1]]
    assert keyed.rows("SELECT count(*), sum(v) FROM accounts") == [[1, 1.0]]


def test_of_equal_comparison_values_the_higher_offset_wins_then_the_higher_partition(keyed: UpsertWorld) -> None:
    assert seen(keyed, [(0, {"v": 1, "ts": 7}), (0, {"v": 2, "ts": 7})]) == [["a", 2]]
    assert seen(keyed, [(1, {"v": 3, "ts": 7})], [(0, {"v": 4, "ts": 7})]) == [["a", 3]]


def test_deleted_keys_stay_deleted_until_something_newer_brings_them_back(keyed: UpsertWorld) -> None:
    assert seen(keyed, [(0, {"v": 1, "ts": 10})], [(1, {"v": 2, "ts": 20, "gone": True})]) == []
    assert keyed.rows("SET skipUpsertDelete = true; " + SEEN) == [["a", 2]]
    assert seen(keyed, [(0, {"v": 3, "ts": 15})]) == []
    assert seen(keyed, [(0, {"v": 4, "ts": 30})]) == [["a", 4]]
    assert keyed.rows(APPEND + "SELECT count(*) FROM accounts") == [[4]]
    assert [keyed.rows(SEEN, at=epoch) for epoch in range(5)] == [[], [["a", 1]], [], [], [["a", 4]]]


def test_null_comparison_values_are_less_than_every_other(keyed: UpsertWorld) -> None:
    assert seen(keyed, [(0, {"v": 1, "ts": -(2**63)})], [(1, {"v": 2, "ts": None})]) == [["a", 1]]
    assert seen(keyed, [(0, {"k": "b", "v": 3, "ts": None})], [(0, {"k": "b", "v": 4, "ts": None})]) == [
        ["a", 1],
        ["b", 4],
    ]


def test_rows_of_null_keys_are_rows_of_their_own_where_the_table_keeps_them(engine: Engine) -> None:
    table = world(engine, COLUMNS, ("k",), null_key=NullKeyPolicy.APPEND)
    null = {"k": None, "ts": 1}
    assert seen(table, [(0, null | {"v": 1}), (0, null | {"v": 2})], [(1, null | {"v": 3})]) == [
        ["null", 1],
        ["null", 2],
        ["null", 3],
    ]
    assert seen(table, [(0, {"k": "null", "v": 4, "ts": 0})])[-1] == ["null", 4]


def test_keys_of_several_columns_do_not_run_into_each_other(engine: Engine) -> None:
    table = world(engine, {"a": "STRING", "b": "STRING", "n": "DOUBLE", "v": "INT", "ts": "LONG"}, ("a", "b", "n"))
    nan, zero = float("nan"), 0.0
    keys = [("a", "bc", 1.0), ("ab", "c", 1.0), ("abc", "", 1.0), ("a", "bc", zero), ("a", "bc", nan)]
    for ts, (a, b, n) in enumerate([*keys, ("a", "bc", -zero), ("a", "bc", -nan)]):
        table.produce({"a": a, "b": b, "n": n, "v": ts, "ts": ts}, partition=ts % 2)
        table.close()
    assert table.rows("SELECT v FROM accounts ORDER BY v") == [[0], [1], [2], [5], [6]]


def test_comparison_columns_are_compared_one_after_the_other(engine: Engine) -> None:
    table = world(engine, COLUMNS | {"major": "INT"}, ("k",), comparison_columns=("major", "ts"))
    assert seen(table, [(0, {"v": 1, "major": 2, "ts": 1})], [(1, {"v": 2, "major": 1, "ts": 99})]) == [["a", 1]]
    assert seen(table, [(1, {"v": 3, "major": 2, "ts": 2})]) == [["a", 3]]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_order_of_arrival_never_matters(keyed: UpsertWorld, order: tuple[int, ...]) -> None:
    """The same rows at the same places, in any distribution over epochs: the last answer is the same."""
    rows = [{"v": at, "ts": ts} for at, ts in enumerate((5, 9, 9, 2))]
    assert seen(keyed, *[[(at % 2, rows[at])] for at in order])[0][1] in (1, 2)
    located = keyed.rows("SELECT $partition, $offset, v FROM accounts")
    best = max((9, at % 2, [o for o in order if o % 2 == at % 2].index(at), at) for at in (1, 2))
    assert located == [list(best[1:])]


ROWS = st.lists(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.fixed_dictionaries(
                {
                    "k": st.sampled_from(["a", "b", "c", None]),
                    "ts": st.sampled_from([None, -1, 0, 0, 7]),
                    "gone": st.booleans(),
                }
            ),
        ),
        max_size=6,
    ),
    max_size=5,
)


HISTORY = "SET skipUpsert = true; SELECT $partition, $offset, $validFrom, $validUntil FROM accounts LIMIT 1000"


@settings(max_examples=20, deadline=None)
@given(epochs=ROWS)
def test_every_epoch_shows_what_the_model_shows(engine: Engine, epochs: list[list[Produced]]) -> None:
    upsert = {"delete_column": "gone", "null_key": NullKeyPolicy.APPEND}
    table, history, ends = world(engine, COLUMNS, ("k",), partitions=3, **upsert), History(UpsertModel(), 3), [0, 0, 0]
    expected = []
    for epoch, rows in enumerate(epochs, start=1):
        for number, (partition, row) in enumerate(rows):
            value = 100 * epoch + number
            table.produce(row | {"v": value}, partition=partition)
            place = (partition, ends[partition], 0)
            ends[partition] += 1
            key = row["k"] if row["k"] is not None else place
            history.model.apply(*place, key, (row["ts"],), deleted=row["gone"], value=value)
        table.close()
        history.close(epoch, ends)
        expected.append(sorted(row.value for row in history.model.at(ends).values()))
    for epoch, values in enumerate(expected, start=1):
        assert table.rows("SELECT v FROM accounts ORDER BY v LIMIT 100", at=epoch) == [[value] for value in values]
        assert table.rows("SELECT count(*), sum(v) FROM accounts", at=epoch) == [[len(values), float(sum(values))]]
    versions = [
        [partition, offset, version.valid_from, 2**63 - 1 if version.valid_until is None else version.valid_until]
        for (partition, offset, _), version in history.versions.items()
    ]
    assert sorted(table.rows(HISTORY)) == sorted(versions)
    taken = [[epoch, len(rows)] for epoch, rows in enumerate(epochs, start=1) if rows]
    by_epoch = "SELECT $validFrom, count(*) FROM accounts GROUP BY $validFrom ORDER BY $validFrom LIMIT 100"
    assert table.rows(APPEND + by_epoch) == taken
