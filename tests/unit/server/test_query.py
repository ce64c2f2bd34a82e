# SPDX-License-Identifier: Apache-2.0
"""The query endpoint's service: real engine, real tail; what it counts, and what it refuses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from cremant.epoch import format as records
from cremant.exec.engine import Engine
from cremant.log.memory import MemoryLog
from cremant.model.cluster import TableRecord
from cremant.model.query_codes import QueryCode
from cremant.model.schema import DataType, FieldSpec, FieldType
from cremant.segment.tail import SpillQuota
from cremant.server.partition import Partition, PartitionId
from cremant.server.query import QueryService
from cremant.server.table import HostedTable
from cremant.sql.binder import TableInfo
from cremant.sql.planner import Planner
from cremant.wire.codec import decode
from cremant.wire.messages import PruneTerm, ServerAnswer, ServerQuery, TailRequest

INCARNATION = "00000000000000aa"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine(threads=2, memory_bytes=256 * 1024 * 1024)
    yield made
    made.close()


@pytest.fixture
def tables(kit: Any, tmp_path: Path) -> Iterator[dict[str, HostedTable]]:
    log = MemoryLog(lambda: int(time.time() * 1000))
    epochs = kit.EpochLog(log).create()
    epochs.write(20_000)
    epochs.write(20_000)
    table = HostedTable(kit.table_record())
    partition = Partition(PartitionId("trips", INCARNATION, 0), kit.START, tmp_path / "tail", SpillQuota())
    while partition.turn(log, 1):
        pass
    table.partitions[0] = partition
    table.open[0] = kit.open_segment_metadata(0, 0, kit.START, ("me",))
    yield {"trips": table}
    partition.close()


def query(sql: str, **changes: Any) -> ServerQuery:
    known: dict[str, Any] = {
        "request_id": "q", "table": "trips", "incarnation": INCARNATION, "sql": sql, "columns": ("city", "fare"),
        "segments": (), "tails": (TailRequest(partition=0, from_offset=0),), "budget_ms": 10_000,
    }  # fmt: skip
    return ServerQuery(**(known | changes))


def ask(service: QueryService, *queries: ServerQuery) -> list[tuple[ServerAnswer, pa.Table | None]]:
    async def all_at_once() -> list[bytes]:
        return await asyncio.gather(*(service.answer(one) for one in queries))

    answers = []
    for body in asyncio.run(all_at_once()):
        length = int.from_bytes(body[:4], "big")
        header = decode(body[4 : 4 + length], ServerAnswer)
        rows = body[4 + length :]
        answers.append((header, pa.ipc.open_stream(rows).read_all() if rows else None))
    return answers


def test_an_answer_brings_rows_watermarks_and_pinots_counters(tables: Any, engine: Engine) -> None:
    service = QueryService(tables, engine)
    [(header, rows)] = ask(
        service, query("SELECT city, sum(fare) s FROM t WHERE fare < 10 GROUP BY city ORDER BY city")
    )
    assert rows is not None
    assert rows.to_pylist()[0] == {"city": "Berlin", "s": 12}
    assert header.docs_total == 40_000
    assert header.docs_scanned == 10
    assert header.segments_queried == header.segments_processed == header.segments_matched == 1
    [partition] = header.partitions
    assert (partition.covered.first, partition.covered.next) == (0, 40_000)
    assert partition.watermark.epoch == 2
    service.close()


def test_pruned_rows_count_as_documents_but_are_not_scanned(tables: Any, engine: Engine) -> None:
    service = QueryService(tables, engine)
    term = PruneTerm(column="fare", op=">=", values=(30_000,))
    [(header, rows)] = ask(service, query("SELECT count(*) c FROM t WHERE fare >= 30000", prune=(term,)))
    assert rows is not None
    assert rows["c"].to_pylist() == [10_000]
    assert header.docs_total == 40_000
    assert header.entries_scanned_in_filter == 20_000
    nothing = PruneTerm(column="fare", op="<", values=(0,))
    [(header, rows)] = ask(service, query("SELECT count(*) c FROM t WHERE fare < 0", prune=(nothing,)))
    assert rows is not None
    assert rows["c"].to_pylist() == [0]
    assert (header.segments_pruned, header.segments_processed, header.docs_total) == (1, 0, 40_000)
    assert not header.partitions[0].processed
    service.close()


def test_another_incarnation_is_refused_and_everything_named_as_missing(tables: Any, engine: Engine) -> None:
    service = QueryService(tables, engine)
    [(header, rows)] = ask(service, query("SELECT 1 FROM t", incarnation="0" * 16, segments=("s",)))
    assert rows is None
    assert header.error_code == QueryCode.SERVER_TABLE_MISSING
    assert header.missing_segments == ("s",)
    assert header.behind_partitions == (0,)
    service.close()


def test_a_query_with_a_column_that_is_on_its_way_waits_for_it(tables: Any, engine: Engine, kit: Any) -> None:
    service = QueryService(tables, engine)
    added = FieldSpec(name="tip", data_type=DataType.LONG, field_type=FieldType.METRIC, default_null_value=3)
    schema = msgspec.structs.replace(kit.SCHEMA, fields=(*kit.SCHEMA.fields, added))
    after = msgspec.structs.replace(kit.table_record(), table_schema=schema)

    async def run() -> bytes:
        asked = asyncio.create_task(service.answer(query("SELECT sum(tip) s FROM t", columns=("tip",))))
        await asyncio.sleep(0.1)
        assert not asked.done()
        tables["trips"].update(after)
        return await asked

    header, rows = _unpacked(asyncio.run(run()))
    assert (header.error_code, rows["s"][0].as_py()) == (0, 120_000)
    service.close()


def test_servers_of_an_older_and_a_newer_schema_answer_one_query_together(
    tables: dict[str, HostedTable], engine: Engine, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column is added; one server has heard of it and the other has not, whichever the broker belongs to."""
    monkeypatch.setattr("cremant.server.query.SCHEMA_WAIT_S", 0.02)
    before = kit.table_record()
    added = FieldSpec(name="tip", data_type=DataType.LONG, field_type=FieldType.METRIC, default_null_value=3)
    wider = msgspec.structs.replace(kit.SCHEMA, fields=(added, *kit.SCHEMA.fields))
    after = msgspec.structs.replace(
        before, table_schema=wider, config=msgspec.structs.replace(before.config, null_handling=True)
    )
    old, new = HostedTable(before), HostedTable(after)
    for table in (old, new):
        table.partitions, table.open = tables["trips"].partitions, tables["trips"].open
    services = [QueryService({"trips": table}, engine) for table in (old, new)]

    def asked(sql: str, record: TableRecord) -> list[tuple[ServerAnswer, pa.Table | None]]:
        info = TableInfo("trips", record.table_schema, stores_nulls=record.config.null_handling)
        plan = Planner().plan(sql, "", lambda name: info, 0)
        reduced.append(plan.reduce_sql or "")
        one = query(plan.server_sql, columns=plan.columns, prune=plan.prune, shortcut=plan.shortcut)
        return [ask(service, one)[0] for service in services]

    def united(answers: list[tuple[ServerAnswer, pa.Table | None]]) -> list[Any]:
        parts = [rows for _, rows in answers if rows is not None]
        assert len(parts) == len(services)
        table = engine.reduce(reduced[-1], parts, deadline_s=time.monotonic() + 30)
        return [list(row.values()) for row in table.to_pylist()]

    reduced: list[str] = []
    common = "select city, count(*), sum(fare) from trips where fare < 8 group by city order by city limit 2"
    for record in (before, after):
        assert united(asked(common, record)) == [["Berlin", 4, 8.0], ["Köln", 4, 12.0]]
    for sql in ("select tip, count(*) from trips group by tip", "select count(*) from trips where city is null",
                "select * from trips order by fare"):  # fmt: skip
        (refused, nothing), (_, rows) = asked(sql, after)
        assert (refused.error_code, nothing) == (QueryCode.SERVER_TABLE_MISSING, None)
        assert "on this server yet" in refused.error
        assert refused.behind_partitions == (0,)
        assert rows is not None
    old.update(after)
    assert united(asked("select tip, sum(tip), count(*) from trips where tip is null group by tip", after)) == [
        [3, 240_000.0, 80_000]
    ]
    for service in services:
        service.close()


