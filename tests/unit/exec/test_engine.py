# SPDX-License-Identifier: Apache-2.0
"""The engine's promises: deadline, memory, admission, validity, virtual columns, shapes of nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from datafusion import SessionConfig, SessionContext

from cremant.exec.engine import PANIC, Engine
from cremant.exec.stop import Stop
from cremant.exec.tables import SLICE_ROWS, spread
from cremant.model.errors import QueryError
from cremant.model.limits import QUERIES_RUNNING_MAX, QUERIES_SHORT_MAX
from cremant.model.query_codes import QueryCode
from cremant.segment.rows import RowMask
from cremant.segment.scan import Piece

SCHEMA = pa.schema(
    [
        pa.field("$offset", pa.int64(), nullable=False),
        pa.field("word", pa.string_view(), nullable=False),
        pa.field("number", pa.float64(), nullable=False),
    ]
)


def batch(first: int, rows: int) -> pa.RecordBatch:
    offsets = np.arange(first, first + rows)
    words = pa.array([f"word-{offset % 1000}" for offset in offsets.tolist()]).cast(pa.string_view())
    return pa.RecordBatch.from_arrays([pa.array(offsets), words, pa.array(offsets / 4)], schema=SCHEMA)


def piece(
    key: str, *batches: pa.RecordBatch, partition: int = 0, validity: tuple[RowMask | None, ...] | None = None
) -> Piece:
    return Piece(key, partition, f"segment-{key}", batches, sum(b.num_rows for b in batches), validity, True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine(threads=2, memory_bytes=512 * 1024 * 1024)
    yield made
    made.close()


@pytest.fixture(scope="module")
def large() -> list[Piece]:
    """8 M rows, by reference: one batch many times."""
    part = batch(0, 200_000)
    return [piece(f"p{index}", *[part] * 10) for index in range(4)]


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def test_rows_of_all_pieces_are_there_once(engine: Engine) -> None:
    pieces = [piece("a", batch(0, 10), batch(10, 5)), piece("b", batch(15, 85))]
    result = engine.run(
        'SELECT count(*) AS n, sum("$offset") AS s FROM t', pieces, ["$offset"], SCHEMA, deadline_s=soon()
    )
    assert result.table.to_pylist() == [{"n": 100, "s": sum(range(100))}]
    assert result.stats.rows_scanned == 100


def test_a_query_without_columns_still_counts_rows(engine: Engine) -> None:
    result = engine.run("SELECT count(*) AS n FROM t", [piece("a", batch(0, 7))], [], SCHEMA, deadline_s=soon())
    assert result.table.to_pylist() == [{"n": 7}]


def test_no_pieces_give_no_rows_but_names_and_types(engine: Engine) -> None:
    result = engine.run("SELECT word, number AS x FROM t", [], ["word", "number"], SCHEMA, deadline_s=soon())
    assert result.table.num_rows == 0
    assert result.table.schema.names == ["word", "x"]
    assert result.table.schema.field("x").type == pa.float64()


def test_rows_that_validity_leaves_out_do_not_exist(engine: Engine) -> None:
    flags = np.arange(12) % 3 != 0
    validity = (RowMask(flags[:5], 3), RowMask(flags[5:], 5), None)
    pieces = [piece("a", batch(0, 5), batch(5, 7), batch(12, 2), validity=validity), piece("b", batch(100, 2))]
    result = engine.run('SELECT "$offset" AS o FROM t', pieces, ["$offset"], SCHEMA, deadline_s=soon())
    wanted = [offset for offset in range(12) if offset % 3 != 0] + [12, 13, 100, 101]
    assert sorted(result.table.column("o").to_pylist()) == wanted


def test_virtual_columns_name_the_piece_of_each_row(engine: Engine) -> None:
    pieces = [piece("a", batch(0, 2), batch(2, 1), partition=3), piece("b", batch(9, 1), partition=4)]
    columns = ["$offset", "$segmentName", "$partition", "$docId", "$hostName"]
    sql = 'SELECT "$offset", "$segmentName", "$partition", "$docId", "$hostName" FROM t ORDER BY 1'
    result = engine.run(sql, pieces, columns, SCHEMA, deadline_s=soon(), constants={"$hostName": "Server_1"})
    assert [tuple(row.values()) for row in result.table.to_pylist()] == [
        (0, "segment-a", 3, 0, "Server_1"),
        (1, "segment-a", 3, 1, "Server_1"),
        (2, "segment-a", 3, 2, "Server_1"),
        (9, "segment-b", 4, 0, "Server_1"),
    ]


def test_matched_rows_are_counted_behind_the_filter(engine: Engine) -> None:
    result = engine.run(
        'SELECT count(*) AS n FROM t WHERE "$offset" < 30', [piece("a", batch(0, 100))], ["$offset"], SCHEMA,
        deadline_s=soon(),
    )  # fmt: skip
    assert (result.stats.rows_scanned, result.stats.rows_matched) == (100, 30)


def test_a_query_past_its_deadline_is_cancelled_and_stops_burning_cpu(engine: Engine, large: list[Piece]) -> None:
    sql = "SELECT word, number, count(DISTINCT number * sqrt(number)) AS n FROM t GROUP BY word, number"
    began_s = time.monotonic()
    with pytest.raises(QueryError) as caught:
        engine.run(sql, large, ["word", "number"], SCHEMA, deadline_s=soon(0.03))
    assert caught.value.code == QueryCode.EXECUTION_TIMEOUT
    assert time.monotonic() - began_s < 30
    assert any(_cpu_of_half_a_second() < 0.3 for _ in range(20))


def _cpu_of_half_a_second() -> float:
    before = sum(os.times()[:2])
    time.sleep(0.5)
    return sum(os.times()[:2]) - before


def test_a_deadline_in_the_past_runs_nothing(engine: Engine) -> None:
    with pytest.raises(QueryError) as caught:
        engine.run("SELECT 1 FROM t", [piece("a", batch(0, 1))], ["word"], SCHEMA, deadline_s=time.monotonic() - 1)
    assert caught.value.code == QueryCode.EXECUTION_TIMEOUT


def test_a_query_that_does_not_fit_fails_alone(large: list[Piece]) -> None:
    small = Engine(threads=2, memory_bytes=4 * 1024 * 1024)
    try:
        for sql in ("SELECT * FROM t", 'SELECT word, "$offset" AS o FROM t ORDER BY number LIMIT 1000000'):
            with pytest.raises(QueryError) as caught:
                small.run(sql, large, SCHEMA.names, SCHEMA, deadline_s=soon())
            assert caught.value.code == QueryCode.SERVER_RESOURCE_LIMIT
        result = small.run("SELECT count(*) AS n FROM t", large, [], SCHEMA, deadline_s=soon())
        assert result.table.to_pylist() == [{"n": 8_000_000}]
    finally:
        small.close()


def test_a_query_that_cannot_be_computed_is_a_query_error_without_a_stack_trace(engine: Engine) -> None:
    for sql in ("SELECT nothing FROM t", "SELECT CAST(word AS BIGINT) AS x FROM t", "SELEC"):
        with pytest.raises(QueryError) as caught:
            engine.run(sql, [piece("a", batch(0, 3))], ["word"], SCHEMA, deadline_s=soon())
        assert caught.value.code == QueryCode.QUERY_EXECUTION
        assert "\n" not in caught.value.message


def _panic(session: SessionContext, sql: str) -> None:
    """A real panic of DataFusion, before anything runs."""
    SessionConfig().with_batch_size(0)


def test_a_panic_of_datafusion_is_an_error_of_the_query(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("cremant.exec.engine.register", _panic)
        with pytest.raises(QueryError) as caught:
            engine.run("SELECT 1 AS one FROM t", [], [], SCHEMA, deadline_s=soon())
        assert type(caught.value.__cause__).__name__ == PANIC
        assert caught.value.code == QueryCode.QUERY_EXECUTION
        assert "\n" not in caught.value.message
    engine.run("SELECT 1 AS one FROM t", [], [], SCHEMA, deadline_s=soon())


def test_small_answers_are_collected_while_another_query_holds_all_the_memory_for_answers() -> None:
    engine = Engine(threads=1, memory_bytes=16 * 1024 * 1024)
    rows = pa.table({"n": pa.array(range(200_000), pa.int64())})
    deadline_s = time.monotonic() + 60
    other = engine._held.share()
    other.add(pa.record_batch([pa.array(range(512 * 1024), pa.int64())], ["n"]))
    assert engine._held.left_bytes == 0
    assert engine.reduce("SELECT n FROM partials LIMIT 1000", [rows], deadline_s=deadline_s).num_rows == 1000
    with pytest.raises(QueryError) as caught:
        engine.reduce("SELECT n FROM partials", [rows], deadline_s=deadline_s)
    assert caught.value.code == QueryCode.SERVER_RESOURCE_LIMIT
    other.give_back()
    assert engine.reduce("SELECT n FROM partials", [rows], deadline_s=deadline_s).num_rows == 200_000
    assert engine._held.left_bytes == 4 * 1024 * 1024
    engine.close()


def test_a_query_whose_turn_does_not_come_says_so(engine: Engine) -> None:
    with contextlib.ExitStack() as others:
        for _ in range(QUERIES_RUNNING_MAX):
            others.enter_context(engine._admission.enter(Stop(soon()), short=False))
        for _ in range(QUERIES_SHORT_MAX):
            others.enter_context(engine._admission.enter(Stop(soon()), short=True))
        with pytest.raises(QueryError) as caught:
            engine.run("SELECT 1 AS one FROM t", [], [], SCHEMA, deadline_s=soon(0.1))
    assert caught.value.code == QueryCode.QUERY_SCHEDULING_TIMEOUT
    engine.run("SELECT 1 AS one FROM t", [], [], SCHEMA, deadline_s=soon())


def test_reduce_sees_the_answers_of_all_servers(engine: Engine) -> None:
    partials = [pa.table({"p0": [1, 2]}), pa.table({"p0": [4]}), pa.table({"p0": pa.array([], pa.int64())})]
    table = engine.reduce("SELECT sum(p0) AS s FROM partials", partials, deadline_s=soon())
    assert table.to_pylist() == [{"s": 7}]


def test_reduce_takes_answers_of_servers_that_know_different_columns_to_be_without_nulls(engine: Engine) -> None:
    known = pa.table({"p0": [1, 2]}, schema=pa.schema([pa.field("p0", pa.int64(), nullable=False)]))
    unknown = pa.table({"p0": pa.array([4, None], pa.int64())})
    for partials in ([known, unknown], [unknown, known]):
        table = engine.reduce("SELECT sum(p0) AS s, count(*) AS n FROM partials", partials, deadline_s=soon())
        assert table.to_pylist() == [{"s": 7, "n": 4}]


def test_slices_come_newest_first_and_lose_no_row() -> None:
    batches = [batch(0, SLICE_ROWS + 5), batch(SLICE_ROWS + 5, 3)]
    parts = spread(batches, SCHEMA, 2)
    offsets = [row for part in parts for piece in part for row in piece.column(0).to_pylist()]
    assert sorted(offsets) == list(range(SLICE_ROWS + 8))
    assert parts[0][0].column(0)[0].as_py() == SLICE_ROWS + 5


@pytest.mark.filterwarnings("error")
def test_a_closed_engine_leaves_nobody_waiting(large: list[Piece]) -> None:
    """Neither a query under way, nor one that comes too late; and nothing that was begun is left to the collector."""
    engine = Engine(threads=2, memory_bytes=512 * 1024 * 1024)
    sql = "SELECT word, number, count(DISTINCT number * sqrt(number)) AS n FROM t GROUP BY word, number"
    asked: list[int] = []

    def ask() -> None:
        with pytest.raises(QueryError) as raised:
            engine.run(sql, large, ["word", "number"], SCHEMA, deadline_s=soon(120))
        asked.append(raised.value.code)

    thread = threading.Thread(target=ask)
    thread.start()
    while not asyncio.all_tasks(engine._loop):
        time.sleep(0.005)
    engine.close()
    thread.join(30)
    assert not thread.is_alive()
    ask()
    assert asked == [QueryCode.QUERY_CANCELLED] * 2
    gc.collect()


def test_a_query_that_begins_while_the_engine_closes_is_cancelled(
    large: list[Piece], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the loop's end and its closing it still takes what nobody will carry out."""
    engine = Engine(threads=2, memory_bytes=512 * 1024 * 1024)
    codes: list[int] = []

    def ask() -> None:
        with pytest.raises(QueryError) as raised:
            engine.run("SELECT word, count(*) AS n FROM t GROUP BY word", large, ["word"], SCHEMA, deadline_s=soon(120))
        codes.append(raised.value.code)

    late = threading.Thread(target=ask, daemon=True)
    join = engine._thread.join

    def join_and_be_late(timeout: float) -> None:
        join(timeout)
        late.start()
        late.join(5)

    monkeypatch.setattr(engine._thread, "join", join_and_be_late)
    engine.close()
    late.join(10)
    assert codes == [QueryCode.QUERY_CANCELLED]