def test_a_query_that_cannot_run_fails_alone_with_pinots_code(tables: Any, engine: Engine) -> None:
    service = QueryService(tables, engine)
    good, bad = ask(service, query("SELECT count(*) c FROM t"), query("SELECT nosuch FROM t"))
    assert good[0].error_code == 0
    assert bad[0].error_code == QueryCode.QUERY_EXECUTION
    assert bad[1] is None
    service.close()


def test_a_slow_query_ends_at_its_deadline(tables: Any, engine: Engine) -> None:
    service = QueryService(tables, engine)
    began_s = time.monotonic()
    text = "fn_repeat(city, '', 25)"
    sql = f"SELECT count(*) c FROM t WHERE levenshtein(fn_comparable({text}, reverse({text})), reverse({text})) > 7"
    [(header, _)] = ask(service, query(sql, budget_ms=300))
    assert header.error_code == QueryCode.EXECUTION_TIMEOUT
    assert time.monotonic() - began_s < 5
    service.close()


def test_past_the_queue_a_query_is_refused_at_once(
    tables: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cremant.server.query.QUERIES_WAITING_MAX", 2)
    monkeypatch.setattr("cremant.server.query.QUERIES_RUNNING_MAX", 1)
    service = QueryService(tables, engine)
    answers = ask(service, *[query("SELECT city, count(*) c FROM t GROUP BY city") for _ in range(10)])
    codes = [header.error_code for header, _ in answers]
    assert set(codes) <= {0, QueryCode.SERVER_OUT_OF_CAPACITY}
    assert codes.count(0) >= 2
    assert QueryCode.SERVER_OUT_OF_CAPACITY in codes
    service.close()


def _tail(not_before: int) -> TailRequest:
    return TailRequest(partition=0, from_offset=0, not_before=not_before)


def test_a_query_waits_for_the_rows_it_must_see_and_wakes_as_they_come(tables: Any, engine: Engine, kit: Any) -> None:
    """It waits without a slot: as many queries as there are slots wait, and another one is answered meanwhile."""
    service = QueryService(tables, engine)
    partition = tables["trips"].partitions[0]
    writer = kit.EpochLog(MemoryLog(lambda: int(time.time() * 1000))).create()
    writer.ends, writer.closed, writer.epoch = [40_000], [40_000], 2

    async def run() -> list[tuple[bytes, float]]:
        began_s = time.monotonic()

        async def timed(one: ServerQuery) -> tuple[bytes, float]:
            return await service.answer(one), time.monotonic() - began_s

        waiting = [
            asyncio.create_task(timed(query("SELECT count(*) c FROM t", tails=(_tail(40_010),), request_id=str(n))))
            for n in range(service_slots)
        ]
        other = await timed(query("SELECT count(*) c FROM t"))
        assert not any(task.done() for task in waiting)
        partition.tail.append(_rows(writer, 10), 40_010)
        partition.progress.reached(40_010)
        return [other, *await asyncio.gather(*waiting)]

    service_slots = 8
    answers = [_unpacked(body) for body, _ in asyncio.run(run())]
    assert [rows["c"][0].as_py() for _, rows in answers] == [40_000] + [40_010] * service_slots
    assert all(header.behind_partitions == () for header, _ in answers)


def test_queries_that_wait_for_rows_do_not_refuse_those_that_need_none(
    tables: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cremant.server.query.QUERIES_WAITING_MAX", 2)
    service = QueryService(tables, engine)

    async def run() -> list[bytes]:
        late = [
            asyncio.create_task(
                service.answer(
                    query("SELECT count(*) c FROM t", tails=(_tail(50_000),), request_id=str(n), budget_ms=1_000)
                )
            )
            for n in range(3)
        ]
        await asyncio.sleep(0.05)
        other = await service.answer(query("SELECT count(*) c FROM t"))
        return [other, *await asyncio.gather(*late)]

    codes = [_unpacked(body)[0].error_code for body in asyncio.run(run())]
    assert codes == [0, 0, 0, QueryCode.SERVER_OUT_OF_CAPACITY]
    service.close()


def test_rows_that_do_not_come_in_time_leave_the_partition_behind_and_the_rest_is_answered(
    tables: Any, engine: Engine
) -> None:
    service = QueryService(tables, engine)
    [(header, rows)] = ask(service, query("SELECT count(*) c FROM t", tails=(_tail(40_001),), budget_ms=300))
    assert header.error_code == 0
    assert header.behind_partitions == (0,)
    assert rows is not None
    assert rows["c"][0].as_py() == 0
    assert header.elapsed_ms >= 200


def test_waiting_ends_when_the_partition_does(tables: Any, engine: Engine) -> None:
    service = QueryService(tables, engine)

    async def run() -> bytes:
        task = asyncio.create_task(service.answer(query("SELECT count(*) c FROM t", tails=(_tail(50_000),))))
        await asyncio.sleep(0.05)
        tables["trips"].partitions[0].close()
        return await task

    began_s = time.monotonic()
    header, _ = _unpacked(asyncio.run(run()))
    assert header.behind_partitions == (0,)
    assert time.monotonic() - began_s < 5


def test_rows_that_are_there_are_not_waited_for(tables: Any, engine: Engine) -> None:
    partition = tables["trips"].partitions[0]
    while partition.progress._offset < 40_000:
        partition.progress.reached(partition.tail.snapshot.next_offset)
    [(header, rows)] = ask(QueryService(tables, engine), query("SELECT count(*) c FROM t", tails=(_tail(40_000),)))
    assert header.behind_partitions == ()
    assert rows is not None
    assert rows["c"][0].as_py() == 40_000


def _rows(writer: Any, rows: int) -> pa.RecordBatch:
    """Rows as a reader would take them from the log."""
    writer.start()
    topic = writer.log.topics()[0].name
    first = writer.log.latest(topic, 0)
    writer.block(0, rows)
    batch = writer.log.reader(topic, 0, first).read(max_messages=1, max_bytes=1_000_000)
    record = records.decode(batch.values[0].as_buffer(), INCARNATION)
    return record.batch


def _unpacked(body: bytes) -> tuple[ServerAnswer, Any]:
    length = int.from_bytes(body[:4], "big")
    rows = body[4 + length :]
    return decode(body[4 : 4 + length], ServerAnswer), pa.ipc.open_stream(rows).read_all() if rows else None
